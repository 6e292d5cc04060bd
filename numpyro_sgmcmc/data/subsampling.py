"""Minibatch indices of a subsampled plate: O(B) time and O(1) memory per step, for any data size.

A :class:`Subsampling` maps the state of a stream to the row indices of the next minibatches:

- :class:`ContiguousSubsampling` - blocks of consecutive rows in random order;
- :class:`ShuffledSubsampling` - random rows without replacement, each once per epoch;
- :class:`PalindromeSubsampling` - the same, every second epoch in the reverse order of the first;
- :class:`IIDSubsampling` - random rows with replacement.

All give unbiased gradients. A further method is a subclass with an entry in :data:`SUBSAMPLINGS`.
A :class:`Plate` holds the size of a plate and of its minibatches, its shards and its
always-included rows; :func:`sample_minibatches` combines the two, with one stream per shard.

Permutations are never stored; the image of a position is computed when it is needed, with the
swap-or-not shuffle (Hoang, Morris and Rogaway, 2012, doi:10.1007/978-3-642-32009-5_1): each round
pairs a position x with K - x mod N, and a hash of the pair decides whether the two swap. This is a
bijection for every N and needs no loop of data-dependent length. After r rounds from a uniform
offset, the correlation of two positions is 2^-r.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from numpyro_sgmcmc.data.sharded_array import Shards

# 2^32 over the golden ratio: its multiples are evenly spaced among the 32-bit words.
_GOLDEN_RATIO_UINT32 = 0x9E3779B9
# Rounds of the shuffle: two positions stay correlated by 2^-12.
_NUM_SHUFFLE_ROUNDS = 12

Indices = Mapping[str, Array | np.ndarray]
"""Row indices by plate name."""


class StreamState(NamedTuple):
    """State of a stream of minibatches."""

    seed: Array  # two random 32-bit words that determine all permutations of the stream
    epoch: Array  # number of completed passes over the rows, modulo 2^32
    offset: Array  # rows (or blocks) visited in the current pass

    @classmethod
    def init(cls, rng_key: Array) -> StreamState:
        """Return the initial state, a function of the key."""
        return cls(random.bits(rng_key, (2,), jnp.uint32), jnp.uint32(0), jnp.uint32(0))


class Subsampling:
    """Method that selects the minibatches of a plate.

    Subclasses are frozen dataclasses without fields, because they are static in compiled steps.
    """

    name: ClassVar[str]  # value of the kernels' `subsampling` argument
    is_independent: ClassVar[bool] = False  # whether successive minibatches are independent
    # whether a minibatch consists of consecutive rows, which are alike in sorted data
    is_contiguous: ClassVar[bool] = False
    is_palindrome: ClassVar[bool] = False  # whether every second epoch reverses the one before

    def sample_indices(
        self, state: StreamState, rng_key: Array, num_steps: int, size: Any, batch_size: int
    ) -> tuple[StreamState, Array]:
        """Return the next state, and int32 row indices of shape ``(num_steps, batch_size)``.

        :param rng_key: fresh key, for methods that are not a function of the state alone.
        :param size: number of rows; an array where each shard has a different number.
        """
        raise NotImplementedError

    def sample_independent_indices(self, rng_key: Array, size: Any, batch_size: int) -> Array:
        """Return a minibatch that is independent of any stream, shape ``(batch_size,)``."""
        return random.randint(rng_key, (batch_size,), 0, size, dtype=jnp.int32)

    def has_distinct_rows(self, size: int, batch_size: int) -> bool:
        """Return whether no minibatch contains a row twice."""
        return True


@dataclass(frozen=True)
class ContiguousSubsampling(Subsampling):
    """Blocks of B consecutive rows in random order; a new order and offset each epoch.

    Consecutive rows are adjacent in memory, which makes a step three to five times cheaper. The
    order of the rows must be unrelated to the data. Where B does not divide N, ``N mod B`` rows
    (different ones each epoch) are left out of an epoch.
    """

    name = "contiguous"
    is_contiguous = True

    def sample_indices(
        self, state: StreamState, rng_key: Array, num_steps: int, size: Any, batch_size: int
    ) -> tuple[StreamState, Array]:
        num_blocks = size // batch_size
        state, epochs, positions = _advance_stream(state, num_blocks, num_steps)
        seed = epoch_seed(state.seed, epochs)
        block = permute(seed, positions, num_blocks)
        offset = _hash_uint32(seed + jnp.uint32(_GOLDEN_RATIO_UINT32 >> 1))
        num_rows = jnp.asarray(size, jnp.uint32)
        offset = jnp.zeros_like(offset) if _is_static_one(size) else offset % num_rows
        start = _wrap_index(offset + block * jnp.uint32(batch_size), size)
        indices = start[:, None] + jnp.arange(batch_size, dtype=jnp.uint32)
        return state, _wrap_index(indices, size).astype(jnp.int32)

    def sample_independent_indices(self, rng_key: Array, size: Any, batch_size: int) -> Array:
        start = random.randint(rng_key, (), 0, size, dtype=jnp.uint32)
        indices = start + jnp.arange(batch_size, dtype=jnp.uint32)
        return _wrap_index(indices, size).astype(jnp.int32)


@dataclass(frozen=True)
class ShuffledSubsampling(Subsampling):
    """Successive B rows of a random permutation; a new permutation each epoch.

    The permutation is evaluated at the B positions of a step only. Where B does not divide N, one
    minibatch takes the rest of an epoch and the beginning of the next.
    """

    name = "shuffled"

    def sample_indices(
        self, state: StreamState, rng_key: Array, num_steps: int, size: Any, batch_size: int
    ) -> tuple[StreamState, Array]:
        state, epochs, positions = _advance_stream(state, size, num_steps * batch_size)
        if self.is_palindrome:
            last = jnp.asarray(size, jnp.uint32) - 1
            positions = jnp.where(epochs % 2 == 1, last - positions, positions)
            epochs = epochs // 2
        indices = permute(epoch_seed(state.seed, epochs), positions, size)
        return state, indices.astype(jnp.int32).reshape(num_steps, batch_size)

    def has_distinct_rows(self, size: int, batch_size: int) -> bool:
        return size % batch_size == 0


@dataclass(frozen=True)
class PalindromeSubsampling(ShuffledSubsampling):
    """Epochs in pairs: a random permutation, then the same one backwards.

    Over a pair the noise of each minibatch has its mean time at the middle, as if all of it acted
    there. Reference: Paulin, Whalley, Chada and Leimkuhler (2025), *Sampling from Bayesian neural
    network posteriors with symmetric minibatch splitting Langevin dynamics*.
    """

    name = "palindrome"
    is_palindrome = True


@dataclass(frozen=True)
class IIDSubsampling(Subsampling):
    """Random rows with replacement at every step."""

    name = "iid"
    is_independent = True

    def sample_indices(
        self, state: StreamState, rng_key: Array, num_steps: int, size: Any, batch_size: int
    ) -> tuple[StreamState, Array]:
        return state, random.randint(rng_key, (num_steps, batch_size), 0, size, dtype=jnp.int32)

    def has_distinct_rows(self, size: int, batch_size: int) -> bool:
        return False


SUBSAMPLINGS: dict[str, Subsampling] = {
    s.name: s
    for s in (
        IIDSubsampling(),
        ShuffledSubsampling(),
        PalindromeSubsampling(),
        ContiguousSubsampling(),
    )
}
"""Subsampling methods by name."""


class Plate(NamedTuple):
    """A subsampled plate."""

    name: str  # name of the plate
    size: int  # number of rows
    subsample_size: int  # rows per minibatch
    # distribution of the rows over devices, each of which contributes equally many rows to a
    # minibatch; None where the rows are on one device
    shards: Shards | None = None
    row_offset: Any = 0  # index of the first row: not 0 where this is the part of one device
    max_size: int = 0  # upper bound on `size` where that is known only at run time
    # rows that every minibatch includes, in increasing order; the rest of a minibatch is sampled
    # from the other rows
    included_rows: tuple[int, ...] = ()

    @property
    def rows_per_shard(self) -> tuple[int, ...]:
        """Number of rows of each shard; one shard where the rows are on one device."""
        return (self.size,) if self.shards is None else self.shards.rows_per_shard

    @property
    def num_shards(self) -> int:
        return len(self.rows_per_shard)

    @property
    def subsample_size_per_shard(self) -> int:
        return self.subsample_size // self.num_shards

    @property
    def shard_offsets_and_sizes(self) -> tuple[np.ndarray, np.ndarray]:
        """First row and number of rows of each shard, shape ``(num_shards, 1)``."""
        sizes = np.array(self.rows_per_shard)[:, None]
        return np.cumsum(sizes, 0) - sizes, sizes

    @property
    def max_subsample_size(self) -> int:
        """Largest possible ``subsample_size``."""
        return self.num_shards * min(self.rows_per_shard)

    @property
    def batches_per_epoch(self) -> int:
        """Minibatches per epoch; those of the largest shard where there are several."""
        if self.included_rows:
            return self.random_part.batches_per_epoch
        return -(-max(self.rows_per_shard) // self.subsample_size_per_shard)

    @property
    def random_part(self) -> Plate:
        """The plate of the rows that are not always included, from which the rest is sampled."""
        num_included = len(self.included_rows)
        return self._replace(
            size=self.size - num_included,
            subsample_size=self.subsample_size - num_included,
            included_rows=(),
        )

    @property
    def row_weights(self) -> np.ndarray | None:
        """Weights of a minibatch's rows relative to ``size / subsample_size``, for an unbiased
        log likelihood; None where all rows have weight one.
        """
        if not self.included_rows:
            return None
        num_included, random_part = len(self.included_rows), self.random_part
        random_weight = random_part.size / random_part.subsample_size
        weights = [1.0] * num_included + [random_weight] * random_part.subsample_size
        return np.array(weights) * (self.subsample_size / self.size)

    def add_included_rows(self, random_indices: Any) -> Any:
        """Return row indices: the always-included rows followed by the sampled rows.

        :param random_indices: positions among the rows that are not always included, NumPy or JAX,
            shape ``(..., subsample_size - len(included_rows))``.
        """
        if not self.included_rows:
            return random_indices
        xp: Any = np if isinstance(random_indices, np.ndarray) else jnp
        included = xp.asarray(self.included_rows, random_indices.dtype)
        # A position among the other rows grows by the number of included rows before it.
        num_others_before = xp.asarray(
            np.array(self.included_rows) - np.arange(len(self.included_rows))
        )
        num_included_before = xp.searchsorted(num_others_before, random_indices, side="right")
        indices = random_indices + num_included_before.astype(random_indices.dtype)
        included = xp.broadcast_to(included, (*random_indices.shape[:-1], included.size))
        return xp.concatenate([included, indices], -1)

    def with_shards(self, shards: Shards) -> Plate:
        """Return the plate with sharded rows; ``subsample_size`` is rounded up to whole shards."""
        num_shards = len(shards.rows_per_shard)
        rounded = -(-self.subsample_size // num_shards) * num_shards
        return self._replace(subsample_size=rounded, shards=shards)

    def for_shard(self, row_offset: Any, num_rows: Any) -> Plate:
        """Return the part of one device, or the plate itself where its rows are not sharded."""
        if self.shards is None:
            return self
        # Always-included rows are selected on one device only.
        assert not self.included_rows
        size, max_size = self.subsample_size_per_shard, self.shards.max_rows_per_shard
        return Plate(self.name, num_rows, size, row_offset=row_offset, max_size=max_size)


def init_stream(plate: Plate, rng_key: Array) -> StreamState:
    """Return the initial state of a plate's stream, with a leading axis where it has shards."""
    if plate.shards is None:
        return StreamState.init(rng_key)
    return jax.vmap(StreamState.init)(random.split(rng_key, plate.num_shards))


