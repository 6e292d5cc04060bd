"""Gradient noise, the bias of means that it causes, and the largest curvature, where known."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import init_to_uniform

from numpyro_sgmcmc.adaptation.batched_gradients import BatchedGradients, BulkPositions
from numpyro_sgmcmc.adaptation.gradient_noise import (
    GradientNoiseStats,
    compute_max_curvatures,
    estimate_max_curvature,
    measure_noise,
    measure_noise_by_subsampling,
    measure_order_noise_ratio,
    predict_mean_bias_from_noise,
    predict_mean_bias_per_variance_inflation,
)
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import IIDSubsampling
from numpyro_sgmcmc.model.block_arrow import BlockArrowLayout, EffectSite
from numpyro_sgmcmc.model.gradient_estimators import (
    GRADIENT_ESTIMATORS,
    ControlVariate,
    MinibatchGradient,
)
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.model.subsampled import get_model_potential
from tests.adaptation.potentials import (
    exponential_gradients,
    function_gradients,
    random_covariance,
)

pytestmark = pytest.mark.usefixtures("x64")


def rng():
    return np.random.default_rng(0)


# --- Noise --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GRADIENT_ESTIMATORS)
def test_measure_noise_random_rows_matches_variance_of_single_rows(name):
    estimator = GRADIENT_ESTIMATORS[name]
    y, gradients, preconditioner = exponential_gradients(max_noise_minibatches=4_000)
    q = np.array([[1.5]])
    bulk = BulkPositions(gradients, preconditioner, q)
    noise = measure_noise(bulk, [estimator], IIDSubsampling(), rng())[estimator]
    t, reference = preconditioner.to_position(q)[0, 0], preconditioner.center[0]
    row_gradients = {
        "minibatch": np.exp(t),
        "control_variate": np.exp(t) - np.exp(reference),
        "second_order_control_variate": np.exp(t) - np.exp(reference) * (1 + t - reference),
    }[name] * y
    variance = preconditioner.factor[0] ** 2 * len(y) ** 2 * row_gradients.var() / 20
    # A variance of 4,000 normals has an SD of 2.2% of itself, of skewed rows a little more.
    assert noise.variance == pytest.approx(variance, rel=0.1)
    assert noise.noise_exponent == estimator.noise_exponent


@pytest.mark.parametrize("use_noisiest", [True, False])
def test_noise_stats_equal_positions_has_no_position_dependent_fraction(use_noisiest):
    """What differs between positions is the sampling error of variances."""
    samples = rng().standard_normal((16, 64, 5)) * np.sqrt([1.0, 2.0, 3.0, 4.0, 5.0])
    stats = GradientNoiseStats.from_variances(samples.var(1, ddof=1), 64, use_noisiest)
    assert stats.variance == pytest.approx(5.0 if use_noisiest else 3.0, rel=0.15)
    assert stats.mean_variance == pytest.approx(3.0, rel=0.1)
    assert stats.position_dependent_fraction < 0.2


def test_noise_stats_one_varying_coordinate_is_detected():
    variances = np.ones((16, 200))
    variances[:, 3] = np.linspace(0.5, 1.5, 16)
    stats = GradientNoiseStats.from_variances(variances, 1_000, True)
    assert stats.position_dependent_fraction == pytest.approx(np.std(variances[:, 3]), rel=0.1)


def regression_on_two_plates(X, y, z, batch_size=None):
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(X[i] @ beta, 1), obs=y[i])
    with numpyro.plate("others", len(z), subsample_size=batch_size) as j:
        numpyro.sample("z", dist.Normal(beta[0], 1), obs=z[j])


def make_bulk(X, y):
    """Return positions of the posterior's width, with minibatches of 50."""
    arguments = Arguments(
        (jnp.asarray(X), jnp.asarray(y), jnp.asarray(rng().standard_normal(500))),
        {"batch_size": 50},
    )
    potential = get_model_potential(regression_on_two_plates, arguments, init_to_uniform)
    hessian = X.T @ X + np.diag([500.01, *[0.01] * (X.shape[1] - 1)])
    beta = np.linalg.solve(hessian, X.T @ y)
    preconditioner = Preconditioner(beta, 1 / np.sqrt(np.diagonal(hessian)), np.zeros(beta.size))
    q = rng().standard_normal((8, beta.size))
    return BulkPositions(BatchedGradients(potential, arguments), preconditioner, q)


def measure_ratio(X, y):
    return measure_order_noise_ratio(make_bulk(X, y), MinibatchGradient())


def make_rows(num_influential, seed, size=4_000):
    """Return covariates of which one is known from a few rows, and responses."""
    random = np.random.default_rng(seed)
    X = random.standard_normal((size, 3))
    X[:, 2] = np.arange(size) < num_influential
    return X, X @ [0.5, -0.5, 1.0] + random.standard_normal(size)


