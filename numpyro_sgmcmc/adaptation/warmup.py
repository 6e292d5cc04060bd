"""The warm-up of models without local latents, stage by stage.

:func:`warm_up_globals` reads as the list of the stages. Each takes and returns immutable results;
only the random generator is shared, and the display of the progress is written to.

No stage needs a full Hessian or an optimum: everything is estimated from minibatch gradients
(:class:`~numpyro_sgmcmc.adaptation.batched_gradients.BatchedGradients`), with a fixed number of
passes over the data. Arrays are concrete, so that Python may branch; nothing here runs under
``vmap`` or ``pmap``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from numpyro_sgmcmc.adaptation.batched_gradients import BatchedGradients, BulkPositions
from numpyro_sgmcmc.adaptation.gradient_noise import NO_NOISE, UNKNOWN_NOISE
from numpyro_sgmcmc.adaptation.influential import (
    find_influential_rows,
    precompile_influential_rows,
)
from numpyro_sgmcmc.adaptation.initialisation import (
    InitResult,
    VariationalFit,
    check_finite_gradient,
    create_warmup_rng,
    find_finite_positions,
    find_init_positions,
    fit_inits,
)
from numpyro_sgmcmc.adaptation.model_checks import (
    find_inconsistent_gradients,
    find_nonadditive_plates,
)
from numpyro_sgmcmc.adaptation.multimodality import (
    NON_IDENTIFIED_WARNING,
    Modes,
    describe_other_modes,
    find_modes,
)
from numpyro_sgmcmc.adaptation.pilot import (
    PilotResult,
    build_preconditioner_from_fit,
    precompile_pilot,
    run_pilot_windows,
    sample_pilot_q,
)
from numpyro_sgmcmc.adaptation.preconditioning import factorize_covariance
from numpyro_sgmcmc.adaptation.settings import (
    Adaptation,
    AdaptationTrace,
    Candidates,
    MonitorGradients,
    StepSizeLimit,
    StepSizeTrace,
    SubsamplingChoice,
    WarmupInputs,
)
from numpyro_sgmcmc.adaptation.step_size import StepSizeChoice, choose_num_steps, choose_step_size
from numpyro_sgmcmc.adaptation.subsampling_choice import (
    MONITOR_INTERVAL,
    NoiseMeasurement,
    choose_monitor_gradients,
    choose_separate_gradients,
    choose_step_gradients,
    choose_subsampling,
    list_candidates,
    measure_gradient_noise,
    measure_noise_to_compensate,
)
from numpyro_sgmcmc.adaptation.variational import precompile_mean_field
from numpyro_sgmcmc.adaptation.warnings import (
    warn_about_gradient_noise,
    warn_about_user_step_size,
)
from numpyro_sgmcmc.data.subsampling import IIDSubsampling
from numpyro_sgmcmc.dynamics.base import GradientNoiseCovariance
from numpyro_sgmcmc.errors import ModelWarning, warn_user
from numpyro_sgmcmc.model.gradient_estimators import (
    GradientEstimator,
    MinibatchGradient,
)
from numpyro_sgmcmc.model.potential import IncludedRows
from numpyro_sgmcmc.model.preconditioner import Preconditioner

# Kinetic temperature above the predicted one, relative to the predicted increase, at which chains
# in warm-up shorten their step.
_VARIANCE_INFLATION_TOLERANCE = 1.5


def warm_up_globals(inputs: WarmupInputs, init_positions: Iterable[np.ndarray]) -> Adaptation:
    """Run all stages of the warm-up.

    :param init_positions: positions of shape ``(d,)``, generated only as far as needed.
    """
    rng, settings = create_warmup_rng(), inputs.settings
    batched_gradients = create_batched_gradients(inputs)
    if inputs.is_fully_specified:
        (position,) = find_finite_positions(inputs, batched_gradients, init_positions, 1)
        return build_adaptation_from_settings(inputs, batched_gradients, position)
    candidates = list_candidates(inputs)
    _start_compilation(inputs, batched_gradients, candidates)

    init_result = find_init_positions(inputs, batched_gradients, init_positions)
    inputs.progress.set_total(inputs.budget.max_gradient_evaluations)
    inputs.progress.begin_stage("variational fit")
    fits = fit_inits(inputs, batched_gradients, init_result, rng)
    if _can_include_rows(inputs):
        included_rows = find_influential_rows(
            inputs.potential, inputs.arguments, fits[0].approximation, rng
        )
        batched_gradients = create_batched_gradients(inputs, included_rows)
    pilot = _run_first_pilot(inputs, batched_gradients, init_result, fits[0], rng)
    modes = find_modes(inputs, batched_gradients, pilot, fits, rng)

    inputs.progress.begin_stage("gradient noise")
    model_warnings = _check_model(inputs, batched_gradients, modes)
    for model_warning in model_warnings:
        warn_user(model_warning.message, model_warning.category)
    if not modes.has_dominant_mode:
        # Control variates need a reference in the bulk of the posterior.
        candidates = Candidates((MinibatchGradient(),), settings.subsampling, False)
    main = adapt_to_mode(
        inputs, batched_gradients, candidates, modes.main, modes.has_dominant_mode, rng
    )
    # The chains of all modes share the main mode's estimator and subsampling.
    shared = Candidates((main.choice.estimator,), main.choice.subsampling, False)
    others = [
        adapt_to_mode(inputs, batched_gradients, shared, mode, modes.has_dominant_mode, rng)
        for mode in (modes.others if settings.init_in_modes else ())
    ]
    adaptation = combine_modes(inputs, modes.main, main, others, modes.has_dominant_mode)
    return adaptation._replace(
        model_warnings=model_warnings, included_rows=batched_gradients.included_rows
    )


def fit_variational_mean(inputs: WarmupInputs, init_positions: Iterable[np.ndarray]) -> np.ndarray:
    """Return the mean of the variational fit with the largest ELBO, shape ``(d,)``."""
    rng, batched_gradients = create_warmup_rng(), create_batched_gradients(inputs)
    inputs.progress.begin_stage("variational fit")
    init_result = find_init_positions(inputs, batched_gradients, init_positions)
    best_fit, *_ = fit_inits(inputs, batched_gradients, init_result, rng)
    return best_fit.approximation.mean


def create_batched_gradients(
    inputs: WarmupInputs, included_rows: IncludedRows = ()
) -> BatchedGradients:
    """Create the gradients on minibatches that all stages share.

    :param included_rows: influential observations in every minibatch, by plate.
    """
    return BatchedGradients(inputs.potential, inputs.arguments, inputs.budget, included_rows)


def _start_compilation(
    inputs: WarmupInputs, batched_gradients: BatchedGradients, candidates: Candidates
) -> None:
    """Start to compile the functions of the first stages, while initial positions are found."""
    potential, arguments, settings = inputs.potential, inputs.arguments, inputs.settings
    budget = inputs.budget
    num_inits = 1 if settings.has_init_params else budget.num_whole_batch_inits
    precompile_mean_field(potential, arguments, num_inits, budget.num_vi_steps)
    if budget.prior_fit_batch_size and not settings.has_init_params:
        precompile_mean_field(
            potential,
            arguments,
            budget.num_prior_inits,
            budget.num_vi_steps,
            budget.prior_fit_batch_size,
        )
    matrix = settings.inverse_mass_matrix
    is_dense = settings.is_dense if matrix is None else matrix.ndim == 2
    num_chains, num_steps = budget.num_pilot_chains, budget.pilot_window_steps[0]
    precompile_pilot(potential, arguments, is_dense, num_chains, num_steps)
    if _can_include_rows(inputs):
        precompile_influential_rows(potential, arguments)
    if any(e.needs_hessian for e in candidates.estimators):
        batched_gradients.precompile_hessian()


def _can_include_rows(inputs: WarmupInputs) -> bool:
    """Return whether influential observations may be included in every minibatch.

    They make control variates noisy, not minibatch gradients; noise compensation is for iid rows.
    """
    settings = inputs.settings
    may_need_reference = settings.estimator is None or settings.estimator.needs_reference
    return may_need_reference and not settings.noise_compensation


def _run_first_pilot(
    inputs: WarmupInputs,
    batched_gradients: BatchedGradients,
    init_result: InitResult,
    fit: VariationalFit,
    rng: np.random.Generator,
) -> PilotResult:
    """Run pilot chains from the variational fit with the largest ELBO."""
    approximation = fit.approximation
    preconditioner = build_preconditioner_from_fit(inputs, batched_gradients, approximation)
    if not preconditioner.is_finite():
        center = init_result.positions[0]
        preconditioner = Preconditioner(
            center, preconditioner.factor, batched_gradients.full_gradient(center)
        )
    check_finite_gradient(inputs, preconditioner)
    q = sample_pilot_q(inputs, preconditioner, approximation, rng)
    window_steps = inputs.budget.pilot_window_steps
    return run_pilot_windows(inputs, batched_gradients, preconditioner, q, window_steps, rng)


def _check_model(
    inputs: WarmupInputs, batched_gradients: BatchedGradients, modes: Modes
) -> tuple[ModelWarning, ...]:
    """Return warnings about the modes, and about a wrong gradient or likelihood."""
    model_warnings: list[ModelWarning] = []
    if not modes.has_dominant_mode:
        model_warnings.append(NON_IDENTIFIED_WARNING)
    if modes.others:
        model_warnings.append(
            describe_other_modes(
                inputs.potential, modes.main.positions, modes.others, inputs.settings.init_in_modes
            )
        )
    preconditioner, q = modes.main.preconditioner, modes.main.q
    model_warnings += find_nonadditive_plates(batched_gradients, preconditioner, q)
    model_warnings += find_inconsistent_gradients(
        batched_gradients, preconditioner, q, inputs.budget.num_consistency_lines
    )
    return tuple(model_warnings)


@dataclass(frozen=True)
class ModeSettings:
    """The settings of chains in one mode.

    - **preconditioner** - coordinates in the model's type.
    - **choice** - gradient estimator and subsampling.
    - **step** - step size and its predicted effects.
    - **num_steps** - steps per iteration.
    - **relaxation_time** - time between approximately independent draws.
    - **noise_covariance** - covariance of compensated gradient noise, or None.
    - **monitor_gradients** - gradients from which the bias is estimated.
    - **noise** - gradient noise and curvature.
    """

    preconditioner: Preconditioner
    choice: SubsamplingChoice
    step: StepSizeChoice
    num_steps: int
    relaxation_time: float
    noise_covariance: GradientNoiseCovariance | None
    monitor_gradients: MonitorGradients
    noise: NoiseMeasurement


def adapt_to_mode(
    inputs: WarmupInputs,
    batched_gradients: BatchedGradients,
    candidates: Candidates,
    pilot: PilotResult,
    has_dominant_mode: bool,
    rng: np.random.Generator,
) -> ModeSettings:
    """Choose estimator, subsampling, step size and steps per iteration of chains in one mode."""
    settings, dynamics = inputs.settings, inputs.settings.dynamics
    preconditioner = pilot.preconditioner
    bulk = BulkPositions(batched_gradients, preconditioner, pilot.q)
    noise = measure_gradient_noise(bulk, candidates, rng)
    choice = choose_subsampling(inputs, candidates, noise)
    bound_dynamics = settings.bind_dynamics(preconditioner.cast(inputs.potential.dtype))
    step = choose_step_size(
        inputs, bulk, choice, noise.max_curvature, bound_dynamics, has_dominant_mode, rng
    )
    step_size = float(step.step_size)
    relaxation_time = dynamics.relaxation_time(step_size, step.noise_stats.variance)
    num_steps = settings.num_steps or choose_num_steps(relaxation_time, step_size)
    warn_about_gradient_noise(inputs, candidates, choice, step, noise.max_curvature, num_steps)
    warn_about_user_step_size(
        inputs, choice, step, noise.max_curvature, bound_dynamics, has_dominant_mode
    )
    chain_preconditioner = _add_reference_hessian(
        batched_gradients, preconditioner, choice.estimator
    ).cast(inputs.potential.dtype)
    noise_covariance = None
    if settings.noise_compensation and inputs.potential.plates:
        noise_covariance = measure_noise_to_compensate(
            inputs, replace(bulk, preconditioner=chain_preconditioner), choice, step_size, rng
        )
    monitor_gradients = choose_monitor_gradients(
        inputs, bulk, choice, noise, step_size, num_steps, rng
    )
    return ModeSettings(
        chain_preconditioner,
        choice,
        step,
        num_steps,
        float(relaxation_time),
        noise_covariance,
        monitor_gradients,
        noise,
    )


def combine_modes(
    inputs: WarmupInputs,
    pilot: PilotResult,
    main: ModeSettings,
    others: Sequence[ModeSettings],
    has_dominant_mode: bool,
) -> Adaptation:
    """Return the adaptation of chains that run in all modes: the shortest step, the most steps.

    :param pilot: pilot chains of the main mode.
    :param main: settings of the main mode.
    :param others: settings of the other modes in which chains start.
    """
    settings, step, all_modes = inputs.settings, main.step, (main, *others)
    step_size = min(mode.step.step_size for mode in all_modes)
    limits = step.trace.limits
    if others and settings.step_size is None:
        limits = (*limits, StepSizeLimit("other_modes", float(step_size)))
    allowed_variance_inflation = None
    if settings.step_size is None:
        allowed_variance_inflation = max(
            2.0 * settings.target_sd_bias, _VARIANCE_INFLATION_TOLERANCE * step.variance_inflation
        )
    trace = AdaptationTrace(
        step_size_limits=StepSizeTrace(limits),
        max_curvature=main.noise.max_curvature,
        noise_variances=main.noise.tabulate_variances() if inputs.potential.plates else {},
        variance_inflation=float(step.variance_inflation),
        mean_bias=step.mean_bias.compute_max(float(step.step_size)),
        num_pilot_windows=len(pilot.window_medians),
        r_hat=pilot.r_hat,
    )
    return Adaptation(
        preconditioner=main.preconditioner,
        step_size=step_size,
        num_steps=max(mode.num_steps for mode in all_modes),
        estimator=main.choice.estimator,
        subsampling=main.choice.subsampling,
        gradient_noise_covariance=main.noise_covariance,
        noise_stats=step.noise_stats,
        monitor_gradients=main.monitor_gradients,
        allowed_variance_inflation=allowed_variance_inflation,
        relaxation_time=max(mode.relaxation_time for mode in all_modes),
        other_mode_preconditioners=tuple(mode.preconditioner for mode in others),
        has_dominant_mode=has_dominant_mode,
        trace=trace,
    )


def build_adaptation_from_settings(
    inputs: WarmupInputs, batched_gradients: BatchedGradients, position: np.ndarray
) -> Adaptation:
    """Return the user's settings, centered at an initial position, without any measurement."""
    settings, potential = inputs.settings, inputs.potential
    matrix, step_size, num_steps = (
        settings.inverse_mass_matrix,
        settings.step_size,
        settings.num_steps,
    )
    estimator, subsampling = settings.estimator, settings.subsampling
    if not potential.plates:  # every step takes the whole data
        estimator, subsampling = MinibatchGradient(), subsampling or IIDSubsampling()
    assert matrix is not None
    assert step_size is not None
    assert num_steps is not None
    assert estimator is not None
    assert subsampling is not None
    factor = factorize_covariance(matrix)
    preconditioner = Preconditioner(position, factor, np.zeros_like(position))
    if estimator.needs_reference:
        preconditioner = Preconditioner(position, factor, batched_gradients.full_gradient(position))
        check_finite_gradient(inputs, preconditioner)
        preconditioner = _add_reference_hessian(batched_gradients, preconditioner, estimator)
    # Separate gradients are worth their cost only if it is spread over many steps.
    uses_steps = subsampling.is_independent or num_steps < MONITOR_INTERVAL
    separate = choose_separate_gradients({estimator: 0.0}, estimator, uses_steps, num_steps)
    return Adaptation(
        preconditioner=preconditioner.cast(potential.dtype),
        step_size=step_size,
        num_steps=num_steps,
        estimator=estimator,
        subsampling=subsampling,
        gradient_noise_covariance=None,
        noise_stats=UNKNOWN_NOISE if potential.plates else NO_NOISE,
        monitor_gradients=separate or choose_step_gradients(potential.dim, num_steps),
        allowed_variance_inflation=None,
        relaxation_time=float(settings.dynamics.relaxation_time(step_size)),
        uses_init_strategy=not settings.has_init_params,
    )


def _add_reference_hessian(
    batched_gradients: BatchedGradients,
    preconditioner: Preconditioner,
    estimator: GradientEstimator,
) -> Preconditioner:
    """Return the preconditioner with the full-data Hessian at its center if that is needed."""
    if not estimator.needs_hessian or preconditioner.reference_hessian is not None:
        return preconditioner
    return preconditioner._replace(
        reference_hessian=batched_gradients.full_hessian(preconditioner.center)
    )
