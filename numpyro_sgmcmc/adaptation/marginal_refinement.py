"""Refinement of a fit by differences of the marginal of the shared parameters.

BFGS finds the curvature of many shared parameters slowly. With one grouping and at most 50 shared
parameters, the gradient M of the marginal and the effects' precisions are therefore differentiated
along each of them, and one to three Newton steps of the marginal follow. Where effects are normal
given the shared parameters, the Hessian of the marginal is known, and the precisions are
differentiated along all parameters of a color at once (:mod:`.shared_coloring`).

The expectation of the Newton steps has at least as many sign vectors as effects per group, in which
the products of different effects cancel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from numpyro_sgmcmc.adaptation.block_arrow_coordinates import UnrefinedFit, recenter_block_arrow
from numpyro_sgmcmc.adaptation.conditional_effects import (
    NOT_FINITE,
    ConditionalEffects,
    HierarchyFitError,
    Linearisation,
    linearise_normal,
)
from numpyro_sgmcmc.adaptation.effect_factors import (
    balance_signs,
    factorize_inverse_blocks,
    list_sign_patterns,
)
from numpyro_sgmcmc.adaptation.settings import WarmupInputs
from numpyro_sgmcmc.adaptation.shared_coloring import SharedColoring
from numpyro_sgmcmc.model.block_arrow import (
    BlockArrowLayout,
    SharedStrips,
    map_groups,
    multiply_blocks,
)
from numpyro_sgmcmc.model.preconditioner import Preconditioner

_MIN_PRECISION = 0.02  # of effects in their coordinates, for the logarithm
# Distance, in posterior SDs, of the points at which the change of the effects' SDs is measured; the
# curvature above which it counts, relative to a normal's.
_TREND_STEP_SD, _MIN_TREND_CURVATURE = 2.0, 0.5
# Groups from which on the marginal is so close to a normal that differences on one side suffice,
# and their step.
_MIN_GROUPS_OF_ONE_SIDE, _ONE_SIDED_STEP_SD = 3_000, 0.5
# Newton steps of the shared parameters, and the length of the last one, whose error is of second
# order in it.
_MAX_NEWTON_STEPS, _MAX_LAST_NEWTON_STEP_SD = 3, 0.2
_CURVATURE_RATIOS = 0.01, 100.0  # bounds on curvatures relative to those of BFGS
_MIN_RELATIVE_TREND = 0.25  # RMS over groups, relative to an effect's largest, from which it counts


class HierarchyFit(NamedTuple):
    """A fit of a hierarchy.

    - **coordinates** - coordinates about its mean.
    - **is_exact** - whether these are more accurate than estimates from draws: Newton's method has
      converged, effects are normal given the shared parameters, and with so many groups the
      marginal of these is nearly normal.
    """

    coordinates: Preconditioner
    is_exact: bool


@dataclass(frozen=True)
class _Marginal:
    """Marginal of the shared parameters, by their coordinates ``(s,)`` in a fit."""

    inputs: WarmupInputs
    coordinates: Preconditioner

    @property
    def layout(self) -> BlockArrowLayout:
        return self.coordinates.factor.layout

    def move(self, shared: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return expansion and position, with effects at their means."""
        no_effects = np.zeros((self.layout.effects_per_group, self.layout.num_groups))
        x = self.coordinates.to_expansion(self.layout.merge(no_effects, shared))
        return x, self.coordinates.center + self.coordinates.expansion_to_displacement(x)

    def compute_blocks(self, position: np.ndarray) -> np.ndarray:
        """Return D."""
        probes = self.layout.make_probes(with_shared=False)
        gradients = self.inputs.batched_gradients
        _, (products,) = gradients.large_pass_products(position[None], probes)
        return np.asarray(self.layout.make_blocks(products))

    def differentiate(
        self, shared: np.ndarray, patterns: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return M and the blocks by the effects' coordinates.

        :param patterns: of signs, for the expectation over the effects.
        """
        layout, coordinates = self.layout, self.coordinates
        x, position = self.move(shared)
        blocks = self.compute_blocks(position)
        factors = factorize_inverse_blocks(blocks)
        deviations = np.stack([multiply_blocks(factors, signs) for signs in patterns])
        deviations = layout.merge(deviations, np.zeros((len(deviations), layout.num_shared)))
        gradients = self.inputs.batched_gradients.large_pass_gradients(
            position + np.concatenate([deviations, -deviations])
        )
        gradient = coordinates.gradient_to_expansion(x, gradients.mean(0))
        gradient = layout.take_shared(coordinates.factor.apply_transpose(gradient))
        if coordinates.centering is not None:
            blocks = coordinates.centering.transform_blocks(layout.take_shared(x), blocks)
        return gradient, blocks


def refine_shared(inputs: WarmupInputs, fit: UnrefinedFit) -> HierarchyFit:
    """Return coordinates with a trend of the effects' SDs, after Newton steps of the marginal."""
    marginal = _Marginal(inputs, fit.coordinates)
    layout, factor = marginal.layout, fit.coordinates.factor
    signs = balance_signs(factor.effect_factors)
    patterns = [signs * x[:, None] for x in list_sign_patterns(layout.effects_per_group)]
    is_one_sided = layout.num_groups >= _MIN_GROUPS_OF_ONE_SIDE
    # Along each shared parameter alone, as far as the others given.
    units = np.linalg.inv(factor.shared_factor).T
    step_sd = _ONE_SIDED_STEP_SD if is_one_sided else _TREND_STEP_SD
    lengths = step_sd / np.linalg.norm(units, axis=1)
    steps, num_sides = lengths[:, None] * units, 1 if is_one_sided else 2
    normal = fit.linearisation if marginal.coordinates.centering is None else None
    if is_one_sided and normal is not None and normal.coloring is not None:
        changes = _measure_changes_by_color(marginal, normal.coloring, steps)
        curvature = np.eye(layout.num_shared)  # about that of these coordinates
    else:
        normal = None
        changes, changes_of_gradient = _measure_changes(marginal, steps, signs, is_one_sided)
        curvature = np.linalg.solve(steps, changes_of_gradient) / num_sides
    if not np.isfinite(curvature).all():
        raise HierarchyFitError(NOT_FINITE)
    coordinates = _add_sd_trend(
        fit.coordinates, -changes / (2.0 * num_sides * lengths[:, None, None])
    )
    position, scale, is_converged = _take_newton_steps(marginal, curvature, patterns)
    if normal is not None:
        covariance = _compute_covariance(marginal, normal, position, patterns)
        if covariance is None:
            is_converged = False
        else:
            scale = np.linalg.solve(factor.shared_factor, np.linalg.cholesky(covariance))
    refined = recenter_block_arrow(inputs, coordinates, position, scale)
    if refined is None:
        raise HierarchyFitError(NOT_FINITE)
    return HierarchyFit(refined, is_converged and is_one_sided and fit.has_normal_effects)


def _measure_changes(
    marginal: _Marginal, steps: np.ndarray, signs: np.ndarray, is_one_sided: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return changes along each shared parameter, to one or from one side to the other.

    :param steps: along each shared parameter alone, in shared coordinates, shape ``(s, s)``.
    :return: those of logarithms of the effects' precisions, shape ``(s, k, G)``, and of M.
    """
    factors = marginal.coordinates.factor.effect_factors

    def evaluate(shared: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        gradient, blocks = marginal.differentiate(shared, [signs])
        return _take_log(map_groups(_compute_precisions, blocks, factors)), gradient

    at_mode = evaluate(np.zeros(len(steps))) if is_one_sided else None
    changes = []
    for step in steps:
        above, below = evaluate(step), at_mode or evaluate(-step)
        changes.append([a - b for a, b in zip(above, below, strict=True)])
    of_precisions, of_gradient = zip(*changes, strict=True)
    return np.stack(of_precisions), np.stack(of_gradient)


def _measure_changes_by_color(
    marginal: _Marginal, coloring: SharedColoring, steps: np.ndarray
) -> np.ndarray:
    """Return changes of logarithms of the effects' precisions along each shared parameter.

    Effects are normal given the shared parameters: a parameter changes the entries of the blocks
    that belong to the effects with which it couples.

    :param steps: along each shared parameter alone, in shared coordinates, shape ``(s, s)``.
    """

    def compute_blocks(shared: np.ndarray) -> np.ndarray:
        return marginal.compute_blocks(marginal.move(shared)[1])

    factors = marginal.coordinates.factor.effect_factors
    at_mode = compute_blocks(np.zeros(len(steps)))
    precisions = map_groups(_compute_precisions, at_mode, factors)
    changes = np.zeros((len(steps), *precisions.shape))
    for color, step in enumerate(coloring.sum_by_color(steps)):
        change = compute_blocks(step) - at_mode
        for j in np.flatnonzero(coloring.colors == color):
            effects = np.flatnonzero(coloring.is_coupled[j])
            part = change[np.ix_(effects, effects)]
            part = map_groups(_compute_precisions, part, factors[effects])
            changes[j] = _take_log(precisions + part) - _take_log(precisions)
    return changes


def _add_sd_trend(coordinates: Preconditioner, trend: np.ndarray) -> Preconditioner:
    """Return coordinates with a trend of the logarithms of the effects' SDs, if it is large.

    :param trend: derivatives by the shared parameters, shape ``(s, k, G)``.
    """
    shared_factor, scaling = coordinates.factor.shared_factor, coordinates.factor.prior_scaling
    if scaling is not None:  # which already models the change with these scales
        trend = np.where(scaling.exponents.multiply(np.eye(len(trend))) != 0.0, 0.0, trend)
    # What the effects' precisions add to the curvature along a shared coordinate.
    squares = shared_factor.T @ np.tensordot(trend, trend, ((1, 2), (1, 2))) @ shared_factor
    if 2.0 * np.diagonal(squares).max() <= _MIN_TREND_CURVATURE:
        return coordinates
    sds = np.linalg.norm(shared_factor, axis=1)
    sizes = np.sqrt(np.square(trend).mean(2)) * sds[:, None]
    is_kept = sizes > _MIN_RELATIVE_TREND * sizes.max(0)
    strips = SharedStrips.from_dense(np.where(is_kept[:, :, None], trend, 0.0))
    return coordinates._replace(factor=replace(coordinates.factor, sd_trend=strips))


def _take_newton_steps(
    marginal: _Marginal, curvature: np.ndarray, patterns: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return the last position, a factor of the covariance there, and whether steps converged.

    :param curvature: of the marginal in shared coordinates, not symmetric up to the error of
        differences.
    """
    eigenvalues, vectors = np.linalg.eigh((curvature + curvature.T) / 2.0)
    eigenvalues = np.clip(np.abs(eigenvalues), *_CURVATURE_RATIOS)
    position, is_converged, num_steps = np.zeros(len(curvature)), False, 0
    while not is_converged and num_steps < _MAX_NEWTON_STEPS:
        gradient, _ = marginal.differentiate(position, patterns)
        step = -(vectors / eigenvalues) @ (vectors.T @ gradient)
        position += step
        is_converged = bool(np.abs(step).max() < _MAX_LAST_NEWTON_STEP_SD)
        num_steps += 1
    return position, vectors / np.sqrt(eigenvalues), is_converged


def _compute_covariance(
    marginal: _Marginal,
    linearisation: Linearisation,
    shared: np.ndarray,
    patterns: Sequence[np.ndarray],
) -> np.ndarray | None:
    """Return the inverse of the Hessian of the marginal, or None where that is not positive.

    :param linearisation: of normal effects near these shared coordinates.
    """
    _, center = marginal.move(shared)
    blocks = marginal.compute_blocks(center)
    factors = factorize_inverse_blocks(blocks)
    deviations = [multiply_blocks(factors, signs) for signs in patterns]
    no_gradient = np.zeros_like(center)  # not used
    effects = ConditionalEffects(
        center, factors, deviations[0], no_gradient, blocks, is_normal=True
    )
    found = linearise_normal(marginal.inputs, marginal.layout, linearisation, effects, deviations)
    return found.shared_covariance if found is not None and found.is_marginal else None


def _take_log(precisions: np.ndarray) -> np.ndarray:
    return np.log(np.maximum(precisions, _MIN_PRECISION))


def _compute_precisions(blocks: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Return the diagonal of ``F^T D F`` for each group, shape ``(k, G)``."""
    return (factors * np.einsum("acg,cbg->abg", blocks, factors)).sum(0)
