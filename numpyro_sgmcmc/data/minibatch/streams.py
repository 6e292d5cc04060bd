"""A plate's minibatches by a scheme; where its rows are spread, a stream for every shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, random

from numpyro_sgmcmc.data.minibatch.base import MinibatchScheme, StreamState
from numpyro_sgmcmc.data.plates import Plate
from numpyro_sgmcmc.data.shards import Shards

__all__ = ["draw_independent", "draw_minibatches", "start_stream"]


def start_stream(plate: Plate, rng_key: Array) -> StreamState:
    """The first state of a plate's stream, or of its shards' streams."""
    if plate.shards is None:
        return StreamState.start(rng_key)
    return jax.vmap(StreamState.start)(random.split(rng_key, len(plate.shards.counts)))


def draw_minibatches(
    scheme: MinibatchScheme, plate: Plate, state: StreamState, rng_key: Array, num_steps: int
) -> tuple[StreamState, Array]:
    """The stream's next state and the rows of some steps, ``(num_steps, subsample_size)``.

    Every shard gives the same part of a minibatch.
    """
    if plate.shards is None:
        drawn = plate.drawn
        state, rows = scheme.draw(state, rng_key, num_steps, drawn.size, drawn.subsample_size)
        return state, plate.with_decisive(rows)

    def one(size: Any, state: StreamState, key: Array) -> tuple[StreamState, Array]:
        return scheme.draw(state, key, num_steps, size, plate.part)

    keys = random.split(rng_key, len(plate.shards.counts))
    state, rows = _on_each(one, plate.shards, state, keys)
    return state, plate.shards.spread(jnp.moveaxis(rows, 0, 1).reshape(num_steps, -1))


def draw_independent(scheme: MinibatchScheme, plate: Plate, rng_key: Array) -> Array:
    """A minibatch that is independent of any stream, shape ``(subsample_size,)``."""
    shards = plate.shards
    if shards is None:
        drawn = plate.drawn
        return plate.with_decisive(scheme.independent(rng_key, drawn.size, drawn.subsample_size))

    def one(size: Any, key: Array) -> tuple[None, Array]:
        return None, scheme.independent(key, size, plate.part)

    _, rows = _on_each(one, shards, random.split(rng_key, len(shards.counts)))
    return shards.spread(rows.reshape(-1))


def _on_each(fn: Callable[..., Any], shards: Shards, *of_shard: Any) -> Any:
    """``fn(number of rows, ...) -> (..., rows)`` for every shard, with rows numbered among all."""
    if shards.is_even:
        state, rows = jax.vmap(lambda *xs: fn(shards.longest, *xs))(*of_shard)
    else:
        state, rows = jax.vmap(fn)(jnp.asarray(shards.counts, jnp.int32), *of_shard)
    firsts = jnp.asarray(shards.firsts)
    return state, rows + firsts.reshape(-1, *[1] * (rows.ndim - 1))
