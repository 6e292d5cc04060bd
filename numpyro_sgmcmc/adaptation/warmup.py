"""The order of the warm-up's shared part, for models without local sites.

1. A start by volume: normals fitted to the posterior on minibatches, from several starts at once.
2. Pilot chains, a window at a time. From some of their draws and the gradients on all rows there
   comes the whitening, from their mean the anchor.
3. At the pilot's draws the gradient's noise is measured: for each estimator, for random rows and
   for blocks. It decides estimator, minibatches and step size.

No Hessian and no optimum is asked for: what is known of the posterior are minibatch gradients
(:class:`~numpyro_sgmcmc.adaptation.batched_gradients.RowGradients`). Work over all rows happens a fixed
number of times. The arrays are concrete, so that Python may branch; nothing here runs under
``vmap`` or ``pmap``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from numpyro_sgmcmc.adaptation import influential, pilot, variational
from numpyro_sgmcmc.adaptation.context import WarmupContext
from numpyro_sgmcmc.adaptation.gradient_noise import GradientNoiseStats
from numpyro_sgmcmc.adaptation.initialisation import generate_prior_positions
from numpyro_sgmcmc.adaptation.model_checks import (
    find_inconsistent_gradients,
    find_nonadditive_plates,
)
from numpyro_sgmcmc.adaptation.multimodality import (
    MAX_LOG_MASS_DEFICIT_NATS,
    NON_IDENTIFIED_WARNING,
    Mode,
    VariationalFit,
    describe_other_modes,
    find_chains_outside_modes,
    find_separated_coordinates,
    has_barrier,
    interpolate_line,
    is_drifting_towards,
    is_fit_near,
    rescale_to_prior,
    select_candidate_fits,
)
from numpyro_sgmcmc.adaptation.pilot import MAX_PILOT_STEP_SIZE, PILOT_DYNAMICS, run_pilot
from numpyro_sgmcmc.adaptation.preconditioning import factorize_covariance, update_preconditioner
from numpyro_sgmcmc.adaptation.settings import MAX_CONVERGED_R_HAT, Adaptation
from numpyro_sgmcmc.adaptation.step_size import limit_step_size_by_noise
from numpyro_sgmcmc.adaptation.subsampling_choice import (
    build_adaptation_from_settings,
    choose_sampler_settings,
)
from numpyro_sgmcmc.adaptation.variational import MeanField
from numpyro_sgmcmc.data.subsampling import IIDSubsampling, Indices
from numpyro_sgmcmc.errors import warn_user
from numpyro_sgmcmc.model.gradient_estimators import (
    ControlVariate,
    GradientEstimator,
    MinibatchGradient,
)
from numpyro_sgmcmc.model.preconditioner import Preconditioner

__all__ = ["find_other_modes", "fit_variational_mean", "locate_main_mode", "warm_up"]

_NUM_ELBO_SAMPLES = 8
_MAX_MODE_WINDOWS = 4  # of pilot chains that tell whether another fit is a mode of its own
_GLOBAL_PILOT_TARGET_SD_BIAS = (
    1.0  # draws too hot by a half leave the whitening as it is: so are their gradients
)
_MAX_PILOT_DISTANCE_SD = 1e3  # whitened units from the anchor at which a pilot chain counts as lost
_MAX_CENTER_SHIFT_SD = 0.5
_NUM_CURVATURE_POSITIONS = 4  # at which pilot chains look for the largest curvature


def warm_up(context: WarmupContext, init_positions: Iterable[np.ndarray]) -> Adaptation:
    """Find what all chains share.

    :param init_positions: first positions, of which the first finite ones are tried.
    """
    if context.is_fully_specified:
        return build_adaptation_from_settings(
            context, context.find_finite_positions(init_positions, 1)[0]
        )
    _start_compilation(context)
    first, fits = locate_main_mode(context, *_collect_init_positions(context, init_positions))
    everywhere = rescale_to_prior(context, first)
    others = (
        [] if everywhere else find_other_modes(context, first, fits)
    )  # of no region there are none
    context.progress.begin_stage("gradient noise")
    are_visited, findings = context.settings.init_in_modes, []
    if everywhere:
        first = everywhere
        findings.append(NON_IDENTIFIED_WARNING)
        context.set_settings(
            replace(context.settings, estimator=MinibatchGradient(), has_dominant_mode=False)
        )
    if others:
        findings.append(
            describe_other_modes(context.potential, first.positions, others, are_visited)
        )
    findings += find_nonadditive_plates(context.batched_gradients, first.preconditioner, first.q)
    findings += find_inconsistent_gradients(
        context.batched_gradients,
        first.preconditioner,
        first.q,
        context.budget.num_consistency_lines,
    )
    for finding in findings:
        warn_user(finding.message)
    adaptation = choose_sampler_settings(context, first, others if are_visited else ())
    return adaptation._replace(
        model_warnings=tuple(findings), included_rows=context.batched_gradients.included_rows
    )


def fit_variational_mean(
    context: WarmupContext, init_positions: Iterable[np.ndarray]
) -> np.ndarray:
    """Mean of the normal with the largest evidence bound."""
    context.progress.begin_stage("start by volume")
    mean: np.ndarray = _fit_all_inits(context, *_collect_init_positions(context, init_positions))[
        0
    ].approximation.mean
    return mean


def _start_compilation(context: WarmupContext) -> None:
    """Begin to compile what the first stages run, while starts are looked for."""
    settings, effort, target = context.settings, context.budget, context.potential
    num_starts = 1 if settings.has_init_params else effort.num_whole_batch_inits
    variational.precompile_mean_field(target, context.arguments, num_starts, effort.num_vi_steps)
    if effort.prior_fit_batch_size and not settings.has_init_params:
        variational.precompile_mean_field(
            target,
            context.arguments,
            effort.num_prior_inits,
            effort.num_vi_steps,
            effort.prior_fit_batch_size,
        )
    matrix = settings.inverse_mass_matrix
    is_dense = settings.is_dense if matrix is None else matrix.ndim == 2
    pilot.precompile_pilot(
        target, context.arguments, is_dense, effort.num_pilot_chains, effort.pilot_window_steps[0]
    )
    if _can_include_rows(context):
        influential.precompile_influential_rows(target, context.arguments)
    if any(e.needs_hessian for e in context.candidate_estimators):
        context.batched_gradients.precompile_hessian()


def _collect_init_positions(
    context: WarmupContext, init_positions: Iterable[np.ndarray]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Finite starts: the user's alone, or by the initialisation strategy, and from the prior."""
    if context.settings.has_init_params:
        return context.find_finite_positions(init_positions, 1), []
    found, by_prior = context.find_finite_positions(init_positions, context.budget.num_inits), []
    if num := context.budget.num_prior_inits:
        by_prior = [
            q
            for q in generate_prior_positions(context.batched_gradients, num)
            if context.batched_gradients.is_finite(q)
        ]
    return found, by_prior


