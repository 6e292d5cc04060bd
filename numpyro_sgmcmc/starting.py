"""Where chains and the warm-up start: the user's values, or the initialisation strategy's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax import random
from jax.flatten_util import ravel_pytree

from numpyro_sgmcmc import options
from numpyro_sgmcmc.adaptation import Surface
from numpyro_sgmcmc.arguments import Arguments, is_traced
from numpyro_sgmcmc.target import Target

__all__ = ["check_start", "first_positions"]

_STARTS = 20


def check_start(
    init_params: Any, target: Target, arguments: Arguments, num_chains: int | None
) -> Any:
    """``init_params`` as they are, if chains can start there.

    :param num_chains: chains whose values are stacked along a first axis; None for one chain's.
    :raises ValueError: for other shapes than the sites', or where the density is not finite.
    """
    if init_params is None:
        return None
    options.check_init_params(init_params, target, num_chains)
    if is_traced(init_params):
        return init_params
    surface = Surface.on_some_rows(target, arguments)
    for chain in range(num_chains or 1):
        one = jax.tree.map(lambda x, c=chain: x[c], init_params) if num_chains else init_params
        position = ravel_pytree(one)[0]
        if not surface.is_finite(np.asarray(position)):
            of_chain = f" of chain {chain}" if num_chains else ""
            raise ValueError(
                f"Log density or gradient is not finite at the `init_params`{of_chain}. "
                + target.explain(position, arguments)
            )
    return init_params


def first_positions(
    target: Target, arguments: Arguments, init_params: Any, is_batch: bool
) -> Iterator[np.ndarray]:
    """The user's start where it is known already, then some by the initialisation strategy."""
    if init_params is not None and not is_traced(init_params):
        first = jax.tree.map(lambda x: x[0], init_params) if is_batch else init_params
        yield np.asarray(ravel_pytree(first)[0])
    start = jax.jit(target.start)
    for seed in range(_STARTS):
        yield np.asarray(start(random.key(seed), arguments))