def init_streams(plates: Sequence[Plate], rng_key: Array) -> dict[str, StreamState]:
    """Return the initial state of each plate's stream, by plate name."""
    keys = random.split(rng_key, len(plates))
    return {p.name: init_stream(p, key) for p, key in zip(plates, keys, strict=True)}


def sample_minibatches_of_plates(
    subsampling: Subsampling,
    plates: Sequence[Plate],
    streams: dict[str, StreamState],
    rng_key: Array,
    num_steps: int,
) -> tuple[dict[str, StreamState], dict[str, Array]]:
    """Return the streams after some steps, and the row indices of all these steps, by plate name.

    All at once: small samples cost more than they yield, and indices computed inside a loop of
    steps would be fused into the gather and computed again there.
    """
    next_streams, indices = {}, {}
    for p, key in zip(plates, random.split(rng_key, len(plates)), strict=True):
        next_streams[p.name], indices[p.name] = sample_minibatches(
            subsampling, p, streams[p.name], key, num_steps
        )
    return next_streams, indices


def sample_minibatches(
    subsampling: Subsampling, plate: Plate, state: StreamState, rng_key: Array, num_steps: int
) -> tuple[StreamState, Array]:
    """Return the stream's next state and row indices of shape ``(num_steps, subsample_size)``.

    Every shard contributes equally many rows to a minibatch.
    """

    def sample(size: Any, batch_size: int, key: Array, state: StreamState) -> Any:
        return subsampling.sample_indices(state, key, num_steps, size, batch_size)

    return _sample_shards(plate, sample, rng_key, state)


