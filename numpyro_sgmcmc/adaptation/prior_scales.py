r"""Effects whose prior scale has a wide posterior, and :class:`.PriorScaling` of them.

Let effects have a normal prior with precision P, whose SDs are proportional to
:math:`e^{a\psi_j}`. The gradient of the prior's part of the potential is then :math:`g_e = Pc`,
with the deviations c from the location of the prior, and its Hessian has
:math:`H_{ej} = -(a \circ g_e + P (a \circ c))`. This determines the exponents a. The derivative of
the location by any other parameter is :math:`-P^{-1} H_{ej}`.

The n-th effects of all groups of a grouping are one *kind* of effects. Arrays of kinds have the
shape ``(k, groupings)``.
"""

from __future__ import annotations

from dataclasses import replace

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
_MIN_COUPLING = 1e-6  # in SDs of the effects, of priors that are not independent
# Squared error of the linear means of all effects of a kind, in their SDs, one posterior SD of the
# log scale from the center, from which on the scale is uncertain.
_MIN_SQUARED_ERROR = 0.1


def find_prior_exponents(prior_gradient: np.ndarray, prior_hessian: BlockArrowMatrix) -> np.ndarray:
    """Return exponents of the SDs of each kind of effects, shape ``(s, k, groupings)``.

    They are zero where no shared parameter is the logarithm of a scale of a normal prior.
    """
    layout = prior_hessian.layout
    of_effects, _ = layout.split(prior_gradient)
    exponents = np.zeros((layout.num_shared, layout.effects_per_group, len(layout.groupings)))
    for grouping, (columns, size) in enumerate(layout.groupings):
        groups = _sample_groups(columns)
        gradients, precisions = of_effects[:size, groups].T, _take(prior_hessian, groups, size)
        strips = prior_hessian.strips.take_groups(groups).multiply(np.eye(layout.num_shared))
        if not (np.isfinite(strips).all() and _is_proper(precisions, gradients)):
            continue
        terms = precisions * _solve(precisions, gradients)[:, None]
        terms[:, range(size), range(size)] += gradients
        units = 1.0 / np.sqrt(np.diagonal(precisions, axis1=1, axis2=2))
        terms = (units[..., None] * terms).reshape(-1, size)
        targets = (-units * strips[:, :size].swapaxes(1, 2)).reshape(len(strips), -1).T
        found, *_ = np.linalg.lstsq(terms, targets, rcond=None)
        errors = np.linalg.norm(targets - terms @ found, axis=0)
        is_scale = errors < _MAX_REMAINDER * np.linalg.norm(targets, axis=0)
        found = np.where(is_scale & (np.abs(found) > _MIN_EXPONENT), found, 0.0)
        exponents[:, :size, grouping] = found.T
    return exponents


