r"""Effects of a hierarchy that the model multiplies by their scale, and their centring.

Where the rows depend on effects :math:`e` and a shared parameter :math:`\psi_j` only by the product
:math:`e^{a\psi_j}e`, their part of the potential is constant along
:math:`(\delta e, \delta\psi_j) = (-a e, 1)` at every position. So their Hessian H and gradient g
have :math:`H_{\cdot j} = H_{\cdot e}(a \circ e) + a \circ g_e`. The exponents a of the effects of
each grouping are found by least squares, and the products from what is left. Where the rows depend
on :math:`M(\psi)e_g` with a matrix M, such as a Cholesky factor,
:math:`H_{ej} = H_{ee}(A_je) + A_j^\top g_e` determines :math:`A_j = M^{-1}\partial_jM` in the same
way.

Given the other effects, the products do not depend on the shared parameters as far as their rows
determine them. :class:`ScaledEffects` evaluates the model as a function of them, for the fit of a
hierarchy, and :func:`find_partial_centering` is for the chains.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
from scipy import linalg

from numpyro_sgmcmc.adaptation.batched_gradients import BatchedGradients
from numpyro_sgmcmc.model.block_arrow import (
    BlockArrowLayout,
    BlockArrowMatrix,
    GroupPairs,
    SharedStrips,
)
from numpyro_sgmcmc.model.partial_centering import (
    Centering,
    MatrixCentering,
    PartialCentering,
)

# Size of what is left relative to the Hessian's column, in scaled units, up to which effects are
# multiplied by a scale: float32 leaves about 1e-4.
_MAX_REMAINDER = 1e-2
_MIN_EXPONENT = 0.1  # 1 for the logarithm of an SD, 0.5 for that of a variance
_MAX_MATRIX_EFFECTS = 8  # effects per group up to which a matrix is looked for
# Polynomial of the logarithm of a matrix: degree, number of monomials, points per monomial (a
# gradient on all rows each), and the SD of the points in posterior SDs.
_MAX_DEGREE, _MAX_MONOMIALS, _POINTS_PER_MONOMIAL, _POINT_SCALE = 4, 100, 1.5, 1.5
_SLOPE_STEP, _MAX_SLOPE_ERROR = 0.5, 0.1  # posterior SDs; relative error of a generator
# Precision by the rows of a group that is no rounding, relative to the mean of all groups.
_MIN_RELATIVE_PRECISION = 1e-4
# Mean over groups of the fraction of an effect's precision that is from the rows, from which on
# its centring pays.
_MIN_CENTERED_FRACTION = 0.5


@dataclass(frozen=True)
class ScaledEffects:
    """A model as a function of the products of effects with their scales, and shared parameters."""

    exponents: SharedStrips  # a; zero for effects that no scale multiplies
    layout: BlockArrowLayout

    @classmethod
    def find(
        cls, rows_gradient: np.ndarray, rows_hessian: BlockArrowMatrix, position: np.ndarray
    ) -> ScaledEffects | None:
        """Return the effects that a scale multiplies, None without such.

        :param rows_gradient: at the position, of the rows' part of the potential.
        """
        layout = rows_hessian.layout
        exponents = find_exponents(rows_gradient, rows_hessian, position)
        if not exponents.any():
            return None
        return cls(SharedStrips.from_dense(spread_over_groups(layout, exponents)), layout)

    def compute_scales(self, position: np.ndarray) -> np.ndarray:
        """Return the scales, shape ``(..., k, G)``."""
        return np.exp(self.exponents.multiply(self.layout.take_shared(position)))

    def to_products(self, position: np.ndarray) -> np.ndarray:
        """Return a position with the products in place of the effects."""
        effects, shared = self.layout.split(position)
        return self.layout.merge(effects * self.compute_scales(position), shared)

    def from_products(self, y: np.ndarray) -> np.ndarray:
        """Return the position of the model."""
        products, shared = self.layout.split(y)
        return self.layout.merge(products / self.compute_scales(y), shared)

    def scale_pairs(self, pairs: GroupPairs, y: np.ndarray) -> GroupPairs:
        """Return the blocks of pairs of groups by products, from those by effects."""
        return pairs.rescale(1.0 / self.compute_scales(y))

    def large_pass_products(
        self,
        gradients: BatchedGradients,
        y: np.ndarray,
        directions: np.ndarray,
        directions_per_call: int = 0,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return what :meth:`.BatchedGradients.large_pass_products` does, by products.

        :param y: points, shape ``(n, d)``, with the same shared parameters.
        :param directions: at several points these are of effects only.
        """
        layout, scales = self.layout, self.compute_scales(y[0])
        of_products, of_shared = layout.split(directions)
        effects, _ = layout.split(self.from_products(y))
        rates = self.exponents.multiply(of_shared)
        moves = of_products / scales - rates * effects[0]
        of_model, model_products = gradients.large_pass_products(
            self.from_products(y), layout.merge(moves, of_shared), directions_per_call
        )
        of_effects, of_shared = layout.split(of_model)
        # The log Jacobian determinant of the effects by the products.
        log_det = self.exponents.sum_over_groups(np.ones(layout.split(y[0])[0].shape))
        of_shared = of_shared - self.exponents.sum_over_groups(effects * of_effects) + log_det
        gradient = layout.merge(of_effects / scales, of_shared)
        by_effects, by_shared = layout.split(model_products)
        work = effects[:, None] * by_effects + moves * of_effects[:, None]
        by_shared = by_shared - self.exponents.sum_over_groups(work)
        by_products = (by_effects - rates * of_effects[:, None]) / scales
        return gradient, layout.merge(by_products, by_shared)


