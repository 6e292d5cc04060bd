r"""Effects whose prior scale has a wide posterior, and :class:`.PriorScaling` of them.

Let effects have a normal prior with precision P, whose SDs are proportional to
:math:`e^{a\psi_j}`. The gradient of the prior's part of the potential is then :math:`g_e = Pc`,
with the deviations c from the location of the prior, and its Hessian has
:math:`H_{ej} = -(a \circ g_e + P (a \circ c))`. This determines the exponents a. The derivative of
the location by any other parameter is :math:`-P^{-1} H_{ej}`.
"""

from __future__ import annotations

import numpy as np

from numpyro_sgmcmc.adaptation.effect_centering import spread_over_groups
from numpyro_sgmcmc.model.block_arrow import (
    BlockArrowFactor,
    BlockArrowMatrix,
    SharedStrips,
)
from numpyro_sgmcmc.model.partial_centering import PartialCentering
from numpyro_sgmcmc.model.prior_scaling import PriorScaling

# Size of what is left of a column of the Hessian, up to which a parameter is the scale of effects,
# and the exponents that count: 1 for the logarithm of an SD, 0.5 for that of a variance.
_MAX_REMAINDER, _MIN_EXPONENT = 1e-2, 0.1
_MAX_GROUPS = 2_000  # of which the prior is read
# Squared error of the linear means of all effects of a kind, in their SDs, one posterior SD from
# the center, from which on their scale is uncertain.
_MIN_SQUARED_ERROR = 0.1


def find_prior_exponents(
    prior_gradient: np.ndarray, prior_hessian: BlockArrowMatrix
) -> np.ndarray:
    """Return exponents of the SDs of each kind of effects, shape ``(s, k, groupings)``.

    They are zero where no shared parameter is the logarithm of a scale of a normal prior.
    """
    layout = prior_hessian.layout
    of_effects, _ = layout.split(prior_gradient)
    strips = prior_hessian.strips.multiply(np.eye(layout.num_shared))
    exponents = np.zeros((layout.num_shared, layout.effects_per_group, len(layout.groupings)))
    for grouping, (columns, size) in enumerate(layout.groupings):
        groups = _sample_groups(columns)
        precisions = np.moveaxis(prior_hessian.blocks[:size, :size, groups], 2, 0)
        gradients = of_effects[:size, groups].T
        if not (np.isfinite(precisions).all() and np.linalg.eigvalsh(precisions).min() > 0.0):
            continue
        deviations = np.linalg.solve(precisions, gradients[..., None])[..., 0]
        terms = precisions * deviations[:, None]
        terms[:, range(size), range(size)] += gradients
        units = 1.0 / np.sqrt(np.diagonal(precisions, axis1=1, axis2=2))
        terms = (units[..., None] * terms).reshape(-1, size)
        targets = (-units * strips[:, :size, groups].swapaxes(1, 2)).reshape(len(strips), -1)
        found = np.linalg.lstsq(terms, targets.T, rcond=None)[0]
        errors = np.linalg.norm(targets.T - terms @ found, axis=0)
        is_scale = errors < _MAX_REMAINDER * np.linalg.norm(targets, axis=1)
        exponents[:, :size, grouping] = np.where(
            is_scale & (np.abs(found) > _MIN_EXPONENT), found, 0.0
        ).T
    return exponents


