"""Methods compared with sampling: Adam, ensembles, dropout, Laplace approximation.

All are tuned on held-out rows. Then they learn from all rows, with the settings found.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax, random
from networks_data import Data
from networks_task import Scores, Task, Weights, of_classes, of_numbers

_MASKS = 50
_PRECISIONS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_SDS = np.geomspace(0.05, 2.0, 40)


class Training(NamedTuple):
    """
    - **epochs** - passes over the rows, at whose end the rate has come down to zero as a cosine.
    - **batch** - rows of a minibatch.
    - **rate** - Adam's, at first.
    - **decay** - of the weights: how many times the prior's pull, of a likelihood with SD one.
    - **dropout** - share of hidden units that drop out.
    """

    epochs: int
    batch: int
    rate: float = 0.01
    decay: float = 1.0
    dropout: float = 0.0


def train(task: Task, data: Data, how: Training, seed: int) -> dict[str, Array]:
    """Weights by Adam, from a draw of the prior."""
    key = random.key(seed)
    start = task.from_prior(random.fold_in(key, 0))
    x, y = jnp.asarray(data.x), jnp.asarray(data.y)
    static = how.epochs, 0, min(how.batch, len(y)), how.dropout > 0.0
    return train_from(task, *static, start, key, x, y, how.rate, how.decay, how.dropout)


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def train_from(
    task: Any,
    epochs: int,
    averaged: int,
    batch: int,
    drops: bool,
    start: Any,
    key: Array,
    x: Array,
    y: Array,
    rate: Array,
    decay: Array,
    dropout: Array,
) -> Any:
    """Weights by Adam from given ones.

    :param task: only its ``loss`` is used.
    :param averaged: passes at a tenth of the rate that follow the others, over whose steps the
        weights are averaged.
    """
    steps = len(y) // batch
    descent = epochs * steps
    rates = [optax.cosine_decay_schedule(1.0, descent), optax.constant_schedule(0.1)]
    optimizer = optax.chain(
        optax.scale_by_adam(),
        optax.scale_by_schedule(optax.join_schedules(rates, [descent])),
    )

    def loss(weights: Any, rows: Array, key: Array | None) -> Array:
        pull = 0.5 * sum(jnp.square(w).sum() for w in weights.values()) / len(y)
        return task.loss(weights, x[rows], y[rows], key, dropout) + decay * pull

    def step(carry: Any, xs: Any) -> tuple[Any, None]:
        (weights, mean, state, taken), (rows, key) = carry, xs
        slopes = jax.grad(loss)(weights, rows, key if drops else None)
        updates, state = optimizer.update(slopes, state)
        weights = optax.apply_updates(weights, jax.tree.map(lambda u: -rate * u, updates))
        if averaged:
            share = 1.0 / jnp.maximum(taken - descent + 1, 1)
            mean = optax.incremental_update(weights, mean, share)
        return (weights, mean, state, taken + 1), None

    def epoch(carry: Any, key: Array) -> tuple[Any, None]:
        order_key, drop_key = random.split(key)
        order = random.permutation(order_key, len(y))[: steps * batch].reshape(steps, batch)
        return lax.scan(step, carry, (order, random.split(drop_key, steps)))

    carry = start, start if averaged else None, optimizer.init(start), 0
    keys = random.split(random.fold_in(key, 1), epochs + averaged)
    (weights, mean, *_), _ = lax.scan(epoch, carry, keys)
    return mean if averaged else weights


Predict = Callable[[Any], Any]
"""Outputs of a method's networks for rows, shape ``(networks, n, outputs)``."""


def single(task: Task, data: Data, how: Training, seed: int) -> Predict:
    """One network."""
    return ensemble(task, data, how, seed, members=1)


def ensemble(task: Task, data: Data, how: Training, seed: int, members: int = 5) -> Predict:
    """Networks from independent initial values (Lakshminarayanan et al. 2017)."""
    found = [train(task, data, how, 100 * seed + member) for member in range(members)]
    draws = jax.tree.map(lambda *w: jnp.stack(w), *found)
    return partial(task.outputs, draws)


def dropout(task: Task, data: Data, how: Training, seed: int) -> Predict:
    """One network, of which units drop out in prediction as well (Gal and Ghahramani 2016)."""
    weights = train(task, data, how, seed)
    keys = random.split(random.key(seed), _MASKS)
    return lambda x: _masked(task, weights, x, keys, how.dropout)


