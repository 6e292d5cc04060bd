"""Small posteriors that are known exactly, for the benchmark of diagnoses.

Each has one possible fault, or none: several modes, funnels, gradients that are not those of the
potential, influential rows, numbers out of range. Shapes that do not come from regression are in a
module of shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import verdict_shapes as shapes  # vocabulary: ok
from jax import lax
from verdict_shapes import Built, rows  # vocabulary: ok

__all__ = ["PROBLEMS", "Problem"]


class Problem(NamedTuple):
    """
    - **build** - makes the model and its arguments.
    - **fault** - the kind of what may go wrong; ``none`` where nothing should.
    - **batch_size** - rows in a minibatch.
    - **options** - keywords of ``MCMC`` in place of the benchmark's own.
    """

    build: Callable[[], Built]
    fault: str
    batch_size: int = 100
    options: Mapping[str, Any] = {}


def _linear(X: np.ndarray, y: np.ndarray, prior: Callable[[], dist.Distribution]) -> Built:
    """Regression with unit errors."""

    def model(X: Any, y: Any, batch_size: int | None = None) -> None:
        beta = numpyro.sample("beta", prior())
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(X[i] @ beta, 1), obs=y[i])

    return model, rows(X, y)


def _wide(d: int, scale: float = 5.0) -> Callable[[], dist.Distribution]:
    return lambda: dist.Normal(0, scale).expand([d]).to_event(1)


def _rare_covariate(logistic: bool) -> Built:
    """A covariate that is other than zero in 5 of 50,000 rows."""

    def model(x: Any, y: Any, batch_size: int | None = None) -> None:
        a = numpyro.sample("a", dist.Normal(0, 5))
        b = numpyro.sample("b", dist.Normal(0, 2))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            mean = a + b * x[i]
            found = dist.Bernoulli(logits=mean) if logistic else dist.Normal(mean, 1)
            numpyro.sample("y", found, obs=y[i])

    rng = np.random.default_rng(50)
    x = np.zeros(50_000)
    x[rng.choice(50_000, 5, replace=False)] = 1.0
    mean = 0.5 + x
    if logistic:
        return model, rows(x, rng.random(50_000) < 1 / (1 + np.exp(-mean)))
    return model, rows(x, mean + rng.standard_normal(50_000))


def _leverage() -> Built:
    """Six of 20,000 rows decide a slope."""
    rng = np.random.default_rng(51)
    x = rng.standard_normal(20_000)
    x[rng.choice(20_000, 6, replace=False)] = 100.0
    y = 1.0 + 0.5 * x + rng.standard_normal(20_000)
    return _linear(np.column_stack([np.ones(20_000), x]), y, _wide(2))


def _rare_category() -> Built:
    """Logistic regression on categories, one of them with 20 of 20,000 rows."""

    def model(kind: Any, y: Any, batch_size: int | None = None) -> None:
        beta = numpyro.sample("beta", dist.Normal(0, 2).expand([4]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Bernoulli(logits=beta[kind[i]]), obs=y[i])

    rng = np.random.default_rng(52)
    kind = rng.permutation(np.repeat(np.arange(4), [20, 4_980, 7_000, 8_000]))
    p = 1 / (1 + np.exp(-np.array([-1.0, -0.5, 0.5, 1.0])))
    return model, rows(kind, rng.random(20_000) < p[kind])


def _mean_scale(num: int, is_sorted: bool = False) -> Built:
    """A normal mean and scale."""

    def model(y: Any, batch_size: int | None = None) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        sigma = numpyro.sample("sigma", dist.HalfNormal(5))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(mu, sigma), obs=y[i])

    y = 2.0 + 1.5 * np.random.default_rng(53).standard_normal(num)
    return model, rows(np.sort(y) if is_sorted else y)


def _columns(num: int, d: int, correlation: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Standard normal columns with one common correlation, and their responses less the errors."""
    rng = np.random.default_rng(seed)
    shared, own = rng.standard_normal((num, 1)), rng.standard_normal((num, d))
    X = np.sqrt(correlation) * shared + np.sqrt(1 - correlation) * own
    return X, X @ np.linspace(-0.5, 0.5, d) + rng.standard_normal(num)


def _correlated(num: int, d: int, correlation: float, prior: Any = None) -> Built:
    """Regression on columns with one common correlation."""
    X, y = _columns(num, d, correlation, 54)
    return _linear(X, y, prior or _wide(d))


def _repeated() -> Built:
    """Each row ten times, one after the other."""
    X, y = _columns(2_000, 3, 0.0, 55)
    return _linear(np.repeat(X, 10, 0), np.repeat(y, 10), _wide(3))