def sample_independent_minibatch(subsampling: Subsampling, plate: Plate, rng_key: Array) -> Array:
    """Return a minibatch that is independent of any stream, shape ``(subsample_size,)``."""

    def sample(size: Any, batch_size: int, key: Array) -> tuple[None, Array]:
        return None, subsampling.sample_independent_indices(key, size, batch_size)

    return _sample_shards(plate, sample, rng_key)[1]


def _sample_shards(plate: Plate, sample: Callable[..., Any], rng_key: Array, *state: Any) -> Any:
    """Map ``(size, batch_size, key, *state) -> (state, indices)`` over shards, if there are any."""
    if (shards := plate.shards) is None:
        random_part = plate.random_part
        next_state, indices = sample(random_part.size, random_part.subsample_size, rng_key, *state)
        if plate.subsample_size == plate.size:
            indices = jnp.broadcast_to(jnp.arange(plate.size, dtype=indices.dtype), indices.shape)
        return next_state, plate.add_included_rows(indices)

    def sample_shard(size: Any, key: Array, *state: Any) -> Any:
        return sample(size, plate.subsample_size_per_shard, key, *state)

    keys = random.split(rng_key, plate.num_shards)
    if shards.is_balanced:
        sample_all = jax.vmap(partial(sample_shard, shards.max_rows_per_shard))
    else:
        sizes = jnp.asarray(shards.rows_per_shard, jnp.int32)
        sample_all = partial(jax.vmap(sample_shard), sizes)
    next_state, indices = sample_all(keys, *state)
    offsets = jnp.asarray(shards.row_offsets)
    indices = indices + offsets.reshape(-1, *[1] * (indices.ndim - 1))
    # All rows of a minibatch in one axis.
    indices = jnp.moveaxis(indices, 0, -2).reshape(*indices.shape[1:-1], -1)
    return next_state, shards.shard_indices(indices)


