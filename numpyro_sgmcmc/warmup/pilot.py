"""Short pilot chains: where the posterior's mean and covariance are, measured.

The mode and its curvature describe a Gaussian. A skewed posterior (a scale, a rare level) has its
mean and spread elsewhere; pilot chains find them, and the anchor and whitening follow.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.minibatch import IID
from numpyro_sgmcmc.dynamics import Underdamped
from numpyro_sgmcmc.dynamics.underdamped import UnderdampedState
from numpyro_sgmcmc.posterior.estimators import Estimator, whitened_gradient
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.posterior.whitening import Whitening
from numpyro_sgmcmc.warmup.noise import draw_rows

__all__ = ["KEEP_EVERY", "PILOT", "PILOT_BIAS", "PILOT_STEP_SIZE", "run_pilot"]

PILOT = Underdamped(friction=1.5)
PILOT_STEP_SIZE = 0.3
PILOT_BIAS = 0.2
KEEP_EVERY = 5
_STEPS_A_CALL = 100
_NUMBERS_A_CALL = 2**25  # random ones at most, so that many coordinates take fewer steps a call
_STEP = PILOT.step("symmetric")


@partial(jax.jit, static_argnames=("target", "estimator"))
def _advance(
    target: Target,
    arguments: Arguments,
    whitening: Whitening,
    state: UnderdampedState,
    step_size: Array,
    randomness: Any,
    estimator: Estimator,
) -> tuple[UnderdampedState, Array]:
    """One call's steps of all chains, and the positions every fifth step."""

    def chain(state: Any, randomness: Any) -> tuple[Any, Array]:
        def step(state: Any, xs: Any) -> tuple[Any, None]:
            rows, noise, key = xs
            gradient = whitened_gradient(estimator, target, arguments, whitening, rows, key)
            state = _STEP(state, step_size, gradient, noise)
            return state, None

        def some_steps(state: Any, xs: Any) -> tuple[Any, Array]:
            state, _ = lax.scan(step, state, xs)
            return state, state.position

        grouped = jax.tree.map(lambda x: x.reshape(-1, KEEP_EVERY, *x.shape[1:]), randomness)
        return lax.scan(some_steps, state, grouped)

    return jax.vmap(chain)(state, randomness)


def run_pilot(
    target: Target,
    arguments: Arguments,
    whitening: Whitening,
    starts: np.ndarray,
    step_size: float,
    num_steps: int,
    rng: np.random.Generator,
    estimator: Estimator,
) -> np.ndarray:
    """Draws of chains by the symmetric splitting on random rows.

    :param starts: whitened first positions, shape ``(num_chains, d)``.
    :param num_steps: steps a chain, rounded up to whole calls (100 steps, but for very many
        coordinates); the first half is forgotten.
    :return: whitened draws, every fifth step, shape ``(num_chains, about num_steps // 10, d)``.
    """
    q, p = (jnp.asarray(x, target.dtype) for x in (starts, rng.standard_normal(starts.shape)))
    state, draws = UnderdampedState(q, p), []
    fitting = _NUMBERS_A_CALL // (starts.size * _STEP.draws * KEEP_EVERY) * KEEP_EVERY
    steps = (starts.shape[0], max(KEEP_EVERY, min(_STEPS_A_CALL, fitting)))
    num_calls = -(-num_steps // steps[1])
    for call in range(num_calls):
        noise = rng.standard_normal((*steps, _STEP.draws, target.dim)).astype(target.dtype)
        keys = random.split(random.key(call), steps) if target.is_randomized else None
        randomness = (draw_rows(target, rng, steps, IID()), noise, keys)
        state, kept = _advance(
            target,
            arguments,
            whitening,
            state,
            jnp.asarray(step_size, target.dtype),
            randomness,
            estimator,
        )
        found = np.asarray(kept)  # waits: the noise of one call at a time is in memory
        if call >= num_calls // 2:
            draws.append(found)
    return np.concatenate(draws, axis=1)
