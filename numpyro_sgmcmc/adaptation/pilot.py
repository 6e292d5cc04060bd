"""Short pilot chains that find the posterior's mean and covariance.

A mode and its curvature describe a Gaussian; a skewed posterior (of a scale, of a rare level) has
its mean and covariance elsewhere. Pilot chains run in windows: after each, the preconditioner is
updated from the draws and the gradients there, until the chains agree and stay about its center.

All chains take the same minibatch at a step, so that its observations are gathered once and the
reference gradient on them is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from numpyro_sgmcmc.adaptation.batched_gradients import (
    BatchedGradients,
    BulkPositions,
    sample_minibatch_indices,
)
from numpyro_sgmcmc.adaptation.gradient_noise import (
    GradientNoiseStats,
    estimate_max_curvature,
    measure_noise,
)
from numpyro_sgmcmc.adaptation.preconditioning import factorize_covariance, update_preconditioner
from numpyro_sgmcmc.adaptation.settings import MAX_CONVERGED_R_HAT, WarmupInputs
from numpyro_sgmcmc.adaptation.step_size import NoiseLimit
from numpyro_sgmcmc.adaptation.variational import MeanField
from numpyro_sgmcmc.compilation import aot_compile
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import IIDSubsampling
from numpyro_sgmcmc.dynamics import UnderdampedLangevin
from numpyro_sgmcmc.dynamics.langevin import UnderdampedState
from numpyro_sgmcmc.model.gradient_estimators import (
    ControlVariate,
    GradientEstimator,
    MinibatchGradient,
)
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.progress import ProgressReporter

PILOT_DYNAMICS = UnderdampedLangevin(friction=1.5)
MAX_PILOT_STEP_SIZE = 0.3  # default step size of the symmetric splitting
PILOT_TARGET_SD_BIAS = 0.2  # of pilot chains with local latents
PILOT_THINNING = 5  # steps
# Of global pilot chains. Draws with 1.5 times the posterior variance leave the preconditioner as it
# is, since the variance of the gradients at them is as much larger.
_GLOBAL_PILOT_TARGET_SD_BIAS = 1.0
_MAX_STEPS_PER_CALL = 100
_MAX_NORMALS_PER_CALL = 2**25  # bounds memory: 128 MiB of normals per call
_MAX_DISTANCE_SD = 1e3  # preconditioned distance from the center at which a chain counts as lost
_MAX_CENTER_SHIFT_SD = 0.5  # largest mean of converged chains, in preconditioned coordinates
_NUM_CURVATURE_POSITIONS = 4  # bounds the gradients for the largest curvature
# Factors by which steps are shortened after a window whose chains were lost, and after one at whose
# mean the gradient is not finite.
_LOST_STEP_DIVISOR, _NONFINITE_STEP_DIVISOR = 4.0, 2.0
_MIN_SEPARATION_SD = 0.3  # gap between two groups of draws, relative to the sum of their SDs
_PILOT_STEP = PILOT_DYNAMICS.make_step("symmetric")


@dataclass(frozen=True)
class PilotResult:
    """The mode in which pilot chains are after some windows.

    - **preconditioner** - coordinates about it.
    - **q** - last positions of the chains in these coordinates, shape ``(n, d)``.
    - **is_converged** - whether the chains agree and stay about the center.
    - **r_hat** - the largest R-hat of any coordinate in the last window.
    - **window_medians** - median chain mean of each window, each of shape ``(d,)``.
    - **is_distinct** - False where chains came to a mode that was already known.
    - **log_mass_deficit** - log mass of the main mode minus that of this one, in nats.
    """

    preconditioner: Preconditioner
    q: np.ndarray
    is_converged: bool = False
    r_hat: float = np.inf
    window_medians: tuple[np.ndarray, ...] = ()
    is_distinct: bool = True
    log_mass_deficit: float = 0.0

    @property
    def positions(self) -> np.ndarray:
        """The last positions in model coordinates, shape ``(n, d)``."""
        return np.asarray(self.preconditioner.to_position(self.q))

    @property
    def center(self) -> np.ndarray:
        """The median chain mean of the last window, shape ``(d,)``."""
        return self.window_medians[-1] if self.window_medians else self.preconditioner.center


class WindowStatus(Enum):
    """Outcome of one window of pilot chains."""

    CONTINUE = "another window may improve the preconditioner"
    FINISHED = "no further window is needed"
    CHAINS_LOST = "half of the chains or more diverged"
    NONFINITE = "the gradient at the mean of the draws is not finite"


def run_windows(
    run_window: Callable[[PilotResult, float, int], tuple[PilotResult, WindowStatus]],
    pilot: PilotResult,
    num_windows: int,
) -> PilotResult:
    """Run windows of pilot chains, with shorter steps after a window that failed.

    :param run_window: maps result so far, divisor of the step size and number of the window to the
        new result and its status.
    :param pilot: preconditioner and initial positions.
    """
    step_divisor = 1.0
    for window in range(num_windows):
        pilot, status = run_window(pilot, step_divisor, window)
        if status is WindowStatus.FINISHED:
            break
        if status is WindowStatus.CHAINS_LOST:
            step_divisor *= _LOST_STEP_DIVISOR
            pilot = replace(pilot, q=pilot.q / 2.0)  # restart nearer to the center
        elif status is WindowStatus.NONFINITE:
            step_divisor *= _NONFINITE_STEP_DIVISOR
    return pilot


def run_pilot_windows(
    inputs: WarmupInputs,
    batched_gradients: BatchedGradients,
    preconditioner: Preconditioner,
    q: np.ndarray,
    window_steps: Sequence[int],
    rng: np.random.Generator,
    known_modes: Sequence[PilotResult] = (),
    is_distinct: Callable[[PilotResult, np.ndarray], bool] = lambda pilot, positions: True,
) -> PilotResult:
    """Run pilot chains of a model without local latents, window by window until they agree.

    :param q: initial positions in preconditioned coordinates, shape ``(num_chains, d)``.
    :param window_steps: steps per chain of each window.
    :param known_modes: modes; chains that come to them are replaced by others.
    :param is_distinct: maps the result and the chains' last positions to whether they are in none
        of these; if not, no further window is run.
    """
    num_chains = len(q)

    def run_window(
        pilot: PilotResult, step_divisor: float, window: int
    ) -> tuple[PilotResult, WindowStatus]:
        inputs.progress.begin_stage("pilot chains")
        estimator, step_size, noise_stats = _choose_pilot_step(
            inputs, batched_gradients, pilot, step_divisor, rng
        )
        draws = run_pilot(
            batched_gradients.step_potential,
            inputs.arguments,
            pilot.preconditioner.cast(inputs.potential.dtype),
            pilot.q,
            step_size,
            window_steps[window],
            rng,
            estimator,
            inputs.progress,
        )
        survives = _find_surviving_chains(batched_gradients, pilot.preconditioner, draws)
        if survives.sum() <= num_chains // 2:
            return pilot, WindowStatus.CHAINS_LOST
        draws = draws[survives].astype(np.float64)
        if known_modes:
            last_positions = pilot.preconditioner.to_position(draws[:, -1])
            is_outside = find_chains_outside_modes(
                last_positions, [mode.positions for mode in known_modes]
            )
            draws = draws[is_outside] if is_outside.sum() > 1 else draws
        # Lost chains continue from copies of the others.
        last_q = draws[rng.choice(len(draws), num_chains), -1]
        last_q[: len(draws)] = draws[:, -1]
        last_positions = pilot.preconditioner.to_position(last_q)
        median = pilot.preconditioner.to_position(np.median(draws.mean(1), axis=0))
        pilot = replace(
            pilot,
            is_converged=_is_pilot_converged(draws),
            r_hat=_compute_max_r_hat(draws),
            window_medians=(*pilot.window_medians, median),
        )
        if not is_distinct(pilot, last_positions):
            last_q = pilot.preconditioner.solve(last_positions - pilot.preconditioner.center)
            return replace(pilot, q=last_q, is_distinct=False), WindowStatus.FINISHED
        updated = update_preconditioner(
            inputs, batched_gradients, pilot.preconditioner, draws, noise_stats, pilot.is_converged
        )
        if updated is None:
            return replace(pilot, is_converged=False), WindowStatus.NONFINITE
        last_q = updated.solve(last_positions - updated.center)
        pilot = replace(pilot, preconditioner=updated, q=last_q)
        return pilot, WindowStatus.FINISHED if pilot.is_converged else WindowStatus.CONTINUE

    return run_windows(run_window, PilotResult(preconditioner, q), len(window_steps))


def build_preconditioner_from_fit(
    inputs: WarmupInputs, batched_gradients: BatchedGradients, fit: MeanField
) -> Preconditioner:
    """Return coordinates in which a fit is standard normal, or with the user's mass matrix."""
    settings, matrix = inputs.settings, inputs.settings.inverse_mass_matrix
    factor = np.diag(fit.sd) if settings.is_dense else fit.sd
    factor = factor if matrix is None else factorize_covariance(matrix)
    return Preconditioner(fit.mean, factor, batched_gradients.full_gradient(fit.mean))


