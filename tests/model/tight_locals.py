"""Models with local values that the data of their row determine tightly."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

ROWS, COLUMNS, NOISE = 120, 6, 0.1
TIMES = np.linspace(-1.0, 1.0, COLUMNS, dtype=np.float32)
SLOPE_SD = 0.5


def levels(y: Any, batch_size: int | None = None) -> None:
    """One local value per row, added to a global mean per column."""
    with numpyro.plate("columns", COLUMNS, dim=-1):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
    with numpyro.plate("rows", len(y), subsample_size=batch_size, dim=-2) as i:
        z = numpyro.sample("z", dist.Normal(0, 1))
        with numpyro.plate("columns", COLUMNS, dim=-1):
            numpyro.sample("y", dist.Normal(mu + z, NOISE), obs=y[i])


def lines(y: Any, batch_size: int | None = None) -> None:
    """Local intercepts and slopes of a line per row."""
    mu = numpyro.sample("mu", dist.Normal(0, 10).expand([2]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        a = numpyro.sample("a", dist.Normal(0, 1))
        b = numpyro.sample("b", dist.Normal(0, SLOPE_SD))
        mean = (mu[0] + a)[:, None] + (mu[1] + b)[:, None] * TIMES
        numpyro.sample("y", dist.Normal(mean, NOISE).to_event(1), obs=y[i])


DESIGNS = {
    levels: (np.eye(COLUMNS), np.ones((COLUMNS, 1)), np.ones(1)),
    lines: (*(np.stack([np.ones(COLUMNS), TIMES], 1),) * 2, np.array([1.0, SLOPE_SD])),
}
"""Of each normal model the matrices of global and of local values, and the SDs of the latter."""


def normal_data(model: Any) -> np.ndarray:
    """Return rows of a normal model whose global values are 5."""
    rng = np.random.default_rng(5)
    of_globals, of_locals, sds = DESIGNS[model]
    z = sds * rng.standard_normal((ROWS, len(sds)))
    y = 5.0 * of_globals.sum(1) + z @ of_locals.T + NOISE * rng.standard_normal((ROWS, COLUMNS))
    return y.astype(np.float32)


def normal_posterior(model: Any, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the exact means and SDs of the global values of a normal model."""
    of_globals, of_locals, sds = DESIGNS[model]
    covariance = NOISE**2 * np.eye(COLUMNS) + of_locals * sds**2 @ of_locals.T
    weights = of_globals.T @ np.linalg.inv(covariance)
    precision = np.eye(of_globals.shape[1]) / 100 + len(y) * weights @ of_globals
    mean = np.linalg.solve(precision, weights @ y.astype(np.float64).sum(0))
    return mean, np.sqrt(np.diag(np.linalg.inv(precision)))


def counts(y: Any, x: Any, batch_size: int | None = None) -> None:
    """Counts with a local rate and a scale of the rates to estimate."""
    a = numpyro.sample("a", dist.Normal(0, 10))
    b = numpyro.sample("b", dist.Normal(0, 10))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size, dim=-2) as i:
        z = numpyro.sample("z", dist.Normal(0, tau))
        with numpyro.plate("columns", len(x), dim=-1):
            numpyro.sample("y", dist.Poisson(jnp.exp(a + b * x + z)), obs=y[i])


def counts_data() -> tuple[np.ndarray, np.ndarray]:
    """Return counts of about 1,000 with a = 7, b = -0.5 and tau = 0.3, and the covariate."""
    rng = np.random.default_rng(6)
    z = 0.3 * rng.standard_normal((ROWS, 1))
    return rng.poisson(np.exp(7 - 0.5 * TIMES + z)).astype(np.float32), TIMES


def deaths(y: Any, population: Any, batch_size: int | None = None) -> None:
    """Deaths by age, place and year, with a local value per place."""
    num_ages, num_places, num_years = population.shape
    a0, sa = numpyro.sample("a0", dist.Normal(-4, 3)), numpyro.sample("sa", dist.HalfNormal(1))
    sb, ss = numpyro.sample("sb", dist.HalfNormal(0.1)), numpyro.sample("ss", dist.HalfNormal(1))
    age = numpyro.plate("age", num_ages, dim=-3)
    year = numpyro.plate("year", num_years, dim=-1)
    with age:
        al = numpyro.sample("al", dist.Normal(a0, sa))
        be = numpyro.sample("be", dist.Normal(0, sb))
    with numpyro.plate("place", num_places, subsample_size=batch_size, dim=-2) as i:
        sp = numpyro.sample("sp", dist.Normal(0, ss))
        logits = al + sp + be * (jnp.arange(num_years) - num_years / 2) / 5
        with age, year:
            numpyro.sample("y", dist.Binomial(population[:, i], logits=logits), obs=y[:, i])


def deaths_data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return deaths, populations and the true values of ``al``; the SD of places is 0.2."""
    rng = np.random.default_rng(3)
    num_ages, num_places, num_years = 8, 300, 8
    al = np.linspace(-6, -2.5, num_ages)
    sp = 0.2 * rng.normal(size=num_places)
    be = -0.02 + 0.01 * rng.normal(size=num_ages)
    population = rng.integers(50, 3000, (num_ages, num_places, num_years))
    logits = al[:, None, None] + sp[:, None] + be[:, None, None] * np.arange(num_years)
    # The model's year zero is the fifth.
    return rng.binomial(population, 1 / (1 + np.exp(-logits))), population, al + 4 * be
