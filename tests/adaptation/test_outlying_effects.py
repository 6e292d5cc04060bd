"""Effects of small groups stay in the posterior although minibatches give their rows large weights.

Each group has a location and a log scale, and about one group in ten has fewer than nine rows. A
row far from the location of its group has a gradient that grows exponentially as the log scale
falls.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_sgmcmc import SGHMCSplit, bias_report
from tests.contract.kernels import quietly

NUM_GROUPS, NUM_ROWS = 400, 16_000


def model(group, y, batch_size=None):
    mean = numpyro.sample("mean", dist.Normal(0, 2))
    sd = numpyro.sample("sd", dist.HalfNormal(1))
    log_scale_mean = numpyro.sample("log_scale_mean", dist.Normal(0, 1))
    log_scale_sd = numpyro.sample("log_scale_sd", dist.HalfNormal(1))
    with numpyro.plate("groups", NUM_GROUPS):
        location = numpyro.sample("location", dist.Normal(mean, sd))
        log_scale = numpyro.sample("log_scale", dist.Normal(log_scale_mean, log_scale_sd))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        g = group[i]
        numpyro.sample("y", dist.Normal(location[g], jnp.exp(log_scale[g])), obs=y[i])


def make_data():
    rng = np.random.default_rng(43)
    sizes = np.exp(0.9 * rng.standard_normal(NUM_GROUPS))
    group = rng.choice(NUM_GROUPS, NUM_ROWS, p=sizes / sizes.sum())
    location, log_scale = 0.5 * rng.standard_normal((2, NUM_GROUPS)) + [[1.0], [-0.7]]
    y = location[group] + np.exp(log_scale[group]) * rng.standard_normal(NUM_ROWS)
    return jnp.asarray(group), jnp.asarray(y, jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_no_draw_is_far_outside_of_the_posterior(seed):
    mcmc = quietly(
        SGHMCSplit(model),
        num_warmup=200,
        num_samples=500,
        num_chains=4,
        chain_method="vectorized",
    )
    mcmc.run(jax.random.key(seed), *make_data(), batch_size=1_000)
    assert mcmc.sampler.adaptation.included_rows
    for site in ("location", "log_scale"):
        draws = np.asarray(mcmc.get_samples()[site])
        lower, median, upper = np.quantile(draws, [0.25, 0.5, 0.75], axis=0)
        sds = (upper - lower) / 1.349  # of a normal with these quartiles
        # Of groups without rows, the posterior has heavier tails than a normal.
        assert (np.abs(draws - median) < 10.0 * sds).all()
    assert not bias_report(mcmc).excursions
