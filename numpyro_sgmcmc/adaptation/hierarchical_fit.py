"""Variational fit of a hierarchical model: shared parameters by their marginal.

A joint Gaussian fit of the effects of many groups and of the scales that they share is wrong where
few rows belong to a group: the joint density has its mode where scales are zero. Here the effects
are fitted given the shared parameters, group by group (:mod:`.conditional_effects`), and the shared
parameters at the mode of their marginal (:mod:`.marginal_mode`), from several initial positions.
The coordinates of :mod:`.block_arrow_coordinates` are built there.

With one grouping and at most 50 shared parameters, one to three Newton steps follow. Their Hessian,
the inverse of the shared parameters' covariance, has differences of the marginal's gradient along
each of them, unless that of the marginal is known. The expectation has at least as many sign
vectors as effects per group, in which the products of different effects cancel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from numpyro_sgmcmc.adaptation.block_arrow_coordinates import (
    UnrefinedFit,
    build_coordinates,
    recenter_block_arrow,
)
from numpyro_sgmcmc.adaptation.block_differences import add_needed_differences
from numpyro_sgmcmc.adaptation.conditional_effects import (
    NOT_FINITE,
    ConditionalEffects,
    HierarchyFitError,
    linearise_normal,
)
from numpyro_sgmcmc.adaptation.effect_factors import (
    balance_signs,
    factorize_inverse_blocks,
    list_sign_patterns,
)
from numpyro_sgmcmc.adaptation.marginal_mode import (
    MAX_REFINED_SHARED,
    HierarchyNotConvergedError,
    compute_distance,
    fit_marginal,
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
# Newton steps of the shared parameters at the end of a fit, and the length of the last one, whose
# error is of second order in it.
_MAX_NEWTON_STEPS, _MAX_LAST_NEWTON_STEP_SD = 3, 0.2
_CURVATURE_RATIOS = 0.01, 100.0  # bounds on curvatures relative to those of BFGS
_MIN_RELATIVE_TREND = 0.25  # RMS over groups, relative to an effect's largest, from which it counts
_MAX_FIT_DISTANCE_SD = 3.0  # between the shared parameters of fits of the same mode


class HierarchyFit(NamedTuple):
    """A fit of a hierarchy.

    - **coordinates** - coordinates about its mean.
    - **is_exact** - whether these are more accurate than estimates from draws: Newton's method has
      converged, effects are normal given the shared parameters, and with so many groups the
      marginal of these is nearly normal.
    """

    coordinates: Preconditioner
    is_exact: bool


def fit_hierarchy_from_each(
    inputs: WarmupInputs,
    layout: BlockArrowLayout,
    positions: Sequence[np.ndarray],
    start_compilation: Callable[[Preconditioner], None] = lambda fit: None,
    has_effects: bool = False,
) -> HierarchyFit:
    """Return a fit, whose coordinates are refined, if fits from initial positions agree.

    :param start_compilation: called with the coordinates before the other fits.
    :param has_effects: see :func:`fit_hierarchy`.
    :raises HierarchyFitError: where no fit converges, and where two differ, because there are other
        modes.
    """
    remaining = iter(positions)
    # Fits are compared without the refinement, which moves many groups' scales by several SDs.
    unrefined = _fit_first(inputs, layout, remaining, has_effects)
    first, is_exact = unrefined.coordinates, False
    if not first.reference_hessian.pairs and layout.num_shared <= MAX_REFINED_SHARED:
        first, is_exact = _refine_shared(inputs, layout, unrefined)
    first = add_needed_differences(inputs, first)
    start_compilation(first)
    for position in remaining:
        known = unrefined.coordinates
        try:
            other = fit_marginal(inputs, layout, position, has_effects, known)
        except HierarchyFitError:
            continue
        distance = compute_distance(layout, known, other.conditional.position)
        if distance > _MAX_FIT_DISTANCE_SD:
            raise HierarchyFitError("fits from different initial positions differ")
    return HierarchyFit(first, is_exact)


def _fit_first(
    inputs: WarmupInputs,
    layout: BlockArrowLayout,
    positions: Iterator[np.ndarray],
    has_effects: bool,
) -> UnrefinedFit:
    """Return the first fit that succeeds, and leave the remaining positions in the iterator.

    Where none does, because scales or correlations are extreme there, a further fit starts at the
    origin of the unconstrained space. With several groupings the first fit that does not converge
    from effects of zero ends the search, because further ones rarely do.

    :raises HierarchyNotConvergedError: where one of the fits did not converge.
    """
    error = HierarchyFitError("there is no initial position")
    origin = () if has_effects else (np.zeros(layout.dim),)
    for position in chain(positions, origin):
        try:
            return fit_hierarchy(inputs, layout, position, has_effects)
        except HierarchyNotConvergedError as latest:
            error = latest
            if len(layout.groupings) > 1 and not has_effects:
                break
        except HierarchyFitError as latest:
            error = error if isinstance(error, HierarchyNotConvergedError) else latest
    raise error


def fit_hierarchy(
    inputs: WarmupInputs, layout: BlockArrowLayout, position: np.ndarray, has_effects: bool = False
) -> UnrefinedFit:
    """Return a fit from an initial position, with the Hessian at its mean.

    :param has_effects: whether the fit starts at the position's effects, and not at zero.
    :raises HierarchyFitError: where the Hessian is no block-arrow matrix, and where the fit does
        not converge.
    """
    fit = fit_marginal(inputs, layout, position, has_effects)
    return build_coordinates(inputs, layout, fit)


def _refine_shared(
    inputs: WarmupInputs, layout: BlockArrowLayout, fit: UnrefinedFit
) -> tuple[Preconditioner, bool]:
    """Return coordinates with a trend of the effects' SDs, and after Newton steps of the marginal.

    Also return whether these are more accurate than estimates from draws (:class:`HierarchyFit`).

    BFGS finds the curvature of many shared parameters slowly; here M and the effects' precisions
    are differentiated along each of them. Of many groups with normal effects, the Hessian of the
    marginal gives the covariance, and the precisions are differentiated along all parameters of a
    color at once.
    """
    preconditioner = fit.coordinates
    factors, probes = preconditioner.factor.effect_factors, layout.make_probes(with_shared=False)
    no_effects = np.zeros(factors.shape[1:])
    signs = balance_signs(factors)

    def move(shared: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return expansion and position of shared coordinates, with effects at their means."""
        x = preconditioner.to_expansion(layout.merge(no_effects, shared))
        return x, preconditioner.center + preconditioner.expansion_to_displacement(x)

    def compute_blocks(position: np.ndarray) -> np.ndarray:
        """Return D."""
        _, (products,) = inputs.batched_gradients.large_pass_products(position[None], probes)
        return np.asarray(layout.make_blocks(products))

    def evaluate(shared: np.ndarray, all_signs: Sequence[np.ndarray]) -> tuple[Any, Any]:
        """Return the blocks by the effects' coordinates, and M."""
        x, position = move(shared)
        blocks = compute_blocks(position)
        inverse_factors = factorize_inverse_blocks(blocks)
        deviations = np.stack([multiply_blocks(inverse_factors, one) for one in all_signs])
        deviations = layout.merge(deviations, np.zeros((len(deviations), layout.num_shared)))
        gradients = inputs.batched_gradients.large_pass_gradients(
            position + np.concatenate([deviations, -deviations])
        )
        gradient = preconditioner.gradient_to_expansion(x, gradients.mean(0))
        gradient = preconditioner.factor.apply_transpose(gradient)
        if preconditioner.centering is not None:
            blocks = preconditioner.centering.transform_blocks(layout.take_shared(x), blocks)
        return blocks, layout.split(gradient)[1]

    def compute_log_precisions(blocks: np.ndarray) -> np.ndarray:
        """Return logarithms of the precisions of the effects' coordinates, shape ``(k, G)``."""
        return _take_log(map_groups(_compute_precisions, blocks, factors))

    # Along each shared parameter alone, as far as the others given.
    shared_factor = preconditioner.factor.shared_factor
    units = np.linalg.inv(shared_factor).T
    is_one_sided = layout.num_groups >= _MIN_GROUPS_OF_ONE_SIDE
    step_sd = _ONE_SIDED_STEP_SD if is_one_sided else _TREND_STEP_SD
    lengths = step_sd / np.linalg.norm(units, axis=1)
    steps, num_sides = lengths[:, None] * units, 1 if is_one_sided else 2
    changes: list[np.ndarray] = []
    patterns = [signs * x[:, None] for x in list_sign_patterns(layout.effects_per_group)]
    normal = fit.linearisation if preconditioner.centering is None else None
    if is_one_sided and normal is not None and normal.coloring is not None:
        changes = _measure_changes_by_color(
            normal.coloring, factors, steps, lambda shared: compute_blocks(move(shared)[1])
        )
        curvature = np.eye(layout.num_shared)  # about that of these coordinates
    else:
        normal, marginal_changes = None, []
        at_mode = evaluate(np.zeros(layout.num_shared), [signs]) if is_one_sided else None
        for x in steps:
            above, below = evaluate(x, [signs]), at_mode or evaluate(-x, [signs])
            changes.append(compute_log_precisions(above[0]) - compute_log_precisions(below[0]))
            marginal_changes.append(above[1] - below[1])
        curvature = np.linalg.solve(steps, np.stack(marginal_changes)) / num_sides
    trend = -np.stack(changes) / (2.0 * num_sides * lengths[:, None, None])
    # What the effects' precisions add to the curvature along a shared coordinate.
    squares = shared_factor.T @ np.tensordot(trend, trend, ((1, 2), (1, 2))) @ shared_factor
    if 2.0 * np.diagonal(squares).max() > _MIN_TREND_CURVATURE:
        sds = np.linalg.norm(shared_factor, axis=1)
        sizes = np.sqrt(np.square(trend).mean(2)) * sds[:, None]
        is_kept = sizes > _MIN_RELATIVE_TREND * sizes.max(0)
        strips = SharedStrips.from_dense(np.where(is_kept[:, :, None], trend, 0.0))
        factor = replace(preconditioner.factor, sd_trend=strips)
        preconditioner = preconditioner._replace(factor=factor)
    if not np.isfinite(curvature).all():
        raise HierarchyFitError(NOT_FINITE)
    eigenvalues, vectors = np.linalg.eigh((curvature + curvature.T) / 2.0)
    eigenvalues = np.clip(np.abs(eigenvalues), *_CURVATURE_RATIOS)
    position, is_converged, num_steps = np.zeros(layout.num_shared), False, 0
    while not is_converged and num_steps < _MAX_NEWTON_STEPS:
        step = -(vectors / eigenvalues) @ (vectors.T @ evaluate(position, patterns)[1])
        position += step
        is_converged = bool(np.abs(step).max() < _MAX_LAST_NEWTON_STEP_SD)
        num_steps += 1
    scale = vectors / np.sqrt(eigenvalues)
    if normal is not None:
        center = move(position)[1]
        blocks = compute_blocks(center)
        inverse_factors = factorize_inverse_blocks(blocks)
        deviations = [multiply_blocks(inverse_factors, x) for x in patterns]
        conditional = ConditionalEffects(center, inverse_factors, deviations[0], center, blocks)
        normal = linearise_normal(inputs, layout, normal, conditional, deviations)
        if normal is not None and normal.is_marginal:
            scale = np.linalg.solve(shared_factor, np.linalg.cholesky(normal.shared_covariance))
        else:
            is_converged = False
    refined = recenter_block_arrow(inputs, preconditioner, position, scale)
    if refined is None:
        raise HierarchyFitError(NOT_FINITE)
    return refined, is_converged and is_one_sided and fit.has_normal_effects


