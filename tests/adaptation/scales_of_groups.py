"""A hierarchy of locations and log scales: about one group in ten has fewer than nine rows."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

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
