"""Blocks of rows in a chain's state: read a few iterations ahead, served a step at a time.

A call to the host costs as much as dozens of steps, so that rows come for several iterations at
once. Which ones follows from the chain's key alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_sgmcmc.data.stand_ins import RowLookup

__all__ = [
    "PrefetchBuffer",
    "PrefetchCursor",
    "compute_buffer_length",
    "create_prefetch_buffer",
    "get_key_data",
]


_MAX_PREFETCH_BUFFER_BYTES = 2**23
_MAX_PREFETCHED_ITERATIONS = 64


class PrefetchCursor(NamedTuple):
    """Where the drawing of a chain's rows has come to, ahead of the chain.

    - **rng_key** - key of the first iteration whose rows are not drawn yet.
    - **streams** - the minibatch streams there.
    """

    rng_key: Array
    streams: dict[str, Any]


class PrefetchBuffer(NamedTuple):
    """Rows read for the next iterations of a chain.

    - **row_arrays** - for each lookup, shape ``(iterations, num_steps, subsample_size, ...)``.
    - **indices** - which rows these are, by plate, shape ``(iterations, num_steps, subsample_size)``.
    - **next_indices** - the rows of as many iterations after them, which are being read.
    - **cursor** - from where the rows after those are drawn.
    - **num_used** - iterations used.
    - **next_key_data** - words of the random key of the iteration that comes next: with another one, the
      rows that have been read are not those that it draws.
    """

    row_arrays: tuple[Array, ...]
    indices: dict[str, Array]
    next_indices: dict[str, Array]
    cursor: PrefetchCursor
    num_used: Array
    next_key_data: Array

    def slice_step(
        self, buffer_index: Array, step: Array
    ) -> tuple[dict[str, Array], tuple[Array, ...]]:
        """The rows of one step and the values there.

        Copied for this step alone and with one index for all chains, which is as fast as memory.

        :param buffer_index: number of the iteration in the block.
        :param step: step in the iteration.
        """

        def one(x: Array) -> Array:
            flat = x.reshape(-1, *x.shape[2:])
            return lax.dynamic_index_in_dim(flat, buffer_index * x.shape[1] + step, keepdims=False)

        return {p: one(x) for p, x in self.indices.items()}, tuple(one(x) for x in self.row_arrays)


def get_key_data(rng_key: Array) -> Array:
    """The integers of a typed or a raw key."""
    is_typed = jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(rng_key) if is_typed else rng_key


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
