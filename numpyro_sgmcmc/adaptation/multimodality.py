"""Other modes: fits that ended elsewhere with about as much of the posterior's mass.

Where a posterior has several modes, chains about one of them agree with each other and are wrong
together. Several starts show some of the others: a fit far from where the pilot chains are, from
which pilot chains do not come to these, and where there is about as much mass.

Posteriors without a single region, as those of neural networks' weights.

There pilot chains do not come to agree, whatever the whitening: units may be exchanged and turned,
and a whitening learnt about one place is wrong a little further on. Its control variates are worse
than none. Most weights are about as free as under the prior, whose sds are units that suit
everywhere; with plain gradients in these, a chain goes from place to place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax import random
from scipy.optimize import linear_sum_assignment

from numpyro_sgmcmc.adaptation.budget import HIGH_DIM
from numpyro_sgmcmc.adaptation.context import WarmupContext
from numpyro_sgmcmc.adaptation.pilot import run_pilot
from numpyro_sgmcmc.adaptation.variational import MeanField
from numpyro_sgmcmc.compilation import jit_low_optimization
from numpyro_sgmcmc.data.subsampling import IIDSubsampling
from numpyro_sgmcmc.errors import ModelWarning, ModelWarningKind
from numpyro_sgmcmc.model.gradient_estimators import (
    ControlVariate,
    GradientEstimator,
    MinibatchGradient,
)
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner

__all__ = [
    "MAX_LOG_MASS_DEFICIT_NATS",
    "Mode",
    "NON_IDENTIFIED_WARNING",
    "VariationalFit",
    "describe_other_modes",
    "find_chains_outside_modes",
    "find_separated_coordinates",
    "has_barrier",
    "interpolate_line",
    "is_drifting_towards",
    "is_fit_near",
    "rescale_to_prior",
    "select_candidate_fits",
]

MAX_LOG_MASS_DEFICIT_NATS = 2.5
"""Nats by which a mode's mass may be smaller, to be told of: about a tenth is left."""


_MAX_ELBO_GAP_NATS = 100.0  # nats: with many rows a fit ends several sds from its mode


_FIT_ERROR_FACTOR = 2.0  # times the distance of the best fit from its mode


_MAX_FIT_DISTANCE_SD = (
    3.0  # sds of a fit beyond the sd of the pilot chains: perhaps not where these are
)


_MIN_SEPARATION_SD = 0.3  # between two groups of draws, of the sum of their sds


_MIN_DRIFT_FRACTION = 0.1  # of the way that is left, in one window


_NUM_LINE_POINTS = 9  # points


_MIN_BARRIER_NATS = 0.5  # nats: a lower one keeps no chain where it is


_PERMUTATION_TOLERANCE = (
    0.2  # of the difference between modes, within which entries count as exchanged
)


_MAX_SITES_LISTED = 3


class VariationalFit(NamedTuple):
    """
    - **approximation** - the independent normals.
    - **elbo** - evidence bound; -inf where it is none.
    """

    approximation: MeanField
    elbo: float


class Mode(NamedTuple):
    """
    - **preconditioner** - coordinates about it.
    - **q** - whitened positions from about it, shape ``(n, d)``.
    - **is_converged** - whether pilot chains about it agree and have stopped moving.
    - **r_hat** - of theirs, the largest of any coordinate.
    - **window_medians** - where they have been, window by window, the median one; each of shape ``(d,)``.
    - **log_mass_deficit** - by how much the logarithm of its mass is smaller than that of the chains' mode.
    - **is_distinct** - whether its pilot chains have not come to where others are.
    """

    preconditioner: Preconditioner
    q: np.ndarray
    is_converged: bool = True
    r_hat: float = 1.0
    window_medians: tuple[np.ndarray, ...] = ()
    log_mass_deficit: float = 0.0
    is_distinct: bool = True

    @property
    def positions(self) -> np.ndarray:
        """The positions, shape ``(n, d)``."""
        return np.asarray(self.preconditioner.to_position(self.q))

    @property
    def center(self) -> np.ndarray:
        """In the midst of its pilot chains, shape ``(d,)``."""
        return self.window_medians[-1] if self.window_medians else self.preconditioner.center


def select_candidate_fits(fits: list[VariationalFit]) -> list[VariationalFit]:
    """The fits besides the best that may be modes of their own, a few.

    :param fits: in the order of their bounds, the largest first.
    """
    best, *others = fits
    return [fit for fit in others if best.elbo - fit.elbo < _MAX_ELBO_GAP_NATS]


