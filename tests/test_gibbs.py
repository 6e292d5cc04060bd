"""A discrete global latent and a subsampled plate together, in NumPyro's Gibbs."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC
from numpyro.infer.gibbs import DiscreteGibbs, Gibbs

from numpyro_sgmcmc import SGLD, SGHMCSplit

PRIOR = np.array([0.5, 0.3, 0.2])
CENTRES = np.array([0.0, 0.02, 0.05])
SPREAD, N = 0.02, 5000
Y = jnp.asarray(np.random.default_rng(0).normal(0.025, 1.0, N), jnp.float32)


def model(y, batch_size=None):
    k = numpyro.sample("k", dist.Categorical(jnp.asarray(PRIOR)))
    mu = numpyro.sample("mu", dist.Normal(jnp.asarray(CENTRES)[k], SPREAD))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


def enumerated():
    """P(k | y), E[mu | k, y] and sd(mu | k, y) in closed form."""
    mean = float(Y.mean())
    variance = SPREAD**2 + 1 / N
    weights = PRIOR * np.exp(-0.5 * (mean - CENTRES) ** 2 / variance)
    precision = 1 / SPREAD**2 + N
    return weights / weights.sum(), (CENTRES / SPREAD**2 + N * mean) / precision, precision**-0.5


def run(kernel, num_chains=1, chain_method="sequential", num_samples=3000):
    gibbs = Gibbs([(DiscreteGibbs(kernel.model), ["k"]), (kernel, None)])
    mcmc = MCMC(
        gibbs,
        num_warmup=300,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method=chain_method,
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), Y, batch_size=100)
    return mcmc.get_samples(group_by_chain=True)


def check(samples):
    """Within four and a half standard errors of the enumeration."""
    p, means, sd = enumerated()
    k, mu = np.asarray(samples["k"]), np.asarray(samples["mu"])
    for j in range(3):
        here = (k == j).astype(float)
        error = np.sqrt(p[j] * (1 - p[j]) / effective_sample_size(here))
        assert abs(here.mean() - p[j]) < 4.5 * error
        error = sd / np.sqrt(effective_sample_size(mu) * p[j])
        assert abs(mu[k == j].mean() - means[j]) < 4.5 * error
        assert abs(np.log(mu[k == j].std() / sd)) < 0.05 + 4.5 / np.sqrt(2 * here.sum() / 4)


@pytest.mark.parametrize("kernel_class", [SGHMCSplit, SGLD])
def test_discrete_latent_against_enumeration(kernel_class):
    check(run(kernel_class(model)))


def test_an_anchor_that_ignores_the_discrete_latent_is_seen(monkeypatch):
    """Without `refresh` the control variates keep the gradient of another conditional."""
    monkeypatch.setattr(SGHMCSplit, "refresh", lambda self, state, args, kwargs: state)
    with pytest.raises(AssertionError):
        check(run(SGHMCSplit(model, gradient="control_variate")))


def test_parallel_chains():
    """In a process of its own, with two devices."""
    code = "import test_gibbs as t; t.check(t.run(t.SGHMCSplit(t.model), 2, 'parallel', 1500))"
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        cwd=os.path.dirname(__file__),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
