"""Gradients and curvature at draws, and the mean bias by gradient noise that they do not show."""

import re
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC

from numpyro_sgmcmc import SGHMCSplit, bias_report
from numpyro_sgmcmc.diagnostics import draw_gradients
from numpyro_sgmcmc.diagnostics.draw_gradients import (
    compute_gradients_at_draws,
    predict_noise_mean_bias,
)
from numpyro_sgmcmc.diagnostics.run_data import RunData
from tests.diagnostics.survey_runs import run_with

# --- Gradients ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run():
    return RunData.from_mcmc(run_with(SGHMCSplit, "default"), "test")


@pytest.fixture(scope="module")
def gradients(run):
    return compute_gradients_at_draws(run, run.finite_draws)


def test_gradients_at_draws_are_unbiased(run, gradients):
    flat = gradients.positions.reshape(-1, gradients.positions.shape[-1])
    exact = np.asarray(run.kernel.full_gradients(jnp.asarray(flat, jnp.float32), run.arguments))
    error = gradients.gradients.reshape(flat.shape) - exact
    scale = exact.std(0)
    assert (np.abs(error.mean(0)) < 4 * error.std(0) / np.sqrt(len(error)) + 0.01 * scale).all()
    assert (error.std(0) < 0.3 * scale).all()


def test_gradients_at_draws_of_a_randomised_likelihood_are_not_computed(run):
    arguments = SimpleNamespace(host_arrays=(), sharded_arrays=())
    stochastic = SimpleNamespace(is_stochastic=True, dim=3)
    run = SimpleNamespace(kernel=SimpleNamespace(potential=stochastic), arguments=arguments)
    assert compute_gradients_at_draws(run, np.zeros((1, 4, 3))) is None


def test_curvature_at_draws_is_the_largest_eigenvalue(run, gradients):
    flat = gradients.positions.reshape(-1, gradients.positions.shape[-1])
    factor = run.preconditioners[0].factor
    factor = np.diag(factor) if factor.ndim == 1 else factor
    gradient_fn = jax.jit(lambda x: run.kernel.potential.full_gradient(x, run.arguments))

    def largest(q):
        hessian = np.asarray(jax.jacfwd(gradient_fn)(q), np.float64)
        return np.linalg.eigvalsh(factor.T @ hessian @ factor).max()

    indices = gradients.curvature_indices[:5]
    expected = [largest(jnp.asarray(flat[k], jnp.float32)) for k in indices]
    np.testing.assert_allclose(gradients.max_curvature[:5], expected, rtol=0.15)


# --- Mean bias by noise -------------------------------------------------------------------------

ROWS_PER_GROUP = 40


def model(group, y, batch_size=None):
    num_rows = len(y)
    scale = numpyro.sample("scale", dist.LogNormal(-1, 1))
    num_groups = num_rows // ROWS_PER_GROUP
    effect = numpyro.sample("effect", dist.Normal(0, scale).expand([num_groups]).to_event(1))
    with numpyro.plate("rows", num_rows, subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(effect[group[i]], 1.0), obs=y[i])


def make_data(num_groups):
    num_rows = ROWS_PER_GROUP * num_groups
    group = np.random.default_rng(0).integers(0, num_groups, num_rows)
    y = (0.3 * np.random.default_rng(1).standard_normal(num_groups))[group]
    return group, y + np.random.default_rng(2).standard_normal(num_rows)


def exact_log_scale(group, y):
    """Return posterior mean and SD of the scale's logarithm, marginal over the effects."""
    x = np.linspace(-4, 1, 2_000)
    num = np.bincount(group)
    mean = np.bincount(group, y) / num
    variance = np.exp(2 * x)[:, None] + 1 / num
    log_p = -0.5 * (np.log(variance) + mean**2 / variance).sum(1) - 0.5 * (x + 1) ** 2
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    return p @ x, np.sqrt(p @ x**2 - (p @ x) ** 2)


def scale_run(step_size, num_groups, batch_size, num_warmup, num_samples, seed=0):
    """Return the report, the scale's site, the true bias of its mean, and the warnings."""
    mcmc = MCMC(
        SGHMCSplit(model, step_size=step_size, gradient_estimator="control_variate"),
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    group, y = make_data(num_groups)
    data = jnp.asarray(group), jnp.asarray(y, jnp.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        mcmc.run(jax.random.key(seed), *data, batch_size=batch_size)
    messages = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    report = bias_report(mcmc)
    mean, sd = exact_log_scale(group, y)
    mean_bias = (np.log(np.asarray(mcmc.get_samples()["scale"])).mean() - mean) / sd
    return report, next(s for s in report.sites if s.site == "scale"), mean_bias, messages


def test_mean_bias_of_few_draws_with_large_third_derivatives_is_not_predicted(run, monkeypatch):
    """A shift at all draws is a bias; one at six draws of 32 may be noise."""
    shifts = 0.01 * np.random.default_rng(0).standard_normal(
        (32, 2, len(run.preconditioners[0].sds))
    )
    shifts[..., 0] += 0.3
    shifts[:6, :, 1] = -5.0  # 2.7 standard errors over draws, 3.8 over minibatches
    monkeypatch.setattr(draw_gradients, "compute_mean_biases_by_noise", lambda *_: shifts)
    value, error = predict_noise_mean_bias(run, run.finite_draws)
    assert value[0] == pytest.approx(0.3, abs=0.02)
    assert error[0] == pytest.approx(0.25 * value[0], rel=0.05)
    assert np.isnan(value[1])
    assert error[1] == 0.0
    report = bias_report(run_with(SGHMCSplit, "default"))
    site = report.sites[0]
    assert site.mean_bias == pytest.approx(0.3, abs=0.1)
    text = " ".join(str(report).split())
    assert f"to bias means by at most {value[0]:.2f} SD" in text
    assert f"means of {site.site} by noise is not predicted" in text


@pytest.mark.slow
def test_mean_bias_by_noise_is_predicted_and_flagged():
    report, site, truth, (message,) = scale_run(0.2, 100, 20, 50, 600, seed=2)
    predicted = float(re.search(r"([0-9.]+) (?:posterior )?SD", message, re.IGNORECASE)[1])
    assert truth > 0.4
    assert predicted == pytest.approx(truth, abs=0.3 * truth)
    assert site.diagnosis == "biased"
    assert site.mean_bias == pytest.approx(truth, abs=0.3 * truth)
    assert report.mean_bias.value.max() == pytest.approx(site.mean_bias)
    assert report.noise_mean_bias.max() > 0.5 * truth
    assert "Gradient noise explains it" in report.diagnosis
    assert "bias means" in str(report)


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_little_noise_causes_no_mean_bias():
    report, site, truth, messages = scale_run(0.06, 300, 100, 200, 1000)
    assert messages == []
    assert site.mean_bias == pytest.approx(truth, abs=0.1)
    assert report.is_ok