def _units() -> Built:
    """Columns of scales from a millionth to a million."""
    X, y = _columns(5_000, 5, 0.3, 56)
    scales = np.array([1e-6, 1e-3, 1.0, 1e3, 1e6])
    return _linear(X * scales, y, lambda: dist.Normal(0, 5 / jnp.asarray(scales)).to_event(1))


def _ridge() -> Built:
    """Two parameters of which the rows know the sum."""
    rng = np.random.default_rng(57)
    return _linear(np.ones((10_000, 2)), 1.0 + rng.standard_normal(10_000), _wide(2, 1.0))


def _far_level(level: float) -> Built:
    """A mean that has about as many digits as a float of 32 bits, or more."""
    y = level + np.random.default_rng(58).standard_normal(10_000)
    return _linear(np.ones((10_000, 1)), y, _wide(1, 10 * level))


def _logistic(X: np.ndarray, y: np.ndarray, scale: float) -> Built:
    def model(X: Any, y: Any, batch_size: int | None = None) -> None:
        beta = numpyro.sample("beta", dist.Normal(0, scale).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Bernoulli(logits=X[i] @ beta), obs=y[i])

    return model, rows(X, y)


def _separated() -> Built:
    """Logistic regression on 200 rows whose classes a threshold parts."""
    x = np.random.default_rng(59).standard_normal(200)
    return _logistic(np.column_stack([np.ones(200), x]), x > 0.2, 10.0)


def _plain_logistic() -> Built:
    """Logistic regression of 5,000 rows."""
    rng = np.random.default_rng(60)
    X = np.column_stack([np.ones(5_000), rng.standard_normal((5_000, 2))])
    p = 1 / (1 + np.exp(-X @ np.array([-0.5, 0.7, -0.3])))
    return _logistic(X, rng.random(5_000) < p, 5.0)


def _counts(scale: float, slope: float) -> Built:
    """Poisson regression of 5,000 rows on a covariate of some scale."""

    def model(x: Any, y: Any, batch_size: int | None = None) -> None:
        a = numpyro.sample("a", dist.Normal(0, 5))
        b = numpyro.sample("b", dist.Normal(0, 2))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Poisson(jnp.exp(a + b * x[i])), obs=y[i])

    rng = np.random.default_rng(61)
    x = scale * rng.random(5_000)
    return model, rows(x, rng.poisson(np.exp(0.2 + slope * x)))


def _heavy_rows() -> Built:
    """Errors of Student's t with two degrees of freedom."""

    def model(y: Any, batch_size: int | None = None) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        scale = numpyro.sample("scale", dist.HalfNormal(5))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.StudentT(2, mu, scale), obs=y[i])

    return model, rows(1.0 + 2.0 * np.random.default_rng(62).standard_t(2, 2_000))