def _advance_stream(
    state: StreamState, num_positions: Any, num_steps: int
) -> tuple[StreamState, Array, Array]:
    """Advance an endless pass over ``range(num_positions)`` by ``num_steps`` positions.

    :return: the next state, and the epoch and the position of each step.
    """
    walk = state.offset + jnp.arange(num_steps, dtype=jnp.uint32)
    if not isinstance(num_positions, int):
        num_positions = num_positions.astype(jnp.uint32)
    if _is_static_one(num_positions):
        end = StreamState(state.seed, state.epoch + jnp.uint32(num_steps), state.offset)
        return end, state.epoch + walk, jnp.zeros_like(walk)
    epochs, positions = state.epoch + walk // num_positions, walk % num_positions
    end_walk = state.offset + jnp.uint32(num_steps)
    end = StreamState(state.seed, state.epoch + end_walk // num_positions, end_walk % num_positions)
    return end, epochs, positions


def epoch_seed(seed: Array, epoch: Array) -> Array:
    """Return a 32-bit word for each epoch."""
    return _hash_uint32(seed[0] ^ _hash_uint32(epoch + seed[1]))


def permute(seed: Array, positions: Array, size: Any) -> Array:
    """Return the images of ``positions`` under the permutation of ``range(size)`` given by a seed.

    :param seed: 32-bit word, or one word per position.
    :param positions: uint32 numbers below ``size``.
    """
    if _is_static_one(size):
        return jnp.zeros_like(positions)
    n = jnp.asarray(size, jnp.uint32)
    positions = positions + seed % n
    positions = jnp.where(positions >= n, positions - n, positions)

    def shuffle(i: Array, positions: Array) -> Array:
        round_key = _hash_uint32(seed + jnp.uint32(_GOLDEN_RATIO_UINT32) * i.astype(jnp.uint32))
        pivot = round_key % n
        partner = jnp.where(pivot >= positions, pivot - positions, pivot + (n - positions))
        pair = jnp.maximum(positions, partner)
        coin = _hash_uint32(pair * jnp.uint32(_GOLDEN_RATIO_UINT32) + round_key) >> 31
        return jnp.where(coin == 1, partner, positions)

    # Unrolled rounds take a tenth of the compilation of a chain.
    return lax.fori_loop(1, _NUM_SHUFFLE_ROUNDS + 1, shuffle, positions)


def _hash_uint32(x: Array) -> Array:
    """Return a bijection of 32-bit words: each input bit flips each output bit half the time.

    Constants: Chris Wellons, "Prospecting for hash functions" (2018), lowbias32.
    """
    x = x ^ (x >> 16)
    x = x * jnp.uint32(0x7FEB352D)
    x = x ^ (x >> 15)
    x = x * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _is_static_one(size: Any) -> bool:
    """Return whether a size is the integer 1: XLA cannot compile a remainder by it on a CPU."""
    return isinstance(size, int) and size == 1


def _wrap_index(x: Array, size: Any) -> Array:
    """Return ``x mod size`` for ``x < 2 size``."""
    size = jnp.asarray(size, jnp.uint32)
    return jnp.where(x >= size, x - size, x)
