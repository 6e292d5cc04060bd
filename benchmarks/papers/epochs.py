"""A partition's minibatches in a random order, different in every run and in every epoch."""

from __future__ import annotations

import jax
from jax import Array, random

from numpyro_sgmcmc.data.subsampling import ShuffledSubsampling, StreamState, Subsampling

SHUFFLED = ShuffledSubsampling()


def first_epoch(rng_key: Array, num_batches: int, runs: int) -> StreamState:
    """The orders before the first step."""
    return jax.vmap(StreamState.init)(random.split(rng_key, runs))


def next_batches(
    orders: StreamState,
    num_batches: int,
    num_steps: int,
    subsampling: Subsampling = SHUFFLED,
) -> tuple[StreamState, Array]:
    """The orders after so many steps, and the minibatches of these, shape ``(num_steps, runs)``."""
    keys = random.split(random.key(0), len(orders.epoch))  # used by independent minibatches alone
    orders, batches = jax.vmap(
        lambda state, key: subsampling.sample_indices(state, key, num_steps, num_batches, 1)
    )(orders, keys)
    return orders, batches[..., 0].T
