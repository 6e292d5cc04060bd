"""Mode of the marginal of the parameters that the groups of a hierarchy share.

BFGS finds the zero of the gradient M of :mod:`.conditional_effects`, and its inverse Hessian is the
covariance of the shared parameters. Where Newton steps follow (:mod:`.marginal_refinement`), BFGS
starts again where it has converged, because secants of steps that were too long may have made later
steps too short. Where effects are normal given the shared parameters and few products determine the
strips (:mod:`.shared_coloring`), Newton's method takes the place of BFGS.

With several groupings, groups then deviate with the group that they belong to, such as schools
with their district, and BFGS goes on. Other effects of several groupings deviate independently.

With crossed effects, such as the slopes and abilities of item responses, steps from zero may not
approach the effects' means. The fit then ends, and the warm-up starts another one at the means of
mean-field fits.

An iteration takes 2k + 5 gradients over the data with k effects per group, and k + 14 of Newton's
method where three products determine the strips, whatever the number of groups; 10 to 30 iterations
are usual.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from numpyro_sgmcmc.adaptation.conditional_effects import (
    ConditionalEffects,
    HierarchyFitError,
    Linearisation,
    choose_deviation,
    linearise,
    linearise_normal,
    remove_prior,
    update_effects,
)
from numpyro_sgmcmc.adaptation.effect_centering import ScaledEffects
from numpyro_sgmcmc.adaptation.effect_correlation import find_nesting
from numpyro_sgmcmc.adaptation.effect_factors import balance_signs
from numpyro_sgmcmc.adaptation.settings import WarmupInputs
from numpyro_sgmcmc.model.block_arrow import BlockArrowLayout, multiply_blocks
from numpyro_sgmcmc.model.preconditioner import Preconditioner

# Shared parameters up to which the marginal is differentiated along each of them after the fit.
MAX_REFINED_SHARED = 50
_MAX_ITERATIONS = 60  # of BFGS or Newton's method; models with 5 shared parameters need 10 to 15
_MAX_JOINT_ITERATIONS = 20  # from the mode with independent deviations
# Newton decrement, in posterior SDs of the shared parameters, at which the fit has converged, and
# iterations in a row below it.
_CONVERGED_DECREMENT, _NUM_CONVERGED = 0.1, 2
_MIN_SECANT_DECREMENT = 1e-3  # before a step, below which changes of the gradient are rounding
# Bound on the change of each coordinate in one iteration, in unconstrained units; it doubles while
# steps reduce the gradient.
_INIT_STEP_BOUND = 0.7
# Growth of the Newton decrement in a step from which on the step is rejected, and the bound on the
# next step relative to it.
_MAX_DECREMENT_RATIO, _REJECTED_STEP_FACTOR = 1.5, 0.3
_MAX_EFFECT_STEP_SD = 0.2  # RMS Newton step of the effects above which they take one more
# RMS Newton step from which on effects are far from their means, and iterations with such effects,
# in all, after which a fit of crossed effects ends: steps from zero may not approach the means.
_DISTANT_EFFECTS_SD, _MAX_DISTANT_ITERATIONS = 1.0, 12
_REFRESH_DISTANCE = 1.0  # change of the shared parameters after which their coupling is refreshed
_MIN_CURVATURE_RATIO = 1e-2  # of a secant over the model's, below which BFGS leaves it out
# Newton decrement and distance at which a further fit is certain to end there.
_NEAR_DECREMENT, _NEAR_DISTANCE_SD = 1.0, 2.0


class HierarchyNotConvergedError(HierarchyFitError):
    """The fit did not converge. From effects near their posterior means it may."""


class MarginalFit(NamedTuple):
    """The mode of the marginal.

    - **conditional** - effects given the shared parameters there.
    - **shared_covariance** - of the shared parameters, shape ``(s, s)``.
    - **linearisation** - near it.
    """

    conditional: ConditionalEffects
    shared_covariance: np.ndarray
    linearisation: Linearisation


def fit_marginal(
    inputs: WarmupInputs,
    layout: BlockArrowLayout,
    position: np.ndarray,
    has_effects: bool,
    known: Preconditioner | None = None,
) -> MarginalFit:
    """Return the mode of the marginal.

    :param has_effects: see :func:`fit_hierarchy`.
    :param known: a fit, near which this one need not converge.
    """
    if not has_effects:
        # Random effects of the initialisation strategy say nothing about their scale.
        no_effects = np.zeros((layout.effects_per_group, layout.num_groups))
        position = layout.merge(no_effects, layout.take_shared(position))
    linearisation = linearise(inputs, layout, position, check_structure=known is None)
    of_rows = remove_prior(inputs, position, linearisation.gradient, linearisation.hessian)
    if (scaled := ScaledEffects.find(*of_rows, position)) is not None:
        position = scaled.to_products(position)
        linearisation = linearise(inputs, layout, position, scaled)
    signs = balance_signs(linearisation.factors)
    factors = linearisation.factors
    deviation = choose_deviation(linearisation, factors, linearisation.hessian.blocks, signs)
    conditional = ConditionalEffects(position, factors, deviation, np.zeros_like(position))
    bound = _INIT_STEP_BOUND
    for _ in range(2):
        conditional = update_effects(inputs, layout, linearisation, conditional, signs, bound)
    linearisation = linearise(inputs, layout, conditional.position, scaled)
    found = _find_mode(inputs, layout, linearisation, conditional, signs, known, _MAX_ITERATIONS)
    if found is None:
        raise HierarchyNotConvergedError("the fit did not converge")
    conditional = found.conditional
    if _is_nested(linearisation) and not _is_near(layout, known, conditional.position):
        linearisation = linearise(inputs, layout, conditional.position, scaled, is_joint=True)
        conditional = update_effects(inputs, layout, linearisation, conditional, signs, bound)
        joint = _find_mode(
            inputs, layout, linearisation, conditional, signs, known, _MAX_JOINT_ITERATIONS
        )
        if joint is None and known is not None:
            raise HierarchyFitError("the fit did not converge with joint deviations")
        found = joint or found
        conditional = found.conditional
    if scaled is not None:
        factors = conditional.factors / scaled.compute_scales(conditional.position)[:, None]
        position = scaled.from_products(conditional.position)
        conditional = replace(conditional, position=position, factors=factors)
    return found._replace(conditional=conditional)


def _find_mode(
    inputs: WarmupInputs,
    layout: BlockArrowLayout,
    linearisation: Linearisation,
    conditional: ConditionalEffects,
    signs: np.ndarray,
    known: Preconditioner | None,
    max_iterations: int,
) -> MarginalFit | None:
    """Return the zero of M by BFGS, or by Newton's method where the Hessian of M is known.

    :return: None where it does not converge.
    """
    inverse_hessian, num_converged, num_distant = linearisation.shared_covariance, 0, 0
    distance, bound = 0.0, _INIT_STEP_BOUND
    # Where Newton steps follow, the covariance need not be that of many secants.
    is_refined = linearisation.hessian.pairs is None and layout.num_shared <= MAX_REFINED_SHARED
    is_checked = not is_refined
    # More products than those of the effects would take longer than BFGS.
    coloring = linearisation.coloring
    is_newton = coloring is not None and coloring.num_colors < layout.effects_per_group
    gradient = linearisation.compute_marginal_gradient(layout, conditional.gradient)
    for _ in range(max_iterations):
        inputs.progress.advance(1)
        step = -inverse_hessian @ gradient
        largest = np.abs(step).max()
        step = step * min(1.0, bound / largest) if largest > 0.0 else step
        shift = -linearisation.apply_covariance(linearisation.strips.multiply(step))
        shift = layout.merge(shift, step)
        previous = conditional
        conditional = replace(conditional, position=conditional.position + shift)
        for _ in range(2):
            conditional = update_effects(inputs, layout, linearisation, conditional, signs, bound)
            of_effects, _ = layout.split(conditional.gradient)
            remaining = multiply_blocks(conditional.factors, of_effects, transpose=True)
            remaining_square = np.mean(np.square(remaining))
            if remaining_square < _MAX_EFFECT_STEP_SD**2:
                break
        are_distant = not remaining_square < _DISTANT_EFFECTS_SD**2
        num_distant += are_distant and linearisation.correlation is not None
        if num_distant == _MAX_DISTANT_ITERATIONS:
            return None
        following = linearisation.compute_marginal_gradient(layout, conditional.gradient)
        if not np.isfinite(following).all():
            conditional, bound = previous, _REJECTED_STEP_FACTOR * min(bound, largest)
            continue
        decrement = _compute_decrement(inverse_hessian, gradient)
        ratio = _compute_decrement(inverse_hessian, following) / max(
            decrement, np.finfo(float).tiny
        )
        if decrement > _MIN_SECANT_DECREMENT:
            inverse_hessian = _update_bfgs(inverse_hessian, step, following - gradient, gradient)
        if ratio > _MAX_DECREMENT_RATIO and decrement > _CONVERGED_DECREMENT:
            # The change of the gradient is in the inverse Hessian: a shorter step from here.
            conditional, bound = previous, _REJECTED_STEP_FACTOR * min(bound, largest)
            continue
        bound = 2.0 * bound if ratio < 1.0 and largest > bound else _INIT_STEP_BOUND
        distance += np.abs(step).max()
        gradient = following
        refreshed = None
        if is_newton:
            refreshed = linearise_normal(inputs, layout, linearisation, conditional)
        if refreshed is None and distance > _REFRESH_DISTANCE:
            scaled, is_joint = linearisation.scaled, linearisation.is_joint
            refreshed = linearise(inputs, layout, conditional.position, scaled, is_joint)
        if refreshed is not None:
            linearisation, distance = refreshed, 0.0
            inverse_hessian = linearisation.shared_covariance
            gradient = linearisation.compute_marginal_gradient(layout, conditional.gradient)
        decrement = _compute_decrement(inverse_hessian, gradient)
        is_converged = decrement < _CONVERGED_DECREMENT and not are_distant
        num_converged = num_converged + 1 if is_converged else 0
        is_near = decrement < _NEAR_DECREMENT and _is_near(layout, known, conditional.position)
        is_marginal = refreshed is not None and refreshed.is_marginal
        has_ended = num_converged == _NUM_CONVERGED
        if is_near or (has_ended and (is_checked or is_marginal)):
            return MarginalFit(conditional, inverse_hessian, linearisation)
        if has_ended:
            # Secants where a step overshot may have made the inverse Hessian far too small.
            scaled, is_joint = linearisation.scaled, linearisation.is_joint
            linearisation = linearise_normal(
                inputs, layout, linearisation, conditional
            ) or linearise(inputs, layout, conditional.position, scaled, is_joint)
            inverse_hessian, distance = linearisation.shared_covariance, 0.0
            gradient = linearisation.compute_marginal_gradient(layout, conditional.gradient)
            decrement = _compute_decrement(inverse_hessian, gradient)
            if linearisation.is_marginal and decrement < _CONVERGED_DECREMENT:
                return MarginalFit(conditional, inverse_hessian, linearisation)
            num_converged, is_checked = 0, True
    return None


def _is_nested(linearisation: Linearisation) -> bool:
    """Return whether the groups of a grouping belong to those of another."""
    hessian = linearisation.hessian
    if hessian.pairs is None:
        return False
    nesting, _, _ = find_nesting(
        hessian.layout, hessian.pairs, linearisation.factors, hessian.blocks
    )
    return bool(nesting.coupling.any())


def compute_distance(layout: BlockArrowLayout, fit: Preconditioner, position: np.ndarray) -> float:
    """Return how far the shared parameters are from those of a fit, in posterior SDs."""
    return float(np.abs(layout.take_shared(fit.solve(position - fit.center))).max())


def _is_near(layout: BlockArrowLayout, known: Preconditioner | None, position: np.ndarray) -> bool:
    """Return whether a position is near a known fit."""
    return known is not None and compute_distance(layout, known, position) < _NEAR_DISTANCE_SD


def _update_bfgs(
    inverse_hessian: np.ndarray, step: np.ndarray, change: np.ndarray, gradient: np.ndarray
) -> np.ndarray:
    """Return the inverse Hessian after a step that changed the gradient."""
    curvature, predicted = float(step @ change), abs(float(step @ gradient))
    if curvature <= _MIN_CURVATURE_RATIO * predicted:
        return inverse_hessian
    left = np.eye(step.size) - np.outer(step, change) / curvature
    return left @ inverse_hessian @ left.T + np.outer(step, step) / curvature


def _compute_decrement(inverse_hessian: np.ndarray, gradient: np.ndarray) -> float:
    """Return the Newton decrement: the length of a Newton step, in posterior SDs."""
    return float(np.sqrt(max(gradient @ inverse_hessian @ gradient, 0.0)))
