"""Sampling of rows, passes over all rows, and derivatives on all rows, against known values."""

import tracemalloc
from itertools import islice
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import init_to_uniform

from numpyro_sgmcmc.adaptation import batched_gradients
from numpyro_sgmcmc.adaptation.batched_gradients import (
    BatchedGradients,
    assemble_hessian,
    iter_weighted_minibatches,
    sample_minibatch_indices,
    sample_subset,
)
from numpyro_sgmcmc.adaptation.budget import HIGH_DIM
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import ContiguousSubsampling, IIDSubsampling, Plate
from numpyro_sgmcmc.model.subsampled import get_model_potential
from tests.adaptation.inputs import make_inputs
from tests.adaptation.potentials import (
    QuadraticPotential,
    exponential_gradients,
    function_gradients,
    jitted_potential,
    random_covariance,
)


def potential_with_plates(*plates):
    return SimpleNamespace(plates=tuple(Plate(*p) for p in plates), host_lookups=())


# --- Sampling of rows ---------------------------------------------------------------------------


def test_sample_subset_small_plate_is_none():
    assert sample_subset(potential_with_plates(("a", 20_000, 10))) is None


def test_sample_subset_large_plate_is_sorted_and_uniform():
    subset = sample_subset(potential_with_plates(("a", 10**6, 10), ("b", 30, 5)))
    assert subset["a"].shape == (20_000,)
    assert (np.diff(subset["a"]) >= 0).all()
    assert 0 <= subset["a"].min() < 1000
    assert 999_000 < subset["a"].max() < 10**6
    assert abs(subset["a"].mean() / 10**6 - 0.5) < 5 / np.sqrt(12 * 20_000)
    np.testing.assert_array_equal(subset["b"], np.arange(30))


@pytest.mark.parametrize("subsampling", [IIDSubsampling(), ContiguousSubsampling()])
def test_sample_minibatch_indices_all_rows_are_equally_likely(subsampling):
    potential = potential_with_plates(("a", 50, 20), ("b", 7, 7))
    indices = sample_minibatch_indices(potential, np.random.default_rng(0), (300, 4), subsampling)
    for name, size, batch_size in (("a", 50, 20), ("b", 7, 7)):
        assert indices[name].shape == (300, 4, batch_size)
        assert indices[name].dtype == np.int32
        counts = np.bincount(indices[name].ravel(), minlength=size)
        assert counts.size == size
        assert np.abs(counts / counts.mean() - 1).max() < 0.2
    if subsampling.is_contiguous:
        consecutive = (indices["a"][..., :1] + np.arange(20)) % 50
        np.testing.assert_array_equal(indices["a"], consecutive)


# --- Passes over all rows -----------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 3, 5, 7, 1_100, 5_000])
@pytest.mark.parametrize("size", [1, 7, 12, 13, 1_300, 5_001, 8_200])
def test_weighted_minibatches_one_plate_mean_is_that_of_all_rows(size, batch_size):
    """Whatever the remainder, each row counts the same, and the prior counts once.

    A last minibatch that lacks more than 500 rows is filled with other rows than the first.
    """
    batch_size = min(batch_size, size)
    prior, likelihood = 0.7, np.random.default_rng(0).standard_normal(size)
    total = weights = 0.0
    for indices, weight in iter_weighted_minibatches([[Plate("a", size, batch_size)]]):
        assert indices["a"].shape == (batch_size,)
        total += weight * (prior + size / batch_size * likelihood[indices["a"]].sum())
        weights += weight
    assert weights == pytest.approx(1)
    assert total == pytest.approx(prior + likelihood.sum())


def test_weighted_minibatches_crossed_plates_mean_is_that_of_all_rows():
    """Two plates meet at a site, and a third has another site."""
    a, b, c = Plate("a", 5, 2), Plate("b", 7, 3), Plate("c", 4, 3)
    rng = np.random.default_rng(0)
    crossed, single = rng.standard_normal((5, 7)), rng.standard_normal(4)
    total = 0.0
    for indices, weight in iter_weighted_minibatches([[a, b], [c]]):
        crossed_sum = crossed[np.ix_(indices["a"], indices["b"])].sum() * 5 / 2 * 7 / 3
        total += weight * (0.3 + crossed_sum + single[indices["c"]].sum() * 4 / 3)
    assert total == pytest.approx(0.3 + crossed.sum() + single.sum())


