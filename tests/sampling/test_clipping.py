"""Gradient clipping: a bias that is known exactly on a Gaussian, and that the report estimates."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_sgmcmc import SGHMCSplit, bias_report
from numpyro_sgmcmc.sampling.bias_monitor import FirstGradientRecorder
from tests.contract.kernels import quietly

ROWS = 50
Y = jnp.asarray(np.random.default_rng(0).standard_normal((ROWS, 2)), jnp.float32)


def model(y):
    x = numpyro.sample("x", dist.Normal(0.0, 100.0).expand([2]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=10) as i:
        numpyro.sample("y", dist.Normal(x, 1.0).to_event(1), obs=y[i])


def exact_sd_inflation(max_norm):
    """Integrate the density of the clipped force, which has a potential: linear beyond the norm."""
    r = np.linspace(0.0, 30.0, 100_001)
    potential = np.where(r < max_norm, r**2 / 2.0, max_norm * r - max_norm**2 / 2.0)
    density = r * np.exp(-potential)
    return np.sqrt((r**2 * density).sum() / density.sum() / 2.0) - 1.0


def run(max_grad_norm):
    """Run with control variates, which are exact here, so that clipping is the only bias."""
    kernel = SGHMCSplit(
        model,
        step_size=0.1,
        inverse_mass_matrix=np.full(2, 1.0 / ROWS),
        max_grad_norm=max_grad_norm,
        gradient_estimator="control_variate",
        num_steps=30,
    )
    mcmc = quietly(
        kernel, num_warmup=100, num_samples=1500, num_chains=4, chain_method="vectorized"
    )
    mcmc.run(jax.random.key(0), Y)
    return mcmc


@pytest.mark.slow
def test_clipping_inflates_sds_as_the_clipped_force_does_and_the_report_flags_it():
    mcmc = run(1.0)
    expected = exact_sd_inflation(1.0)
    assert expected > 0.3
    sds = np.asarray(mcmc.get_samples()["x"]).std(0) * np.sqrt(ROWS)
    np.testing.assert_allclose(sds - 1.0, expected, atol=0.05)
    report = bias_report(mcmc)
    for estimate in report.bias_estimates:
        np.testing.assert_allclose(estimate.sd_inflation.value, expected, atol=0.1)
    (site,) = report.sites
    assert site.diagnosis == "biased"
    assert abs(site.sd_inflation - expected) < 0.1
    assert "max_grad_norm" in report.diagnosis


@pytest.mark.slow
def test_norm_that_is_never_reached_changes_no_draw():
    draws = [np.asarray(run(norm).get_samples()["x"]) for norm in (None, 1e6)]
    np.testing.assert_array_equal(*draws)


def test_max_norm_scales_longer_gradients_only():
    g = jnp.array([3.0, -4.0])
    np.testing.assert_allclose(FirstGradientRecorder(lambda q: g, 2.5)(g), g / 2.0)
    np.testing.assert_array_equal(FirstGradientRecorder(lambda q: g, 6.0)(g), g)
    np.testing.assert_array_equal(FirstGradientRecorder(jnp.zeros_like, 6.0)(g), 0.0 * g)
    assert np.isnan(FirstGradientRecorder(lambda q: g * jnp.nan, 6.0)(g)).all()