def find_centering(
    gradients: BatchedGradients,
    rows_gradient: np.ndarray,
    rows_hessian: BlockArrowMatrix,
    center: np.ndarray,
    prior_precisions: np.ndarray,
    shared_sds: np.ndarray,
    exponents: np.ndarray,
    is_uncertain: np.ndarray,
) -> Centering | None:
    """Return what :func:`find_partial_centering` does, with the polynomial of a matrix.

    :param shared_sds: SDs of the shared parameters.
    """
    arguments = rows_gradient, rows_hessian, center, prior_precisions, exponents, is_uncertain
    centering = find_partial_centering(*arguments)
    if not isinstance(centering, MatrixCentering):
        return centering
    centering = _add_polynomial(centering, gradients, center, shared_sds)
    if centering is not None:
        return centering
    return find_partial_centering(*arguments, with_matrix=False)


def find_partial_centering(
    rows_gradient: np.ndarray,
    rows_hessian: BlockArrowMatrix,
    center: np.ndarray,
    prior_precisions: np.ndarray,
    exponents: np.ndarray,
    is_uncertain: np.ndarray,
    with_matrix: bool = True,
) -> Centering | None:
    """Return the centring of effects that scales or a matrix multiply, None without such.

    :param rows_gradient: at the center, of the rows' part of the potential.
    :param prior_precisions: of each effect, shape ``(k, G)``.
    :param exponents: those of :func:`find_exponents`.
    :param is_uncertain: kinds of effects that are fully centred if a scale multiplies them, shape
        ``(k, groupings)``.
    :param with_matrix: whether a matrix may multiply the effects.
    """
    layout = rows_hessian.layout
    precisions = np.einsum("aag->ag", rows_hessian.blocks)
    fractions = precisions / np.maximum(precisions + prior_precisions, np.finfo(float).tiny)
    fractions = np.clip(fractions, 0.0, 1.0)
    generators = _find_generators(rows_gradient, rows_hessian, center) * with_matrix
    if generators.any((1, 2)).sum() > exponents.any((1, 2)).sum():
        if fractions.mean() <= _MIN_CENTERED_FRACTION:
            return None
        no_coefficients = np.zeros((0, *generators.shape[1:]))
        return MatrixCentering(generators, layout.split(center)[0], layout, no_coefficients)
    means = [fractions[:, columns].mean(1) for columns, _ in layout.groupings]
    is_determined = np.stack(means, -1) > _MIN_CENTERED_FRACTION
    exponents = np.where(is_determined | is_uncertain, exponents, 0.0)
    if not exponents.any():
        return None
    fractions = np.where(spread_over_groups(layout, is_uncertain), 1.0, fractions)
    strips = SharedStrips.from_dense(-spread_over_groups(layout, exponents) * fractions)
    return PartialCentering(strips, layout.split(center)[0], layout)


def spread_over_groups(layout: BlockArrowLayout, values: np.ndarray) -> np.ndarray:
    """Return values of the groupings, shape ``(..., groupings)``, for their groups."""
    return np.repeat(values, [columns.stop - columns.start for columns, _ in layout.groupings], -1)


