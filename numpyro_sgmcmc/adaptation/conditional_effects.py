r"""Effects of many groups given the parameters that all groups share.

Group by group, the effects given the shared parameters :math:`\psi` are approximated as normals
:math:`N(m_g(\psi), D_g(\psi)^{-1})` whose means are found by Newton steps. The expectation over
them is taken at two antithetic points :math:`m_g \pm D_g^{-1/2}\xi_g` of signs, which is exact for
quadratic functions up to the products of different effects of a group; these nearly cancel between
groups (:func:`.balance_signs`).

A linearisation has the dependence of the effects on the shared parameters, :math:`W_g = D_g^{-1}
B_g`, and the gradient of the marginal,

.. math:: M(\psi) = E[\partial_\psi U] - \sum_g W_g^\top E[\partial_{e_g} U]

(Fisher's identity; the second term is zero at :math:`m_g(\psi)`), with blocks of
:mod:`~numpyro_sgmcmc.model.block_arrow`.

Effects are normal given the shared parameters where the gradient is linear in them, as with
Gaussian rows. The Hessian of the marginal is then exactly

.. math:: E[C] - \sum_g E[B_g]^\top D_g^{-1} E[B_g]
   - \tfrac12 \sum_g \mathrm{tr}(D_g^{-1}\, \partial_i D_g\, D_g^{-1}\, \partial_j D_g).

Half the difference of the strips at the two points is :math:`b_i = \partial_i D_g D_g^{-1/2}\xi_g`,
and the expectation of :math:`b_i^\top D_g^{-1} b_j` is the trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from numpyro_sgmcmc.adaptation.budget import HIGH_DIM
from numpyro_sgmcmc.adaptation.effect_centering import ScaledEffects
from numpyro_sgmcmc.adaptation.effect_correlation import (
    EffectCorrelation,
    find_nesting,
    sum_row_couplings,
)
from numpyro_sgmcmc.adaptation.effect_factors import factorize_inverse_blocks
from numpyro_sgmcmc.adaptation.settings import WarmupInputs
from numpyro_sgmcmc.adaptation.shared_coloring import SharedColoring
from numpyro_sgmcmc.model.block_arrow import (
    BlockArrowLayout,
    BlockArrowMatrix,
    SharedStrips,
    multiply_blocks,
)

# Of the Schur complement with unit diagonal of the corner, without and with effects whose groups
# are the rows. A smaller one makes steps too long where the start is far from the mode.
_MIN_SCALED_EIGENVALUE, _MIN_TIGHT_EIGENVALUE = 1e-3, 1e-5
_COLUMNS_PER_PRODUCT = 8  # shared parameters whose coupling is in memory at once
# Relative error of a product with a random vector up to which the Hessian is a block-arrow matrix.
_MAX_STRUCTURE_ERROR = 2e-3
# Eigenvalue of the Hessian of the marginal below which it counts as singular, in units in which the
# corner has a diagonal of ones.
_MIN_MARGINAL_EIGENVALUE = 1e-6
# RMS difference of an effect's gradient, at a posterior SD to either side of its mean, from that of
# a normal. With Gaussian rows it is at most 1e-5 (rounding), with ten binary rows per group 6e-3,
# and with balanced ones, whose gradient is odd, 2e-3.
_MAX_NONLINEARITY_SD = 1e-4

# Newton step of a group's effects, in posterior SDs, below which it is not damped: a shorter one
# hardly changes the gradient of the marginal.
_MIN_DAMPED_STEP_SD = 0.05

NOT_FINITE = "the gradient or the Hessian of the fit was not finite"


class HierarchyFitError(Exception):
    """The effects of a hierarchy have no coordinates by group, for the reason in its text."""


@dataclass(frozen=True)
class ConditionalEffects:
    """Effects fitted given the shared parameters.

    - **position** - shared parameters and means of the effects, shape ``(d,)``.
    - **factors** - F with F F^T the covariances of the effects, shape ``(k, k, G)``.
    - **deviation** - of the effects from their means at one of two points, shape ``(k, G)``.
    - **gradient** - its expectation over the effects, shape ``(d,)``.
    - **blocks** - D, shape ``(k, k, G)``.
    - **is_normal** - whether the effects are normal given the shared parameters.
    - **step** - the last step of the means, shape ``(k, G)``; None before the first.
    """

    position: np.ndarray
    factors: np.ndarray
    deviation: np.ndarray
    gradient: np.ndarray
    blocks: np.ndarray
    is_normal: bool = False
    step: np.ndarray | None = None


@dataclass(frozen=True)
class Linearisation:
    """Dependence of the effects on the shared parameters, and the curvature of these."""

    gradient: np.ndarray
    hessian: BlockArrowMatrix
    shared_covariance: np.ndarray  # a first estimate, shape `(s, s)`
    factors: np.ndarray  # as in `ConditionalEffects`
    correlation: EffectCorrelation | None  # of effects of several groupings
    scaled: ScaledEffects | None  # where the position has products with scales for the effects
    coloring: SharedColoring | None  # of the shared parameters, with one grouping
    # whether groups deviate with the group that they belong to; independently where the start is
    # far from the mode, because a scale that is too large makes joint deviations far too large
    is_joint: bool
    is_marginal: bool = False  # whether `shared_covariance` is from the Hessian of the marginal

    @property
    def strips(self) -> SharedStrips:
        """B."""
        return self.hessian.strips

    def apply_covariance(self, effects: np.ndarray) -> np.ndarray:
        """Return the effects' covariance given the shared parameters times ``(k, G)``."""
        return apply_covariance(self.factors, effects[None], self.correlation)[0]

    def compute_marginal_gradient(self, gradient: np.ndarray) -> Any:
        """Return M, shape ``(s,)``, from the expectation of the gradient."""
        of_effects, of_shared = self.hessian.layout.split(gradient)
        return of_shared - self.strips.sum_over_groups(self.apply_covariance(of_effects))


