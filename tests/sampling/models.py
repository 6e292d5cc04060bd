"""Models of different kinds with 20,000 simulated rows each, for tests of posteriors.

Each entry of MODELS is a function that returns a model and its arguments; every model takes
``batch_size``, the subsample size of the plate of its data; None for all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

N = 20_000


def _columns(rng: np.random.Generator, d: int, correlation: float) -> np.ndarray:
    """Return standard normal columns with equal correlations."""
    shared = rng.standard_normal((N, 1))
    own = rng.standard_normal((N, d))
    return (np.sqrt(correlation) * shared + np.sqrt(1 - correlation) * own).astype(np.float32)


def _logistic(correlation: float) -> tuple[Callable, tuple]:
    def model(X: Any, y: Any, batch_size: int | None = None) -> None:
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("rows", X.shape[0], subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Bernoulli(logits=X[i] @ beta), obs=y[i])

    rng = np.random.default_rng(1)
    X = _columns(rng, 20, correlation)
    p = 1 / (1 + np.exp(-X @ np.linspace(-0.5, 0.5, 20)))
    return model, (jnp.asarray(X), jnp.asarray(rng.random(N) < p, jnp.int32))


def linear() -> tuple[Callable, tuple]:
    """Return linear regression with an intercept, unknown scale, and numpyro.subsample."""

    def model(X: Any, y: Any, batch_size: int | None = None) -> None:
        a = numpyro.sample("a", dist.Normal(0, 10))
        beta = numpyro.sample("beta", dist.Normal(0, 2).expand([X.shape[1]]).to_event(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(5))
        with numpyro.plate("rows", X.shape[0], subsample_size=batch_size):
            x = numpyro.subsample(X, event_dim=1)
            numpyro.sample("y", dist.Normal(a + x @ beta, sigma), obs=numpyro.subsample(y, 0))

    rng = np.random.default_rng(2)
    X = _columns(rng, 8, 0.5)
    y = 3 + X @ np.linspace(-1, 1, 8) + 2.5 * rng.standard_normal(N)
    return model, (jnp.asarray(X), jnp.asarray(y, jnp.float32))


def _poisson(is_centred: bool) -> tuple[Callable, tuple]:
    def model(x: Any, group: Any, y: Any, batch_size: int | None = None) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        with numpyro.plate("groups", 50):
            if is_centred:
                alpha = numpyro.sample("alpha", dist.Normal(mu, tau))
            else:
                alpha = mu + tau * numpyro.sample("offset", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            rate = jnp.exp(alpha[group[i]] + slope * x[i])
            numpyro.sample("y", dist.Poisson(rate), obs=y[i])

    rng = np.random.default_rng(3)
    # Groups of very different sizes: from about ten rows to a thousand.
    weights = np.geomspace(0.01, 1, 50)
    group = rng.choice(50, N, p=weights / weights.sum())
    x = rng.standard_normal(N)
    alpha = 0.5 + 0.4 * rng.standard_normal(50)
    y = rng.poisson(np.exp(alpha[group] + 0.3 * x))
    return model, (jnp.asarray(x, jnp.float32), jnp.asarray(group), jnp.asarray(y))


def student_t() -> tuple[Callable, tuple]:
    """Return robust regression: Student-t with unknown scale and degrees of freedom."""

    def model(X: Any, y: Any, batch_size: int | None = None) -> None:
        beta = numpyro.sample("beta", dist.Normal(0, 5).expand([X.shape[1]]).to_event(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(5))
        nu = numpyro.sample("nu", dist.Gamma(2, 0.1))
        with numpyro.plate("rows", X.shape[0], subsample_size=batch_size) as i:
            numpyro.sample("y", dist.StudentT(nu, X[i] @ beta, sigma), obs=y[i])

    rng = np.random.default_rng(4)
    X = _columns(rng, 6, 0.0)
    y = X @ np.linspace(-1, 1, 6) + 0.7 * rng.standard_t(3, N)
    return model, (jnp.asarray(X), jnp.asarray(y, jnp.float32))


def simplex() -> tuple[Callable, tuple]:
    """Return a mixture with known locations, weights on a simplex and a common scale."""

    def model(y: Any, batch_size: int | None = None) -> None:
        w = numpyro.sample("w", dist.Dirichlet(jnp.ones(4)))
        scale = numpyro.sample("scale", dist.LogNormal(0, 1))
        parts = dist.Normal(jnp.array([-4.0, -1.0, 1.0, 4.0]), scale)
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            mixture = dist.MixtureSameFamily(dist.Categorical(w), parts)
            numpyro.sample("y", mixture, obs=y[i])

    rng = np.random.default_rng(5)
    part = rng.choice(4, N, p=[0.05, 0.45, 0.3, 0.2])
    y = np.array([-4.0, -1.0, 1.0, 4.0])[part] + 1.2 * rng.standard_normal(N)
    return model, (jnp.asarray(y, jnp.float32),)


def gamma() -> tuple[Callable, tuple]:
    """Return gamma regression with a log link and unknown shape."""

    def model(X: Any, y: Any, batch_size: int | None = None) -> None:
        beta = numpyro.sample("beta", dist.Normal(0, 2).expand([X.shape[1]]).to_event(1))
        shape = numpyro.sample("shape", dist.Exponential(0.1))
        with numpyro.plate("rows", X.shape[0], subsample_size=batch_size) as i:
            mean = jnp.exp(X[i] @ beta)
            numpyro.sample("y", dist.Gamma(shape, shape / mean), obs=y[i])

    rng = np.random.default_rng(6)
    X = np.column_stack([np.ones(N), _columns(rng, 4, 0.3)]).astype(np.float32)
    mean = np.exp(X @ np.array([1.0, 0.5, -0.3, 0.2, 0.0]))
    return model, (jnp.asarray(X), jnp.asarray(rng.gamma(2.0, mean / 2.0), jnp.float32))


MODELS: dict[str, Callable[[], tuple[Callable, tuple]]] = {
    "logistic": lambda: _logistic(0.0),
    "logistic, columns correlated at 0.95": lambda: _logistic(0.95),
    "linear with unknown scale": linear,
    "hierarchical Poisson, centred": lambda: _poisson(True),
    "hierarchical Poisson, non-centred": lambda: _poisson(False),
    "Student-t regression": student_t,
    "mixture weights on a simplex": simplex,
    "gamma regression": gamma,
}
