"""Means that noise moves and no gradient shows: the report tells of them."""

import re
import warnings
from functools import cache

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC

from numpyro_sgmcmc import SGHMCSplit, bias_report
from numpyro_sgmcmc.diagnostics import plot_bias

mpl.use("Agg")

pytestmark = pytest.mark.usefixtures("optimised")

GROUPS, ROWS, BATCH = 300, 12_000, 100
group = np.random.default_rng(0).integers(0, GROUPS, ROWS)
y = (0.3 * np.random.default_rng(1).standard_normal(GROUPS))[group]
y += np.random.default_rng(2).standard_normal(ROWS)


def model(group, y, batch_size=None):
    scale = numpyro.sample("scale", dist.LogNormal(-1, 1))
    effect = numpyro.sample("effect", dist.Normal(0, scale).expand([GROUPS]).to_event(1))
    with numpyro.plate("rows", ROWS, subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(effect[group[i]], 1.0), obs=y[i])


def exact_log_scale():
    """Posterior mean and sd of the scale's logarithm, the effects summed out."""
    x = np.linspace(-4, 1, 2_000)
    num = np.bincount(group, minlength=GROUPS)
    mean = np.bincount(group, y, GROUPS) / num
    variance = np.exp(2 * x)[:, None] + 1 / num
    log_p = -0.5 * (np.log(variance) + mean**2 / variance).sum(1) - 0.5 * (x + 1) ** 2
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    return p @ x, np.sqrt(p @ x**2 - (p @ x) ** 2)


@cache
def run(**settings):
    """The run, its report, and what is said before sampling."""
    mcmc = MCMC(SGHMCSplit(model, **settings), num_warmup=200, num_samples=1000, num_chains=4,
                chain_method="vectorized", progress_bar=False)  # fmt: skip
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        mcmc.run(jax.random.key(0), jnp.asarray(group), jnp.asarray(y, jnp.float32),
                 batch_size=BATCH)  # fmt: skip
    return mcmc, bias_report(mcmc), [str(w.message) for w in said if w.category is UserWarning]


def told_and_true(mcmc, report):
    """Of the scale's logarithm: the report's row, and how far its mean is off."""
    mean, sd = exact_log_scale()
    found = np.log(np.asarray(mcmc.get_samples()["scale"])).mean()
    return next(s for s in report.sites if s.site == "scale"), (found - mean) / sd


def test_a_scale_that_noise_moves_is_not_fine():
    mcmc, report, (sentence,) = run(step_size=0.2)
    row, true = told_and_true(mcmc, report)
    told = float(re.search(r"means up to (\S+) posterior sds off", sentence)[1])
    assert told == pytest.approx(true, abs=0.3 * true)
    assert true > 0.4
    assert row.diagnosis == "biased"
    assert row.mean_bias == pytest.approx(true, abs=0.3 * true)
    assert "Gradient noise explains it" in report.diagnosis
    assert "and moves means by at most" in str(report)
    shown = [line.get_xdata() for line in plot_bias(report)[0].lines]
    assert any(np.isclose(x, row.mean_bias).any() for x in shown)


def test_little_noise_moves_nothing_far():
    mcmc, report, said = run(step_size=0.06)
    assert said == []
    row, true = told_and_true(mcmc, report)
    assert row.mean_bias == pytest.approx(true, abs=0.1)
    assert report.is_ok
