"""The way from a first position to the posterior's midst, once for all chains.

Up to 200 coordinates take Newton steps, which do not mind correlated or badly scaled columns;
more coordinates take Adam on minibatches and then L-BFGS. Both work on a fixed subset of the
rows; what error the subset leaves, a few whitened steps with the full gradient take away.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from numpyro_sgmcmc.adaptation.surface import Surface
from numpyro_sgmcmc.adaptation.whitening import symmetric_root
from numpyro_sgmcmc.arguments import Arguments
from numpyro_sgmcmc.full_data import Indices
from numpyro_sgmcmc.model import Target

__all__ = ["NEWTON_MAX_DIM", "approach", "descend", "draw_subset", "lbfgs", "newton"]

NEWTON_MAX_DIM = 200
_SUBSET_ROWS = 20_000
_LONGEST_STEP = 10.0


def draw_subset(target: Target, seed: int) -> Indices | None:
    """Random rows that stand for all rows: 20,000 a plate; None where no plate has more."""
    if all(p.size <= _SUBSET_ROWS for p in target.plates):
        return None
    rng = np.random.default_rng(seed)
    return {
        p.name: np.arange(p.size, dtype=np.int32)
        if p.size <= _SUBSET_ROWS
        else np.sort(rng.integers(0, p.size, _SUBSET_ROWS, dtype=np.int32))
        for p in target.plates
    }


def newton(surface: Surface, position: np.ndarray) -> np.ndarray:
    """Newton steps that follow negative curvature down, each with a line search.

    Ends within about a tenth of a posterior sd of the mode, after 30 steps, or where no step
    improves the potential.
    """
    for _ in range(30):
        u, gradient, hessian = surface.expansion(position)
        if not (np.isfinite(gradient).all() and np.isfinite(hessian).all()):
            break
        root = symmetric_root(hessian, inverse=True)
        slope = root.T @ gradient
        direction = root @ slope
        # Beyond a few units of unconstrained space the quadratic model means little.
        length = 1.0 / max(1.0, np.abs(direction).max() / _LONGEST_STEP)
        for _ in range(12):
            trial = position - length * direction
            if surface.value(trial) < u:
                break
            length /= 4.0
        else:
            break
        position = trial
        if slope @ slope < 0.01:
            break
    return position


@partial(jax.jit, static_argnames="target")
def descend(
    target: Target, arguments: Arguments, position: Array, rows: Indices, model_keys: Array | None
) -> Array:
    """Adam on minibatches with a cosine-decaying step, skipping non-finite gradients.

    :param rows: minibatches, shape ``(num_steps, subsample_size)`` for each plate.
    :param model_keys: one key a step, for a randomised likelihood.
    """
    num_steps = next(iter(rows.values())).shape[0]
    schedule = optax.cosine_decay_schedule(0.1, num_steps, alpha=0.01)
    optimizer = optax.apply_if_finite(optax.adam(schedule), max_consecutive_errors=num_steps)

    def step(carry: Any, xs: Any) -> tuple[Any, None]:
        position, state = carry
        rows, key = xs
        gradient = target.gradient(position, rows, arguments, key)
        updates, state = optimizer.update(gradient, state, position)
        return (optax.apply_updates(position, updates), state), None

    carry = (position, optimizer.init(position))
    return lax.scan(step, carry, (rows, model_keys))[0][0]


@partial(jax.jit, static_argnames="target")
def lbfgs(
    target: Target, arguments: Arguments, position: Array, subset: Indices | None
) -> Array:
    """Up to 30 L-BFGS steps on the subset; the better of the start and the end."""
    optimizer = optax.lbfgs()

    def value(q: Array) -> Array:
        return target.full_potential(q, arguments, subset)

    def step(_: int, carry: Any) -> Any:
        q, state = carry
        u, gradient = optax.value_and_grad_from_state(value)(q, state=state)
        updates, state = optimizer.update(
            gradient, state, q, value=u, grad=gradient, value_fn=value
        )
        return optax.apply_updates(q, updates), state

    best, _ = lax.fori_loop(0, 30, step, (position, optimizer.init(position)))
    return jnp.where(value(best) <= value(position), best, position)


def approach(
    surface: Surface, position: np.ndarray, factor: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Whitened steps with the full gradient until it is about zero.

    :param surface: of all rows.
    :param factor: the whitening L, shape ``(d,)`` or ``(d, d)``.
    :return: the position, and the full gradient there.
    """

    def push_pull(gradient: np.ndarray) -> np.ndarray:
        if factor.ndim == 1:
            return np.square(factor) * gradient
        return factor @ (factor.T @ gradient)

    gradient = surface.gradient(position)
    for _ in range(4):
        step = push_pull(gradient)
        distance = step @ gradient
        if not distance > 0.1 * position.size:
            break
        trial = position - step
        trial_gradient = surface.gradient(trial)
        if not push_pull(trial_gradient) @ trial_gradient < distance:
            break
        position, gradient = trial, trial_gradient
    return position, gradient
