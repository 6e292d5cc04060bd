"""The logistic regression that most benchmarks sample: its model and its data."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array, lax, random

DIM = 20
BATCH_SIZE = 100


def logistic(X: Array, y: Array, batch_size: int | None = None) -> None:
    """Logistic regression with standard normal coefficients."""
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ beta), obs=y[i])


@partial(jax.jit, static_argnums=(1, 2))
def make_data(rng_key: Array, num_rows: int, dim: int) -> tuple[Array, Array]:
    """Standard normal columns and float labels, made by chunks: no second copy of the data."""
    num_chunks = max(1, num_rows * dim // 2**22)
    while num_rows % num_chunks:
        num_chunks -= 1
    shape = (num_rows // num_chunks, dim)
    beta = jnp.linspace(-1.0, 1.0, dim) * min(1.0, (DIM / dim) ** 0.5)

    def fill(k: Array, data: tuple[Array, Array]) -> tuple[Array, Array]:
        X, y = data
        key, label_key = random.split(random.fold_in(rng_key, k))
        rows = random.normal(key, shape)
        labels = random.uniform(label_key, shape[:1]) < jax.nn.sigmoid(rows @ beta)
        start = k * shape[0]
        return (
            lax.dynamic_update_slice(X, rows, (start, 0)),
            lax.dynamic_update_slice(y, labels.astype(y.dtype), (start,)),
        )

    return lax.fori_loop(0, num_chunks, fill, (jnp.zeros((num_rows, dim)), jnp.zeros(num_rows)))
