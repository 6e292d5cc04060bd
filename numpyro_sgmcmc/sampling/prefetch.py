"""Blocks of rows in a chain's state: read a few iterations ahead, served a step at a time.

A call to the host costs as much as dozens of steps, so that rows come for several iterations at
once. Which ones follows from the chain's key alone.

Which rows the next iterations need, and their reading, in blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_sgmcmc.data.row_proxies import RowLookup, read_lookups
from numpyro_sgmcmc.sampling.state import (
    ChainConfig,
    Keys,
    PrefetchBuffer,
    PrefetchCursor,
    SGMCMCState,
    get_key_data,
    sample_iteration_indices,
)

__all__ = [
    "attach_prefetch_buffer",
    "compute_buffer_length",
    "create_prefetch_buffer",
    "refill_prefetch_buffer",
]

_MAX_PREFETCH_BUFFER_BYTES = 2**23


_MAX_PREFETCHED_ITERATIONS = 64


def create_prefetch_buffer(
    lookups: tuple[RowLookup, ...],
    index_structs: Mapping[str, Any],
    num_chains: int,
    cursor: PrefetchCursor,
) -> PrefetchBuffer:
    """A chain's block before anything is read, used up.

    :param index_structs: shape and type of the rows of one iteration of one chain, by plate.
    :param num_chains: chains that read together.
    :param cursor: the chain's key and streams.
    """
    length = compute_buffer_length(lookups, index_structs, num_chains)
    values = tuple(
        jnp.zeros((length, *index_structs[p].shape, *a.shape[1:]), a.dtype) for a, p in lookups
    )
    empty = {p: jnp.zeros((length, *x.shape), x.dtype) for p, x in index_structs.items()}
    key = ~get_key_data(cursor.rng_key)  # no iteration's: nothing is drawn yet
    return PrefetchBuffer(values, empty, empty, cursor, jnp.asarray(length), key)


def compute_buffer_length(
    lookups: tuple[RowLookup, ...], index_structs: Mapping[str, Any], num_chains: int
) -> int:
    """Iterations a block, from 1 to 64, so that those of all chains stay near 8 MB.

    :param index_structs: shape and type of the rows of one iteration of one chain, by plate.
    :param num_chains: chains that read together.
    """
    sizes = (index_structs[p].size * max(a.row_size, 1) * a.dtype.itemsize for a, p in lookups)
    return max(
        1,
        min(
            _MAX_PREFETCHED_ITERATIONS,
            _MAX_PREFETCH_BUFFER_BYTES // max(num_chains * sum(sizes), 1),
        ),
    )


def _sample_upcoming_indices(
    config: ChainConfig, cursor: PrefetchCursor, num_iterations: int
) -> tuple[PrefetchCursor, dict[str, Array]]:
    """The rows of a chain's next iterations, shape ``(length, num_steps, subsample_size)``."""

    def one(upcoming: PrefetchCursor, _: None) -> tuple[PrefetchCursor, dict[str, Array]]:
        keys = Keys.split(upcoming.rng_key)
        streams, rows = sample_iteration_indices(config, upcoming.streams, keys.indices)
        return PrefetchCursor(keys.next_key, streams), rows

    return lax.scan(one, cursor, None, num_iterations)


def attach_prefetch_buffer(config: ChainConfig, state: SGMCMCState, num_chains: int) -> SGMCMCState:
    """A chain's first state, with room for the rows that are read ahead.

    :param num_chains: chains that read together.
    """
    lookups = config.potential.host_lookups
    if not lookups:
        return state
    rows = jax.eval_shape(
        lambda s: sample_iteration_indices(config, s.streams, s.rng_key)[1], state
    )
    upcoming = PrefetchCursor(state.rng_key, state.streams)
    return state._replace(
        prefetch_buffer=create_prefetch_buffer(lookups, rows, num_chains, upcoming)
    )


def refill_prefetch_buffer(
    config: ChainConfig, state: SGMCMCState, chain_axis: str | None = None
) -> SGMCMCState:
    """The state of one chain or of many, with rows read ahead for its next iteration.

    Outside of ``vmap``, under which both branches of a condition would run every time.

    :param chain_axis: the mesh axis over which chains are spread, if they are.
    """
    if state.prefetch_buffer is None:
        return state
    lookups, block = config.potential.host_lookups, state.prefetch_buffer
    is_batch = block.num_used.ndim == 1
    length = block.row_arrays[0].shape[int(is_batch)]
    ahead = partial(_sample_upcoming_indices, config, num_iterations=length)
    # One chain after the other: the loop under `vmap` would put them innermost, and the rows would
    # be turned round at every iteration.
    draw = partial(lax.map, ahead) if is_batch else ahead
    is_other_key = (block.next_key_data != get_key_data(state.rng_key)).any()

    def read(state: SGMCMCState) -> PrefetchBuffer:
        # Rows are drawn once: those that were to come are now due, unless the key has changed.
        upcoming, now = lax.cond(
            is_other_key,
            lambda: draw(PrefetchCursor(state.rng_key, state.streams)),
            lambda: (block.cursor, block.next_indices),
        )
        upcoming, next_rows = draw(upcoming)
        values = read_lookups(lookups, now, next_rows, chain_axis)
        used, key = jnp.zeros_like(block.num_used), get_key_data(state.rng_key)
        return PrefetchBuffer(values, now, next_rows, upcoming, used, key)

    is_due = (block.num_used >= length).any() | is_other_key
    return state._replace(
        prefetch_buffer=lax.cond(is_due, read, lambda s: s.prefetch_buffer, state)
    )
