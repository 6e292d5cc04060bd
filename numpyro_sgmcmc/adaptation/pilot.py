"""Short pilot chains that find the posterior's mean and covariance.

A mode and its curvature describe a Gaussian; a skewed posterior (of a scale, of a rare level) has
its mean and covariance elsewhere. Pilot chains run in windows: after each, the preconditioner is
updated from the draws and the gradients there, until the chains agree and stay about its center.
An exact fit of a hierarchy is kept.

All chains take the same minibatch at a step, so that its observations are gathered once and the
reference gradient on them is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from scipy import stats

from numpyro_sgmcmc.adaptation.batch_size import scale_batch_sizes
from numpyro_sgmcmc.adaptation.batched_gradients import BulkPositions, sample_minibatch_indices
from numpyro_sgmcmc.adaptation.coupling import NO_COUPLING, Coupling, find_coupling
from numpyro_sgmcmc.adaptation.gradient_noise import (
    GradientNoiseStats,
    estimate_max_curvature,
    measure_noise,
)
from numpyro_sgmcmc.adaptation.preconditioning import (
    MAX_CENTER_SHIFT_SD,
    factorize_covariance,
    is_covariance_off,
    is_root_centered,
    update_preconditioner,
)
from numpyro_sgmcmc.adaptation.settings import MAX_CONVERGED_R_HAT, WarmupInputs
from numpyro_sgmcmc.adaptation.step_size import NoiseLimit
from numpyro_sgmcmc.adaptation.variational import MeanField
from numpyro_sgmcmc.compilation import aot_compile
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import IIDSubsampling
from numpyro_sgmcmc.dynamics import UnderdampedLangevin
from numpyro_sgmcmc.dynamics.langevin import UnderdampedState
from numpyro_sgmcmc.model.block_arrow import BlockArrowMatrix
from numpyro_sgmcmc.model.gradient_estimators import (
    ControlVariate,
    GradientEstimator,
    Minibatch,
    MinibatchGradient,
    SecondOrderControlVariate,
)
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner

PILOT_DYNAMICS = UnderdampedLangevin(friction=1.5)
MAX_PILOT_STEP_SIZE = 0.3  # default step size of the symmetric splitting
PILOT_THINNING = 5  # steps
# Draws with 1.5 times the posterior variance leave the preconditioner as it is, since the variance
# of the gradients at them is as much larger.
_TARGET_SD_BIAS = 1.0
# In coordinates of a Hessian none are needed for them, but the noise at draws with 1.5 times the
# variance is twice that of the posterior.
_TARGET_SD_BIAS_OF_HESSIAN = 0.2
_MAX_STEPS_PER_CALL = 100
_MAX_NORMALS_PER_CALL = 2**25  # bounds memory: 256 MiB of normals, of this call and the next
LOST_STEP_FACTOR = 0.25  # of steps after a window whose chains were lost
_MAX_DISTANCE_SD = 1e3  # preconditioned distance from the center at which a chain counts as lost
# Variance of converged chains over that of the posterior, which noise may inflate 1.5-fold.
_MAX_VARIANCE_RATIO = 4.0
_NUM_CURVATURE_POSITIONS = 4  # bounds the gradients for the largest curvature
_NONFINITE_STEP_FACTOR = 0.5  # of steps after a window at whose mean the gradient is not finite
# Windows on larger minibatches: their number, row gradients of each, how much larger minibatches
# must be for them to run, and their step size relative to the others'.
_NUM_REFINED_WINDOWS, _MAX_REFINED_ROW_GRADIENTS = 4, 2**26
_MIN_REFINED_BATCH_SIZE_FACTOR, _REFINED_STEP_FACTOR = 4.0, 0.5
_R_HAT_SIGNIFICANCE = 0.01  # probability that the R-hat of exact chains exceeds its bound
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
    - **draws** - some draws of the last window and full-data gradients there, shape ``(2, m, d)``.
    - **coupling** - coupled coordinates, after :func:`refine_pilot`.
    - **log_mass_deficit** - log mass of the main mode minus that of this one, in nats.
    - **num_steps** - steps of a chain in all windows.
    - **keeps_fit** - whether windows keep center and coordinates, which are those of a fit. It is
      more accurate than the chains, whose bias grows with the number of groups.
    """

    preconditioner: Preconditioner
    q: np.ndarray
    is_converged: bool = False
    r_hat: float = np.inf
    window_medians: tuple[np.ndarray, ...] = ()
    is_distinct: bool = True
    draws: np.ndarray | None = None
    coupling: Coupling = NO_COUPLING
    log_mass_deficit: float = 0.0
    num_steps: int = 0
    keeps_fit: bool = False

    @property
    def positions(self) -> np.ndarray:
        """The last positions in model coordinates, shape ``(n, d)``."""
        return np.asarray(self.preconditioner.to_position(self.q))

    def move_to(self, preconditioner: Preconditioner, positions: np.ndarray) -> PilotResult:
        """Return these chains at other positions and in other coordinates."""
        q = preconditioner.from_position(positions)
        return replace(self, preconditioner=preconditioner, q=q)

    @property
    def center(self) -> np.ndarray:
        """The median chain mean of the last window, shape ``(d,)``."""
        return self.window_medians[-1] if self.window_medians else self.preconditioner.center


