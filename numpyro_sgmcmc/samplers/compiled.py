"""Functions of the posterior, compiled so that large arrays are held and not copied."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array
from numpyro.infer.gibbs import GIBBS_SITES_KWARG

from numpyro_sgmcmc.checks import InvalidArgumentError
from numpyro_sgmcmc.data.arguments import Arguments, DeviceArrayCache
from numpyro_sgmcmc.data.host import unwrap_callback_errors
from numpyro_sgmcmc.data.progress import show_data_passes
from numpyro_sgmcmc.posterior.target import Potential

__all__ = ["call_with_cached_arrays", "full_gradients"]


@partial(jax.jit, static_argnames="fn")
def call_with_cached_arrays(fn: Callable, z: Any, cached_arguments: Arguments) -> Any:
    """``fn`` of unconstrained values and the arguments."""
    return fn(z, cached_arguments.dereference())


@partial(jax.jit, static_argnames="potential")
def _full_gradients_jitted(
    potential: Potential,
    positions: Array,
    cached_arguments: Arguments,
    conditioning_values: dict[str, Array] | None,
) -> Array:
    arguments = cached_arguments.dereference()

    def one(x: tuple[Array, dict[str, Array] | None]) -> Array:
        position, values = x
        if values is None:
            return potential.full_gradient(position, arguments)
        kwargs = {**arguments.kwargs, GIBBS_SITES_KWARG: values}
        return potential.full_gradient(position, Arguments(arguments.args, kwargs))

    return jax.lax.map(one, (positions, conditioning_values))


def full_gradients(
    potential: Potential,
    array_cache: DeviceArrayCache,
    positions: Array,
    arguments: Arguments,
    conditioning_values: dict[str, Array] | None = None,
) -> Array:
    """Gradients on all rows at flat positions, one after the other; shape ``(m, d)``.

    :param conditioning_values: for a block of Gibbs, values of the other sites at each position, ``(m, ...)``.
    :raises ValueError: for a model with local sites.
    """
    if potential.local_latents is not None:
        raise InvalidArgumentError(
            "With latent sites inside the subsampled plate the globals alone have no gradient "
            "to take on all rows."
        )
    shown = show_data_passes("gradients on all rows", arguments.host_arrays, len(positions))
    with unwrap_callback_errors(arguments.host_arrays), shown:
        return jax.block_until_ready(
            _full_gradients_jitted(
                potential, positions, array_cache.cache_arrays(arguments), conditioning_values
            )
        )
