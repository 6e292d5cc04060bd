"""Gradients cut to a norm: a bias that is known exactly on a normal, and told."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC

from numpyro_sgmcmc import SGHMCSplit, bias_report
from numpyro_sgmcmc.dynamics.integrators import clip_grad_norm

ROWS = 50
Y = jnp.asarray(np.random.default_rng(0).standard_normal((ROWS, 2)), jnp.float32)


def model(y):
    x = numpyro.sample("x", dist.Normal(0.0, 100.0).expand([2]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=10) as i:
        numpyro.sample("y", dist.Normal(x, 1.0).to_event(1), obs=y[i])


def exact_inflation(largest):
    """Of the sds. The cut force is that of a potential too: linear from that distance on."""
    r = np.linspace(0.0, 30.0, 100_001)
    potential = np.where(r < largest, r**2 / 2.0, largest * r - largest**2 / 2.0)
    density = r * np.exp(-potential)
    return np.sqrt((r**2 * density).sum() / density.sum() / 2.0) - 1.0


def run(clip_gradient):
    """Control variates are exact on this posterior: the cut is all that is wrong."""
    kernel = SGHMCSplit(
        model,
        step_size=0.1,
        inverse_mass_matrix=np.full(2, 1.0 / ROWS),
        max_grad_norm=clip_gradient,
        gradient_estimator="control_variate",
        num_steps=30,
    )
    mcmc = MCMC(
        kernel,
        num_warmup=100,
        num_samples=4000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), Y)
    return mcmc


def test_draws_spread_as_far_as_the_cut_force_lets_them_and_the_report_says_so():
    mcmc = run(1.0)
    expected = exact_inflation(1.0)
    assert expected > 0.3
    sds = np.asarray(mcmc.get_samples()["x"]).std(0) * np.sqrt(ROWS)
    np.testing.assert_allclose(sds - 1.0, expected, atol=0.05)
    report = bias_report(mcmc)
    # By the run's own gradients, and by those at draws.
    np.testing.assert_allclose(report.sd_inflation.value, expected, atol=0.1)
    (site,) = report.sites
    assert site.diagnosis == "biased"
    assert abs(site.sd_inflation - expected) < 0.1
    assert "max_grad_norm" in report.diagnosis


@pytest.mark.slow
def test_a_norm_that_is_never_reached_changes_nothing():
    draws = [np.asarray(run(c).get_samples()["x"]) for c in (None, 1e6)]
    np.testing.assert_array_equal(*draws)


def test_only_longer_gradients_are_cut():
    g = jnp.array([3.0, -4.0])
    np.testing.assert_allclose(clip_grad_norm(lambda q: g, 2.5)(g), g / 2.0)
    np.testing.assert_array_equal(clip_grad_norm(lambda q: g, 6.0)(g), g)
    np.testing.assert_array_equal(clip_grad_norm(jnp.zeros_like, 6.0)(g), 0.0 * g)
    assert np.isnan(clip_grad_norm(lambda q: g * jnp.nan, 6.0)(g)).all()