def run_pilot_windows(
    inputs: WarmupInputs,
    pilot: PilotResult,
    window_steps: Sequence[int],
    known_modes: Sequence[PilotResult] = (),
    is_distinct: Callable[[PilotResult, np.ndarray], bool] = lambda pilot, positions: True,
    stage: str = "pilot chains",
    max_step_size: float = MAX_PILOT_STEP_SIZE,
) -> PilotResult:
    """Run pilot chains of a model without local latents, window by window until they agree.

    :param window_steps: steps per chain of each window.
    :param known_modes: modes; chains that come to them are replaced by others.
    :param is_distinct: maps the result and the chains' last positions to whether they are in none
        of these; if not, no further window is run.
    :param stage: name of the stage in the display of the progress.
    :param max_step_size: step size for a standard normal.
    """
    num_chains = len(pilot.q)
    for num_steps in window_steps:
        inputs.progress.begin_stage(stage)
        estimator, step_size, noise_stats = _choose_pilot_step(inputs, pilot, max_step_size)
        draws = run_pilot(inputs, pilot, estimator, step_size, num_steps)
        pilot = replace(pilot, num_steps=pilot.num_steps + num_steps)
        survives = _find_surviving_chains(inputs, pilot.preconditioner, draws)
        if survives.sum() <= num_chains // 2:
            max_step_size *= LOST_STEP_FACTOR
            # Restart nearer to the center.
            pilot = replace(pilot, q=pilot.q / 2.0, keeps_fit=False)
            continue
        draws = draws if survives.all() else draws[survives]
        is_block_arrow = pilot.preconditioner.is_block_arrow
        if not is_block_arrow:  # whose effects take much memory
            draws = draws.astype(np.float64)
        if known_modes:
            last_positions = pilot.preconditioner.to_position(draws[:, -1])
            is_outside = find_chains_outside_modes(
                last_positions, [mode.positions for mode in known_modes]
            )
            draws = draws[is_outside] if is_outside.sum() > 1 else draws
        # Lost chains continue from copies of the others.
        last_q = draws[inputs.rng.choice(len(draws), num_chains), -1].astype(np.float64)
        last_q[: len(draws)] = draws[:, -1]
        last_positions = pilot.preconditioner.to_position(last_q)
        chain_means = draws.mean(1, dtype=np.float64)
        median = pilot.preconditioner.to_position(np.median(chain_means, axis=0))
        compared, max_r_hat = draws, MAX_CONVERGED_R_HAT
        time = draws.shape[1] * PILOT_THINNING * step_size
        num_independent = time / PILOT_DYNAMICS.relaxation_time(step_size)
        num_draws = len(draws) * num_independent
        if is_block_arrow:  # of thousands of effects some differ by chance
            compared = pilot.preconditioner.factor.layout.take_shared(draws).astype(np.float64)
        if pilot.preconditioner.is_common:
            max_r_hat = compute_max_r_hat(num_independent, len(draws), compared.shape[-1])
        within_variance = np.maximum(compared.var(1).mean(0), np.finfo(float).tiny)
        r_hat = float(compute_r_hat(compared.mean(1), within_variance).max())
        mean = compared.mean((0, 1))
        keeps_fit = pilot.keeps_fit and not is_covariance_off(compared, num_draws)
        is_centered = keeps_fit or np.abs(mean).max() < MAX_CENTER_SHIFT_SD
        if pilot.preconditioner.is_hessian_root:
            is_centered = is_root_centered(mean, num_draws)
        pilot = replace(
            pilot,
            is_converged=bool(r_hat < max_r_hat and is_centered),
            r_hat=r_hat,
            window_medians=(*pilot.window_medians, median),
            keeps_fit=keeps_fit,
        )
        if not is_distinct(pilot, last_positions):
            return replace(pilot.move_to(pilot.preconditioner, last_positions), is_distinct=False)
        if keeps_fit:
            pilot = pilot.move_to(pilot.preconditioner, last_positions)
            if pilot.is_converged:
                break
            continue
        updated = update_preconditioner(
            inputs, pilot.preconditioner, draws, noise_stats, pilot.is_converged, num_draws
        )
        if updated is None:
            max_step_size *= _NONFINITE_STEP_FACTOR
            pilot = replace(pilot, is_converged=False)
            continue
        pilot = replace(pilot.move_to(updated.preconditioner, last_positions), draws=updated.draws)
        is_wide = updated.min_variance_ratios > _MAX_VARIANCE_RATIO
        if pilot.is_converged and is_wide.any():
            # Chains that start hundreds of posterior SDs apart agree before they have relaxed.
            # The new coordinates are right all the same: restart in them, near the center.
            shrinkage = np.sqrt(np.where(is_wide, updated.min_variance_ratios, 1.0))
            pilot = replace(pilot, q=pilot.q / shrinkage, is_converged=False)
        if pilot.is_converged:
            break
    return pilot


