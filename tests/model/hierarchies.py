"""Models with a latent value per row, and the marginal posterior of their globals."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from scipy import special

NOISE = 0.8
TRIALS = 6


def normal_means(y: Any, batch_size: int | None = None) -> None:
    """Normal means: marginally y is normal with variance tau^2 + NOISE^2."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfNormal(2))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        z = numpyro.sample("z", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(z, NOISE), obs=y[i])


def normal_means_data(rows: int = 2000, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (1 + rng.standard_normal(rows) + NOISE * rng.standard_normal(rows)).astype(np.float32)


def normal_means_posterior(y: Any) -> dict[str, tuple[float, float]]:
    """Return mean and SD of each global of :func:`normal_means`, on a grid."""
    y = np.asarray(y, np.float64)
    centre, width = y.mean(), 8 * y.std() / np.sqrt(len(y))
    mu = np.linspace(centre - width, centre + width, 301)[:, None]
    tau = np.linspace(1e-3, 2.5, 2001)
    variance = tau**2 + NOISE**2
    squares = ((y - centre) ** 2).sum() + len(y) * (centre - mu) ** 2
    log_density = -0.5 * (len(y) * np.log(variance) + squares / variance)
    log_density -= 0.5 * ((mu / 5) ** 2 + (tau / 2) ** 2)
    return grid_moments(log_density, {"mu": mu, "tau": tau})


def grid_moments(log_density: Any, values: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Return mean and SD of each value under a density on a grid."""
    p = np.exp(log_density - log_density.max())
    p /= p.sum()
    moments = {}
    for name, x in values.items():
        mean = float((p * x).sum())
        moments[name] = (mean, float(np.sqrt((p * (x - mean) ** 2).sum())))
    return moments


def draw_normal_means(
    rng_key: Any, gibbs_sites: Any, hmc_sites: Any, rows: Any, model_args: Any
) -> Any:
    """Sample the local values of :func:`normal_means` given the globals."""
    precision = 1 / NOISE**2 + 1 / hmc_sites["tau"] ** 2
    y = model_args[0][rows]
    mean = (y / NOISE**2 + hmc_sites["mu"] / hmc_sites["tau"] ** 2) / precision
    return {"z": dist.Normal(mean, 1 / jnp.sqrt(precision)).sample(rng_key)}


def mixture(y: Any, batch_size: int | None = None) -> None:
    """Mixture of two components with an indicator per row."""
    share = numpyro.sample("share", dist.Beta(2, 2))
    shift = numpyro.sample("shift", dist.Normal(0, 5))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        k = numpyro.sample("k", dist.Bernoulli(share))
        numpyro.sample("y", dist.Normal(shift * k, 1), obs=y[i])


def mixture_data(rows: int = 2000) -> np.ndarray:
    rng = np.random.default_rng(3)
    k = rng.uniform(size=rows) < 0.3
    return (2.5 * k + rng.standard_normal(rows)).astype(np.float32)


def mixture_posterior(y: Any) -> dict[str, tuple[float, float]]:
    """Return mean and SD of each global of :func:`mixture`, by summing out the indicators."""
    y = np.asarray(y, np.float64)
    share = np.linspace(0.2, 0.42, 221)[:, None]
    shift = np.linspace(2.0, 3.0, 201)
    log_density = np.log(share) + np.log1p(-share) - 0.5 * (shift / 5) ** 2
    base = np.exp(-0.5 * y**2)
    other = np.exp(-0.5 * (y[:, None] - shift) ** 2)
    for one, two in zip(base, other, strict=True):
        log_density = log_density + np.log((1 - share) * one + share * two)
    return grid_moments(log_density, {"share": share, "shift": shift})


def indicator_odds(share: Any, shift: Any, y: Any) -> Any:
    """Return the log odds of a row's indicator given the globals."""
    logit = jnp.log(share) - jnp.log1p(-share)
    return logit + shift * y - 0.5 * shift**2


def draw_indicators(rng_key: Any, gibbs_sites: Any, hmc_sites: Any, rows: Any) -> Any:
    """Sample the indicators of :func:`mixture` given the globals, for its default data."""
    y = jnp.asarray(mixture_data())[rows]
    odds = indicator_odds(hmc_sites["share"], hmc_sites["shift"], y)
    return {"k": dist.Bernoulli(logits=odds).sample(rng_key)}


def counts(x: Any, y: Any, batch_size: int | None = None) -> None:
    """Poisson regression with a random effect per row."""
    intercept = numpyro.sample("intercept", dist.Normal(0, 5))
    slope = numpyro.sample("slope", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        effect = numpyro.sample("effect", dist.Normal(0, tau))
        numpyro.sample("y", dist.Poisson(jnp.exp(intercept + slope * x[i] + effect)), obs=y[i])


def counts_data(rows: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(4)
    x = rng.standard_normal(rows).astype(np.float32)
    rate = np.exp(1.0 + 0.4 * x + 0.6 * rng.standard_normal(rows))
    return x, rng.poisson(rate)


def trials(x: Any, y: Any, batch_size: int | None = None) -> None:
    """Six Bernoulli trials per row, whose logits share the row's random intercept."""
    intercept = numpyro.sample("intercept", dist.Normal(0, 5))
    slope = numpyro.sample("slope", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size, dim=-2) as i:
        effect = numpyro.sample("effect", dist.Normal(intercept, tau))
        with numpyro.plate("trials", TRIALS, dim=-1):
            numpyro.sample("y", dist.Bernoulli(logits=effect + slope * x[i]), obs=y[i])


def trials_data(rows: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((rows, TRIALS)).astype(np.float32)
    logits = 0.5 - 0.7 * x + rng.standard_normal((rows, 1))
    return x, (rng.uniform(size=x.shape) < 1 / (1 + np.exp(-logits))).astype(np.int32)


def influential(X: Any, y: Any, batch_size: int | None = None) -> None:
    """Normal regression with a latent value per row."""
    b = numpyro.sample("b", dist.Normal(0, 5).expand([X.shape[1]]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(2))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        z = numpyro.sample("z", dist.Normal(X[i] @ b, tau))
        numpyro.sample("y", dist.Normal(z, NOISE), obs=y[i])


def influential_data(rows: int = 10_000) -> tuple[np.ndarray, np.ndarray]:
    """Return covariates, of which the last is not zero in ten rows only, and responses."""
    rng = np.random.default_rng(6)
    X = np.column_stack([np.ones(rows), rng.standard_normal(rows), np.arange(rows) % 1_000 == 7])
    y = X @ [1.0, -0.5, 2.0] + np.hypot(1.0, NOISE) * rng.standard_normal(rows)
    return X.astype(np.float32), y.astype(np.float32)


def influential_posterior(X: Any, y: Any) -> dict[str, tuple[Any, Any]]:
    """Return mean and SD of each global: given ``tau`` the coefficients are normal."""
    X, y = (np.asarray(a, np.float64) for a in (X, y))
    gram, moment, tau = X.T @ X, X.T @ y, np.linspace(0.8, 1.2, 401)
    found = []
    for variance in tau**2 + NOISE**2:
        covariance = np.linalg.inv(gram / variance + np.eye(len(gram)) / 25)
        mean = covariance @ moment / variance
        log_density = -0.5 * (len(y) * np.log(variance) + y @ y / variance)
        log_density += 0.5 * (mean @ moment / variance + np.linalg.slogdet(covariance)[1])
        found.append((log_density, mean, np.diag(covariance) + mean**2))
    log_density, mean, square = (np.array(x) for x in zip(*found, strict=True))
    log_density -= tau**2 / 8
    p = np.exp(log_density - log_density.max())
    p /= p.sum()
    return {
        "b": (p @ mean, np.sqrt(p @ square - (p @ mean) ** 2)),
        **grid_moments(log_density, {"tau": tau}),
    }


def overdispersed(x: Any, num: Any, y: Any, batch_size: int | None = None) -> None:
    """Binomial counts whose probability differs by row, with a regression on its logit."""
    a = numpyro.sample("a", dist.Normal(0, 2))
    b = numpyro.sample("b", dist.Normal(0, 2))
    log_size = numpyro.sample("log_size", dist.Normal(2, 1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        mean, size = 1 / (1 + jnp.exp(-a - b * x[i])), jnp.exp(log_size)
        share = numpyro.sample("share", dist.Beta(mean * size, (1 - mean) * size))
        numpyro.sample("y", dist.Binomial(num[i], share), obs=y[i])


def overdispersed_data(rows: int = 2_000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    x, num = rng.standard_normal(rows).astype(np.float32), rng.integers(5, 40, rows)
    mean = 1 / (1 + np.exp(0.5 - 0.4 * x))
    return x, num, rng.binomial(num, rng.beta(8.0 * mean, 8.0 * (1 - mean)))


def overdispersed_posterior(x: Any, num: Any, y: Any) -> dict[str, tuple[float, float]]:
    """Return mean and SD of each global: the counts are beta-binomial."""
    x = np.asarray(x, np.float64)

    def log_density(theta: Any) -> float:
        a, b, log_size = theta
        mean, size = special.expit(a + b * x), np.exp(log_size)
        likelihood = special.betaln(y + mean * size, num - y + (1 - mean) * size)
        likelihood -= special.betaln(mean * size, (1 - mean) * size)
        return likelihood.sum() - (a**2 + b**2) / 8 - (log_size - 2) ** 2 / 2

    # Five SDs about the mean.
    centre, width = np.array([-0.48, 0.425, 2.065]), np.array([0.1, 0.1, 0.22])
    axes = [c + w * np.linspace(-1, 1, 13) for c, w in zip(centre, width, strict=True)]
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), -1)
    values = dict(zip(("a", "b", "log_size"), np.moveaxis(grid, -1, 0), strict=True))
    return grid_moments(np.apply_along_axis(log_density, -1, grid), values)


def awkward(y: Any, batch_size: int | None = None) -> None:
    """Local sites of several shapes, a constrained one, and one in a second plate."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    scale = numpyro.sample("scale", dist.LogNormal(0, 1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size, dim=-1) as i:
        width = numpyro.sample("width", dist.LogNormal(mu, scale))
        pair = numpyro.sample("pair", dist.Normal(mu, scale).expand([2]).to_event(1))
        weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
        with numpyro.plate("columns", 3, dim=-2):
            cell = numpyro.sample("cell", dist.Normal(pair[:, 0], 1))
            numpyro.sample("y", dist.StudentT(4, cell + weights.T, width), obs=y[i].T)
        numpyro.factor("tilt", jnp.sin(pair[:, 1] * y[i, 0]))
