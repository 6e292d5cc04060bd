"""Regressions with hundreds of weights have coordinates in which their Hessian is the identity."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC

from numpyro_sgmcmc import SGHMCSplit, bias_report, warmup_report
from numpyro_sgmcmc.adaptation.hessian_root import choose_hessian_root
from numpyro_sgmcmc.adaptation.pilot import (
    build_preconditioner_from_fit,
    init_standard_pilot,
    run_pilot,
)
from numpyro_sgmcmc.adaptation.preconditioning import build_hessian_root, update_preconditioner
from numpyro_sgmcmc.adaptation.subsampling_choice import list_candidates
from numpyro_sgmcmc.adaptation.variational import MeanField
from numpyro_sgmcmc.model.gradient_estimators import SecondOrderControlVariate, make_gradient_fn
from numpyro_sgmcmc.model.hessian_factor import HessianFactor
from tests.adaptation.inputs import make_inputs

DIM, ROWS, BATCH_SIZE = 300, 6_000, 60
CENTER = np.full(DIM, 1e-3)  # at zero, Bernoulli's gradient is that of a kink
MAX_SE = 4.7  # of the largest of 300 errors, with a probability of 0.1%

NORMAL = dist.Normal(0, 1)


def make_model(make_likelihood, prior):
    def model(X, y, batch_size=None):
        beta = numpyro.sample("beta", prior.expand([X.shape[1]]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", make_likelihood(X[i], beta), obs=y[i])

    return model


linear = make_model(lambda X, beta: dist.Normal(X @ beta, 1.0), NORMAL)
logistic = make_model(lambda X, beta: dist.Bernoulli(logits=X @ beta), NORMAL)
positive = make_model(lambda X, beta: dist.Normal(X @ beta, 30_000.0), dist.Gamma(0.3, 1.0))
bimodal = make_model(lambda X, beta: dist.Normal(X @ beta**2, 1.0), NORMAL)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((ROWS, DIM)) + 2.0 * rng.standard_normal((ROWS, 1))
    y = X @ rng.standard_normal(DIM) / 10.0 + rng.standard_normal(ROWS)
    return jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.float32)


@pytest.fixture(scope="module")
def labelled(data):
    return data[0], (data[1] > 0.0).astype(jnp.float32)


def choose(model, args, sd=0.05, batch_size=BATCH_SIZE, **options):
    """Return the choice about :data:`CENTER`, by the SD of a fit there."""
    inputs = make_inputs(model, args, batch_size, **options)
    fit = MeanField(CENTER, np.full(DIM, sd))
    preconditioner = build_preconditioner_from_fit(inputs, fit)
    return choose_hessian_root(inputs, list_candidates(inputs), preconditioner, fit)


def test_factor_is_the_inverse_root_of_a_hessian():
    rng = np.random.default_rng(1)
    A = rng.standard_normal((50, 20))
    hessian, v = A.T @ A, rng.standard_normal((3, 20))
    factor = HessianFactor.from_hessian(hessian, np.float64)
    L = factor.matrix
    np.testing.assert_allclose(L.T @ hessian @ L, np.eye(20), atol=1e-10)
    np.testing.assert_allclose(factor.apply(v), v @ L.T)
    np.testing.assert_allclose(factor.apply_transpose(v), v @ L)
    np.testing.assert_allclose(factor.solve(factor.apply(v)), v)
    np.testing.assert_allclose(factor.apply_squared(np.ones(20)), np.diag(L @ L.T))
    np.testing.assert_allclose(factor.log_det, -np.linalg.slogdet(hessian)[1] / 2.0)


@pytest.mark.parametrize("matrix", [np.diag([1.0, -1.0]), np.full((2, 2), np.nan)])
def test_indefinite_hessian_has_no_factor(matrix):
    assert HessianFactor.from_hessian(matrix, np.float64) is None


@pytest.mark.parametrize("batch_size", [BATCH_SIZE, 2 * BATCH_SIZE])
def test_mean_of_second_order_estimates_is_the_gradient(labelled, batch_size):
    inputs = make_inputs(logistic, labelled, batch_size)
    potential, arguments = inputs.potential, inputs.arguments
    root = build_hessian_root(inputs, CENTER)
    q = np.random.default_rng(2).standard_normal(DIM)
    exact = root.apply_transpose(inputs.batched_gradients.full_gradient(root.to_position(q)))
    cast = root.cast(potential.dtype)

    @jax.jit
    def estimate(rows):
        indices = {"rows": rows}
        fn = make_gradient_fn(SecondOrderControlVariate(), potential, arguments, cast, indices)
        return fn(jnp.asarray(q, potential.dtype))

    batches = np.arange(ROWS, dtype=np.int32).reshape(-1, batch_size)
    mean = np.mean([estimate(rows) for rows in batches], axis=0)
    np.testing.assert_allclose(mean, exact, atol=0.01)


def test_pilot_chains_have_unit_variance(data):
    inputs = make_inputs(linear, data, BATCH_SIZE)
    root = build_hessian_root(inputs, CENTER)
    pilot = init_standard_pilot(inputs, root)
    draws = run_pilot(inputs, pilot, SecondOrderControlVariate(), 0.3, 400)
    assert 0.9 < (draws - draws.mean((0, 1))).var() < 1.15  # of 300 coordinates of 16 chains


def test_reference_moves_to_the_mean_of_draws_that_are_far_from_it(labelled):
    inputs = make_inputs(logistic, labelled, BATCH_SIZE)
    root = build_hessian_root(inputs, CENTER)
    near = np.random.default_rng(3).standard_normal((4, 50, DIM))
    unchanged = update_preconditioner(inputs, root, near, None, True)
    assert unchanged.preconditioner is root
    far = near + 0.35
    few = update_preconditioner(inputs, root, far, None, True, num_independent=10.0)
    assert few.preconditioner is root  # by chance
    updated = update_preconditioner(inputs, root, far, None, True).preconditioner
    center = root.to_position(far.mean((0, 1)))
    np.testing.assert_allclose(updated.center, center)
    hessian = inputs.batched_gradients.full_hessian(center)
    L = updated.factor.matrix
    np.testing.assert_allclose(L.T @ hessian @ L, np.eye(DIM), atol=1e-3)


def test_correlated_columns_have_the_coordinates(data, labelled):
    for model, args in ((linear, data), (logistic, labelled)):
        assert choose(model, args).is_hessian_root


def test_others_keep_theirs(data):
    assert choose(linear, data, dense_mass=False) is None
    assert choose(linear, data, gradient_estimator="minibatch") is None
    assert choose(linear, data, inverse_mass_matrix=np.ones(DIM)) is None
    assert choose(linear, data, noise_compensation=True) is None
    assert choose(bimodal, data) is None  # indefinite Hessian
    assert choose(positive, data, sd=3.0) is None  # far from normal


def test_diagonal_is_kept_where_it_is_as_good():
    rng = np.random.default_rng(4)
    X = jnp.asarray(rng.standard_normal((ROWS, DIM)), jnp.float32)
    y = jnp.asarray(rng.standard_normal(ROWS), jnp.float32)
    assert choose(linear, (X, y), sd=ROWS**-0.5, batch_size=ROWS // 2) is None


def test_large_hessians_are_not_computed(data, monkeypatch):
    monkeypatch.setattr("numpyro_sgmcmc.adaptation.hessian_root._MAX_ROW_PRODUCTS", DIM * ROWS - 1)
    assert choose(linear, data) is None


@pytest.mark.parametrize("num_chains", [1, 3])
def test_default_run_is_exact(data, num_chains):
    X, y = (np.asarray(x, float) for x in data)
    mcmc = MCMC(
        SGHMCSplit(linear),
        num_warmup=50,
        num_samples=1_200 // num_chains,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), *data, batch_size=BATCH_SIZE)
    adaptation = mcmc.sampler.adaptation
    assert adaptation.estimator == SecondOrderControlVariate()
    assert adaptation.num_steps <= 15
    assert mcmc.last_state.adapt_state.preconditioner.factor.matrix.ndim == 2
    covariance = np.linalg.inv(X.T @ X + np.eye(DIM))
    sd = np.sqrt(np.diag(covariance))
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["beta"], float)
    ess = effective_sample_size(draws)
    errors = (draws.mean((0, 1)) - covariance @ (X.T @ y)) / sd
    assert (np.abs(errors) < MAX_SE / np.sqrt(ess)).all()
    ratios = draws.std((0, 1)) / sd
    assert (np.abs(ratios - 1.0) < 0.05 + MAX_SE / np.sqrt(2 * ess)).all()
    assert abs(ratios.mean() - 1.0) < 0.03  # hardly any Monte Carlo error, of 300 coordinates
    (site,) = bias_report(mcmc).sites
    assert site.diagnosis in ("ok", "inconclusive")
    assert "Dense, from the Hessian of all rows" in str(warmup_report(mcmc))