def test_noise_stats_of_thousands_of_effects_are_no_maximum_of_errors():
    num_groups = 5_000
    layout = BlockArrowLayout(num_groups + 2, (EffectSite(0, (num_groups,), (0,)),))
    rng = np.random.default_rng(0)
    # Of variance 1, estimated with heavy tails, as from few minibatches with a group's rows.
    variances = rng.lognormal(-1.125, 1.5, (8, layout.dim))
    variances[:, -2:] = 0.5
    assert GradientNoiseStats.from_variances(variances, 64, True).variance > 5.0
    assert 0.9 < GradientNoiseStats.from_variances(variances, 64, True, layout).variance < 2.0
    variances[:, 100] = 4.0  # at all positions
    assert GradientNoiseStats.from_variances(variances, 64, True, layout).variance == 4.0
    variances[:, -1] = 6.0  # a shared parameter
    assert GradientNoiseStats.from_variances(variances, 64, True, layout).variance == 6.0


def test_order_noise_ratio_influential_rows_in_random_order_is_about_one():
    """Independent minibatches contain more or fewer of twelve influential rows by chance."""
    X, y = make_rows(12, 0)
    estimator, ratios, independent_ratios = ControlVariate(), [], []
    for seed in range(3, 6):
        order = np.random.default_rng(seed).permutation(len(y))
        bulk = make_bulk(X[order], y[order])
        ratios.append(measure_order_noise_ratio(bulk, estimator))
        iid, contiguous = measure_noise_by_subsampling(
            bulk, [estimator], np.random.default_rng(seed)
        )
        independent_ratios.append(
            contiguous[estimator].mean_variance / iid[estimator].mean_variance
        )
    assert max(ratios) < 1.5
    assert max(independent_ratios) > 2.0


def test_order_noise_ratio_random_order_is_about_one():
    assert 0.6 < measure_ratio(*make_rows(4_000, 0)) < 1.5


def test_order_noise_ratio_sorted_rows_are_noisier():
    X, y = make_rows(4_000, 0)
    assert measure_ratio(X[(order := np.argsort(y))], y[order]) > 3.0
    assert measure_ratio(X[(order := np.argsort(X[:, 0]))], y[order]) > 1.5
    groups = np.repeat(np.random.default_rng(1).standard_normal(40), 100)  # sorted by group
    assert measure_ratio(X, y + groups) > 3.0
    trend = np.sin(np.arange(4_000) / 300)  # in time
    assert measure_ratio(X, y + 2.0 * trend) > 3.0


# --- Bias of means ------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", [MinibatchGradient(), ControlVariate()], ids=lambda e: e.name)
def test_mean_bias_from_noise_skewed_posterior_matches_third_derivative(estimator):
    """The mean moves by minus half the third derivative times the added variance."""
    y, gradients, preconditioner = exponential_gradients(num_bias_probes=4_000)
    inflation = 0.02
    q = 0.7 * np.ones((8, 1))
    bulk = BulkPositions(gradients, preconditioner, q)
    (found,) = predict_mean_bias_from_noise(bulk, estimator, IIDSubsampling(), inflation, rng())
    t, reference = preconditioner.to_position(q[:1])[0, 0], preconditioner.center[0]
    row_gradients = (np.exp(t) - estimator.needs_reference * np.exp(reference)) * y
    variance = preconditioner.factor[0] ** 2 * len(y) ** 2 * row_gradients.var() / 20
    third_derivative = np.exp(t) * y.sum() * preconditioner.factor[0] ** 3
    expected = -0.5 * third_derivative * inflation * variance
    # Shrinkage by two standard errors of 4,000 minibatches takes off a twentieth.
    assert expected < found < 0.9 * expected


def test_mean_bias_per_inflation_skewed_posterior_matches_third_derivative():
    y, gradients, preconditioner = exponential_gradients(num_bias_probes=4_000)
    q = 0.7 * np.ones((8, 1))
    bulk = BulkPositions(gradients, preconditioner, q)
    (found,) = predict_mean_bias_per_variance_inflation(bulk, rng())
    t = preconditioner.to_position(q[:1])[0, 0]
    third_derivative = np.exp(t) * y.sum() * preconditioner.factor[0] ** 3
    assert -0.5 * third_derivative < found < 0.9 * -0.5 * third_derivative