def sample_pilot_q(
    inputs: WarmupInputs, preconditioner: Preconditioner, fit: MeanField, rng: np.random.Generator
) -> np.ndarray:
    """Sample initial positions of pilot chains with the SDs of a fit, shape ``(num_chains, d)``."""
    normals = rng.standard_normal((inputs.budget.num_pilot_chains, inputs.potential.dim))
    return preconditioner.solve(fit.sd * normals)


def _choose_pilot_step(
    inputs: WarmupInputs,
    batched_gradients: BatchedGradients,
    pilot: PilotResult,
    step_divisor: float,
    rng: np.random.Generator,
) -> tuple[GradientEstimator, float, GradientNoiseStats]:
    """Choose minibatch gradients or control variates, whichever allow the longer step.

    :return: estimator, step size, and noise of the control variates if there are any.
    """
    estimators: tuple[GradientEstimator, ...] = (MinibatchGradient(), ControlVariate())
    if inputs.potential.is_stochastic:
        estimators = (MinibatchGradient(),)
    bulk = BulkPositions(batched_gradients, pilot.preconditioner, pilot.q)
    noise_stats = measure_noise(bulk, estimators, IIDSubsampling(), rng)
    max_curvature = estimate_max_curvature(replace(bulk, q=pilot.q[:_NUM_CURVATURE_POSITIONS]), rng)
    limit = NoiseLimit(
        PILOT_DYNAMICS,
        MAX_PILOT_STEP_SIZE / step_divisor,
        max_curvature,
        _GLOBAL_PILOT_TARGET_SD_BIAS,
    )
    step_sizes = {e: limit.limit_step_size(noise_stats[e])[0] for e in estimators}
    estimator = max(estimators, key=lambda e: (step_sizes[e], e.needs_reference))
    return estimator, step_sizes[estimator], noise_stats[estimators[-1]]


