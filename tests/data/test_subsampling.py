"""Subsampling: each row once per epoch, all orders equally probable, and independence."""

from math import gcd

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from numpyro_sgmcmc.data.subsampling import (
    ContiguousSubsampling,
    ShuffledSubsampling,
    StreamState,
    epoch_seed,
    permute,
)
from tests.data.streams import (
    Stream,
    assert_uniform,
    contiguous,
    each_subsampling,
    iid,
    make_stream,
    palindrome,
    sample_from_seeds,
    sample_from_states,
    sample_in_parts,
    sample_indices,
    shuffled,
)
from tests.quick import quick_if

# --- Every row once per epoch

QUICK_SIZES = [(1, 1), (2, 1), (7, 7), (12, 4), (13, 4), (61, 12)]
SIZES = QUICK_SIZES + [quick_if(False, *x) for x in ((15, 12), (59, 6), (60, 12), (500, 3))]


def sample_uncompiled(stream, positions_per_step, num_steps):
    """Return indices of at least that many steps, in calls of 12 and 60 positions in turn."""
    # Not compiled, so that calls of one shape share their operations for all sizes.
    state, rows, call = stream.init(random.key(0)), [], 0
    while sum(map(len, rows)) < num_steps:
        state, new = stream.sample_indices(
            state, random.key(call), (12, 60)[call % 2] // positions_per_step
        )
        rows.append(np.asarray(new))
        call += 1
    return state, np.concatenate(rows)


