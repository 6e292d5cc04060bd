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

Where rows are spread over devices, every device has a stream of its own (:class:`Stratified`).

The permutation is the swap-or-not shuffle (Hoang, Morris and Rogaway, 2012,
doi:10.1007/978-3-642-32009-5_1): in each round a place x is paired with K - x mod N, and a hash
of the pair decides whether the two swap. It is a bijection for any N, needs no loop of data-
dependent length, and after r rounds from a uniform offset two places are correlated by 2^-r.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, random

from numpyro_sgmcmc.data.plates import Plate
from numpyro_sgmcmc.data.sharded import Shards

__all__ = [
    "IID",
    "STREAMS",
    "Blocks",
    "Epoch",
    "Stratified",
    "Stream",
    "StreamState",
    "independent_minibatch",
    "stream_of",
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
    """A way to visit the rows of a plate, so many at a time."""

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


def _is_one(size: Any) -> bool:
    """XLA on a CPU cannot compile a remainder by one."""
    return isinstance(size, int) and size == 1


def _permute(key: Array, x: Array, size: Any) -> Array:
    """The image of the places ``x`` under the permutation of ``range(size)`` that ``key`` names."""
    if _is_one(size):
        return jnp.zeros_like(x)
    n = jnp.asarray(size, jnp.uint32)
    x = x + key % n
    x = jnp.where(x >= n, x - n, x)
    for i in range(1, _ROUNDS + 1):
        round_key = _mix(key + jnp.uint32((_GOLDEN * i) & 0xFFFFFFFF))
        pivot = round_key % n
        partner = jnp.where(pivot >= x, pivot - x, pivot + (n - x))
        coin = _mix(jnp.maximum(x, partner) * jnp.uint32(_GOLDEN) + round_key) >> 31
        x = jnp.where(coin == 1, partner, x)
    return x


def _advance(state: StreamState, places: Any, num: int) -> tuple[StreamState, Array, Array]:
    """Walk ``num`` places of an endless pass over ``range(places)``: state, epochs, places."""
    walk = state.place + jnp.arange(num, dtype=jnp.uint32)
    if not isinstance(places, int):
        places = places.astype(jnp.uint32)
    if _is_one(places):
        end = StreamState(state.seed, state.epoch + jnp.uint32(num), state.place)
        return end, state.epoch + walk, jnp.zeros_like(walk)
    epochs, x = state.epoch + walk // places, walk % places
    end = state.place + jnp.uint32(num)
    return StreamState(state.seed, state.epoch + end // places, end % places), epochs, x


def _init(rng_key: Array) -> StreamState:
    return StreamState(random.bits(rng_key, (2,), jnp.uint32), jnp.uint32(0), jnp.uint32(0))


def _independent_rows(rng_key: Array, size: Any, batch_size: int) -> Array:
    """Random rows, independent of any stream."""
    return random.randint(rng_key, (batch_size,), 0, size, dtype=jnp.int32)


def _independent_block(rng_key: Array, size: Any, batch_size: int) -> Array:
    """Consecutive rows from a random start, independent of any stream."""
    start = random.randint(rng_key, (), 0, size, dtype=jnp.uint32)
    return _wrap(start + jnp.arange(batch_size, dtype=jnp.uint32), size).astype(jnp.int32)


@dataclass(frozen=True)
class IID:
    """Rows drawn with replacement."""

    size: Any
    batch_size: int

    def init(self, rng_key: Array) -> StreamState:
        return _init(rng_key)

    def draw(self, state: StreamState, rng_key: Array, num_steps: int) -> tuple[StreamState, Array]:
        shape = (num_steps, self.batch_size)
        return state, random.randint(rng_key, shape, 0, self.size, dtype=jnp.int32)


@dataclass(frozen=True)
class Epoch:
    """Rows drawn without replacement, every row once an epoch."""

    size: Any
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

    size: Any
    batch_size: int

    def init(self, rng_key: Array) -> StreamState:
        return _init(rng_key)

    def draw(self, state: StreamState, rng_key: Array, num_steps: int) -> tuple[StreamState, Array]:
        num_blocks = self.size // self.batch_size
        state, epochs, x = _advance(state, num_blocks, num_steps)
        key = _epoch_key(state.seed, epochs)
        block = _permute(key, x, num_blocks)
        offset = _mix(key + jnp.uint32(_GOLDEN >> 1))
        size = jnp.asarray(self.size, jnp.uint32)
        offset = jnp.zeros_like(offset) if _is_one(self.size) else offset % size
        start = _wrap(offset + block * jnp.uint32(self.batch_size), self.size)
        rows = start[:, None] + jnp.arange(self.batch_size, dtype=jnp.uint32)
        return state, _wrap(rows, self.size).astype(jnp.int32)


def _wrap(x: Array, size: Any) -> Array:
    """``x mod size`` for ``x < 2 size``."""
    size = jnp.asarray(size, jnp.uint32)
    return jnp.where(x >= size, x - size, x)


@dataclass(frozen=True)
class Stratified:
    """A stream for every shard of the rows, each of which gives the same part of a minibatch.

    - **kind** - the shards' streams: :class:`IID`, :class:`Epoch` or :class:`Blocks`.
    - **shards** - which device holds which rows.
    - **batch_size** - rows of a minibatch, on all shards.
    """

    kind: type
    shards: Shards
    batch_size: int

    def init(self, rng_key: Array) -> StreamState:
        return jax.vmap(_init)(random.split(rng_key, len(self.shards.counts)))

    def draw(self, state: StreamState, rng_key: Array, num_steps: int) -> tuple[StreamState, Array]:
        def one(size: Any, state: StreamState, key: Array) -> tuple[StreamState, Array]:
            return self.kind(size, self.batch_size // num).draw(state, key, num_steps)

        num = len(self.shards.counts)
        state, rows = _on_each(one, self.shards, state, random.split(rng_key, num))
        return state, self.shards.spread(jnp.moveaxis(rows, 0, 1).reshape(num_steps, -1))


def _on_each(fn: Callable[..., Any], shards: Shards, *of_shard: Any) -> Any:
    """``fn(number of rows, ...) -> (..., rows)`` for every shard, with rows numbered among all."""
    if shards.is_even:
        state, rows = jax.vmap(lambda *xs: fn(shards.longest, *xs))(*of_shard)
    else:
        state, rows = jax.vmap(fn)(jnp.asarray(shards.counts, jnp.int32), *of_shard)
    firsts = jnp.asarray(shards.firsts)
    return state, rows + firsts.reshape(-1, *[1] * (rows.ndim - 1))


STREAMS: dict[str, type] = {"iid": IID, "epoch": Epoch, "blocks": Blocks}
"""The streams by the names of a kernel's ``minibatch`` argument."""


def stream_of(plate: Plate, minibatch: str) -> Stream:
    """The stream of a plate's minibatches.

    :param minibatch: one of :data:`STREAMS`.
    """
    kind = STREAMS[minibatch]
    if plate.shards is None:
        return kind(plate.size, plate.subsample_size)
    return Stratified(kind, plate.shards, plate.subsample_size)


def independent_minibatch(plate: Plate, minibatch: str, rng_key: Array) -> Array:
    """A minibatch that is independent of any stream, shape ``(subsample_size,)``.

    :param minibatch: ``"blocks"`` for consecutive rows; random rows for the others.
    """
    draw = _independent_block if minibatch == "blocks" else _independent_rows
    shards = plate.shards
    if shards is None:
        return draw(rng_key, plate.size, plate.subsample_size)
    keys = random.split(rng_key, len(shards.counts))
    _, rows = _on_each(lambda size, key: (None, draw(key, size, plate.part)), shards, keys)
    return shards.spread(rows.reshape(-1))
