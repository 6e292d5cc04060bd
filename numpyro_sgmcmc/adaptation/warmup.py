"""The warm-up of models without sites that ``gibbs_fn`` samples, stage by stage.

:func:`warm_up_globals` reads as the list of the stages. Each takes and returns immutable results;
only the random generator is shared, and the display of the progress is written to.

The general warm-up needs no optimum: everything is estimated from minibatch gradients
(:class:`~numpyro_sgmcmc.adaptation.batched_gradients.BatchedGradients`), with a bounded number of
passes over the data. Hierarchies have a fit with passes over all rows instead of the first stages
(:mod:`~numpyro_sgmcmc.adaptation.hierarchical_fit`). Arrays are concrete, so that Python may
branch; nothing here runs under ``vmap`` or ``pmap``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import tee

import jax
import numpy as np

from numpyro_sgmcmc.adaptation.batched_gradients import BulkPositions
from numpyro_sgmcmc.adaptation.conditional_effects import HierarchyFitError
from numpyro_sgmcmc.adaptation.gradient_noise import (
    NO_NOISE,
    UNKNOWN_NOISE,
    measure_noise_covariance,
)
from numpyro_sgmcmc.adaptation.hessian_root import choose_hessian_root
from numpyro_sgmcmc.adaptation.hierarchical_fit import fit_hierarchy_from_each
from numpyro_sgmcmc.adaptation.influential import (
    find_influential_rows,
    find_influential_rows_of_groups,
    precompile_influential_rows,
)
from numpyro_sgmcmc.adaptation.initialisation import (
    check_finite_gradient,
    find_finite_positions,
    find_init_positions,
    fit_inits,
)
from numpyro_sgmcmc.adaptation.marginal_mode import HierarchyNotConvergedError
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
    init_pilot,
    init_standard_pilot,
    precompile_pilot,
    refine_pilot,
    run_pilot_windows,
)
from numpyro_sgmcmc.adaptation.preconditioning import factorize_covariance
from numpyro_sgmcmc.adaptation.settings import (
    MAX_CONVERGED_R_HAT,
    Adaptation,
    AdaptationTrace,
    Candidates,
    StepSizeTrace,
    WarmupInputs,
)
from numpyro_sgmcmc.adaptation.step_size import MONITOR_INTERVAL, choose_num_steps, choose_step_size
from numpyro_sgmcmc.adaptation.subsampling_choice import (
    choose_monitor_gradients,
    choose_separate_gradients,
    choose_step_gradients,
    choose_subsampling,
    list_candidates,
    measure_gradient_noise,
)
from numpyro_sgmcmc.adaptation.variational import MeanField, precompile_mean_field
from numpyro_sgmcmc.adaptation.warnings import (
    PendingWarning,
    find_compensation_warnings,
    find_convergence_warnings,
    find_long_draw_warnings,
    find_noise_warnings,
    find_user_step_size_warnings,
    issue_once,
    warn_slow_gradients,
)
from numpyro_sgmcmc.data.subsampling import IIDSubsampling
from numpyro_sgmcmc.dynamics.base import GradientNoiseCovariance
from numpyro_sgmcmc.errors import ModelWarning, ModelWarningKind, warn_user
from numpyro_sgmcmc.model.block_arrow import BlockArrowLayout, find_block_arrow_layout
from numpyro_sgmcmc.model.gradient_estimators import (
    GRADIENT_ESTIMATORS,
    GradientEstimator,
    MinibatchGradient,
    SecondOrderControlVariate,
)
from numpyro_sgmcmc.model.preconditioner import Preconditioner

# Kinetic temperature above the predicted one, relative to the predicted increase, at which chains
# in warm-up shorten their step.
_VARIANCE_INFLATION_TOLERANCE = 1.5
# Coordinates from which on effects of groups have blocks; fewer have a dense matrix by default.
_MIN_HIERARCHY_DIM = 100
_NUM_HIERARCHY_INITS = 3  # initial positions from which the fit of a hierarchy must agree


def warm_up_globals(inputs: WarmupInputs, init_positions: Iterable[np.ndarray]) -> Adaptation:
    """Run all stages of the warm-up.

    :param init_positions: positions of shape ``(d,)``, generated only as far as needed.
    """
    settings, budget = inputs.settings, inputs.budget
    if inputs.is_fully_specified:
        (position,) = find_finite_positions(inputs, init_positions, 1)
        return build_adaptation_from_settings(inputs, position)
    candidates = list_candidates(inputs)
    warn_slow_gradients(inputs)
    init_positions, hierarchy_positions = tee(init_positions)
    hierarchy = _fit_hierarchy(inputs, hierarchy_positions)
    if hierarchy.fit is None:
        _start_mean_field_compilation(inputs)
        if not hierarchy.may_converge:
            _start_compilation(inputs, candidates)
        positions, prior_positions = find_init_positions(inputs, init_positions)
        inputs.progress.set_total(budget.max_gradient_evaluations)
        inputs.progress.begin_stage("variational fit")
        fits = fit_inits(inputs, positions, prior_positions)
        hierarchy = _fit_hierarchy_from_means(inputs, hierarchy, fits)
    if hierarchy.fit is not None:
        inputs = replace(
            inputs,
            budget=budget.for_hierarchy(),
            settings=settings.for_integrator(settings.hierarchy_integrator or settings.integrator),
        )
        if candidates.is_estimator_free and inputs.potential.has_minibatches:
            # Noise of first order in each effect would bias the scales that many effects share.
            estimators = (MinibatchGradient(), SecondOrderControlVariate())
            candidates = replace(candidates, estimators=estimators)
        fits = [MeanField(hierarchy.fit.center, hierarchy.fit.sds)]
        inputs = _include_influential_rows_of_groups(inputs, hierarchy.fit)
        pilot = init_standard_pilot(inputs, hierarchy.fit)
        pilot = replace(pilot, keeps_fit=hierarchy.is_exact)
    else:
        inputs = _include_influential_rows(inputs, fits[0])
        preconditioner = build_preconditioner_from_fit(inputs, fits[0])
        if not preconditioner.is_finite():
            gradient = inputs.batched_gradients.full_gradient(positions[0])
            preconditioner = Preconditioner(positions[0], preconditioner.factor, gradient)
        check_finite_gradient(inputs, preconditioner)
        root = choose_hessian_root(inputs, candidates, preconditioner, fits[0])
        if root is None:
            pilot = init_pilot(inputs, preconditioner, fits[0])
        else:
            inputs = replace(inputs, budget=budget.for_hessian_root())
            candidates = replace(candidates, estimators=tuple(GRADIENT_ESTIMATORS.values()))
            pilot = init_standard_pilot(inputs, root)
    pilot = run_pilot_windows(inputs, pilot, inputs.budget.pilot_window_steps)
    modes = find_modes(inputs, pilot, fits)
    if modes.has_dominant_mode:
        modes = replace(modes, main=refine_pilot(inputs, modes.main))

    inputs.progress.begin_stage("gradient noise")
    model_warnings = _check_model(inputs, modes)
    for model_warning in model_warnings:
        warn_user(model_warning.message, model_warning.category)
    if not modes.has_dominant_mode:
        # Control variates need a reference in the bulk of the posterior.
        candidates = Candidates((MinibatchGradient(),), settings.subsampling, False)
    main, pending = adapt_to_mode(inputs, candidates, modes.main, modes.has_dominant_mode)
    # The chains of all modes share the main mode's estimator and subsampling.
    shared = Candidates((main.estimator,), main.subsampling, False)
    others = []
    for mode in modes.others if settings.init_in_modes else ():
        adaptation, more = adapt_to_mode(inputs, shared, mode, modes.has_dominant_mode)
        others.append(adaptation)
        pending += more
    if modes.has_dominant_mode and not modes.others:
        pending += find_convergence_warnings(modes.main.r_hat)
    # Predictions from gradients that miss a part of the density mean nothing.
    if not any(w.kind is ModelWarningKind.INCONSISTENT_GRADIENT for w in model_warnings):
        issue_once(pending)
    adaptation = _combine_modes(main, others)
    assert adaptation.trace is not None
    return adaptation._replace(
        trace=adaptation.trace._replace(hierarchy_note=hierarchy.note),
        model_warnings=model_warnings,
        included_rows=inputs.included_rows,
        integrator=inputs.settings.integrator,
    )


@dataclass(frozen=True)
class _HierarchyFit:
    """Coordinates of a model with effects of many groups.

    - **fit** - the coordinates, or None.
    - **is_exact** - whether these are more accurate than estimates from draws.
    - **note** - a sentence that says why the model's groups have no blocks, or empty.
    - **layout** - that of the effects, or None where the model has no such effects.
    - **may_converge** - whether a fit that starts nearer to the posterior means may succeed.
    """

    fit: Preconditioner | None = None
    is_exact: bool = False
    note: str = ""
    layout: BlockArrowLayout | None = None
    may_converge: bool = False


def _fit_hierarchy(inputs: WarmupInputs, init_positions: Iterable[np.ndarray]) -> _HierarchyFit:
    """Fit a hierarchical model with effects of many groups from initial positions."""
    potential, settings = inputs.potential, inputs.settings
    has_one_plate = len(potential.plates) == 1
    # Rows of other processes cannot be gathered one by one.
    has_one_plate &= potential.shards is None or jax.process_count() == 1
    if potential.dim < _MIN_HIERARCHY_DIM:
        return _HierarchyFit()
    are_coordinates_free = settings.inverse_mass_matrix is None and not settings.is_site_aligned
    if not (has_one_plate and are_coordinates_free) or settings.is_dense:
        return _HierarchyFit()
    if potential.is_stochastic or potential.local_latents is not None or settings.init_in_modes:
        return _HierarchyFit()
    layout = find_block_arrow_layout(potential, inputs.arguments)
    if layout is None:
        return _HierarchyFit()
    inputs.progress.begin_stage("variational fit")
    inputs.batched_gradients.precompile_large_pass(layout.num_effect_probes)
    num_inits = (
        1 if settings.has_init_params else min(_NUM_HIERARCHY_INITS, inputs.budget.num_inits)
    )
    positions = find_finite_positions(inputs, init_positions, num_inits)
    return _fit_hierarchy_at(inputs, layout, positions, settings.has_init_params)


def _fit_hierarchy_from_means(
    inputs: WarmupInputs, hierarchy: _HierarchyFit, fits: Sequence[MeanField]
) -> _HierarchyFit:
    """Fit a hierarchical model from means of mean-field fits, if it did not converge before."""
    if hierarchy.layout is None or not hierarchy.may_converge:
        return hierarchy
    means = [fit.mean for fit in fits[:_NUM_HIERARCHY_INITS]]
    return _fit_hierarchy_at(inputs, hierarchy.layout, means, has_effects=True)


def _fit_hierarchy_at(
    inputs: WarmupInputs,
    layout: BlockArrowLayout,
    positions: Sequence[np.ndarray],
    has_effects: bool,
) -> _HierarchyFit:
    """Fit a hierarchical model from positions, whose effects count if ``has_effects``."""
    pilot_inputs = replace(inputs, budget=inputs.budget.for_hierarchy())

    def start_compilation(fit: Preconditioner) -> None:
        if _can_include_rows(inputs):
            precompile_influential_rows(inputs.potential, inputs.arguments, fit)
        precompile_pilot(pilot_inputs, fit)

    try:
        found = fit_hierarchy_from_each(inputs, layout, positions, start_compilation, has_effects)
    except HierarchyFitError as error:
        note = f"The effects of {layout.num_groups:,} groups have no blocks: {error}."
        may_converge = isinstance(error, HierarchyNotConvergedError) and not has_effects
        return _HierarchyFit(note=note, layout=layout, may_converge=may_converge)
    return _HierarchyFit(found.coordinates, found.is_exact, layout=layout)


def _start_mean_field_compilation(inputs: WarmupInputs) -> None:
    """Start to compile the mean-field fits, while initial positions are found."""
    budget, has_init_params = inputs.budget, inputs.settings.has_init_params
    precompile_mean_field(inputs, 1 if has_init_params else budget.num_whole_batch_inits)
    if budget.prior_fit_batch_size and not has_init_params:
        precompile_mean_field(inputs, budget.num_prior_inits, budget.prior_fit_batch_size)


def _start_compilation(inputs: WarmupInputs, candidates: Candidates) -> None:
    """Start to compile the functions of the stages after the mean-field fits."""
    precompile_pilot(inputs)
    if _can_include_rows(inputs):
        precompile_influential_rows(inputs.potential, inputs.arguments)
    if any(e.needs_hessian for e in candidates.estimators):
        inputs.batched_gradients.precompile_hessian()


def _include_influential_rows(inputs: WarmupInputs, fit: MeanField) -> WarmupInputs:
    """Return the inputs with influential observations in every minibatch, where there are such."""
    if not _can_include_rows(inputs):
        return inputs
    rows = find_influential_rows(inputs.potential, inputs.arguments, fit, inputs.rng)
    return replace(inputs, included_rows=rows)


def _include_influential_rows_of_groups(inputs: WarmupInputs, fit: Preconditioner) -> WarmupInputs:
    """Return the inputs with influential observations of a hierarchy in every minibatch."""
    if not _can_include_rows(inputs):
        return inputs
    settings = inputs.settings
    step_size = settings.dynamics.integrators[settings.integrator].step_size
    found = find_influential_rows_of_groups(
        inputs.potential, inputs.arguments, fit, inputs.rng, settings.step_size or step_size
    )
    return replace(inputs, included_rows=found.included, max_step_size=found.max_step_size)


def _can_include_rows(inputs: WarmupInputs) -> bool:
    """Return whether influential observations may be included in every minibatch.

    They make control variates noisy, not minibatch gradients; noise compensation is for iid rows.
    """
    settings = inputs.settings
    may_need_reference = settings.estimator is None or settings.estimator.needs_reference
    return may_need_reference and not settings.noise_compensation


def _check_model(inputs: WarmupInputs, modes: Modes) -> tuple[ModelWarning, ...]:
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
    batched_gradients, num_lines = inputs.batched_gradients, inputs.budget.num_consistency_lines
    preconditioner, q = modes.main.preconditioner, modes.main.q
    model_warnings += find_nonadditive_plates(batched_gradients, preconditioner, q)
    model_warnings += find_inconsistent_gradients(batched_gradients, preconditioner, q, num_lines)
    return tuple(model_warnings)


def adapt_to_mode(
    inputs: WarmupInputs, candidates: Candidates, pilot: PilotResult, has_dominant_mode: bool
) -> tuple[Adaptation, list[PendingWarning]]:
    """Choose estimator, subsampling, step size and steps per iteration of chains in one mode.

    :return: the choices, and warnings to be issued.
    """
    settings, dynamics, potential = inputs.settings, inputs.settings.dynamics, inputs.potential
    preconditioner, rng = pilot.preconditioner, inputs.rng
    bulk = BulkPositions(inputs.batched_gradients, preconditioner, pilot.q, pilot.coupling)
    noise = measure_gradient_noise(bulk, candidates, rng)
    choice = choose_subsampling(inputs, candidates, bulk, noise)
    bound_dynamics = settings.bind_dynamics(preconditioner.cast(potential.dtype))
    step = choose_step_size(inputs, bulk, choice, bound_dynamics, has_dominant_mode)
    step_size = float(step.step_size)
    relaxation_time = dynamics.relaxation_time(step_size, step.noise_stats.variance)
    relaxation_time *= step.mean_bias.coupling.relaxation_factor
    num_steps = settings.num_steps or choose_num_steps(relaxation_time, step_size)
    pending = [*find_noise_warnings(inputs, candidates, choice, step)]
    pending = pending or [*find_long_draw_warnings(inputs, choice, step, num_steps)]
    if has_dominant_mode:  # otherwise nothing can be predicted
        pending += find_user_step_size_warnings(inputs, choice, step, bound_dynamics)
    chain_preconditioner = _add_reference_hessian(inputs, preconditioner, choice.estimator)
    noise_covariance = None
    if settings.noise_compensation and potential.has_minibatches:
        chain_bulk = replace(bulk, preconditioner=chain_preconditioner)
        matrix = measure_noise_covariance(chain_bulk, choice.estimator, rng)
        noise_covariance = GradientNoiseCovariance.from_covariance(inputs.cast(matrix))
        pending += find_compensation_warnings(inputs, noise_covariance, step_size)
    mean_bias = step.mean_bias.by_noise.compute_max(step_size)
    monitor_gradients = choose_monitor_gradients(
        inputs, bulk, choice, noise, step_size, num_steps, mean_bias
    )
    allowed_variance_inflation = None
    if settings.step_size is None:
        allowed_variance_inflation = max(
            2.0 * settings.target_sd_bias, _VARIANCE_INFLATION_TOLERANCE * step.variance_inflation
        )
    is_global = potential.local_latents is None
    can_predict_sizes = has_dominant_mode and is_global and potential.has_minibatches
    adaptation = Adaptation(
        preconditioner=chain_preconditioner,
        step_size=step.step_size,
        num_steps=num_steps,
        estimator=choice.estimator,
        subsampling=choice.subsampling,
        gradient_noise_covariance=noise_covariance,
        noise_stats=step.noise_stats,
        monitor_gradients=monitor_gradients,
        allowed_variance_inflation=allowed_variance_inflation,
        relaxation_time=float(relaxation_time),
        has_dominant_mode=has_dominant_mode,
        trace=AdaptationTrace(
            step_size_limits=step.trace,
            max_curvature=noise.max_curvature,
            noise_variances=noise.tabulate_variances() if potential.has_minibatches else {},
            variance_inflation=float(step.variance_inflation),
            mean_bias=step.mean_bias.compute_max(step_size),
            num_pilot_windows=len(pilot.window_medians),
            r_hat=pilot.r_hat,
            is_converged=pilot.is_converged or pilot.r_hat < MAX_CONVERGED_R_HAT,
            choice=choice if can_predict_sizes else None,
            predicted_mean_bias=step.mean_bias if can_predict_sizes else None,
        ),
    )
    return adaptation, pending


def _combine_modes(main: Adaptation, others: Sequence[Adaptation]) -> Adaptation:
    """Return the adaptation of chains that run in all modes: the shortest step, the most steps."""
    if not others:
        return main
    all_modes, trace = (main, *others), main.trace
    assert trace is not None
    step_size = min(mode.step_size for mode in all_modes)
    limits = trace.step_size_limits.limits
    if "user" not in limits:
        limits = limits | {"other_modes": float(step_size)}
        trace = trace._replace(step_size_limits=StepSizeTrace(limits))
    return main._replace(
        step_size=step_size,
        num_steps=max(mode.num_steps for mode in all_modes),
        relaxation_time=max(mode.relaxation_time for mode in all_modes),
        other_mode_preconditioners=tuple(mode.preconditioner for mode in others),
        trace=trace,
    )


def build_adaptation_from_settings(inputs: WarmupInputs, position: np.ndarray) -> Adaptation:
    """Return the user's settings, centered at an initial position, without any measurement."""
    settings, potential = inputs.settings, inputs.potential
    step_size, num_steps = settings.step_size, settings.num_steps
    estimator, subsampling = settings.estimator, settings.subsampling
    if not potential.has_minibatches:  # every step takes the whole data
        estimator, subsampling = MinibatchGradient(), subsampling or IIDSubsampling()
    assert settings.inverse_mass_matrix is not None
    assert step_size is not None
    assert num_steps is not None
    assert estimator is not None
    assert subsampling is not None
    factor = factorize_covariance(settings.inverse_mass_matrix)
    preconditioner = Preconditioner(position, factor, np.zeros_like(position))
    if estimator.needs_reference:
        gradient = inputs.batched_gradients.full_gradient(position)
        preconditioner = preconditioner._replace(reference_gradient=gradient)
        check_finite_gradient(inputs, preconditioner)
    # Separate gradients are worth their cost only if it is spread over many steps.
    uses_steps = subsampling.is_independent or num_steps < MONITOR_INTERVAL
    separate = choose_separate_gradients({estimator: 0.0}, estimator, uses_steps, num_steps)
    return Adaptation(
        preconditioner=_add_reference_hessian(inputs, preconditioner, estimator),
        step_size=step_size,
        num_steps=num_steps,
        estimator=estimator,
        subsampling=subsampling,
        gradient_noise_covariance=None,
        noise_stats=UNKNOWN_NOISE if potential.has_minibatches else NO_NOISE,
        monitor_gradients=separate or choose_step_gradients(potential.dim, num_steps),
        allowed_variance_inflation=None,
        relaxation_time=float(settings.dynamics.relaxation_time(step_size)),
        uses_init_strategy=not settings.has_init_params,
    )


def _add_reference_hessian(
    inputs: WarmupInputs, preconditioner: Preconditioner, estimator: GradientEstimator
) -> Preconditioner:
    """Return the chains' preconditioner, with the Hessian at its center only if that is needed."""
    if not estimator.needs_hessian:
        preconditioner = preconditioner._replace(reference_hessian=None)
    has_hessian = preconditioner.reference_hessian is not None or preconditioner.is_hessian_root
    if estimator.needs_hessian and not has_hessian:
        hessian = inputs.batched_gradients.full_hessian(preconditioner.center)
        preconditioner = preconditioner._replace(reference_hessian=hessian)
    return preconditioner.cast(inputs.potential.dtype)
