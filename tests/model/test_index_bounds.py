"""Indices from data that do not exist in the array that they index raise an error."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import init_to_uniform

from numpyro_sgmcmc import HostArray, ShardedArray
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.errors import GroupCodesWarning, InvalidModelError
from numpyro_sgmcmc.model import index_bounds
from numpyro_sgmcmc.model.index_bounds import check_index_bounds
from numpyro_sgmcmc.model.subsampled import make_model_potential
from tests.hostile.calls import WarmupReached, assert_accepted, assert_error_names, init_kernel
from tests.quick import quick_if

ROWS, GROUPS, KINDS = 60, 3, 4
RNG = np.random.default_rng(0)
GROUP, KIND = RNG.permutation(np.arange(ROWS) % GROUPS), RNG.permutation(np.arange(ROWS) % KINDS)
Y = RNG.standard_normal(ROWS).astype(np.float32)
# As `pandas.factorize` codes a missing level, and as other programs count.
MISSING, FROM_ONE = np.where(np.arange(ROWS) % 12 == 0, -1, GROUP), GROUP + 1
NUM_MISSING, NUM_BEYOND = (MISSING < 0).sum(), (FROM_ONE == GROUPS).sum()


def make_model(mean, shape=(GROUPS,)):
    """Return a model of rows whose mean is a function of effects, group and kind of a row."""

    def model(group, kind, y):
        effect = numpyro.sample("effect", dist.Normal(0, 1).expand(shape).to_event(len(shape)))
        with numpyro.plate("rows", len(y), subsample_size=10) as i:
            numpyro.sample("y", dist.Normal(mean(effect, group[i], kind[i]), 1), obs=y[i])

    return model


def make_check(model, *args):
    """Return the check of this model as a function of data of these shapes."""
    potential = make_model_potential(model, Arguments(args), init_to_uniform)
    return lambda *args: check_index_bounds(potential, Arguments(args), model)


def assert_raises(check, *args, words):
    with pytest.raises(InvalidModelError) as caught:
        check(*args)
    assert caught.value.entry == "index-bounds"
    assert all(str(word) in caught.value.problem for word in words), caught.value.problem


LOOKUPS = {
    "index": (lambda e, g, k: e[g], (GROUPS,)),
    "take": (lambda e, g, k: jnp.take(e, g), (GROUPS,)),
    "vmap": (lambda e, g, k: jax.vmap(lambda j: e[j])(g), (GROUPS,)),
    "jit": (lambda e, g, k: jax.jit(lambda j: jnp.exp(e)[j])(g), (GROUPS,)),
    "scan": (lambda e, g, k: jax.lax.scan(lambda c, j: (c, e[j]), 0.0, g)[1], (GROUPS,)),
    "map": (lambda e, g, k: jax.lax.map(lambda j: e[j], g), (GROUPS,)),
    "slice": (
        lambda e, g, k: jax.vmap(lambda j: jax.lax.dynamic_slice(e, (j,), (2,)))(g)[:, 0],
        (4,),
    ),
    "vectors": (lambda e, g, k: e[g][:, 1], (GROUPS, 2)),
    "crossed": (lambda e, g, k: e[g, k], (GROUPS, KINDS)),
    "columns": (lambda e, g, k: e[k][jnp.arange(len(g)), g], (KINDS, GROUPS)),
    "along_axis": (lambda e, g, k: jnp.take_along_axis(e[k], g[:, None], 1)[:, 0], (KINDS, GROUPS)),
    "float": (lambda e, g, k: e[g.astype(float).astype(int)], (GROUPS,)),
}


@pytest.mark.parametrize(
    "name", [quick_if(n not in {"jit", "map", "vectors", "float"}, n) for n in LOOKUPS]
)
def test_check_index_bounds_of_a_lookup_names_argument_and_index(name):
    check = make_check(make_model(*LOOKUPS[name]), GROUP, KIND, Y)
    check(GROUP, KIND, Y)
    assert_raises(
        check, MISSING, KIND, Y, words=("`group`", -1, f"{NUM_MISSING} of {ROWS}", GROUPS)
    )
    words = "`group`", GROUPS, f"{NUM_BEYOND} of {ROWS}"
    assert_raises(check, FROM_ONE, KIND, Y, words=words)


def test_check_index_bounds_of_a_computed_index_names_all_arguments():
    check = make_check(
        make_model(lambda e, g, k: e[g * KINDS + k], (GROUPS * KINDS,)), GROUP, KIND, Y
    )
    check(GROUP, KIND, Y)
    assert_raises(check, GROUP, KIND + 1, Y, words=("`group` and `kind`", GROUPS * KINDS))
    assert_raises(check, MISSING, KIND, Y, words=("`group` and `kind`", "-"))


NEGATIVE_ONLY = {
    # What the user fills in, or drops, is for indices beyond the end: JAX wraps negative ones.
    "fill": lambda e, g, k: e.at[g].get(mode="fill", fill_value=0.0),
    "clip": lambda e, g, k: e.at[g].get(mode="clip"),
    "update": lambda e, g, k: jnp.zeros((len(g), GROUPS)).at[jnp.arange(len(g)), g].set(1.0) @ e,
}


@pytest.mark.parametrize("name", NEGATIVE_ONLY)
def test_check_index_bounds_of_a_lookup_with_a_mode_raises_for_wrapped_indices(name):
    check = make_check(make_model(NEGATIVE_ONLY[name]), GROUP, KIND, Y)
    check(FROM_ONE, KIND, Y)
    assert_raises(check, MISSING, KIND, Y, words=("`group`", -1))


def masked(group, kind, y):
    effect = numpyro.sample("effect", dist.Normal(0, 1).expand([GROUPS]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=10) as i:
        with numpyro.handlers.mask(mask=group[i] >= 0):
            numpyro.sample("y", dist.Normal(effect[group[i]], 1), obs=y[i])


ACCEPTED = {
    "where": (make_model(lambda e, g, k: jnp.where(g >= 0, e[g], 0.0)), MISSING),
    "product": (make_model(lambda e, g, k: e[g] * (g >= 0)), MISSING),
    "mask": (masked, MISSING),
    "loop": (
        make_model(lambda e, g, k: jax.lax.map(lambda j: jnp.where(j < 0, 0.0, e[j]), g)),
        MISSING,
    ),
    "beyond": (make_model(lambda e, g, k: jnp.where(g < GROUPS, e[g], 0.0)), FROM_ONE),
    "clip": (make_model(lambda e, g, k: e[jnp.clip(g, 0, GROUPS - 1)]), MISSING),
    "take_clip": (make_model(lambda e, g, k: jnp.take(e, g, mode="clip")), MISSING),
    "one_hot": (make_model(lambda e, g, k: jax.nn.one_hot(g, GROUPS) @ e), MISSING),
    "shifted": (make_model(lambda e, g, k: e[g - 1]), FROM_ONE),
    "quotient": (make_model(lambda e, g, k: e[k // 2], (2,)), GROUP),
    "remainder": (make_model(lambda e, g, k: e[(g + k) % GROUPS]), MISSING),
    "interval": (
        make_model(lambda e, g, k: e[jnp.searchsorted(jnp.array([1.5, 2.5]), g)]),
        FROM_ONE,
    ),
    "binary": (make_model(lambda e, g, k: e[(g > 0).astype(int)], (2,)), MISSING),
    "own_negative": (make_model(lambda e, g, k: e[-1] + e[jnp.array([0, -2])].sum() * k), MISSING),
    "latent": (make_model(lambda e, g, k: e[(10 * e[0]).astype(int) + g]), MISSING),
    "chosen_negative": (make_model(lambda e, g, k: e[jnp.where(g == 2, -1, g)]), GROUP),
    "own_table": (make_model(lambda e, g, k: e[jnp.array([0, -1, -3, 1])[k]]), GROUP),
    "comparison": (make_model(lambda e, g, k: e[(g > 0) - 1]), MISSING),
    "chosen_of_two": (make_model(lambda e, g, k: e[jnp.where(g > 0, 0, -1)]), GROUP),
    "chosen_twice": (
        make_model(lambda e, g, k: e[jnp.where(g == 2, -1, jnp.where(k == 0, -2, g))]),
        GROUP,
    ),
    "counted_back": (make_model(lambda e, g, k: e[-1 - g] + e[g - GROUPS]), GROUP),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_check_index_bounds_of_a_right_model_passes(name):
    model, group = ACCEPTED[name]
    make_check(model, group, KIND, Y)(group, KIND, Y)


@pytest.mark.parametrize(
    ("mean", "group"),
    [
        (lambda e, g, k: e[jnp.where(g == 2, -1, g)], MISSING),
        (lambda e, g, k: e[g - 1], GROUP),
        (lambda e, g, k: e[g - GROUPS - 1], GROUP),
        (lambda e, g, k: e[g], np.full(ROWS, -1)),
        (lambda e, g, k: e[(k > 0) * g], MISSING),
        (lambda e, g, k: e[jnp.where(k > 1, g, -2)], MISSING),
        (lambda e, g, k: e[jnp.array([0, -1, -4])[g]], GROUP),
        (lambda e, g, k: e[jnp.array([0, 1, 2])[g]], MISSING),
    ],
    ids=[
        *("data_beside_a_constant", "some_negative", "below_the_first", "data", "product"),
        *("choice", "constant_below_the_first", "index_of_a_table"),
    ],
)
def test_check_index_bounds_of_negative_data_raises(mean, group):
    assert_raises(make_check(make_model(mean), group, KIND, Y), group, KIND, Y, words=("`group`",))


def test_check_index_bounds_of_lagged_rows_passes():
    def model(y):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=10) as i:
            numpyro.sample("y", dist.Normal(slope * (y[i - 1] + y[i + 1]), 1), obs=y[i])

    make_check(model, Y)(Y)


def nested(state, county, y):
    by_state = numpyro.sample("by_state", dist.Normal(0, 1).expand([KINDS]).to_event(1))
    with numpyro.plate("counties", GROUPS):
        by_county = numpyro.sample("by_county", dist.Normal(by_state[state], 1))
    with numpyro.plate("rows", len(y), subsample_size=10) as i:
        mean = by_county[county["code"][i]] + by_state[state[county["code"][i]]]
        numpyro.sample("y", dist.Normal(mean, 1), obs=y[i])


def test_check_index_bounds_of_nested_groups_names_the_level():
    state = np.array([0, 1, 3])
    check = make_check(nested, state, {"code": GROUP}, Y)
    check(state, {"code": GROUP}, Y)
    words = "`state`", KINDS, f"1 of {GROUPS}"
    assert_raises(check, state + 1, {"code": GROUP}, Y, words=words)
    assert_raises(check, state - 1, {"code": GROUP}, Y, words=("`state`", -1))
    assert_raises(check, state, {"code": MISSING}, Y, words=("`county['code']`", -1))


def test_check_index_bounds_of_columns_of_a_matrix_names_the_matrix():
    def model(table, y):
        effect = numpyro.sample("effect", dist.Normal(0, 1).expand([GROUPS, KINDS]).to_event(2))
        with numpyro.plate("rows", len(y), subsample_size=10) as i:
            mean = effect[table[i, 0].astype(int), table[i, 1].astype(int)]
            numpyro.sample("y", dist.Normal(mean * table[i, 2], 1), obs=y[i])

    def table(group):
        return np.stack([group, KIND, 10 * Y], 1).astype(np.float32)

    check = make_check(model, table(GROUP), Y)
    check(table(GROUP), Y)
    assert_raises(check, table(MISSING), Y, words=("`table`", -1, GROUPS))
    assert_raises(check, table(FROM_ONE), Y, words=("`table`", GROUPS))


def test_check_index_bounds_of_a_closed_over_array_raises():
    def model(y, group):
        effect = numpyro.sample("effect", dist.Normal(0, 1).expand([GROUPS]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=10) as i:
            numpyro.sample("y", dist.Normal(effect[closed_over[group][i]], 1), obs=y[i])

    closed_over = {
        k: jnp.asarray(x) for k, x in {"right": GROUP, "nan": MISSING, "one": FROM_ONE}.items()
    }
    make_check(model, Y, "right")(Y, "right")
    for group, index in (("nan", -1), ("one", GROUPS)):
        assert_raises(make_check(model, Y, group), Y, group, words=("closes over", index))


def test_check_index_bounds_of_two_plates_checks_each():
    def model(group, kind, y):
        by_group = numpyro.sample("by_group", dist.Normal(0, 1).expand([GROUPS]).to_event(1))
        by_kind = numpyro.sample("by_kind", dist.Normal(0, 1).expand([KINDS]).to_event(1))
        with numpyro.plate("b", len(group), subsample_size=10) as i:
            numpyro.sample("x", dist.Normal(by_group[group[i]], 1), obs=y[i])
        with numpyro.plate("a", len(kind), subsample_size=7) as j:
            numpyro.sample("z", dist.Normal(by_kind[kind[j]], 1), obs=y[:40][j])

    check = make_check(model, GROUP, KIND[:40], Y)
    check(GROUP, KIND[:40], Y)
    assert_raises(check, MISSING, KIND[:40], Y, words=("`group`", f"{NUM_MISSING} of {ROWS}"))
    assert_raises(check, GROUP, KIND[:40] + 1, Y, words=("`kind`", "of 40"))


@pytest.mark.parametrize("make", [HostArray, ShardedArray, lambda x: ShardedArray(HostArray(x))])
def test_check_index_bounds_of_rows_that_are_not_in_memory_raises(make):
    model = make_model(lambda e, g, k: e[g] * k)
    for group, words in ((GROUP, ()), (MISSING, ("`group`", -1)), (FROM_ONE, ("`group`", GROUPS))):
        args = make(group), make(KIND.astype(np.float32)), make(Y)
        if words:
            assert_raises(make_check(model, *args), *args, words=words)
        else:
            make_check(model, *args)(*args)


def test_check_index_bounds_of_many_rows_counts_all():
    model = make_model(lambda e, g, k: e[g] * k)
    group = np.tile(MISSING, 500)
    args = group, np.ones(group.shape, np.float32), np.zeros(group.shape, np.float32)
    words = "`group`", f"{500 * NUM_MISSING} of {500 * ROWS}"
    assert_raises(make_check(model, *args), *args, words=words)


@pytest.mark.usefixtures("no_warm_up")
def test_kernel_init_indices_are_checked_before_the_warm_up():
    model = make_model(lambda e, g, k: e[g])
    assert_accepted(lambda: init_kernel(model, GROUP, KIND, Y))
    assert_error_names(lambda: init_kernel(model, MISSING, KIND, Y), "`group`", "-1")
    assert_error_names(lambda: init_kernel(model, FROM_ONE, KIND, Y), "`group`", str(GROUPS))


def assert_warns_once(check, *args, words):
    with pytest.warns(GroupCodesWarning) as caught:
        check(*args)
    (warning,) = caught
    assert all(str(word) in str(warning.message).split(" Fix:")[0] for word in words), warning


LEVELS = GROUPS + 1  # FROM_ONE has no row of level 0 and is in bounds


@pytest.mark.parametrize(
    ("mean", "shape"),
    [
        (lambda e, g, k: e[g], (LEVELS,)),
        (lambda e, g, k: jnp.take(jnp.exp(e), g), (LEVELS,)),
        (lambda e, g, k: jax.vmap(lambda j: e[j])(g), (LEVELS,)),
        (lambda e, g, k: jax.lax.map(lambda j: e[j], g), (LEVELS,)),
        (lambda e, g, k: e[k, g], (KINDS, LEVELS)),
        (lambda e, g, k: e[g, 0] + e[g, 1] * k, (LEVELS, 2)),
        (lambda e, g, k: e[jnp.stack([g, k], 1)[:, 0]], (LEVELS,)),
    ],
    ids=["index", "take", "vmap", "map", "crossed", "two_columns", "computed"],
)
def test_check_index_bounds_of_codes_from_one_warns(mean, shape):
    check = make_check(make_model(mean, shape), GROUP, KIND, Y)
    check(GROUP, KIND, Y)
    assert_warns_once(check, FROM_ONE, KIND, Y, words=("`group`", f"1 to {GROUPS}", LEVELS))


def test_check_index_bounds_of_codes_from_one_in_a_float_matrix_warns():
    def model(table, y):
        effect = numpyro.sample("effect", dist.Normal(0, 1).expand([LEVELS]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=10) as i:
            mean = effect[table[i, 0].astype(int)] * table[i, 1]
            numpyro.sample("y", dist.Normal(mean, 1), obs=y[i])

    def table(group):
        return np.stack([group, 10 * Y], 1).astype(np.float32)

    check = make_check(model, table(GROUP), Y)
    check(table(GROUP), Y)
    assert_warns_once(check, table(FROM_ONE), Y, words=("`table`", f"1 to {GROUPS}", LEVELS))


def test_check_index_bounds_of_two_effects_with_codes_from_one_warns_once():
    def model(group, y):
        effect = numpyro.sample("effect", dist.Normal(0, 1).expand([LEVELS]).to_event(1))
        slope = numpyro.sample("slope", dist.Normal(0, 1).expand([LEVELS]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=10) as i:
            mean = effect[group[i]] + slope[group[i]] * y[i - 1]
            numpyro.sample("y", dist.Normal(mean, 1), obs=y[i])

    assert_warns_once(make_check(model, GROUP, Y), FROM_ONE, Y, words=("`group`",))


def test_check_index_bounds_of_classes_from_one_warns():
    def model(y):
        logits = numpyro.sample("logits", dist.Normal(0, 1).expand([LEVELS]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=10) as i:
            numpyro.sample("y", dist.Categorical(logits=logits), obs=y[i])

    check = make_check(model, GROUP)
    check(GROUP)
    assert_warns_once(check, FROM_ONE, words=("`y`", f"1 to {GROUPS}"))


@pytest.mark.parametrize("make", [HostArray, ShardedArray, lambda x: ShardedArray(HostArray(x))])
def test_check_index_bounds_of_codes_from_one_that_are_not_in_memory_warns(make):
    model = make_model(lambda e, g, k: e[g] * k, (LEVELS,))
    args = make(FROM_ONE), make(KIND.astype(np.float32)), make(Y)
    assert_warns_once(make_check(model, *args), *args, words=("`group`", f"1 to {GROUPS}"))


SIZE = 6


@pytest.mark.parametrize(
    ("mean", "group"),
    [
        (lambda e, g, k: e[g], np.arange(ROWS) % SIZE),
        (lambda e, g, k: e[g], 2 + np.arange(ROWS) % (SIZE - 2)),  # levels 0 and 1 have no rows
        (lambda e, g, k: e[g], np.array([1, 2, 4, 5])[np.arange(ROWS) % 4]),  # 0 and 3
        (lambda e, g, k: e[g], 1 + np.arange(ROWS) % (SIZE - 2)),  # 0 and 5
        (lambda e, g, k: e[g - 1], 1 + np.arange(ROWS) % (SIZE - 1)),
        (lambda e, g, k: e[g] - e[k], 1 + np.arange(ROWS) % (SIZE - 1)),
        (lambda e, g, k: e[g] - e[g - 1], 1 + np.arange(ROWS) % (SIZE - 1)),
        (lambda e, g, k: e[0] * jnp.arange(SIZE)[g], 1 + np.arange(ROWS) % (SIZE - 1)),
        (lambda e, g, k: e[jnp.array(range(1, SIZE))].sum() * k, np.zeros(ROWS, int)),
        (lambda e, g, k: e[:2][g], np.ones(ROWS, int)),
        (lambda e, g, k: e[jnp.where(g > 0, g, k)], 1 + np.arange(ROWS) % (SIZE - 1)),
    ],
    ids=[
        *("all", "two_below", "one_between", "the_last", "shifted", "pairs", "lagged"),
        *("table_of_numbers", "indices_of_the_model", "indicator", "computed"),
    ],
)
def test_check_index_bounds_of_groups_without_rows_does_not_warn(mean, group):
    make_check(make_model(mean, (SIZE,)), group, KIND, Y)(group, KIND, Y)


def test_check_index_bounds_counts_levels_only_if_the_smallest_index_is_one(monkeypatch):
    def fail(x):
        raise AssertionError("levels are counted")

    monkeypatch.setattr(index_bounds, "iter_entries", fail)
    check = make_check(make_model(lambda e, g, k: e[g], (SIZE,)), GROUP, KIND, Y)
    for group in (GROUP, GROUP + 2, FROM_ONE):
        check(group, KIND, Y)
    with pytest.raises(AssertionError, match="counted"):
        check(np.where(FROM_ONE == GROUPS, SIZE - 1, FROM_ONE), KIND, Y)


@pytest.mark.usefixtures("no_warm_up")
def test_kernel_init_warns_of_codes_from_one():
    model = make_model(lambda e, g, k: e[g], (LEVELS,))
    with pytest.warns(GroupCodesWarning, match="`group`"), pytest.raises(WarmupReached):
        init_kernel(model, FROM_ONE, KIND, Y)
