"""Posteriors with hundreds of parameters whose moments are exact: by linear algebra, and by grids.

Each entry of :data:`PROBLEMS` makes a model, its data, and the mean and SD of its sites. Given
unknown scales the posterior is Gaussian or a one-dimensional integral; their grid makes a mixture.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from scipy import stats

__all__ = ["PROBLEMS", "Problem"]


class Problem(NamedTuple):
    """
    - **model**, **args**, **batch_size** - arguments of the kernel and of the run.
    - **exact** - mean and SD of each site that is compared.
    """

    model: Callable
    args: tuple
    batch_size: int
    exact: dict[str, tuple[np.ndarray, np.ndarray]]


def _float(x: np.ndarray) -> Any:
    return jnp.asarray(x, jnp.float32)


def _mixed(log_weight: np.ndarray, mean: np.ndarray, square: np.ndarray) -> tuple:
    """Return mean and SD of a mixture from means of the value and its square in each component."""
    weight = np.exp(log_weight - log_weight.max()).ravel()
    weight /= weight.sum()
    mean, square = (np.tensordot(weight, x.reshape(weight.size, -1), 1) for x in (mean, square))
    return mean, np.sqrt(square - mean**2)


def _gaussian(precision: np.ndarray, linear: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and SD of a Gaussian from its precision and precision times mean."""
    covariance = np.linalg.inv(precision)
    return covariance @ linear, np.sqrt(np.diag(covariance))


def slopes(is_centred: bool, num_groups: int = 150, num: int = 9_000) -> Problem:
    """An intercept and a slope for each group, of unknown mean and scale."""
    sigma = 1.0

    def model(x: Any, group: Any, y: Any, batch_size: int | None = None) -> None:
        mean = numpyro.sample("mean", dist.Normal(0, 2).expand([2]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(1).expand([2]).to_event(1))
        with numpyro.plate("groups", num_groups):
            if is_centred:
                effect = numpyro.sample("effect", dist.Normal(mean, scale).to_event(1))
            else:
                raw = numpyro.sample("raw", dist.Normal(0, 1).expand([2]).to_event(1))
                effect = numpyro.deterministic("effect", mean + scale * raw)
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            at = effect[group[i]]
            numpyro.sample("y", dist.Normal(at[..., 0] + at[..., 1] * x[i], sigma), obs=y[i])

    rng = np.random.default_rng(41)
    group, x = rng.integers(0, num_groups, num), rng.standard_normal(num)
    effect = np.array([-0.5, 0.4]) + np.array([0.6, 0.3]) * rng.standard_normal((num_groups, 2))
    y = effect[group, 0] + effect[group, 1] * x + sigma * rng.standard_normal(num)
    args = (_float(x), jnp.asarray(group), _float(y))
    x, y = (np.asarray(a, np.float64) for a in (args[0], args[2]))

    columns = np.stack([np.ones(num), x], 1)
    gram, moment = np.zeros((num_groups, 2, 2)), np.zeros((num_groups, 2))
    np.add.at(gram, group, columns[:, :, None] * columns[:, None] / sigma**2)
    np.add.at(moment, group, columns * y[:, None] / sigma**2)
    estimate = np.linalg.solve(gram, moment[..., None])[..., 0]
    own = np.linalg.inv(gram)

    parts: dict[str, list] = {"weight": [], "mean": [], "effect": [], "scale": []}
    # Four posterior SDs each way.
    about = np.sqrt(estimate.var(0) - np.diagonal(own.mean(0)))
    grid = [s * np.exp(np.linspace(-0.32, 0.32, 41)) for s in about]
    for first in grid[0]:
        for second in grid[1]:
            scale = np.array([first, second])
            # The estimates are normal about the mean, the effects apart.
            weight = np.linalg.inv(own + np.diag(scale**2))
            covariance = np.linalg.inv(weight.sum(0) + np.eye(2) / 4)
            mean = covariance @ np.einsum("gij,gj->i", weight, estimate)
            # An effect is `shrink @ mean` and what the group says, with a variance left.
            shrink = own @ weight
            at = estimate + np.einsum("gij,gj->gi", shrink, mean - estimate)
            left = np.diagonal(own - shrink @ own, axis1=1, axis2=2)
            left = left + np.einsum("gij,jk,gik->gi", shrink, covariance, shrink)
            away = estimate - mean
            log_weight = (
                0.5 * np.linalg.slogdet(weight)[1].sum()
                - 0.5 * np.einsum("gi,gij,gj", away, weight, away)
                + 0.5 * np.linalg.slogdet(covariance)[1]
                - mean @ mean / 8
                - scale @ scale / 2
                + np.log(scale).sum()  # the grid's spacing is in logarithms
            )
            parts["weight"].append(log_weight)
            parts["mean"].append((mean, np.diag(covariance) + mean**2))
            parts["effect"].append((at, left + at**2))
            parts["scale"].append((scale, scale**2))
    weight = np.array(parts.pop("weight"))
    exact = {
        site: _mixed(weight, *(np.array(x) for x in zip(*found, strict=True)))
        for site, found in parts.items()
    }
    return Problem(model, args, 1_000, exact)


def crossed(
    users: int = 300, films: int = 200, num: int = 12_000, batch_size: int = 2_000
) -> Problem:
    """Ratings by users and films, both with effects of known scale."""
    scales, sigma = (0.5, 0.7), 1.0

    def model(user: Any, film: Any, y: Any, batch_size: int | None = None) -> None:
        level = numpyro.sample("level", dist.Normal(0, 2))
        with numpyro.plate("users", users):
            u = numpyro.sample("u", dist.Normal(0, scales[0]))
        with numpyro.plate("films", films):
            f = numpyro.sample("f", dist.Normal(0, scales[1]))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(level + u[user[i]] + f[film[i]], sigma), obs=y[i])

    rng = np.random.default_rng(42)
    user, film = rng.integers(0, users, num), rng.integers(0, films, num)
    u, f = scales[0] * rng.standard_normal(users), scales[1] * rng.standard_normal(films)
    y = _float(3.0 + u[user] + f[film] + sigma * rng.standard_normal(num))
    columns = np.zeros((num, 1 + users + films))
    columns[:, 0] = columns[np.arange(num), 1 + user] = 1.0
    columns[np.arange(num), 1 + users + film] = 1.0
    prior = np.repeat([2.0, *scales], [1, users, films])
    precision = columns.T @ columns / sigma**2 + np.diag(1 / prior**2)
    mean, sd = _gaussian(precision, columns.T @ np.asarray(y, np.float64) / sigma**2)
    ends = [1, 1 + users]
    parts = zip(np.split(mean, ends), np.split(sd, ends), strict=True)
    exact = dict(zip(("level", "u", "f"), parts, strict=True))
    return Problem(model, (jnp.asarray(user), jnp.asarray(film), y), batch_size, exact)


