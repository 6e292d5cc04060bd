"""Posteriors without a dominant mode, such as network weights, get coordinates of the prior."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, NUTS

from numpyro_sgmcmc import SGHMCSplit, bias_report
from numpyro_sgmcmc.adaptation.multimodality import (
    MAX_TRIAL_VARIANCE_INFLATION,
    measure_minibatch_variance_inflation,
    rescale_to_prior,
)
from numpyro_sgmcmc.adaptation.pilot import PilotResult
from numpyro_sgmcmc.diagnostics import kolmogorov_distance
from numpyro_sgmcmc.errors import NonIdentifiedPosteriorWarning
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from tests.adaptation.inputs import make_inputs
from tests.contract.kernels import quietly

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.uniform(-2, 2, (200, 2)), jnp.float32)
Y = jnp.asarray(np.sin(2 * X[:, 0]) * X[:, 1] + 0.3 * RNG.standard_normal(200), jnp.float32)
NEW = jnp.asarray(RNG.uniform(-2, 2, (20, 2)), jnp.float32)
UNITS = 15
PRIOR_SDS = np.concatenate([2.0 * np.ones(UNITS), np.ones(2 * UNITS), 1.5 * np.ones(UNITS)])


def output(weights, X):
    hidden = jnp.tanh(X @ weights["w1"] + weights["b1"])
    return hidden @ weights["w2"] / np.sqrt(UNITS)


def network(X, y, batch_size=None):
    weights = {
        "w1": numpyro.sample("w1", dist.Normal(0, 1).expand([2, UNITS]).to_event(2)),
        "b1": numpyro.sample("b1", dist.Normal(0, 2).expand([UNITS]).to_event(1)),
        "w2": numpyro.sample("w2", dist.Normal(0, 1.5).expand([UNITS]).to_event(1)),
    }
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(output(weights, X[i]), 0.3), obs=y[i])


def linear(noise_sd):
    def model(X, y, batch_size=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(X[i] @ w, noise_sd), obs=y[i])

    return model


def rescale(model, r_hat=3.0, prior_sd_ratio=0.5, **options):
    """Return pilot chains with this R-hat, and the rescaled ones."""
    inputs = make_inputs(model, (X, Y), 50, **options)
    dim, rng = inputs.potential.dim, np.random.default_rng(0)
    preconditioner = Preconditioner(
        rng.standard_normal(dim), np.full(dim, prior_sd_ratio), np.zeros(dim)
    )
    pilot = PilotResult(preconditioner, rng.standard_normal((4, dim)), False, r_hat)
    return pilot, rescale_to_prior(inputs, pilot)


def test_rescale_to_prior_network_has_prior_sds_at_the_same_positions():
    pilot, rescaled = rescale(network)
    np.testing.assert_allclose(rescaled.preconditioner.factor, PRIOR_SDS, rtol=0.15)
    np.testing.assert_allclose(rescaled.positions, pilot.positions, rtol=1e-6, atol=1e-6)
    assert rescaled.r_hat == pilot.r_hat  # for `warmup_report`


@pytest.mark.parametrize(
    "options",
    [
        {"r_hat": 1.5},
        {"prior_sd_ratio": 0.02},
        {"gradient_estimator": "control_variate"},
        {"inverse_mass_matrix": np.ones(4 * UNITS)},
        {"noise_compensation": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_rescale_to_prior_converged_chains_or_user_options_are_kept(options):
    assert rescale(network, **options)[1] is None


@pytest.mark.parametrize(("model", "is_rescaled"), [(network, True), (linear(3.0), False)])
def test_rescale_to_prior_high_dim_needs_noisy_control_variates(model, is_rescaled):
    inputs = make_inputs(model, (X, Y), 50)
    dim = inputs.potential.dim
    gradient = inputs.batched_gradients.full_gradient(np.zeros(dim))
    preconditioner = Preconditioner(np.zeros(dim), np.full(dim, 0.5), gradient)
    rng = np.random.default_rng(1)
    pilot = PilotResult(preconditioner, rng.standard_normal((4, dim)), False, 3.0)
    rescaled = rescale_to_prior(inputs, pilot, high_dim=1)
    assert (rescaled is not None) == is_rescaled


@pytest.mark.parametrize("num_steps", [400, 100])
@pytest.mark.parametrize(("batch_size", "is_noisy"), [(200, False), (50, True)])
def test_trial_run_detects_gradient_noise(batch_size, is_noisy, num_steps):
    """In steps of 0.001 the noise of 50 of 200 rows adds four times the posterior variance."""
    x, y = np.asarray(X, float), np.asarray(Y, float)
    covariance = np.linalg.inv(np.eye(2) + x.T @ x / 0.09)
    rng = np.random.default_rng(2)
    draws = rng.multivariate_normal(covariance @ x.T @ y / 0.09, covariance, 64)
    inputs = make_inputs(linear(0.3), (X, Y), batch_size)
    inputs = replace(inputs, budget=replace(inputs.budget, pilot_window_steps=(num_steps,)))
    pilot = PilotResult(Preconditioner(np.zeros(2), np.ones(2), np.zeros(2)), draws)
    inflation = measure_minibatch_variance_inflation(inputs, pilot)
    assert (inflation > MAX_TRIAL_VARIANCE_INFLATION) == is_noisy


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_network_predictions_agree_with_nuts():
    """Within 0.03 of the Kolmogorov distance between two runs of NUTS.

    The SDs of predictions are reported with errors that their error bars explain.
    """
    predictions = []
    for seed in range(2):
        mcmc = MCMC(NUTS(network), num_warmup=500, num_samples=1000, progress_bar=False)
        mcmc.run(jax.random.key(seed), X, Y)
        predictions.append(jax.vmap(lambda w: output(w, NEW))(mcmc.get_samples()))
    mcmc = quietly(
        SGHMCSplit(network),
        num_warmup=500,
        num_samples=1000,
        num_chains=4,
        chain_method="vectorized",
    )
    with pytest.warns(NonIdentifiedPosteriorWarning):
        mcmc.run(jax.random.key(0), X, Y, batch_size=50)
    predicted = jax.vmap(lambda w: output(w, NEW))(mcmc.get_samples())
    between_nuts = kolmogorov_distance(*predictions).distance.mean()
    reference = jnp.concatenate(predictions)
    assert kolmogorov_distance(predicted, reference).distance.mean() < between_nuts + 0.03
    estimate = bias_report(mcmc, output, NEW).sd_inflation
    actual = np.asarray(predicted).std(0) / np.asarray(reference).std(0) - 1.0
    error = estimate.value - actual
    assert np.sqrt(np.square(error).mean()) < 0.08
    assert abs(error.mean()) < 0.05
    assert estimate.error.mean() < 0.06
