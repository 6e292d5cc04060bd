"""The order of the warm-up's shared part, for models without local sites.

1. A start by volume: normals fitted to the posterior on minibatches, from several starts at once.
2. Pilot chains, a window at a time. From some of their draws and the gradients on all rows there
   comes the whitening, from their mean the anchor.
3. At the pilot's draws the gradient's noise is measured: for each estimator, for random rows and
   for blocks. It decides estimator, minibatches and step size.

No Hessian and no optimum is asked for: what is known of the posterior are minibatch gradients
(:class:`~numpyro_sgmcmc.warmup.row_gradients.RowGradients`). Work over all rows happens a fixed
number of times. The arrays are concrete, so that Python may branch; nothing here runs under
``vmap`` or ``pmap``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from numpyro_sgmcmc.checks import notify
from numpyro_sgmcmc.data.minibatch import IID
from numpyro_sgmcmc.data.plates import Indices
from numpyro_sgmcmc.posterior.estimators import ControlVariate, Estimator, Plain
from numpyro_sgmcmc.posterior.whitening import Whitening
from numpyro_sgmcmc.warmup import leverage, pilot, variational
from numpyro_sgmcmc.warmup.context import Context
from numpyro_sgmcmc.warmup.continuity import hidden_changes
from numpyro_sgmcmc.warmup.coupling import coupled_rows
from numpyro_sgmcmc.warmup.decide import decide
from numpyro_sgmcmc.warmup.factors import root
from numpyro_sgmcmc.warmup.follow import follow
from numpyro_sgmcmc.warmup.given import as_given
from numpyro_sgmcmc.warmup.modes import (
    COMPARABLE,
    Fit,
    Mode,
    are_apart,
    finding_of,
    have_stayed,
    is_barred,
    is_near,
    is_on_its_way,
    line_between,
    possible,
)
from numpyro_sgmcmc.warmup.noise import Noise
from numpyro_sgmcmc.warmup.pilot import PILOT, PILOT_STEP_SIZE, run_pilot
from numpyro_sgmcmc.warmup.regions import NO_REGION, in_units_of_the_prior
from numpyro_sgmcmc.warmup.settings import Adaptation
from numpyro_sgmcmc.warmup.starts import likely_by_prior
from numpyro_sgmcmc.warmup.step_size import choose_step_size
from numpyro_sgmcmc.warmup.variational import MeanField
from numpyro_sgmcmc.warmup.weighed import AGREE

__all__ = ["find_mode", "fitted_position", "other_modes", "warm_up"]

_BOUND_DRAWS = 8
_MODE_WINDOWS = 4  # of pilot chains that tell whether another fit is a mode of its own
_BIAS = 1.0  # draws too hot by a half leave the whitening as it is: so are their gradients
_LOST = 1e3  # whitened units from the anchor at which a pilot chain counts as lost
_SMALL_SHIFT = 0.5
_FEW_POSITIONS = 4  # at which pilot chains look for the largest curvature


def warm_up(context: Context, starts: Iterable[np.ndarray]) -> Adaptation:
    """Find what all chains share.

    :param starts: first positions, of which the first finite ones are tried.
    """
    if context.leaves_nothing_to_find:
        return as_given(context, context.finite_starts(starts, 1)[0])
    _compile_ahead(context)
    first, fits = find_mode(context, *_first_starts(context, starts))
    everywhere = in_units_of_the_prior(context, first)
    others = [] if everywhere else other_modes(context, first, fits)  # of no region there are none
    context.progress.begin("gradient noise")
    are_visited, findings = context.settings.chains_in_modes, []
    if everywhere:
        first = everywhere
        findings.append(NO_REGION)
        context.fix(replace(context.settings, gradient=Plain(), has_region=False))
    if others:
        findings.append(finding_of(context.target, first.draws, others, are_visited))
    findings += coupled_rows(context.rows, first.whitening, first.q)
    findings += hidden_changes(context.rows, first.whitening, first.q, context.effort.lines)
    for finding in findings:
        notify(finding.sentence)
    adaptation = decide(context, first, others if are_visited else ())
    return adaptation._replace(findings=tuple(findings), decisive=context.rows.decisive)


def fitted_position(context: Context, starts: Iterable[np.ndarray]) -> np.ndarray:
    """Mean of the normal with the largest evidence bound."""
    context.progress.begin("start by volume")
    mean: np.ndarray = _fits(context, *_first_starts(context, starts))[0].normal.mean
    return mean


def _compile_ahead(context: Context) -> None:
    """Begin to compile what the first stages run, while starts are looked for."""
    settings, effort, target = context.settings, context.effort, context.target
    num_starts = 1 if settings.has_start else effort.together
    variational.prepare(target, context.arguments, num_starts, effort.fit_steps)
    if effort.few_rows and not settings.has_start:
        variational.prepare(
            target, context.arguments, effort.prior_starts, effort.fit_steps, effort.few_rows
        )
    matrix = settings.inverse_mass_matrix
    is_dense = settings.is_dense if matrix is None else matrix.ndim == 2
    pilot.prepare(target, context.arguments, is_dense, effort.chains, effort.windows[0])
    if _may_hold(context):
        leverage.prepare(target, context.arguments)
    if any(e.needs_hessian for e in context.estimators):
        context.rows.prepare_hessian()


def _first_starts(
    context: Context, starts: Iterable[np.ndarray]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Finite starts: the user's alone, or by the initialisation strategy, and from the prior."""
    if context.settings.has_start:
        return context.finite_starts(starts, 1), []
    found, by_prior = context.finite_starts(starts, context.effort.starts), []
    if num := context.effort.prior_starts:
        by_prior = [q for q in likely_by_prior(context.rows, num) if context.rows.is_finite(q)]
    return found, by_prior


