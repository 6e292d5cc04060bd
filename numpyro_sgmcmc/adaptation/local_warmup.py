"""The warm-up of models with local latent variables inside the subsampled plate.

The joint mode of globals and local latents is not typical of the posterior: where a scale goes to
zero with all that it scales, the density is unbounded. Local latents are therefore always sampled,
never optimised:

1. The length scales of the local moves come from the curvature of each observation's potential.
2. Minibatch by minibatch, local latents are updated and Adam moves the globals. With local latents
   sampled, the mean of its gradient is that of the globals' marginal posterior (Fisher's identity).
3. A few sweeps over all local latents alternate with Newton steps of the globals given them (Monte
   Carlo EM), which do not depend on the scale of the coordinates.
4. Pilot chains over globals and local latents run until the mean of the globals stays; the center
   of the preconditioner moves there.
5. The mean Hessian of the globals given the local latents, over the last positions of the pilot
   chains, is the preconditioner: a step moves the globals with the local latents fixed, and can be
   no longer than that allows. The ratio of the posterior covariance to its inverse is the number of
   epochs between independent draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax, random

from numpyro_sgmcmc.adaptation.batched_gradients import (
    BatchedGradients,
    BulkPositions,
    JittedPotential,
    assemble_hessian,
    sample_minibatch_indices,
)
from numpyro_sgmcmc.adaptation.gradient_noise import (
    estimate_max_curvature,
    measure_noise_by_subsampling,
)
from numpyro_sgmcmc.adaptation.initialisation import (
    check_finite_gradient,
    create_warmup_rng,
    find_finite_positions,
)
from numpyro_sgmcmc.adaptation.pilot import (
    MAX_PILOT_STEP_SIZE,
    PILOT_DYNAMICS,
    PILOT_TARGET_SD_BIAS,
    PILOT_THINNING,
    PilotResult,
    WindowStatus,
    run_windows,
)
from numpyro_sgmcmc.adaptation.preconditioning import (
    factor_from_curvature,
    factorize_covariance,
    factorize_spd,
)
from numpyro_sgmcmc.adaptation.settings import Adaptation, LocalLatentsInit, WarmupInputs
from numpyro_sgmcmc.adaptation.step_size import MAX_NUM_STEPS, NoiseLimit
from numpyro_sgmcmc.adaptation.subsampling_choice import (
    choose_estimator,
    list_candidates,
)
from numpyro_sgmcmc.adaptation.warmup import (
    adapt_to_mode,
    build_adaptation_from_settings,
    combine_modes,
    create_batched_gradients,
)
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import ContiguousSubsampling, Indices
from numpyro_sgmcmc.errors import InitializationError, LocalLatentsWarning, warn_user
from numpyro_sgmcmc.model.gradient_estimators import (
    GradientEstimator,
    MinibatchGradient,
    make_gradient_fn,
)
from numpyro_sgmcmc.model.local_latents import LocalValues, with_local_values
from numpyro_sgmcmc.model.local_moves import (
    LocalLatentsState,
    compute_local_hessian_diagonal,
    init_local_values,
    map_over_row_chunks,
    sweep_local_values,
    update_minibatch_locals,
)
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.model.validation import check_conditional_independence

_MAX_HESSIAN_DIM = 200  # bounds the cost of a Hessian where no dense mass matrix is adapted

# Length scales of the local moves: rounds from curvature and as many from acceptance rates, and the
# local updates in each.
_NUM_LOCAL_SCALE_ROUNDS, _NUM_UPDATES_PER_SWEEP = 8, 4
_TARGET_ACCEPT_PROB = 0.8  # of local moves, as in NUTS

# Adam: steps, at least so many and so many epochs, with a cosine decay of the learning rate.
_MIN_ADAM_STEPS, _MIN_ADAM_EPOCHS = 1_000, 3
_INIT_LEARNING_RATE, _FINAL_LEARNING_RATE = 0.1, 0.003

# Monte Carlo EM: Newton steps, and their longest root mean square in preconditioned coordinates.
_NUM_NEWTON_STEPS, _MAX_NEWTON_STEP_RMS = 10, 3.0

# Pilot chains: the first window takes so many steps and epochs at least, later ones up to four
# times as many.
_NUM_PILOT_CHAINS = 4
_INIT_PILOT_SD = 0.3  # of the initial positions, in preconditioned coordinates
_MIN_WINDOW_STEPS, _MIN_WINDOW_EPOCHS, _MAX_WINDOW_LENGTH_RATIO = 500, 4, 4
_MIN_NUM_WINDOWS, _MAX_NUM_WINDOWS = 3, 8
_MAX_CENTER_SHIFT_SD = 0.5  # largest mean of converged chains, in posterior SDs
_MAX_DISTANCE_SD = 1e4  # preconditioned distance from the center at which chains count as lost
_STEPS_PER_CALL = 500
_NUM_NOISE_POSITIONS = 16  # at which the gradient noise is measured after the last window

_MAX_EPOCHS_PER_DRAW = 20  # bounds the steps per draw
_MAX_SILENT_STEPS_PER_DRAW = 4 * MAX_NUM_STEPS  # beyond, a larger batch size is recommended

_PILOT_STEP = PILOT_DYNAMICS.make_step("symmetric")


class _KeyStream:
    """Random keys, one after the other, for the compiled functions of one warm-up."""

    def __init__(self) -> None:
        self._key = random.key(0)

    def next(self) -> Array:
        """Return the next key."""
        self._key, key = random.split(self._key)
        return key


@dataclass(frozen=True)
class ConditionalPosterior:
    """The posterior of the globals given local latents.

    - **inputs** - inputs of the warm-up, whose arguments contain the local values.
    """

    inputs: WarmupInputs

    @classmethod
    def create(cls, inputs: WarmupInputs, local_values: LocalValues) -> ConditionalPosterior:
        """Condition on local values.

        :param inputs: inputs whose arguments contain none.
        """
        return cls(inputs.with_arguments(with_local_values(inputs.arguments, local_values)))

    @cached_property
    def batched_gradients(self) -> BatchedGradients:
        """Gradients on minibatches."""
        return create_batched_gradients(self.inputs)

    def build_preconditioner(self, center: np.ndarray, factor: np.ndarray) -> Preconditioner:
        """Return coordinates about a position, with the full-data gradient there."""
        return Preconditioner(center, factor, self.batched_gradients.full_gradient(center))

    def factor_from_curvature(self, position: np.ndarray) -> np.ndarray:
        """Return the factor of the preconditioner from the full-data Hessian, or its diagonal."""
        inputs, settings = self.inputs, self.inputs.settings
        potential = JittedPotential(inputs.potential, inputs.arguments)
        hessian = None
        if inputs.potential.dim <= _MAX_HESSIAN_DIM:
            _, _, hessian = potential.value_grad_hessian(position)
        elif settings.is_dense:
            hessian = assemble_hessian(potential, position)
        return factor_from_curvature(
            hessian,
            settings.mass_matrix_mask,
            settings.is_dense,
            JittedPotential.from_random_subset(inputs.potential, inputs.arguments),
            position,
        )

    def initial_preconditioner(self, position: np.ndarray) -> Preconditioner:
        """Return coordinates from the curvature at a position, or with the user's mass matrix."""
        matrix = self.inputs.settings.inverse_mass_matrix
        factor = (
            self.factor_from_curvature(position) if matrix is None else factorize_covariance(matrix)
        )
        return self.build_preconditioner(position, factor)


