r"""Effects whose prior scale has a wide posterior, and :class:`.PriorScaling` of them.

Let effects have a normal prior with precision P, and let their SDs be proportional to
:math:`e^{a\psi_j}` with a shared parameter :math:`\psi_j`. The gradient of the prior's part of the
potential is :math:`g_e = Pc`, with the deviations c from the location of the prior. Its Hessian has
:math:`H_{ej} = -a \circ g_e - P (a \circ c + N_j)`, with the derivative :math:`N_j` of the
location.

The n-th effects of all groups of a grouping are one *kind* of effects.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from numpyro_sgmcmc.adaptation.effect_centering import spread_over_groups
from numpyro_sgmcmc.adaptation.settings import WarmupInputs
from numpyro_sgmcmc.model.block_arrow import (
    BlockArrowFactor,
    BlockArrowLayout,
    BlockArrowMatrix,
    SharedStrips,
)
from numpyro_sgmcmc.model.partial_centering import PartialCentering
from numpyro_sgmcmc.model.prior_scaling import PriorScaling

# Numbers in all products with the prior's Hessian that determine the exponents: a bound on time.
_MAX_PRODUCT_ENTRIES = 2**25
# Numbers in all probes, whose products are compiled already, up to which these are used. With 1,000
# groups of two effects, compiling the products of effects alone takes 0.9 s.
_MAX_COMPILED_ENTRIES = 2**18
# Log precisions are linear in a shared parameter if the sum of their changes to either side is at
# most this fraction of the difference.
_MAX_NONLINEARITY = 0.3
_MAX_CORRELATION_CHANGE = 1e-3  # of standardised precisions, up to which it is rounding
_MIN_EXPONENT = 0.05  # below it a parameter is no scale; 1 for the logarithm of an SD
_MAX_STEP = 1.0  # of a shared parameter, in unconstrained space, for the changes
_MAX_SCALE_SD = 20.0  # of log scales; larger ones are uncertain too, and would overflow
_MIN_COUPLING = 1e-6  # in SDs of the effects; below it priors are independent
# Threshold on the squared error of linear means, in SDs of the effects, summed over groups, at one
# posterior SD of the log scale from the center.
_MIN_SQUARED_ERROR = 0.1


@dataclass(frozen=True)
class PriorSensitivity:
    """The prior of effects at a center, and how it changes with the shared parameters.

    - **gradient** - of the prior's part of the potential by effects, shape ``(k, G)``.
    - **hessian** - of this part.
    - **exponents** - a, zero for effects whose precision changes otherwise, shape ``(s, k, G)``.
    - **changes_correlation** - whether a shared parameter changes correlations, shape ``(s,)``.
    """

    gradient: np.ndarray
    hessian: BlockArrowMatrix
    exponents: np.ndarray
    changes_correlation: np.ndarray

    @classmethod
    def measure(
        cls,
        inputs: WarmupInputs,
        center: np.ndarray,
        shared_sds: np.ndarray,
        gradient: np.ndarray,
        hessian: BlockArrowMatrix,
    ) -> PriorSensitivity | None:
        """Measure the exponents, by the prior's Hessian one SD to either side of the center.

        :param gradient: of the prior's part of the potential at the center.
        :param hessian: of this part.
        :return: None if that would take long, or if the prior's precision is not positive.
        """
        layout, probes = hessian.layout, hessian.layout.make_probes()
        # The products of these probes are compiled, but those of effects alone are fewer.
        if probes.size > _MAX_COMPILED_ENTRIES:
            probes = layout.make_probes(with_shared=False)
        if 2 * layout.num_shared * probes.size > _MAX_PRODUCT_ENTRIES:
            return None
        of_effects, _ = layout.split(gradient)
        if not (np.isfinite(of_effects).all() and _are_positive(hessian.blocks)):
            return None
        log_precisions, correlations = _standardise(hessian.blocks)
        exponents = np.zeros((layout.num_shared, *of_effects.shape))
        changes_correlation = np.zeros(layout.num_shared, bool)
        coordinates = layout.take_shared(np.arange(layout.dim))
        for j, (coordinate, sd) in enumerate(zip(coordinates, shared_sds, strict=True)):
            changes, step = [], min(sd, _MAX_STEP)
            for side in (step, -step):
                position = center.copy()
                position[coordinate] += side
                _, products = inputs.batched_gradients.prior_products(position, probes)
                blocks = layout.make_blocks(products)
                if not _are_positive(blocks):
                    return None
                moved, moved_correlations = _standardise(blocks)
                changes.append(moved - log_precisions)
                change = np.abs(moved_correlations - correlations).max()
                changes_correlation[j] |= change > _MAX_CORRELATION_CHANGE
            above, below = changes
            slopes = (above - below) / (2.0 * step)
            is_linear = np.abs(above + below) <= _MAX_NONLINEARITY * np.abs(above - below)
            is_scale = is_linear & (np.abs(slopes) > 2.0 * _MIN_EXPONENT)
            if not changes_correlation[j]:
                exponents[j] = np.where(is_scale, -0.5 * slopes, 0.0)
        return cls(of_effects, hessian, exponents, changes_correlation)

    @property
    def layout(self) -> BlockArrowLayout:
        """The layout of the effects and shared parameters."""
        return self.hessian.layout

    @property
    def deviations(self) -> np.ndarray:
        """Deviations of the effects from the location of the prior, shape ``(k, G)``."""
        return _solve(np.moveaxis(self.hessian.blocks, 2, 0), self.gradient.T).T

    def compute_location_slopes(self) -> np.ndarray:
        """Return derivatives of the location of the prior, shape ``(s, k, G)``."""
        precisions = np.moveaxis(self.hessian.blocks, 2, 0)
        strips = self.hessian.strips.multiply(np.eye(self.layout.num_shared))
        terms = strips + self.exponents * self.gradient
        of_location = -np.stack([_solve(precisions, x.T).T for x in terms])
        of_location = of_location - self.exponents * self.deviations
        return np.where(self.changes_correlation[:, None, None], 0.0, of_location)

    def find_uncertain_kinds(self, factor: BlockArrowFactor, by_rows: np.ndarray) -> np.ndarray:
        """Return the kinds of effects whose scale has a wide posterior, ``(k, groupings)``.

        :param by_rows: exponents of scales by which the model multiplies effects, ``(s, k, G)``.
        """
        exponents = self.exponents + by_rows
        shifts = np.tensordot(factor.shared_factor.T, exponents, 1)
        scale_sds = np.minimum(np.sqrt(np.square(shifts).sum(0)), _MAX_SCALE_SD)
        covariances = np.einsum("acg,bcg->abg", factor.effect_factors, factor.effect_factors)
        shares = np.einsum("abg,bag->ag", self.hessian.blocks, covariances).clip(0.0, 1.0)
        deviations = self.deviations / np.sqrt(np.einsum("aag->ag", covariances))
        errors = np.zeros(shares.shape)
        for z in (scale_sds, -scale_sds):
            ratios = 1.0 / (1.0 - shares + shares * np.exp(-2.0 * z))
            errors = np.maximum(errors, np.square((ratios - 1.0 - 2.0 * shares * z) * deviations))
        sums = [errors[:, columns].sum(1) for columns, _ in self.layout.groupings]
        return np.stack(sums, -1) > _MIN_SQUARED_ERROR


def add_prior_scaling(
    sensitivity: PriorSensitivity, is_uncertain: np.ndarray, factor: BlockArrowFactor
) -> BlockArrowFactor:
    """Return a factor with the SDs and means of effects whose scale is uncertain.

    :param is_uncertain: kinds of effects, shape ``(k, groupings)``.
    :param factor: with the centring of effects that the model multiplies by their scale.
    """
    layout, units = sensitivity.layout, np.eye(sensitivity.layout.num_shared)
    by_rows = np.zeros(sensitivity.exponents.shape)
    if isinstance(factor.centering, PartialCentering):
        by_rows = -factor.centering.exponents.multiply(units)
    exponents = sensitivity.exponents + by_rows  # those of the products that have the prior's scale
    exponents = np.where(spread_over_groups(layout, is_uncertain), exponents, 0.0)
    if not exponents.any():
        return replace(factor, prior_scaling=None)
    has_groupings = factor.correlation is not None or factor.nesting is not None
    if not has_groupings:
        factors = _make_triangular(factor.effect_factors, (exponents != 0.0).any((0, 2)))
        factor = factor.replace_effect_factors(factors)
    factors, from_location = factor.effect_factors, sensitivity.deviations
    sds, is_scaled = np.sqrt(np.square(factors).sum(1)), (exponents != 0.0).any(0)
    # In the coordinates of `PartialCentering`, products have the location -c (1 + z).
    deviation_slopes = (
        -factor.shift_means(units) - sensitivity.compute_location_slopes() + by_rows * from_location
    )
    prior_shares, linear_shares, linear_deviations = np.zeros((3, *sds.shape))
    couplings, precisions = np.zeros(factors.shape), np.moveaxis(sensitivity.hessian.blocks, 2, 0)
    others = np.flatnonzero(~is_scaled.any(1))
    for j in np.flatnonzero(is_scaled.any(1)):
        found = _condition_on(int(j), precisions, factors, from_location)
        prior_shares[j], linear_shares[j], linear_deviations[j] = np.where(is_scaled[j], found, 0.0)
        if not has_groupings:
            of_others = -factors[others[:, None], others] * precisions[:, others, j].T[:, None]
            couplings[others, j] = np.where(is_scaled[j], of_others.sum(0) * sds[j], 0.0)
    is_independent = np.abs(couplings).max() < _MIN_COUPLING
    scaling = PriorScaling(
        SharedStrips.from_dense(exponents),
        prior_shares,
        linear_shares,
        np.where(is_scaled, from_location / sds, 0.0),
        linear_deviations,
        SharedStrips.from_dense(np.where(is_scaled, deviation_slopes / sds, 0.0)),
        None if is_independent else couplings,
    )
    return replace(factor, prior_scaling=scaling)


def _standardise(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return logarithms of the diagonals of precisions, and these scaled to a diagonal of one."""
    diagonal = np.einsum("aag->ag", blocks)
    roots = np.sqrt(diagonal)
    return np.log(diagonal), blocks / roots[:, None] / roots


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
    # Where the conditional precision would not be positive, the formula of independent priors.
    rows_share = 1.0 - share - linear_share
    is_valid = (rows_share >= 0.0) & (share >= 0.0)
    is_valid &= linear_share**2 <= 4.0 * rows_share * share
    total = np.clip(np.einsum("ga,ga->g", precisions[:, j], covariances[:, j]), 0.0, 1.0)
    return (
        np.where(is_valid, share, total),
        np.where(is_valid, linear_share, 0.0),
        np.where(is_valid, linear_deviation, 0.0),
    )


def _make_triangular(factors: np.ndarray, is_first: np.ndarray) -> np.ndarray:
    """Return triangular factors of the same covariances, with some kinds of effects first."""
    order = np.argsort(~is_first, kind="stable")
    # F^T = Q R, so that R^T is a factor too. Its diagonal may be negative.
    upper = np.linalg.qr(factors[order].transpose(2, 1, 0), mode="r")
    signs = np.copysign(1.0, np.einsum("gaa->ga", upper))
    triangular = np.empty_like(factors)
    triangular[order[:, None], order] = (upper * signs[..., None]).transpose(2, 1, 0)
    return triangular


def _solve(matrices: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Return the products of inverses ``(n, k, k)`` with vectors ``(n, k)``."""
    return np.linalg.solve(matrices, vectors[..., None])[..., 0]


def _are_positive(blocks: np.ndarray) -> bool:
    """Return whether blocks ``(k, k, G)`` are finite and positive definite."""
    if not np.isfinite(blocks).all():  # LAPACK would raise
        return False
    return bool(np.linalg.eigvalsh(np.moveaxis(blocks, 2, 0)).min() > 0.0)