def find_mode(
    context: Context, starts: list[np.ndarray], further: list[np.ndarray]
) -> tuple[Mode, list[Fit]]:
    """Where most of the posterior is.

    :param starts: first positions; the fit that is best is gone on with.
    :param further: others, whose fits may take fewer rows.
    :return: also the fits, that one first.
    """
    context.progress.expect(context.effort.gradients)
    context.progress.begin("start by volume")
    fits = _fits(context, starts, further)
    if _may_hold(context):
        about = fits[0].normal
        context.hold(leverage.decisive_rows(context.target, context.arguments, about, context.rng))
    whitening = _about(context, fits[0].normal)
    if not whitening.is_finite():
        whitening = context.whitening_at(starts[0], whitening.factor)
    context.refuse_infinite_gradient(whitening)
    q = _spread_starts(context, whitening, fits[0].normal)
    return _settled(context, whitening, q, context.effort.windows), fits


def _may_hold(context: Context) -> bool:
    """Whether rows may be in every minibatch: they are those that make control variates noisy, and
    what noise is left is not that of single rows, which is compensated.
    """
    settings = context.settings
    is_plain = settings.gradient is not None and not settings.gradient.has_anchor
    return not (is_plain or settings.noise_compensation)


def _about(context: Context, fit: MeanField) -> Whitening:
    """Coordinates in which a fit is the standard normal, or as the user has given them."""
    settings, matrix = context.settings, context.settings.inverse_mass_matrix
    factor = np.diag(fit.sd) if settings.is_dense else fit.sd
    return context.whitening_at(fit.mean, factor if matrix is None else root(matrix))


def _spread_starts(context: Context, whitening: Whitening, fit: MeanField) -> np.ndarray:
    """Whitened starts of the pilot chains, as a fit spreads."""
    noise = context.rng.standard_normal((context.effort.chains, context.target.dim))
    return whitening.whiten(fit.sd * noise)


def _settled(
    context: Context,
    whitening: Whitening,
    q: np.ndarray,
    windows: Sequence[int],
    known: Sequence[Mode] = (),
) -> Mode:
    """Where pilot chains come to, a window at a time, until they agree.

    :param known: modes of which chains that have come there need go no further.
    """
    chains, shorter = len(q), 1.0
    mode = Mode(whitening, q, r_hat=np.inf)
    for num_steps in windows:
        context.progress.begin("pilot chains")
        estimator, step_size, noise = _pilot_step(context, mode.whitening, mode.q, shorter)
        draws = run_pilot(
            context.rows.step_target,
            context.arguments,
            mode.whitening.cast(context.target.dtype),
            mode.q,
            step_size,
            num_steps,
            context.rng,
            estimator,
            context.progress,
        )
        alive = _alive(context, mode.whitening, draws)
        if alive.sum() <= chains // 2:
            shorter *= 4.0
            mode = mode._replace(q=mode.q / 2.0)
            continue
        found = draws[alive].astype(np.float64)
        if known:
            at_end = mode.whitening.position(found[:, -1])
            stays = have_stayed(at_end, [other.draws for other in known])
            found = found[stays] if stays.sum() > 1 else found
        ends = found[context.rng.choice(len(found), chains), -1]
        ends[: len(found)] = found[:, -1]
        ends = mode.whitening.position(ends)
        trail = (*mode.trail, mode.whitening.position(np.median(found.mean(1), axis=0)))
        mode = mode._replace(is_settled=_have_settled(found), r_hat=_r_hat(found), trail=trail)
        if not _is_of_its_own(context, mode, ends, known):
            q = mode.whitening.whiten(ends - mode.whitening.anchor)
            return mode._replace(q=q, is_of_its_own=False)
        moved = follow(context, mode.whitening, found, noise, mode.is_settled)
        if moved is None:
            shorter *= 2.0
            mode = mode._replace(is_settled=False)
            continue
        mode = mode._replace(whitening=moved, q=moved.whiten(ends - moved.anchor))
        if mode.is_settled:
            break
    return mode


