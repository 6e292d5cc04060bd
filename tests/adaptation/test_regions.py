"""Posteriors without a single region: networks' weights take the prior's units."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, NUTS, init_to_uniform

from numpyro_sgmcmc import SGHMCSplit, bias_report
from numpyro_sgmcmc.adaptation import budget
from numpyro_sgmcmc.adaptation.context import WarmupContext
from numpyro_sgmcmc.adaptation.multimodality import (
    _MAX_TRIAL_VARIANCE_INFLATION,
    Mode,
    _measure_trial_variance_inflation,
    rescale_to_prior,
)
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.diagnostics import kolmogorov_distance
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.model.subsampled import get_model_potential
from numpyro_sgmcmc.progress import ProgressReporter
from numpyro_sgmcmc.sampling.options import build_warmup_settings
from tests.contract.kernels import quietly

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.uniform(-2, 2, (200, 2)), jnp.float32)
Y = jnp.asarray(np.sin(2 * X[:, 0]) * X[:, 1] + 0.3 * RNG.standard_normal(200), jnp.float32)
NEW = jnp.asarray(RNG.uniform(-2, 2, (20, 2)), jnp.float32)
UNITS = 15


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


def context_of(model, batch_size, **options):
    arguments = Arguments((X, Y), {"batch_size": batch_size})
    target = get_model_potential(model, arguments, init_to_uniform)
    kernel = SGHMCSplit(model, **options)
    settings = build_warmup_settings(
        kernel.options, target, kernel.dynamics, kernel.integrator, None, False, False
    )
    return WarmupContext(target, arguments, settings, ProgressReporter())


def changed(model, r_hat=3.0, width=0.5, **options):
    """What becomes of pilot chains that disagree by so much, as wide in units of the prior."""
    context = context_of(model, 50, **options)
    dim = context.potential.dim
    whitening = Preconditioner(RNG.standard_normal(dim), np.full(dim, width), np.zeros(dim))
    first = Mode(whitening, RNG.standard_normal((4, dim)), False, r_hat)
    return first, rescale_to_prior(context, first)


def test_a_network_has_the_priors_units():
    first, found = changed(network)
    units = np.concatenate([2.0 * np.ones(UNITS), np.ones(2 * UNITS), 1.5 * np.ones(UNITS)])
    np.testing.assert_allclose(found.preconditioner.factor, units, rtol=0.15)
    np.testing.assert_allclose(found.draws, first.draws, rtol=1e-6, atol=1e-6)
    assert found.r_hat == first.r_hat  # `explain` tells it


@pytest.mark.parametrize(
    "options",
    [
        {"r_hat": 1.5},
        {"width": 0.02},
        {"gradient_estimator": "control_variate"},
        {"inverse_mass_matrix": np.ones(4 * UNITS)},
        {"noise_compensation": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_is_known_or_given_stays(options):
    """Chains that agree, a posterior that knows more than the prior, what the user says."""
    assert changed(network, **options)[1] is None


@pytest.mark.parametrize("is_known", [False, True])
def test_of_very_many_coordinates_r_hat_says_little(monkeypatch, is_known):
    """There control variates must fail, too: about a line's mode they do not."""
    monkeypatch.setattr(budget, "HIGH_DIM", 1)

    def line(X, y, batch_size=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(X[i] @ w, 3.0), obs=y[i])

    context = context_of(line if is_known else network, 50)
    dim = context.potential.dim
    whitening = context.build_preconditioner(np.zeros(dim), np.full(dim, 0.5))
    first = Mode(whitening, RNG.standard_normal((4, dim)), False, 3.0)
    assert (rescale_to_prior(context, first) is None) == is_known


@pytest.mark.parametrize("num_steps", [400, 100])
@pytest.mark.parametrize(("batch_size", "is_hot"), [(200, False), (50, True)])
def test_noise_heats_draws_of_the_posterior(batch_size, is_hot, num_steps):
    """In steps of 0.001 noise of fifty rows of 200 adds four times a line's temperature."""

    def line(X, y, batch_size=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(X[i] @ w, 0.3), obs=y[i])

    x, y = np.asarray(X, float), np.asarray(Y, float)
    covariance = np.linalg.inv(np.eye(2) + x.T @ x / 0.09)
    draws = RNG.multivariate_normal(covariance @ x.T @ y / 0.09, covariance, 64)
    context = context_of(line, batch_size)
    context.budget = replace(context.budget, windows=(num_steps,))
    mode = Mode(Preconditioner(np.zeros(2), np.ones(2), np.zeros(2)), draws)
    assert (
        _measure_trial_variance_inflation(context, mode) > _MAX_TRIAL_VARIANCE_INFLATION
    ) == is_hot


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_a_network_predicts_as_nuts_does():
    """By default, within 0.03 of the distance that two runs of NUTS have from each other.

    And what is told of their sds is as far from what is true as its error bars say; along the
    gradient alone 14 % too much was told in the mean.
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
    with pytest.warns(UserWarning, match="no single region"):
        mcmc.run(jax.random.key(0), X, Y, batch_size=50)
    ours = jax.vmap(lambda w: output(w, NEW))(mcmc.get_samples())
    own = kolmogorov_distance(*predictions).distance.mean()
    both = jnp.concatenate(predictions)
    assert kolmogorov_distance(ours, both).distance.mean() < own + 0.03
    told = bias_report(mcmc, output, NEW).sd_inflation
    off = told.value - (np.asarray(ours).std(0) / np.asarray(both).std(0) - 1.0)
    assert np.sqrt(np.square(off).mean()) < 0.08
    assert abs(off.mean()) < 0.05
    assert told.error.mean() < 0.06