def _find_surviving_chains(
    batched_gradients: BatchedGradients, preconditioner: Preconditioner, draws: np.ndarray
) -> np.ndarray:
    """Return which chains neither diverged nor ended where the density is zero, shape ``(n,)``.

    :param draws: preconditioned draws, shape ``(n, draws, d)``.
    """
    survives = np.isfinite(draws).all((1, 2)) & (np.abs(draws).max((1, 2)) < _MAX_DISTANCE_SD)
    last_q = np.where(survives[:, None], draws[:, -1], 0.0)
    potentials, _ = batched_gradients.evaluate_on_subset(
        preconditioner.to_position(last_q.astype(np.float64))
    )
    return np.asarray(survives & np.isfinite(potentials))


def _is_pilot_converged(draws: np.ndarray) -> bool:
    """Return whether the chains agree, and their mean is about the center.

    :param draws: preconditioned draws, shape ``(n, draws, d)``.
    """
    center_shift = np.abs(draws.mean((0, 1))).max()
    return bool(
        _compute_max_r_hat(draws) < MAX_CONVERGED_R_HAT and center_shift < _MAX_CENTER_SHIFT_SD
    )


def _compute_max_r_hat(draws: np.ndarray) -> float:
    """Return the largest R-hat of any coordinate (without splitting chains).

    :param draws: preconditioned draws, shape ``(n, draws, d)``.
    """
    within_variance = np.maximum(draws.var(1).mean(0), np.finfo(float).tiny)
    return float(compute_r_hat(draws.mean(1), within_variance).max())