def test_weighted_minibatches_large_plate_is_lazy():
    tracemalloc.start()
    minibatches = list(islice(iter_weighted_minibatches([[Plate("a", 10**7, 100)]]), 3))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [indices["a"][0] for indices, _ in minibatches] == [0, 100, 200]
    assert peak < 10**6


@pytest.mark.usefixtures("x64")
def test_full_gradient_exponential_model_is_exact():
    y, gradients, _ = exponential_gradients(num_rows=203)
    found = gradients.full_gradient(np.array([0.3]))
    np.testing.assert_allclose(found, np.exp(0.3) * y.sum() - len(y), rtol=1e-10)


@pytest.mark.usefixtures("x64")
def test_is_finite_infinite_value_or_gradient_is_false():
    _, gradients, _ = exponential_gradients()
    assert gradients.is_finite(np.array([0.3]))
    assert not gradients.is_finite(np.array([np.nan]))
    # The square root is finite at zero, its gradient is not.
    assert not function_gradients(lambda q: jnp.sqrt(q).sum(), 1).is_finite(np.zeros(1))


def test_weighted_mean_high_dimension_is_exact():
    """Calls evaluate fewer pairs then, and sums are accumulated one by one."""
    dim = HIGH_DIM + 1

    def model(y, batch_size=None):
        t = numpyro.sample("t", dist.Normal(0, 1).expand([dim]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(t[0], 1), obs=y[i])

    rng = np.random.default_rng(0)
    y = rng.standard_normal(203).astype(np.float32)
    arguments = Arguments((jnp.asarray(y),), {"batch_size": 50})
    potential = get_model_potential(model, arguments, init_to_uniform)
    gradients = BatchedGradients(potential, arguments)
    positions = rng.standard_normal((3, dim))
    all_rows = iter_weighted_minibatches(gradients.plate_groups)
    _, found = gradients.weighted_mean(positions, all_rows)
    expected = positions.copy()
    expected[:, 0] += len(y) * positions[:, 0] - y.sum()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.usefixtures("x64")
def test_estimate_full_gradients_linear_in_minibatch_is_exact():
    y, gradients, preconditioner = exponential_gradients()
    positions = preconditioner.to_position(np.linspace(-2, 2, 5)[:, None])
    exact = np.exp(positions) * y.sum() - len(y)
    found = gradients.estimate_full_gradients(positions, preconditioner, 20_000)
    np.testing.assert_allclose(found, exact, atol=1e-8)


def test_full_gradient_large_minibatch_that_is_filled_up_is_precise():
    """Rows that fill up the last minibatch leave no rounding error in the effect of a group."""
    num_groups, num_rows = 2_000, 30_000
    rng = np.random.default_rng(0)
    group = rng.integers(0, num_groups, num_rows)
    y = rng.standard_normal(num_rows).astype(np.float32)

    def model(group, y, batch_size=None):
        effect = numpyro.sample("effect", dist.Normal(0, 1).expand([num_groups]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(effect[group[i]], 1), obs=y[i])

    arguments = Arguments((jnp.asarray(group), jnp.asarray(y)), {"batch_size": 20_000})
    gradients = BatchedGradients(get_model_potential(model, arguments, init_to_uniform), arguments)
    effect = rng.standard_normal(num_groups).astype(np.float32).astype(np.float64)
    expected = effect - np.bincount(group, y - effect[group], num_groups)
    np.testing.assert_allclose(gradients.full_gradient(effect), expected, atol=2e-4)
    (gradient,) = gradients.large_pass_gradients(effect[None])
    np.testing.assert_allclose(gradient, expected, atol=2e-4)


def test_weighted_mean_large_minibatch_is_precise():
    """The rounding error of a sum over 20,000 rows is below a unit in the last place."""
    rng = np.random.default_rng(0)
    y = (1.2 * rng.standard_normal(40_000)).astype(np.float32)

    def model(y, batch_size=None):
        log_sd = numpyro.sample("log_sd", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(0, jnp.exp(log_sd)), obs=y[i])

    arguments = Arguments((jnp.asarray(y),), {"batch_size": 20_000})
    gradients = BatchedGradients(get_model_potential(model, arguments, init_to_uniform), arguments)
    positions = (0.18 + 1e-3 * rng.standard_normal((24, 1))).astype(np.float32)
    values = gradients.full_potentials(positions)
    q, squares = positions[:, 0].astype(np.float64), np.square(y.astype(np.float64)).sum()
    expected = 0.5 * squares * np.exp(-2 * q) + len(y) * (q + 0.5 * np.log(2 * np.pi))
    error = values - expected - (0.5 * q**2 + 0.5 * np.log(2 * np.pi))
    assert np.std(error) < np.finfo(np.float32).eps * np.abs(values).max()


def test_evaluate_minibatches_wide_rows_are_few_per_call(monkeypatch):
    """64 rows of 4,096 numbers: two pairs have as many numbers as a call may have."""

    def model(x, batch_size=None):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", len(x), subsample_size=batch_size) as i:
            numpyro.sample("x", dist.Normal(mu, 1).expand([4_096]).to_event(1), obs=x[i])

    inputs = make_inputs(model, (jnp.ones((64, 4_096)),), 16)
    sizes, evaluate_pairs = [], batched_gradients._evaluate_pairs

    def evaluate(potential, arguments, positions, *args):
        sizes.append(len(positions))
        return evaluate_pairs(potential, arguments, positions, *args)

    monkeypatch.setattr(batched_gradients, "_evaluate_pairs", evaluate)
    assert inputs.batched_gradients.is_finite(np.zeros(1))
    assert sizes == [2]


# --- Derivatives on all rows --------------------------------------------------------------------


def test_jitted_potential_results_are_float64():
    potential = jitted_potential(lambda q: jnp.square(q).sum(), 2)
    position = np.array([1.0, 2.0])
    value, gradient, hessian = potential.value_grad_hessian(position)
    assert value == potential.value(position) == 5.0
    assert isinstance(value, float)
    assert gradient.dtype == hessian.dtype == np.float64
    np.testing.assert_allclose(gradient, [2, 4])
    np.testing.assert_allclose(hessian, 2 * np.eye(2))
    np.testing.assert_allclose(potential.hessian_products(np.zeros(2), np.eye(2)), 2 * np.eye(2))
    np.testing.assert_allclose(potential.gradient(position), [2, 4])


@pytest.mark.parametrize("d", [3, 64, 70])
def test_assemble_hessian_quadratic_is_exact(d):
    matrix = random_covariance(d)
    np.testing.assert_allclose(assemble_hessian(QuadraticPotential(matrix), np.zeros(d)), matrix)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("size", "batch_size"), [(60, 20), (67, 20), (9, 9)])
@pytest.mark.parametrize("num_directions", [1, 2, 4])
def test_full_hessian_any_call_size_is_exact(size, batch_size, num_directions):
    """Rows, minibatches and directions need not fill the calls."""

    def model(x, y, batch_size=None):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Bernoulli(logits=x[i] @ b), obs=y[i])

    rng = np.random.default_rng(0)
    x, b = rng.standard_normal((size, 3)), np.array([0.5, -1.0, 2.0])
    y = (rng.random(size) < 0.5).astype(np.int32)
    arguments = Arguments((jnp.asarray(x), jnp.asarray(y)), {"batch_size": batch_size})
    potential = get_model_potential(model, arguments, init_to_uniform)
    gradients = BatchedGradients(potential, arguments)
    # Minibatches of a pass have at least 64 rows, or all.
    rows_per_minibatch = min(64, size)
    found = gradients.full_hessian(
        b, max_row_directions=num_directions * rows_per_minibatch, max_minibatches_per_call=2
    )
    p = 1 / (1 + np.exp(-x @ b))
    np.testing.assert_allclose(found, np.eye(3) + x.T @ (x * (p * (1 - p))[:, None]))
