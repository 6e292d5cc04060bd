"""Posteriors with a chosen number of rows, for the comparison of methods.

Each model takes ``batch_size`` for the plate of its data, and None for all rows. Data are simulated
from the model, except those of the flights, of which there are 327,346 rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from hierarchies import Case, make_data
from hierarchies import model as hierarchy
from scipy import linalg, optimize, sparse
from scipy.stats import qmc

__all__ = ["SCALABLE_PROBLEMS", "ScalableProblem"]

Built = tuple[Callable[..., None], tuple[Any, ...]]

_NUM_NODES = 256  # of the integral over three scales


class ScalableProblem(NamedTuple):
    """
    - **build** - makes the model and its arguments from the number of rows and a random generator.
    - **batch_size** - rows in a minibatch.
    - **is_dense** - whether NUTS with a dense mass matrix is tried.
    - **hierarchy** - the case of ``hierarchies.py``, which has an exact reference.
    - **integrate** - computes exact means and SDs of unconstrained coordinates from the arguments.
    - **num_nuts** - draws of each of two chains, for a reference by NUTS.
    """

    build: Callable[[int, np.random.Generator], Built]
    batch_size: int
    is_dense: bool = True
    hierarchy: Case | None = None
    integrate: Callable[..., tuple[np.ndarray, np.ndarray]] | None = None
    num_nuts: int = 1_000


def _float(x: Any) -> Any:
    return jnp.asarray(x, jnp.float32)


def _columns(
    rng: np.random.Generator, num_rows: int, dim: int, correlation: float = 0.0
) -> np.ndarray:
    shared = rng.standard_normal((num_rows, 1), np.float32)
    separate = rng.standard_normal((num_rows, dim), np.float32)
    return np.float32(correlation**0.5) * shared + np.float32((1 - correlation) ** 0.5) * separate


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def _coefficients(dim: int, scale: float = 1.0) -> Any:
    return numpyro.sample("beta", dist.Normal(0, scale).expand([dim]).to_event(1))


def _rows(y: Any, batch_size: int | None) -> Any:
    return numpyro.plate("rows", len(y), subsample_size=batch_size)


def _logistic(correlation: float, num_rows: int, rng: np.random.Generator) -> Built:
    def model(X: Any, y: Any, batch_size: int | None = None) -> None:
        beta = _coefficients(X.shape[1])
        with _rows(y, batch_size) as i:
            numpyro.sample("y", dist.Bernoulli(logits=X[i] @ beta), obs=y[i])

    X = _columns(rng, num_rows, 20, correlation)
    y = rng.random(num_rows) < _sigmoid(X @ np.linspace(-0.5, 0.5, 20))
    return model, (_float(X), jnp.asarray(y, jnp.int32))


def _gamma(num_rows: int, rng: np.random.Generator) -> Built:
    def model(X: Any, y: Any, batch_size: int | None = None) -> None:
        intercept = numpyro.sample("intercept", dist.Normal(0, 2))
        beta = _coefficients(X.shape[1], 2.0)
        shape = numpyro.sample("shape", dist.Exponential(0.1))
        with _rows(y, batch_size) as i:
            mean = jnp.exp(intercept + X[i] @ beta)
            numpyro.sample("y", dist.Gamma(shape, shape / mean), obs=y[i])

    X = _columns(rng, num_rows, 4, 0.3)
    mean = np.exp(1.0 + X @ np.array([0.5, -0.3, 0.2, 0.0]))
    return model, (_float(X), _float(rng.gamma(2.0, mean / 2.0)))


def _student_t(num_rows: int, rng: np.random.Generator) -> Built:
    def model(X: Any, y: Any, batch_size: int | None = None) -> None:
        beta = _coefficients(X.shape[1], 5.0)
        sigma = numpyro.sample("sigma", dist.HalfNormal(5))
        nu = numpyro.sample("nu", dist.Gamma(2, 0.1))
        with _rows(y, batch_size) as i:
            numpyro.sample("y", dist.StudentT(nu, X[i] @ beta, sigma), obs=y[i])

    X = _columns(rng, num_rows, 6)
    y = X @ np.linspace(-1, 1, 6) + 0.7 * rng.standard_t(3, num_rows)
    return model, (_float(X), _float(y))


def _ordinal(num_rows: int, rng: np.random.Generator) -> Built:
    def model(X: Any, y: Any, batch_size: int | None = None) -> None:
        beta = _coefficients(X.shape[1])
        base = dist.Normal(0, 3).expand([4]).to_event(1)
        ordered = dist.transforms.OrderedTransform()
        cutpoints = numpyro.sample("cutpoints", dist.TransformedDistribution(base, ordered))
        with _rows(y, batch_size) as i:
            numpyro.sample("y", dist.OrderedLogistic(X[i] @ beta, cutpoints), obs=y[i])

    X = _columns(rng, num_rows, 6, 0.2)
    latent = X @ np.linspace(-0.6, 0.6, 6) + rng.logistic(size=num_rows)
    y = np.searchsorted([-2.0, -0.5, 0.5, 2.5], latent)
    return model, (_float(X), jnp.asarray(y, jnp.int32))


def _negative_binomial(num_rows: int, rng: np.random.Generator) -> Built:
    def model(X: Any, y: Any, batch_size: int | None = None) -> None:
        intercept = numpyro.sample("intercept", dist.Normal(0, 2))
        beta = _coefficients(X.shape[1], 2.0)
        phi = numpyro.sample("phi", dist.Exponential(0.2))
        with _rows(y, batch_size) as i:
            mean = jnp.exp(intercept + X[i] @ beta)
            numpyro.sample("y", dist.NegativeBinomial2(mean, phi), obs=y[i])

    X = _columns(rng, num_rows, 5)
    mean = np.exp(0.7 + X @ np.array([0.4, -0.3, 0.2, 0.1, 0.0]))
    y = rng.poisson(mean * rng.gamma(1.5, 1 / 1.5, num_rows))
    return model, (_float(X), jnp.asarray(y, jnp.int32))


def _poisson(num_rows: int, rng: np.random.Generator) -> Built:
    """Intercepts of 50 groups, from ten rows in 20,000 to a thousand."""

    def model(x: Any, group: Any, y: Any, batch_size: int | None = None) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        with numpyro.plate("groups", 50):
            alpha = numpyro.sample("alpha", dist.Normal(mu, tau))
        with _rows(y, batch_size) as i:
            rate = jnp.exp(alpha[group[i]] + slope * x[i])
            numpyro.sample("y", dist.Poisson(rate), obs=y[i])

    weights = np.geomspace(0.01, 1, 50)
    group = rng.choice(50, num_rows, p=weights / weights.sum())
    x = rng.standard_normal(num_rows)
    alpha = 0.5 + 0.4 * rng.standard_normal(50)
    y = rng.poisson(np.exp(alpha[group] + 0.3 * x))
    return model, (_float(x), jnp.asarray(group, jnp.int32), jnp.asarray(y, jnp.int32))


def _slopes(likelihood: str, num_groups: int, batch_size: int) -> ScalableProblem:
    """Regression whose intercept and slope vary over groups; centred."""
    case = Case(likelihood, num_groups, 2, 0, batch_size)

    def build(num_rows: int, rng: np.random.Generator) -> Built:
        data = map(jnp.asarray, make_data(case._replace(num_rows=num_rows)))
        return partial(hierarchy, likelihood, num_groups), tuple(data)

    return ScalableProblem(build, batch_size, is_dense=False, hierarchy=case)


def _items(num_rows: int, rng: np.random.Generator) -> Built:
    """Item response with two parameters an item; 100 items, and one person for 100 rows."""
    num_items = 100
    num_persons = num_rows // num_items

    def model(person: Any, item: Any, y: Any, batch_size: int | None = None) -> None:
        level = numpyro.sample("level", dist.Normal(0, 2))
        spread = numpyro.sample("spread", dist.HalfNormal(2))
        with numpyro.plate("persons", num_persons):
            ability = numpyro.sample("ability", dist.Normal(0, 1))
        with numpyro.plate("items", num_items):
            difficulty = numpyro.sample("difficulty", dist.Normal(level, spread))
            slope = numpyro.sample("slope", dist.LogNormal(0.0, 0.5))
        with _rows(y, batch_size) as i:
            at = item[i]
            logits = slope[at] * (ability[person[i]] - difficulty[at])
            numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y[i])

    order = rng.permutation(num_persons * num_items)
    person, item = order // num_items, order % num_items
    ability, difficulty = rng.standard_normal(num_persons), 0.2 + rng.standard_normal(num_items)
    slope = np.exp(0.3 * rng.standard_normal(num_items))
    y = rng.random(len(order)) < _sigmoid(slope[item] * (ability[person] - difficulty[item]))
    codes = (jnp.asarray(k, jnp.int32) for k in (person, item))
    return model, (*codes, jnp.asarray(y, jnp.int32))


def _crossed(num_rows: int, rng: np.random.Generator) -> Built:
    """Ratings with effects of users and items; one user for 100 rows and one item for 400."""
    num_users, num_items = num_rows // 100, num_rows // 400

    def model(user: Any, item: Any, y: Any, batch_size: int | None = None) -> None:
        level = numpyro.sample("level", dist.Normal(0, 2))
        scale = numpyro.sample("scale", dist.HalfNormal(1).expand([2]).to_event(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(2))
        with numpyro.plate("users", num_users):
            u = numpyro.sample("u", dist.Normal(0, scale[0]))
        with numpyro.plate("items", num_items):
            v = numpyro.sample("v", dist.Normal(0, scale[1]))
        with _rows(y, batch_size) as i:
            numpyro.sample("y", dist.Normal(level + u[user[i]] + v[item[i]], sigma), obs=y[i])

    user, item = rng.integers(0, num_users, num_rows), rng.integers(0, num_items, num_rows)
    effects = (
        0.5 * rng.standard_normal(num_users)[user] + 0.4 * rng.standard_normal(num_items)[item]
    )
    y = 0.3 + effects + rng.standard_normal(num_rows)
    return model, (jnp.asarray(user, jnp.int32), jnp.asarray(item, jnp.int32), _float(y))


def _integrate_crossed(user: Any, item: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return exact means and SDs, level and logarithms of scales first.

    Given the scales the posterior is normal. Those are integrated out by quasi-Monte Carlo.
    """
    user, item, y = np.asarray(user), np.asarray(item), np.asarray(y, np.float64)
    ones, rows = np.ones(len(y)), np.arange(len(y))
    groups = [sparse.csr_matrix((ones, (rows, index))) for index in (user, item)]
    design = sparse.hstack([sparse.csr_matrix(ones[:, None]), *groups]).tocsr()
    gram, right, square = (design.T @ design).toarray(), design.T @ y, y @ y
    sizes = [1, *(group.shape[1] for group in groups)]

    def condition(log_scales: np.ndarray) -> tuple[float, np.ndarray, Any]:
        """Return the log density of the scales, and mean and Cholesky factor of the effects."""
        scales, sigma = np.exp(log_scales[:2]), np.exp(log_scales[2])
        prior_sd = np.repeat([2.0, *scales], sizes)
        factor = linalg.cho_factor(gram / sigma**2 + np.diag(prior_sd**-2.0))
        mean = linalg.cho_solve(factor, right / sigma**2)
        log_density = log_scales.sum() - scales @ scales / 2.0 - sigma**2 / 8.0  # priors
        log_density -= len(y) * log_scales[2] + (square - right @ mean) / (2.0 * sigma**2)
        log_density -= np.log(prior_sd).sum() + np.log(np.diag(factor[0])).sum()
        return log_density, mean, factor

    mode = optimize.minimize(lambda x: -condition(x)[0], np.zeros(3), method="Nelder-Mead").x
    # The SDs of logarithms of scales if effects were observed, a little enlarged.
    width = 1.2 / np.sqrt(2.0 * np.array([*sizes[1:], len(y)]))
    normals = qmc.MultivariateNormalQMC(np.zeros(3), rng=np.random.default_rng(0))
    z = normals.random(_NUM_NODES)
    log_weights, means, squares = np.empty(len(z)), [], []
    for k, log_scales in enumerate(mode + width * z):
        log_density, mean, factor = condition(log_scales)
        variance = np.diag(linalg.lapack.dpotri(*factor)[0])  # the inverse of the precision
        log_weights[k] = log_density + z[k] @ z[k] / 2.0
        means.append(np.concatenate([mean[:1], log_scales, mean[1:]]))
        squares.append(np.concatenate([variance[:1], np.zeros(3), variance[1:]]) + means[-1] ** 2)
    weights = np.exp(log_weights - log_weights.max())
    weights /= weights.sum()
    mean = weights @ np.array(means)
    return mean, np.sqrt(weights @ np.array(squares) - mean**2)


