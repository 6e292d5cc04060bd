"""The options that all kernels share, and what is refused of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from numpyro_sgmcmc import checks

__all__ = ["local_options"]


def _takes(name: str, fn: Callable, keywords: Sequence[str]) -> None:
    """Refuse a function that cannot be called with these keywords."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some built-in functions have none
        return
    try:
        signature.bind(**dict.fromkeys(keywords))
    except TypeError as error:
        raise ValueError(
            f"`{name}` is called with the keywords {', '.join(keywords)}, but {error}."
        ) from None


def local_options(
    model: Any, gibbs_fn: Any, gibbs_sites: Any, collect_locals: bool | Sequence[str]
) -> None:
    """Refuse options for local sites that cannot be meant."""
    if isinstance(gibbs_sites, str) or not all(isinstance(n, str) for n in gibbs_sites):
        raise ValueError(f"`gibbs_sites` is {gibbs_sites!r}, but must be a list of names of sites.")
    if (gibbs_fn is None) != (len(gibbs_sites) == 0):
        raise ValueError(
            "`gibbs_fn` and `gibbs_sites` go together: a function, and the names of the sites "
            "that it draws."
        )
    if gibbs_fn is not None:
        checks.function("gibbs_fn", gibbs_fn)
        _takes("gibbs_fn", gibbs_fn, ("rng_key", "gibbs_sites", "hmc_sites", "rows"))
    if isinstance(collect_locals, str) or not (
        isinstance(collect_locals, bool) or all(isinstance(n, str) for n in collect_locals)
    ):
        raise ValueError(
            f"`collect_locals` is {collect_locals!r}, but must be True, False or a list of names "
            "of sites."
        )
    if model is None and (gibbs_fn is not None or collect_locals):
        raise ValueError("`gibbs_fn` and `collect_locals` need a kernel made from a model.")