def items(persons: int = 400, num_items: int = 40) -> Problem:
    """Answers to items of known difficulty, by persons whose ability has an unknown law."""
    rng = np.random.default_rng(43)
    difficulty, slope = rng.standard_normal(num_items), rng.lognormal(0.0, 0.3, num_items)

    def model(person: Any, item: Any, y: Any, batch_size: int | None = None) -> None:
        level = numpyro.sample("level", dist.Normal(0, 2))
        spread = numpyro.sample("spread", dist.HalfNormal(2))
        with numpyro.plate("persons", persons):
            ability = numpyro.sample("ability", dist.Normal(level, spread))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            away = ability[person[i]] - _float(difficulty)[item[i]]
            numpyro.sample("y", dist.Bernoulli(logits=_float(slope)[item[i]] * away), obs=y[i])

    ability = 0.5 + 1.2 * rng.standard_normal(persons)
    person, item = (k.ravel() for k in np.indices((persons, num_items)))
    order = rng.permutation(persons * num_items)
    person, item = person[order], item[order]
    p = 1 / (1 + np.exp(-slope[item] * (ability[person] - difficulty[item])))
    y = rng.random(len(p)) < p

    nodes = np.linspace(-7, 8, 601)
    logits = slope * (nodes[:, None] - difficulty)
    is_right = np.zeros((persons, num_items))
    is_right[person, item] = y
    likelihood = is_right @ logits.T - np.logaddexp(0, logits).sum(1)
    peak = likelihood.max(1, keepdims=True)
    likelihood = np.exp(likelihood - peak)
    level, spread = np.meshgrid(np.linspace(0.1, 0.9, 41), np.linspace(0.85, 1.55, 41))
    level, spread = level.ravel(), spread.ravel()
    prior = stats.norm.pdf(nodes[:, None], level, spread)
    total, first, second = (likelihood @ (prior * nodes[:, None] ** k) for k in range(3))
    weight = np.log(total).sum(0) - level**2 / 8 - spread**2 / 8
    exact = {
        "ability": _mixed(weight, (first / total).T, (second / total).T),
        "level": _mixed(weight, level, level**2),
        "spread": _mixed(weight, spread, spread**2),
    }
    args = (jnp.asarray(person), jnp.asarray(item), jnp.asarray(y, jnp.int32))
    return Problem(model, args, 2_000, exact)


