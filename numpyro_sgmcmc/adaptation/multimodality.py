"""Detection of other modes, and posteriors without a dominant mode.

Where a posterior has several modes, the chains in one of them agree with each other and are wrong
together. A variational fit counts as another mode if it is far from the pilot chains, if pilot
chains that start there do not come to them, if the density falls in between, and if the mass is
comparable (:func:`find_other_modes`).

The weights of neural networks are not identified: hidden units can be exchanged and rotated, pilot
chains do not come to agree with any preconditioner, and one that is adapted in one place is wrong
nearby, as are control variates. Most weights are about as free as under the prior. Minibatch
gradients in coordinates scaled by the prior SDs then let chains move from place to place
(:func:`rescale_to_prior`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from jax import random
from scipy.optimize import linear_sum_assignment

from numpyro_sgmcmc.adaptation.batch_size import estimate_gradient_seconds
from numpyro_sgmcmc.adaptation.batched_gradients import BulkPositions
from numpyro_sgmcmc.adaptation.budget import HIGH_DIM
from numpyro_sgmcmc.adaptation.gradient_noise import measure_noise
from numpyro_sgmcmc.adaptation.pilot import (
    PilotResult,
    build_preconditioner_from_fit,
    find_separated_coordinates,
    init_pilot,
    run_pilot,
    run_pilot_windows,
)
from numpyro_sgmcmc.adaptation.settings import WarmupInputs
from numpyro_sgmcmc.adaptation.variational import MeanField
from numpyro_sgmcmc.compilation import jit_low_optimization
from numpyro_sgmcmc.data.subsampling import IIDSubsampling
from numpyro_sgmcmc.errors import ModelWarning, ModelWarningKind, format_message
from numpyro_sgmcmc.model.gradient_estimators import ControlVariate, MinibatchGradient
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.model.trace import site_slices

# --- Other modes. Nats are of the log posterior density or log mass.
_MAX_LOG_MASS_DEFICIT = 2.5  # nats below the main mode, about a tenth of the mass
_MAX_ELBO_GAP = 100.0  # nats below the best fit; with many observations fits end several SDs off
_MAX_NUM_WINDOWS = 4  # of pilot chains per candidate
# Predicted for the gradients of candidates on a CPU: no other one is begun after these. Fifteen
# candidates of four windows take as long where a gradient takes 27 microseconds.
_MAX_SEARCH_SECONDS = 30.0
# A fit is near to pilot chains within one SD of these plus so many SDs of the fit plus so many
# times the distance of the best fit from its own mode.
_MAX_FIT_DISTANCE_SD, _FIT_ERROR_FACTOR = 3.0, 2.0
_MIN_DRIFT_FRACTION = 0.1  # of the remaining distance in one window, for chains that still drift
_NUM_LINE_POINTS = 9  # at which the potential is evaluated between two modes
_MIN_BARRIER = 0.5  # nats: chains cross a lower barrier
# Difference of matched entries, relative to that of the modes, up to which they are permuted.
_PERMUTATION_TOLERANCE = 0.2
# Change of the products of entries, relative to that by a difference of the same size in a random
# direction, up to which they are rotated.
_ROTATION_TOLERANCE = 0.3
_MAX_SITES_LISTED = 3

# --- Posteriors without a dominant mode.
# R-hat of pilot chains: 2.5 to 3.7 in networks, 1.5 in a Gaussian process.
_MIN_NON_IDENTIFIED_R_HAT = 2.0
# Median ratio of posterior to prior SDs: 0.25 to 0.75 in networks, 0.05 in regressions.
_MIN_PRIOR_SD_RATIO = 0.1
# Noise variance of control variates over that of minibatch gradients: 0.58 and 0.94 in networks,
# 0.28 in a regression with groups.
_MAX_CONTROL_VARIATE_NOISE_RATIO = 0.5
# Trial run with minibatch gradients: about the shortest step to which chains shorten theirs.
_TRIAL_STEP_SIZE, _NUM_TRIAL_STEPS = 1e-3, 400
MAX_TRIAL_VARIANCE_INFLATION = 0.5
"""Relative increase of the potential's deviation up to which minibatch gradients are accurate."""
_MAX_PRIOR_SAMPLE_VALUES, _MAX_PRIOR_SAMPLES = 2**22, 1_024  # bound memory and time
_NORMAL_INTERQUARTILE_RANGE = 1.349  # of a standard normal

