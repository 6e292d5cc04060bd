"""Independent rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, random

from numpyro_sgmcmc.data.minibatch.base import StreamState, Subsampling

__all__ = ["IIDSubsampling"]


@dataclass(frozen=True)
class IIDSubsampling(Subsampling):
    """Rows drawn with replacement at every step."""

    name = "iid"
    is_independent = True

    def sample_indices(
        self, state: StreamState, rng_key: Array, num_steps: int, size: Any, batch_size: int
    ) -> tuple[StreamState, Array]:
        return state, random.randint(rng_key, (num_steps, batch_size), 0, size, dtype=jnp.int32)

    def has_distinct_rows(self, size: int, batch_size: int) -> bool:
        return False