def locate_main_mode(
    context: WarmupContext, init_positions: list[np.ndarray], prior_positions: list[np.ndarray]
) -> tuple[Mode, list[VariationalFit]]:
    """Where most of the posterior is.

    :param init_positions: first positions; the fit that is best is gone on with.
    :param prior_positions: others, whose fits may take fewer rows.
    :return: also the fits, that one first.
    """
    context.progress.set_total(context.budget.max_gradient_evaluations)
    context.progress.begin_stage("start by volume")
    fits = _fit_all_inits(context, init_positions, prior_positions)
    if _can_include_rows(context):
        about = fits[0].approximation
        context.set_included_rows(
            influential.find_influential_rows(
                context.potential, context.arguments, about, context.rng
            )
        )
    whitening = _build_preconditioner_from_fit(context, fits[0].approximation)
    if not whitening.is_finite():
        whitening = context.build_preconditioner(init_positions[0], whitening.factor)
    context.check_finite_gradient(whitening)
    q = _sample_pilot_positions(context, whitening, fits[0].approximation)
    return _run_global_pilot(context, whitening, q, context.budget.pilot_window_steps), fits


def _can_include_rows(context: WarmupContext) -> bool:
    """Whether rows may be in every minibatch: they are those that make control variates noisy, and
    what noise is left is not that of single rows, which is compensated.
    """
    settings = context.settings
    is_plain = settings.estimator is not None and not settings.estimator.needs_reference
    return not (is_plain or settings.noise_compensation)


def _build_preconditioner_from_fit(context: WarmupContext, fit: MeanField) -> Preconditioner:
    """Coordinates in which a fit is the standard normal, or as the user has given them."""
    settings, matrix = context.settings, context.settings.inverse_mass_matrix
    factor = np.diag(fit.sd) if settings.is_dense else fit.sd
    return context.build_preconditioner(
        fit.mean, factor if matrix is None else factorize_covariance(matrix)
    )


def _sample_pilot_positions(
    context: WarmupContext, preconditioner: Preconditioner, fit: MeanField
) -> np.ndarray:
    """Whitened starts of the pilot chains, as a fit spreads."""
    noise = context.rng.standard_normal((context.budget.num_pilot_chains, context.potential.dim))
    return preconditioner.solve(fit.sd * noise)


