"""Blocks of consecutive rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, random

from numpyro_sgmcmc.data.minibatch.base import StreamState, Subsampling, advance_stream
from numpyro_sgmcmc.data.minibatch.shuffle import (
    GOLDEN_RATIO_UINT32,
    epoch_seed,
    hash_uint32,
    is_static_one,
    permute,
    wrap_index,
)

__all__ = ["ContiguousSubsampling"]


@dataclass(frozen=True)
class ContiguousSubsampling(Subsampling):
    """Blocks of B consecutive rows in a random order, order and offset fresh each epoch.

    Consecutive rows lie together in memory, so that a step costs a third to a fifth; the rows must
    be in an order unrelated to the data. Where B does not divide N, ``N mod B`` rows (others each
    epoch) wait for the next epoch.
    """

    name = "contiguous"
    is_contiguous = True

    def sample_indices(
        self, state: StreamState, rng_key: Array, num_steps: int, size: Any, batch_size: int
    ) -> tuple[StreamState, Array]:
        num_blocks = size // batch_size
        state, epochs, x = advance_stream(state, num_blocks, num_steps)
        key = epoch_seed(state.seed, epochs)
        block = permute(key, x, num_blocks)
        offset = hash_uint32(key + jnp.uint32(GOLDEN_RATIO_UINT32 >> 1))
        num = jnp.asarray(size, jnp.uint32)
        offset = jnp.zeros_like(offset) if is_static_one(size) else offset % num
        start = wrap_index(offset + block * jnp.uint32(batch_size), size)
        rows = start[:, None] + jnp.arange(batch_size, dtype=jnp.uint32)
        return state, wrap_index(rows, size).astype(jnp.int32)

    def sample_independent_indices(self, rng_key: Array, size: Any, batch_size: int) -> Array:
        start = random.randint(rng_key, (), 0, size, dtype=jnp.uint32)
        rows = start + jnp.arange(batch_size, dtype=jnp.uint32)
        return wrap_index(rows, size).astype(jnp.int32)