NON_IDENTIFIED_WARNING = ModelWarning(
    (),
    ModelWarningKind.NON_IDENTIFIED,
    format_message(
        "No dominant posterior mode was found (typical of neural-network weights).",
        "judge predictions, by numpyro_sgmcmc.diagnostics.predictive_summary and bias_report(mcmc, "
        "fn, rows). Do not judge R-hat of single weights, which is not meaningful. The chains use "
        "minibatch gradients, in coordinates scaled by the prior SDs.",
        "non-identified",
    ),
)


@dataclass(frozen=True)
class Modes:
    """The mode of the pilot chains, and other modes of comparable mass.

    Without a dominant mode, in which pilot chains agree, ``main`` is scaled by the prior SDs.
    """

    main: PilotResult
    others: tuple[PilotResult, ...]
    has_dominant_mode: bool


def find_modes(inputs: WarmupInputs, pilot: PilotResult, fits: Sequence[MeanField]) -> Modes:
    """Return the mode of the pilot chains, which started from the first fit, and other modes."""
    # A hierarchy has its coordinates only if its fit converged; its chains may still be slow, as
    # where a scale may be zero. Coordinates of a Hessian are those of nearly normal posteriors.
    has_fit = pilot.preconditioner.is_common
    if not has_fit and (rescaled := rescale_to_prior(inputs, pilot)):
        return Modes(rescaled, (), has_dominant_mode=False)
    others = find_other_modes(inputs, pilot, fits)
    return Modes(pilot, others, has_dominant_mode=True)


def find_other_modes(
    inputs: WarmupInputs,
    main: PilotResult,
    fits: Sequence[MeanField],
    max_seconds: float = _MAX_SEARCH_SECONDS,
) -> tuple[PilotResult, ...]:
    """Run pilot chains from other variational fits, and return the modes of comparable mass.

    :param max_seconds: predicted time after which the search ends, the best fits first.
    """
    known_modes, batched_gradients = [main], inputs.batched_gradients
    fit_error = np.abs(fits[0].mean - main.positions.mean(0))
    num_together, seconds = inputs.budget.gradients_per_pilot_step, 0.0

    def has_barriers(pilot: PilotResult) -> bool:
        """Return whether the full-data density falls between a mode and each other."""
        lines = (interpolate_line(mode.center, pilot.center) for mode in known_modes)
        return all(has_barrier(batched_gradients.full_potentials(line)) for line in lines)

    def is_distinct(pilot: PilotResult, last_positions: np.ndarray) -> bool:
        are_separated = all(
            len(find_separated_coordinates(last_positions, mode.positions)) for mode in known_modes
        )
        return are_separated and (not pilot.is_converged or has_barriers(pilot))

    def compute_log_mass(preconditioner: Preconditioner) -> float:
        """Return the log mass of a mode up to a constant, by the Laplace approximation."""
        (potential,) = batched_gradients.full_potentials(preconditioner.center[None])
        return preconditioner.log_det - float(potential)

    candidates = select_candidate_fits(fits)
    for k, fit in enumerate(candidates, 1):
        if any(is_fit_near(fit, mode.positions, fit_error) for mode in known_modes):
            continue
        if main.preconditioner.is_hessian_root:  # of thousands of coordinates some are off
            line = interpolate_line(fit.mean, main.center)
            if not has_barrier(batched_gradients.full_potentials(line)):
                continue
        if seconds >= max_seconds:
            break
        preconditioner = build_preconditioner_from_fit(inputs, fit)
        if not preconditioner.is_finite():
            continue
        pilot = run_pilot_windows(
            inputs,
            init_pilot(inputs, preconditioner, fit),
            inputs.budget.pilot_window_steps[:_MAX_NUM_WINDOWS],
            known_modes,
            is_distinct,
            stage=f"other modes, fit {k} of {len(candidates)}",
        )
        seconds += (pilot.num_steps * num_together) * estimate_gradient_seconds(
            inputs.potential, inputs.arguments, num_together
        )
        is_drifting = any(is_drifting_towards(pilot, mode.positions) for mode in known_modes)
        if not pilot.is_distinct or is_drifting:
            continue
        if not pilot.is_converged and not has_barriers(pilot):
            continue
        log_mass_deficit = compute_log_mass(main.preconditioner) - compute_log_mass(
            pilot.preconditioner
        )
        if log_mass_deficit < _MAX_LOG_MASS_DEFICIT:
            known_modes.append(replace(pilot, log_mass_deficit=log_mass_deficit))
            differences = _find_separated_sites(inputs.potential, main.positions, pilot.positions)
            if _Difference.ROTATED in dict(differences).values():
                break  # there is a continuum of modes
    return tuple(known_modes[1:])


