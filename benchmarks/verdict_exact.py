"""Posteriors as quantiles of their coordinates, computed in float64 without MCMC.

A reference has the quantiles of each coordinate at evenly spaced normal scores, so that draws are
converted to scores by interpolation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro.distributions import biject_to
from numpyro.handlers import seed, trace
from numpyro.infer import Predictive
from numpyro.infer.util import potential_energy
from scipy import optimize, special, stats
from scipy.interpolate import CubicSpline

SCORES = np.linspace(-3.0, 3.0, 61)
_LEVELS = special.ndtr(SCORES)
_FINE = 20_001

Draws = dict[str, np.ndarray]


class Reference(NamedTuple):
    """
    - **quantiles** - at the levels of ``SCORES``, shape ``(d, 61)``.
    - **ess** - as how many independent draws they are, shape ``(d,)``; infinite where exact.
    """

    quantiles: np.ndarray
    ess: np.ndarray


class Density(NamedTuple):
    """
    - **potential** - of a flat unconstrained position, the normalising constant left out.
    - **d** - number of coordinates.
    """

    potential: Callable[[Any], Any]
    d: int


def as_float64(args: tuple) -> tuple:
    """Convert arrays to float64."""
    return tuple(jnp.asarray(x, jnp.float64) if x.dtype == jnp.float32 else x for x in args)


def density(model: Callable, args: tuple) -> Density:
    """The model's posterior on all rows."""
    args = as_float64(args)
    found = trace(seed(model, jax.random.key(0))).get_trace(*args)
    like = {
        name: biject_to(site["fn"].support).inv(site["value"])
        for name, site in found.items()
        if site["type"] == "sample" and not site["is_observed"]
    }
    flat, unravel = ravel_pytree(like)
    return Density(lambda z: potential_energy(model, args, {}, unravel(z)), flat.size)


def of_draws(draws: Draws, ess: float | None = None) -> Reference:
    """Independent draws of each site, the first axis over draws."""
    flat = np.concatenate([draws[s].reshape(len(draws[s]), -1) for s in sorted(draws)], 1)
    quantiles = np.quantile(flat, _LEVELS, axis=0).T
    return Reference(quantiles, np.full(len(quantiles), ess or len(flat)))


def by_curvature(model: Callable, args: tuple) -> Reference:
    """A normal posterior, by a Newton step: exact from wherever it starts."""
    potential, d = density(model, args)
    mean, covariance = _newton(potential, np.zeros(d))
    sd = np.sqrt(np.diag(covariance))
    return Reference(mean[:, None] + sd[:, None] * SCORES, np.full(d, np.inf))