def _run_global_pilot(
    context: WarmupContext,
    preconditioner: Preconditioner,
    q: np.ndarray,
    window_steps: Sequence[int],
    known_modes: Sequence[Mode] = (),
) -> Mode:
    """Where pilot chains come to, a window at a time, until they agree.

    :param known_modes: modes of which chains that have come there need go no further.
    """
    chains, shorter = len(q), 1.0
    mode = Mode(preconditioner, q, r_hat=np.inf)
    for num_steps in window_steps:
        context.progress.begin_stage("pilot chains")
        estimator, step_size, noise = _choose_pilot_step(
            context, mode.preconditioner, mode.q, shorter
        )
        draws = run_pilot(
            context.batched_gradients.step_potential,
            context.arguments,
            mode.preconditioner.cast(context.potential.dtype),
            mode.q,
            step_size,
            num_steps,
            context.rng,
            estimator,
            context.progress,
        )
        alive = _find_surviving_chains(context, mode.preconditioner, draws)
        if alive.sum() <= chains // 2:
            shorter *= 4.0
            mode = mode._replace(q=mode.q / 2.0)
            continue
        found = draws[alive].astype(np.float64)
        if known_modes:
            at_end = mode.preconditioner.to_position(found[:, -1])
            stays = find_chains_outside_modes(at_end, [other.positions for other in known_modes])
            found = found[stays] if stays.sum() > 1 else found
        ends = found[context.rng.choice(len(found), chains), -1]
        ends[: len(found)] = found[:, -1]
        ends = mode.preconditioner.to_position(ends)
        trail = (
            *mode.window_medians,
            mode.preconditioner.to_position(np.median(found.mean(1), axis=0)),
        )
        mode = mode._replace(
            is_converged=_is_pilot_converged(found),
            r_hat=_compute_max_r_hat(found),
            window_medians=trail,
        )
        if not _is_distinct_mode(context, mode, ends, known_modes):
            q = mode.preconditioner.solve(ends - mode.preconditioner.center)
            return mode._replace(q=q, is_distinct=False)
        moved = update_preconditioner(context, mode.preconditioner, found, noise, mode.is_converged)
        if moved is None:
            shorter *= 2.0
            mode = mode._replace(is_converged=False)
            continue
        mode = mode._replace(preconditioner=moved, q=moved.solve(ends - moved.center))
        if mode.is_converged:
            break
    return mode


def find_other_modes(
    context: WarmupContext, main_mode: Mode, fits: list[VariationalFit]
) -> list[Mode]:
    """Other modes of comparable mass that the fits have found.

    :param main_mode: where the pilot chains have ended.
    :param fits: the first is the one that they have gone on with.
    """
    known = [main_mode]
    # How far from its mode a fit may end.
    unsure = np.abs(fits[0].approximation.mean - main_mode.positions.mean(0))
    for fit in select_candidate_fits(fits):
        if any(is_fit_near(fit, other.positions, unsure) for other in known):
            continue
        there = _build_preconditioner_from_fit(context, fit.approximation)
        if not there.is_finite():
            continue
        starts = _sample_pilot_positions(context, there, fit.approximation)
        windows = context.budget.pilot_window_steps[:_MAX_MODE_WINDOWS]
        mode = _run_global_pilot(context, there, starts, windows, known)
        is_coming = any(is_drifting_towards(mode, other.positions) for other in known)
        if not mode.is_distinct or is_coming:
            continue
        if not mode.is_converged and not _has_barrier_to_all(context, mode, known):
            continue
        less = _compute_log_mass(context, main_mode.preconditioner) - _compute_log_mass(
            context, mode.preconditioner
        )
        if less < MAX_LOG_MASS_DEFICIT_NATS:
            known.append(mode._replace(log_mass_deficit=less))
    return known[1:]


def _is_distinct_mode(
    context: WarmupContext, mode: Mode, last_positions: np.ndarray, known_modes: Sequence[Mode]
) -> bool:
    """Whether pilot chains are apart from all others, and once they have settled barred as well.

    :param last_positions: their last positions, shape ``(n, d)``.
    """
    are_all_apart = all(
        len(find_separated_coordinates(last_positions, other.positions)) for other in known_modes
    )
    return are_all_apart and not (
        mode.is_converged and not _has_barrier_to_all(context, mode, known_modes)
    )


def _compute_log_mass(context: WarmupContext, preconditioner: Preconditioner) -> float:
    """Logarithm of a mode's mass up to a constant, by its potential on all rows and its spread."""
    (potential,) = context.batched_gradients.full_potentials(preconditioner.center[None])
    return preconditioner.log_det - float(potential)


