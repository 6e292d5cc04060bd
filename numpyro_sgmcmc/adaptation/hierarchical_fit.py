r"""Variational fit of a hierarchical model: shared parameters by their marginal.

A joint Gaussian fit of the effects of many groups and of the scales that they share is wrong where
few rows belong to a group: the joint density has its mode where scales are zero. Here the effects
are fitted given the shared parameters :math:`\psi`, group by group, as normals
:math:`N(m_g(\psi), D_g(\psi)^{-1})`, and the gradient of the marginal is

.. math:: M(\psi) = E[\partial_\psi U] - \sum_g W_g^\top E[\partial_{e_g} U],
   \quad W_g = D_g^{-1} B_g,

with the expectation over the effects (Fisher's identity; the second term is zero at
:math:`m_g(\psi)`) and blocks of :mod:`~numpyro_sgmcmc.model.block_arrow`. The expectation is taken
at two antithetic points :math:`m_g \pm D_g^{-1/2}\xi_g` of signs, which is exact for quadratic
functions up to the products of different effects of a group; these nearly cancel between groups
(:func:`.balance_signs`). BFGS finds the zero of M, and its inverse Hessian is the covariance of the
shared parameters. If Newton steps follow, as below, BFGS starts again where it has converged,
because secants of steps that were too long may have made later steps too short.

Effects are normal given the shared parameters where the gradient is linear in them, as with
Gaussian rows. The Hessian of the marginal is then exactly

.. math:: E[C] - \sum_g E[B_g]^\top D_g^{-1} E[B_g]
   - \tfrac12 \sum_g \mathrm{tr}(D_g^{-1}\, \partial_i D_g\, D_g^{-1}\, \partial_j D_g).

Half the difference of the strips at the two points is :math:`b_i = \partial_i D_g D_g^{-1/2}\xi_g`,
and the expectation of :math:`b_i^\top D_g^{-1} b_j` is the trace. Where few products determine the
strips (:mod:`.shared_coloring`), Newton's method takes the place of BFGS.

With one grouping and at most 50 shared parameters, one to three Newton steps follow. Their Hessian,
the inverse of the shared parameters' covariance, has differences of M along each of them, unless
that of the marginal is known. The expectation has at least as many sign vectors as effects per
group, in which the products of different effects cancel.

With several groupings, groups then deviate with the group that they belong to, such as schools
with their district, and BFGS goes on. Other effects of several groupings deviate independently.

With crossed effects, such as the slopes and abilities of item responses, steps from zero may not
approach the effects' means. The fit then starts anew at the means of mean-field fits.

Where the model multiplies effects by their scale, the fit is by the products
(:mod:`.effect_centering`), and the chains' coordinates are partially centred. Their fractions are
found anew at each center. Effects that a matrix multiplies are fully centred.

An iteration takes 2k + 5 gradients over the data with k effects per group, and k + 14 of Newton's
method where three products determine the strips, whatever the number of groups; 10 to 30 iterations
are usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from numpyro_sgmcmc.adaptation.block_differences import add_differences, add_needed_differences
from numpyro_sgmcmc.adaptation.budget import HIGH_DIM
from numpyro_sgmcmc.adaptation.effect_centering import (
    ScaledEffects,
    find_centering,
)
from numpyro_sgmcmc.adaptation.effect_correlation import (
    EffectCorrelation,
    find_nesting,
    sum_row_couplings,
)
from numpyro_sgmcmc.adaptation.effect_factors import (
    balance_signs,
    factorize_inverse_blocks,
    list_sign_patterns,
    make_symmetric_factors,
)
from numpyro_sgmcmc.adaptation.settings import WarmupInputs
from numpyro_sgmcmc.adaptation.shared_coloring import SharedColoring
from numpyro_sgmcmc.model.block_arrow import (
    BlockArrowFactor,
    BlockArrowLayout,
    BlockArrowMatrix,
    GroupPairs,
    SharedStrips,
    map_groups,
    multiply_blocks,
)
from numpyro_sgmcmc.model.preconditioner import Preconditioner

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
# Of the Schur complement with unit diagonal of the corner, without and with effects whose groups
# are the rows. A smaller one makes steps too long where the start is far from the mode.
_MIN_SCALED_EIGENVALUE, _MIN_TIGHT_EIGENVALUE = 1e-3, 1e-5
_MIN_PRECISION = 0.02  # of effects in their coordinates, for the logarithm
# Shared parameters up to which the change of the effects' SDs is measured, at points at this
# distance in posterior SDs; the curvature above which it counts, relative to a normal's.
_MAX_TREND_SHARED, _TREND_STEP_SD, _MIN_TREND_CURVATURE = 50, 2.0, 0.5
# Groups from which on the marginal is so close to a normal that differences on one side suffice,
# and their step.
_MIN_GROUPS_OF_ONE_SIDE, _ONE_SIDED_STEP_SD = 3_000, 0.5
# Newton steps of the shared parameters at the end of a fit, and the length of the last one, whose
# error is of second order in it.
_MAX_NEWTON_STEPS, _MAX_LAST_NEWTON_STEP_SD = 3, 0.2
_CURVATURE_RATIOS = 0.01, 100.0  # bounds on curvatures relative to those of BFGS
_MIN_RELATIVE_TREND = 0.25  # RMS over groups, relative to an effect's largest, from which it counts
_COLUMNS_PER_PRODUCT = 8  # shared parameters whose coupling is in memory at once
_REFACTOR_DISTANCE_SD = 1.0  # of a new center, beyond which effects of several groupings get new F
_MAX_FIT_DISTANCE_SD = 3.0  # between the shared parameters of fits of the same mode
# Newton decrement and distance at which a further fit is certain to end there.
_NEAR_DECREMENT, _NEAR_DISTANCE_SD = 1.0, 2.0
# Relative error of a product with a random vector up to which the Hessian is a block-arrow matrix.
_MAX_STRUCTURE_ERROR = 2e-3
# Eigenvalue of the Hessian of the marginal below which it counts as singular, in units in which the
# corner has a diagonal of ones.
_MIN_MARGINAL_EIGENVALUE = 1e-6
# RMS difference of an effect's gradient, at a posterior SD to either side of its mean, from that of
# a normal. With Gaussian rows it is at most 1e-5 (rounding), with ten binary rows per group 6e-3,
# and with balanced ones, whose gradient is odd, 2e-3.
_MAX_NONLINEARITY_SD = 1e-4

_NOT_FINITE, _NO_MODE = (
    "the gradient or the Hessian of the fit was not finite",
    "the Hessian of the fit was not positive definite",
)


class HierarchyFitError(Exception):
    """The effects of a hierarchy have no coordinates by group, for the reason in its text."""


class HierarchyNotConvergedError(HierarchyFitError):
    """The fit did not converge. From effects near their posterior means it may."""


class HierarchyFit(NamedTuple):
    """A fit of a hierarchy.

    - **coordinates** - coordinates about its mean.
    - **is_exact** - whether these are more accurate than estimates from draws: Newton's method has
      converged, effects are normal given the shared parameters, and with so many groups the
      marginal of these is nearly normal.
    """

    coordinates: Preconditioner
    is_exact: bool


class UnrefinedFit(NamedTuple):
    """A fit before the Newton steps of :func:`_refine_shared`.

    - **coordinates** - coordinates about its mean.
    - **has_normal_effects** - whether effects are normal given the shared parameters.
    - **linearisation** - of normal effects near its mean, in the model's coordinates.
    """

    coordinates: Preconditioner
    has_normal_effects: bool
    linearisation: _Linearisation | None


@dataclass(frozen=True)
class _Conditional:
    """Effects fitted given the shared parameters.

    - **position** - shared parameters and means of the effects, shape ``(d,)``.
    - **factors** - F with F F^T the covariances of the effects, shape ``(k, k, G)``.
    - **deviation** - of the effects from their means at one of two points, shape ``(k, G)``.
    - **gradient** - its expectation over the effects, shape ``(d,)``.
    - **blocks** - D, if the effects are normal given the shared parameters, else None.
    """

    position: np.ndarray
    factors: np.ndarray
    deviation: np.ndarray
    gradient: np.ndarray
    blocks: np.ndarray | None = None


class _MarginalFit(NamedTuple):
    """The mode of the marginal.

    - **conditional** - effects given the shared parameters there.
    - **shared_covariance** - of the shared parameters, shape ``(s, s)``.
    - **linearisation** - near it.
    """

    conditional: _Conditional
    shared_covariance: np.ndarray
    linearisation: _Linearisation


@dataclass(frozen=True)
class _Linearisation:
    """Dependence of the effects on the shared parameters, and the curvature of these."""

    gradient: np.ndarray
    hessian: BlockArrowMatrix
    shared_covariance: np.ndarray  # a first estimate, shape `(s, s)`
    factors: np.ndarray  # as in `_Conditional`
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

    def compute_marginal_gradient(self, layout: BlockArrowLayout, gradient: np.ndarray) -> Any:
        """Return M, shape ``(s,)``, from the expectation of the gradient."""
        of_effects, of_shared = layout.split(gradient)
        return of_shared - self.strips.sum_over_groups(self.apply_covariance(of_effects))


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
    if not first.reference_hessian.pairs and layout.num_shared <= _MAX_TREND_SHARED:
        first, is_exact = _refine_shared(inputs, layout, unrefined)
    first = add_needed_differences(inputs, first)
    start_compilation(first)
    for position in remaining:
        known = unrefined.coordinates
        try:
            other = _fit_marginal(inputs, layout, position, has_effects, known)
        except HierarchyFitError:
            continue
        distance = _compute_distance(layout, known, other.conditional.position)
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
    fit = _fit_marginal(inputs, layout, position, has_effects)
    return _build_preconditioner(inputs, layout, fit)


def _compute_distance(layout: BlockArrowLayout, fit: Preconditioner, position: np.ndarray) -> float:
    """Return how far the shared parameters are from those of a fit, in posterior SDs."""
    return float(np.abs(layout.take_shared(fit.solve(position - fit.center))).max())


def _fit_marginal(
    inputs: WarmupInputs,
    layout: BlockArrowLayout,
    position: np.ndarray,
    has_effects: bool,
    known: Preconditioner | None = None,
) -> _MarginalFit:
    """Return the mode of the marginal.

    :param has_effects: see :func:`fit_hierarchy`.
    :param known: a fit, near which this one need not converge.
    """
    if not has_effects:
        # Random effects of the initialisation strategy say nothing about their scale.
        no_effects = np.zeros((layout.effects_per_group, layout.num_groups))
        position = layout.merge(no_effects, layout.take_shared(position))
    linearisation = _linearise(inputs, layout, position, check_structure=known is None)
    of_rows = remove_prior(inputs, position, linearisation.gradient, linearisation.hessian)
    if (scaled := ScaledEffects.find(*of_rows, position)) is not None:
        position = scaled.to_products(position)
        linearisation = _linearise(inputs, layout, position, scaled)
    signs = balance_signs(linearisation.factors)
    factors = linearisation.factors
    deviation = _choose_deviation(linearisation, factors, linearisation.hessian.blocks, signs)
    conditional = _Conditional(position, factors, deviation, np.zeros_like(position))
    bound = _INIT_STEP_BOUND
    for _ in range(2):
        conditional = _update_effects(inputs, layout, linearisation, conditional, signs, bound)
    linearisation = _linearise(inputs, layout, conditional.position, scaled)
    found = _find_mode(inputs, layout, linearisation, conditional, signs, known, _MAX_ITERATIONS)
    if found is None:
        raise HierarchyNotConvergedError("the fit did not converge")
    conditional = found.conditional
    if _is_nested(linearisation) and not _is_near(layout, known, conditional.position):
        linearisation = _linearise(inputs, layout, conditional.position, scaled, is_joint=True)
        conditional = _update_effects(inputs, layout, linearisation, conditional, signs, bound)
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
    linearisation: _Linearisation,
    conditional: _Conditional,
    signs: np.ndarray,
    known: Preconditioner | None,
    max_iterations: int,
) -> _MarginalFit | None:
    """Return the zero of M by BFGS, or by Newton's method where the Hessian of M is known.

    :return: None where it does not converge.
    """
    inverse_hessian, num_converged, num_distant = linearisation.shared_covariance, 0, 0
    distance, bound = 0.0, _INIT_STEP_BOUND
    # Where Newton steps follow, the covariance need not be that of many secants.
    is_refined = linearisation.hessian.pairs is None and layout.num_shared <= _MAX_TREND_SHARED
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
            conditional = _update_effects(inputs, layout, linearisation, conditional, signs, bound)
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
            refreshed = _linearise_normal(inputs, layout, linearisation, conditional)
        if refreshed is None and distance > _REFRESH_DISTANCE:
            scaled, is_joint = linearisation.scaled, linearisation.is_joint
            refreshed = _linearise(inputs, layout, conditional.position, scaled, is_joint)
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
            return _MarginalFit(conditional, inverse_hessian, linearisation)
        if has_ended:
            # Secants where a step overshot may have made the inverse Hessian far too small.
            refreshed = _linearise_normal(inputs, layout, linearisation, conditional)
            if refreshed is None:
                scaled, is_joint = linearisation.scaled, linearisation.is_joint
                refreshed = _linearise(inputs, layout, conditional.position, scaled, is_joint)
            linearisation = refreshed
            inverse_hessian, distance = linearisation.shared_covariance, 0.0
            gradient = linearisation.compute_marginal_gradient(layout, conditional.gradient)
            decrement = _compute_decrement(inverse_hessian, gradient)
            if linearisation.is_marginal and decrement < _CONVERGED_DECREMENT:
                return _MarginalFit(conditional, inverse_hessian, linearisation)
            num_converged, is_checked = 0, True
    return None


def _is_nested(linearisation: _Linearisation) -> bool:
    """Return whether the groups of a grouping belong to those of another."""
    hessian = linearisation.hessian
    if hessian.pairs is None:
        return False
    nesting, _, _ = find_nesting(
        hessian.layout, hessian.pairs, linearisation.factors, hessian.blocks
    )
    return bool(nesting.coupling.any())


def _is_near(layout: BlockArrowLayout, known: Preconditioner | None, position: np.ndarray) -> bool:
    """Return whether a position is near a known fit."""
    return known is not None and _compute_distance(layout, known, position) < _NEAR_DISTANCE_SD


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
    layout = hessian.layout
    of_prior, products = inputs.batched_gradients.prior_products(position, layout.make_probes())
    prior_hessian = BlockArrowMatrix.from_products(layout, products)
    return gradient - of_prior, hessian.subtract(prior_hessian)


def _build_preconditioner(
    inputs: WarmupInputs,
    layout: BlockArrowLayout,
    fit: _MarginalFit,
) -> UnrefinedFit:
    """Return the coordinates of a fit that has converged."""
    conditional, shared_covariance, linearisation = fit
    gradient, hessian = evaluate_block_arrow(inputs, layout, conditional.position)
    factors, pairs = conditional.factors, hessian.pairs
    coupling, num_shared = hessian.strips, layout.num_shared
    # Products with strips and factors may take fewer numbers than those with the coupling.
    num_values = layout.effects_per_group + len(coupling.values)
    has_strips = pairs is None and num_values < num_shared
    coupling = _compute_coupling(hessian, factors, has_strips)
    try:
        shared_factor = np.linalg.cholesky((shared_covariance + shared_covariance.T) / 2.0)
    except np.linalg.LinAlgError:
        raise HierarchyFitError(_NO_MODE) from None
    rows_gradient, of_rows = remove_prior(inputs, conditional.position, gradient, hessian)
    prior_precisions = np.diagonal(hessian.blocks - of_rows.blocks).T
    if pairs is None:
        factors = make_symmetric_factors(factors, prior_precisions)
    factor = BlockArrowFactor(
        factors, _invert_factors(factors), coupling, shared_factor, layout, has_strips=has_strips
    )
    if pairs is not None:
        factor = _factorize_groupings(factor, hessian, pairs, factors)
    sds = np.linalg.norm(shared_factor, axis=1)
    centering = find_centering(
        inputs.batched_gradients,
        rows_gradient,
        of_rows,
        conditional.position,
        prior_precisions,
        sds,
    )
    factor = replace(factor, centering=centering)
    if centering is not None:
        of_rows = centering.transform_hessian(of_rows, rows_gradient)
    preconditioner = Preconditioner(conditional.position, factor, gradient, of_rows)
    if not preconditioner.is_finite():
        raise HierarchyFitError(_NOT_FINITE)
    is_normal = conditional.blocks is not None
    is_usable = is_normal and linearisation.scaled is None
    return UnrefinedFit(preconditioner, is_normal, linearisation if is_usable else None)


def recenter_block_arrow(
    inputs: WarmupInputs, preconditioner: Preconditioner, mean: np.ndarray, scale: np.ndarray
) -> Preconditioner | None:
    """Return coordinates in whose units the shared ones were ``mean + scale q``.

    :return: None where gradient or Hessian at the new center are not finite.
    """
    factor = preconditioner.factor
    layout = factor.layout
    no_effects = np.zeros((layout.effects_per_group, layout.num_groups))
    center = preconditioner.to_position(layout.merge(no_effects, mean))
    factor = factor.refit_shared(mean, scale)
    differences = preconditioner.reference_hessian.differences
    gradient, hessian = evaluate_block_arrow(inputs, layout, center)
    if not (np.isfinite(gradient).all() and np.isfinite(hessian.blocks).all()):
        return None
    coupling = _compute_coupling(hessian, factor.effect_factors, factor.has_strips)
    factor = replace(factor, coupling=coupling)
    if hessian.pairs is not None and np.linalg.norm(mean) > _REFACTOR_DISTANCE_SD:
        factors = factorize_inverse_blocks(hessian.blocks)
        factor = _factorize_groupings(factor, hessian, hessian.pairs, factors)
    rows_gradient, of_rows = remove_prior(inputs, center, gradient, hessian)
    if factor.sd_trend is None:
        prior_precisions = np.diagonal(hessian.blocks - of_rows.blocks).T
        sds = np.linalg.norm(factor.shared_factor, axis=1)
        centering = find_centering(
            inputs.batched_gradients, rows_gradient, of_rows, center, prior_precisions, sds
        )
    else:  # which is the trend of effects with these fractions
        centering = factor.centering and factor.centering.move(center)
    factor = replace(factor, centering=centering)
    if centering is not None:
        of_rows = centering.transform_hessian(of_rows, rows_gradient)
    recentered = Preconditioner(center, factor, gradient, of_rows)
    if differences is not None:
        of_rows = add_differences(
            inputs, recentered, of_rows, differences.columns, differences.steps
        )
        recentered = recentered._replace(reference_hessian=of_rows)
    return recentered if recentered.is_finite() else None


def _factorize_groupings(
    factor: BlockArrowFactor, hessian: BlockArrowMatrix, pairs: GroupPairs, factors: np.ndarray
) -> BlockArrowFactor:
    """Return the factor with the dependence between effects of several groupings.

    :param factors: F of each group given all others.
    """
    nesting, factors, others = find_nesting(hessian.layout, pairs, factors, hessian.blocks)
    remaining = EffectCorrelation.create(others, factors)
    return replace(
        factor,
        effect_factors=factors,
        inverse_effect_factors=_invert_factors(factors),
        correlation=None if remaining is None else remaining.fit_low_rank(),
        nesting=nesting if nesting.coupling.any() else None,
    )


def _invert_factors(factors: np.ndarray) -> np.ndarray:
    return np.moveaxis(np.linalg.inv(np.moveaxis(factors, 2, 0)), 0, 2)


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
        raise HierarchyFitError(_NOT_FINITE)
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
        conditional = _Conditional(center, inverse_factors, deviations[0], center, blocks)
        normal = _linearise_normal(inputs, layout, normal, conditional, deviations)
        if normal is not None and normal.is_marginal:
            scale = np.linalg.solve(shared_factor, np.linalg.cholesky(normal.shared_covariance))
        else:
            is_converged = False
    refined = recenter_block_arrow(inputs, preconditioner, position, scale)
    if refined is None:
        raise HierarchyFitError(_NOT_FINITE)
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


def _linearise(
    inputs: WarmupInputs,
    layout: BlockArrowLayout,
    position: np.ndarray,
    scaled: ScaledEffects | None = None,
    is_joint: bool = False,
    check_structure: bool = False,
) -> _Linearisation:
    """Return the linearisation at a position.

    :param scaled: where the position has products with scales for the effects.
    :param check_structure: whether to check that the Hessian is a block-arrow matrix, unlike that
        of effects that a random walk couples.
    """
    gradient, hessian = evaluate_block_arrow(inputs, layout, position, scaled)
    if not (np.isfinite(gradient).all() and np.isfinite(hessian.blocks).all()):
        raise HierarchyFitError(_NOT_FINITE)
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
    return _Linearisation(
        gradient, hessian, covariance, factors, correlation, scaled, coloring, is_joint
    )


def _linearise_normal(
    inputs: WarmupInputs,
    layout: BlockArrowLayout,
    previous: _Linearisation,
    conditional: _Conditional,
    deviations: Sequence[np.ndarray] = (),
) -> _Linearisation | None:
    """Return the linearisation of effects that are normal, with the Hessian of the marginal.

    :param deviations: of the effects from their means, of which the expectation is the mean; by
        default that of ``conditional``.
    :return: None where effects are not normal, with several groupings, and where shared parameters
        couple that did not in the previous linearisation.
    """
    coloring, factors = previous.coloring, conditional.factors
    if conditional.blocks is None or coloring is None:
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


def _update_effects(
    inputs: WarmupInputs,
    layout: BlockArrowLayout,
    linearisation: _Linearisation,
    conditional: _Conditional,
    signs: np.ndarray,
    bound: float,
) -> _Conditional:
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
    is_normal, deviation = conditional.blocks is not None, conditional.deviation
    offsets = [np.zeros_like(deviation)] if is_normal else [deviation, -deviation]
    gradients, products = evaluate(conditional.position, offsets, probes)
    of_effects, _ = layout.split(gradients.mean(0))
    blocks = layout.make_blocks(products.mean(0))
    factors = factorize_inverse_blocks(blocks)
    (step,) = -apply_covariance(factors, of_effects[None], linearisation.correlation)
    if not is_normal:  # else the step is exact
        step = np.clip(step, -bound, bound)
    position = conditional.position + layout.merge(step, no_shared)
    deviation = _choose_deviation(linearisation, factors, blocks, signs)
    offsets = [deviation, -deviation]
    if len(layout.groupings) > 1:
        gradients, _ = evaluate(position, offsets, probes[:0])
        return _Conditional(position, factors, deviation, gradients.mean(0))
    gradients, _ = evaluate(position, [*offsets, np.zeros_like(deviation)], probes[:0])
    (above, below, center), _ = layout.split(gradients)
    parts = np.stack([(above + below) / 2.0 - center, (above - below) / 2.0])
    even, odd = multiply_blocks(factors, parts, transpose=True)
    mean_squares = np.square(np.stack([even, odd - signs])).mean(-1)
    is_normal = bool(mean_squares.max() < _MAX_NONLINEARITY_SD**2)
    gradient = gradients[:2].mean(0)
    return _Conditional(position, factors, deviation, gradient, blocks if is_normal else None)


def _choose_deviation(
    linearisation: _Linearisation, factors: np.ndarray, blocks: np.ndarray, signs: np.ndarray
) -> np.ndarray:
    """Return the effects' deviation from their means for the expectation."""
    pairs = linearisation.hessian.pairs
    if pairs is None or not linearisation.is_joint:
        return multiply_blocks(factors, signs)
    nesting, factors, _ = find_nesting(linearisation.hessian.layout, pairs, factors, blocks)
    return np.asarray(nesting.apply(multiply_blocks(factors, signs)))


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
