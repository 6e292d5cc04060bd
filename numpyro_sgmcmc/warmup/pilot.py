"""Short pilot chains: where the posterior's mean and covariance are, measured.

The mode and its curvature describe a Gaussian. A skewed posterior (a scale, a rare level) has its
mean and spread elsewhere; pilot chains find them, and the anchor and whitening follow.

All chains take the same minibatch at a step, so that its rows are gathered once and the anchor's
gradient on them is computed once.
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
from numpyro_sgmcmc.data.progress import Stages
from numpyro_sgmcmc.dynamics import Underdamped
from numpyro_sgmcmc.dynamics.underdamped import UnderdampedState
from numpyro_sgmcmc.posterior.estimators import Estimator
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.posterior.whitening import Whitening
from numpyro_sgmcmc.warmup.ahead import compile_ahead
from numpyro_sgmcmc.warmup.noise import draw_rows

__all__ = ["KEEP_EVERY", "PILOT", "PILOT_BIAS", "PILOT_STEP_SIZE", "prepare", "run_pilot"]

PILOT = Underdamped(friction=1.5)
PILOT_STEP_SIZE = 0.3
PILOT_BIAS = 0.2
KEEP_EVERY = 5
_STEPS_A_CALL = 100
_NUMBERS_A_CALL = 2**25  # random ones at most, so that many coordinates take fewer steps a call
_STEP = PILOT.step("symmetric")


@partial(jax.jit, static_argnames="target")
def _advance(
    target: Target,
    arguments: Arguments,
    whitening: Whitening,
    state: UnderdampedState,
    step_size: Array,
    held: Array,
    randomness: Any,
) -> tuple[UnderdampedState, Array]:
    """One call's steps of all chains, and the positions every fifth step.

    :param state: of all chains, fields of shape ``(num_chains, d)``.
    :param held: share of the anchor's gradient that is taken off and added again, exactly: 1 for
        control variates, 0 for plain gradients.
    :param randomness: rows, normal entries ``(steps, draws, num_chains, d)`` and model's keys.
    """

    def step(state: Any, xs: Any) -> tuple[Any, None]:
        rows, noise, key = xs

        def gradient(q: Array) -> Array:
            positions = jnp.concatenate([whitening.position(q), whitening.anchor[None]])
            found = jax.vmap(lambda x: target.honest_gradient(x, rows, arguments, key))(positions)
            return whitening.pull(found[:-1] + held * (whitening.gradient - found[-1]))

        return _STEP(state, step_size, gradient, noise), None

    def some_steps(state: Any, xs: Any) -> tuple[Any, Array]:
        state, _ = lax.scan(step, state, xs)
        return state, state.position

    grouped = jax.tree.map(lambda x: x.reshape(-1, KEEP_EVERY, *x.shape[1:]), randomness)
    return lax.scan(some_steps, state, grouped)


def _steps_a_call(num_steps: int, num_chains: int, dim: int) -> int:
    fitting = _NUMBERS_A_CALL // (num_chains * dim * _STEP.draws * KEEP_EVERY) * KEEP_EVERY
    half = num_steps // 2 // KEEP_EVERY * KEEP_EVERY  # two calls at least
    return max(KEEP_EVERY, min(_STEPS_A_CALL, fitting, half))


def prepare(
    target: Target, arguments: Arguments, is_dense: bool, num_chains: int, num_steps: int
) -> None:
    """Begin to compile :func:`run_pilot` for so many chains.

    :param is_dense: whether the whitening's factor is a matrix; if not it has no stretch, as before
        the first draws.
    """
    dim, dtype = target.dim, target.dtype
    steps = _steps_a_call(num_steps, num_chains, dim)
    vector, number = jax.ShapeDtypeStruct((dim,), dtype), jax.ShapeDtypeStruct((), dtype)
    factor = jax.ShapeDtypeStruct((dim, dim), dtype) if is_dense else vector
    of_chains: Any = jax.ShapeDtypeStruct((num_chains, dim), dtype)
    noise = jax.ShapeDtypeStruct((steps, _STEP.draws, num_chains, dim), dtype)
    rows = {
        p.name: jax.ShapeDtypeStruct((steps, p.subsample_size), np.int32) for p in target.plates
    }
    keys = random.split(random.key(0), steps) if target.is_randomized else None
    compile_ahead(
        _advance,
        target,
        arguments,
        Whitening(vector, factor, vector),
        UnderdampedState(of_chains, of_chains),
        number,
        number,
        (rows, noise, keys),
    )


def run_pilot(
    target: Target,
    arguments: Arguments,
    whitening: Whitening,
    starts: np.ndarray,
    step_size: float,
    num_steps: int,
    rng: np.random.Generator,
    estimator: Estimator,
    progress: Stages,
) -> np.ndarray:
    """Draws of chains by the symmetric splitting on random rows.

    :param starts: whitened first positions, shape ``(num_chains, d)``.
    :param num_steps: steps a chain, rounded up to whole calls (100 steps, but for very many
        coordinates); the first half is forgotten.
    :param estimator: with an anchor or without; a Hessian there is left out.
    :param progress: told of the gradients taken.
    :return: whitened draws, every fifth step, shape ``(num_chains, about num_steps // 10, d)``.
    """
    q, p = (jnp.asarray(x, target.dtype) for x in (starts, rng.standard_normal(starts.shape)))
    state, draws = UnderdampedState(q, p), []
    steps = _steps_a_call(num_steps, *starts.shape)
    num_calls = -(-num_steps // steps)
    for call in range(num_calls):
        shape = (steps, _STEP.draws, *starts.shape)
        noise = rng.standard_normal(shape, np.float32).astype(target.dtype)
        keys = random.split(random.key(call), steps) if target.is_randomized else None
        randomness = (draw_rows(target, rng, (steps,), IID()), noise, keys)
        state, kept = _advance(
            target,
            arguments,
            whitening._replace(hessian=None),
            state,
            jnp.asarray(step_size, target.dtype),
            jnp.asarray(float(estimator.has_anchor), target.dtype),
            randomness,
        )
        progress.done(steps * (len(starts) + 1))
        found = np.asarray(kept)  # waits: the noise of one call at a time is in memory
        if call >= num_calls // 2:
            draws.append(np.moveaxis(found, 0, 1))
    return np.concatenate(draws, axis=1)