def evaluate_block_arrow(
    inputs: WarmupInputs,
    layout: BlockArrowLayout,
    position: np.ndarray,
    scaled: ScaledEffects | None = None,
) -> tuple[np.ndarray, BlockArrowMatrix]:
    """Return gradient and Hessian on all rows.

    :param scaled: where the position has products with scales for the effects.
    """
    probes = layout.make_probes()
    (gradient,), (products,) = _sum_products(
        inputs, position[None], probes, scaled, layout.num_effect_probes
    )
    pairs = None
    if len(layout.groupings) > 1:
        at = position if scaled is None else scaled.from_products(position)
        pairs = sum_row_couplings(inputs.potential, inputs.batched_gradients.arguments, layout, at)
        if scaled is not None and pairs is not None:
            pairs = scaled.scale_pairs(pairs, position)
    return gradient, BlockArrowMatrix.from_products(layout, products, pairs)


def _sum_products(
    inputs: WarmupInputs,
    positions: np.ndarray,
    directions: np.ndarray,
    scaled: ScaledEffects | None,
    *directions_per_call: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return gradients on all rows, and products of the Hessians with directions."""
    gradients = inputs.batched_gradients
    if scaled is None:
        return gradients.large_pass_products(positions, directions, *directions_per_call)
    return scaled.large_pass_products(gradients, positions, directions, *directions_per_call)


def remove_prior(
    inputs: WarmupInputs, position: np.ndarray, gradient: np.ndarray, hessian: BlockArrowMatrix
) -> tuple[np.ndarray, BlockArrowMatrix]:
    """Return gradient and Hessian of the part of the potential that minibatches estimate."""
    of_prior, prior_hessian = evaluate_prior(inputs, hessian.layout, position)
    return gradient - of_prior, hessian.subtract(prior_hessian)


def evaluate_prior(
    inputs: WarmupInputs, layout: BlockArrowLayout, position: np.ndarray
) -> tuple[np.ndarray, BlockArrowMatrix]:
    """Return gradient and Hessian of the prior's part of the potential."""
    gradient, products = inputs.batched_gradients.prior_products(position, layout.make_probes())
    return gradient, BlockArrowMatrix.from_products(layout, products)


def linearise(
    inputs: WarmupInputs,
    layout: BlockArrowLayout,
    position: np.ndarray,
    scaled: ScaledEffects | None = None,
    is_joint: bool = False,
    check_structure: bool = False,
) -> Linearisation:
    """Return the linearisation at a position.

    :param scaled: where the position has products with scales for the effects.
    :param check_structure: whether to check that the Hessian is a block-arrow matrix, unlike that
        of effects that a random walk couples.
    """
    gradient, hessian = evaluate_block_arrow(inputs, layout, position, scaled)
    if not (np.isfinite(gradient).all() and hessian.is_finite()):
        raise HierarchyFitError(NOT_FINITE)
    if not np.diagonal(hessian.blocks).all():
        raise HierarchyFitError("the density does not depend on some effects")
    if check_structure and not _is_block_arrow(inputs, hessian, position):
        raise HierarchyFitError("effects of different groups are coupled")
    factors = factorize_inverse_blocks(hessian.blocks)
    correlation = EffectCorrelation.create(hessian.pairs, factors)
    marginal = hessian.corner - _sum_couplings(layout, hessian.strips, factors, correlation)
    has_local = bool(inputs.potential.local_names)
    floor = _MIN_TIGHT_EIGENVALUE if has_local else _MIN_SCALED_EIGENVALUE
    covariance, _ = _invert_by_size(marginal, hessian.corner, floor)
    coloring = SharedColoring.find(hessian) if len(layout.groupings) == 1 else None
    return Linearisation(
        gradient, hessian, covariance, factors, correlation, scaled, coloring, is_joint
    )


def relinearise(
    inputs: WarmupInputs,
    layout: BlockArrowLayout,
    previous: Linearisation,
    conditional: ConditionalEffects,
) -> Linearisation:
    """Return the linearisation at the effects' means, of the kind of a previous one."""
    return linearise(
        inputs, layout, conditional.position, previous.scaled, is_joint=previous.is_joint
    )


def linearise_normal(
    inputs: WarmupInputs,
    layout: BlockArrowLayout,
    previous: Linearisation,
    conditional: ConditionalEffects,
    deviations: Sequence[np.ndarray] = (),
) -> Linearisation | None:
    """Return the linearisation of effects that are normal, with the Hessian of the marginal.

    :param deviations: of the effects from their means, of which the expectation is the mean; by
        default that of ``conditional``.
    :return: None where effects are not normal, with several groupings, and where shared parameters
        couple that did not in the previous linearisation.
    """
    coloring, factors = previous.coloring, conditional.factors
    if not conditional.is_normal or coloring is None:
        return None
    hessian = replace(previous.hessian, blocks=conditional.blocks)
    vector = _draw_shared_vector(hessian)
    directions = np.concatenate([coloring.make_probes(), vector[None]])
    # Few directions in high dimension are worth a separate compilation.
    per_call = len(directions) if layout.dim > HIGH_DIM else layout.num_effect_probes
    corner, sums, no_shared = np.zeros_like(hessian.corner), 0.0, np.zeros(layout.num_shared)
    deviations = deviations or [conditional.deviation]
    for deviation in deviations:
        hessians = []
        for offset in (deviation, -deviation):
            point = conditional.position + layout.merge(offset, no_shared)
            _, (products,) = _sum_products(
                inputs, point[None], directions, previous.scaled, per_call
            )
            strips, of_point = coloring.recover(products[:-1])
            hessians.append(replace(hessian, strips=strips, corner=of_point))
            if not _is_product(hessians[-1], vector, products[-1]):
                return None
        above, below = hessians
        strips = replace(above.strips, values=(above.strips.values + below.strips.values) / 2.0)
        changes = replace(above.strips, values=(above.strips.values - below.strips.values) / 2.0)
        corner += (above.corner + below.corner) / (2.0 * len(deviations))
        sums += changes.sum_squares(factors) / (2.0 * len(deviations))
    marginal = corner - strips.sum_squares(factors) - sums
    covariance, is_positive = _invert_by_size(marginal, corner, _MIN_MARGINAL_EIGENVALUE)
    return replace(
        previous,
        gradient=conditional.gradient,
        hessian=replace(hessian, strips=strips, corner=corner),
        shared_covariance=covariance,
        factors=factors,
        is_marginal=is_positive,
    )


def _sum_couplings(
    layout: BlockArrowLayout,
    strips: SharedStrips,
    factors: np.ndarray,
    correlation: EffectCorrelation | None,
) -> np.ndarray:
    """Return the sum of ``B^T D^{-1} B`` over groups, shape ``(s, s)``."""
    if correlation is None:
        return strips.sum_squares(factors)
    units = np.eye(layout.num_shared)
    sums = np.empty_like(units)
    for j in range(0, layout.num_shared, _COLUMNS_PER_PRODUCT):
        columns = slice(j, j + _COLUMNS_PER_PRODUCT)
        coupling = apply_covariance(factors, strips.multiply(units[columns]), correlation)
        sums[columns] = strips.sum_over_groups(coupling)
    return sums


def _invert_by_size(
    hessian: np.ndarray, corner: np.ndarray, floor: float
) -> tuple[np.ndarray, bool]:
    """Return the inverse of a matrix with absolute eigenvalues, and whether it needed no change.

    Newton steps by the inverse descend where the marginal is concave.

    :param corner: of the joint density's Hessian, whose diagonal gives the units.
    :param floor: of the eigenvalues in these units.
    """
    scale = 1.0 / np.sqrt(np.maximum(np.abs(np.diagonal(corner)), np.finfo(float).tiny))
    eigenvalues, vectors = np.linalg.eigh(hessian * np.outer(scale, scale))
    is_positive = bool(eigenvalues.min() > floor)
    eigenvalues = np.maximum(np.abs(eigenvalues), floor)
    return (vectors / eigenvalues) @ vectors.T * np.outer(scale, scale), is_positive


def apply_covariance(
    factors: np.ndarray, v: np.ndarray, correlation: EffectCorrelation | None = None
) -> np.ndarray:
    """Return the covariance of the effects given the shared parameters times ``(n, k, G)``.

    :param factors: factors F of the groups' covariances, shape ``(k, k, G)``.
    """
    scaled = multiply_blocks(factors, v, transpose=True)
    if correlation is not None:
        scaled = correlation.solve(scaled)
    return np.asarray(multiply_blocks(factors, scaled))


def _is_block_arrow(inputs: WarmupInputs, hessian: BlockArrowMatrix, position: np.ndarray) -> bool:
    """Return whether the product of a random vector is that with the Hessian."""
    vector = _draw_scaled_vector(hessian)
    # Directions of a shape that is compiled.
    directions = np.tile(vector, (hessian.layout.num_effect_probes, 1))
    _, (products,) = inputs.batched_gradients.large_pass_products(position[None], directions)
    return _is_product(hessian, vector, products[0])


def _draw_scaled_vector(hessian: BlockArrowMatrix) -> np.ndarray:
    scale = _compute_scale(hessian)
    return scale * np.random.default_rng(1).standard_normal(scale.size)


def _draw_shared_vector(hessian: BlockArrowMatrix) -> np.ndarray:
    """Return a random vector without effects, whose products would hide those of a parameter."""
    effects, shared = hessian.layout.split(_draw_scaled_vector(hessian))
    return np.asarray(hessian.layout.merge(np.zeros_like(effects), shared))


def _is_product(hessian: BlockArrowMatrix, vector: np.ndarray, product: np.ndarray) -> bool:
    """Return whether a product is that of the Hessian with a vector."""
    scale = _compute_scale(hessian)
    expected = scale * (hessian @ vector)
    error = np.linalg.norm(scale * product - expected)
    return bool(error < _MAX_STRUCTURE_ERROR * np.linalg.norm(expected))


def _compute_scale(hessian: BlockArrowMatrix) -> np.ndarray:
    """Return units in which the Hessian has a diagonal of ones, shape ``(d,)``."""
    of_effects = np.moveaxis(np.diagonal(hessian.blocks), 1, 0)
    diagonal = hessian.layout.merge(of_effects, np.diagonal(hessian.corner))
    return np.asarray(1.0 / np.sqrt(np.maximum(np.abs(diagonal), np.finfo(float).tiny)))


def update_effects(
    inputs: WarmupInputs,
    layout: BlockArrowLayout,
    linearisation: Linearisation,
    conditional: ConditionalEffects,
    signs: np.ndarray,
    bound: float,
) -> ConditionalEffects:
    """Take a Newton step of the effects given the shared parameters.

    Of one grouping, whether the effects are normal follows from the gradients at the mean and at
    the two points about it.
    """
    probes, no_shared = layout.make_probes(with_shared=False), np.zeros(layout.num_shared)

    def evaluate(position: np.ndarray, offsets: Sequence[np.ndarray], directions: Any) -> Any:
        """Return gradients and products where the effects deviate from a position."""
        points = position + np.stack([layout.merge(x, no_shared) for x in offsets])
        return _sum_products(inputs, points, directions, linearisation.scaled)

    # The blocks do not depend on effects that are normal.
    is_normal, deviation = conditional.is_normal, conditional.deviation
    offsets = [np.zeros_like(deviation)] if is_normal else [deviation, -deviation]
    gradients, products = evaluate(conditional.position, offsets, probes)
    of_effects, _ = layout.split(gradients.mean(0))
    blocks = layout.make_blocks(products.mean(0))
    factors = factorize_inverse_blocks(blocks)
    (step,) = -apply_covariance(factors, of_effects[None], linearisation.correlation)
    if not is_normal:  # else the step is exact
        step = np.clip(step, -bound, bound)
    if not is_normal and len(layout.groupings) == 1:
        step, blocks = _damp_oscillation(step, factors, blocks, conditional)
        factors = factorize_inverse_blocks(blocks)
    position = conditional.position + layout.merge(step, no_shared)
    deviation = choose_deviation(linearisation, factors, blocks, signs)
    offsets = [deviation, -deviation]
    if len(layout.groupings) > 1:
        gradients, _ = evaluate(position, offsets, probes[:0])
        return ConditionalEffects(position, factors, deviation, gradients.mean(0), blocks)
    gradients, _ = evaluate(position, [*offsets, np.zeros_like(deviation)], probes[:0])
    (above, below, center), _ = layout.split(gradients)
    parts = np.stack([(above + below) / 2.0 - center, (above - below) / 2.0])
    even, odd = multiply_blocks(factors, parts, transpose=True)
    mean_squares = np.square(np.stack([even, odd - signs])).mean(-1)
    is_normal = bool(mean_squares.max() < _MAX_NONLINEARITY_SD**2)
    gradient = gradients[:2].mean(0)
    return ConditionalEffects(position, factors, deviation, gradient, blocks, is_normal, step)


def _damp_oscillation(
    step: np.ndarray, factors: np.ndarray, blocks: np.ndarray, previous: ConditionalEffects
) -> tuple[np.ndarray, np.ndarray]:
    """Return half the step, and the mean of the blocks, for groups whose step reverses.

    The points at which an expectation is taken follow from the covariance at the previous points.
    In groups of few rows with a skewed likelihood, both may oscillate.
    """
    if previous.step is None:
        return step, blocks
    variances = np.square(factors).sum(1)
    is_reversed = (step * previous.step / variances).sum(0) < 0.0
    is_reversed &= (step**2 / variances).sum(0) > _MIN_DAMPED_STEP_SD**2
    step = np.where(is_reversed, step / 2.0, step)
    return step, np.where(is_reversed, (blocks + previous.blocks) / 2.0, blocks)


def choose_deviation(
    linearisation: Linearisation, factors: np.ndarray, blocks: np.ndarray, signs: np.ndarray
) -> np.ndarray:
    """Return the effects' deviation from their means for the expectation."""
    pairs = linearisation.hessian.pairs
    if pairs is None or not linearisation.is_joint:
        return multiply_blocks(factors, signs)
    nesting, factors, _ = find_nesting(linearisation.hessian.layout, pairs, factors, blocks)
    return np.asarray(nesting.apply(multiply_blocks(factors, signs)))
