"""Values on all rows, by chunks, equal those of the model without subsampling."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
QUICK = {5, 7}  # crossed plates; the tests of unbiased gradients have the others


def derivatives(potential, position):
    """Return value, gradient and Hessian."""

    def gradient_and_aux(q):
        value, gradient = jax.value_and_grad(potential)(q)
        return gradient, (value, gradient)

    hessian, (value, gradient) = jax.jit(jax.jacfwd(gradient_and_aux, has_aux=True))(position)
    return value, gradient, hessian


@pytest.mark.parametrize(
    ("name", "batch"), [quick_if(i in QUICK, *case) for i, case in enumerate(ARRANGEMENTS)]
)
def test_full_values_uneven_chunks_equal_numpyros(name, batch):
    case = CASES[name]
    # Chunks of four rows divide neither five nor six.
    potential = replace(case.potential(**batch), max_rows_per_chunk=4)
    arguments = case.arguments(**batch)
    position = jnp.asarray(position_of(potential))
    vectors = np.random.default_rng(1).standard_normal((2, potential.dim))

    @jax.jit
    def evaluate(position):
        return (
            potential.full_value(position, arguments),
            potential.full_gradient(position, arguments),
            potential.full_value_grad_hessian(position, arguments),
            potential.full_hessian_products(position, vectors, arguments),
        )

    value, gradient, hessian = derivatives(case.numpyro_potential(potential), position)
    expected = (value, gradient, (value, gradient, hessian), vectors @ hessian)
    jax.tree.map(assert_close, evaluate(position), expected)


@pytest.mark.parametrize(
    ("name", "batch"), [("one", {"rows": 4}), ("nested", {"rows": 3, "columns": 2})]
)
@pytest.mark.parametrize("num_rows", [1, 3, 100])
def test_full_value_any_chunk_size_equals_numpyros(name, batch, num_rows):
    case = CASES[name]
    potential = replace(case.potential(**batch), max_rows_per_chunk=num_rows)
    arguments = case.arguments(**batch)
    position = jnp.asarray(position_of(potential))
    value = jax.jit(lambda q: potential.full_value(q, arguments))(position)
    assert_close(value, jax.jit(case.numpyro_potential(potential))(position))


@pytest.mark.parametrize(("name", "batch"), ARRANGEMENTS)
def test_plate_groups_common_site_joins_plates(name, batch):
    plates = CASES[name].potential(**batch).plate_groups
    names = sorted(sorted(p.name for p in group) for group in plates)
    expected = {
        "separate": [["columns"], ["rows"]],
        "nested": [["columns", "rows"]],
        "three": [["columns", "rows"], ["others"]],
    }.get(name, [["rows"]])
    kept = [[n for n in group if n in batch or (n == "others" and batch)] for group in expected]
    assert names == [group for group in kept if group]


def test_mean_over_chunks_overlapping_plates_is_exact():
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
def test_mean_over_chunks_weights_chunks_by_size(num_rows):
    values = jnp.asarray(np.random.default_rng(0).standard_normal(10))
    calls = []

    def mean(i):
        calls.append(i["rows"].shape[0])
        return {
            "mean": values[i["rows"]].mean(),
            "square": values[i["rows"]] @ values[i["rows"]] / i["rows"].shape[0],
        }

    means = mean_over_chunks(mean, [(Plate("rows", 10, 2),)], num_rows)
    assert max(calls) <= num_rows
    assert_close(means, {"mean": values.mean(), "square": values @ values / 10})


def test_mean_over_chunks_no_plates_evaluates_once():
    assert mean_over_chunks(lambda i: 3.0, (), 10) == 3.0


def test_mean_over_chunks_many_rows_needs_memory_of_a_chunk():
    size = 10**6

    def mean(i):
        return jnp.sin(i["rows"].astype(float)).mean()

    jaxpr = jax.make_jaxpr(lambda: mean_over_chunks(mean, [(Plate("rows", size, 10),)], 1000))()
    assert str(size) not in "".join(str(v.aval) for v in jaxpr.eqns[-1].outvars)
    shapes = [v.aval.shape for e in jaxpr.jaxpr.eqns for v in e.outvars]
    assert max(map(np.prod, shapes)) <= 1000


def test_compute_chunk_size_bounds_rows_and_numbers():
    assert compute_chunk_size(1) == 8192
    assert compute_chunk_size(1, max_rows=4) == 4
    assert compute_chunk_size(2**10) == 2**10
    assert compute_chunk_size(10**9) == 1
    assert compute_chunk_size(0) == 8192


def test_mean_over_chunks_two_plates_bounds_pairs_of_rows():
    chunk_sizes = []

    def value(i):
        chunk_sizes.append(i["a"].shape[0] * i["b"].shape[0])
        return jnp.float64(1.0)

    plates = (Plate("a", 20_000, 3), Plate("b", 10_000, 3))
    jax.eval_shape(lambda: mean_over_chunks(value, [plates], 1000))
    assert max(chunk_sizes) <= 1000


@pytest.mark.parametrize("name", ["one", "nested", "three"])
def test_full_value_subset_represents_all_rows(name):
    case = CASES[name]
    batch = {k: 2 for k in ("rows", "columns") if k in case.sizes}
    potential, arguments = case.potential(**batch), case.arguments(**batch)
    position = jnp.asarray(position_of(potential))
    subset = {p.name: jnp.array([2, 0, 2]) for p in potential.plates}
    expected = jax.jit(lambda q: potential.value(q, subset, arguments))(position)
    for num_rows in (2, 100):
        chunked = replace(potential, max_rows_per_chunk=num_rows)
        value = jax.jit(lambda q, p=chunked: p.full_value(q, arguments, subset))(position)
        assert_close(value, expected)


def test_value_repeated_rows_scales_by_their_number():
    case = CASES["one"]
    potential, arguments = case.potential(rows=2), case.arguments(rows=2)
    position = jnp.asarray(position_of(potential))
    rows = np.array([0, 3, 3, 5, 1])
    value = jax.jit(lambda q: potential.value(q, {"rows": rows}, arguments))(position)
    expected = jax.jit(case.scaled_numpyro_potential(potential, rows, 6 / 5))(position)
    assert_close(value, expected)


def test_value_chunks_of_different_sizes_need_weights():
    case = CASES["one"]
    potential, arguments = case.potential(rows=2), case.arguments(rows=2)
    position = jnp.asarray(position_of(potential))
    expected = jax.jit(case.numpyro_potential(potential))(position)
    value = jax.jit(lambda rows: potential.value(position, {"rows": rows}, arguments))
    first, last = value(jnp.arange(4)), value(jnp.arange(4, 6))
    assert_close((4 * first + 2 * last) / 6, expected)
    with pytest.raises(AssertionError):
        assert_close((first + last) / 2, expected)
