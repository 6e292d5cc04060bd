"""Random permutations that are never stored: a place's image is computed when it is asked for.

The permutation is the swap-or-not shuffle (Hoang, Morris and Rogaway, 2012,
doi:10.1007/978-3-642-32009-5_1): in each round a place x is paired with K - x mod N, and a hash
of the pair decides whether the two swap. It is a bijection for any N, needs no loop of data-
dependent length, and after r rounds from a uniform offset two places are correlated by 2^-r.

What a way of visiting the rows of a plate must tell of itself, and its stream's state.

Blocks of consecutive rows.

Random rows without replacement.

Independent rows.

The subsampled plate, and the rows that are wanted of it.

A plate's minibatches by a scheme; where its rows are spread, a stream for every shard.

Streams of minibatch indices: O(B) time and O(1) memory a step, whatever the number of rows.

Three ways to visit the rows of one plate, all unbiased; a new one is a file here and a name in
:data:`MINIBATCH_SCHEMES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_sgmcmc.data.sharded_array import Shards

__all__ = [
    "ContiguousSubsampling",
    "GOLDEN_RATIO_UINT32",
    "IIDSubsampling",
    "Indices",
    "Plate",
    "SUBSAMPLINGS",
    "ShuffledSubsampling",
    "StreamState",
    "Subsampling",
    "advance_stream",
    "epoch_seed",
    "hash_uint32",
    "init_stream",
    "is_static_one",
    "permute",
    "sample_iid_indices",
    "sample_independent_minibatch",
    "sample_minibatches",
    "wrap_index",
]

GOLDEN_RATIO_UINT32 = 0x9E3779B9
"""2^32 over the golden ratio: multiples of it are spread evenly over the 32-bit words."""


_NUM_SHUFFLE_ROUNDS = 12


def hash_uint32(x: Array) -> Array:
    """A bijection of 32-bit words in which each input bit flips each output bit half the time.

    Constants: Chris Wellons, "Prospecting for hash functions" (2018), lowbias32.
    """
    x = x ^ (x >> 16)
    x = x * jnp.uint32(0x7FEB352D)
    x = x ^ (x >> 15)
    x = x * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def epoch_seed(seed: Array, epoch: Array) -> Array:
    """A 32-bit word for each epoch."""
    return hash_uint32(seed[0] ^ hash_uint32(epoch + seed[1]))


def is_static_one(size: Any) -> bool:
    """XLA on a CPU cannot compile a remainder by one."""
    return isinstance(size, int) and size == 1


def permute(seed: Array, positions: Array, size: Any) -> Array:
    """The image of the places ``positions`` under the permutation of ``range(size)`` that ``seed`` names."""
    if is_static_one(size):
        return jnp.zeros_like(positions)
    n = jnp.asarray(size, jnp.uint32)
    positions = positions + seed % n
    positions = jnp.where(positions >= n, positions - n, positions)
    for i in range(1, _NUM_SHUFFLE_ROUNDS + 1):
        round_key = hash_uint32(seed + jnp.uint32((GOLDEN_RATIO_UINT32 * i) & 0xFFFFFFFF))
        pivot = round_key % n
        partner = jnp.where(pivot >= positions, pivot - positions, pivot + (n - positions))
        coin = (
            hash_uint32(
                jnp.maximum(positions, partner) * jnp.uint32(GOLDEN_RATIO_UINT32) + round_key
            )
            >> 31
        )
        positions = jnp.where(coin == 1, partner, positions)
    return positions


def wrap_index(x: Array, size: Any) -> Array:
    """``x mod size`` for ``x < 2 size``."""
    size = jnp.asarray(size, jnp.uint32)
    return jnp.where(x >= size, x - size, x)


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


Indices = Mapping[str, Array | np.ndarray]
"""Row indices by plate name."""


class Plate(NamedTuple):
    """
    - **name** - the plate's name.
    - **size** - number of rows.
    - **subsample_size** - rows in a minibatch.
    - **shards** - where its rows are spread over devices, each of which has the same part of a
      minibatch; else None.
    - **row_offset** - the first of its rows: not 0 where these are one device's part.
    - **max_size** - the most rows that it may have, where ``size`` is known only when it runs.
    - **included_rows** - rows that are in every minibatch, in rising order; the others are drawn for
      what room is left.
    """

    name: str
    size: int
    subsample_size: int
    shards: Shards | None = None
    row_offset: Any = 0
    max_size: int = 0
    included_rows: tuple[int, ...] = ()

    @property
    def subsample_size_per_shard(self) -> int:
        """Rows of a minibatch on one device."""
        return self.subsample_size // (
            1 if self.shards is None else len(self.shards.rows_per_shard)
        )

    @property
    def shard_offsets_and_sizes(self) -> tuple[np.ndarray, np.ndarray]:
        """First row and number of rows of each shard, shape ``(num_shards, 1)``."""
        if self.shards is None:
            return np.array([[0]]), np.array([[self.size]])
        return self.shards.row_offsets[:, None], np.array(self.shards.rows_per_shard)[:, None]

    @property
    def random_part(self) -> Plate:
        """The rows that are drawn, of which there are as many as are not decisive."""
        num = len(self.included_rows)
        size, part = self.size - num, self.subsample_size - num
        return self._replace(size=size, subsample_size=part, included_rows=())

    @property
    def row_weights(self) -> np.ndarray | None:
        """What a minibatch's rows weigh beside (rows / chosen rows) each, so that the likelihood
        stays unbiased; None where all weigh the same.
        """
        if not self.included_rows:
            return None
        num, drawn = len(self.included_rows), self.random_part
        each = [1.0] * num + [drawn.size / drawn.subsample_size] * drawn.subsample_size
        return np.array(each) * (self.subsample_size / self.size)

    def add_included_rows(self, random_indices: Any) -> Any:
        """Minibatches of all rows from the places of those that are drawn.

        :param random_indices: places among the rows that are not decisive, shape ``(..., room)``, NumPy's or
            JAX's.
        :return: the decisive rows before these rows, shape ``(..., subsample_size)``.
        """
        if not self.included_rows:
            return random_indices
        xp: Any = np if isinstance(random_indices, np.ndarray) else jnp
        first = xp.asarray(self.included_rows, random_indices.dtype)
        # A place is as many rows further on as there are decisive ones before it.
        ahead = xp.asarray(np.array(self.included_rows) - np.arange(len(self.included_rows)))
        rows = random_indices + xp.searchsorted(ahead, random_indices, side="right").astype(
            random_indices.dtype
        )
        first = xp.broadcast_to(first, (*random_indices.shape[:-1], len(self.included_rows)))
        return xp.concatenate([first, rows], -1)

    @property
    def batches_per_epoch(self) -> int:
        """Minibatches in an epoch; in that of the largest shard."""
        if self.included_rows:
            return self.random_part.batches_per_epoch
        return -(-int(self.shard_offsets_and_sizes[1].max()) // self.subsample_size_per_shard)

    @property
    def max_subsample_size(self) -> int:
        """The largest ``subsample_size`` that it can have."""
        if self.shards is None:
            return self.size
        return len(self.shards.rows_per_shard) * min(self.shards.rows_per_shard)

    def with_shards(self, shards: Shards) -> Plate:
        """With rows spread over devices, each of which has as many rows of a minibatch."""
        num = len(shards.rows_per_shard)
        part = -(-self.subsample_size // num)
        return self._replace(subsample_size=num * part, shards=shards)

    def for_shard(self, row_offset: Any, num_rows: Any) -> Plate:
        """The part of one device, if its rows are spread over devices."""
        if self.shards is None:
            return self
        return Plate(
            self.name,
            num_rows,
            self.subsample_size_per_shard,
            None,
            row_offset,
            self.shards.max_rows_per_shard,
        )


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


SUBSAMPLINGS: dict[str, Subsampling] = {
    s.name: s for s in (IIDSubsampling(), ShuffledSubsampling(), ContiguousSubsampling())
}
"""The schemes by the names of a kernel's ``minibatch`` argument."""
