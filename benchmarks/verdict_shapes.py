"""Posteriors and gradients of awkward shape for the benchmark of diagnoses.

Modes, funnels, heavy tails and curved ridges are priors: the likelihood does not depend on them, so
the posterior is known exactly. Each model takes ``batch_size`` for the plate of its data, and None
for all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions.transforms import OrderedTransform

Built = tuple[Callable, tuple]


def rows(*columns: Any) -> tuple:
    """Columns as arrays of 32 bits, whole numbers as such."""
    kinds = {"f": jnp.float32, "i": jnp.int32, "b": jnp.int32}
    return tuple(jnp.asarray(x, kinds[np.asarray(x).dtype.kind]) for x in columns)


def silent(prior: Callable[[], Any]) -> Built:
    """1,000 rows about a separate level, which do not depend on what ``prior`` samples."""

    def model(y: Any, batch_size: int | None = None) -> None:
        prior()
        level = numpyro.sample("level", dist.Normal(0, 10))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(level, 1), obs=y[i])

    return model, rows(np.random.default_rng(40).standard_normal(1_000))


def alone(prior: Callable[[], dist.Distribution]) -> Built:
    """A parameter that has its prior and nothing else."""
    return silent(lambda: numpyro.sample("a", prior()))


def modes(weight: float, at: float, scale: float, d: int = 1) -> Built:
    """A standard normal, and with some weight another normal elsewhere, in ``d`` dimensions."""

    def prior() -> None:
        centres = jnp.array([0.0, at])[:, None] * jnp.ones(d)
        scales = jnp.array([1.0, scale])[:, None] * jnp.ones(d)
        parts = dist.Normal(centres, scales).to_event(1)
        which = dist.Categorical(jnp.array([1.0 - weight, weight]))
        numpyro.sample("a", dist.MixtureSameFamily(which, parts))

    return silent(prior)


def funnel(scale: float, centred: bool = True) -> Built:
    """Neal's: nine normals whose log variance is normal."""

    def prior() -> None:
        v = numpyro.sample("v", dist.Normal(0, scale))
        width = jnp.exp(v / 2) if centred else 1.0
        numpyro.sample("x", dist.Normal(0, width).expand([9]).to_event(1))

    return silent(prior)


def banana(width: float) -> Built:
    """A normal about the square of another."""

    def prior() -> None:
        x = numpyro.sample("x", dist.Normal(0, 1))
        numpyro.sample("z", dist.Normal(x**2, width))

    return silent(prior)


def mixture(centres: Sequence[float], ordered: bool = False) -> Built:
    """1,000 rows of a mixture of normals with equal weights and unit scales."""
    k = len(centres)

    def model(y: Any, batch_size: int | None = None) -> None:
        start = dist.Normal(0, 5).expand([k]).to_event(1)
        prior = dist.TransformedDistribution(start, OrderedTransform()) if ordered else start
        means = numpyro.sample("means", prior)
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            which = dist.Categorical(jnp.full(k, 1 / k))
            numpyro.sample("y", dist.MixtureSameFamily(which, dist.Normal(means, 1)), obs=y[i])

    rng = np.random.default_rng(41)
    return model, rows(np.array(centres)[rng.integers(0, k, 1_000)] + rng.standard_normal(1_000))


def groups(scale: float, centred: bool = True) -> Built:
    """30 groups of 30 rows, of a true scale that may be zero."""

    def model(group: Any, y: Any, batch_size: int | None = None) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        tau = numpyro.sample("tau", dist.HalfNormal(2))
        with numpyro.plate("groups", 30):
            if centred:
                effect = numpyro.sample("effect", dist.Normal(mu, tau))
            else:
                effect = mu + tau * numpyro.sample("raw", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(effect[group[i]], 1), obs=y[i])

    rng = np.random.default_rng(42)
    group = rng.permutation(np.repeat(np.arange(30), 30))
    effect = 1.0 + scale * rng.standard_normal(30)
    return model, rows(group, effect[group] + rng.standard_normal(900))


def of_mean(mean: Callable[[Any], Any], truth: float, num: int = 300) -> Built:
    """Rows whose mean is some function of one parameter."""

    def model(y: Any, batch_size: int | None = None) -> None:
        a = numpyro.sample("a", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(mean(a), 1), obs=y[i])

    return model, rows(truth + np.random.default_rng(43).standard_normal(num))


def of_slope(
    wrap_level: Callable[[Any], Any] = lambda a: a,
    wrap_slope: Callable[[Any], Any] = lambda b: b,
    slope: float = 0.5,
    centre: float = 1.0,
) -> Built:
    """A line through 1,000 rows whose level or slope goes through a function.

    Zero as the covariate's centre makes level and slope independent.
    """

    def model(x: Any, y: Any, batch_size: int | None = None) -> None:
        a = numpyro.sample("a", dist.Normal(0, 1))
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            mean = wrap_level(a) + wrap_slope(b) * x[i]
            numpyro.sample("y", dist.Normal(mean, 1), obs=y[i])

    rng = np.random.default_rng(44)
    x = centre + rng.standard_normal(1_000)
    return model, rows(x, 0.3 + slope * x + rng.standard_normal(1_000))


@jax.custom_jvp
def doubled(x: Any) -> Any:
    """The identity, whose derivative is said to be two."""
    return x


@doubled.defjvp
def _doubled_jvp(primals: tuple, tangents: tuple) -> tuple:
    return primals[0], 2.0 * tangents[0]


@jax.custom_jvp
def reversed_sign(x: Any) -> Any:
    """A fiftieth of the argument, whose derivative is said to be minus a fiftieth."""
    return 0.02 * x


@reversed_sign.defjvp
def _reversed_jvp(primals: tuple, tangents: tuple) -> tuple:
    return 0.02 * primals[0], -0.02 * tangents[0]


def change_point() -> Built:
    """A level that changes at an unknown time; the rows are in no order."""

    def model(t: Any, y: Any, batch_size: int | None = None) -> None:
        tau = numpyro.sample("tau", dist.Uniform(0, 1))
        before = numpyro.sample("before", dist.Normal(0, 2))
        after = numpyro.sample("after", dist.Normal(0, 2))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(jnp.where(t[i] < tau, before, after), 1), obs=y[i])

    rng = np.random.default_rng(45)
    t = rng.random(500)
    return model, rows(t, np.where(t < 0.4, 0.0, 0.6) + rng.standard_normal(500))


def sparse_simplex() -> Built:
    """Shares with a sparse prior, two of them never seen among 50 rows."""

    def model(y: Any, batch_size: int | None = None) -> None:
        p = numpyro.sample("p", dist.Dirichlet(0.1 * jnp.ones(4)))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Categorical(p), obs=y[i])

    return model, rows(np.random.default_rng(46).permutation(np.repeat([2, 3], [10, 40])))
