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
    BlockArrowLayout,
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


def find_prior_exponents(prior_gradient: np.ndarray, prior_hessian: BlockArrowMatrix) -> np.ndarray:
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
        if not _are_positive(precisions):
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
        precisions = np.moveaxis(prior_hessian.blocks[:size, :size, groups], 2, 0)
        if not _are_positive(precisions):
            continue
        deviations = np.linalg.solve(precisions, of_effects[:size, groups].T[..., None])[..., 0].T
        shares = compute_prior_shares(factor.effect_factors, prior_hessian.blocks, groups)[:size]
        errors = 2.0 * shares * (2.0 * shares - 1.0) * variances[:size, grouping, None]
        sds = np.sqrt(np.square(factor.effect_factors[:size, :, groups]).sum(1))
        squares = np.square(errors * deviations / sds)
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
    layout, precisions = prior_hessian.layout, np.moveaxis(prior_hessian.blocks, 2, 0)
    units, of_effects = np.eye(layout.num_shared), layout.split(prior_gradient)[0]
    by_prior, by_rows = spread_over_groups(layout, exponents), np.zeros_like(of_effects)
    if isinstance(factor.centering, PartialCentering):
        by_rows = -factor.centering.exponents.multiply(units)
    is_kept = spread_over_groups(layout, is_uncertain)
    by_prior, by_rows = np.where(is_kept, by_prior, 0.0), np.where(is_kept, by_rows, 0.0)
    total = by_prior + by_rows
    if not (total.any() and _are_positive(precisions)):
        return None
    columns = np.concatenate([of_effects[None], prior_hessian.strips.multiply(units)])
    columns = np.moveaxis(columns, (0, 2), (2, 0))
    solved = np.moveaxis(np.linalg.solve(precisions, columns), (0, 2), (2, 0))
    is_scaled = spread_over_groups(layout, is_uncertain) & (total != 0.0).any(0)
    deviations = np.where(is_scaled, solved[0], 0.0)
    shares = compute_prior_shares(factor.effect_factors, prior_hessian.blocks)
    slopes = -factor.shift_means(units) - _compute_location_slopes(layout, solved[0], -solved[1:])
    # The products of effects with their scale have the location -c (1 + z), to first order.
    slopes = np.where(is_scaled, slopes + by_rows * deviations, 0.0)
    return PriorScaling(
        SharedStrips.from_dense(total),
        np.where(is_scaled, shares, 0.0),
        deviations,
        SharedStrips.from_dense(slopes),
    )


def _compute_location_slopes(
    layout: BlockArrowLayout, deviations: np.ndarray, slopes: np.ndarray
) -> np.ndarray:
    """Return derivatives of the location of the prior by the shared parameters.

    :param slopes: those of effects along which the prior's gradient does not change. Scales and
        correlations, which do not change the location, have linear functions of the deviations.
    """
    slopes = slopes.copy()
    for columns, _ in layout.groupings:
        targets = slopes[..., columns]
        of_groups = targets.transpose(2, 0, 1)  # (G, s, k)
        flat = of_groups.reshape(len(of_groups), -1)
        fitted = deviations[:, columns].T @ np.linalg.lstsq(deviations[:, columns].T, flat)[0]
        errors = np.linalg.norm((flat - fitted).reshape(of_groups.shape), axis=(0, 2))
        is_linear = errors <= _MAX_REMAINDER * np.linalg.norm(of_groups, axis=(0, 2))
        slopes[..., columns] = np.where(is_linear[:, None, None], 0.0, targets)
    return slopes


def _are_positive(matrices: np.ndarray) -> bool:
    """Return whether matrices ``(n, k, k)`` are finite and positive definite."""
    return bool(np.isfinite(matrices).all() and np.linalg.eigvalsh(matrices).min() > 0.0)


def _sample_groups(columns: slice) -> np.ndarray:
    num_groups = columns.stop - columns.start
    rng = np.random.default_rng(0)
    return columns.start + np.sort(
        rng.choice(num_groups, min(num_groups, _MAX_GROUPS), replace=False)
    )