def other_modes(context: Context, first: Mode, fits: list[Fit]) -> list[Mode]:
    """Other modes of comparable mass that the fits have found.

    :param first: where the pilot chains have ended.
    :param fits: the first is the one that they have gone on with.
    """
    known = [first]
    # How far from its mode a fit may end.
    unsure = np.abs(fits[0].normal.mean - first.draws.mean(0))
    for fit in possible(fits):
        if any(is_near(fit, other.draws, unsure) for other in known):
            continue
        there = _about(context, fit.normal)
        if not there.is_finite():
            continue
        starts = _spread_starts(context, there, fit.normal)
        windows = context.effort.windows[:_MODE_WINDOWS]
        mode = _settled(context, there, starts, windows, known)
        is_coming = any(is_on_its_way(mode, other.draws) for other in known)
        if not mode.is_of_its_own or is_coming:
            continue
        if not mode.is_settled and not _is_barred(context, mode, known):
            continue
        less = _log_mass(context, first.whitening) - _log_mass(context, mode.whitening)
        if less < COMPARABLE:
            known.append(mode._replace(nats=less))
    return known[1:]


def _is_of_its_own(context: Context, mode: Mode, ends: np.ndarray, others: Sequence[Mode]) -> bool:
    """Whether pilot chains are apart from all others, and once they have settled barred as well.

    :param ends: their last positions, shape ``(n, d)``.
    """
    are_all_apart = all(len(are_apart(ends, other.draws)) for other in others)
    return are_all_apart and not (mode.is_settled and not _is_barred(context, mode, others))


def _log_mass(context: Context, whitening: Whitening) -> float:
    """Logarithm of a mode's mass up to a constant, by its potential on all rows and its spread."""
    (potential,) = context.rows.potentials(whitening.anchor[None])
    return whitening.log_volume - float(potential)


def _is_barred(context: Context, mode: Mode, others: Sequence[Mode]) -> bool:
    """Whether on all rows the density falls between a mode and each other."""
    lines = (line_between(other.place, mode.place) for other in others)
    return all(is_barred(context.rows.potentials(line)) for line in lines)


def _fits(context: Context, starts: list[np.ndarray], further: list[np.ndarray]) -> list[Fit]:
    """The normals to which the starts lead, that with the largest evidence bound first."""

    def lead(starts: list[np.ndarray], few_rows: int | None) -> list[MeanField]:
        def draw_rows(shape: tuple[int, ...]) -> Indices:
            rows = context.draw_rows(shape, IID())
            return {name: some[..., :few_rows] for name, some in rows.items()}

        return variational.fit(
            context.target,
            context.arguments,
            np.stack(starts),
            draw_rows,
            context.effort.fit_steps,
            context.rng,
            context.progress,
        )

    if context.effort.few_rows and further:
        fits = lead(starts, None) + lead(further, context.effort.few_rows)
    else:
        fits = lead(starts + further, None)
    noise = context.rng.standard_normal((_BOUND_DRAWS // 2, context.target.dim))
    noise = np.concatenate([noise, -noise])
    found = []
    for fit in fits:
        potentials = context.rows.on_some(fit.mean + fit.sd * noise)[0]
        bound = float(np.log(fit.sd).sum() - potentials.mean())
        found.append(Fit(fit, bound if np.isfinite(bound) else -np.inf))
    return sorted(found, key=lambda fit: -fit.bound)


def _pilot_step(
    context: Context, whitening: Whitening, q: np.ndarray, shorter: float
) -> tuple[Estimator, float, Noise]:
    """Plain gradients or control variates, whichever goes further, and how far a step may go.

    :return: these, and the noise of the one with an anchor, if there is one.
    """
    both: tuple[Estimator, ...] = (Plain(), ControlVariate())
    if context.target.is_randomized:
        both = (Plain(),)
    noise = context.noise_of(whitening, q, both, IID())
    curvature = context.curvature(whitening, q[:_FEW_POSITIONS])
    longest = PILOT_STEP_SIZE / shorter
    step_sizes = {e: choose_step_size(PILOT, longest, noise[e], curvature, _BIAS)[0] for e in both}
    estimator = max(both, key=lambda e: (step_sizes[e], e.has_anchor))
    return estimator, step_sizes[estimator], noise[both[-1]]


def _alive(context: Context, whitening: Whitening, draws: np.ndarray) -> np.ndarray:
    """Which chains neither ran off nor ended where there is no density.

    :param draws: whitened draws, shape ``(chains, draws, d)``.
    """
    alive = np.isfinite(draws).all((1, 2)) & (np.abs(draws).max((1, 2)) < _LOST)
    ends = np.where(alive[:, None], draws[:, -1], 0.0)
    values, _ = context.rows.on_some(whitening.position(ends.astype(np.float64)))
    return np.asarray(alive & np.isfinite(values))


def _have_settled(draws: np.ndarray) -> bool:
    """Whether the chains agree, and lie about the anchor.

    :param draws: whitened draws, shape ``(chains, draws, d)``.
    """
    away = np.abs(draws.mean((0, 1))).max()
    return bool(_r_hat(draws) < AGREE and away < _SMALL_SHIFT)


def _r_hat(draws: np.ndarray) -> float:
    """The largest of any coordinate."""
    means, within = draws.mean(1), draws.var(1).mean(0)
    r_hat = np.sqrt(1.0 + means.var(0, ddof=1) / np.maximum(within, np.finfo(float).tiny))
    return float(r_hat.max())