def _newton(potential: Callable, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The point after a step, and the inverse of the curvature, in units of its diagonal."""
    gradient, hessian = jax.grad(potential)(z), np.asarray(jax.hessian(potential)(z))
    units = 1.0 / np.sqrt(np.diag(hessian))
    covariance = units[:, None] * np.linalg.inv(units[:, None] * hessian * units) * units
    return z - covariance @ np.asarray(gradient), covariance


def mode(potential: Callable, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mode and the inverse curvature there."""
    found = optimize.minimize(jax.jit(potential), start, jac=jax.jit(jax.grad(potential)))
    z = found.x
    for _ in range(5):
        z, covariance = _newton(potential, z)
    return z, covariance


def _values(potential: Callable, points: np.ndarray, chunk: int = 200) -> np.ndarray:
    """The log density at many points, up to a constant."""
    several = jax.jit(jax.vmap(potential))
    parts = np.array_split(points, -(-len(points) // chunk))
    return -np.concatenate([np.asarray(several(p)) for p in parts])


def by_grid(
    model: Callable,
    args: tuple,
    axes: Sequence[np.ndarray] | None = None,
    num: int = 81,
    reach: float = 8.0,
    start: Sequence[float] | None = None,
    is_symmetric: bool = False,
) -> Reference:
    """Sums over a grid, which for a smooth density are right to rounding.

    :param axes: the grid; default around the mode.
    :param num: points along an axis of the default.
    :param reach: its half width, in SDs of the normal at the mode.
    :param start: where to look for the mode.
    :param is_symmetric: whether any permutation of the coordinates has the same density: then the
        grid is around one of the modes, and each coordinate has the average of their marginals.
    """
    potential, d = density(model, args)
    if axes is None:
        z, covariance = mode(potential, np.zeros(d) if start is None else np.array(start))
        sd = np.sqrt(np.diag(covariance))
        axes = [np.linspace(m - reach * s, m + reach * s, num) for m, s in zip(z, sd, strict=True)]
    points = np.stack([x.ravel() for x in np.meshgrid(*axes, indexing="ij")], 1)
    logs = _values(potential, points).reshape([len(x) for x in axes])
    curves = []
    for k, x in enumerate(axes):
        marginal = special.logsumexp(logs, axis=tuple(j for j in range(d) if j != k))
        curves.append(_cdf(x, marginal - marginal.max()))
    if is_symmetric:
        union = np.unique(np.concatenate([x for x, _ in curves]))
        curves = [(union, np.mean([np.interp(union, *c) for c in curves], 0))] * d
    return Reference(np.stack([_inverse(*c) for c in curves]), np.full(d, np.inf))


def _cdf(x: np.ndarray, log_density: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distribution function on a fine axis; splines between few points, lines between many."""
    assert max(log_density[0], log_density[-1]) < np.log(1e-5), "the grid ends too soon"
    fine = np.linspace(x[0], x[-1], _FINE) if len(x) < _FINE else x
    if len(x) < _FINE:
        log_density = CubicSpline(x, log_density)(fine)
    density = np.exp(log_density - log_density.max())
    total = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(fine))])
    return fine, total / total[-1]


def _inverse(x: np.ndarray, cdf: np.ndarray) -> np.ndarray:
    keep = np.concatenate([[True], np.diff(cdf) > 0])
    return np.interp(_LEVELS, cdf[keep], x[keep])


def by_weights(model: Callable, args: tuple, num: int = 40_000) -> Reference:
    """Weighted draws of Student's t around the mode."""
    potential, d = density(model, args)
    z, covariance = mode(potential, np.zeros(d))
    proposal = stats.multivariate_t(z, covariance, df=5, seed=np.random.default_rng(0))
    points = proposal.rvs(num).reshape(num, d)
    logs = _values(potential, points) - proposal.logpdf(points)
    weights = special.softmax(logs)
    quantiles = []
    for x in points.T:
        order = np.argsort(x)
        cdf = np.cumsum(weights[order]) - weights[order] / 2
        quantiles.append(np.interp(_LEVELS, cdf, x[order]))
    return Reference(np.array(quantiles), np.full(d, 1.0 / np.square(weights).sum()))


def prior_draws(model: Callable, args: tuple, num: int = 400_000) -> Draws:
    """Draw from the prior of a model, and from the posterior of the level."""
    args = as_float64(args)
    found = trace(seed(model, jax.random.key(0))).get_trace(*args)
    latent = [k for k, s in found.items() if s["type"] == "sample" and not s["is_observed"]]
    drawn = Predictive(model, num_samples=num, parallel=True, return_sites=latent)(
        jax.random.key(1), *args
    )
    draws = {k: np.asarray(biject_to(found[k]["fn"].support).inv(drawn[k])) for k in latent}
    precision = len(args[0]) + 0.01
    noise = np.random.default_rng(1).standard_normal(num)
    draws["level"] = float(args[0].sum()) / precision + noise / np.sqrt(precision)
    return draws


def group_draws(args: tuple, *, centred: bool, num: int = 400_000) -> Draws:
    """The scale by its marginal density, the mean given it, the effects given both."""
    group, y = (np.asarray(x, np.float64) for x in args)
    means = np.array([y[group == g].mean() for g in range(30)])
    rng = np.random.default_rng(2)
    x = np.linspace(-16.0, 3.0, _FINE)
    v = np.exp(2 * x) + 1 / 30  # variance of a group's mean given that of all
    precision = 30 / v + 1 / 25
    quadratic = ((means**2).sum() - (means.sum() / v) ** 2 / precision * v) / v
    log_density = x - np.exp(2 * x) / 8 - 15 * np.log(v) - np.log(precision) / 2 - quadratic / 2
    fine, cdf = _cdf(x, log_density - log_density.max())
    log_tau = np.interp(rng.random(num), cdf, fine)
    tau, v = np.exp(log_tau), np.exp(2 * log_tau) + 1 / 30
    precision = 30 / v + 1 / 25
    mu = means.sum() / v / precision + rng.standard_normal(num) / np.sqrt(precision)
    shrunk = 1.0 / (1.0 + 30 * tau**2)  # by how much an effect falls back on the mean
    noise = rng.standard_normal((num, 30)) * np.sqrt(shrunk)[:, None]
    raw = ((1 - shrunk) / tau)[:, None] * (means - mu[:, None]) + noise
    own = {"effect": mu[:, None] + tau[:, None] * raw} if centred else {"raw": raw}
    return {"mu": mu, "tau": log_tau, **own}


def change_point_draws(args: tuple, num: int = 400_000) -> Draws:
    """The interval between rows by its marginal density, the levels given it."""
    t, y = (np.asarray(x, np.float64) for x in args)
    order = np.argsort(t)
    edges = np.concatenate([[0.0], t[order], [1.0]])
    below = np.concatenate([[0.0], np.cumsum(y[order])])  # sum of the rows before each interval
    count = np.arange(len(y) + 1)
    sums, counts = np.stack([below, below[-1] - below]), np.stack([count, len(y) - count])
    precision = counts + 0.25
    logs = (np.square(sums) / precision - np.log(precision)).sum(0) / 2 + np.log(np.diff(edges))
    rng = np.random.default_rng(3)
    k = rng.choice(len(logs), num, p=special.softmax(logs))
    tau = edges[k] + (edges[k + 1] - edges[k]) * rng.random(num)
    noise = rng.standard_normal((2, num))
    before, after = sums[:, k] / precision[:, k] + noise / np.sqrt(precision[:, k])
    return {"tau": special.logit(tau), "before": before, "after": after}


def simplex_draws(args: tuple, prior: float = 0.1, num: int = 400_000) -> Draws:
    """Shares by gamma variables, in logs; unconstrained by breaking the stick."""
    counts = np.bincount(np.asarray(args[0]), minlength=4) + prior
    rng = np.random.default_rng(4)
    # A gamma variable of shape a is one of shape a + 1 times a uniform one to the power 1 / a.
    logs = np.log(rng.gamma(counts + 1, size=(num, 4))) + np.log(rng.random((num, 4))) / counts
    left = np.logaddexp.accumulate(logs[:, ::-1], 1)[:, ::-1]
    return {"p": logs[:, :-1] - left[:, 1:] + np.log(np.arange(3, 0, -1))}
