"""The way from a first position to the posterior's midst, once for all chains.

Up to 200 coordinates take Newton steps, which do not mind correlated or badly scaled columns;
more coordinates take Adam on minibatches and then L-BFGS. Both work on a fixed subset of the
rows; what error the subset leaves, a few whitened steps with the full gradient take away.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.plates import Indices
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.posterior.whitening import Whitening
from numpyro_sgmcmc.warmup.eager_potential import EagerPotential
from numpyro_sgmcmc.warmup.factors import symmetric_root

__all__ = ["NEWTON_MAX_DIM", "approach", "centre", "descend", "lbfgs", "newton", "newton_from"]

NEWTON_MAX_DIM = 200
_LONGEST_STEP = 10.0
_NEGLIGIBLE = 1.0
_FEW_STARTS, _FAR_APART = 4, 100.0
_PROBES = 8
_PROBE_LENGTH = 0.1


def newton(potential: EagerPotential, position: np.ndarray) -> np.ndarray:
    """Newton steps that follow negative curvature down, each with a line search.

    Ends within about a tenth of a posterior sd of the mode, after 100 steps, or where no step
    improves the potential. A centred hierarchy has no mode: its density grows without bound as
    the scale and the effects shrink together. So the point of the path with the largest share of
    the mass is returned, see :func:`centre`.
    """
    best, least = position, np.inf
    longest = _LONGEST_STEP
    for _ in range(100):
        u, gradient, hessian = potential.expansion(position)
        if not (np.isfinite(gradient).all() and np.isfinite(hessian).all()):
            break
        root = symmetric_root(hessian, inverse=True)
        share = u - np.linalg.slogdet(root)[1]
        if share < least + _NEGLIGIBLE:
            best, least = position, min(share, least)
        slope = root.T @ gradient
        direction = root @ slope
        # Beyond a few units of unconstrained space the quadratic model may mean little, unless
        # steps as long have proved good: a column in large units has a coefficient of thousands.
        length = 1.0 / max(1.0, np.abs(direction).max() / longest)
        for _ in range(12):
            trial = position - length * direction
            if potential.value(trial) < u:
                break
            length /= 4.0
            longest = _LONGEST_STEP
        else:
            break
        longest = max(longest, 4.0 * np.abs(trial - position).max())
        position = trial
        if slope @ slope < 0.01:
            return position if share < least + _NEGLIGIBLE else best
    return best


def newton_from(potential: EagerPotential, starts: Sequence[np.ndarray]) -> np.ndarray:
    """Where Newton steps lead from the first start, unless another leads to far more of the mass.

    A mixture whose components lie in the wrong places has a mode there too, hundreds of nats above
    the one that matters, and most starts may lead to such. Four starts that end alike are enough.
    Small differences are no reason: in a flat tail the share is overrated.
    """
    shares: list[float] = []
    best, least = starts[0], np.inf
    for start in starts:
        if len(shares) >= _FEW_STARTS and max(shares) - min(shares) < _FAR_APART:
            break
        end = newton(potential, np.asarray(start, np.float64))
        shares.append(_share(*potential.expansion(end))[0])
        if shares[-1] < least - _FAR_APART:
            best, least = end, shares[-1]
    return best


def _share(
    u: float, gradient: np.ndarray, hessian: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray]:
    """Minus the log of density times volume, with the gradient and the root of the volume."""
    if not (np.isfinite(u) and np.isfinite(gradient).all() and np.isfinite(hessian).all()):
        return np.inf, gradient, np.eye(gradient.size)
    root = symmetric_root(hessian, inverse=True)
    return u - np.linalg.slogdet(root)[1], gradient, root


def centre(potential: EagerPotential, position: np.ndarray, seed: int) -> np.ndarray:
    r"""From the mode to where the mass is: the minimum of :math:`U + \tfrac12\log\det\nabla^2 U`.

    The density at a point times the volume of the Gaussian that fits there is its share of the
    posterior's mass. In a hierarchical model in non-centred form the two differ by dozens of
    posterior sds. The gradient of the volume term is the curvature of the gradient,
    :math:`\tfrac12 E[D^2\nabla U(L\zeta, L\zeta)]`, here from symmetric differences along random
    directions; a line search on the objective itself keeps the steps honest.
    """
    rng = np.random.default_rng(seed)
    value, gradient, root = _share(*potential.expansion(position))
    for _ in range(60):
        bend = np.zeros_like(position)
        for zeta in rng.standard_normal((_PROBES, position.size)):
            step = _PROBE_LENGTH * root @ zeta
            sides = potential.gradient(position + step) + potential.gradient(position - step)
            bend += (sides - 2.0 * gradient) / (2.0 * _PROBE_LENGTH**2 * _PROBES)
        slope = root.T @ (gradient + bend)
        if not np.isfinite(slope).all() or np.abs(slope).max() < 1.0:
            break
        direction = root @ slope / max(1.0, np.linalg.norm(slope))
        for length in 4.0 ** -np.arange(6):
            trial = position - length * direction
            trial_value, trial_gradient, trial_root = _share(*potential.expansion(trial))
            if trial_value < value:
                break
        else:
            break
        gained = value - trial_value
        position, value, gradient, root = trial, trial_value, trial_gradient, trial_root
        if gained < 0.01:
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
def lbfgs(target: Target, arguments: Arguments, position: Array, subset: Indices | None) -> Array:
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


def approach(potential: EagerPotential, whitening: Whitening) -> Whitening:
    """Move the anchor by whitened steps with the full gradient until that is about zero.

    :param potential: of all rows.
    """
    distance = np.square(whitening.pull(whitening.gradient)).sum()
    for _ in range(4):
        if not distance > 0.1 * whitening.anchor.size:
            break
        trial = whitening.anchor - whitening.push(whitening.pull(whitening.gradient))
        moved = Whitening(trial, whitening.factor, potential.gradient(trial))
        moved_distance = np.square(moved.pull(moved.gradient)).sum()
        if not moved_distance < distance:
            break
        whitening, distance = moved, moved_distance
    return whitening