def _spline(num_rows: int, rng: np.random.Generator) -> Built:
    """A curve of 20 cubic B-splines whose coefficients are a random walk."""
    from trust_problems import _b_splines

    def model(B: Any, y: Any, batch_size: int | None = None) -> None:
        level = numpyro.sample("level", dist.Normal(0, 5))
        step = numpyro.sample("step", dist.HalfNormal(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(2))
        walk = numpyro.sample("walk", dist.GaussianRandomWalk(step, num_steps=B.shape[1]))
        with _rows(y, batch_size) as i:
            numpyro.sample("y", dist.Normal(level + B[i] @ walk, sigma), obs=y[i])

    x = rng.random(num_rows)
    y = np.sin(7 * x) + 0.5 * np.cos(20 * x) + 0.6 * rng.standard_normal(num_rows)
    return model, (_float(_b_splines(x, 20)), _float(y))


def _flights(num_rows: int, rng: np.random.Generator) -> Built:
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import flights

    x, late, levels = flights.load_flights()
    keep = np.sort(rng.permutation(len(late))[:num_rows])
    num_levels = {factor: len(names) for factor, names in levels.items()}
    data = {name: column[keep] for name, column in x.items()}, late[keep]

    def model(x: Any, late: Any, batch_size: int | None = None) -> None:
        flights.model(x, num_levels, late, batch_size)

    return model, data


SCALABLE_PROBLEMS = {
    "logistic": ScalableProblem(partial(_logistic, 0.0), 100),
    "logistic, correlated columns": ScalableProblem(partial(_logistic, 0.95), 100),
    "gamma": ScalableProblem(_gamma, 100),
    "Student-t": ScalableProblem(_student_t, 100),
    "ordinal": ScalableProblem(_ordinal, 100),
    "negative binomial": ScalableProblem(_negative_binomial, 100),
    "hierarchical Poisson": ScalableProblem(_poisson, 500),
    "Gaussian, 1,000 groups": _slopes("gaussian", 1_000, 2_000),
    "logistic, 1,000 groups": _slopes("logistic", 1_000, 2_000),
    "Gaussian, 10,000 groups": _slopes("gaussian", 10_000, 20_000),
    "logistic, 10,000 groups": _slopes("logistic", 10_000, 20_000),
    "item response": ScalableProblem(_items, 5_000, is_dense=False, num_nuts=6_000),
    "crossed effects": ScalableProblem(
        _crossed, 5_000, is_dense=False, integrate=_integrate_crossed
    ),
    "spline": ScalableProblem(_spline, 500),
    "flights": ScalableProblem(_flights, 300),
}
