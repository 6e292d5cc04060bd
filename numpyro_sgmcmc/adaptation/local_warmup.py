"""The warm-up of models with local latent variables that ``gibbs_fn`` samples.

The joint mode of globals and local latents is not typical of the posterior. Local latents are
therefore always sampled, never optimised:

1. Minibatch by minibatch, local latents are updated and Adam moves the globals. With local latents
   sampled, the mean of its gradient is that of the globals' marginal posterior (Fisher's identity).
2. A few sweeps over all local latents alternate with Newton steps of the globals given them (Monte
   Carlo EM), which do not depend on the scale of the coordinates.
3. Pilot chains over globals and local latents run until the mean of the globals stays; the center
   of the preconditioner moves there.
4. The mean Hessian of the globals given the local latents, over the last positions of the pilot
   chains, is the preconditioner: a step moves the globals with the local latents fixed, and can be
   no longer than that allows. The ratio of the posterior covariance to its inverse is the number of
   epochs between independent draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax, random

from numpyro_sgmcmc.adaptation.batched_gradients import (
    BulkPositions,
    JittedPotential,
    assemble_hessian,
    sample_minibatch_indices,
    sample_subset,
)
from numpyro_sgmcmc.adaptation.gradient_noise import (
    estimate_max_curvature,
    measure_noise_by_subsampling,
)
from numpyro_sgmcmc.adaptation.initialisation import check_finite_gradient, find_finite_positions
from numpyro_sgmcmc.adaptation.pilot import (
    LOST_STEP_FACTOR,
    MAX_PILOT_STEP_SIZE,
    PILOT_DYNAMICS,
    PILOT_THINNING,
    PilotResult,
)
from numpyro_sgmcmc.adaptation.preconditioning import (
    factor_from_curvature,
    factorize_covariance,
    factorize_spd,
)
from numpyro_sgmcmc.adaptation.settings import (
    Adaptation,
    LocalLatentsInit,
    SubsamplingChoice,
    WarmupInputs,
)
from numpyro_sgmcmc.adaptation.step_size import MAX_NUM_STEPS, NoiseLimit
from numpyro_sgmcmc.adaptation.subsampling_choice import choose_estimator, list_candidates
from numpyro_sgmcmc.adaptation.warmup import adapt_to_mode, build_adaptation_from_settings
from numpyro_sgmcmc.adaptation.warnings import issue_once
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import ContiguousSubsampling, Indices
from numpyro_sgmcmc.errors import InitializationError, LocalLatentsWarning, warn_user
from numpyro_sgmcmc.model.gradient_estimators import GradientEstimator, make_gradient_fn
from numpyro_sgmcmc.model.local_latents import LocalValues, with_local_values
from numpyro_sgmcmc.model.local_moves import (
    init_local_values,
    sweep_local_values,
    update_minibatch_locals,
    update_reference_gradient,
)
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.model.validation import check_conditional_independence

_MAX_HESSIAN_DIM = 200  # bounds the cost of a Hessian where no dense mass matrix is adapted

_NUM_UPDATES_PER_SWEEP = 4  # of all local values

# Adam: steps, at least so many and so many epochs, with a cosine decay of the learning rate.
_MIN_ADAM_STEPS, _MIN_ADAM_EPOCHS = 1_000, 3
_INIT_LEARNING_RATE, _FINAL_LEARNING_RATE = 0.1, 0.003

# Monte Carlo EM: Newton steps, and their longest root mean square in preconditioned coordinates.
_NUM_NEWTON_STEPS, _MAX_NEWTON_STEP_RMS = 10, 3.0

# Pilot chains: the first window takes so many steps and epochs at least, later ones up to four
# times as many.
_NUM_PILOT_CHAINS, _PILOT_TARGET_SD_BIAS = 4, 0.2
_INIT_PILOT_SD = 0.3  # of the initial positions, in preconditioned coordinates
_MIN_WINDOW_STEPS, _MIN_WINDOW_EPOCHS, _MAX_WINDOW_LENGTH_RATIO = 500, 4, 4
_MIN_NUM_WINDOWS, _MAX_NUM_WINDOWS = 3, 8
_MAX_CENTER_SHIFT_SD = 0.5  # largest mean of converged chains, in posterior SDs
_MAX_DISTANCE_SD = 1e4  # preconditioned distance from the center at which chains count as lost
_STEPS_PER_CALL = 500
_NUM_NOISE_POSITIONS = 16  # at which the gradient noise is measured after the last window

# Epochs per draw for each unit of the ratio of marginal to conditional variance, and their bound,
# which bounds the steps per draw.
_EPOCHS_PER_VARIANCE, _MAX_EPOCHS_PER_DRAW = 2.0, 20
_MAX_SILENT_STEPS_PER_DRAW = 4 * MAX_NUM_STEPS  # beyond, a larger batch size is recommended

_PILOT_STEP = PILOT_DYNAMICS.make_step("symmetric")


def warm_up_locals(inputs: WarmupInputs, init_positions: Iterable[np.ndarray]) -> Adaptation:
    """Run all stages of the warm-up.

    :param inputs: inputs whose arguments contain no local values.
    :param init_positions: positions of the globals, of which the first finite one is taken.
    """
    keys, potential, arguments = _iterate_keys(), inputs.potential, inputs.arguments
    inputs.progress.begin_stage("local latents")
    (position,) = find_finite_positions(inputs, init_positions, 1)
    values = init_local_values(potential, arguments, inputs.cast(position))
    check_conditional_independence(
        potential, with_local_values(arguments, values), inputs.cast(position)
    )
    values = _sweep(inputs, position, values, keys)
    if inputs.is_fully_specified:
        adaptation = build_adaptation_from_settings(_condition(inputs, values), position)
        covariance_factor = jnp.ones(position.shape, potential.dtype)
        local_init = LocalLatentsInit(jax.tree.map(lambda x: x[None], values), covariance_factor)
        return adaptation._replace(local_init=local_init)
    position, values = _run_adam(inputs, position, values, keys)
    position, values = _run_monte_carlo_em(inputs, position, values, keys)
    preconditioner, values, positions = _run_local_pilot(inputs, position, values, keys)

    inputs.progress.begin_stage("gradient noise")
    q = preconditioner.solve(positions - preconditioner.center)
    covariance = _compute_covariance(preconditioner, positions)
    noise_q = q[inputs.rng.choice(len(q), _NUM_NOISE_POSITIONS)]
    pilot = PilotResult(preconditioner, noise_q, is_converged=True, r_hat=1.0)
    candidates = list_candidates(inputs)
    adaptation, pending = adapt_to_mode(_condition(inputs, values, 0), candidates, pilot, True)
    issue_once(pending)
    num_steps = _choose_num_local_steps(inputs, adaptation, covariance)
    covariance_factor = inputs.cast(factorize_covariance(covariance))
    return adaptation._replace(
        # Gradients that count are evenly distributed in an iteration.
        num_steps=num_steps + -num_steps % max(1, adaptation.monitor_gradients.interval),
        local_init=LocalLatentsInit(values, covariance_factor),
    )


def _compute_covariance(preconditioner: Preconditioner, positions: np.ndarray) -> np.ndarray:
    """Return the covariance of positions in preconditioned coordinates, or the variances.

    The preconditioner is from the curvature given the local latents, so that this is the ratio of
    the marginal covariance to the conditional one.
    """
    q, dim = preconditioner.solve(positions - preconditioner.center), positions.shape[1]
    return np.cov(q, rowvar=False).reshape(dim, dim) if preconditioner.is_dense else q.var(0)


def _max_variance(covariance: np.ndarray) -> float:
    """Return the largest variance in any direction."""
    return float(covariance.max() if covariance.ndim == 1 else np.linalg.eigvalsh(covariance).max())


def _iterate_keys() -> Iterator[Array]:
    """Yield random keys for the compiled functions of one warm-up."""
    key = random.key(0)
    while True:
        key, next_key = random.split(key)
        yield next_key


def _condition(inputs: WarmupInputs, values: LocalValues, chain: int | None = None) -> WarmupInputs:
    """Return inputs of the globals' posterior given local values.

    :param chain: index of the chain where the values have a leading axis of chains.
    """
    if chain is not None:
        values = jax.tree.map(lambda x: x[chain], values)
    arguments = with_local_values(inputs.arguments, values)
    return replace(inputs, arguments=arguments.map_arrays(jnp.asarray))


def _factor_from_curvature(conditioned: WarmupInputs, position: np.ndarray) -> np.ndarray:
    """Return the factor of the preconditioner from the full-data Hessian, or its diagonal."""
    potential, settings = conditioned.potential, conditioned.settings
    jitted_potential = JittedPotential(potential, conditioned.arguments)
    hessian = None
    if potential.dim <= _MAX_HESSIAN_DIM:
        _, _, hessian = jitted_potential.value_grad_hessian(position)
    elif settings.is_dense:
        hessian = assemble_hessian(jitted_potential, position)
    return factor_from_curvature(
        hessian,
        settings.mass_matrix_mask,
        settings.is_dense,
        JittedPotential(potential, conditioned.arguments, sample_subset(potential)),
        position,
    )


def _init_preconditioner(conditioned: WarmupInputs, position: np.ndarray) -> Preconditioner:
    """Return coordinates from the curvature at a position, or with the user's mass matrix."""
    matrix = conditioned.settings.inverse_mass_matrix
    if matrix is None:
        factor = _factor_from_curvature(conditioned, position)
    else:
        factor = factorize_covariance(matrix)
    gradient = conditioned.batched_gradients.full_gradient(position)
    return Preconditioner(position, factor, gradient)