def refine_pilot(inputs: WarmupInputs, pilot: PilotResult) -> PilotResult:
    """Run more windows with hardly any bias, if there are coupled coordinates.

    Pilot chains tolerate more noise than the chains of the run, so that they leave out positions of
    large curvature, such as large scales: preconditioner and noise would be those of the others.
    Minibatches are larger, and steps shorter, in these windows.
    """
    potential, budget, steps = inputs.potential, inputs.budget, inputs.budget.pilot_window_steps[-1]
    batch_size = sum(p.subsample_size for p in potential.plates)
    row_gradients = steps * budget.gradients_per_pilot_step * batch_size
    has_remote_rows = inputs.arguments.host_arrays or potential.shards is not None
    if (
        pilot.draws is None
        or not batch_size
        or has_remote_rows
        or _MIN_REFINED_BATCH_SIZE_FACTOR * row_gradients > _MAX_REFINED_ROW_GRADIENTS
        or find_coupling(pilot.draws[0], pilot.draws[1], pilot.preconditioner) is NO_COUPLING
    ):
        return pilot
    factor = _MAX_REFINED_ROW_GRADIENTS / row_gradients
    larger = potential.with_batch_sizes(scale_batch_sizes(potential.plates, factor))
    inputs, refined, coupling = replace(inputs, potential=larger), pilot, NO_COUPLING
    draws: list[np.ndarray] = []
    for _ in range(_NUM_REFINED_WINDOWS):
        refined = run_pilot_windows(
            inputs, refined, [steps], max_step_size=_REFINED_STEP_FACTOR * MAX_PILOT_STEP_SIZE
        )
        draws += [] if refined.draws is None else [refined.draws]
    if len(draws) > 1:
        positions, gradients = np.concatenate(draws[1:], 1)  # in the first window chains moved
        coupling = find_coupling(positions, gradients, refined.preconditioner)
    return replace(
        refined,
        is_converged=pilot.is_converged or refined.is_converged,
        r_hat=min(pilot.r_hat, refined.r_hat),
        coupling=coupling,
    )