def compute_r_hat(chain_means: np.ndarray, within_variance: np.ndarray) -> np.ndarray:
    r"""Return R-hat of each coordinate, :math:`\sqrt{1 + B/W}`, shape ``(d,)``.

    :param chain_means: means of the chains, whose variance is B, shape ``(n, d)``.
    :param within_variance: mean W of the chains' variances, shape ``(d,)``.
    """
    return np.asarray(np.sqrt(1.0 + chain_means.var(0, ddof=1) / within_variance))


def find_separated_coordinates(positions: np.ndarray, other_positions: np.ndarray) -> np.ndarray:
    """Return the coordinates in which most of two groups of draws do not overlap.

    Some chains cross a low barrier: the outer eighth of ``positions`` and three eighths of
    ``other_positions`` at either end are left out.

    :param positions: draws, shape ``(n, d)``.
    :param other_positions: draws, shape ``(m, d)``.
    """
    positions, other_positions = _trim_and_sort(positions, 1), _trim_and_sort(other_positions, 3)
    gap = np.maximum(
        positions.min(0) - other_positions.max(0), other_positions.min(0) - positions.max(0)
    )
    return np.flatnonzero(gap > _MIN_SEPARATION_SD * (positions.std(0) + other_positions.std(0)))


def find_chains_outside_modes(
    last_positions: np.ndarray, mode_positions: Sequence[np.ndarray]
) -> np.ndarray:
    """Return which chains are in none of the known modes, shape ``(n,)``.

    :param last_positions: last positions of the chains, shape ``(n, d)``.
    :param mode_positions: draws in each mode, each of shape ``(m, d)``.
    """
    is_outside = np.ones(len(last_positions), bool)
    for positions in mode_positions:
        separated = find_separated_coordinates(positions, last_positions)
        inner = _trim_and_sort(positions, 1)[:, separated]
        slack = inner.std(0)
        is_outside &= (
            (last_positions[:, separated] < inner[0] - slack)
            | (last_positions[:, separated] > inner[-1] + slack)
        ).any(1)
    return is_outside