def find_uncertain_kinds(
    exponents: np.ndarray,
    prior_gradient: np.ndarray,
    prior_hessian: BlockArrowMatrix,
    factor: BlockArrowFactor,
) -> np.ndarray:
    """Return the kinds of effects whose scale has a wide posterior, shape ``(k, groupings)``.

    :param exponents: of the scales, by the prior and by the rows, shape ``(s, k, groupings)``.
    """
    layout = prior_hessian.layout
    of_effects, _ = layout.split(prior_gradient)
    covariance = factor.shared_factor @ factor.shared_factor.T
    variances = np.einsum("ikn,ij,jkn->kn", exponents, covariance, exponents)
    is_uncertain = np.zeros(variances.shape, bool)
    for grouping, (columns, size) in enumerate(layout.groupings):
        groups = _sample_groups(columns)
        factors = factor.effect_factors[:size, :, groups]
        precisions = np.einsum("aag->ag", prior_hessian.blocks[:size, :size, groups])
        if precisions.min() <= 0.0:
            continue
        shares = compute_prior_shares(factor.effect_factors, prior_hessian.blocks, groups)[:size]
        deviations = of_effects[:size, groups] / precisions
        errors = 2.0 * shares * (2.0 * shares - 1.0) * variances[:size, grouping, None]
        squares = (errors * deviations) ** 2 / np.square(factors).sum(1)
        num_groups = columns.stop - columns.start
        is_uncertain[:size, grouping] = squares.mean(1) * num_groups > _MIN_SQUARED_ERROR
    return is_uncertain


def compute_prior_shares(
    factors: np.ndarray, precisions: np.ndarray, groups: np.ndarray | slice = slice(None)
) -> np.ndarray:
    """Return the prior's shares of the precisions along the columns of F, shape ``(k, G)``."""
    factors, precisions = factors[..., groups], precisions[..., groups]
    products = np.einsum("acg,abg->cbg", factors, precisions)
    return np.clip(np.einsum("cbg,bcg->cg", products, factors), 0.0, 1.0)


def build_prior_scaling(
    exponents: np.ndarray,
    is_uncertain: np.ndarray,
    prior_gradient: np.ndarray,
    prior_hessian: BlockArrowMatrix,
    factor: BlockArrowFactor,
) -> PriorScaling | None:
    """Return the SDs and means of effects whose scale is uncertain, None without any.

    :param exponents: those of :func:`find_prior_exponents`.
    :param is_uncertain: kinds of effects, shape ``(k, groupings)``; where the model multiplies them
        by their scale, they are fully centred.
    """
    layout = prior_hessian.layout
    units, of_effects = np.eye(layout.num_shared), layout.split(prior_gradient)[0]
    by_prior, by_rows = spread_over_groups(layout, exponents), np.zeros_like(of_effects)
    if isinstance(factor.centering, PartialCentering):
        by_rows = -factor.centering.exponents.multiply(units)
    is_scaled = spread_over_groups(layout, is_uncertain)
    by_prior, by_rows = np.where(is_scaled, by_prior, 0.0), np.where(is_scaled, by_rows, 0.0)
    total = by_prior + by_rows
    is_scaled = total.any(0)
    if not is_scaled.any():
        return None
    columns = np.concatenate([of_effects[None], prior_hessian.strips.multiply(units)])
    columns = np.moveaxis(columns, (0, 2), (2, 0))
    solved = np.linalg.solve(np.moveaxis(prior_hessian.blocks, 2, 0), columns)
    solved = np.moveaxis(solved, (0, 2), (2, 0))
    deviations, of_location = np.where(is_scaled, solved[0], 0.0), -solved[1:]
    shares = compute_prior_shares(factor.effect_factors, prior_hessian.blocks)
    # The products of effects with their scale have the location -c (1 + z), to first order.
    of_scales = -factor.shift_means(units) + by_rows * deviations
    is_scale = total.any((1, 2))[:, None, None]
    slopes = np.where(is_scale, of_scales, -(1.0 - shares) * of_location)
    return PriorScaling(
        SharedStrips.from_dense(total),
        np.where(is_scaled, shares, 0.0),
        deviations,
        SharedStrips.from_dense(np.where(is_scaled, slopes, 0.0)),
    )


def _sample_groups(columns: slice) -> np.ndarray:
    num_groups = columns.stop - columns.start
    rng = np.random.default_rng(0)
    return columns.start + np.sort(
        rng.choice(num_groups, min(num_groups, _MAX_GROUPS), replace=False)
    )