def find_uncertain_scales(
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
    scale_sds = np.sqrt(np.einsum("ikn,ij,jkn->kn", exponents, covariance, exponents))
    is_uncertain = np.zeros(scale_sds.shape, bool)
    for grouping, (columns, size) in enumerate(layout.groupings):
        groups = _sample_groups(columns)
        gradients, precisions = of_effects[:size, groups].T, _take(prior_hessian, groups, size)
        if not _is_proper(precisions, gradients):
            continue
        shares, sds = _compute_shares(precisions, factor.effect_factors[:size, :, groups])
        deviations, errors = _solve(precisions, gradients).T / sds, np.zeros(shares.shape)
        for z in (scale_sds[:size, grouping, None], -scale_sds[:size, grouping, None]):
            ratios = 1.0 / (1.0 - shares + shares * np.exp(-2.0 * z))
            errors = np.maximum(errors, np.square((ratios - 1.0 - 2.0 * shares * z) * deviations))
        num_groups = columns.stop - columns.start
        found = errors.mean(1) * num_groups > _MIN_SQUARED_ERROR
        if found.any():
            all_groups = np.arange(columns.start, columns.stop)
            all_precisions = _take(prior_hessian, all_groups, size)
            found &= _is_proper(all_precisions, of_effects[:size, columns].T)
        is_uncertain[:size, grouping] = found
    return is_uncertain


def add_prior_scaling(
    exponents: np.ndarray,
    prior_gradient: np.ndarray,
    prior_hessian: BlockArrowMatrix,
    factor: BlockArrowFactor,
) -> BlockArrowFactor:
    """Return a factor with the SDs and means of effects whose scale is uncertain.

    :param exponents: those of the scales of these effects, shape ``(s, k, groupings)``. Where the
        model multiplies effects by their scale, these are of the product.
    :param factor: with the centring of effects that the model multiplies by their scale.
    """
    if not exponents.any():
        return replace(factor, prior_scaling=None)
    layout, units = prior_hessian.layout, np.eye(prior_hessian.layout.num_shared)
    of_effects, _ = layout.split(prior_gradient)
    has_groupings = factor.correlation is not None or factor.nesting is not None
    if not has_groupings:
        factors = _make_triangular(factor.effect_factors, exponents[..., 0] != 0.0)
        factor = factor.replace_effect_factors(factors)
    strips = prior_hessian.strips.multiply(units)
    by_rows = np.zeros(strips.shape)
    if isinstance(factor.centering, PartialCentering):
        by_rows = -factor.centering.exponents.multiply(units)
    slopes, couplings = -factor.shift_means(units), np.zeros(factor.effect_factors.shape)
    shares, linear_shares, deviations, linear_deviations = np.zeros((4, *of_effects.shape))
    for grouping, (columns, size) in enumerate(layout.groupings):
        is_scaled, part = (exponents[:, :size, grouping] != 0.0).any(0), (slice(size), columns)
        if not is_scaled.any():
            slopes[:, *part] = 0.0
            continue
        precisions = _take(prior_hessian, np.arange(columns.start, columns.stop), size)
        from_location = _solve(precisions, of_effects[part].T).T
        of_location = -np.stack([_solve(precisions, x[part].T).T for x in strips])
        prior_sds = 1.0 / np.sqrt(np.diagonal(precisions, axis1=1, axis2=2).T)
        is_location = ~_are_linear(of_location / prior_sds, from_location / prior_sds)
        of_location *= is_location[:, None, None]
        # The products of effects with their scale have the location -c (1 + z), to first order.
        of_mean = slopes[:, *part] - of_location + by_rows[:, *part] * from_location
        factors = factor.effect_factors[:size, :size, columns]
        sds = np.sqrt(np.square(factors).sum(1))
        deviations[part] = np.where(is_scaled[:, None], from_location / sds, 0.0)
        slopes[:, *part] = np.where(is_scaled[:, None], of_mean / sds, 0.0)
        others = np.flatnonzero(~is_scaled)
        for j in np.flatnonzero(is_scaled):
            found = _condition_on(int(j), precisions, factors, from_location)
            shares[j, columns], linear_shares[j, columns], linear_deviations[j, columns] = found
            if not has_groupings:
                of_others = -factors[others[:, None], others] * precisions[:, others, j].T[:, None]
                couplings[others, j, columns] = of_others.sum(0) * sds[j]
    is_independent = np.abs(couplings).max() < _MIN_COUPLING
    scaling = PriorScaling(
        SharedStrips.from_dense(spread_over_groups(layout, exponents)),
        shares,
        linear_shares,
        deviations,
        linear_deviations,
        SharedStrips.from_dense(slopes),
        None if is_independent else couplings,
    )
    return replace(factor, prior_scaling=scaling)


def _condition_on(
    j: int, precisions: np.ndarray, factors: np.ndarray, deviations: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return terms of the conditional distribution of effect j, each of shape ``(n,)``: its prior's
    share of the precision, the linear share, and the linear deviation.

    :param precisions: of the prior, shape ``(n, k, k)``.
    :param factors: of the effects' covariances, shape ``(k, k, n)``.
    :param deviations: of the means from the location of the prior, shape ``(k, n)``.
    """
    covariances = np.einsum("acg,bcg->gab", factors, factors)
    variance, totals = covariances[:, j, j], np.linalg.inv(covariances)
    others = np.delete(np.arange(len(factors)), j)
    of_prior, of_rows = precisions[:, others, j], (totals - precisions)[:, others, j]
    block = totals[:, others[:, None], others]
    solved = _solve(block, of_prior) if len(others) else of_prior
    share = variance * (precisions[:, j, j] - (of_prior * solved).sum(1))
    linear_share = -2.0 * variance * (of_rows * solved).sum(1)
    forces = np.einsum("gab,bg->ga", totals, deviations)[:, others]
    linear_deviation = -np.sqrt(variance) * (forces * solved).sum(1)
    # Rows whose Hessian is not positive give no variance: they are treated as independent ones.
    rows_share = 1.0 - share - linear_share
    is_valid = (rows_share >= 0.0) & (share >= 0.0)
    is_valid &= linear_share**2 <= 4.0 * rows_share * share
    total = np.clip(np.einsum("ga,ga->g", precisions[:, j], covariances[:, j]), 0.0, 1.0)
    return (
        np.where(is_valid, share, total),
        np.where(is_valid, linear_share, 0.0),
        np.where(is_valid, linear_deviation, 0.0),
    )


def _make_triangular(factors: np.ndarray, is_scale: np.ndarray) -> np.ndarray:
    """Return triangular factors of the same covariances, with effects that have scales first.

    :param is_scale: whether each shared parameter is a scale of each effect, shape ``(s, k)``.
    """
    order = np.argsort(~is_scale.any(0), kind="stable")
    covariances = np.einsum("acg,bcg->gab", factors, factors)
    ordered = np.linalg.cholesky(covariances[:, order[:, None], order])
    triangular = np.empty_like(factors)
    triangular[order[:, None], order] = np.moveaxis(ordered, 0, 2)
    return triangular


def _compute_shares(precisions: np.ndarray, factors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the prior's shares of the precisions of effects, and their SDs, each ``(k, n)``.

    :param precisions: of the prior, shape ``(n, k, k)``.
    :param factors: of the effects' covariances, shape ``(k, k, n)``.
    """
    covariances = np.einsum("acg,bcg->gab", factors, factors)
    shares = np.einsum("gab,gba->ag", precisions, covariances)
    return np.clip(shares, 0.0, 1.0), np.sqrt(np.einsum("gaa->ag", covariances))


def _are_linear(functions: np.ndarray, deviations: np.ndarray) -> np.ndarray:
    """Return which functions ``(s, k, n)`` are the same linear function of each group's deviations.

    The derivative of the location is not. What scales and correlations have in its place is.
    """
    targets = functions.transpose(2, 0, 1)
    flat = targets.reshape(len(targets), -1)
    coefficients, *_ = np.linalg.lstsq(deviations.T, flat, rcond=None)
    errors = (flat - deviations.T @ coefficients).reshape(targets.shape)
    sizes = np.linalg.norm(targets, axis=(0, 2))
    return np.asarray(np.linalg.norm(errors, axis=(0, 2)) <= _MAX_REMAINDER * sizes)


def _take(hessian: BlockArrowMatrix, groups: np.ndarray, size: int) -> np.ndarray:
    """Return the blocks of the first effects of some groups, shape ``(n, size, size)``."""
    return np.moveaxis(hessian.blocks[:size, :size, groups], 2, 0)


def _solve(matrices: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Return the products of inverses ``(n, k, k)`` with vectors ``(n, k)``."""
    return np.linalg.solve(matrices, vectors[..., None])[..., 0]


def _is_proper(precisions: np.ndarray, gradients: np.ndarray) -> bool:
    """Return whether all is finite, else LAPACK would raise, and precisions positive definite."""
    is_finite = np.isfinite(precisions).all() and np.isfinite(gradients).all()
    return bool(is_finite and np.linalg.eigvalsh(precisions).min() > 0.0)


def _sample_groups(columns: slice) -> np.ndarray:
    num_groups = columns.stop - columns.start
    rng = np.random.default_rng(0)
    sample = rng.choice(num_groups, min(num_groups, _MAX_GROUPS), replace=False)
    return columns.start + np.sort(sample)
