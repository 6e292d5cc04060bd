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

from numpyro_sgmcmc.adaptation.batched_gradients import sample_minibatch_indices
from numpyro_sgmcmc.compilation import aot_compile
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import IIDSubsampling
from numpyro_sgmcmc.dynamics import UnderdampedLangevin
from numpyro_sgmcmc.dynamics.langevin import UnderdampedState
from numpyro_sgmcmc.model.gradient_estimators import GradientEstimator
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.progress import ProgressReporter

__all__ = [
    "MAX_PILOT_STEP_SIZE",
    "PILOT_DYNAMICS",
    "PILOT_TARGET_SD_BIAS",
    "PILOT_THINNING",
    "precompile_pilot",
    "run_pilot",
]

PILOT_DYNAMICS = UnderdampedLangevin(friction=1.5)
MAX_PILOT_STEP_SIZE = 0.3
PILOT_TARGET_SD_BIAS = 0.2
PILOT_THINNING = 5
_MAX_STEPS_PER_CALL = 100
_MAX_NORMALS_PER_CALL = (
    2**25
)  # random ones at most, so that many coordinates take fewer steps a call
_PILOT_STEP = PILOT_DYNAMICS.make_step("symmetric")


@partial(jax.jit, static_argnames="potential")
def _run_pilot_steps(
    potential: Potential,
    arguments: Arguments,
    preconditioner: Preconditioner,
    state: UnderdampedState,
    step_size: Array,
    control_variate_weight: Array,
    step_inputs: Any,
) -> tuple[UnderdampedState, Array]:
    """One call's steps of all chains, and the positions every fifth step.

    :param state: of all chains, fields of shape ``(num_chains, d)``.
    :param control_variate_weight: share of the anchor's gradient that is taken off and added again, exactly: 1 for
        control variates, 0 for plain gradients.
    :param step_inputs: rows, normal entries ``(steps, draws, num_chains, d)`` and model's keys.
    """

    def step(state: Any, xs: Any) -> tuple[Any, None]:
        rows, noise, key = xs

        def gradient(q: Array) -> Array:
            positions = jnp.concatenate(
                [preconditioner.to_position(q), preconditioner.center[None]]
            )
            found = jax.vmap(lambda x: potential.gradient_or_nan(x, rows, arguments, key))(
                positions
            )
            return preconditioner.apply_transpose(
                found[:-1]
                + control_variate_weight * (preconditioner.reference_gradient - found[-1])
            )

        return _PILOT_STEP(state, step_size, gradient, noise), None

    def some_steps(state: Any, xs: Any) -> tuple[Any, Array]:
        state, _ = lax.scan(step, state, xs)
        return state, state.position

    grouped = jax.tree.map(lambda x: x.reshape(-1, PILOT_THINNING, *x.shape[1:]), step_inputs)
    return lax.scan(some_steps, state, grouped)


def _choose_steps_per_call(num_steps: int, num_chains: int, dim: int) -> int:
    fitting = (
        _MAX_NORMALS_PER_CALL
        // (num_chains * dim * _PILOT_STEP.num_noise * PILOT_THINNING)
        * PILOT_THINNING
    )
    half = num_steps // 2 // PILOT_THINNING * PILOT_THINNING  # two calls at least
    return max(PILOT_THINNING, min(_MAX_STEPS_PER_CALL, fitting, half))


def precompile_pilot(
    potential: Potential, arguments: Arguments, is_dense: bool, num_chains: int, num_steps: int
) -> None:
    """Begin to compile :func:`run_pilot` for so many chains.

    :param is_dense: whether the whitening's factor is a matrix; if not it has no stretch, as before
        the first draws.
    """
    dim, dtype = potential.dim, potential.dtype
    steps = _choose_steps_per_call(num_steps, num_chains, dim)
    vector, number = jax.ShapeDtypeStruct((dim,), dtype), jax.ShapeDtypeStruct((), dtype)
    factor = jax.ShapeDtypeStruct((dim, dim), dtype) if is_dense else vector
    of_chains: Any = jax.ShapeDtypeStruct((num_chains, dim), dtype)
    noise = jax.ShapeDtypeStruct((steps, _PILOT_STEP.num_noise, num_chains, dim), dtype)
    rows = {
        p.name: jax.ShapeDtypeStruct((steps, p.subsample_size), np.int32) for p in potential.plates
    }
    keys = random.split(random.key(0), steps) if potential.is_stochastic else None
    aot_compile(
        _run_pilot_steps,
        potential,
        arguments,
        Preconditioner(vector, factor, vector),
        UnderdampedState(of_chains, of_chains),
        number,
        number,
        (rows, noise, keys),
    )


def run_pilot(
    potential: Potential,
    arguments: Arguments,
    preconditioner: Preconditioner,
    init_q: np.ndarray,
    step_size: float,
    num_steps: int,
    rng: np.random.Generator,
    estimator: GradientEstimator,
    progress: ProgressReporter,
) -> np.ndarray:
    """Draws of chains by the symmetric splitting on random rows.

    :param init_q: whitened first positions, shape ``(num_chains, d)``.
    :param num_steps: steps a chain, rounded up to whole calls (100 steps, but for very many
        coordinates); the first half is forgotten.
    :param estimator: with an anchor or without; a Hessian there is left out.
    :param progress: told of the gradients taken.
    :return: whitened draws, every fifth step, shape ``(num_chains, about num_steps // 10, d)``.
    """
    q, p = (jnp.asarray(x, potential.dtype) for x in (init_q, rng.standard_normal(init_q.shape)))
    state, draws = UnderdampedState(q, p), []
    steps = _choose_steps_per_call(num_steps, *init_q.shape)
    num_calls = -(-num_steps // steps)
    for call in range(num_calls):
        shape = (steps, _PILOT_STEP.num_noise, *init_q.shape)
        noise = rng.standard_normal(shape, np.float32).astype(potential.dtype)
        keys = random.split(random.key(call), steps) if potential.is_stochastic else None
        randomness = (
            sample_minibatch_indices(potential, rng, (steps,), IIDSubsampling()),
            noise,
            keys,
        )
        state, kept = _run_pilot_steps(
            potential,
            arguments,
            preconditioner._replace(reference_hessian=None),
            state,
            jnp.asarray(step_size, potential.dtype),
            jnp.asarray(float(estimator.needs_reference), potential.dtype),
            randomness,
        )
        progress.advance(steps * (len(init_q) + 1))
        found = np.asarray(kept)  # waits: the noise of one call at a time is in memory
        if call >= num_calls // 2:
            draws.append(np.moveaxis(found, 0, 1))
    return np.concatenate(draws, axis=1)
