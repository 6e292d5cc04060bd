"""What NumPyro hands to a kernel: keys of one chain or several, and the model's arguments."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.infer.gibbs import GIBBS_SITES_KWARG

from numpyro_sgmcmc.checks import InvalidArgumentError
from numpyro_sgmcmc.data.arguments import Arguments, is_traced
from numpyro_sgmcmc.data.shards import Shards
from numpyro_sgmcmc.posterior.handlers import sample_prior_values

__all__ = ["concretize_arguments", "escape_trace", "find_chain_mesh_axis", "has_chain_axis"]


def has_chain_axis(rng_key: Array) -> bool:
    """Whether the key is one a chain: raw keys have one more axis than typed ones."""
    typed = jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key)
    return jnp.ndim(rng_key) == (1 if typed else 2)


def escape_trace(rng_key: Array) -> AbstractContextManager[None]:
    """Leave the trace (pmap's, vmap's, jit's) in which a kernel is initialised, if it is in one."""
    return jax.ensure_compile_time_eval() if is_traced(rng_key) else nullcontext()


def find_chain_mesh_axis(shards: Shards | None, num_chains: int) -> str | None:
    """The mesh axis over which chains are spread, if they are."""
    # Several processes could not read each other's draws.
    if shards is None or shards.chain_axis is None or jax.process_count() > 1:
        return None
    axis = shards.chain_axis
    return axis if num_chains % shards.mesh.shape[axis] == 0 else None


def concretize_arguments(model: Callable | None, arguments: Arguments) -> Arguments:
    """The arguments with concrete arrays, which the shared part of the warm-up needs.

    :raises ValueError: where the data are traced.
    """
    if arguments.is_concrete:
        return arguments
    others = {k: v for k, v in arguments.kwargs.items() if k != GIBBS_SITES_KWARG}
    if not Arguments(arguments.args, others).is_concrete or len(others) == len(arguments.kwargs):
        raise InvalidArgumentError(
            "The model's arguments are being traced by jit, vmap or pmap. Call MCMC.run "
            "outside of it, or let the transformed function close over the data."
        )
    # Under pmap Gibbs conditions on traced prior draws; ours serve to adapt as well.
    assert model is not None
    names = list(arguments.kwargs[GIBBS_SITES_KWARG])
    empty = Arguments(arguments.args, {**others, GIBBS_SITES_KWARG: {}})
    drawn = sample_prior_values(model, empty, names)
    return Arguments(arguments.args, {**others, GIBBS_SITES_KWARG: drawn})