def _add_polynomial(
    centering: MatrixCentering,
    gradients: BatchedGradients,
    center: np.ndarray,
    shared_sds: np.ndarray,
) -> MatrixCentering | None:
    r"""Return the centring with monomials of higher degree, from values of the matrix.

    Where all groups have the same covariates, the SD of the rows may have a generator at the mode
    of the effects. The slope of the logarithm of the matrix shows that it is none.

    At effects of zero the gradient of the rows by effects is :math:`M^\top w_g`, where
    :math:`w_g` does not change with the matrix.

    :param shared_sds: SDs of the shared parameters, about which the polynomial is fitted.
    :return: None where a generator is not that of a matrix.
    """
    layout, generators = centering.layout, centering.generators
    columns = np.flatnonzero(generators.any((1, 2)))
    powers = _list_powers(len(columns))
    no_effects = np.zeros(centering.effects.shape)
    shared = layout.take_shared(center)
    of_prior, _ = gradients.prior_products(layout.merge(no_effects, shared), layout.make_probes())

    def evaluate_rows(shared: np.ndarray) -> np.ndarray:
        (gradient,) = gradients.large_pass_gradients(layout.merge(no_effects, shared)[None])
        return layout.split(gradient - of_prior)[0]

    at_center = evaluate_rows(shared)
    if not np.isfinite(at_center).all():  # LAPACK would raise
        return None
    inverse = np.linalg.pinv(at_center)

    def compute_logarithm(shift: np.ndarray) -> np.ndarray | None:
        """Return the logarithm of the matrix relative to that at the center, None without one."""
        of_effects = evaluate_rows(shared + shift)
        ratio = of_effects @ inverse  # of the transposed matrices at the point and the center
        remainder = np.linalg.norm(of_effects - ratio @ at_center)
        is_matrix = remainder < _MAX_REMAINDER * np.linalg.norm(of_effects)
        if not is_matrix or np.linalg.det(ratio) <= 0.0:
            return None
        logarithm = linalg.logm(ratio.T)
        return None if np.iscomplexobj(logarithm) else logarithm

    for column in columns:
        shift = _SLOPE_STEP * shared_sds[column] * np.eye(layout.num_shared)[column]
        above, below = compute_logarithm(shift), compute_logarithm(-shift)
        if above is None or below is None:
            return None
        expected = 2.0 * shift[column] * generators[column]
        error = np.linalg.norm(above - below - expected)
        if error > _MAX_SLOPE_ERROR * np.linalg.norm(expected):
            return None
    num_points = round(_POINTS_PER_MONOMIAL * len(powers))
    points = np.random.default_rng(0).standard_normal((num_points, len(columns))).clip(-2.0, 2.0)
    shifts = np.zeros((num_points, layout.num_shared))
    shifts[:, columns] = _POINT_SCALE * points * shared_sds[columns]
    exponents = np.empty((num_points, *generators.shape[1:]))
    for shift, exponent in zip(shifts, exponents, strict=True):
        logarithm = compute_logarithm(shift)
        if logarithm is None:
            return centering
        exponent[:] = logarithm - np.tensordot(shift, generators, 1)
    if not powers:
        return centering
    all_powers = np.zeros((len(powers), layout.num_shared), int)
    all_powers[:, columns] = powers
    scales = (shared_sds**all_powers).prod(1)
    monomials = (shifts[:, None] ** all_powers).prod(2) / scales
    coefficients, *_ = np.linalg.lstsq(monomials, exponents.reshape(num_points, -1), rcond=None)
    return replace(
        centering,
        coefficients=(coefficients / scales[:, None]).reshape(-1, *generators.shape[1:]),
        powers=tuple(map(tuple, all_powers.tolist())),
    )


def _list_powers(num: int) -> list[tuple[int, ...]]:
    """Return the powers of ``num`` variables in monomials of the degree that has few of them."""
    degrees = [d for d in range(2, _MAX_DEGREE + 1) if math.comb(num + d, d) <= _MAX_MONOMIALS]
    return [
        tuple(variables.count(j) for j in range(num))
        for degree in degrees
        for variables in itertools.combinations_with_replacement(range(num), degree)
    ]


