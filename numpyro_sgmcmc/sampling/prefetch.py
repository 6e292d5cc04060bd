"""Prefetching of rows on the host, for several iterations at once.

A call to the host costs as much as dozens of steps, so that rows are read for a buffer of
iterations. Which rows they are follows from the chain's key alone; while a chain uses one buffer,
the rows of the next are being read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, random

from numpyro_sgmcmc.data.row_proxies import RowLookup, read_lookups
from numpyro_sgmcmc.sampling.state import (
    ChainConfig,
    Keys,
    PrefetchBuffer,
    PrefetchCursor,
    SGMCMCState,
    sample_iteration_indices,
)

# Bounds on memory: bytes of the buffers of all chains, and iterations of a buffer.
_MAX_PREFETCH_BUFFER_BYTES, _MAX_PREFETCHED_ITERATIONS = 2**23, 64


def attach_prefetch_buffer(config: ChainConfig, state: SGMCMCState, num_chains: int) -> SGMCMCState:
    """Return a chain's initial state with an empty buffer, if the model reads rows on the host."""
    lookups = config.potential.host_lookups
    if not lookups:
        return state
    index_structs = jax.eval_shape(
        lambda s: sample_iteration_indices(config, s.streams, s.rng_key)[1], state
    )
    length = compute_buffer_length(lookups, index_structs, num_chains)
    indices = {p: jnp.zeros((length, *x.shape), x.dtype) for p, x in index_structs.items()}
    row_arrays = tuple(
        jnp.zeros((length, *index_structs[plate].shape, *array.shape[1:]), array.dtype)
        for array, plate in lookups
    )
    buffer = PrefetchBuffer(
        row_arrays=row_arrays,
        indices=indices,
        next_indices=indices,
        cursor=PrefetchCursor(state.rng_key, state.streams),
        num_used=jnp.asarray(length),
        next_key_data=~random.key_data(state.rng_key),  # of no iteration: nothing is read yet
    )
    return state._replace(prefetch_buffer=buffer)


def compute_buffer_length(
    lookups: tuple[RowLookup, ...], index_structs: Mapping[str, Any], num_chains: int
) -> int:
    """Return the number of iterations in a buffer, so that those of all chains stay near 8 MB."""
    num_bytes = num_chains * sum(
        index_structs[plate].size * max(array.row_size, 1) * array.dtype.itemsize
        for array, plate in lookups
    )
    length = _MAX_PREFETCH_BUFFER_BYTES // max(num_bytes, 1)
    return max(1, min(_MAX_PREFETCHED_ITERATIONS, length))


def refill_prefetch_buffer(
    config: ChainConfig, state: SGMCMCState, chain_axis: str | None = None
) -> SGMCMCState:
    """Return the state of one chain or of several with the rows of its next iteration.

    It is called outside of ``vmap``, which would run both branches of the condition every time.
    """
    if state.prefetch_buffer is None:
        return state
    lookups, buffer = config.potential.host_lookups, state.prefetch_buffer
    is_batch = buffer.num_used.ndim == 1
    length = buffer.row_arrays[0].shape[int(is_batch)]
    is_other_key = (buffer.next_key_data != random.key_data(state.rng_key)).any()

    def sample_iteration(cursor: PrefetchCursor, _: Any) -> tuple[PrefetchCursor, Any]:
        keys = Keys.split(cursor.rng_key)
        streams, indices = sample_iteration_indices(config, cursor.streams, keys.indices)
        return PrefetchCursor(keys.next_key, streams), indices

    sample: Callable = partial(lax.scan, sample_iteration, xs=None, length=length)
    if is_batch:
        # One chain after the other: under `vmap` the loop would make chains the innermost axis, and
        # the rows would be transposed at every iteration.
        sample = partial(lax.map, sample)

    def read(state: SGMCMCState) -> PrefetchBuffer:
        # Indices are sampled once: the next buffer's are now due, unless the key has changed.
        cursor, indices = lax.cond(
            is_other_key,
            lambda: sample(PrefetchCursor(state.rng_key, state.streams)),
            lambda: (buffer.cursor, buffer.next_indices),
        )
        cursor, next_indices = sample(cursor)
        row_arrays = read_lookups(lookups, indices, next_indices, chain_axis)
        num_used, key_data = jnp.zeros_like(buffer.num_used), random.key_data(state.rng_key)
        return PrefetchBuffer(row_arrays, indices, next_indices, cursor, num_used, key_data)

    is_due = (buffer.num_used >= length).any() | is_other_key
    return state._replace(
        prefetch_buffer=lax.cond(is_due, read, lambda s: s.prefetch_buffer, state)
    )