def is_fit_near(fit: VariationalFit, positions: np.ndarray, fit_error: np.ndarray) -> bool:
    """Whether a fit's mean is in the midst of pilot chains.

    :param positions: ends of these chains, shape ``(n, d)``.
    :param fit_error: how far from its mode a fit may have ended, shape ``(d,)``.
    """
    away = np.abs(fit.approximation.mean - positions.mean(0))
    return bool(
        (
            away
            < positions.std(0)
            + _MAX_FIT_DISTANCE_SD * fit.approximation.sd
            + _FIT_ERROR_FACTOR * fit_error
        ).all()
    )


def find_separated_coordinates(positions: np.ndarray, other_positions: np.ndarray) -> np.ndarray:
    """The coordinates in which most of one group's draws are beyond those of the other.

    Over a low barrier some chains get: an eighth of ours and three of theirs at either end do not
    count.

    :param positions: positions, shape ``(n, d)``.
    :param other_positions: likewise.
    """
    positions, other_positions = _trim_and_sort(positions, 1), _trim_and_sort(other_positions, 3)
    gap = np.maximum(
        positions.min(0) - other_positions.max(0), other_positions.min(0) - positions.max(0)
    )
    return np.flatnonzero(gap > _MIN_SEPARATION_SD * (positions.std(0) + other_positions.std(0)))


def find_chains_outside_modes(
    last_positions: np.ndarray, mode_positions: Sequence[np.ndarray]
) -> np.ndarray:
    """Which chains have not come to where others are known to be, shape ``(n,)``.

    :param last_positions: of the chains, shape ``(n, d)``.
    :param mode_positions: draws about modes, each of shape ``(m, d)``.
    """
    stays = np.ones(len(last_positions), bool)
    for draws in mode_positions:
        where = find_separated_coordinates(draws, last_positions)
        inner = _trim_and_sort(draws, 1)[:, where]
        slack = inner.std(0)
        stays &= (
            (last_positions[:, where] < inner[0] - slack)
            | (last_positions[:, where] > inner[-1] + slack)
        ).any(1)
    return stays


def _trim_and_sort(positions: np.ndarray, num_eighths: int) -> np.ndarray:
    """Each coordinate's draws without so many at either end, sorted."""
    few = num_eighths * len(positions) // 8
    return np.sort(positions, axis=0)[few : len(positions) - few]


def is_drifting_towards(mode: Mode, positions: np.ndarray) -> bool:
    """Whether pilot chains that have not settled may yet come to other draws.

    Chains that a low barrier lets out now and then never settle, and stay where they are all the
    same; those that are still coming down move on by a good part of the way in every window.

    :param positions: shape ``(n, d)``.
    """
    if mode.is_converged:
        return False
    apart = find_separated_coordinates(positions, mode.positions)
    if len(mode.window_medians) < 2 or not len(apart):
        return True
    scale = positions.std(0)[apart] + mode.positions.std(0)[apart]
    before, now = (place[apart] / scale for place in mode.window_medians[-2:])
    left = positions.mean(0)[apart] / scale - now
    return bool((now - before) @ left > _MIN_DRIFT_FRACTION * (left @ left))