def build_preconditioner_from_fit(inputs: WarmupInputs, fit: MeanField) -> Preconditioner:
    """Return coordinates in which a fit is standard normal, or with the user's mass matrix."""
    settings, matrix = inputs.settings, inputs.settings.inverse_mass_matrix
    factor = np.diag(fit.sd) if settings.is_dense else fit.sd
    factor = factor if matrix is None else factorize_covariance(matrix)
    return Preconditioner(fit.mean, factor, inputs.batched_gradients.full_gradient(fit.mean))


def init_pilot(inputs: WarmupInputs, preconditioner: Preconditioner, fit: MeanField) -> PilotResult:
    """Return pilot chains at initial positions that are sampled with the SDs of a fit."""
    normals = inputs.rng.standard_normal((inputs.budget.num_pilot_chains, inputs.potential.dim))
    return PilotResult(preconditioner, preconditioner.solve(fit.sd * normals))


def init_standard_pilot(inputs: WarmupInputs, preconditioner: Preconditioner) -> PilotResult:
    """Return pilot chains at initial positions that are standard normal in their coordinates."""
    shape = inputs.budget.num_pilot_chains, inputs.potential.dim
    return PilotResult(preconditioner, inputs.rng.standard_normal(shape))


def _choose_pilot_step(
    inputs: WarmupInputs, pilot: PilotResult, max_step_size: float
) -> tuple[GradientEstimator, float, GradientNoiseStats]:
    """Choose minibatch gradients or control variates, whichever allow the longer step.

    :return: estimator, step size, and noise of the control variates if there are any.
    """
    preconditioner = pilot.preconditioner
    has_hessian = preconditioner.reference_hessian is not None or preconditioner.is_hessian_root
    control_variate = SecondOrderControlVariate() if has_hessian else ControlVariate()
    estimators: tuple[GradientEstimator, ...] = (MinibatchGradient(), control_variate)
    if inputs.potential.is_stochastic:
        estimators = (MinibatchGradient(),)
    bulk = BulkPositions(inputs.batched_gradients, preconditioner, pilot.q)
    noise_stats = measure_noise(bulk, estimators, IIDSubsampling(), inputs.rng)
    max_curvature = estimate_max_curvature(
        replace(bulk, q=pilot.q[:_NUM_CURVATURE_POSITIONS]), inputs.rng
    )
    target = _TARGET_SD_BIAS_OF_HESSIAN if preconditioner.is_hessian_root else _TARGET_SD_BIAS
    limit = NoiseLimit(PILOT_DYNAMICS, max_step_size, max_curvature, target)
    step_sizes = {e: limit.limit_step_size(noise_stats[e])[0] for e in estimators}
    estimator = max(estimators, key=lambda e: (step_sizes[e], e.needs_reference))
    return estimator, step_sizes[estimator], noise_stats[estimators[-1]]


def _find_surviving_chains(
    inputs: WarmupInputs, preconditioner: Preconditioner, draws: np.ndarray
) -> np.ndarray:
    """Return which chains neither diverged nor ended where the density is zero, shape ``(n,)``."""
    survives = np.isfinite(draws).all((1, 2)) & (np.abs(draws).max((1, 2)) < _MAX_DISTANCE_SD)
    last_q = np.where(survives[:, None], draws[:, -1], 0.0)
    potentials, _ = inputs.batched_gradients.evaluate_on_subset(
        preconditioner.to_position(last_q.astype(np.float64))
    )
    return np.asarray(survives & np.isfinite(potentials))


def compute_r_hat(chain_means: np.ndarray, within_variance: np.ndarray) -> np.ndarray:
    r"""Return R-hat of each coordinate, :math:`\sqrt{1 + B/W}`, shape ``(d,)``.

    :param chain_means: means of the chains, whose variance is B, shape ``(n, d)``.
    :param within_variance: mean W of the chains' variances, shape ``(d,)``.
    """
    return np.asarray(np.sqrt(1.0 + chain_means.var(0, ddof=1) / within_variance))