def select_candidate_fits(fits: Sequence[MeanField]) -> list[MeanField]:
    """Return the fits besides the best, the first, whose ELBO is not far below."""
    best, *others = fits
    return [fit for fit in others if best.elbo - fit.elbo < _MAX_ELBO_GAP]


def is_fit_near(fit: MeanField, positions: np.ndarray, fit_error: np.ndarray) -> bool:
    """Return whether the mean of a fit is within the range of pilot chains."""
    tolerance = positions.std(0) + _MAX_FIT_DISTANCE_SD * fit.sd + _FIT_ERROR_FACTOR * fit_error
    return bool((np.abs(fit.mean - positions.mean(0)) < tolerance).all())


def is_drifting_towards(pilot: PilotResult, positions: np.ndarray) -> bool:
    """Return whether pilot chains that have not converged may still come to other draws.

    Chains that cross a low barrier now and then never converge, and yet stay where they are; those
    that are still on their way make a good part of it in every window.
    """
    if pilot.is_converged:
        return False
    separated = find_separated_coordinates(positions, pilot.positions)
    if len(pilot.window_medians) < 2 or not len(separated):
        return True
    scale = positions.std(0)[separated] + pilot.positions.std(0)[separated]
    previous, last = (median[separated] / scale for median in pilot.window_medians[-2:])
    remaining = positions.mean(0)[separated] / scale - last
    return bool((last - previous) @ remaining > _MIN_DRIFT_FRACTION * (remaining @ remaining))