def find_exponents(
    rows_gradient: np.ndarray, rows_hessian: BlockArrowMatrix, position: np.ndarray
) -> np.ndarray:
    """Return the exponents of the scales that multiply each kind of effects, zero where there is
    none, shape ``(s, k, groupings)``.
    """
    layout = rows_hessian.layout
    effects, _ = layout.split(position)
    of_effects, _ = layout.split(rows_gradient)
    kinds = _list_kinds(layout)
    found = _explain_shared(rows_hessian, kinds * effects, kinds * of_effects)
    found = np.where(np.abs(found) > _MIN_EXPONENT, found, 0.0)
    exponents = np.zeros((layout.num_shared, layout.effects_per_group, len(layout.groupings)))
    start = 0
    for grouping, (_, size) in enumerate(layout.groupings):
        exponents[:, :size, grouping] = found[:, start : start + size]
        start += size
    return exponents


def _find_generators(
    rows_gradient: np.ndarray, rows_hessian: BlockArrowMatrix, position: np.ndarray
) -> np.ndarray:
    """Return :attr:`.MatrixCentering.generators`, all zero without a matrix."""
    layout = rows_hessian.layout
    size = layout.effects_per_group
    if len(layout.groupings) > 1 or not 1 < size <= _MAX_MATRIX_EFFECTS:
        return np.zeros((layout.num_shared, size, size))
    effects, _ = layout.split(position)
    of_effects, _ = layout.split(rows_gradient)
    entries = np.eye(size**2).reshape(size**2, size, size)
    changes = np.einsum("nab,bg->nag", entries, effects)
    of_changes = np.einsum("nab,ag->nbg", entries, of_effects)
    generators = _explain_shared(rows_hessian, changes, of_changes, of_effects_only=True)
    return generators.reshape(layout.num_shared, size, size)


def _explain_shared(
    rows_hessian: BlockArrowMatrix,
    changes: np.ndarray,
    of_changes: np.ndarray,
    of_effects_only: bool = False,
) -> np.ndarray:
    """Return coefficients ``(s, n)``: the combination of changes of the effects that alters the
    gradient of the rows as each shared parameter does; zero where none does.

    :param changes: shape ``(n, k, G)``.
    :param of_changes: what is added to the products of the Hessian with the changes.
    :param of_effects_only: whether to compare the gradients by effects alone. A generator depends
        on the other shared parameters, which adds terms to the Hessian of the shared parameters.
    """
    layout = rows_hessian.layout
    strips = rows_hessian.strips.multiply(np.eye(layout.num_shared))
    # Units in which effects have unit curvature, and shared parameters that or what they add to it.
    # The precision of a group without rows is rounding, in whose units its other entries are large.
    precisions = np.abs(np.einsum("aag->ag", rows_hessian.blocks))
    smallest = _MIN_RELATIVE_PRECISION * precisions.mean(1, keepdims=True)
    precisions = np.maximum(precisions, np.maximum(smallest, np.finfo(float).tiny))
    curvature = np.abs(np.diagonal(rows_hessian.corner)) + (strips**2 / precisions).sum((1, 2))
    curvature = np.maximum(curvature, np.finfo(float).tiny)
    units = 1.0 / np.sqrt(layout.merge(precisions, curvature))
    columns = units * layout.merge(strips, rows_hessian.corner)
    no_shared = np.zeros(layout.num_shared)
    products = [
        rows_hessian @ layout.merge(change, no_shared) + layout.merge(of_change, no_shared)
        for change, of_change in zip(changes, of_changes, strict=True)
    ]
    products = units * np.stack(products)
    if of_effects_only:
        columns, products = (layout.split(x)[0].reshape(len(x), -1) for x in (columns, products))
    if not (np.isfinite(columns).all() and np.isfinite(products).all()):  # LAPACK would raise
        return np.zeros((layout.num_shared, len(changes)))
    coefficients = np.linalg.lstsq(products.T, columns.T, rcond=None)[0].T
    remainders = np.linalg.norm(columns - coefficients @ products, axis=1)
    is_explained = remainders < _MAX_REMAINDER * np.linalg.norm(columns, axis=1)
    return np.where(is_explained[:, None], coefficients, 0.0)


def _list_kinds(layout: BlockArrowLayout) -> np.ndarray:
    """Return one for each kind of effects, zero for all others, of each grouping in turn, shape
    ``(n, k, G)``.
    """
    kinds = []
    for columns, num_effects in layout.groupings:
        for j in range(num_effects):
            kind = np.zeros((layout.effects_per_group, layout.num_groups))
            kind[j, columns] = 1.0
            kinds.append(kind)
    return np.stack(kinds)