def shares(num_groups: int = 60, classes: int = 6, num: int = 12_000) -> Problem:
    """Which of some classes a row is in, by groups: the posterior is Dirichlet."""

    def model(group: Any, y: Any, batch_size: int | None = None) -> None:
        with numpyro.plate("groups", num_groups):
            share = numpyro.sample("share", dist.Dirichlet(2.0 * jnp.ones(classes)))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Categorical(share[group[i]]), obs=y[i])

    rng = np.random.default_rng(44)
    group = rng.integers(0, num_groups, num)
    share = rng.dirichlet(2.0 * np.ones(classes), num_groups)
    y = (rng.random((num, 1)) > share[group].cumsum(1)).sum(1).clip(max=classes - 1)
    counts = np.full((num_groups, classes), 2.0)
    np.add.at(counts, (group, y), 1.0)
    whole = counts.sum(1, keepdims=True)
    mean = counts / whole
    exact = {"share": (mean, np.sqrt(mean * (1 - mean) / (whole + 1)))}
    return Problem(model, (jnp.asarray(group), jnp.asarray(y)), 1_000, exact)


def multinomial(num_groups: int = 150, num: int = 9_000) -> Problem:
    """Multinomial regression on a factor: three classes, two logits for each of its levels."""

    def model(group: Any, y: Any, batch_size: int | None = None) -> None:
        logits = numpyro.sample("logits", dist.Normal(0, 1).expand([num_groups, 2]).to_event(2))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            at = logits[group[i]]
            at = jnp.concatenate([at, jnp.zeros((*at.shape[:-1], 1))], -1)
            numpyro.sample("y", dist.Categorical(logits=at), obs=y[i])

    rng = np.random.default_rng(46)
    group = rng.integers(0, num_groups, num)
    logits = np.pad(rng.standard_normal((num_groups, 2)), ((0, 0), (0, 1)))
    y = np.argmax(logits[group] + rng.gumbel(size=(num, 3)), 1)
    counts = np.zeros((num_groups, 3))
    np.add.at(counts, (group, y), 1.0)

    grid = np.linspace(-6, 6, 241)
    places = np.stack(np.meshgrid(grid, grid, indexing="ij"), -1).reshape(-1, 2)
    full = np.pad(places, ((0, 0), (0, 1)))
    log_density = counts @ full.T - counts.sum(1)[:, None] * np.log(np.exp(full).sum(1))
    log_density -= np.square(places).sum(1) / 2
    parts = [_mixed(each, places, places**2) for each in log_density]
    mean, sd = (np.array(x) for x in zip(*parts, strict=True))
    return Problem(model, (jnp.asarray(group), jnp.asarray(y)), 1_000, {"logits": (mean, sd)})


def walk(length: int = 200, num: int = 10_000) -> Problem:
    """A random walk of unknown step, seen with noise at random times."""
    sigma = 1.0

    def model(time: Any, y: Any, batch_size: int | None = None) -> None:
        step = numpyro.sample("step", dist.HalfNormal(1))
        path = numpyro.sample("path", dist.GaussianRandomWalk(step, num_steps=length))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(path[..., time[i]], sigma), obs=y[i])

    rng = np.random.default_rng(45)
    time = rng.integers(0, length, num)
    y = _float((0.2 * rng.standard_normal(length)).cumsum()[time] + rng.standard_normal(num))
    count, total = np.zeros(length), np.zeros(length)
    np.add.at(count, time, 1 / sigma**2)
    np.add.at(total, time, np.asarray(y, np.float64) / sigma**2)
    steps = 0.17 * np.exp(np.linspace(-0.5, 0.5, 101))
    difference = np.eye(length) - np.eye(length, k=-1)
    found = []
    for step in steps:
        precision = difference.T @ difference / step**2 + np.diag(count)
        mean, sd = _gaussian(precision, total)
        log_weight = 0.5 * total @ mean - 0.5 * np.linalg.slogdet(precision)[1]
        log_weight += -length * np.log(step) - step**2 / 2 + np.log(step)
        found.append((log_weight, mean, sd**2 + mean**2))
    weight, mean, square = (np.array(x) for x in zip(*found, strict=True))
    exact = {"path": _mixed(weight, mean, square), "step": _mixed(weight, steps, steps**2)}
    return Problem(model, (jnp.asarray(time), y), 1_000, exact)