def _has_barrier_to_all(context: WarmupContext, mode: Mode, known_modes: Sequence[Mode]) -> bool:
    """Whether on all rows the density falls between a mode and each other."""
    lines = (interpolate_line(other.center, mode.center) for other in known_modes)
    return all(has_barrier(context.batched_gradients.full_potentials(line)) for line in lines)


def _fit_all_inits(
    context: WarmupContext, init_positions: list[np.ndarray], prior_positions: list[np.ndarray]
) -> list[VariationalFit]:
    """The normals to which the starts lead, that with the largest evidence bound first."""

    def lead(starts: list[np.ndarray], few_rows: int | None) -> list[MeanField]:
        def draw_rows(shape: tuple[int, ...]) -> Indices:
            rows = context.sample_indices(shape, IIDSubsampling())
            return {name: some[..., :few_rows] for name, some in rows.items()}

        return variational.fit_mean_field(
            context.potential,
            context.arguments,
            np.stack(starts),
            draw_rows,
            context.budget.num_vi_steps,
            context.rng,
            context.progress,
        )

    if context.budget.prior_fit_batch_size and prior_positions:
        fits = lead(init_positions, None) + lead(
            prior_positions, context.budget.prior_fit_batch_size
        )
    else:
        fits = lead(init_positions + prior_positions, None)
    noise = context.rng.standard_normal((_NUM_ELBO_SAMPLES // 2, context.potential.dim))
    noise = np.concatenate([noise, -noise])
    found = []
    for fit in fits:
        potentials = context.batched_gradients.evaluate_on_subset(fit.mean + fit.sd * noise)[0]
        bound = float(np.log(fit.sd).sum() - potentials.mean())
        found.append(VariationalFit(fit, bound if np.isfinite(bound) else -np.inf))
    return sorted(found, key=lambda fit: -fit.elbo)


def _choose_pilot_step(
    context: WarmupContext, preconditioner: Preconditioner, q: np.ndarray, step_divisor: float
) -> tuple[GradientEstimator, float, GradientNoiseStats]:
    """Plain gradients or control variates, whichever goes further, and how far a step may go.

    :return: these, and the noise of the one with an anchor, if there is one.
    """
    both: tuple[GradientEstimator, ...] = (MinibatchGradient(), ControlVariate())
    if context.potential.is_stochastic:
        both = (MinibatchGradient(),)
    noise = context.measure_gradient_noise(preconditioner, q, both, IIDSubsampling())
    curvature = context.measure_max_curvature(preconditioner, q[:_NUM_CURVATURE_POSITIONS])
    longest = MAX_PILOT_STEP_SIZE / step_divisor
    step_sizes = {
        e: limit_step_size_by_noise(
            PILOT_DYNAMICS, longest, noise[e], curvature, _GLOBAL_PILOT_TARGET_SD_BIAS
        )[0]
        for e in both
    }
    estimator = max(both, key=lambda e: (step_sizes[e], e.needs_reference))
    return estimator, step_sizes[estimator], noise[both[-1]]


def _find_surviving_chains(
    context: WarmupContext, preconditioner: Preconditioner, draws: np.ndarray
) -> np.ndarray:
    """Which chains neither ran off nor ended where there is no density.

    :param draws: whitened draws, shape ``(chains, draws, d)``.
    """
    alive = np.isfinite(draws).all((1, 2)) & (np.abs(draws).max((1, 2)) < _MAX_PILOT_DISTANCE_SD)
    ends = np.where(alive[:, None], draws[:, -1], 0.0)
    values, _ = context.batched_gradients.evaluate_on_subset(
        preconditioner.to_position(ends.astype(np.float64))
    )
    return np.asarray(alive & np.isfinite(values))


def _is_pilot_converged(draws: np.ndarray) -> bool:
    """Whether the chains agree, and lie about the anchor.

    :param draws: whitened draws, shape ``(chains, draws, d)``.
    """
    away = np.abs(draws.mean((0, 1))).max()
    return bool(_compute_max_r_hat(draws) < MAX_CONVERGED_R_HAT and away < _MAX_CENTER_SHIFT_SD)


def _compute_max_r_hat(draws: np.ndarray) -> float:
    """The largest of any coordinate."""
    means, within = draws.mean(1), draws.var(1).mean(0)
    r_hat = np.sqrt(1.0 + means.var(0, ddof=1) / np.maximum(within, np.finfo(float).tiny))
    return float(r_hat.max())