def interpolate_line(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Places at which the potential tells whether a barrier parts two others, these included."""
    return start + np.linspace(0.0, 1.0, _NUM_LINE_POINTS)[:, None] * (end - start)


def has_barrier(potentials: np.ndarray) -> bool:
    """Whether between two places there is less density than at either.

    Of hundreds of coordinates some lie apart by chance, and along a ridge chains move slowly: no
    modes, for the density does not fall between them.

    :param potentials: on the line between them.
    """
    ends = max(potentials[0], potentials[-1])
    return not potentials.max() < ends + _MIN_BARRIER_NATS  # also where it is not finite


def describe_other_modes(
    potential: Potential, positions: np.ndarray, other_modes: Sequence[Mode], init_in_modes: bool
) -> ModelWarning:
    """What is to be said of other modes.

    :param positions: draws about the mode that the chains are to be in, shape ``(n, d)``.
    :param other_modes: the other modes.
    :param init_in_modes: whether chains start in them, too.
    """
    shares = 100.0 * _compute_mass_fractions([mode.log_mass_deficit for mode in other_modes])
    sites, exchanged = [], []
    for theirs in (mode.positions for mode in other_modes):
        apart = _find_separated_sites(
            potential, find_separated_coordinates(positions, theirs), positions, theirs
        )
        sites += [name for name in apart[0] if name not in sites]
        exchanged += [name for name in apart[1] if name not in exchanged]
    what = (
        f"another mode, with about {shares[0]:.0f} % of the mass, in which"
        if len(other_modes) == 1
        else f"{len(other_modes)} other modes or more, with about {shares.sum():.0f} % of the mass, in "
        "which"
    )
    if exchanged:
        told = (
            f"the entries of {_join_site_names(exchanged)} are exchanged: the model does not tell its "
            f"components apart. {_describe_mode_coverage(init_in_modes)} Order the "
            "components (numpyro.distributions.transforms.OrderedTransform), or read the draws as "
            "those of components in any order."
        )
    else:
        told = (
            f"{_join_site_names(sites) or 'the position'} {'are' if len(sites) > 1 else 'is'} elsewhere. "
            f"{_describe_mode_coverage(init_in_modes)} Rule the "
            "others out by the prior, if they should not be; `init_params` decides in which mode "
            "chains start."
        )
    kind = ModelWarningKind.MODES_VISITED if init_in_modes else ModelWarningKind.MULTIMODAL
    return ModelWarning(tuple(sites), kind, f"The posterior has {what} {told}")


def _describe_mode_coverage(init_in_modes: bool) -> str:
    if init_in_modes:
        return "Chains start in each in turn: its share of the draws is no estimate of its mass."
    return (
        "Chains start in one mode and, while they stay there, give its means and sds alone; with "
        "init_in_modes=True they start in each."
    )


def _compute_mass_fractions(log_mass_deficits: list[float]) -> np.ndarray:
    """Of the other modes in the mass of all, also where they have more."""
    masses = np.exp(-np.array([0.0, *log_mass_deficits]) + min(0.0, *log_mass_deficits))
    return np.asarray(masses[1:] / masses.sum())


def _find_separated_sites(
    potential: Potential,
    separated_coordinates: np.ndarray,
    positions: np.ndarray,
    other_positions: np.ndarray,
) -> tuple[list[str], list[str]]:
    """The sites that differ, and those of them whose entries are exchanged."""
    if potential.sites is None:
        return [], []
    ends = np.cumsum([int(np.prod(s.shape)) for s in potential.sites])
    sites, exchanged = [], []
    for site, end in zip(potential.sites, ends, strict=True):
        where = np.arange(end - int(np.prod(site.shape)), end)
        if not np.isin(where, separated_coordinates).any():
            continue
        sites.append(site.name)
        a, b = (x[:, where].mean(0).reshape(site.shape) for x in (positions, other_positions))
        if any(_is_permutation(a, b, axis) for axis in range(len(site.shape))):
            exchanged.append(site.name)
    return sites, exchanged


def _is_permutation(a: np.ndarray, b: np.ndarray, axis: int) -> bool:
    """Whether the entries along an axis are those of the other in another order."""
    a, b = (np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1) for x in (a, b))
    if len(a) < 2:
        return False
    apart = np.abs(a - b).max()
    cost = np.abs(a[:, None] - b[None]).max(-1)
    rows, columns = linear_sum_assignment(cost)
    return bool(
        (rows != columns).any() and cost[rows, columns].max() < _PERMUTATION_TOLERANCE * apart
    )


def _join_site_names(names: list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:_MAX_SITES_LISTED])
    return shown + ", ..." * (len(names) > _MAX_SITES_LISTED)


NON_IDENTIFIED_WARNING = ModelWarning(
    (),
    ModelWarningKind.NON_IDENTIFIED,
    "Pilot chains find no single region, as in a neural network's weights, and most coordinates "
    "are not much narrower than under the prior: chains take plain gradients in units of the "
    "prior's sds. Judge them by what they predict, as "
    "numpyro_sgmcmc.diagnostics.predictive_summary and bias_report(mcmc, fn, rows) do: R-hat of "
    "weights that may be exchanged means little.",
)


_MIN_NON_IDENTIFIED_R_HAT = (
    2.0  # R-hat of pilot chains: 2.5 to 3.7 in a network, 1.5 in a Gaussian process
)


_MIN_PRIOR_SD_RATIO = (
    0.1  # median ratio of sds to the prior's: 0.25 to 0.75 in networks, 0.05 in regressions
)


_TRIAL_STEP_SIZE, _NUM_TRIAL_STEPS = (
    1e-3,
    400,
)  # about the shortest that chains come to in their warm-up


_MAX_TRIAL_VARIANCE_INFLATION = 0.5


_MAX_CONTROL_VARIATE_NOISE_RATIO = (
    0.5  # noise of control variates over plain: 0.58, 0.94 in a network, 0.28 in groups
)


_MAX_PRIOR_SAMPLE_VALUES, _MAX_PRIOR_SAMPLES = 2**22, 1_024  # of the prior


_NORMAL_INTERQUARTILE_RANGE = 1.349  # between the quartiles of a standard normal


def rescale_to_prior(context: WarmupContext, main_mode: Mode) -> Mode | None:
    """The same positions in coordinates that suit where there is no single region.

    :param main_mode: where pilot chains have ended.
    :return: None where they agree, where the prior says little of the posterior's width or plain
        gradients are too noisy, and where the user has said what coordinates or gradients to take.
    """
    settings = context.settings
    is_free = settings.inverse_mass_matrix is None and not settings.is_site_aligned
    is_plain = settings.estimator in (None, MinibatchGradient()) and not settings.noise_compensation
    if main_mode.r_hat < _MIN_NON_IDENTIFIED_R_HAT or not (is_free and is_plain):
        return None
    if context.potential.dim > HIGH_DIM and _has_effective_control_variates(context, main_mode):
        return None
    sds = _estimate_prior_sds(context)
    if sds is None or np.median(main_mode.preconditioner.sds / sds) < _MIN_PRIOR_SD_RATIO:
        return None
    whitening = main_mode.preconditioner._replace(factor=sds, low_rank=None)
    found = main_mode._replace(
        preconditioner=whitening, q=whitening.solve(main_mode.positions - whitening.center)
    )
    return (
        found
        if _measure_trial_variance_inflation(context, found) < _MAX_TRIAL_VARIANCE_INFLATION
        else None
    )


def _has_effective_control_variates(context: WarmupContext, mode: Mode) -> bool:
    """Whether control variates are clearly less noisy than plain gradients about a mode.

    Of very many coordinates some have a large R-hat after a short window, region or not.
    """
    both: tuple[GradientEstimator, ...] = (MinibatchGradient(), ControlVariate())
    if context.potential.is_stochastic or not context.potential.plates:
        return False
    plain, anchored = context.measure_gradient_noise(
        mode.preconditioner, mode.q, both, IIDSubsampling()
    ).values()
    return anchored.mean_variance < _MAX_CONTROL_VARIATE_NOISE_RATIO * plain.mean_variance


def _measure_trial_variance_inflation(context: WarmupContext, mode: Mode) -> float:
    """By how much plain gradients heat the positions in short steps, as an excess of temperature.

    In a funnel, and with few rows of many, no step that gets anywhere is short enough. Where
    gradients cost much there are fewer steps, and longer ones that bring in as much noise.
    """
    num_steps = min(_NUM_TRIAL_STEPS, context.budget.pilot_window_steps[0])
    draws = run_pilot(
        context.batched_gradients.step_potential,
        context.arguments,
        mode.preconditioner.cast(context.potential.dtype),
        mode.q,
        _TRIAL_STEP_SIZE * (_NUM_TRIAL_STEPS / num_steps) ** 0.5,
        num_steps,
        context.rng,
        MinibatchGradient(),
        context.progress,
    )
    ends = mode.preconditioner.to_position(draws[:, -1].astype(np.float64))
    before, after = (
        context.batched_gradients.evaluate_on_subset(x)[0] for x in (mode.positions, ends)
    )
    excess = float(np.mean(after) - np.mean(before)) / (0.5 * context.potential.dim)
    return excess if np.isfinite(excess) else np.inf


def _estimate_prior_sds(context: WarmupContext) -> np.ndarray | None:
    """About the sds of the unconstrained coordinates under the prior, if it can be drawn from.

    Of an improper prior those of the values with which NumPyro stands in for draws.
    """
    target = context.potential
    if target.sample_prior_position is None:
        return None
    draw = jit_low_optimization(target.sample_prior_position)
    keys = map(random.key, range(min(_MAX_PRIOR_SAMPLES, _MAX_PRIOR_SAMPLE_VALUES // target.dim)))
    draws = np.stack([np.asarray(draw(key, context.arguments)) for key in keys])
    low, high = np.quantile(draws, (0.25, 0.75), axis=0)
    sds = (high - low) / _NORMAL_INTERQUARTILE_RANGE
    return sds if np.isfinite(sds).all() and (sds > 0.0).all() else None