def interpolate_line(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return positions on the line between two positions, including these; shape ``(9, d)``."""
    return start + np.linspace(0.0, 1.0, _NUM_LINE_POINTS)[:, None] * (end - start)


def has_barrier(potentials: np.ndarray) -> bool:
    """Return whether the density between two positions is lower than at either.

    Of hundreds of coordinates some are separated by chance, and along a ridge chains move slowly.
    These are no modes, since the density does not fall in between.
    """
    ends = max(potentials[0], potentials[-1])
    return not potentials.max() < ends + _MIN_BARRIER  # also where it is not finite


def describe_other_modes(
    potential: Potential,
    positions: np.ndarray,
    other_modes: Sequence[PilotResult],
    init_in_modes: bool,
) -> ModelWarning:
    """Return the warning about other modes: their mass and the sites that differ."""
    separated: dict[str, set[_Difference]] = {}  # names of sites, and how they differ
    for mode in other_modes:
        for name, kind_of_site in _find_separated_sites(potential, positions, mode.positions):
            separated.setdefault(name, set()).add(kind_of_site)

    def list_sites(wanted: _Difference) -> str:
        names = [f"`{name}`" for name, x in separated.items() if wanted in x]
        return ", ".join(names[:_MAX_SITES_LISTED]) + ", ..." * (len(names) > _MAX_SITES_LISTED)

    percent = 100.0 * compute_mass_fractions([mode.log_mass_deficit for mode in other_modes]).sum()
    num, plural = len(other_modes), "s" * (len(other_modes) > 1)
    if rotated := list_sites(_Difference.ROTATED):
        difference = f"components of {rotated} rotated"
        fix = (
            "fix the rotation (a lower triangular matrix with a positive diagonal), or judge only "
            "what rotations do not change, such as products and predictions."
        )
    elif permuted := list_sites(_Difference.PERMUTED):
        difference = f"components of {permuted} permuted"
        fix = (
            "order the components (numpyro.distributions.transforms.OrderedTransform), or do not "
            "distinguish them in the draws."
        )
    else:
        difference = f"other values of {list_sites(_Difference.OTHER) or 'the position'}"
        fix = "exclude modes by the prior, or choose one with `init_params`."
    kind = ModelWarningKind.MULTIMODAL
    coverage = "Chains sample the main mode only; init_in_modes=True starts chains in each mode."
    if init_in_modes:
        kind = ModelWarningKind.MODES_VISITED
        coverage = "Chains start in each mode, so its share of the draws does not show its mass."
    modes = f"{num} other mode{plural} with about {percent:.0f}% of the mass"
    message = format_message(
        f"The posterior has {'a continuum of modes' if rotated else modes}, with {difference}.",
        f"{fix} {coverage}",
        "multimodal",
    )
    return ModelWarning(tuple(separated), kind, message)


def compute_mass_fractions(log_mass_deficits: Sequence[float]) -> np.ndarray:
    """Return the mass of each other mode relative to that of all modes.

    :param log_mass_deficits: log mass of the main mode minus that of each other; may be negative.
    """
    masses = np.exp(-np.array([0.0, *log_mass_deficits]) + min(0.0, *log_mass_deficits))
    return np.asarray(masses[1:] / masses.sum())


class _Difference(Enum):
    """Difference of a site between two modes."""

    PERMUTED = "permuted"
    ROTATED = "rotated"
    OTHER = "other"


def _find_separated_sites(
    potential: Potential, positions: np.ndarray, other_positions: np.ndarray
) -> Iterator[tuple[str, _Difference]]:
    """Iterate over sites that differ between modes, and how they differ."""
    separated_coordinates = find_separated_coordinates(positions, other_positions)
    slices = site_slices(potential.sites or ())
    for site in potential.sites or ():
        coordinates = np.arange(potential.dim)[slices[site.name]]
        if np.isin(coordinates, separated_coordinates).any():
            a, b = (
                x[:, coordinates].mean(0).reshape(site.shape) for x in (positions, other_positions)
            )
            axes = range(a.ndim)
            if any(_is_permutation(a, b, axis) for axis in axes):
                yield site.name, _Difference.PERMUTED
            elif any(_is_rotation(a, b, axis) for axis in axes):
                yield site.name, _Difference.ROTATED
            else:
                yield site.name, _Difference.OTHER


def _is_permutation(a: np.ndarray, b: np.ndarray, axis: int, is_signed: bool = False) -> bool:
    """Return whether the entries of two arrays along an axis are the same in another order.

    :param is_signed: whether they may be negated, and in the same order, as well.
    """
    a, b = _as_rows(a, axis), _as_rows(b, axis)
    if len(a) < 2:
        return False
    cost = np.abs(a[:, None] - b[None]).max(-1)
    if is_signed:
        cost = np.minimum(cost, np.abs(a[:, None] + b[None]).max(-1))
    i, j = linear_sum_assignment(cost)
    tolerance = _PERMUTATION_TOLERANCE * np.abs(a - b).max()
    return bool((is_signed or (i != j).any()) and cost[i, j].max() < tolerance)


def _is_rotation(a: np.ndarray, b: np.ndarray, axis: int) -> bool:
    """Return whether the entries of two arrays along an axis are rotated.

    Entries that are only permuted or negated do not count. A rotation leaves the products of the
    other entries the same, which a difference of the same size changes by about ``change``.
    """
    if _is_permutation(a, b, axis, is_signed=True):
        return False
    a, b = _as_rows(a, axis), _as_rows(b, axis)
    if not 1 < len(a) < a.shape[1]:
        return False
    change = np.sqrt(2.0 / len(a)) * np.linalg.norm(a) * np.linalg.norm(a - b)
    return bool(np.linalg.norm(a.T @ a - b.T @ b) < _ROTATION_TOLERANCE * change)


def _as_rows(x: np.ndarray, axis: int) -> np.ndarray:
    """Return an array as a matrix with a row for each entry along an axis."""
    return np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)


def rescale_to_prior(
    inputs: WarmupInputs, pilot: PilotResult, high_dim: int = HIGH_DIM
) -> PilotResult | None:
    """Return the pilot chains in coordinates scaled by the prior SDs, or None.

    None where the chains agree, where the posterior is much narrower than the prior, where
    minibatch gradients are too noisy, and where the user chose coordinates or gradients.
    """
    settings = inputs.settings
    are_coordinates_free = settings.inverse_mass_matrix is None and not settings.is_site_aligned
    is_estimator_free = settings.estimator in (None, MinibatchGradient())
    if not are_coordinates_free or not is_estimator_free or settings.noise_compensation:
        return None
    if pilot.r_hat < _MIN_NON_IDENTIFIED_R_HAT:
        return None
    bulk = BulkPositions(inputs.batched_gradients, pilot.preconditioner, pilot.q)
    # R-hat alone does not count: a few of very many coordinates have a large one after a short
    # window.
    if inputs.potential.dim > high_dim and _has_effective_control_variates(bulk, inputs.rng):
        return None
    prior_sds = _estimate_prior_sds(inputs)
    if prior_sds is None or np.median(bulk.preconditioner.sds / prior_sds) < _MIN_PRIOR_SD_RATIO:
        return None
    preconditioner = pilot.preconditioner._replace(factor=prior_sds, low_rank=None)
    rescaled = pilot.move_to(preconditioner, pilot.positions)
    variance_inflation = measure_minibatch_variance_inflation(inputs, rescaled)
    return rescaled if variance_inflation < MAX_TRIAL_VARIANCE_INFLATION else None


def _has_effective_control_variates(bulk: BulkPositions, rng: np.random.Generator) -> bool:
    """Return whether control variates are clearly less noisy than minibatch gradients."""
    potential = bulk.batched_gradients.potential
    if potential.is_stochastic or not potential.has_minibatches:
        return False
    estimators = [MinibatchGradient(), ControlVariate()]
    minibatch, control_variate = measure_noise(bulk, estimators, IIDSubsampling(), rng).values()
    max_variance = _MAX_CONTROL_VARIATE_NOISE_RATIO * minibatch.mean_variance
    return control_variate.mean_variance < max_variance


def measure_minibatch_variance_inflation(inputs: WarmupInputs, pilot: PilotResult) -> float:
    """Return the variance inflation by short steps with minibatch gradients.

    It is the increase of the mean potential over ``d / 2``, infinite where chains diverge. In a
    funnel, and with a few of many observations, no step of useful length is short enough. Where
    gradients are expensive fewer and longer steps add as much noise.
    """
    num_steps = min(_NUM_TRIAL_STEPS, inputs.budget.pilot_window_steps[0])
    step_size = _TRIAL_STEP_SIZE * (_NUM_TRIAL_STEPS / num_steps) ** 0.5
    draws = run_pilot(inputs, pilot, MinibatchGradient(), step_size, num_steps)
    last_positions = pilot.preconditioner.to_position(draws[:, -1].astype(np.float64))
    before, after = (
        inputs.batched_gradients.evaluate_on_subset(x)[0] for x in (pilot.positions, last_positions)
    )
    variance_inflation = float(np.mean(after) - np.mean(before)) / (0.5 * inputs.potential.dim)
    return variance_inflation if np.isfinite(variance_inflation) else np.inf


def _estimate_prior_sds(inputs: WarmupInputs) -> np.ndarray | None:
    """Estimate the prior SDs of the unconstrained coordinates from quartiles, shape ``(d,)``.

    None for a potential function, and where they are not finite. For an improper prior NumPyro
    draws from a proxy.
    """
    potential = inputs.potential
    if potential.sample_prior_position is None:
        return None
    sample = jit_low_optimization(potential.sample_prior_position)
    num_samples = min(_MAX_PRIOR_SAMPLES, _MAX_PRIOR_SAMPLE_VALUES // potential.dim)
    samples = np.stack(
        [np.asarray(sample(key, inputs.arguments)) for key in map(random.key, range(num_samples))]
    )
    low, high = np.quantile(samples, (0.25, 0.75), axis=0)
    sds = (high - low) / _NORMAL_INTERQUARTILE_RANGE
    return sds if np.isfinite(sds).all() and (sds > 0.0).all() else None