@partial(jax.jit, static_argnums=0)
def _masked(task: Task, weights: Weights, x: Array, keys: Array, dropout: Array) -> Array:
    return lax.map(lambda key: task.network(weights, x, key, dropout), keys)


def last_layer_laplace(
    task: Task, weights: Weights, matrix: np.ndarray, seed: int, precision: float
) -> Predict:
    """A normal about a network's last layer (Daxberger et al. 2021).

    :param weights: the network's.
    :param matrix: see :func:`gauss_newton`.
    :param precision: of the prior.
    """
    last = task.last(weights)
    factor = np.linalg.cholesky(matrix + precision * np.eye(last.size))
    noise = np.random.default_rng(seed).standard_normal((last.size, _MASKS))
    # Class by class, as the matrix is.
    away = np.linalg.solve(factor.T, noise).T.reshape(_MASKS, last.shape[1], -1)
    layers = jnp.asarray(np.asarray(last) + away.transpose(0, 2, 1), last.dtype)
    return lambda x: jnp.einsum("nu,muk->mnk", task.features(weights, x), layers)


def gauss_newton(task: Task, data: Data, weights: Weights, scale: float = 1.0) -> np.ndarray:
    """Return the Gauss-Newton matrix of the last layer, ``(k (units + 1), k (units + 1))``.

    :param scale: SD of a number about the network's.
    """
    z = task.features(weights, jnp.asarray(data.x))
    if not task.has_classes:
        return np.asarray(z.T @ z, np.float64) / scale**2
    p = jax.nn.softmax(z @ task.last(weights))
    k, width = p.shape[1], z.shape[1]
    matrix = np.zeros((k, width, k, width))
    for i, j in itertools.combinations_with_replacement(range(k), 2):
        own = p[:, i] * ((i == j) - p[:, j])
        matrix[i, :, j] = matrix[j, :, i] = np.asarray(z.T @ (own[:, None] * z))
    return matrix.reshape(k * width, k * width)


class Tuned(NamedTuple):
    """Settings chosen on held-out rows.

    - **how** - to train.
    - **sd** - of a number about what a method predicts; None for classes.
    """

    how: Training
    sd: float | None


def score(task: Task, predict: Predict, data: Data, scale: Any = None) -> Scores:
    """Return the scores on test rows, and on out-of-distribution rows if there are any.

    :param scale: see :func:`networks_task.of_numbers`.
    """
    outputs = predict(jnp.asarray(data.x_test))
    if not task.has_classes:
        return of_numbers(outputs, scale, data)
    others = None if data.x_other is None else predict(jnp.asarray(data.x_other))
    return of_classes(outputs, data, others)


def best_sd(task: Task, predict: Predict, data: Data) -> tuple[float, float | None]:
    """The least NLL on rows to test on, and the SD of numbers that has it."""
    if task.has_classes:
        return score(task, predict, data._replace(x_other=None)).nll, None
    outputs = predict(jnp.asarray(data.x_test))
    return min((of_numbers(outputs, sd, data).nll, float(sd)) for sd in _SDS)


def tune(task: Task, data: Data, method: Callable, among: Sequence[Training], seed: int) -> Tuned:
    """The training that does best on held-out rows, a tenth of those to learn from."""
    held_out = data.held_out(seed=seed)
    found = []
    for how in among:
        nll, sd = best_sd(task, method(task, held_out, how, seed), held_out)
        found.append((nll if math.isfinite(nll) else math.inf, how, sd))
    _, how, sd = min(found, key=lambda one: one[0])
    return Tuned(how, sd)


def laplace(task: Task, data: Data, how: Training, seed: int) -> tuple[Predict, float | None]:
    """A network with a normal about its last layer; the prior's precision held-out rows choose.

    :return: also the SD of a number about what is predicted.
    """
    held_out = data.held_out(seed=seed)
    weights = train(task, held_out, how, seed)
    mean = partial(task.outputs, jax.tree.map(lambda w: w[None], weights))
    inner = best_sd(task, mean, held_out)[1] or 1.0
    matrix = gauss_newton(task, held_out, weights, inner)
    found = []
    for precision in _PRECISIONS:
        predict = last_layer_laplace(task, weights, matrix, seed, precision)
        found.append((*best_sd(task, predict, held_out), precision))
    _, sd, precision = min(found, key=lambda one: one[0])
    weights = train(task, data, how, seed)
    matrix = gauss_newton(task, data, weights, inner)
    return last_layer_laplace(task, weights, matrix, seed, precision), sd
