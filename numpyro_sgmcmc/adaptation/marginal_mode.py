"""Mode of the marginal of the parameters that the groups of a hierarchy share.

BFGS finds the zero of the gradient M of :mod:`.conditional_effects`, and its inverse Hessian is the
covariance of the shared parameters. Where Newton steps follow (:mod:`.marginal_refinement`), BFGS
starts again where it has converged, because secants of steps that were too long may have made later
steps too short. Where effects are normal given the shared parameters and few products determine the
strips (:mod:`.shared_coloring`), Newton's method takes the place of BFGS.

With several groupings, groups then deviate with the group that they belong to, such as schools
with their district, and BFGS continues. Other effects of several groupings deviate independently.

With crossed effects, such as the slopes and abilities of item responses, steps from zero may not
approach the effects' means. The fit then ends, and the warm-up starts another one at the means of
mean-field fits.

An iteration takes 2k + 5 gradients over the data with k effects per group, and k + 14 of Newton's
method where three products determine the strips, whatever the number of groups; 10 to 30 iterations
are usual.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from numpyro_sgmcmc.adaptation.conditional_effects import (
    ConditionalEffects,
    HierarchyFitError,
    Linearisation,
    choose_deviation,
    linearise,
    linearise_normal,
    relinearise,
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
# The same by the covariance of the linearisation, which is not that of the marginal.
_MAX_CHECKED_DECREMENT = 1.0
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
# Newton decrement up to which effects oscillate if their step reverses after one of the shared
# parameters. After a longer one, they follow the shared parameters.
_MAX_DAMPED_DECREMENT = 1.0
_MAX_REJECTED_STEPS = 6  # one after the other: the last is 0.3^6 = 0.0007 times as long


class HierarchyNotConvergedError(HierarchyFitError):
    """The fit did not converge. From effects near their posterior means it may."""


@dataclass(frozen=True)
class MarginalFit:
    """A normal approximation of the marginal, while its mode is sought and at the mode.

    - **conditional** - effects given the shared parameters at its center.
    - **linearisation** - near the center.
    - **shared_covariance** - of the shared parameters, the inverse Hessian of BFGS, ``(s, s)``.
    - **gradient** - M at the center, shape ``(s,)``.
    """

    conditional: ConditionalEffects
    linearisation: Linearisation
    shared_covariance: np.ndarray
    gradient: np.ndarray

    @classmethod
    def create(cls, linearisation: Linearisation, conditional: ConditionalEffects) -> MarginalFit:
        """Return the approximation with the covariance of a linearisation."""
        gradient = linearisation.compute_marginal_gradient(conditional.gradient)
        return cls(conditional, linearisation, linearisation.shared_covariance, gradient)

    @property
    def decrement(self) -> float:
        """The Newton decrement: the length of a Newton step, in posterior SDs."""
        return float(np.sqrt(max(self.gradient @ self.shared_covariance @ self.gradient, 0.0)))


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
    blocks = linearisation.hessian.blocks
    deviation = choose_deviation(linearisation, factors, blocks, signs)
    conditional = ConditionalEffects(position, factors, deviation, np.zeros_like(position), blocks)
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
    return replace(found, conditional=conditional)


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
    fit = MarginalFit.create(linearisation, conditional)
    bound, distance = _INIT_STEP_BOUND, 0.0
    num_converged = num_distant = num_rejected = 0
    # Where Newton steps follow, the covariance need not be that of many secants.
    is_refined = linearisation.hessian.pairs is None and layout.num_shared <= MAX_REFINED_SHARED
    is_checked = False
    # More products than those of the effects would take longer than BFGS.
    coloring = linearisation.coloring
    is_newton = coloring is not None and coloring.num_colors < layout.effects_per_group
    for _ in range(max_iterations):
        inputs.progress.advance(1)
        step = -fit.shared_covariance @ fit.gradient
        largest = np.abs(step).max()
        step = step * min(1.0, bound / largest) if largest > 0.0 else step
        moved, effect_step_sd = _move(inputs, layout, fit, step, signs, bound)
        are_distant = not effect_step_sd < _DISTANT_EFFECTS_SD
        num_distant += are_distant and fit.linearisation.correlation is not None
        if num_distant == _MAX_DISTANT_ITERATIONS:
            return None
        is_finite = np.isfinite(moved.gradient).all()
        decrement = fit.decrement
        ratio = moved.decrement / max(decrement, np.finfo(float).tiny)
        has_grown = ratio > _MAX_DECREMENT_RATIO and decrement > _CONVERGED_DECREMENT
        # After many shorter steps, the growth is that of the effects' own steps.
        by_effects = has_grown and num_rejected >= _MAX_REJECTED_STEPS
        if is_finite and decrement > _MIN_SECANT_DECREMENT and not by_effects:
            # Also of a step that is rejected: the next one from here is better.
            covariance = _update_bfgs(fit, step, moved.gradient)
            fit, moved = (replace(x, shared_covariance=covariance) for x in (fit, moved))
        if not is_finite or (has_grown and not by_effects):
            bound = _REJECTED_STEP_FACTOR * min(bound, largest)
            num_rejected += 1
            continue
        fit, num_rejected = moved, 0
        bound = 2.0 * bound if ratio < 1.0 and largest > bound else _INIT_STEP_BOUND
        distance += np.abs(step).max()
        refreshed = None
        if is_newton:
            refreshed = linearise_normal(inputs, layout, fit.linearisation, fit.conditional)
        if refreshed is None and distance > _REFRESH_DISTANCE:
            refreshed = relinearise(inputs, layout, fit.linearisation, fit.conditional)
        if refreshed is not None:
            fit, distance = MarginalFit.create(refreshed, fit.conditional), 0.0
        is_converged = fit.decrement < _CONVERGED_DECREMENT and not are_distant
        num_converged = num_converged + 1 if is_converged else 0
        is_near = fit.decrement < _NEAR_DECREMENT
        if is_near and _is_near(layout, known, fit.conditional.position):
            return fit
        if num_converged < _NUM_CONVERGED:
            continue
        if not is_refined or (refreshed is not None and refreshed.is_marginal):
            return fit
        # Secants where a step overshot may have made the covariance far too small.
        refreshed = linearise_normal(inputs, layout, fit.linearisation, fit.conditional)
        if refreshed is None:
            refreshed = relinearise(inputs, layout, fit.linearisation, fit.conditional)
        checked, distance = MarginalFit.create(refreshed, fit.conditional), 0.0
        if refreshed.is_marginal and checked.decrement < _CONVERGED_DECREMENT:
            return checked
        if is_checked and checked.decrement < _MAX_CHECKED_DECREMENT:
            return fit
        fit, num_converged, is_checked = checked, 0, True
    return None


def _move(
    inputs: WarmupInputs,
    layout: BlockArrowLayout,
    fit: MarginalFit,
    step: np.ndarray,
    signs: np.ndarray,
    bound: float,
) -> tuple[MarginalFit, float]:
    """Return the fit after a step of the shared parameters, with the same covariance.

    Also return the RMS of the Newton steps that the effects would take there, in posterior SDs.
    """
    linearisation = fit.linearisation
    shift = -linearisation.apply_covariance(linearisation.strips.multiply(step))
    position = fit.conditional.position + layout.merge(shift, step)
    conditional, effect_step_sd = replace(fit.conditional, position=position), np.inf
    if fit.decrement > _MAX_DAMPED_DECREMENT:
        conditional = replace(conditional, step=None)
    for _ in range(2):
        conditional = update_effects(inputs, layout, linearisation, conditional, signs, bound)
        of_effects, _ = layout.split(conditional.gradient)
        steps = multiply_blocks(conditional.factors, of_effects, transpose=True)
        effect_step_sd = float(np.sqrt(np.mean(np.square(steps))))
        if effect_step_sd < _MAX_EFFECT_STEP_SD:
            break
    gradient = linearisation.compute_marginal_gradient(conditional.gradient)
    return replace(fit, conditional=conditional, gradient=gradient), effect_step_sd


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


def _update_bfgs(fit: MarginalFit, step: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """Return the covariance after a step to another gradient."""
    change, covariance = gradient - fit.gradient, fit.shared_covariance
    curvature, predicted = float(step @ change), abs(float(step @ fit.gradient))
    if curvature <= _MIN_CURVATURE_RATIO * predicted:
        return covariance
    left = np.eye(step.size) - np.outer(step, change) / curvature
    return left @ covariance @ left.T + np.outer(step, step) / curvature
