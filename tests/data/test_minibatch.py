"""Minibatch streams: who is visited, how often, how evenly, and at what cost."""

from functools import cache, partial
from math import gcd
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from scipy import stats

from numpyro_sgmcmc.data.minibatch import (
    IID,
    MINIBATCH_SCHEMES,
    Blocks,
    Epoch,
    MinibatchScheme,
    StreamState,
)
from numpyro_sgmcmc.data.minibatch.shuffle import epoch_key, permute

IMPROBABLE = 1e-6
"""Threshold of p-values; seeds are fixed, so that a test which passes once passes always."""

each_stream = pytest.mark.parametrize("name", sorted(MINIBATCH_SCHEMES))


class Stream(NamedTuple):
    """A scheme on a table of a size."""

    scheme: MinibatchScheme
    size: int
    batch_size: int

    def init(self, key):
        return StreamState.start(key)

    def draw(self, state, key, num_steps):
        return self.scheme.draw(state, key, num_steps, self.size, self.batch_size)


def iid(size, batch_size):
    return Stream(IID(), size, batch_size)


def epoch(size, batch_size):
    return Stream(Epoch(), size, batch_size)


def blocks(size, batch_size):
    return Stream(Blocks(), size, batch_size)


def named(name, size, batch_size):
    return Stream(MINIBATCH_SCHEMES[name], size, batch_size)


@partial(jax.jit, static_argnames=("stream", "num_steps"))
def draw(stream, state, key, num_steps):
    return stream.draw(state, key, num_steps)


def walk(stream, seed, lengths):
    """The state after successive draws of the given numbers of steps, and all their rows."""
    state, rows = stream.init(random.key(seed)), []
    for call, num_steps in enumerate(lengths):
        state, new = draw(stream, state, random.key(1000 + call), num_steps)
        assert new.shape == (num_steps, stream.batch_size)
        assert new.dtype == jnp.int32
        rows.append(np.asarray(new))
    return state, np.concatenate(rows)


@partial(jax.jit, static_argnames=("stream", "num_steps"))
def first_rows(stream, states, keys, num_steps):
    return jax.vmap(lambda state, key: stream.draw(state, key, num_steps)[1])(states, keys)


@cache
def of_many_seeds(stream, num_steps, num_seeds):
    """Rows of the first steps, shape ``(num_seeds, num_steps, batch_size)``."""
    bits = np.random.default_rng(7).integers(0, 2**32, (num_seeds, 4), dtype=np.uint32)
    start = np.zeros(num_seeds, np.uint32)
    keys = random.wrap_key_data(bits[:, 2:])
    return np.asarray(first_rows(stream, StreamState(bits[:, :2], start, start), keys, num_steps))


def assert_even(values, num_cells):
    """That the values are uniform over ``range(num_cells)``, by a chi-square test."""
    counts = np.bincount(np.asarray(values).ravel(), minlength=num_cells)
    assert len(counts) == num_cells
    assert stats.chisquare(counts).pvalue > IMPROBABLE


# --- Every row once an epoch --------------------------------------------------------------------

SIZES = [(1, 1), (2, 1), (7, 7), (12, 4), (13, 4), (15, 12), (59, 6), (60, 12), (61, 12), (500, 3)]