def _num_batches_per_epoch(inputs: WarmupInputs) -> int:
    """Return the number of minibatches that contain all observations."""
    assert inputs.potential.local_latents is not None
    plate = inputs.potential.local_latents.plate
    return -(-plate.size // plate.subsample_size)


def _sweep(
    inputs: WarmupInputs, position: np.ndarray, values: LocalValues, keys: Iterator[Array]
) -> LocalValues:
    """Update all local values a few times."""
    return _jitted_sweep(
        inputs.potential,
        inputs.cast(position),
        values,
        inputs.arguments,
        next(keys),
        _NUM_UPDATES_PER_SWEEP,
    )


def _run_adam(
    inputs: WarmupInputs, position: np.ndarray, values: LocalValues, keys: Iterator[Array]
) -> tuple[np.ndarray, LocalValues]:
    """Move the globals to the bulk of their marginal posterior, with local latents sampled."""
    potential = inputs.potential
    num_steps = max(_MIN_ADAM_STEPS, _MIN_ADAM_EPOCHS * _num_batches_per_epoch(inputs))
    indices = sample_minibatch_indices(potential, inputs.rng, (num_steps,), ContiguousSubsampling())
    indices = jax.tree.map(jnp.asarray, dict(indices))
    global_position, values = _optimize_globals(
        potential, inputs.arguments, inputs.cast(position), values, indices, next(keys)
    )
    optimum = np.asarray(global_position, np.float64)
    return (optimum if np.isfinite(optimum).all() else position), values


def _run_monte_carlo_em(
    inputs: WarmupInputs, position: np.ndarray, values: LocalValues, keys: Iterator[Array]
) -> tuple[np.ndarray, LocalValues]:
    """Alternate Newton steps of the globals with sweeps over the local latents."""
    inputs.progress.begin_stage("curvature")
    for _ in range(_NUM_NEWTON_STEPS):
        conditioned = _condition(inputs, values)
        preconditioner = _init_preconditioner(conditioned, position)
        check_finite_gradient(conditioned, preconditioner)
        step = preconditioner.apply_transpose(preconditioner.reference_gradient)
        step *= min(1.0, _MAX_NEWTON_STEP_RMS * math.sqrt(step.size) / np.linalg.norm(step))
        position = position - preconditioner.apply(step)
        values = _sweep(inputs, position, values, keys)
    return position, values


def _run_local_pilot(
    inputs: WarmupInputs, position: np.ndarray, values: LocalValues, keys: Iterator[Array]
) -> tuple[Preconditioner, LocalValues, np.ndarray]:
    """Run windows of pilot chains until the mean of the globals stays.

    :param values: local values from which all chains start.
    :return: coordinates, local latents of each chain at the end of the last window, and positions
        of the globals in it, shape ``(n, d)``.
    """
    dim, rng = inputs.potential.dim, inputs.rng
    estimators = list_candidates(inputs).estimators
    min_window_steps = max(_MIN_WINDOW_STEPS, _MIN_WINDOW_EPOCHS * _num_batches_per_epoch(inputs))
    preconditioner = _init_preconditioner(_condition(inputs, values), position)
    q = _INIT_PILOT_SD * rng.standard_normal((_NUM_PILOT_CHAINS, dim))
    pilot, positions, max_step_size = PilotResult(preconditioner, q), None, MAX_PILOT_STEP_SIZE
    values = jax.tree.map(lambda x: jnp.broadcast_to(x, (_NUM_PILOT_CHAINS, *x.shape)), values)
    for window in range(_MAX_NUM_WINDOWS):
        preconditioner = pilot.preconditioner
        batched_gradients = _condition(inputs, values, 0).batched_gradients
        noise_q = np.concatenate([pilot.q, rng.standard_normal((_NUM_PILOT_CHAINS, dim))])
        bulk = BulkPositions(batched_gradients, preconditioner, noise_q)
        _, noise = measure_noise_by_subsampling(bulk, estimators, rng)
        max_curvature = estimate_max_curvature(replace(bulk, q=pilot.q), rng)
        limit = NoiseLimit(PILOT_DYNAMICS, max_step_size, max_curvature, _PILOT_TARGET_SD_BIAS)
        choice = choose_estimator(estimators, ContiguousSubsampling(), noise, limit)
        num_steps = min(window + 1, _MAX_WINDOW_LENGTH_RATIO) * min_window_steps
        draws, next_values = _run_local_chains(inputs, pilot, values, choice, num_steps, keys)
        if not (np.isfinite(draws).all() and np.abs(draws).max() < _MAX_DISTANCE_SD):
            max_step_size *= LOST_STEP_FACTOR
            pilot = replace(pilot, q=pilot.q / 2.0)  # restart nearer to the center
            continue
        values, q = next_values, draws.reshape(-1, dim)
        positions = preconditioner.to_position(q)
        last_positions = preconditioner.to_position(draws[:, -1])
        center = preconditioner.to_position(q.mean(0))
        factor = preconditioner.factor
        if inputs.settings.inverse_mass_matrix is None:
            factor = _factor_from_mean_curvature(inputs, last_positions, values)
        gradient = _condition(inputs, values, 0).batched_gradients.full_gradient(center)
        pilot = pilot.move_to(Preconditioner(center, factor, gradient), last_positions)
        is_converged = (np.abs(q.mean(0)) < _MAX_CENTER_SHIFT_SD * q.std(0)).all()
        if is_converged and window + 1 >= _MIN_NUM_WINDOWS:
            break
    if positions is None:
        raise InitializationError(
            "The pilot chains diverged from every initial position.",
            "check that the posterior is proper; pass other `init_params` or a larger "
            "`subsample_size`.",
            "pilot-chains-diverge",
        )
    return pilot.preconditioner, values, positions


def _factor_from_mean_curvature(
    inputs: WarmupInputs, positions: np.ndarray, values: LocalValues
) -> np.ndarray:
    """Return the factor from the mean curvature over the chains, each given its local latents."""
    precisions = []
    for chain, position in enumerate(positions):
        factor = _factor_from_curvature(_condition(inputs, values, chain), position)
        if factor.ndim == 1:
            precisions.append(1.0 / np.square(factor))
        else:
            inverse = np.linalg.inv(factor)
            precisions.append(inverse.T @ inverse)
    mean = np.mean(precisions, 0)
    return 1.0 / np.sqrt(mean) if mean.ndim == 1 else factorize_spd(mean, inverse=True)


def _run_local_chains(
    inputs: WarmupInputs,
    pilot: PilotResult,
    values: LocalValues,
    choice: SubsamplingChoice,
    num_steps: int,
    keys: Iterator[Array],
) -> tuple[np.ndarray, LocalValues]:
    """Run pilot chains over globals and local latents.

    :return: preconditioned draws of the globals, the first half discarded, shape
        ``(num_chains, num_draws, d)``, and the local latents at the end.
    """
    potential, preconditioner, rng = inputs.potential, pilot.preconditioner, inputs.rng
    reference_gradients = []
    for chain in range(_NUM_PILOT_CHAINS):
        arguments = _condition(inputs, values, chain).arguments
        gradient = JittedPotential(potential, arguments).gradient(preconditioner.center)
        reference_gradients.append(gradient)
    q = inputs.cast(pilot.q)
    dynamics_state = PILOT_DYNAMICS.State(q, inputs.cast(rng.standard_normal(q.shape)))
    carry = dynamics_state, values, inputs.cast(np.stack(reference_gradients))
    draws = []
    for _ in range(-(-num_steps // _STEPS_PER_CALL)):
        inputs.progress.begin_stage("pilot chains")
        indices = sample_minibatch_indices(
            potential, rng, (_NUM_PILOT_CHAINS, _STEPS_PER_CALL), ContiguousSubsampling()
        )
        indices = jax.tree.map(jnp.asarray, dict(indices))
        carry, positions = _run_local_pilot_steps(
            potential,
            choice.estimator,
            inputs.arguments,
            preconditioner.cast(potential.dtype),
            inputs.cast(choice.step_size),
            (carry, indices, random.split(next(keys), _NUM_PILOT_CHAINS)),
        )
        draws.append(np.asarray(positions, np.float64))
    return np.concatenate(draws[len(draws) // 2 :], axis=1), carry[1]


def _choose_num_local_steps(
    inputs: WarmupInputs, adaptation: Adaptation, covariance: np.ndarray
) -> int:
    """Choose the steps per draw, so that globals and local latents decorrelate.

    :param covariance: posterior covariance of the globals relative to that given local latents.
    """
    if inputs.settings.num_steps is not None:
        return inputs.settings.num_steps
    batches_per_epoch = _num_batches_per_epoch(inputs)
    num_epochs = _EPOCHS_PER_VARIANCE * _max_variance(covariance)
    num_epochs = min(max(1.0, num_epochs), _MAX_EPOCHS_PER_DRAW)
    max_num_steps = max(MAX_NUM_STEPS, _MAX_EPOCHS_PER_DRAW * batches_per_epoch)
    num_steps = min(
        max(adaptation.num_steps, math.ceil(num_epochs * batches_per_epoch)), max_num_steps
    )
    if num_steps > _MAX_SILENT_STEPS_PER_DRAW:
        warn_user(
            f"A draw takes {num_steps} steps, in which each local latent is updated "
            f"{num_steps / batches_per_epoch:.2g} times.",
            LocalLatentsWarning,
            "use a larger subsample_size, or set a smaller `num_steps`.",
            "local-steps-per-draw",
        )
    return num_steps


_jitted_sweep = jax.jit(sweep_local_values, static_argnames=("potential", "num_updates"))


@partial(jax.jit, static_argnames="potential")
def _optimize_globals(
    potential: Potential,
    arguments: Arguments,
    global_position: Array,
    values: LocalValues,
    indices: Indices,
    rng_key: Array,
) -> tuple[Array, LocalValues]:
    """Run Adam on the globals, with the minibatch's local latents updated before each step."""
    num_steps = next(iter(indices.values())).shape[0]
    learning_rate = optax.cosine_decay_schedule(
        _INIT_LEARNING_RATE, num_steps, _FINAL_LEARNING_RATE / _INIT_LEARNING_RATE
    )
    adam = optax.adam(learning_rate)

    def step(carry: Any, xs: Any) -> tuple[Any, None]:
        theta, adam_state, values = carry
        minibatch, key = xs
        values, arguments_with_locals = update_minibatch_locals(
            potential, values, theta, minibatch, arguments, key
        )
        gradient = potential.gradient(theta, minibatch, arguments_with_locals)
        gradient = jnp.where(jnp.isfinite(gradient), gradient, 0.0)
        updates, adam_state = adam.update(gradient, adam_state, theta)
        return (optax.apply_updates(theta, updates), adam_state, values), None

    init = global_position, adam.init(global_position), values
    (global_position, _, values), _ = lax.scan(
        step, init, (indices, random.split(rng_key, num_steps))
    )
    return global_position, values


@partial(jax.jit, static_argnames=("potential", "estimator"))
def _run_local_pilot_steps(
    potential: Potential,
    estimator: GradientEstimator,
    arguments: Arguments,
    preconditioner: Preconditioner,
    step_size: Array,
    chains: tuple[Any, Indices, Array],
) -> tuple[Any, Array]:
    """Run one call's steps of all pilot chains and return every fifth preconditioned position.

    :param chains: of each chain its state, its minibatches and its random key.
    """

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
            next_values, arguments_with_locals = update_minibatch_locals(
                potential, local_values, theta, minibatch, arguments, key
            )
            reference = preconditioner._replace(reference_gradient=reference_gradient)
            if estimator.needs_reference:
                reference = update_reference_gradient(
                    potential, reference, local_values, minibatch, arguments_with_locals
                )
            gradient = make_gradient_fn(
                estimator, potential, arguments_with_locals, reference, minibatch
            )
            dynamics_state = _PILOT_STEP(dynamics_state, step_size, gradient, normals)
            carry = dynamics_state, next_values, reference.reference_gradient
            return carry, dynamics_state.position

        xs = indices, normals, random.split(local_key, num_steps)
        carry, positions = lax.scan(step, carry, xs)
        return carry, positions[PILOT_THINNING - 1 :: PILOT_THINNING]

    return jax.vmap(run_chain)(*chains)