def compute_max_r_hat(num_draws: float, num_chains: int, num_coordinates: int) -> float:
    """Return the R-hat below which chains count as converged.

    It is 1.1, or the largest of so many coordinates that exact chains exceed with a probability of
    1%: the F distribution is that of normal draws.

    :param num_draws: independent draws of each chain, by the relaxation time of a standard normal.
    """
    num_draws = max(num_draws, 2.0)
    degrees_of_freedom = num_chains - 1, num_chains * (num_draws - 1.0)
    probability = 1.0 - _R_HAT_SIGNIFICANCE / num_coordinates
    quantile = stats.f.ppf(probability, *degrees_of_freedom)
    return max(MAX_CONVERGED_R_HAT, float(np.sqrt(1.0 + quantile / num_draws)))


def find_separated_coordinates(positions: np.ndarray, other_positions: np.ndarray) -> np.ndarray:
    """Return the coordinates in which most of two groups of draws do not overlap.

    Some chains cross a low barrier: the outer eighth of ``positions`` and three eighths of
    ``other_positions`` at either end are left out.
    """
    positions, other_positions = _trim_and_sort(positions, 1), _trim_and_sort(other_positions, 3)
    gap = np.maximum(
        positions.min(0) - other_positions.max(0), other_positions.min(0) - positions.max(0)
    )
    return np.flatnonzero(gap > _MIN_SEPARATION_SD * (positions.std(0) + other_positions.std(0)))