def levels(num_schools: int = 110, num_districts: int = 30, num: int = 10_000) -> Problem:
    """Schools in districts, with an intercept and a slope for each district, non-centred.

    The rows are sorted by school.
    """
    groups = {"school": num_schools, "district": num_districts, "slope": num_districts}

    def model(x: Any, school: Any, district: Any, y: Any, batch_size: int | None = None) -> None:
        mean = numpyro.sample("mean", dist.Normal(0, 2))
        effects = {}
        for name, size in groups.items():
            scale = numpyro.sample(f"{name}_scale", dist.HalfNormal(1))
            raw = numpyro.sample(f"{name}_raw", dist.Normal(0, 1).expand([size]).to_event(1))
            effects[name] = numpyro.deterministic(name, scale * raw)
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            eta = mean + effects["school"][school[i]]
            eta += effects["district"][district[i]] + effects["slope"][district[i]] * x[i]
            numpyro.sample("y", dist.Normal(eta, 1), obs=y[i])

    rng = np.random.default_rng(47)
    school = np.sort(rng.integers(0, num_schools, num))
    district = rng.integers(0, num_districts, num_schools)[school]
    x = _float(rng.standard_normal(num))
    columns = np.zeros((num, 1 + sum(groups.values())))
    rows, starts = np.arange(num), 1 + np.cumsum([0, *groups.values()])
    columns[:, 0] = columns[rows, starts[0] + school] = columns[rows, starts[1] + district] = 1.0
    columns[rows, starts[2] + district] = x
    truth = rng.standard_normal(columns.shape[1]) * np.repeat(
        [1.0, 0.4, 0.5, 0.3], [1, *groups.values()]
    )
    y = _float(columns @ truth + rng.standard_normal(num))
    gram, moment = columns.T @ columns, columns.T @ np.asarray(y, np.float64)
    found = []
    for scales in itertools.product(
        0.4 * np.exp(np.linspace(-0.5, 0.5, 9)),
        0.5 * np.exp(np.linspace(-0.9, 0.9, 11)),
        0.3 * np.exp(np.linspace(-0.9, 0.9, 11)),
    ):
        # Given the scales, the mean and the effects are normal.
        prior = np.repeat([2.0, *scales], [1, *groups.values()])
        precision = gram + np.diag(1 / prior**2)
        mean, sd = _gaussian(precision, moment)
        log_weight = 0.5 * moment @ mean - 0.5 * np.linalg.slogdet(precision)[1]
        # The grid's spacing is in logarithms.
        log_weight += np.sum(np.log(scales)) - np.log(prior).sum() - np.sum(np.square(scales)) / 2
        mean, sd = np.append(mean, scales), np.append(sd, np.zeros(3))
        found.append((log_weight, mean, sd**2 + mean**2))
    mean, sd = _mixed(*(np.array(x) for x in zip(*found, strict=True)))
    names = ("mean", *groups, *(f"{name}_scale" for name in groups))
    ends = [*starts, *(starts[-1] + np.arange(1, 3))]
    exact = dict(
        zip(names, zip(np.split(mean, ends), np.split(sd, ends), strict=True), strict=True)
    )
    args = (x, jnp.asarray(school), jnp.asarray(district), y)
    return Problem(model, args, 500, exact)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "slopes of 150 groups, centred": partial(slopes, True),
    "slopes of 150 groups, non-centred": partial(slopes, False),
    "crossed effects, 300 by 200": crossed,
    "crossed effects, 90 by 60": partial(crossed, 90, 60, 6_000, 1_000),
    "abilities of 400 persons": items,
    "multinomial, 150 levels": multinomial,
    "three levels, 110 schools in 30 districts, sorted": levels,
    "shares of 60 groups": shares,
    "walk of 200 steps": walk,
}
