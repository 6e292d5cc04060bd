"""A plate's minibatches by a scheme; where its rows are spread, a stream for every shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, random

from numpyro_sgmcmc.data.minibatch.base import StreamState, Subsampling
from numpyro_sgmcmc.data.plates import Plate
from numpyro_sgmcmc.data.shards import Shards

__all__ = ["init_stream", "sample_independent_minibatch", "sample_minibatches"]


def init_stream(plate: Plate, rng_key: Array) -> StreamState:
    """The first state of a plate's stream, or of its shards' streams."""
    if plate.shards is None:
        return StreamState.init(rng_key)
    return jax.vmap(StreamState.init)(random.split(rng_key, len(plate.shards.rows_per_shard)))


def sample_minibatches(
    subsampling: Subsampling, plate: Plate, state: StreamState, rng_key: Array, num_steps: int
) -> tuple[StreamState, Array]:
    """The stream's next state and the rows of some steps, ``(num_steps, subsample_size)``.

    Every shard gives the same part of a minibatch.
    """
    if plate.shards is None:
        drawn = plate.random_part
        state, rows = subsampling.sample_indices(
            state, rng_key, num_steps, drawn.size, drawn.subsample_size
        )
        return state, plate.add_included_rows(rows)

    def one(size: Any, state: StreamState, key: Array) -> tuple[StreamState, Array]:
        return subsampling.sample_indices(
            state, key, num_steps, size, plate.subsample_size_per_shard
        )

    keys = random.split(rng_key, len(plate.shards.rows_per_shard))
    state, rows = _map_shards(one, plate.shards, state, keys)
    return state, plate.shards.shard_indices(jnp.moveaxis(rows, 0, 1).reshape(num_steps, -1))


def sample_independent_minibatch(subsampling: Subsampling, plate: Plate, rng_key: Array) -> Array:
    """A minibatch that is independent of any stream, shape ``(subsample_size,)``."""
    shards = plate.shards
    if shards is None:
        drawn = plate.random_part
        return plate.add_included_rows(
            subsampling.sample_independent_indices(rng_key, drawn.size, drawn.subsample_size)
        )

    def one(size: Any, key: Array) -> tuple[None, Array]:
        return None, subsampling.sample_independent_indices(
            key, size, plate.subsample_size_per_shard
        )

    _, rows = _map_shards(one, shards, random.split(rng_key, len(shards.rows_per_shard)))
    return shards.shard_indices(rows.reshape(-1))


def _map_shards(fn: Callable[..., Any], shards: Shards, *shard_args: Any) -> Any:
    """``fn(number of rows, ...) -> (..., rows)`` for every shard, with rows numbered among all."""
    if shards.is_balanced:
        state, rows = jax.vmap(lambda *xs: fn(shards.max_rows_per_shard, *xs))(*shard_args)
    else:
        state, rows = jax.vmap(fn)(jnp.asarray(shards.rows_per_shard, jnp.int32), *shard_args)
    firsts = jnp.asarray(shards.row_offsets)
    return state, rows + firsts.reshape(-1, *[1] * (rows.ndim - 1))