def warm_up_locals(inputs: WarmupInputs, init_positions: Iterable[np.ndarray]) -> Adaptation:
    """Run all stages of the warm-up.

    :param inputs: inputs whose arguments contain no local values.
    :param init_positions: positions of the globals, of which the first finite one is taken.
    """
    rng, keys = create_warmup_rng(), _KeyStream()
    potential, arguments = inputs.potential, inputs.arguments
    inputs.progress.begin_stage("local latents")
    (position,) = find_finite_positions(inputs, create_batched_gradients(inputs), init_positions, 1)
    local_values = init_local_values(potential, arguments, inputs.cast(position))
    check_conditional_independence(potential, arguments, inputs.cast(position), local_values)
    local_state = _adapt_local_scale(inputs, position, local_values, keys)
    if inputs.is_fully_specified:
        return _adapt_to_user_settings(inputs, position, local_state)
    position, local_state = _run_adam(inputs, position, local_state, rng, keys)
    inputs.progress.begin_stage("curvature")
    position, local_state = _run_monte_carlo_em(inputs, position, local_state, keys)
    local_state = _adapt_local_scale(inputs, position, local_state.values, keys)
    pilot, last_window = _run_local_pilot(inputs, position, local_state, rng, keys)
    q, covariance = _summarize_last_window(pilot.preconditioner, last_window.positions, rng)

    inputs.progress.begin_stage("gradient noise")
    posterior = ConditionalPosterior.create(inputs, last_window.get_local_values(0))
    pilot = PilotResult(pilot.preconditioner, q, is_converged=True, r_hat=1.0)
    mode = adapt_to_mode(
        posterior.inputs, posterior.batched_gradients, list_candidates(inputs), pilot, True, rng
    )
    adaptation = combine_modes(inputs, pilot, mode, (), has_dominant_mode=True)
    num_steps = _choose_num_local_steps(inputs, adaptation, covariance)
    return adaptation._replace(
        # Gradients that count are evenly distributed in an iteration.
        num_steps=num_steps + -num_steps % max(1, adaptation.monitor_gradients.interval),
        local_init=LocalLatentsInit(
            last_window.local_state.values,
            last_window.local_state.scale,
            inputs.cast(factorize_covariance(covariance)),
        ),
    )


