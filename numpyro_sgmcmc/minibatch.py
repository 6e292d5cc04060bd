r"""Streams of minibatch indices: O(B) time and O(1) memory a step, whatever the number of rows.

Three ways to visit the rows of one plate, all unbiased:

- :class:`IID`: B rows with replacement at every step.
- :class:`Epoch`: B rows at a time of a random permutation, a fresh one each epoch, so that every
  row is visited once an epoch. The permutation is never stored: it is a function of the row's
  place, evaluated for the B places of a step. Where B does not divide N the minibatch at the
  seam takes the rest of one epoch and the start of the next.
- :class:`Blocks`: a partition into blocks of B consecutive rows, visited in a random order, the
  order and the partition's offset fresh each epoch. Consecutive rows lie together in memory, so
  that a step costs a third to a fifth; the rows must be in an order unrelated to the data. Where
  B does not divide N, ``N mod B`` rows (others each epoch) wait for the next epoch.

The permutation is the swap-or-not shuffle (Hoang, Morris and Rogaway, 2012,
doi:10.1007/978-3-642-32009-5_1): in each round a place x is paired with K - x mod N, and a hash
of the pair decides whether the two swap. It is a bijection for any N, needs no loop of data-
dependent length, and after r rounds from a uniform offset two places are correlated by 2^-r.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array, random

__all__ = [
    "IID",
    "STREAMS",
    "Blocks",
    "Epoch",
    "Stream",
    "StreamState",
    "independent_blocks",
    "independent_rows",
]

_ROUNDS = 12
_GOLDEN = 0x9E3779B9


class StreamState(NamedTuple):
    """
    - **seed** - two random 32-bit words that fix all permutations of the stream.
    - **epoch** - number of finished passes over the rows, modulo 2^32.
    - **place** - rows (or blocks) visited in the present pass.
    """

    seed: Array
    epoch: Array
    place: Array


class Stream(Protocol):
    """A way to visit the ``size`` rows of a plate, ``batch_size`` at a time."""

    size: int
    batch_size: int

    def init(self, rng_key: Array) -> StreamState:
        """The stream's first state, a function of the key."""
        ...

    def draw(self, state: StreamState, rng_key: Array, num_steps: int) -> tuple[StreamState, Array]:
        """The next state and the indices of the next ``num_steps`` steps.

        :param state: the present state.
        :param rng_key: a fresh key; only :class:`IID` uses it.
        :param num_steps: number of minibatches.
        :return: the state after them, and int32 indices of shape ``(num_steps, batch_size)``.
        """
        ...


def _mix(x: Array) -> Array:
    """A bijection of 32-bit words in which each input bit flips each output bit half the time.

    Constants: Chris Wellons, "Prospecting for hash functions" (2018), lowbias32.
    """
    x = x ^ (x >> 16)
    x = x * jnp.uint32(0x7FEB352D)
    x = x ^ (x >> 15)
    x = x * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _epoch_key(seed: Array, epoch: Array) -> Array:
    """A 32-bit word for each epoch."""
    return _mix(seed[0] ^ _mix(epoch + seed[1]))


def _permute(key: Array, x: Array, size: int) -> Array:
    """The image of the places ``x`` under the permutation of ``range(size)`` that ``key`` names."""
    if size == 1:  # XLA on a CPU cannot compile a remainder by one
        return jnp.zeros_like(x)
    n = jnp.uint32(size)
    x = x + key % n
    x = jnp.where(x >= n, x - n, x)
    for i in range(1, _ROUNDS + 1):
        round_key = _mix(key + jnp.uint32((_GOLDEN * i) & 0xFFFFFFFF))
        pivot = round_key % n
        partner = jnp.where(pivot >= x, pivot - x, pivot + (n - x))
        coin = _mix(jnp.maximum(x, partner) * jnp.uint32(_GOLDEN) + round_key) >> 31
        x = jnp.where(coin == 1, partner, x)
    return x


def _advance(state: StreamState, places: int, num: int) -> tuple[StreamState, Array, Array]:
    """Walk ``num`` places of an endless pass over ``range(places)``: state, epochs, places."""
    walk = state.place + jnp.arange(num, dtype=jnp.uint32)
    if places == 1:
        end = StreamState(state.seed, state.epoch + jnp.uint32(num), state.place)
        return end, state.epoch + walk, jnp.zeros_like(walk)
    epochs, x = state.epoch + walk // places, walk % places
    end = state.place + jnp.uint32(num)
    return StreamState(state.seed, state.epoch + end // places, end % places), epochs, x


def _init(rng_key: Array) -> StreamState:
    return StreamState(random.bits(rng_key, (2,), jnp.uint32), jnp.uint32(0), jnp.uint32(0))


def independent_rows(rng_key: Array, size: int, batch_size: int) -> Array:
    """Random rows, independent of any stream."""
    return random.randint(rng_key, (batch_size,), 0, size, dtype=jnp.int32)


def independent_blocks(rng_key: Array, size: int, batch_size: int) -> Array:
    """Consecutive rows from a random start, independent of any stream."""
    start = random.randint(rng_key, (), 0, size, dtype=jnp.uint32)
    return _wrap(start + jnp.arange(batch_size, dtype=jnp.uint32), size).astype(jnp.int32)


@dataclass(frozen=True)
class IID:
    """Rows drawn with replacement."""

    size: int
    batch_size: int

    def init(self, rng_key: Array) -> StreamState:
        return _init(rng_key)

    def draw(self, state: StreamState, rng_key: Array, num_steps: int) -> tuple[StreamState, Array]:
        shape = (num_steps, self.batch_size)
        return state, random.randint(rng_key, shape, 0, self.size, dtype=jnp.int32)


@dataclass(frozen=True)
class Epoch:
    """Rows drawn without replacement, every row once an epoch."""

    size: int
    batch_size: int

    def init(self, rng_key: Array) -> StreamState:
        return _init(rng_key)

    def draw(self, state: StreamState, rng_key: Array, num_steps: int) -> tuple[StreamState, Array]:
        state, epochs, x = _advance(state, self.size, num_steps * self.batch_size)
        rows = _permute(_epoch_key(state.seed, epochs), x, self.size)
        return state, rows.astype(jnp.int32).reshape(num_steps, self.batch_size)


@dataclass(frozen=True)
class Blocks:
    """Blocks of consecutive rows, in a random order from a random offset each epoch."""

    size: int
    batch_size: int

    def init(self, rng_key: Array) -> StreamState:
        return _init(rng_key)

    def draw(self, state: StreamState, rng_key: Array, num_steps: int) -> tuple[StreamState, Array]:
        num_blocks = self.size // self.batch_size
        state, epochs, x = _advance(state, num_blocks, num_steps)
        key = _epoch_key(state.seed, epochs)
        block = _permute(key, x, num_blocks)
        offset = _mix(key + jnp.uint32(_GOLDEN >> 1))
        offset = offset % jnp.uint32(self.size) if self.size > 1 else jnp.zeros_like(offset)
        start = _wrap(offset + block * jnp.uint32(self.batch_size), self.size)
        rows = start[:, None] + jnp.arange(self.batch_size, dtype=jnp.uint32)
        return state, _wrap(rows, self.size).astype(jnp.int32)


def _wrap(x: Array, size: int) -> Array:
    """``x mod size`` for ``x < 2 size``."""
    return jnp.where(x >= size, x - jnp.uint32(size), x)


STREAMS: dict[str, type] = {"iid": IID, "epoch": Epoch, "blocks": Blocks}
"""The streams by the names of a kernel's ``minibatch`` argument."""
