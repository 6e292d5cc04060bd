"""Subsampling of large plates: no overflow, uniform, and at the same cost."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from numpyro_sgmcmc.data.subsampling import ShuffledSubsampling
from tests.data.streams import (
    Stream,
    assert_uniform,
    contiguous,
    each_subsampling,
    make_stream,
    sample_from_seeds,
    sample_indices,
    shuffled,
)

# --- Large plates

LARGEST = 2**31 - 1


@each_subsampling
@pytest.mark.parametrize("size", [LARGEST, 2**30 + 3])
def test_subsampling_of_a_large_plate_does_not_overflow(name, size):
    stream = make_stream(name, size, 1000)
    _, rows = sample_indices(stream, stream.init(random.key(3)), random.key(4), 50)
    rows = np.asarray(rows, np.int64)
    assert rows.min() >= 0
    assert rows.max() < size
    assert (rows < size / 2).any()
    assert (rows > size / 2).any()
    if name != "iid":
        assert np.unique(rows).size == rows.size


@pytest.mark.parametrize("size", [LARGEST, 3 * 2**29])
def test_shuffled_at_the_end_of_a_large_epoch_does_not_overflow(size):
    stream = shuffled(size, 1000)
    state = stream.init(random.key(3))._replace(offset=jnp.uint32(size - 1500))
    state, rows = sample_indices(stream, state, random.key(4), 3)
    rows = np.asarray(rows, np.int64).ravel()
    assert rows.min() >= 0
    assert rows.max() < size
    assert np.unique(rows[:1500]).size == 1500
    assert (int(state.epoch), int(state.offset)) == (1, 1500)


def test_contiguous_last_block_of_a_large_plate_is_complete():
    stream = contiguous(LARGEST, 1000)
    num_blocks = LARGEST // 1000
    state = stream.init(random.key(3))._replace(offset=jnp.uint32(num_blocks - 1))
    state, rows = sample_indices(stream, state, random.key(4), 2)
    rows = np.asarray(rows, np.int64)
    np.testing.assert_array_equal(rows, (rows[:, :1] + np.arange(1000)) % LARGEST)
    assert (int(state.epoch), int(state.offset)) == (1, 1)


def test_subsampling_of_a_large_plate_is_uniform():
    rows = sample_from_seeds(shuffled(LARGEST, 10), 10, 2000)
    assert_uniform(rows.astype(np.int64) * 64 // LARGEST, 64)
    starts = sample_from_seeds(contiguous(LARGEST, 10), 10, 2000)[:, :, 0]
    assert_uniform(starts.astype(np.int64) * 64 // LARGEST, 64)


def test_shuffled_neighbouring_positions_are_not_neighbouring_rows():
    rows = sample_from_seeds(shuffled(10**6, 2), 1, 20_000)[:, 0].astype(np.int64)
    distance = np.abs(rows[:, 0] - rows[:, 1])
    # The shuffle leaves a pair together with a probability of about 2^-12 = 5 of 20,000.
    assert (distance < 10).sum() < 25
    assert_uniform((rows[:, 0] - rows[:, 1]) % 10**6 * 20 // 10**6, 20)


def test_shuffled_epoch_counter_wraps_around():
    stream = shuffled(5, 2)
    state = stream.init(random.key(0))._replace(epoch=jnp.uint32(2**32 - 1))
    state, rows = sample_indices(stream, state, random.key(0), 5)
    np.testing.assert_array_equal(np.sort(rows.ravel().reshape(2, 5)), [range(5)] * 2)
    assert int(state.epoch) == 1


# --- Cost


def equations(jaxpr):
    """Yield all equations of a jaxpr, including those of the functions that it calls."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for part in value if isinstance(value, (list, tuple)) else [value]:
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def measure_cost(stream, num_steps=3):
    """Return the number of equations of a call, and the size of its largest array."""
    state = stream.init(random.key(0))
    closed = jax.make_jaxpr(partial(stream.sample_indices, num_steps=num_steps))(
        state, random.key(1)
    )
    eqns = list(equations(closed.jaxpr))
    arrays = [v.aval for eqn in eqns for v in (*eqn.invars, *eqn.outvars)]
    return len(eqns), max(int(np.prod(getattr(a, "shape", ()))) for a in arrays)


@each_subsampling
def test_subsampling_cost_does_not_grow_with_the_plate(name):
    small, large = (measure_cost(make_stream(name, size, 20)) for size in (1000, LARGEST))
    assert small == large
    assert large[1] <= 4 * 3 * 20


def test_cost_of_a_stored_permutation_is_detected():
    class Stored(ShuffledSubsampling):
        def sample_indices(self, state, rng_key, num_steps, size, batch_size):
            order = random.permutation(rng_key, size)
            return state, order[: num_steps * batch_size].reshape(num_steps, -1)

    assert measure_cost(Stream(Stored(), 1000, 20))[1] >= 1000
