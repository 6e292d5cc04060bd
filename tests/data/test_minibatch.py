"""Minibatch streams: who is visited, how often and how evenly."""

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
    assert_even,
    blocks,
    draw,
    each_stream,
    epoch,
    first_rows,
    iid,
    named,
    of_many_seeds,
    walk,
)

# --- Every row once an epoch --------------------------------------------------------------------

SIZES = [(1, 1), (2, 1), (7, 7), (12, 4), (13, 4), (15, 12), (59, 6), (60, 12), (61, 12), (500, 3)]


def eagerly(stream, places_a_step, num_steps):
    """At least that many steps, in draws of turns of 12 and 60 places."""
    # Not compiled, so that draws of one shape share their operations whatever the sizes.
    state, rows, call = stream.init(random.key(0)), [], 0
    while sum(map(len, rows)) < num_steps:
        state, new = stream.sample_indices(
            state, random.key(call), (12, 60)[call % 2] // places_a_step
        )
        rows.append(np.asarray(new))
        call += 1
    return state, np.concatenate(rows)


@pytest.mark.parametrize(("size", "batch_size"), SIZES)
def test_epoch_visits_every_row_once(size, batch_size):
    epochs = max(3, batch_size // gcd(size, batch_size))
    state, rows = eagerly(epoch(size, batch_size), batch_size, -(-epochs * size // batch_size))
    visited = rows.ravel()[: epochs * size].reshape(epochs, size)
    np.testing.assert_array_equal(np.sort(visited, axis=1), np.tile(np.arange(size), (epochs, 1)))
    assert (int(state.epoch), int(state.offset)) == divmod(rows.size, size)


@pytest.mark.parametrize(("size", "batch_size"), SIZES)
def test_blocks_visit_every_row_at_most_once(size, batch_size):
    num_blocks = size // batch_size
    state, rows = eagerly(blocks(size, batch_size), 1, 3 * num_blocks)
    assert (int(state.epoch), int(state.offset)) == divmod(len(rows), num_blocks)
    np.testing.assert_array_equal(rows, (rows[:, :1] + np.arange(batch_size)) % size)
    for visited in rows[: 3 * num_blocks].reshape(3, num_blocks, batch_size):
        assert np.unique(visited).size == num_blocks * batch_size


@each_stream
@pytest.mark.parametrize(("size", "batch_size"), [(1, 1), (2, 1), (7, 7), (100, 64), (100, 99)])
def test_streams_compile_where_one_minibatch_takes_most_rows(name, size, batch_size):
    _, rows = walk(named(name, size, batch_size), 0, [3])
    assert rows.min() >= 0
    assert rows.max() < size


@pytest.mark.parametrize("stream", [epoch(1000, 100), epoch(1000, 300), blocks(1000, 50)])
def test_epochs_differ_in_order(stream):
    steps = -(-1000 // stream.batch_size)
    _, rows = walk(stream, 0, [steps] * 20)
    orders = {tuple(r.ravel()) for r in rows.reshape(20, steps, -1)}
    assert len(orders) == 20


@each_stream
def test_two_seeds_differ(name):
    stream = named(name, 1000, 10)
    first, second = (
        draw(stream, stream.init(key), key, 20)[1] for key in random.split(random.key(0))
    )
    assert (first != second).mean() > 0.9


def test_epoch_does_not_depend_on_how_it_is_cut():
    stream = epoch(101, 7)
    _, whole = walk(stream, 5, [60])
    _, parts = walk(stream, 5, [1, 59])
    np.testing.assert_array_equal(whole, parts)


def test_permutation_is_a_bijection_for_every_size():
    places = jnp.tile(jnp.arange(256, dtype=jnp.uint32), (40, 1))
    keys = random.bits(random.key(2), (40, 1), jnp.uint32)
    for size in [*range(1, 34), 63, 64, 65, 100, 127, 255, 256]:
        images = np.asarray(permute(keys, places, size))[:, :size]
        np.testing.assert_array_equal(np.sort(images), np.tile(np.arange(size), (40, 1)))


# --- Evenness -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stream",
    [iid(12, 4), epoch(12, 4), epoch(10, 4), blocks(12, 4), blocks(11, 5)],
    ids=str,
)
def test_every_row_is_as_likely_at_every_place(stream):
    rows = of_many_seeds(stream, 5, 20_000)
    for step in range(5):
        for place in range(stream.batch_size):
            assert_even(rows[:, step, place], stream.size)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_permutation_is_as_likely(size):
    orders = of_many_seeds(epoch(size, size), 1, 60_000)[:, 0]
    _, cells = np.unique(orders @ size ** np.arange(size), return_inverse=True)
    assert_even(cells, {2: 2, 3: 6, 5: 120}[size])


@pytest.mark.parametrize("size", [9, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("places", [(0, 1), (3, 4), (0, 8), (2, 5)])
def test_every_pair_of_rows_is_as_likely_at_two_places(size, places):
    rows = of_many_seeds(epoch(size, size), 1, 60_000)[:, 0]
    a, b = rows[:, places[0]], rows[:, places[1]]
    assert_even(a * (size - 1) + b - (b > a), size * (size - 1))


@pytest.mark.parametrize(
    ("stream", "first", "second"),
    [
        (iid(9, 2), (0, 0), (0, 1)),
        (iid(9, 2), (0, 0), (1, 0)),
        (epoch(9, 3), (2, 2), (3, 0)),
        (epoch(9, 3), (0, 0), (3, 0)),
        (blocks(9, 3), (2, 0), (3, 0)),
        (blocks(9, 3), (0, 0), (3, 0)),
    ],
    ids=str,
)
def test_rows_of_different_epochs_are_independent(stream, first, second):
    rows = of_many_seeds(stream, 4, 60_000)
    assert_even(rows[:, *first] * 9 + rows[:, *second], 81)


def test_blocks_of_one_epoch_come_in_any_order():
    starts = of_many_seeds(blocks(15, 5), 3, 60_000)[:, :, 0]
    relative = (starts - starts[:, :1]) % 15 // 5
    assert_even(relative[:, 1] - 1, 2)


def test_successive_draws_are_independent_along_one_stream():
    _, rows = walk(epoch(9, 9), 0, [40_000])
    assert_even(rows[:-1, 0] * 9 + rows[1:, 0], 81)
    assert_even(rows[:-1, 8] * 9 + rows[1:, 0], 81)


def test_spread_of_a_minibatch_mean_is_that_of_drawing_without_replacement():
    # Places that go together too often would show in the variance of the minibatch's mean.
    size, batch_size = 1000, 50
    values = np.linspace(-1, 1, size)
    means = values[of_many_seeds(epoch(size, batch_size), 1, 20_000)[:, 0]].mean(1)
    expected = values.var() / batch_size * (size - batch_size) / (size - 1)
    assert means.var() / expected == pytest.approx(1, abs=5 * np.sqrt(2 / 20_000))


def test_iid_draws_need_fresh_keys_only():
    stream = iid(10**6, 50)
    state = stream.init(random.key(0))
    later, first = draw(stream, state, random.key(1), 3)
    _, second = draw(stream, later, random.key(2), 3)
    assert np.unique(np.concatenate([first, second])).size > 295


@pytest.mark.parametrize("name", ["contiguous", "shuffled"])
def test_streams_without_replacement_need_no_key(name):
    stream = named(name, 100, 7)
    state = stream.init(random.key(0))
    _, first = draw(stream, state, random.key(1), 3)
    _, second = draw(stream, state, random.key(2), 3)
    np.testing.assert_array_equal(first, second)


@each_stream
def test_any_kind_of_key(name):
    stream = named(name, 100, 7)
    rows = [
        draw(stream, stream.init(key), key, 3)[1]
        for key in (random.key(0), random.PRNGKey(0), random.key(0, impl="rbg"))
    ]
    np.testing.assert_array_equal(rows[0], rows[1])
    assert ((rows[2] >= 0) & (rows[2] < 100)).all()


@each_stream
def test_streams_run_under_vmap(name):
    stream = named(name, 30, 7)
    keys = random.split(random.key(0), 3)
    states = jax.vmap(stream.init)(keys)
    together = first_rows(stream, states, keys, 6)
    for i, key in enumerate(keys):
        alone = draw(stream, jax.tree.map(lambda x, i=i: x[i], states), key, 6)[1]
        np.testing.assert_array_equal(together[i], alone)


# --- The measures see what they must ------------------------------------------------------------


class OneOrder(ShuffledSubsampling):
    """Every epoch in the same order."""

    def sample_indices(self, state, *args):
        _, rows = super().sample_indices(state._replace(epoch=jnp.uint32(0)), *args)
        return super().sample_indices(state, *args)[0], rows


class NoOffset(ContiguousSubsampling):
    """The partition starts at the first row, so that the last rows are never seen."""

    def sample_indices(self, state, rng_key, num_steps, size, batch_size):
        num_blocks = size // batch_size
        key = epoch_seed(state.seed, state.epoch)
        places = (state.offset + jnp.arange(num_steps, dtype=jnp.uint32)) % num_blocks
        starts = permute(key, places, num_blocks) * batch_size
        return state, (starts[:, None] + jnp.arange(batch_size)).astype(jnp.int32)


class OneRound(ShuffledSubsampling):
    """A rotation in place of a permutation: even, but neighbours stay neighbours."""

    def sample_indices(self, state, rng_key, num_steps, size, batch_size):
        places = jnp.arange(num_steps * batch_size, dtype=jnp.uint32)
        rows = (places + epoch_seed(state.seed, state.epoch) % size) % size
        return state, rows.astype(jnp.int32).reshape(num_steps, -1)


def test_planted_mistakes_are_seen():
    with pytest.raises(AssertionError):
        test_epochs_differ_in_order(Stream(OneOrder(), 1000, 100))
    with pytest.raises(AssertionError):
        test_every_row_is_as_likely_at_every_place(Stream(NoOffset(), 11, 5))
    rotated = of_many_seeds(Stream(OneRound(), 9, 9), 1, 60_000)[:, 0]
    assert_even(rotated[:, 3], 9)
    a, b = rotated[:, 0], rotated[:, 1]
    with pytest.raises(AssertionError):
        assert_even(a * 8 + b - (b > a), 72)


def test_state_is_what_the_docstring_says():
    state = epoch(10, 2).init(random.key(0))
    assert isinstance(state, StreamState)
    assert [(x.shape, x.dtype) for x in state] == [((2,), jnp.uint32)] + [((), jnp.uint32)] * 2
