"""What a way of visiting the rows of a plate must tell of itself, and its stream's state."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array, random

from numpyro_sgmcmc.data.minibatch.shuffle import is_static_one

__all__ = ["StreamState", "Subsampling", "advance_stream", "sample_iid_indices"]


class StreamState(NamedTuple):
    """
    - **seed** - two random 32-bit words that fix all permutations of the stream.
    - **epoch** - number of finished passes over the rows, modulo 2^32.
    - **offset** - rows (or blocks) visited in the present pass.
    """

    seed: Array
    epoch: Array
    offset: Array

    @classmethod
    def init(cls, rng_key: Array) -> StreamState:
        """A stream's first state, a function of the key."""
        return cls(random.bits(rng_key, (2,), jnp.uint32), jnp.uint32(0), jnp.uint32(0))


class Subsampling:
    """A way to visit the rows of a plate, so many at a time; O(B) time and O(1) memory a step.

    Subclasses are frozen dataclasses without fields: a scheme is compiled into the step.
    """

    name: ClassVar[str]
    """What the kernels' ``minibatch`` argument calls it."""

    is_independent: ClassVar[bool] = False
    """Whether a minibatch tells nothing of those before it."""

    is_contiguous: ClassVar[bool] = False
    """Whether a minibatch is of consecutive rows, which are alike where the data are sorted."""

    def sample_indices(
        self, state: StreamState, rng_key: Array, num_steps: int, size: Any, batch_size: int
    ) -> tuple[StreamState, Array]:
        """The next state and the indices of the next ``num_steps`` steps.

        :param state: the present state.
        :param rng_key: a fresh key, for schemes that are not a function of the state alone.
        :param num_steps: number of minibatches.
        :param size: number of rows; an array where each shard has its own.
        :param batch_size: rows of a minibatch.
        :return: the state after them, and int32 indices of shape ``(num_steps, batch_size)``.
        """
        raise NotImplementedError

    def sample_independent_indices(self, rng_key: Array, size: Any, batch_size: int) -> Array:
        """A minibatch of the same kind that is independent of any stream, ``(batch_size,)``."""
        return sample_iid_indices(rng_key, size, batch_size)

    def has_distinct_rows(self, size: int, batch_size: int) -> bool:
        """Whether no minibatch holds a row twice."""
        return True


def sample_iid_indices(rng_key: Array, size: Any, batch_size: int) -> Array:
    """Random rows, independent of any stream."""
    return random.randint(rng_key, (batch_size,), 0, size, dtype=jnp.int32)


def advance_stream(
    state: StreamState, num_positions: Any, num_steps: int
) -> tuple[StreamState, Array, Array]:
    """Walk ``num_steps`` places of an endless pass over ``range(places)``: state, epochs, places."""
    walk = state.offset + jnp.arange(num_steps, dtype=jnp.uint32)
    if not isinstance(num_positions, int):
        num_positions = num_positions.astype(jnp.uint32)
    if is_static_one(num_positions):
        end = StreamState(state.seed, state.epoch + jnp.uint32(num_steps), state.offset)
        return end, state.epoch + walk, jnp.zeros_like(walk)
    epochs, x = state.epoch + walk // num_positions, walk % num_positions
    end = state.offset + jnp.uint32(num_steps)
    return (
        StreamState(state.seed, state.epoch + end // num_positions, end % num_positions),
        epochs,
        x,
    )