@pytest.mark.parametrize(("size", "batch_size"), SIZES)
def test_shuffled_epoch_visits_every_row_once(size, batch_size):
    epochs = max(3, batch_size // gcd(size, batch_size))
    state, rows = sample_uncompiled(
        shuffled(size, batch_size), batch_size, -(-epochs * size // batch_size)
    )
    visited = rows.ravel()[: epochs * size].reshape(epochs, size)
    np.testing.assert_array_equal(np.sort(visited, axis=1), np.tile(np.arange(size), (epochs, 1)))
    assert (int(state.epoch), int(state.offset)) == divmod(rows.size, size)


@pytest.mark.parametrize(("size", "batch_size"), SIZES)
def test_contiguous_epoch_visits_no_row_twice(size, batch_size):
    num_blocks = size // batch_size
    state, rows = sample_uncompiled(contiguous(size, batch_size), 1, 3 * num_blocks)
    assert (int(state.epoch), int(state.offset)) == divmod(len(rows), num_blocks)
    np.testing.assert_array_equal(rows, (rows[:, :1] + np.arange(batch_size)) % size)
    for visited in rows[: 3 * num_blocks].reshape(3, num_blocks, batch_size):
        assert np.unique(visited).size == num_blocks * batch_size


@pytest.mark.parametrize(("size", "batch_size"), SIZES)
def test_palindrome_epochs_are_pairs_of_reversed_permutations(size, batch_size):
    num_rows = 6 * size
    state, rows = sample_uncompiled(
        palindrome(size, batch_size), batch_size, -(-num_rows // batch_size)
    )
    first, second = rows.ravel()[:num_rows].reshape(3, 2, size).swapaxes(0, 1)
    np.testing.assert_array_equal(second, first[:, ::-1])
    np.testing.assert_array_equal(np.sort(first, axis=1), np.tile(np.arange(size), (3, 1)))
    assert size < 7 or len({tuple(order) for order in first}) == 3
    assert (int(state.epoch), int(state.offset)) == divmod(rows.size, size)


@each_subsampling
@pytest.mark.parametrize(
    ("size", "batch_size"),
    [(1, 1), quick_if(False, 2, 1), (7, 7), (100, 64), quick_if(False, 100, 99)],
)
def test_subsampling_with_few_minibatches_gives_valid_indices(name, size, batch_size):
    _, rows = sample_in_parts(make_stream(name, size, batch_size), 0, [3])
    assert rows.min() >= 0
    assert rows.max() < size


@pytest.mark.parametrize("stream", [shuffled(1000, 100), shuffled(1000, 300), contiguous(1000, 50)])
def test_subsampling_epochs_have_different_orders(stream):
    steps = -(-1000 // stream.batch_size)
    _, rows = sample_in_parts(stream, 0, [steps] * 20)
    orders = {tuple(r.ravel()) for r in rows.reshape(20, steps, -1)}
    assert len(orders) == 20


@each_subsampling
def test_subsampling_with_another_seed_gives_other_rows(name):
    stream = make_stream(name, 1000, 10)
    first, second = (
        sample_indices(stream, stream.init(key), key, 20)[1] for key in random.split(random.key(0))
    )
    assert (first != second).mean() > 0.9


@pytest.mark.parametrize("stream", [shuffled(101, 7), palindrome(101, 7)], ids=str)
def test_stream_in_parts_is_the_same_stream(stream):
    _, whole = sample_in_parts(stream, 5, [60])
    _, parts = sample_in_parts(stream, 5, [1, 59])
    np.testing.assert_array_equal(whole, parts)


def test_permute_of_any_size_is_a_bijection():
    positions = jnp.tile(jnp.arange(256, dtype=jnp.uint32), (40, 1))
    keys = random.bits(random.key(2), (40, 1), jnp.uint32)
    for size in [*range(1, 34), 63, 64, 65, 100, 127, 255, 256]:
        images = np.asarray(permute(keys, positions, size))[:, :size]
        np.testing.assert_array_equal(np.sort(images), np.tile(np.arange(size), (40, 1)))


# --- Uniformity


@pytest.mark.parametrize(
    "stream",
    [
        iid(12, 4),
        shuffled(12, 4),
        shuffled(10, 4),
        palindrome(10, 4),
        contiguous(12, 4),
        contiguous(11, 5),
    ],
    ids=str,
)
def test_subsampling_position_has_a_uniform_row(stream):
    rows = sample_from_seeds(stream, 5, 20_000)
    for step in range(5):
        for position in range(stream.batch_size):
            assert_uniform(rows[:, step, position], stream.size)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_shuffled_permutations_are_equally_probable(size):
    orders = sample_from_seeds(shuffled(size, size), 1, 60_000)[:, 0]
    _, cells = np.unique(orders @ size ** np.arange(size), return_inverse=True)
    assert_uniform(cells, {2: 2, 3: 6, 5: 120}[size])


@pytest.mark.parametrize("size", [9, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("positions", [(0, 1), (3, 4), (0, 8), (2, 5)])
def test_shuffled_pairs_are_equally_probable(size, positions):
    rows = sample_from_seeds(shuffled(size, size), 1, 60_000)[:, 0]
    a, b = rows[:, positions[0]], rows[:, positions[1]]
    assert_uniform(a * (size - 1) + b - (b > a), size * (size - 1))


@pytest.mark.parametrize(
    ("stream", "first", "second"),
    [
        (iid(9, 2), (0, 0), (0, 1)),
        (iid(9, 2), (0, 0), (1, 0)),
        (shuffled(9, 3), (2, 2), (3, 0)),
        (shuffled(9, 3), (0, 0), (3, 0)),
        (palindrome(9, 9), (1, 0), (2, 0)),
        (contiguous(9, 3), (2, 0), (3, 0)),
        (contiguous(9, 3), (0, 0), (3, 0)),
    ],
    ids=str,
)
def test_subsampling_rows_of_different_epochs_are_independent(stream, first, second):
    rows = sample_from_seeds(stream, 4, 60_000)
    assert_uniform(rows[:, *first] * 9 + rows[:, *second], 81)


def test_contiguous_blocks_of_an_epoch_have_any_order():
    starts = sample_from_seeds(contiguous(15, 5), 3, 60_000)[:, :, 0]
    relative = (starts - starts[:, :1]) % 15 // 5
    assert_uniform(relative[:, 1] - 1, 2)


def test_shuffled_rows_of_successive_epochs_are_independent():
    _, rows = sample_in_parts(shuffled(9, 9), 0, [40_000])
    assert_uniform(rows[:-1, 0] * 9 + rows[1:, 0], 81)
    assert_uniform(rows[:-1, 8] * 9 + rows[1:, 0], 81)


def test_shuffled_minibatch_mean_has_the_variance_without_replacement():
    # Correlated positions would change the variance of the minibatch mean.
    size, batch_size = 1000, 50
    values = np.linspace(-1, 1, size)
    means = values[sample_from_seeds(shuffled(size, batch_size), 1, 20_000)[:, 0]].mean(1)
    expected = values.var() / batch_size * (size - batch_size) / (size - 1)
    assert means.var() / expected == pytest.approx(1, abs=5 * np.sqrt(2 / 20_000))


def test_iid_with_fresh_keys_gives_independent_rows():
    stream = iid(10**6, 50)
    state = stream.init(random.key(0))
    later, first = sample_indices(stream, state, random.key(1), 3)
    _, second = sample_indices(stream, later, random.key(2), 3)
    assert np.unique(np.concatenate([first, second])).size > 295


@pytest.mark.parametrize("name", ["contiguous", "shuffled", "palindrome"])
def test_subsampling_without_replacement_ignores_the_key(name):
    stream = make_stream(name, 100, 7)
    state = stream.init(random.key(0))
    _, first = sample_indices(stream, state, random.key(1), 3)
    _, second = sample_indices(stream, state, random.key(2), 3)
    np.testing.assert_array_equal(first, second)


@each_subsampling
def test_subsampling_with_any_kind_of_key_gives_valid_indices(name):
    stream = make_stream(name, 100, 7)
    rows = [
        sample_indices(stream, stream.init(key), key, 3)[1]
        for key in (random.key(0), random.PRNGKey(0), random.key(0, impl="rbg"))
    ]
    np.testing.assert_array_equal(rows[0], rows[1])
    assert ((rows[2] >= 0) & (rows[2] < 100)).all()


@each_subsampling
def test_subsampling_under_vmap_gives_the_same_rows(name):
    stream = make_stream(name, 30, 7)
    keys = random.split(random.key(0), 3)
    states = jax.vmap(stream.init)(keys)
    together = sample_from_states(stream, states, keys, 6)
    for i, key in enumerate(keys):
        alone = sample_indices(stream, jax.tree.map(lambda x, i=i: x[i], states), key, 6)[1]
        np.testing.assert_array_equal(together[i], alone)


# --- The tests detect wrong methods


class OneOrder(ShuffledSubsampling):
    """Every epoch in the same order."""

    def sample_indices(self, state, *args):
        _, rows = super().sample_indices(state._replace(epoch=jnp.uint32(0)), *args)
        return super().sample_indices(state, *args)[0], rows


class NoOffset(ContiguousSubsampling):
    """The partition starts at the first row, so that the last rows are never sampled."""

    def sample_indices(self, state, rng_key, num_steps, size, batch_size):
        num_blocks = size // batch_size
        key = epoch_seed(state.seed, state.epoch)
        positions = (state.offset + jnp.arange(num_steps, dtype=jnp.uint32)) % num_blocks
        starts = permute(key, positions, num_blocks) * batch_size
        return state, (starts[:, None] + jnp.arange(batch_size)).astype(jnp.int32)


class OneRound(ShuffledSubsampling):
    """A rotation in position of a permutation: even, but neighbours stay neighbours."""

    def sample_indices(self, state, rng_key, num_steps, size, batch_size):
        positions = jnp.arange(num_steps * batch_size, dtype=jnp.uint32)
        rows = (positions + epoch_seed(state.seed, state.epoch) % size) % size
        return state, rows.astype(jnp.int32).reshape(num_steps, -1)


def test_assertions_on_wrong_methods_fail():
    with pytest.raises(AssertionError):
        test_subsampling_epochs_have_different_orders(Stream(OneOrder(), 1000, 100))
    with pytest.raises(AssertionError):
        test_subsampling_position_has_a_uniform_row(Stream(NoOffset(), 11, 5))
    rotated = sample_from_seeds(Stream(OneRound(), 9, 9), 1, 60_000)[:, 0]
    assert_uniform(rotated[:, 3], 9)
    a, b = rotated[:, 0], rotated[:, 1]
    with pytest.raises(AssertionError):
        assert_uniform(a * 8 + b - (b > a), 72)


def test_stream_state_has_documented_shapes():
    state = shuffled(10, 2).init(random.key(0))
    assert isinstance(state, StreamState)
    assert [(x.shape, x.dtype) for x in state] == [((2,), jnp.uint32)] + [((), jnp.uint32)] * 2