def _measure_changes_by_color(
    coloring: SharedColoring,
    factors: np.ndarray,
    steps: np.ndarray,
    compute_blocks: Callable[[np.ndarray], np.ndarray],
) -> list[np.ndarray]:
    """Return changes of logarithms of the effects' precisions along each shared parameter.

    Effects are normal given the shared parameters: a parameter changes the entries of the blocks
    that belong to the effects with which it couples.

    :param steps: along each shared parameter alone, in shared coordinates, shape ``(s, s)``.
    :param compute_blocks: maps shared coordinates to the blocks.
    """
    at_mode = compute_blocks(np.zeros(len(steps)))
    precisions = map_groups(_compute_precisions, at_mode, factors)
    changes = [np.zeros_like(precisions) for _ in steps]
    for color, step in enumerate(coloring.sum_by_color(steps)):
        change = compute_blocks(step) - at_mode
        for j in np.flatnonzero(coloring.colors == color):
            effects = np.flatnonzero(coloring.is_coupled[j])
            part = change[np.ix_(effects, effects)]
            part = map_groups(_compute_precisions, part, factors[effects])
            changes[j] = _take_log(precisions + part) - _take_log(precisions)
    return changes


def _take_log(precisions: np.ndarray) -> np.ndarray:
    return np.log(np.maximum(precisions, _MIN_PRECISION))


def _compute_precisions(blocks: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Return the diagonal of ``F^T D F`` for each group, shape ``(k, G)``."""
    return (factors * np.einsum("acg,cbg->abg", blocks, factors)).sum(0)