def _adapt_to_user_settings(
    inputs: WarmupInputs, position: np.ndarray, local_state: LocalLatentsState
) -> Adaptation:
    """Return the user's settings, with local latents for an initial position of the globals."""
    posterior = ConditionalPosterior.create(inputs, local_state.values)
    adaptation = build_adaptation_from_settings(
        posterior.inputs, posterior.batched_gradients, position
    )
    values = jax.tree.map(lambda x: x[None], local_state.values)
    covariance_factor = jnp.ones(position.shape, inputs.potential.dtype)
    return adaptation._replace(
        local_init=LocalLatentsInit(values, local_state.scale, covariance_factor)
    )


def _num_batches_per_epoch(inputs: WarmupInputs) -> int:
    """Return the number of minibatches that contain all observations."""
    assert inputs.potential.local_latents is not None
    plate = inputs.potential.local_latents.plate
    return -(-plate.size // plate.subsample_size)


def _adapt_local_scale(
    inputs: WarmupInputs, position: np.ndarray, local_values: LocalValues, keys: _KeyStream
) -> LocalLatentsState:
    """Adapt the length scales of the local moves: by curvature, then by acceptance rates."""
    potential, arguments = inputs.potential, inputs.arguments
    global_position = inputs.cast(position)
    mean_accept_prob = jnp.ones((), potential.dtype)
    state = LocalLatentsState(
        local_values, jnp.ones_like(local_values.hmc_position), mean_accept_prob
    )
    if not local_values.hmc_position.size:
        return state
    curvature_sum = jnp.zeros_like(local_values.hmc_position)
    for n in range(_NUM_LOCAL_SCALE_ROUNDS):
        curvature_key, sweep_key = keys.next(), keys.next()
        curvature_sum += compute_abs_local_hessian_diagonal(
            potential, global_position, state.values, arguments, curvature_key
        )
        state = state._replace(scale=jnp.sqrt((n + 1) / curvature_sum))
        local_values, _ = jitted_sweep_local_values(
            potential, global_position, state, arguments, sweep_key, _NUM_UPDATES_PER_SWEEP
        )
        state = state._replace(values=local_values)
    for _ in range(_NUM_LOCAL_SCALE_ROUNDS):
        local_values, accept_prob = jitted_sweep_local_values(
            potential, global_position, state, arguments, keys.next(), _NUM_UPDATES_PER_SWEEP
        )
        factor = jnp.exp(jnp.minimum(accept_prob - _TARGET_ACCEPT_PROB, 0.0))
        state = state._replace(values=local_values, scale=state.scale * factor[:, None])
    return state


def _run_adam(
    inputs: WarmupInputs,
    position: np.ndarray,
    local_state: LocalLatentsState,
    rng: np.random.Generator,
    keys: _KeyStream,
) -> tuple[np.ndarray, LocalLatentsState]:
    """Move the globals to the bulk of their marginal posterior, with local latents sampled."""
    num_steps = max(_MIN_ADAM_STEPS, _MIN_ADAM_EPOCHS * _num_batches_per_epoch(inputs))
    indices = sample_minibatch_indices(inputs.potential, rng, (num_steps,), ContiguousSubsampling())
    global_position, local_state = optimize_globals(
        inputs.potential,
        inputs.arguments,
        inputs.cast(position),
        local_state,
        jax.tree.map(jnp.asarray, dict(indices)),
        keys.next(),
    )
    optimum = np.asarray(global_position, np.float64)
    return (optimum if np.isfinite(optimum).all() else position), local_state


def _run_monte_carlo_em(
    inputs: WarmupInputs, position: np.ndarray, local_state: LocalLatentsState, keys: _KeyStream
) -> tuple[np.ndarray, LocalLatentsState]:
    """Alternate Newton steps of the globals with sweeps over the local latents."""
    for _ in range(_NUM_NEWTON_STEPS):
        posterior = ConditionalPosterior.create(inputs, local_state.values)
        preconditioner = posterior.initial_preconditioner(position)
        check_finite_gradient(posterior.inputs, preconditioner)
        step = preconditioner.apply_transpose(preconditioner.reference_gradient)
        step *= min(1.0, _MAX_NEWTON_STEP_RMS * math.sqrt(step.size) / np.linalg.norm(step))
        position = position - preconditioner.apply(step)
        local_values, _ = jitted_sweep_local_values(
            inputs.potential,
            inputs.cast(position),
            local_state,
            inputs.arguments,
            keys.next(),
            _NUM_UPDATES_PER_SWEEP,
        )
        local_state = local_state._replace(values=local_values)
    return position, local_state


@dataclass(frozen=True)
class _LocalWindow:
    """Local latents and globals after a window of pilot chains.

    - **local_state** - local values of each chain, and the scales of their moves.
    - **positions** - positions of the globals in the window, shape ``(n, d)``; None before the
      first.
    """

    local_state: LocalLatentsState
    positions: np.ndarray | None = None

    def get_local_values(self, chain: int) -> LocalValues:
        """Return one chain's local values."""
        return jax.tree.map(lambda x: x[chain], self.local_state.values)


def _run_local_pilot(
    inputs: WarmupInputs,
    position: np.ndarray,
    local_state: LocalLatentsState,
    rng: np.random.Generator,
    keys: _KeyStream,
) -> tuple[PilotResult, _LocalWindow]:
    """Run windows of pilot chains until the mean of the globals stays.

    :param position: initial position of the globals.
    :param local_state: local values from which all chains start.
    """
    settings, dim = inputs.settings, inputs.potential.dim
    estimators = list_candidates(inputs).estimators
    min_window_steps = max(_MIN_WINDOW_STEPS, _MIN_WINDOW_EPOCHS * _num_batches_per_epoch(inputs))
    last_window = _LocalWindow(
        local_state._replace(
            values=jax.tree.map(
                lambda x: jnp.broadcast_to(x, (_NUM_PILOT_CHAINS, *x.shape)), local_state.values
            )
        )
    )

    def run_window(
        pilot: PilotResult, step_divisor: float, window: int
    ) -> tuple[PilotResult, WindowStatus]:
        nonlocal last_window
        preconditioner = pilot.preconditioner
        noise_q = np.concatenate([pilot.q, rng.standard_normal((_NUM_PILOT_CHAINS, dim))])
        posterior = ConditionalPosterior.create(inputs, last_window.get_local_values(0))
        bulk = BulkPositions(posterior.batched_gradients, preconditioner, noise_q)
        _, noise = measure_noise_by_subsampling(bulk, estimators, rng)
        max_curvature = estimate_max_curvature(replace(bulk, q=pilot.q), rng)
        limit = NoiseLimit(
            PILOT_DYNAMICS, MAX_PILOT_STEP_SIZE / step_divisor, max_curvature, PILOT_TARGET_SD_BIAS
        )
        choice = choose_estimator(estimators, ContiguousSubsampling(), noise, limit)
        inputs.progress.begin_stage("pilot chains")
        draws, next_local_state = _run_local_chains(
            inputs,
            preconditioner,
            last_window,
            pilot.q,
            choice.step_size,
            min(window + 1, _MAX_WINDOW_LENGTH_RATIO) * min_window_steps,
            choice.estimator,
            rng,
            keys,
        )
        if not (np.isfinite(draws).all() and np.abs(draws).max() < _MAX_DISTANCE_SD):
            return pilot, WindowStatus.CHAINS_LOST
        flat = draws.reshape(-1, dim)
        mean = flat.mean(0)
        is_converged = bool((np.abs(mean) < _MAX_CENTER_SHIFT_SD * flat.std(0)).all())
        last_positions = preconditioner.to_position(draws[:, -1])
        center = preconditioner.to_position(mean)
        last_window = _LocalWindow(next_local_state, preconditioner.to_position(flat))
        factor = preconditioner.factor
        if settings.inverse_mass_matrix is None:
            factor = _factor_from_mean_curvature(inputs, last_positions, last_window)
        posterior = ConditionalPosterior.create(inputs, last_window.get_local_values(0))
        updated = posterior.build_preconditioner(center, factor)
        pilot = replace(pilot, preconditioner=updated, q=updated.solve(last_positions - center))
        is_last = is_converged and window + 1 >= _MIN_NUM_WINDOWS
        return pilot, WindowStatus.FINISHED if is_last else WindowStatus.CONTINUE

    posterior = ConditionalPosterior.create(inputs, local_state.values)
    preconditioner = posterior.initial_preconditioner(position)
    q = _INIT_PILOT_SD * rng.standard_normal((_NUM_PILOT_CHAINS, dim))
    pilot = run_windows(run_window, PilotResult(preconditioner, q), _MAX_NUM_WINDOWS)
    if last_window.positions is None:
        raise InitializationError(
            "The pilot chains diverged from every initial position.",
            "check that the posterior is proper; pass other `init_params` or a larger "
            "`subsample_size`.",
            "pilot-chains-diverge",
        )
    return pilot, last_window


def _summarize_last_window(
    preconditioner: Preconditioner, positions: np.ndarray | None, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return some draws of the globals, shape ``(16, d)``, and their covariance or its diagonal.

    :param positions: draws in model coordinates; those returned are preconditioned.
    """
    assert positions is not None
    q = preconditioner.solve(positions - preconditioner.center)
    dim = q.shape[1]
    covariance = np.cov(q, rowvar=False).reshape(dim, dim) if preconditioner.is_dense else q.var(0)
    return q[rng.choice(len(q), _NUM_NOISE_POSITIONS)], covariance


def _factor_from_mean_curvature(
    inputs: WarmupInputs, positions: np.ndarray, window: _LocalWindow
) -> np.ndarray:
    """Return the factor from the mean curvature over the chains, each given its local latents."""
    precisions = []
    for chain, position in enumerate(positions):
        posterior = ConditionalPosterior.create(inputs, window.get_local_values(chain))
        factor = posterior.factor_from_curvature(position)
        if factor.ndim == 1:
            precisions.append(1.0 / np.square(factor))
        else:
            inverse = np.linalg.inv(factor)
            precisions.append(inverse.T @ inverse)
    mean = np.mean(precisions, 0)
    return 1.0 / np.sqrt(mean) if mean.ndim == 1 else factorize_spd(mean, inverse=True)


def _run_local_chains(
    inputs: WarmupInputs,
    preconditioner: Preconditioner,
    window: _LocalWindow,
    init_q: np.ndarray,
    step_size: float,
    num_steps: int,
    estimator: GradientEstimator,
    rng: np.random.Generator,
    keys: _KeyStream,
) -> tuple[np.ndarray, LocalLatentsState]:
    """Run pilot chains over globals and local latents.

    :param window: local values at the start.
    :param init_q: initial preconditioned positions, shape ``(num_chains, d)``.
    :return: preconditioned draws of the globals, the first half discarded, shape
        ``(num_chains, num_draws, d)``, and the local latents at the end.
    """
    potential, local_state = inputs.potential, window.local_state
    reference_gradients = np.stack(
        [
            JittedPotential(
                potential, with_local_values(inputs.arguments, window.get_local_values(chain))
            ).gradient(preconditioner.center)
            for chain in range(_NUM_PILOT_CHAINS)
        ]
    )
    q = inputs.cast(init_q)
    dynamics_state = PILOT_DYNAMICS.State(q, inputs.cast(rng.standard_normal(q.shape)))
    carry = dynamics_state, local_state.values, inputs.cast(reference_gradients)
    draws = []
    for _ in range(-(-num_steps // _STEPS_PER_CALL)):
        indices = sample_minibatch_indices(
            potential, rng, (_NUM_PILOT_CHAINS, _STEPS_PER_CALL), ContiguousSubsampling()
        )
        carry, positions = _run_local_pilot_steps(
            potential,
            inputs.arguments,
            preconditioner.cast(potential.dtype),
            carry,
            local_state.scale,
            jnp.asarray(step_size, potential.dtype),
            jax.tree.map(jnp.asarray, dict(indices)),
            random.split(keys.next(), _NUM_PILOT_CHAINS),
            estimator,
        )
        draws.append(np.asarray(positions, np.float64))
    last_state = local_state._replace(values=carry[1])
    return np.concatenate(draws[len(draws) // 2 :], axis=1), last_state


def _choose_num_local_steps(
    inputs: WarmupInputs, adaptation: Adaptation, covariance: np.ndarray
) -> int:
    """Choose the steps per draw, so that globals and local latents decorrelate.

    :param covariance: posterior covariance of the globals relative to that given local latents.
    """
    if inputs.settings.num_steps is not None:
        return inputs.settings.num_steps
    batches_per_epoch = _num_batches_per_epoch(inputs)
    largest = covariance.max() if covariance.ndim == 1 else np.linalg.eigvalsh(covariance).max()
    num_epochs = min(max(1.0, 2.0 * float(largest)), _MAX_EPOCHS_PER_DRAW)
    max_num_steps = max(MAX_NUM_STEPS, _MAX_EPOCHS_PER_DRAW * batches_per_epoch)
    num_steps = min(
        max(adaptation.num_steps, math.ceil(num_epochs * batches_per_epoch)), max_num_steps
    )
    if num_steps > _MAX_SILENT_STEPS_PER_DRAW:
        warn_user(
            f"A draw takes {num_steps} steps, in which each local latent is updated "
            f"{num_steps / batches_per_epoch:.2g} times.",
            LocalLatentsWarning,
            "use a larger subsample_size, or set `num_steps`.",
            "local-steps-per-draw",
        )
    return num_steps


jitted_sweep_local_values = jax.jit(
    sweep_local_values, static_argnames=("potential", "num_updates")
)


@partial(jax.jit, static_argnames="potential")
def compute_abs_local_hessian_diagonal(
    potential: Potential,
    global_position: Array,
    local_values: LocalValues,
    arguments: Arguments,
    rng_key: Array,
) -> Array:
    """Return the absolute local curvature of all observations, bounded below; shape ``(N, k)``.

    Values that are not finite are replaced by the median over observations; none is below 1% of it.
    """
    curvature = map_over_row_chunks(
        lambda rows, key: compute_local_hessian_diagonal(
            potential, global_position, rows, local_values.take(rows), arguments
        ),
        local_values.hmc_position.shape[0],
        rng_key,
    )
    curvature = jnp.where(jnp.isfinite(curvature), jnp.abs(curvature), jnp.nan)
    median = jnp.nan_to_num(jnp.nanmedian(curvature, axis=0), nan=1.0)
    curvature = jnp.where(jnp.isnan(curvature), median, curvature)
    return jnp.maximum(curvature, 1e-2 * jnp.maximum(median, 1e-12))


@partial(jax.jit, static_argnames="potential")
def optimize_globals(
    potential: Potential,
    arguments: Arguments,
    global_position: Array,
    local_state: LocalLatentsState,
    indices: Indices,
    rng_key: Array,
) -> tuple[Array, LocalLatentsState]:
    """Run Adam on the globals, with the minibatch's local latents updated before each step."""
    num_steps = next(iter(indices.values())).shape[0]
    learning_rate = optax.cosine_decay_schedule(
        _INIT_LEARNING_RATE, num_steps, _FINAL_LEARNING_RATE / _INIT_LEARNING_RATE
    )
    adam = optax.adam(learning_rate)

    def step(carry: Any, xs: Any) -> tuple[Any, None]:
        theta, adam_state, local_state = carry
        minibatch, key = xs
        local_state, _, arguments_with_locals = update_minibatch_locals(
            potential,
            local_state,
            theta,
            minibatch,
            arguments,
            theta,
            theta,
            MinibatchGradient(),
            key,
        )
        gradient = potential.gradient(theta, minibatch, arguments_with_locals)
        gradient = jnp.where(jnp.isfinite(gradient), gradient, 0.0)
        updates, adam_state = adam.update(gradient, adam_state, theta)
        return (optax.apply_updates(theta, updates), adam_state, local_state), None

    init = global_position, adam.init(global_position), local_state
    (global_position, _, local_state), _ = lax.scan(
        step, init, (indices, random.split(rng_key, num_steps))
    )
    return global_position, local_state


@partial(jax.jit, static_argnames=("potential", "estimator"))
def _run_local_pilot_steps(
    potential: Potential,
    arguments: Arguments,
    preconditioner: Preconditioner,
    carry: Any,
    local_scale: Array,
    step_size: Array,
    indices: Indices,
    rng_keys: Array,
    estimator: GradientEstimator,
) -> tuple[Any, Array]:
    """Run one call's steps of all pilot chains and return every fifth preconditioned position."""

    def run_chain(carry: Any, indices: Indices, rng_key: Array) -> tuple[Any, Array]:
        normals_key, local_key = random.split(rng_key)
        num_steps = next(iter(indices.values())).shape[0]
        normals = random.normal(
            normals_key, (num_steps, _PILOT_STEP.num_noise, potential.dim), potential.dtype
        )

        def step(carry: Any, xs: Any) -> tuple[Any, Array]:
            dynamics_state, local_values, reference_gradient = carry
            minibatch, normals, key = xs
            theta = preconditioner.to_position(dynamics_state.position)
            local_state = LocalLatentsState(
                local_values, local_scale, jnp.ones((), potential.dtype)
            )
            local_state, reference_gradient, arguments_with_locals = update_minibatch_locals(
                potential,
                local_state,
                theta,
                minibatch,
                arguments,
                preconditioner.center,
                reference_gradient,
                estimator,
                key,
            )
            reference = preconditioner._replace(reference_gradient=reference_gradient)
            gradient = make_gradient_fn(
                estimator, potential, arguments_with_locals, reference, minibatch
            )
            dynamics_state = _PILOT_STEP(dynamics_state, step_size, gradient, normals)
            carry = dynamics_state, local_state.values, reference_gradient
            return carry, dynamics_state.position

        xs = indices, normals, random.split(local_key, num_steps)
        carry, positions = lax.scan(step, carry, xs)
        return carry, positions[PILOT_THINNING - 1 :: PILOT_THINNING]

    return jax.vmap(run_chain)(carry, indices, rng_keys)
