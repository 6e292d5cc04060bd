"""Posteriors of many kinds and sizes, for the trust benchmark.

The eight models of ``tests/sampling/models.py``, which have 20,000 rows each, and the ones below,
from 100 to 1,000,000 rows. Each takes ``batch_size`` for its data's plate, and None for all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import timing  # noqa: F401, puts the repository's root on the path
from numpyro.distributions.transforms import OrderedTransform

from tests.sampling.models import MODELS

__all__ = ["PROBLEMS", "Problem"]


class Problem(NamedTuple):
    """
    - **build** - makes the model and its arguments.
    - **batch_size** - rows in a minibatch.
    - **hard** - why the posterior is not one that these samplers promise to get right: funnel-like,
      multimodal; or empty.
    - **num_nuts** - draws a chain of the reference by NUTS.
    """

    build: Callable[[], tuple[Callable, tuple]]
    batch_size: int = 100
    hard: str = ""
    num_nuts: int = 2000


def _all_rows() -> tuple[Callable, tuple]:
    """A Gaussian mean and scale with a minibatch of all 100 rows: nothing is left to chance."""

    def model(y: Any, batch_size: int | None = None) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        sigma = numpyro.sample("sigma", dist.HalfNormal(5))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(mu, sigma), obs=y[i])

    rng = np.random.default_rng(11)
    return model, (jnp.asarray(2.0 + 1.5 * rng.standard_normal(100), jnp.float32),)


def _tall() -> tuple[Callable, tuple]:
    """Logistic regression, a million rows of ten columns, one of them rarely other than zero."""

    def model(X: Any, y: Any, batch_size: int | None = None) -> None:
        a = numpyro.sample("a", dist.Normal(0, 5))
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("rows", X.shape[0], subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Bernoulli(logits=a + X[i] @ beta), obs=y[i])

    rng = np.random.default_rng(12)
    X = rng.standard_normal((1_000_000, 10)).astype(np.float32)
    X[:, 9] = rng.random(len(X)) < 0.01
    logits = -2.0 + X @ np.linspace(-0.4, 0.4, 10).astype(np.float32)
    y = rng.random(len(X)) < 1 / (1 + np.exp(-logits))
    return model, (jnp.asarray(X), jnp.asarray(y, jnp.int32))


def _slopes() -> tuple[Callable, tuple]:
    """Intercepts and slopes that vary over 30 groups, with their correlation; non-centred."""

    def model(x: Any, group: Any, y: Any, batch_size: int | None = None) -> None:
        mean = numpyro.sample("mean", dist.Normal(0, 5).expand([2]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(2).expand([2]).to_event(1))
        corr = numpyro.sample("corr", dist.LKJCholesky(2, concentration=2.0))
        sigma = numpyro.sample("sigma", dist.HalfNormal(2))
        with numpyro.plate("groups", 30):
            raw = numpyro.sample("raw", dist.Normal(0, 1).expand([2]).to_event(1))
        effects = mean + raw @ (scale[:, None] * corr).T
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            at = effects[group[i]]
            numpyro.sample("y", dist.Normal(at[:, 0] + at[:, 1] * x[i], sigma), obs=y[i])

    rng = np.random.default_rng(13)
    num = 3_000
    group, x = rng.integers(0, 30, num), rng.standard_normal(num)
    effects = np.array([1.0, -0.5]) + rng.standard_normal((30, 2)) @ np.array(
        [[0.8, 0.3], [0, 0.5]]
    )
    y = effects[group, 0] + effects[group, 1] * x + rng.standard_normal(num)
    return model, (jnp.asarray(x, jnp.float32), jnp.asarray(group), jnp.asarray(y, jnp.float32))


def _ordered() -> tuple[Callable, tuple]:
    """A mixture of three normals with ordered means and unknown weights and scale."""

    def model(y: Any, batch_size: int | None = None) -> None:
        start = dist.Normal(0, 5).expand([3]).to_event(1)
        means = numpyro.sample("means", dist.TransformedDistribution(start, OrderedTransform()))
        weights = numpyro.sample("weights", dist.Dirichlet(2.0 * jnp.ones(3)))
        scale = numpyro.sample("scale", dist.HalfNormal(2))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            mixture = dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(means, scale))
            numpyro.sample("y", mixture, obs=y[i])

    rng = np.random.default_rng(14)
    part = rng.choice(3, 10_000, p=[0.3, 0.5, 0.2])
    y = np.array([-3.0, 0.0, 3.5])[part] + 0.9 * rng.standard_normal(10_000)
    return model, (jnp.asarray(y, jnp.float32),)


def _counts() -> tuple[Callable, tuple]:
    """Negative binomial regression with an unknown dispersion."""

    def model(X: Any, y: Any, batch_size: int | None = None) -> None:
        beta = numpyro.sample("beta", dist.Normal(0, 2).expand([X.shape[1]]).to_event(1))
        phi = numpyro.sample("phi", dist.Exponential(0.2))
        with numpyro.plate("rows", X.shape[0], subsample_size=batch_size) as i:
            rate = jnp.exp(X[i] @ beta)
            numpyro.sample("y", dist.NegativeBinomial2(rate, phi), obs=y[i])

    rng = np.random.default_rng(15)
    X = np.column_stack([np.ones(50_000), rng.standard_normal((50_000, 5))]).astype(np.float32)
    mean = np.exp(X @ np.array([0.7, 0.4, -0.3, 0.2, 0.1, 0.0]))
    y = rng.poisson(mean * rng.gamma(1.5, 1 / 1.5, len(X)))
    return model, (jnp.asarray(X), jnp.asarray(y))


def _spline() -> tuple[Callable, tuple]:
    """A smooth curve: 20 cubic B-splines whose coefficients are a random walk of unknown step."""

    def model(B: Any, y: Any, batch_size: int | None = None) -> None:
        level = numpyro.sample("level", dist.Normal(0, 5))
        step = numpyro.sample("step", dist.HalfNormal(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(2))
        walk = numpyro.sample("walk", dist.GaussianRandomWalk(step, num_steps=B.shape[1]))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(level + B[i] @ walk, sigma), obs=y[i])

    rng = np.random.default_rng(16)
    x = rng.random(5_000)
    B = _b_splines(x, 20)
    y = np.sin(7 * x) + 0.5 * np.cos(20 * x) + 0.6 * rng.standard_normal(5_000)
    return model, (jnp.asarray(B, jnp.float32), jnp.asarray(y, jnp.float32))


def _b_splines(x: np.ndarray, num: int) -> np.ndarray:
    """Cubic B-splines on [0, 1] by the recursion of de Boor, shape ``(len(x), num)``."""
    inner = np.linspace(0, 1, num - 2)
    knots = np.concatenate([[0.0] * 3, inner, [1.0] * 3])
    basis = ((x[:, None] >= knots[:-1]) & (x[:, None] < knots[1:])).astype(float)
    for degree in range(1, 4):
        left = knots[degree:-1] - knots[: -degree - 1]
        right = knots[degree + 1 :] - knots[1:-degree]
        with np.errstate(divide="ignore", invalid="ignore"):
            up = np.nan_to_num((x[:, None] - knots[: -degree - 1]) / left)
            down = np.nan_to_num((knots[degree + 1 :] - x[:, None]) / right)
        basis = up * basis[:, :-1] + down * basis[:, 1:]
    return basis


def _horseshoe() -> tuple[Callable, tuple]:
    """Sparse regression with the horseshoe prior: a funnel in every coefficient."""

    def model(X: Any, y: Any, batch_size: int | None = None) -> None:
        d = X.shape[1]
        tau = numpyro.sample("tau", dist.HalfCauchy(0.1))
        local = numpyro.sample("local", dist.HalfCauchy(1).expand([d]).to_event(1))
        raw = numpyro.sample("raw", dist.Normal(0, 1).expand([d]).to_event(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(2))
        with numpyro.plate("rows", X.shape[0], subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(X[i] @ (tau * local * raw), sigma), obs=y[i])

    rng = np.random.default_rng(17)
    X = rng.standard_normal((5_000, 15)).astype(np.float32)
    beta = np.zeros(15)
    beta[:3] = [1.0, -0.5, 0.25]
    y = X @ beta + rng.standard_normal(5_000)
    return model, (jnp.asarray(X), jnp.asarray(y, jnp.float32))


def _network() -> tuple[Callable, tuple]:
    """A Bayesian neural network of one hidden layer on the breast cancer table (569 x 30, UCI)."""
    from sklearn.datasets import load_breast_cancer

    def model(X: Any, y: Any, batch_size: int | None = None) -> None:
        d, width = X.shape[1], 5
        w1 = numpyro.sample("w1", dist.Normal(0, 1 / d**0.5).expand([d, width]).to_event(2))
        b1 = numpyro.sample("b1", dist.Normal(0, 1).expand([width]).to_event(1))
        w2 = numpyro.sample("w2", dist.Normal(0, 1).expand([width]).to_event(1))
        b2 = numpyro.sample("b2", dist.Normal(0, 1))
        with numpyro.plate("rows", X.shape[0], subsample_size=batch_size) as i:
            logits = jnp.tanh(X[i] @ w1 + b1) @ w2 + b2
            numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y[i])

    table = load_breast_cancer()
    X = (table.data - table.data.mean(0)) / table.data.std(0)
    return model, (jnp.asarray(X, jnp.float32), jnp.asarray(table.target, jnp.int32))


PROBLEMS: dict[str, Problem] = {
    **{name: Problem(build) for name, build in MODELS.items()},
    "normal, minibatch of all rows": Problem(_all_rows),
    "logistic, a million rows": Problem(_tall, num_nuts=300),
    "varying slopes, non-centred": Problem(_slopes),
    "mixture with ordered means": Problem(_ordered),
    "negative binomial regression": Problem(_counts),
    "spline, random-walk prior": Problem(_spline),
    "horseshoe regression": Problem(_horseshoe, hard="funnel-like"),
    "neural network": Problem(_network, hard="multimodal"),
}
