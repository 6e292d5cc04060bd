"""Random rows without replacement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from numpyro_sgmcmc.data.minibatch.base import StreamState, Subsampling, advance_stream
from numpyro_sgmcmc.data.minibatch.shuffle import epoch_seed, permute

__all__ = ["ShuffledSubsampling"]


@dataclass(frozen=True)
class ShuffledSubsampling(Subsampling):
    """B rows at a time of a random permutation, a fresh one each epoch: each row once an epoch.

    The permutation is evaluated for the B places of a step. Where B does not divide N the minibatch
    at the seam takes the rest of one epoch and the start of the next.
    """

    name = "shuffled"

    def sample_indices(
        self, state: StreamState, rng_key: Array, num_steps: int, size: Any, batch_size: int
    ) -> tuple[StreamState, Array]:
        state, epochs, x = advance_stream(state, size, num_steps * batch_size)
        rows = permute(epoch_seed(state.seed, epochs), x, size)
        return state, rows.astype(jnp.int32).reshape(num_steps, batch_size)

    def has_distinct_rows(self, size: int, batch_size: int) -> bool:
        return size % batch_size == 0
