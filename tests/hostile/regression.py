"""A regression whose arguments make one part of it wrong."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

N = 1000
_rng = np.random.default_rng(0)
X = jnp.asarray(_rng.standard_normal((N, 3)), jnp.float32)
Y = jnp.asarray(_rng.standard_normal(N), jnp.float32)


def model(X, y, batch=100, size=None, rows_of=("X", "y"), discrete=False, key=False):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1))
    if discrete:
        b = b + numpyro.sample("k", dist.Bernoulli(0.5))
    if key:
        numpyro.prng_key()
    with numpyro.plate("rows", size or X.shape[0], subsample_size=batch) as i:
        x = X[i] if "X" in rows_of else X
        numpyro.sample("y", dist.Normal(x @ b, 1), obs=y[i] if "y" in rows_of else y)
