r"""Partial centring of effects that the model multiplies by their scale.

In a non-centred model the rows depend on the product of an effect :math:`e` and its scale
:math:`e^{\lambda}`. Where its rows determine the product, the effect changes as
:math:`e^{-\lambda}` with the scale, and gradients of minibatches have much noise along this curve.
With a fraction :math:`\kappa` from 0 (non-centred) to 1 (centred) and the effect :math:`\hat e` at
the center, its displacement has the coordinate

.. math:: x = e^{\kappa\delta_\lambda} (e - \hat e) +
   \hat e (e^{\kappa\delta_\lambda} - 1 - \kappa\delta_\lambda),

which is the displacement itself to first order. With :math:`\kappa = 1` the product is linear in
:math:`x` and :math:`e^{\delta_\lambda}`. Reference: Papaspiliopoulos, Roberts and Sköld (2007), *A
general framework for the parametrization of hierarchical models*.

In :class:`MatrixCentering` the model multiplies effects by a matrix :math:`M(\psi)` of the shared
parameters, such as scales and the Cholesky factor of a correlation matrix. With
:math:`X(\delta)`, a polynomial that approximates the logarithm of :math:`\hat M^{-1}M`, and its
linear part :math:`X_1`, the coordinates are :math:`x = e^X e - (I + X_1)\hat e`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.model.block_arrow import (
    BlockArrowLayout,
    BlockArrowMatrix,
    SharedStrips,
    sum_terms,
)

# Of the matrix exponential: in float64 exact to 1e-11 for matrices of norm 4 and less.
_NUM_SQUARINGS, _TAYLOR_ORDER = 4, 8


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["exponents", "effects"],
    meta_fields=["layout"],
)
@dataclass(frozen=True)
class PartialCentering:
    """Coordinates x of displacements, as flat vectors; those of shared parameters are the same."""

    exponents: SharedStrips  # minus the fraction for each scale, so that effects are e^(E delta) x
    effects: Any  # at the center, shape `(k, G)`
    layout: BlockArrowLayout

    def to_displacement(self, x: Any) -> Any:
        """Return the displacement at coordinates."""
        effects, shared = self.layout.split(x)
        t, xp = self.exponents.multiply(shared), _get_namespace(x)
        curve = self.effects * (xp.expm1(t) - t * xp.exp(t))
        return self.layout.merge(effects * xp.exp(t) + curve, shared)

    def from_displacement(self, displacement: Any) -> Any:
        """Return the coordinates of a displacement."""
        effects, shared = self.layout.split(displacement)
        t, xp = self.exponents.multiply(shared), _get_namespace(displacement)
        return self.layout.merge(effects * xp.exp(-t) + self.effects * (xp.expm1(-t) + t), shared)

    def pull_back(self, x: Any, gradient: Any) -> Any:
        """Return the gradient by coordinates from one by displacements, without the Jacobian's."""
        effects, shared = self.layout.split(x)
        of_effects, of_shared = self.layout.split(gradient)
        t = self.exponents.multiply(shared)
        of_effects = of_effects * _get_namespace(x).exp(t)
        work = of_effects * (effects - self.effects * t)
        return self.layout.merge(of_effects, of_shared + self.exponents.sum_over_groups(work))

    def push_forward(self, x: Any, gradient: Any) -> Any:
        """Return the gradient by displacements: the inverse of :meth:`pull_back`."""
        effects, shared = self.layout.split(x)
        of_effects, of_shared = self.layout.split(gradient)
        t = self.exponents.multiply(shared)
        work = of_effects * (effects - self.effects * t)
        of_shared = of_shared - self.exponents.sum_over_groups(work)
        return self.layout.merge(of_effects * _get_namespace(x).exp(-t), of_shared)

    def log_jacobian_gradient(self, x: Any) -> Any:
        """Return the gradient of the log Jacobian determinant, the same everywhere, ``(d,)``."""
        ones = _get_namespace(self.effects).ones_like(self.effects)
        return self.layout.merge(0.0 * ones, self.exponents.sum_over_groups(ones))

    def scale_effects(self, shared: Any) -> Any:
        """Return derivatives of the effects by their coordinates, shape ``(..., k, G)``."""
        return _get_namespace(shared).exp(self.exponents.multiply(shared))

    def rescale_factors(
        self, shared: np.ndarray, factors: np.ndarray, inverse_factors: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return factors ``(k, k, G)`` of effects, and their inverses, from those of coordinates.

        :param shared: the displacement of the shared parameters, shape ``(s,)``.
        """
        scales = self.scale_effects(shared)
        return factors * scales[:, None], inverse_factors / scales

    def transform_blocks(self, shared: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """Return second derivatives by the coordinates of effects, from those by effects."""
        scales = self.scale_effects(shared)
        return blocks * scales[:, None] * scales

    def wrap_gradient(self, fn: Callable[[Any], Any], center: Any) -> Callable[[Any], Any]:
        """Return a function of coordinates that is the gradient of a function of positions."""
        return lambda x: self.pull_back(x, fn(center + self.to_displacement(x)))

    def transform_hessian(
        self, hessian: BlockArrowMatrix, gradient: np.ndarray
    ) -> BlockArrowMatrix:
        """Return the Hessian at the center by coordinates, from one by displacements.

        :param gradient: of the same function at the center.
        """
        of_effects, _ = self.layout.split(gradient)
        exponents = self.exponents.multiply(np.eye(self.layout.num_shared))
        weighted = exponents * of_effects
        curve = np.tensordot(weighted * self.effects, exponents, ((1, 2), (1, 2)))
        strips = hessian.strips.multiply(np.eye(self.layout.num_shared)) + weighted
        return replace(
            hessian, strips=SharedStrips.from_dense(strips), corner=hessian.corner - curve
        )

    def move(self, center: np.ndarray) -> PartialCentering:
        """Return the coordinates of displacements from another center."""
        return replace(self, effects=self.layout.split(center)[0])


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["generators", "effects", "coefficients"],
    meta_fields=["layout", "powers"],
)
@dataclass(frozen=True)
class MatrixCentering:
    """Coordinates of displacements of effects of one grouping that a matrix multiplies.

    The methods are those of :class:`PartialCentering` without ``scale_effects``. All groups are
    fully centred.
    """

    generators: Any  # coefficients of the linear part, shape `(s, k, k)`; zero for other parameters
    effects: Any  # at the center, shape `(k, G)`
    layout: BlockArrowLayout
    coefficients: Any  # of monomials of higher degree, shape `(m, k, k)`
    powers: tuple[tuple[int, ...], ...] = ()  # of each shared parameter in these monomials

    def to_displacement(self, x: Any) -> Any:
        """Return the displacement at coordinates."""
        effects, shared = self.layout.split(x)
        exponential = _compute_exponential(-self._compute_exponent(shared))
        products = self._add_products(effects, shared)
        return self.layout.merge(_multiply(exponential, products) - self.effects, shared)

    def from_displacement(self, displacement: Any) -> Any:
        """Return the coordinates of a displacement."""
        effects, shared = self.layout.split(displacement)
        exponential = _compute_exponential(self._compute_exponent(shared))
        products = _multiply(exponential, effects + self.effects)
        at_center = self._add_products(_get_namespace(effects).zeros_like(effects), shared)
        return self.layout.merge(products - at_center, shared)

    def pull_back(self, x: Any, gradient: Any) -> Any:
        """Return the gradient by coordinates from one by displacements, without the Jacobian's."""
        of_effects, of_shared = self.layout.split(gradient)
        work = self._compute_work(x, of_effects)
        exponential = _compute_exponential(-self._compute_exponent(self.layout.take_shared(x)))
        return self.layout.merge(_multiply(_transpose(exponential), of_effects), of_shared + work)

    def push_forward(self, x: Any, gradient: Any) -> Any:
        """Return the gradient by displacements: the inverse of :meth:`pull_back`."""
        of_effects, of_shared = self.layout.split(gradient)
        exponential = _compute_exponential(self._compute_exponent(self.layout.take_shared(x)))
        of_effects = _multiply(_transpose(exponential), of_effects)
        return self.layout.merge(of_effects, of_shared - self._compute_work(x, of_effects))

    def log_jacobian_gradient(self, x: Any) -> Any:
        """Return the gradient of the log Jacobian determinant."""
        effects, shared = self.layout.split(x)
        size = len(self.effects)
        _, derivatives = self._evaluate(shared)
        traces = sum(derivatives[..., a, a] for a in range(size))
        return self.layout.merge(0.0 * effects, -self.layout.num_groups * traces)

    def rescale_factors(
        self, shared: np.ndarray, factors: np.ndarray, inverse_factors: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return factors of effects, and their inverses, from those of coordinates."""
        exponent = self._compute_exponent(shared)
        factors = np.einsum("ab,bcg->acg", _compute_exponential(-exponent), factors)
        return factors, np.einsum("abg,bc->acg", inverse_factors, _compute_exponential(exponent))

    def transform_blocks(self, shared: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """Return second derivatives by the coordinates of effects, from those by effects."""
        exponential = _compute_exponential(-self._compute_exponent(shared))
        return np.einsum("ba,bcg,cd->adg", exponential, blocks, exponential, optimize=True)

    def wrap_gradient(self, fn: Callable[[Any], Any], center: Any) -> Callable[[Any], Any]:
        """Return a function of coordinates that is the gradient of a function of positions."""
        return lambda x: self.pull_back(x, fn(center + self.to_displacement(x)))

    def transform_hessian(
        self, hessian: BlockArrowMatrix, gradient: np.ndarray
    ) -> BlockArrowMatrix:
        """Return the Hessian at the center by coordinates, from one by displacements."""
        of_effects, _ = self.layout.split(gradient)
        strips = -np.einsum("jab,ag->jbg", self.generators, of_effects)
        curve = np.einsum("ibg,jbc,cg->ij", strips, self.generators, self.effects, optimize=True)
        corner = hessian.corner + (curve + curve.T) / 2.0
        for powers, coefficient in zip(self.powers, self.coefficients, strict=True):
            if sum(powers) == 2:
                i, j = np.repeat(np.arange(len(powers)), powers)
                work = np.einsum("ab,ag,bg->", coefficient, of_effects, self.effects)
                corner[i, j] -= work
                corner[j, i] -= work
        strips = hessian.strips.multiply(np.eye(self.layout.num_shared)) + strips
        return replace(hessian, strips=SharedStrips.from_dense(strips), corner=corner)

    def move(self, center: np.ndarray) -> MatrixCentering:
        """Return the coordinates of displacements from another center."""
        return replace(self, effects=self.layout.split(center)[0])

    def _evaluate(self, shared: Any) -> tuple[Any, Any]:
        """Return X, shape ``(..., k, k)``, and its derivatives, shape ``(..., s, k, k)``."""
        exponent = (shared[..., None, None] * self.generators).sum(-3)
        derivatives = self.generators + 0.0 * shared[..., None, None]
        if not self.powers:
            return exponent, derivatives
        powers = np.array(self.powers)
        columns = np.flatnonzero(powers.any(0))
        powers = powers[:, columns]
        # Of the product, and of the one with one power less of each parameter.
        lowered = np.maximum(powers - np.eye(len(columns), dtype=int)[:, None], 0)
        all_powers = np.concatenate([powers[None], lowered])
        xp, x = _get_namespace(shared), shared[..., columns]
        table = [xp.ones_like(x)]
        for _ in range(powers.max()):
            table.append(table[-1] * x)
        places = all_powers, np.arange(len(columns))
        monomials = xp.stack(table, -2)[..., *places].prod(-1)[..., None, None]
        factors = np.concatenate([np.ones((1, len(powers))), powers.T]).astype(monomials.dtype)
        sums = (monomials * factors[..., None, None] * self.coefficients).sum(-3)
        one_hot = np.eye(len(self.generators), dtype=sums.dtype)[columns]
        added = (one_hot[..., None, None] * sums[..., 1:, None, :, :]).sum(-4)
        return exponent + sums[..., 0, :, :], derivatives + added

    def _compute_exponent(self, shared: Any) -> Any:
        return self._evaluate(shared)[0]

    def _add_products(self, coordinates: Any, shared: Any) -> Any:
        """Return ``e^X e`` from coordinates of effects."""
        matrix = (shared[..., None, None] * self.generators).sum(-3)
        return coordinates + self.effects + _multiply(matrix, self.effects)

    def _compute_work(self, x: Any, of_effects: Any) -> Any:
        """Return the gradient by the shared parameters, through the effects' displacements.

        :param of_effects: the gradient by displacements.
        """
        effects, shared = self.layout.split(x)
        by_center = _sum_outer_products(of_effects, self.effects)
        by_products = _sum_outer_products(of_effects, self._add_products(effects, shared))
        # The adjoint of the exponential's derivative is a block of the exponential of a block
        # matrix.
        exponent, derivatives = self._evaluate(shared)
        exponent = -_transpose(exponent)
        xp, size = _get_namespace(exponent), len(self.effects)
        upper = xp.concatenate([exponent, by_products], -1)
        lower = xp.concatenate([xp.zeros_like(exponent), exponent], -1)
        exponential = _compute_exponential(xp.concatenate([upper, lower], -2))
        adjoint, transposed = exponential[..., :size, size:], exponential[..., :size, :size]
        by_center = _multiply(transposed, by_center)
        terms = self.generators * by_center[..., None, :, :]
        terms = terms - derivatives * adjoint[..., None, :, :]
        return terms.sum((-2, -1))


Centering = PartialCentering | MatrixCentering


def _compute_exponential(x: Any) -> Any:
    """Return matrix exponentials, by the Taylor series of ``x / 2^n``.

    JAX has this function too, which takes three times as long to compile.
    """
    x = x / 2.0**_NUM_SQUARINGS
    total = np.eye(x.shape[-1], dtype=x.dtype) + x
    term = x
    for order in range(2, _TAYLOR_ORDER + 1):
        term = _multiply(term, x) / order
        total = total + term
    for _ in range(_NUM_SQUARINGS):
        total = _multiply(total, total)
    return total


def _transpose(matrices: Any) -> Any:
    return matrices.swapaxes(-1, -2)


def _multiply(matrices: Any, effects: Any) -> Any:
    """Return ``(..., k, k)`` times ``(..., k, G)``; as sums, which accelerators do not round."""
    terms = (matrices[..., b, None] * effects[..., b, None, :] for b in range(matrices.shape[-1]))
    return sum(terms)


def _sum_outer_products(of_effects: Any, effects: Any) -> Any:
    """Return the sum over groups of products of two effects, shape ``(..., k, k)``."""
    if isinstance(of_effects, jax.Array):
        effects = jnp.broadcast_to(effects, of_effects.shape)
        return sum_terms(lambda a, b: a[..., :, None, :] * b[..., None, :, :], of_effects, effects)
    return np.einsum("...ag,...bg->...ab", of_effects, effects)


def _get_namespace(x: Any) -> Any:
    return jnp if isinstance(x, jax.Array) else np