def _gamma_rows() -> Built:
    """The shape and the rate of a gamma distribution."""

    def model(y: Any, batch_size: int | None = None) -> None:
        shape = numpyro.sample("shape", dist.Exponential(1))
        rate = numpyro.sample("rate", dist.Gamma(2, 1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Gamma(shape, rate), obs=y[i])

    return model, rows(np.random.default_rng(63).gamma(1.5, 2.0, 2_000))


def _horseshoe() -> Built:
    """Five columns with the horseshoe prior, non-centred."""

    def model(X: Any, y: Any, batch_size: int | None = None) -> None:
        tau = numpyro.sample("tau", dist.HalfCauchy(1))
        local = numpyro.sample("local", dist.HalfCauchy(1).expand([5]).to_event(1))
        raw = numpyro.sample("raw", dist.Normal(0, 1).expand([5]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(X[i] @ (tau * local * raw), 1), obs=y[i])

    rng = np.random.default_rng(64)
    X = rng.standard_normal((1_000, 5))
    return model, rows(X, X @ np.array([1.0, 0.3, 0.0, 0.0, 0.0]) + rng.standard_normal(1_000))


def _laplace(d: int = 3) -> Callable[[], dist.Distribution]:
    return lambda: dist.Laplace(0, 0.1).expand([d]).to_event(1)


PROBLEMS: dict[str, Problem] = {
    # Several modes.
    "two components, free means": Problem(partial(shapes.mixture, (-1.5, 1.5)), "modes"),
    "three components, free means": Problem(partial(shapes.mixture, (-4, 0, 4)), "modes"),
    "a narrow mode beside a wide one": Problem(partial(shapes.modes, 0.3, 3.0, 0.05), "modes"),
    "the same in two dimensions": Problem(partial(shapes.modes, 0.3, 3.0, 0.05, 2), "modes"),
    "a mode at ten sds": Problem(partial(shapes.modes, 0.5, 10.0, 1.0), "modes"),  # vocabulary: ok
    "a mode at four sds": Problem(partial(shapes.modes, 0.5, 4.0, 1.0), "modes"),  # vocabulary: ok
    # Funnels.
    "funnel, 0.5": Problem(partial(shapes.funnel, 0.5), "funnel"),
    "funnel, 1": Problem(partial(shapes.funnel, 1.0), "funnel"),
    "funnel, 2": Problem(partial(shapes.funnel, 2.0), "funnel"),
    "funnel, 3": Problem(partial(shapes.funnel, 3.0), "funnel"),
    "groups alike, centred": Problem(partial(shapes.groups, 0.0), "funnel"),
    "horseshoe, five columns": Problem(_horseshoe, "funnel"),
    # Gradients that are not the potential's, or not all of it.
    "a rounded parameter": Problem(
        partial(shapes.of_mean, lambda a: jnp.round(4 * a) / 4, 0.4), "gradient"
    ),
    "a change of level": Problem(
        partial(shapes.of_mean, lambda a: jnp.where(a > 0, 1.0, 0.0), 1.0), "gradient"
    ),
    "a change point": Problem(shapes.change_point, "gradient"),
    "a gradient stopped": Problem(
        partial(shapes.of_slope, wrap_slope=lax.stop_gradient), "gradient"
    ),
    "gradients doubled": Problem(
        partial(shapes.of_slope, shapes.doubled, shapes.doubled), "gradient"
    ),
    "one gradient doubled": Problem(
        partial(shapes.of_slope, shapes.doubled, centre=0.0), "gradient"
    ),
    "the same, parameters correlated": Problem(
        partial(shapes.of_slope, shapes.doubled, centre=2.0), "gradient"
    ),
    "one gradient reversed": Problem(partial(shapes.of_slope, shapes.reversed_sign), "gradient"),
    # Heavy tails.
    "Cauchy prior alone": Problem(partial(shapes.alone, lambda: dist.Cauchy(0, 1)), "tails"),
    "Student-t(2) prior alone": Problem(
        partial(shapes.alone, lambda: dist.StudentT(2, 0, 1)), "tails"
    ),
    "gamma(0.1) prior alone": Problem(partial(shapes.alone, lambda: dist.Gamma(0.1, 1)), "tails"),
    "sparse simplex": Problem(shapes.sparse_simplex, "tails", 10),
    # A few influential rows.
    "5 of 50,000 rows, normal": Problem(partial(_rare_covariate, False), "few rows"),
    "5 of 50,000 rows, logistic": Problem(partial(_rare_covariate, True), "few rows"),
    "six rows of great leverage": Problem(_leverage, "few rows"),
    "a category of 20 rows": Problem(_rare_category, "few rows"),
    # Rows in an order.
    "rows sorted by the response": Problem(partial(_mean_scale, 20_000, True), "order"),
    "each row ten times": Problem(_repeated, "order"),
    # Geometry.
    "classes that are separated": Problem(_separated, "geometry", 20),
    "columns correlated at 0.9999": Problem(partial(_correlated, 5_000, 3, 0.9999), "geometry"),
    "units from 1e-6 to 1e6": Problem(_units, "geometry"),
    "banana, 0.3": Problem(partial(shapes.banana, 0.3), "geometry"),
    "banana, 0.05": Problem(partial(shapes.banana, 0.05), "geometry"),
    "a sum of two": Problem(_ridge, "geometry"),
    # Numbers and warm-ups.
    "a level of 1e5": Problem(partial(_far_level, 1e5), "numbers"),
    "a level of 1e8": Problem(partial(_far_level, 1e8), "numbers"),
    "exp of a wide covariate": Problem(partial(_counts, 40.0, 0.1), "numbers"),
    "five iterations of warm-up": Problem(
        partial(_correlated, 5_000, 10, 0.9), "warm-up", options={"num_warmup": 5}
    ),
    # Nothing.
    "two components, ordered means": Problem(partial(shapes.mixture, (-1.5, 1.5), True), "none"),
    "funnel, 3, non-centred": Problem(partial(shapes.funnel, 3.0, False), "none"),
    "groups alike, non-centred": Problem(partial(shapes.groups, 0.0, False), "none"),
    "groups apart, centred": Problem(partial(shapes.groups, 1.0), "none"),
    "Laplace prior": Problem(partial(_correlated, 500, 3, 0.0, _laplace()), "none"),
    "a kink": Problem(partial(shapes.of_slope, wrap_slope=jnp.abs, slope=0.05), "none"),
    "Student-t(2) rows": Problem(_heavy_rows, "none"),
    "gamma rows": Problem(_gamma_rows, "none"),
    "normal rows": Problem(partial(_mean_scale, 5_000), "none"),
    "logistic regression": Problem(_plain_logistic, "none"),
    "Poisson regression": Problem(partial(_counts, 1.0, 0.5), "none"),
    "ten correlated columns": Problem(partial(_correlated, 5_000, 10, 0.9), "none"),
}
