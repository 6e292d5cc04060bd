"""The way from a first position to the posterior's midst, once for all chains.

First Adam on minibatches, which is cheap and robust; then second-order steps on a fixed subset
of the rows, which do not mind correlated or badly scaled columns. What error the subset leaves,
a few whitened steps with the full gradient take away.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax, random

from numpyro_sgmcmc.adaptation.whitening import symmetric_root
from numpyro_sgmcmc.arguments import Arguments
from numpyro_sgmcmc.coordinates import Coordinates
from numpyro_sgmcmc.full_data import Indices
from numpyro_sgmcmc.model import Target

__all__ = ["approach", "descend", "draw_subset", "full_gradient", "refine"]

_SUBSET_ROWS = 20_000
_NEWTON_MAX_DIM = 200


def draw_subset(target: Target, rng_key: Array) -> Indices | None:
    """Random rows that stand for all rows: 20,000 a plate; None where no plate has more."""
    if all(p.size <= _SUBSET_ROWS for p in target.plates):
        return None
    keys = random.split(rng_key, len(target.plates))
    return {
        p.name: jnp.arange(p.size)
        if p.size <= _SUBSET_ROWS
        else random.randint(key, (_SUBSET_ROWS,), 0, p.size)
        for key, p in zip(keys, target.plates, strict=True)
    }


@partial(jax.jit, static_argnames="target")
def full_gradient(target: Target, arguments: Arguments, position: Array) -> Array:
    """Gradient on all rows, shape ``(d,)``."""
    return target.full_gradient(position, arguments)


@partial(jax.jit, static_argnames=("target", "num_steps"))
def descend(
    target: Target, arguments: Arguments, position: Array, rng_key: Array, num_steps: int
) -> Array:
    """Adam on minibatches with a cosine-decaying step, skipping non-finite gradients."""
    schedule = optax.cosine_decay_schedule(0.1, num_steps, alpha=0.01)
    optimizer = optax.apply_if_finite(optax.adam(schedule), max_consecutive_errors=num_steps)

    def step(carry: Any, key: Array) -> tuple[Any, None]:
        position, state = carry
        keys = random.split(key, len(target.plates) + 1)
        rows = {
            p.name: random.randint(k, (p.subsample_size,), 0, p.size)
            for k, p in zip(keys[1:], target.plates, strict=True)
        }
        gradient = target.gradient(
            position, rows, arguments, keys[0] if target.is_randomized else None
        )
        updates, state = optimizer.update(gradient, state, position)
        return (optax.apply_updates(position, updates), state), None

    carry = (position, optimizer.init(position))
    (position, _), _ = lax.scan(step, carry, random.split(rng_key, num_steps))
    return position


def refine(
    target: Target, arguments: Arguments, position: Array, subset: Indices | None
) -> Array:
    """Second-order steps towards the mode of the potential on ``subset``.

    Newton steps that follow negative curvature down (absolute eigenvalues) for up to 200
    coordinates, L-BFGS beyond, both with a line search, so that neither diverges.
    """
    refiner = _newton if target.dim <= _NEWTON_MAX_DIM else _lbfgs
    return refiner(target, arguments, position, subset)


@partial(jax.jit, static_argnames="target")
def _newton(
    target: Target, arguments: Arguments, position: Array, subset: Indices | None
) -> Array:
    lengths = 2.0 ** -jnp.arange(16, dtype=position.dtype)

    def value(q: Array) -> Array:
        u = target.full_potential(q, arguments, subset)
        return jnp.where(jnp.isfinite(u), u, jnp.inf)

    def step(carry: Any) -> Any:
        i, q, u, _ = carry
        gradient = target.full_gradient(q, arguments, subset)
        root = symmetric_root(target.full_hessian(q, arguments, subset), inverse=True)
        direction = root @ (root.T @ gradient)
        # Beyond a few units of unconstrained space the quadratic model means little.
        direction = direction / jnp.maximum(1.0, jnp.abs(direction).max() / 10.0)
        values = lax.map(lambda t: value(q - t * direction), lengths)
        best = jnp.argmin(values)
        improves = values[best] < u
        decrement = jnp.square(root.T @ gradient).sum()
        q = jnp.where(improves, q - lengths[best] * direction, q)
        return i + 1, q, jnp.minimum(u, values[best]), improves & (decrement > 1e-2)

    carry = (0, position, value(position), True)
    return lax.while_loop(lambda c: (c[0] < 30) & c[3], step, carry)[1]


@partial(jax.jit, static_argnames="target")
def _lbfgs(
    target: Target, arguments: Arguments, position: Array, subset: Indices | None
) -> Array:
    optimizer = optax.lbfgs()

    def value(q: Array) -> Array:
        return target.full_potential(q, arguments, subset)

    def step(carry: Any) -> Any:
        i, q, state = carry
        u, gradient = optax.value_and_grad_from_state(value)(q, state=state)
        updates, state = optimizer.update(
            gradient, state, q, value=u, grad=gradient, value_fn=value
        )
        return i + 1, optax.apply_updates(q, updates), state

    def goes_on(carry: Any) -> Array:
        i, _, state = carry
        gradient = optax.tree.get(state, "grad")
        return (i == 0) | ((i < 30) & jnp.isfinite(gradient).all() & (jnp.abs(gradient).max() > 1))

    _, best, _ = lax.while_loop(goes_on, step, (0, position, optimizer.init(position)))
    return jnp.where(value(best) <= value(position), best, position)


def approach(
    target: Target, arguments: Arguments, coordinates: Coordinates
) -> tuple[Array, Array]:
    """Move the anchor by whitened steps with the full gradient until it is about at the mode.

    :return: the position, and the full gradient there.
    """
    position = coordinates.anchor
    gradient = full_gradient(target, arguments, position)
    distance = jnp.linalg.norm(coordinates.pull(gradient))
    for _ in range(4):
        if not distance > 0.3 * jnp.sqrt(target.dim):
            break
        trial = position - coordinates.push(coordinates.pull(gradient))
        trial_gradient = full_gradient(target, arguments, trial)
        trial_distance = jnp.linalg.norm(coordinates.pull(trial_gradient))
        if not trial_distance < distance:
            break
        position, gradient, distance = trial, trial_gradient, trial_distance
    return position, gradient
