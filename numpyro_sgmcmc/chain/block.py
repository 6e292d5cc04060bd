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

from numpyro_sgmcmc.data.stand_ins import IndexedArray

__all__ = ["Block", "Upcoming", "block_length", "empty_block", "key_words"]


_BLOCK_BYTES = 2**23
_LONGEST_BLOCK = 64


class Upcoming(NamedTuple):
    """Where the drawing of a chain's rows has come to, ahead of the chain.

    - **rng_key** - key of the first iteration whose rows are not drawn yet.
    - **streams** - the minibatch streams there.
    """

    rng_key: Array
    streams: dict[str, Any]


class Block(NamedTuple):
    """Rows read for the next iterations of a chain.

    - **values** - for each lookup, shape ``(iterations, num_steps, subsample_size, ...)``.
    - **rows** - which rows these are, by plate, shape ``(iterations, num_steps, subsample_size)``.
    - **next_rows** - the rows of as many iterations after them, which are being read.
    - **upcoming** - from where the rows after those are drawn.
    - **used** - iterations used.
    - **key** - words of the random key of the iteration that comes next: with another one, the
      rows that have been read are not those that it draws.
    """

    values: tuple[Array, ...]
    rows: dict[str, Array]
    next_rows: dict[str, Array]
    upcoming: Upcoming
    used: Array
    key: Array

    def at(self, iteration: Array, step: Array) -> tuple[dict[str, Array], tuple[Array, ...]]:
        """The rows of one step and the values there.

        Copied for this step alone and with one index for all chains, which is as fast as memory.

        :param iteration: number of the iteration in the block.
        :param step: step in the iteration.
        """

        def one(x: Array) -> Array:
            flat = x.reshape(-1, *x.shape[2:])
            return lax.dynamic_index_in_dim(flat, iteration * x.shape[1] + step, keepdims=False)

        return {p: one(x) for p, x in self.rows.items()}, tuple(one(x) for x in self.values)


def key_words(rng_key: Array) -> Array:
    """The integers of a typed or a raw key."""
    is_typed = jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(rng_key) if is_typed else rng_key


def empty_block(
    lookups: tuple[IndexedArray, ...], rows: Mapping[str, Any], num_chains: int, upcoming: Upcoming
) -> Block:
    """A chain's block before anything is read, used up.

    :param rows: shape and type of the rows of one iteration of one chain, by plate.
    :param num_chains: chains that read together.
    :param upcoming: the chain's key and streams.
    """
    length = block_length(lookups, rows, num_chains)
    values = tuple(jnp.zeros((length, *rows[p].shape, *a.shape[1:]), a.dtype) for a, p in lookups)
    empty = {p: jnp.zeros((length, *x.shape), x.dtype) for p, x in rows.items()}
    key = ~key_words(upcoming.rng_key)  # no iteration's: nothing is drawn yet
    return Block(values, empty, empty, upcoming, jnp.asarray(length), key)


def block_length(
    lookups: tuple[IndexedArray, ...], rows: Mapping[str, Any], num_chains: int
) -> int:
    """Iterations a block, from 1 to 64, so that those of all chains stay near 8 MB.

    :param rows: shape and type of the rows of one iteration of one chain, by plate.
    :param num_chains: chains that read together.
    """
    sizes = (rows[p].size * max(a.row_size, 1) * a.dtype.itemsize for a, p in lookups)
    return max(1, min(_LONGEST_BLOCK, _BLOCK_BYTES // max(num_chains * sum(sizes), 1)))