def find_chains_outside_modes(
    last_positions: np.ndarray, mode_positions: Sequence[np.ndarray]
) -> np.ndarray:
    """Return which chains are in none of the modes with these draws, shape ``(n,)``."""
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
    inputs: WarmupInputs,
    pilot: PilotResult,
    estimator: GradientEstimator,
    step_size: float,
    num_steps: int,
    max_normals_per_call: int = _MAX_NORMALS_PER_CALL,
) -> np.ndarray:
    """Run chains by the symmetric splitting on iid minibatches.

    :param estimator: gradient estimator; a control variate is of second order where the
        preconditioner has a reference Hessian.
    :param num_steps: steps per chain, rounded up to whole calls (100 steps, fewer in high
        dimension); the first half is discarded.
    :return: preconditioned draws, every fifth step, shape ``(num_chains, num_draws, d)`` with about
        ``num_steps // 10`` draws.
    """
    rng, potential = inputs.rng, inputs.batched_gradients.step_potential
    preconditioner = pilot.preconditioner.cast(potential.dtype)
    num_chains, dim = pilot.q.shape
    q, p = inputs.cast(pilot.q), inputs.cast(rng.standard_normal(pilot.q.shape))
    state, draws = UnderdampedState(q, p), []
    steps_per_call = _choose_steps_per_call(num_steps, num_chains, dim, max_normals_per_call)
    num_calls = -(-num_steps // steps_per_call)

    def draw_step_inputs(call: int) -> tuple[Any, Any, Any]:
        shape = (steps_per_call, _PILOT_STEP.num_noise, num_chains, dim)
        normals = _draw_normals(rng, shape, potential.dtype)
        keys = random.split(random.key(call), steps_per_call) if potential.is_stochastic else None
        indices = sample_minibatch_indices(potential, rng, (steps_per_call,), IIDSubsampling())
        return indices, normals, keys

    step_inputs = draw_step_inputs(0)
    for call in range(num_calls):
        state, positions = _run_pilot_steps(
            potential,
            inputs.arguments,
            preconditioner,
            state,
            inputs.cast(step_size),
            inputs.cast(float(estimator.needs_reference)),
            step_inputs,
        )
        if call + 1 < num_calls:  # while the device runs
            step_inputs = draw_step_inputs(call + 1)
        positions = np.asarray(positions)  # waits, so that two calls' normals are in memory
        inputs.progress.advance(steps_per_call * (num_chains + 1))
        if call >= num_calls // 2:
            draws.append(np.moveaxis(positions, 0, 1))
    return np.concatenate(draws, axis=1)


def _draw_normals(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return standard normal numbers, by NumPy for a CPU, where it is faster than JAX."""
    if jax.default_backend() == "cpu":
        return rng.standard_normal(shape, np.float32).astype(dtype, copy=False)
    return random.normal(random.key(int(rng.integers(2**31))), shape, dtype)


def precompile_pilot(inputs: WarmupInputs, preconditioner: Preconditioner | None = None) -> None:
    """Start to compile :func:`run_pilot` for the first window.

    :param preconditioner: by default one without a low-rank factor.
    """
    potential, settings, budget = inputs.potential, inputs.settings, inputs.budget
    matrix, dim, num_chains = settings.inverse_mass_matrix, potential.dim, budget.num_pilot_chains
    is_dense = settings.is_dense if matrix is None else matrix.ndim == 2
    steps = _choose_steps_per_call(budget.pilot_window_steps[0], num_chains, dim)

    def shaped(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, potential.dtype)

    indices = {
        p.name: jax.ShapeDtypeStruct((steps, p.subsample_size), np.int32) for p in potential.plates
    }
    keys = random.split(random.key(0), steps) if potential.is_stochastic else None
    if preconditioner is None:
        factor = shaped(dim, dim) if is_dense else shaped(dim)
        preconditioner = Preconditioner(shaped(dim), factor, shaped(dim))
    else:
        preconditioner = preconditioner.cast(potential.dtype)
    aot_compile(
        _run_pilot_steps,
        potential,
        inputs.arguments,
        preconditioner,
        UnderdampedState(shaped(num_chains, dim), shaped(num_chains, dim)),
        shaped(),
        shaped(),
        (indices, shaped(steps, _PILOT_STEP.num_noise, num_chains, dim), keys),
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

    :param control_variate_weight: 1 for control variates, 0 for minibatch gradients.
    :param step_inputs: indices, normals ``(steps, num_noise, num_chains, d)`` and the model's keys.
    """

    def step(state: Any, xs: Any) -> tuple[Any, None]:
        indices, normals, key = xs

        def gradient(q: Array) -> Array:
            x = preconditioner.to_expansion(q)
            displacements = preconditioner.expansion_to_displacement(x)
            positions = jnp.concatenate(
                [preconditioner.center + displacements, preconditioner.center[None]]
            )
            gradients = jax.vmap(lambda x: potential.gradient_or_nan(x, indices, arguments, key))(
                positions
            )
            reference = preconditioner.reference_gradient - gradients[-1]
            hessian = preconditioner.reference_hessian
            if hessian is not None or preconditioner.is_hessian_root:
                minibatch = Minibatch(potential, indices, arguments, key)
                part = preconditioner.as_function_of_expansion(
                    partial(minibatch.part_gradient, hessian)
                )
                _, product = jax.linearize(part, jnp.zeros_like(preconditioner.center))
                is_block_arrow = isinstance(hessian, BlockArrowMatrix)
                limited = hessian.limit_displacement(x) if is_block_arrow else x
                reference -= jax.vmap(product)(limited)
                if is_block_arrow:
                    reference += hessian.expand(limited)
                    reference = hessian.subtract_second_order_of(part, reference, limited)
                elif hessian is not None:
                    reference += hessian @ x
            gradient = preconditioner.gradient_to_expansion(x, gradients[:-1])
            gradient = preconditioner.pull_back_expansion(
                q, gradient + control_variate_weight * reference
            )
            return gradient + control_variate_weight * q * preconditioner.is_hessian_root

        return _PILOT_STEP(state, step_size, gradient, normals), None

    def run_thinned(state: Any, xs: Any) -> tuple[Any, Array]:
        state, _ = lax.scan(step, state, xs)
        return state, state.position

    grouped = jax.tree.map(lambda x: x.reshape(-1, PILOT_THINNING, *x.shape[1:]), step_inputs)
    return lax.scan(run_thinned, state, grouped)