def test_mean_bias_per_inflation_shared_scale_adds_over_effects():
    """The scale of n non-centred standard normal effects moves by n."""
    num, factor = 50, np.concatenate([[0.1], np.ones(50)])
    gradients = function_gradients(
        lambda q: q[0] + jnp.exp(2 * q[0]) * jnp.square(q[1:]).sum() / 2,
        51,
        num_bias_probes=2_000,
    )
    preconditioner = Preconditioner(np.zeros(51), factor, np.zeros(51))
    q = np.concatenate([np.zeros((8, 1)), rng().standard_normal((8, num))], 1)
    bulk = BulkPositions(gradients, preconditioner, q)
    found = predict_mean_bias_per_variance_inflation(bulk, rng())
    # Third derivatives: four times the squares along the scale, two along each effect.
    squares = np.square(q[:, 1:]).sum(1).mean()
    expected = -0.5 * (2 * num + 8 * squares / 2 * 0.1**2) * 0.1
    assert expected * 1.02 < found[0] < 0.9 * expected


def test_mean_bias_is_that_of_model_coordinates():
    """The first of two correlated coordinates is skewed; the preconditioned ones mix both."""
    gradients = function_gradients(
        lambda q: 0.1 * q[0] ** 3 + jnp.square(q).sum() / 2, 2, num_bias_probes=4_000
    )
    factor = np.array([[0.2, 1.0], [1.0, 0.2]])
    preconditioner = Preconditioner(np.zeros(2), factor, np.zeros(2))
    bulk = BulkPositions(gradients, preconditioner, np.zeros((8, 2)))
    found = predict_mean_bias_per_variance_inflation(bulk, rng())
    covariance = factor @ factor.T
    expected = -0.3 * covariance[0, 0] * covariance[0] / np.sqrt(np.diag(covariance))
    assert np.all(expected < found)
    assert np.all(found < 0.9 * expected)


def test_mean_bias_gaussian_posterior_is_zero():
    def model(y, batch_size=None):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

    y = rng().standard_normal(100)
    arguments = Arguments((jnp.asarray(y),), {"batch_size": 5})
    potential = get_model_potential(model, arguments, init_to_uniform)
    gradients = BatchedGradients(potential, arguments)
    preconditioner = Preconditioner(np.array([y.mean()]), 0.1 * np.ones(1), np.zeros(1))
    bulk = BulkPositions(gradients, preconditioner, rng().standard_normal((8, 1)))
    from_noise = predict_mean_bias_from_noise(
        bulk, MinibatchGradient(), IIDSubsampling(), 1.0, rng()
    )
    per_inflation = predict_mean_bias_per_variance_inflation(bulk, rng())
    assert np.abs(from_noise).max() < 1e-6
    assert np.abs(per_inflation).max() < 1e-6


@pytest.mark.parametrize(("edge", "expected"), [(0.5, 0.0), (0.05, 100.0)])
def test_mean_bias_perturbations_out_of_support(edge, expected):
    """A few are left out; where most are, the bias cannot be predicted and counts as 100 SDs."""
    gradients = function_gradients(
        lambda q: jnp.log(edge - q).sum() + jnp.log(edge + q).sum(), 1, num_bias_probes=200
    )
    preconditioner = Preconditioner(np.zeros(1), np.ones(1), np.zeros(1))
    bulk = BulkPositions(gradients, preconditioner, np.zeros((8, 1)))
    found = predict_mean_bias_per_variance_inflation(bulk, rng())
    assert found * 0.3**2 == pytest.approx(expected, abs=1e-3)


# --- Curvature ----------------------------------------------------------------------------------


def test_max_curvature_quadratic_is_largest_eigenvalue():
    hessian = random_covariance(20)
    gradients = function_gradients(lambda q: q @ jnp.asarray(hessian) @ q / 2, 20)
    largest = 4 * np.linalg.eigvalsh(hessian).max()
    q = rng().standard_normal((4, 20))
    diagonal = Preconditioner(np.zeros(20), 2.0 * np.ones(20), np.zeros(20))
    found = estimate_max_curvature(BulkPositions(gradients, diagonal, q), rng())
    assert found == pytest.approx(largest, rel=0.1)
    assert found <= largest * (1 + 1e-6)
    per_position = compute_max_curvatures(gradients, diagonal, q, rng().standard_normal(q.shape), 8)
    assert per_position.shape == (4,)
    assert per_position.max() == pytest.approx(found, rel=1e-6)
    root = np.linalg.cholesky(np.linalg.inv(hessian))
    dense = Preconditioner(np.zeros(20), root, np.zeros(20))
    found = estimate_max_curvature(BulkPositions(gradients, dense, q), rng())
    assert found == pytest.approx(1, rel=1e-6)


def test_max_curvature_not_finite_is_one():
    gradients = function_gradients(lambda q: jnp.sqrt(q).sum(), 2)
    preconditioner = Preconditioner(-np.ones(2), np.ones(2), np.zeros(2))
    bulk = BulkPositions(gradients, preconditioner, np.zeros((4, 2)))
    assert estimate_max_curvature(bulk, rng()) == 1.0