def eagerly(stream, places_a_step, num_steps):
    """At least that many steps, in draws of turns of 12 and 60 places."""
    # Not compiled, so that draws of one shape share their operations whatever the sizes.
    state, rows, call = stream.init(random.key(0)), [], 0
    while sum(map(len, rows)) < num_steps:
        state, new = stream.draw(state, random.key(call), (12, 60)[call % 2] // places_a_step)
        rows.append(np.asarray(new))
        call += 1
    return state, np.concatenate(rows)


@pytest.mark.parametrize(("size", "batch_size"), SIZES)
def test_epoch_visits_every_row_once(size, batch_size):
    epochs = max(3, batch_size // gcd(size, batch_size))
    state, rows = eagerly(epoch(size, batch_size), batch_size, -(-epochs * size // batch_size))
    visited = rows.ravel()[: epochs * size].reshape(epochs, size)
    np.testing.assert_array_equal(np.sort(visited, axis=1), np.tile(np.arange(size), (epochs, 1)))
    assert (int(state.epoch), int(state.place)) == divmod(rows.size, size)


@pytest.mark.parametrize(("size", "batch_size"), SIZES)
def test_blocks_visit_every_row_at_most_once(size, batch_size):
    num_blocks = size // batch_size
    state, rows = eagerly(blocks(size, batch_size), 1, 3 * num_blocks)
    assert (int(state.epoch), int(state.place)) == divmod(len(rows), num_blocks)
    np.testing.assert_array_equal(rows, (rows[:, :1] + np.arange(batch_size)) % size)
    for epoch in rows[: 3 * num_blocks].reshape(3, num_blocks, batch_size):
        assert np.unique(epoch).size == num_blocks * batch_size


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


@pytest.mark.parametrize("size", [9, 16])
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


@pytest.mark.parametrize("name", ["blocks", "epoch"])
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


# --- Large tables -------------------------------------------------------------------------------

LARGEST = 2**31 - 1


@each_stream
@pytest.mark.parametrize("size", [LARGEST, 2**30 + 3])
def test_no_overflow(name, size):
    stream = named(name, size, 1000)
    _, rows = draw(stream, stream.init(random.key(3)), random.key(4), 50)
    rows = np.asarray(rows, np.int64)
    assert rows.min() >= 0
    assert rows.max() < size
    assert (rows < size / 2).any()
    assert (rows > size / 2).any()
    if name != "iid":
        assert np.unique(rows).size == rows.size


@pytest.mark.parametrize("size", [LARGEST, 3 * 2**29])
def test_no_overflow_at_the_end_of_an_epoch(size):
    stream = epoch(size, 1000)
    state = stream.init(random.key(3))._replace(place=jnp.uint32(size - 1500))
    state, rows = draw(stream, state, random.key(4), 3)
    rows = np.asarray(rows, np.int64).ravel()
    assert rows.min() >= 0
    assert rows.max() < size
    assert np.unique(rows[:1500]).size == 1500
    assert (int(state.epoch), int(state.place)) == (1, 1500)


def test_last_block_of_a_large_table():
    stream = blocks(LARGEST, 1000)
    num_blocks = LARGEST // 1000
    state = stream.init(random.key(3))._replace(place=jnp.uint32(num_blocks - 1))
    state, rows = draw(stream, state, random.key(4), 2)
    rows = np.asarray(rows, np.int64)
    np.testing.assert_array_equal(rows, (rows[:, :1] + np.arange(1000)) % LARGEST)
    assert (int(state.epoch), int(state.place)) == (1, 1)


def test_a_large_table_is_visited_evenly():
    rows = of_many_seeds(epoch(LARGEST, 10), 10, 2000)
    assert_even(rows.astype(np.int64) * 64 // LARGEST, 64)
    starts = of_many_seeds(blocks(LARGEST, 10), 10, 2000)[:, :, 0]
    assert_even(starts.astype(np.int64) * 64 // LARGEST, 64)


def test_neighbouring_places_are_not_neighbouring_rows():
    rows = of_many_seeds(epoch(10**6, 2), 1, 20_000)[:, 0].astype(np.int64)
    apart = np.abs(rows[:, 0] - rows[:, 1])
    # The shuffle leaves a pair together with a probability of about 2^-12 = 5 of 20,000.
    assert (apart < 10).sum() < 25
    assert_even((rows[:, 0] - rows[:, 1]) % 10**6 * 20 // 10**6, 20)


def test_epochs_go_on_beyond_the_counter():
    stream = epoch(5, 2)
    state = stream.init(random.key(0))._replace(epoch=jnp.uint32(2**32 - 1))
    state, rows = draw(stream, state, random.key(0), 5)
    np.testing.assert_array_equal(np.sort(rows.ravel().reshape(2, 5)), [range(5)] * 2)
    assert int(state.epoch) == 1


# --- Cost ---------------------------------------------------------------------------------------


def equations(jaxpr):
    """All equations of a jaxpr, those of the functions that it calls included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for part in value if isinstance(value, (list, tuple)) else [value]:
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def cost(stream, num_steps=3):
    """Number of equations of a draw, and the size of its largest array."""
    state = stream.init(random.key(0))
    closed = jax.make_jaxpr(partial(stream.draw, num_steps=num_steps))(state, random.key(1))
    found = list(equations(closed.jaxpr))
    arrays = [v.aval for eqn in found for v in (*eqn.invars, *eqn.outvars)]
    return len(found), max(int(np.prod(getattr(a, "shape", ()))) for a in arrays)


@each_stream
def test_cost_does_not_grow_with_the_table(name):
    small, large = (cost(named(name, size, 20)) for size in (1000, LARGEST))
    assert small == large
    assert large[1] <= 4 * 3 * 20


def test_cost_sees_a_stored_permutation():
    class Stored(Epoch):
        def draw(self, state, rng_key, num_steps, size, batch_size):
            order = random.permutation(rng_key, size)
            return state, order[: num_steps * batch_size].reshape(num_steps, -1)

    assert cost(Stream(Stored(), 1000, 20))[1] >= 1000


# --- The measures see what they must ------------------------------------------------------------


class OneOrder(Epoch):
    """Every epoch in the same order."""

    def draw(self, state, *args):
        _, rows = super().draw(state._replace(epoch=jnp.uint32(0)), *args)
        return super().draw(state, *args)[0], rows


class NoOffset(Blocks):
    """The partition starts at the first row, so that the last rows are never seen."""

    def draw(self, state, rng_key, num_steps, size, batch_size):
        num_blocks = size // batch_size
        key = epoch_key(state.seed, state.epoch)
        places = (state.place + jnp.arange(num_steps, dtype=jnp.uint32)) % num_blocks
        starts = permute(key, places, num_blocks) * batch_size
        return state, (starts[:, None] + jnp.arange(batch_size)).astype(jnp.int32)


class OneRound(Epoch):
    """A rotation in place of a permutation: even, but neighbours stay neighbours."""

    def draw(self, state, rng_key, num_steps, size, batch_size):
        places = jnp.arange(num_steps * batch_size, dtype=jnp.uint32)
        rows = (places + epoch_key(state.seed, state.epoch) % size) % size
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
