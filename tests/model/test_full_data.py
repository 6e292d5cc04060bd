"""Values on all rows, by chunks, are NumPyro's own of the model without subsampling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_sgmcmc.model.potential
from numpyro_sgmcmc.data.subsampling import Plate
from numpyro_sgmcmc.model.potential import compute_chunk_size, mean_over_chunks
from tests.model.plated import CASES, assert_close, position_of
from tests.quick import quick_if

pytestmark = pytest.mark.usefixtures("x64")

ARRANGEMENTS = [
    ("one", {}),
    ("one", {"rows": 4}),
    ("subsample", {"rows": 3}),
    ("separate", {"rows": 4, "columns": 2}),
    ("separate", {"columns": 2}),
    ("nested", {"rows": 3, "columns": 2}),
    ("nested", {"columns": 1}),
    ("three", {"rows": 2, "columns": 2}),
    ("supports", {"rows": 4}),
]
QUICK = {1, 2, 3, 5, 7}  # of each model one, but for `supports`: the unbiased gradients have it


def chunks_of(monkeypatch, num_rows):
    monkeypatch.setattr(
        numpyro_sgmcmc.model.potential, "compute_chunk_size", lambda width: num_rows
    )


def derivatives(potential, position):
    """Value, gradient and Hessian."""

    def both(q):
        value, slope = jax.value_and_grad(potential)(q)
        return slope, (value, slope)

    hessian, (value, slope) = jax.jit(jax.jacfwd(both, has_aux=True))(position)
    return value, slope, hessian


@pytest.mark.parametrize(
    ("name", "batch"), [quick_if(i in QUICK, *case) for i, case in enumerate(ARRANGEMENTS)]
)
def test_potential_gradient_and_hessian(name, batch, monkeypatch):
    # Four rows a chunk divide neither five nor six.
    chunks_of(monkeypatch, 4)
    case = CASES[name]
    target, arguments = case.target(**batch), case.arguments(**batch)
    position = jnp.asarray(position_of(target))
    vectors = np.random.default_rng(1).standard_normal((2, target.dim))

    @jax.jit
    def found(position):
        return (
            target.full_value(position, arguments),
            target.full_gradient(position, arguments),
            target.full_value_grad_hessian(position, arguments),
            target.full_hessian_products(position, vectors, arguments),
        )

    value, slope, hessian = derivatives(case.potential(target), position)
    expected = (value, slope, (value, slope, hessian), vectors @ hessian)
    jax.tree.map(assert_close, found(position), expected)


@pytest.mark.parametrize(
    ("name", "batch"), [("one", {"rows": 4}), ("nested", {"rows": 3, "columns": 2})]
)
@pytest.mark.parametrize("num_rows", [1, 3, 100])
def test_any_number_of_rows_a_chunk(name, batch, num_rows, monkeypatch):
    chunks_of(monkeypatch, num_rows)
    case = CASES[name]
    target, arguments = case.target(**batch), case.arguments(**batch)
    position = jnp.asarray(position_of(target))
    found = jax.jit(lambda q: target.full_value(q, arguments))(position)
    assert_close(found, jax.jit(case.potential(target))(position))


@pytest.mark.parametrize(("name", "batch"), ARRANGEMENTS)
def test_which_plates_meet(name, batch):
    plates = CASES[name].target(**batch).plate_groups
    names = sorted(sorted(p.name for p in group) for group in plates)
    expected = {
        "separate": [["columns"], ["rows"]],
        "nested": [["columns", "rows"]],
        "three": [["columns", "rows"], ["others"]],
    }.get(name, [["rows"]])
    kept = [[n for n in group if n in batch or (n == "others" and batch)] for group in expected]
    assert names == [group for group in kept if group]


def test_plates_that_meet_in_turn_are_one_group():
    def plate(name):
        return Plate(name, 3, 2)

    a, b, c = plate("a"), plate("b"), plate("c")
    rng = np.random.default_rng(0)
    ab, bc = rng.standard_normal((2, 3, 3))

    def value(i):
        return jnp.asarray(ab)[i["a"]][:, i["b"]].mean() + jnp.asarray(bc)[i["b"]][:, i["c"]].mean()

    for num_rows in (1, 2, 5, 100):
        assert_close(mean_over_chunks(value, [(a, b, c)], num_rows), ab.mean() + bc.mean())


@pytest.mark.parametrize("num_rows", [1, 3, 7, 10, 50])
def test_chunks_are_weighted_by_their_sizes(num_rows):
    values = jnp.asarray(np.random.default_rng(0).standard_normal(10))
    calls = []

    def mean(i):
        calls.append(i["rows"].shape[0])
        return {
            "mean": values[i["rows"]].mean(),
            "square": values[i["rows"]] @ values[i["rows"]] / i["rows"].shape[0],
        }

    found = mean_over_chunks(mean, [(Plate("rows", 10, 2),)], num_rows)
    assert max(calls) <= num_rows
    assert_close(found, {"mean": values.mean(), "square": values @ values / 10})


def test_no_plates():
    assert mean_over_chunks(lambda i: 3.0, (), 10) == 3.0


def test_memory_is_that_of_a_chunk():
    size = 10**6

    def mean(i):
        return jnp.sin(i["rows"].astype(float)).mean()

    jaxpr = jax.make_jaxpr(lambda: mean_over_chunks(mean, [(Plate("rows", size, 10),)], 1000))()
    assert str(size) not in "".join(str(v.aval) for v in jaxpr.eqns[-1].outvars)
    shapes = [v.aval.shape for e in jaxpr.jaxpr.eqns for v in e.outvars]
    assert max(map(np.prod, shapes)) <= 1000


def test_chunk_rows():
    assert compute_chunk_size(1) == 8192
    assert compute_chunk_size(2**10) == 2**10
    assert compute_chunk_size(10**9) == 1
    assert compute_chunk_size(0) == 8192


def test_plates_need_not_agree_in_budget():
    # Two hundred million cells in chunks of at most a thousand numbers a call.
    seen = []

    def size_of(i):
        seen.append(i["a"].shape[0] * i["b"].shape[0])
        return jnp.float64(i["a"].shape[0] * i["b"].shape[0] > 0)

    plates = (Plate("a", 20_000, 3), Plate("b", 10_000, 3))
    jax.eval_shape(lambda: mean_over_chunks(size_of, [plates], 1000))
    assert max(seen) <= 1000


@pytest.mark.parametrize("name", ["one", "nested", "three"])
def test_a_subset_stands_for_all_rows(name, monkeypatch):
    case = CASES[name]
    batch = {k: 2 for k in ("rows", "columns") if k in case.sizes}
    target, arguments = case.target(**batch), case.arguments(**batch)
    position = jnp.asarray(position_of(target))
    subset = {p.name: jnp.array([2, 0, 2]) for p in target.plates}
    expected = jax.jit(lambda q: target.value(q, subset, arguments))(position)
    for num_rows in (2, 100):
        chunks_of(monkeypatch, num_rows)
        found = jax.jit(lambda q: target.full_value(q, arguments, subset))(position)
        assert_close(found, expected)


def test_minibatch_potential_counts_the_rows_it_has():
    case = CASES["one"]
    target, arguments = case.target(rows=2), case.arguments(rows=2)
    position = jnp.asarray(position_of(target))
    rows = np.array([0, 3, 3, 5, 1])
    potential = jax.jit(lambda q: target.value(q, {"rows": rows}, arguments))
    found = potential(position)
    assert_close(found, jax.jit(case.scaled_potential(target, rows, 6 / 5))(position))


def test_planted_mistake_is_seen():
    # Chunks of different sizes, all weighted alike.
    case = CASES["one"]
    target, arguments = case.target(rows=2), case.arguments(rows=2)
    position = jnp.asarray(position_of(target))
    expected = jax.jit(case.potential(target))(position)
    potential = jax.jit(lambda rows: target.value(position, {"rows": rows}, arguments))
    first, last = potential(jnp.arange(4)), potential(jnp.arange(4, 6))
    assert_close((4 * first + 2 * last) / 6, expected)
    with pytest.raises(AssertionError):
        assert_close((first + last) / 2, expected)
