"""NumPyro's initialisation strategies, refused where they give a site what it cannot have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpyro.infer import init_to_uniform

from numpyro_sgmcmc.checks import InvalidArgumentError, summarise_error

__all__ = ["get_uniform_radius", "validate_init_strategy"]


def validate_init_strategy(init_strategy: Callable) -> Callable:
    """The strategy as a function of a site, which says so where it gives what a site cannot have.

    :raises ValueError: for what is no strategy.
    """
    strategy = init_strategy
    if not isinstance(init_strategy, partial):
        try:
            strategy = init_strategy()
        except TypeError as error:
            raise InvalidArgumentError(
                "`init_strategy` must be one of NumPyro's, such as init_to_median, or a function "
                f"that returns one when called without a site, but: {summarise_error(error)}."
            ) from error
    if not callable(strategy):
        raise InvalidArgumentError(
            f"`init_strategy` returns {strategy!r} when called without a site, but must return a "
            "function of the site."
        )

    def checked(site: Any) -> Any:
        value = strategy(site)
        if value is None or site["type"] != "sample" or site["is_observed"]:
            return value
        expected = site["fn"].shape(site["kwargs"].get("sample_shape", ()))
        if np.shape(value) != expected or isinstance(value, str):
            raise InvalidArgumentError(
                f"`init_strategy` gives site '{site['name']}' a value of shape {np.shape(value)}, "
                f"but it has shape {expected}."
            )
        return value

    return strategy if get_uniform_radius(strategy) is not None else checked


def get_uniform_radius(strategy: Callable) -> float | None:
    """The radius of the uniform strategy, which needs no run of the model; None for others."""
    if isinstance(strategy, partial) and strategy.func is init_to_uniform:
        return strategy.keywords["radius"]
    return None
