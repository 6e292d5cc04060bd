"""Coordinates in which the posterior of a hierarchy is nearly a standard normal.

They are built at the mode of the marginal (:mod:`.marginal_mode`), and the warm-up moves them to
the mean of draws. Where the model multiplies effects by their scale, effects are partially centred,
with fractions that are found anew at each center. Effects that a matrix multiplies are fully
centred (:mod:`.effect_centering`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from numpyro_sgmcmc.adaptation.conditional_effects import (
    NOT_FINITE,
    HierarchyFitError,
    Linearisation,
    apply_covariance,
    evaluate_block_arrow,
    evaluate_prior,
)
from numpyro_sgmcmc.adaptation.effect_centering import (
    find_centering,
    find_exponents,
    spread_over_groups,
)
from numpyro_sgmcmc.adaptation.effect_correlation import EffectCorrelation, find_nesting
from numpyro_sgmcmc.adaptation.effect_factors import (
    factorize_inverse_blocks,
    make_symmetric_factors,
)
from numpyro_sgmcmc.adaptation.marginal_mode import MarginalFit
from numpyro_sgmcmc.adaptation.prior_scales import PriorSensitivity, add_prior_scaling
from numpyro_sgmcmc.adaptation.second_order_terms import add_terms_of
from numpyro_sgmcmc.adaptation.settings import WarmupInputs
from numpyro_sgmcmc.model.block_arrow import (
    BlockArrowFactor,
    BlockArrowLayout,
    BlockArrowMatrix,
    GroupPairs,
    SharedStrips,
    invert_factors,
)
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.model.prior_scaling import PriorScaling

_REFACTOR_DISTANCE_SD = 1.0  # of a new center, beyond which effects of several groupings get new F


class UnrefinedFit(NamedTuple):
    """A fit before the Newton steps of :mod:`.marginal_refinement`.

    - **coordinates** - coordinates about its mean.
    - **has_normal_effects** - whether effects are normal given the shared parameters.
    - **linearisation** - of normal effects near its mean, in the model's coordinates.
    """

    coordinates: Preconditioner
    has_normal_effects: bool
    linearisation: Linearisation | None


def build_coordinates(
    inputs: WarmupInputs, layout: BlockArrowLayout, fit: MarginalFit
) -> UnrefinedFit:
    """Return the coordinates of a fit that has converged."""
    conditional, linearisation = fit.conditional, fit.linearisation
    gradient, hessian = evaluate_block_arrow(inputs, layout, conditional.position)
    factors, pairs = conditional.factors, hessian.pairs
    coupling, num_shared = hessian.strips, layout.num_shared
    # Products with strips and factors may take fewer numbers than those with the coupling.
    num_values = layout.effects_per_group + len(coupling.values)
    has_strips = pairs is None and num_values < num_shared
    coupling = _compute_coupling(hessian, factors, has_strips)
    try:
        shared_factor = np.linalg.cholesky((fit.shared_covariance + fit.shared_covariance.T) / 2.0)
    except np.linalg.LinAlgError:
        raise HierarchyFitError("the Hessian of the fit was not positive definite") from None
    of_prior, prior_hessian = evaluate_prior(inputs, layout, conditional.position)
    rows_gradient, of_rows = gradient - of_prior, hessian.subtract(prior_hessian)
    prior_precisions = np.diagonal(prior_hessian.blocks).T
    if pairs is None:
        factors = make_symmetric_factors(factors, prior_precisions)
    factor = BlockArrowFactor(
        factors, invert_factors(factors), coupling, shared_factor, layout, has_strips=has_strips
    )
    if pairs is not None:
        factor = _factorize_groupings(factor, hessian, pairs, factors)
    prior, rows = (of_prior, prior_hessian), (rows_gradient, of_rows)
    factor = _add_centering(inputs, factor, conditional.position, prior, rows)
    if factor.centering is not None:
        of_rows = factor.centering.transform_hessian(of_rows, rows_gradient)
    preconditioner = Preconditioner(conditional.position, factor, gradient, of_rows)
    if not preconditioner.is_finite():
        raise HierarchyFitError(NOT_FINITE)
    is_normal = conditional.is_normal
    is_usable = is_normal and linearisation.scaled is None
    return UnrefinedFit(preconditioner, is_normal, linearisation if is_usable else None)


def recenter_block_arrow(
    inputs: WarmupInputs, preconditioner: Preconditioner, mean: np.ndarray, scale: np.ndarray
) -> Preconditioner | None:
    """Return coordinates in whose units the shared ones were ``mean + scale q``.

    :return: None where gradient or Hessian at the new center are not finite.
    """
    factor, scaling = preconditioner.factor, preconditioner.factor.prior_scaling
    layout = factor.layout
    no_effects = np.zeros((layout.effects_per_group, layout.num_groups))
    center = preconditioner.to_position(layout.merge(no_effects, mean))
    factor = factor.refit_shared(mean, scale)
    gradient, hessian = evaluate_block_arrow(inputs, layout, center)
    if not (np.isfinite(gradient).all() and hessian.is_finite()):
        return None
    coupling = _compute_coupling(hessian, factor.effect_factors, factor.has_strips)
    factor = replace(factor, coupling=coupling)
    if hessian.pairs is not None and np.linalg.norm(mean) > _REFACTOR_DISTANCE_SD:
        factors = factorize_inverse_blocks(hessian.blocks)
        factor = _factorize_groupings(factor, hessian, hessian.pairs, factors)
    of_prior, prior_hessian = evaluate_prior(inputs, layout, center)
    rows_gradient, of_rows = gradient - of_prior, hessian.subtract(prior_hessian)
    prior, rows = (of_prior, prior_hessian), (rows_gradient, of_rows)
    if scaling is not None:
        factor = _move_prior_scaling(inputs, factor, scaling, center, prior)
    elif factor.sd_trend is not None:  # of effects with the same fractions
        factor = replace(factor, centering=factor.centering and factor.centering.move(center))
    if factor.prior_scaling is None and factor.sd_trend is None:
        factor = _add_centering(inputs, factor, center, prior, rows)
    if factor.centering is not None:
        of_rows = factor.centering.transform_hessian(of_rows, rows_gradient)
    recentered = Preconditioner(center, factor, gradient, of_rows)
    of_rows = add_terms_of(inputs, recentered, preconditioner.reference_hessian)
    recentered = recentered._replace(reference_hessian=of_rows)
    return recentered if recentered.is_finite() else None


def _add_centering(
    inputs: WarmupInputs,
    factor: BlockArrowFactor,
    center: np.ndarray,
    prior: tuple[np.ndarray, BlockArrowMatrix],
    rows: tuple[np.ndarray, BlockArrowMatrix],
) -> BlockArrowFactor:
    """Return the factor with the centring of effects, and the scaling of those whose scale is
    uncertain.

    :param prior: gradient and Hessian of the prior's part of the potential at the center.
    :param rows: those of the rows' part.
    """
    by_rows = find_exponents(*rows, center)
    sensitivity = PriorSensitivity.measure(inputs, center, factor.shared_sds, *prior)
    is_uncertain = np.zeros(by_rows.shape[1:], bool)
    if sensitivity is not None:
        of_effects = spread_over_groups(factor.layout, by_rows)
        is_uncertain = sensitivity.find_uncertain_kinds(factor, of_effects)
    centering = find_centering(
        inputs.batched_gradients,
        *rows,
        center,
        np.diagonal(prior[1].blocks).T,
        factor.shared_sds,
        by_rows,
        is_uncertain,
    )
    factor = replace(factor, centering=centering)
    if sensitivity is None:
        return factor
    return add_prior_scaling(sensitivity, is_uncertain, factor)


def _move_prior_scaling(
    inputs: WarmupInputs,
    factor: BlockArrowFactor,
    scaling: PriorScaling,
    center: np.ndarray,
    prior: tuple[np.ndarray, BlockArrowMatrix],
) -> BlockArrowFactor:
    """Return the factor with the same uncertain scales at another center.

    It has none if the prior's Hessian is not positive there.
    """
    centering = factor.centering and factor.centering.move(center)
    factor = replace(factor, centering=centering)
    sensitivity = PriorSensitivity.measure(inputs, center, factor.shared_sds, *prior)
    if sensitivity is None:
        return factor
    return add_prior_scaling(sensitivity, scaling.find_kinds(factor.layout), factor)


def _factorize_groupings(
    factor: BlockArrowFactor, hessian: BlockArrowMatrix, pairs: GroupPairs, factors: np.ndarray
) -> BlockArrowFactor:
    """Return the factor with the dependence between effects of several groupings.

    :param factors: F of each group given all others.
    """
    nesting, factors, others = find_nesting(hessian.layout, pairs, factors, hessian.blocks)
    remaining = EffectCorrelation.create(others, factors)
    return replace(
        factor.replace_effect_factors(factors),
        correlation=None if remaining is None else remaining.fit_low_rank(),
        nesting=nesting if nesting.coupling.any() else None,
    )


def _compute_coupling(
    hessian: BlockArrowMatrix, factors: np.ndarray, has_strips: bool
) -> SharedStrips:
    """Return the dependence of the effects' means on the shared parameters, or the strips of it.

    :param factors: F of a single grouping.
    """
    if has_strips:
        return hessian.strips
    if hessian.pairs is not None:
        factors = factorize_inverse_blocks(hessian.blocks)
    correlation = EffectCorrelation.create(hessian.pairs, factors)
    strips = hessian.strips.multiply(np.eye(hessian.layout.num_shared))
    return SharedStrips.from_dense(apply_covariance(factors, strips, correlation))