def _trim_and_sort(positions: np.ndarray, num_eighths: int) -> np.ndarray:
    """Return each coordinate's draws sorted, without so many eighths at either end."""
    num_trimmed = num_eighths * len(positions) // 8
    return np.sort(positions, axis=0)[num_trimmed : len(positions) - num_trimmed]


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
    max_normals_per_call: int = _MAX_NORMALS_PER_CALL,
) -> np.ndarray:
    """Run chains by the symmetric splitting on iid minibatches.

    :param init_q: initial positions in preconditioned coordinates, shape ``(num_chains, d)``.
    :param num_steps: steps per chain, rounded up to whole calls (100 steps, fewer in high
        dimension); the first half is discarded.
    :param estimator: gradient estimator; a reference Hessian is not used.
    :param max_normals_per_call: normals of a compiled call, at most.
    :return: preconditioned draws, every fifth step, shape ``(num_chains, num_draws, d)`` with about
        ``num_steps // 10`` draws.
    """
    q, p = (jnp.asarray(x, potential.dtype) for x in (init_q, rng.standard_normal(init_q.shape)))
    state, draws = UnderdampedState(q, p), []
    num_chains, dim = init_q.shape
    steps_per_call = _choose_steps_per_call(num_steps, num_chains, dim, max_normals_per_call)
    num_calls = -(-num_steps // steps_per_call)
    for call in range(num_calls):
        shape = (steps_per_call, _PILOT_STEP.num_noise, *init_q.shape)
        normals = rng.standard_normal(shape, np.float32).astype(potential.dtype)
        keys = random.split(random.key(call), steps_per_call) if potential.is_stochastic else None
        indices = sample_minibatch_indices(potential, rng, (steps_per_call,), IIDSubsampling())
        state, positions = _run_pilot_steps(
            potential,
            arguments,
            preconditioner._replace(reference_hessian=None),
            state,
            jnp.asarray(step_size, potential.dtype),
            jnp.asarray(float(estimator.needs_reference), potential.dtype),
            (indices, normals, keys),
        )
        progress.advance(steps_per_call * (num_chains + 1))
        positions = np.asarray(positions)  # waits, so that one call's normals are in memory
        if call >= num_calls // 2:
            draws.append(np.moveaxis(positions, 0, 1))
    return np.concatenate(draws, axis=1)


def precompile_pilot(
    potential: Potential, arguments: Arguments, is_dense: bool, num_chains: int, num_steps: int
) -> None:
    """Start to compile :func:`run_pilot`.

    :param is_dense: whether the factor of the preconditioner is a matrix; a diagonal one has no
        low-rank factor, as in the first window.
    """
    dim, dtype = potential.dim, potential.dtype
    steps = _choose_steps_per_call(num_steps, num_chains, dim)
    vector, scalar = jax.ShapeDtypeStruct((dim,), dtype), jax.ShapeDtypeStruct((), dtype)
    factor = jax.ShapeDtypeStruct((dim, dim), dtype) if is_dense else vector
    chains: Any = jax.ShapeDtypeStruct((num_chains, dim), dtype)
    normals = jax.ShapeDtypeStruct((steps, _PILOT_STEP.num_noise, num_chains, dim), dtype)
    indices = {
        p.name: jax.ShapeDtypeStruct((steps, p.subsample_size), np.int32) for p in potential.plates
    }
    keys = random.split(random.key(0), steps) if potential.is_stochastic else None
    aot_compile(
        _run_pilot_steps,
        potential,
        arguments,
        Preconditioner(vector, factor, vector),
        UnderdampedState(chains, chains),
        scalar,
        scalar,
        (indices, normals, keys),
    )


def _choose_steps_per_call(
    num_steps: int, num_chains: int, dim: int, max_normals: int = _MAX_NORMALS_PER_CALL
) -> int:
    """Return the steps per compiled call, a multiple of the thinning."""
    max_groups = max_normals // (num_chains * dim * _PILOT_STEP.num_noise * PILOT_THINNING)
    half = num_steps // 2 // PILOT_THINNING * PILOT_THINNING  # two calls at least
    return max(PILOT_THINNING, min(_MAX_STEPS_PER_CALL, max_groups * PILOT_THINNING, half))


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
    """Run one call's steps of all chains and return every fifth position.

    :param state: fields of shape ``(num_chains, d)``.
    :param control_variate_weight: weight of the control variate: 1 for control variates, 0 for
        minibatch gradients.
    :param step_inputs: indices, normals ``(steps, num_noise, num_chains, d)`` and the model's keys.
    """

    def step(state: Any, xs: Any) -> tuple[Any, None]:
        indices, normals, key = xs

        def gradient(q: Array) -> Array:
            positions = jnp.concatenate(
                [preconditioner.to_position(q), preconditioner.center[None]]
            )
            gradients = jax.vmap(lambda x: potential.gradient_or_nan(x, indices, arguments, key))(
                positions
            )
            return preconditioner.apply_transpose(
                gradients[:-1]
                + control_variate_weight * (preconditioner.reference_gradient - gradients[-1])
            )

        return _PILOT_STEP(state, step_size, gradient, normals), None

    def run_thinned(state: Any, xs: Any) -> tuple[Any, Array]:
        state, _ = lax.scan(step, state, xs)
        return state, state.position

    grouped = jax.tree.map(lambda x: x.reshape(-1, PILOT_THINNING, *x.shape[1:]), step_inputs)
    return lax.scan(run_thinned, state, grouped)
