r"""Preconditioned coordinates: :math:`\theta = \hat\theta + Lq`, with :math:`LL^\top` approximately
the posterior covariance.

Every SDE runs in :math:`q` with unit mass and gradient :math:`L^\top\nabla U`, so that it needs no
mass matrix and one default step size fits every model. The center :math:`\hat\theta` is also the
reference point of the control variates, which need the gradient there. :class:`Preconditioner`
holds all of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_sgmcmc.model.block_arrow import BlockArrowFactor
from numpyro_sgmcmc.model.hessian_factor import HessianFactor
from numpyro_sgmcmc.model.low_rank import LowRankFactor
from numpyro_sgmcmc.model.partial_centering import Centering


class Preconditioner(NamedTuple):
    """Center and scale of the preconditioned coordinates.

    The arrays are NumPy arrays of float64 in the warm-up, and JAX arrays of the model's type in the
    chains. The methods take one vector of shape ``(d,)``, or several as rows.
    """

    center: Any  # the origin, a position of shape `(d,)`
    # L: shape `(d,)` for a diagonal, `(d, d)` for a matrix, a `BlockArrowFactor` or a
    # `HessianFactor`
    factor: Any
    # full-data gradient at the center in model coordinates, shape `(d,)`; None where only the map
    # is needed
    reference_gradient: Any = None
    # full-data Hessian at the center in model coordinates, shape `(d, d)`, or a `BlockArrowMatrix`
    # of the part that depends on the rows; None unless an estimator needs it, and where L is its
    # inverse root
    reference_hessian: Any = None
    # for a diagonal D: a `LowRankFactor` that makes it `L = D (I + U (S - I) U^T)`, or None
    low_rank: LowRankFactor | None = None

    @property
    def is_dense(self) -> bool:
        """True if the factor is a matrix; with or without a leading axis of chains."""
        return not self.is_common and self.factor.ndim > self.center.ndim

    @property
    def is_block_arrow(self) -> bool:
        """True if the factor is that of a hierarchical model."""
        return isinstance(self.factor, BlockArrowFactor)

    @property
    def is_hessian_root(self) -> bool:
        """True if the factor is the inverse root of the Hessian at the center."""
        return isinstance(self.factor, HessianFactor)

    @property
    def num_products(self) -> int:
        """Multiplications of a step by the inverse root of a Hessian: for position and gradient."""
        return 2 * self.factor.matrix.size if self.is_hessian_root else 0

    @property
    def is_common(self) -> bool:
        """True if the factor is large and the same for all chains."""
        return self.is_block_arrow or self.is_hessian_root

    @property
    def inverse_mass_matrix(self) -> Any:
        """``L L^T`` where the factor is a matrix, else its diagonal."""
        if self.is_dense:
            return _outer_product(self.factor)
        if self.is_common:
            return _diagonal_of_outer_product(self)
        variances = self.factor * self.factor
        return variances if self.low_rank is None else variances * self.low_rank.diagonal_of_square

    @property
    def sds(self) -> np.ndarray:
        """Approximate posterior SDs, shape ``(d,)``; for NumPy arrays."""
        if self.is_dense:
            return np.sqrt(np.square(self.factor).sum(1))
        return np.sqrt(np.asarray(self.inverse_mass_matrix))

    @property
    def log_det(self) -> float:
        """Logarithm of the determinant of L; for NumPy arrays."""
        if self.is_common:
            return self.factor.log_det
        if self.is_dense:
            return float(np.linalg.slogdet(self.factor)[1])
        low_rank_part = 0.0 if self.low_rank is None else np.log(self.low_rank.scales).sum()
        return float(np.log(self.factor).sum() + low_rank_part)

    def to_position(self, q: Any) -> Any:
        """Return the position at preconditioned coordinates ``q``."""
        return self.center + self.to_displacement(q)

    @property
    def centering(self) -> Centering | None:
        """Centring of effects that the model multiplies by their scale or a matrix, or None."""
        return self.factor.centering if self.is_block_arrow else None

    def to_displacement(self, q: Any) -> Any:
        """Return the displacement from the center at preconditioned coordinates ``q``."""
        return self.expansion_to_displacement(self.to_expansion(q))

    def to_expansion(self, q: Any) -> Any:
        """Return the coordinates x in which control variates expand gradients about the center:
        the displacement, with the effects that have a :attr:`centering` partially centred.
        """
        return self.apply(self.factor.to_linear(q) if self.is_block_arrow else q)

    def expansion_to_displacement(self, x: Any) -> Any:
        """Return the displacement at coordinates ``x``."""
        return x if self.centering is None else self.centering.to_displacement(x)

    def from_position(self, position: Any) -> Any:
        """Return the preconditioned coordinates of a position."""
        x = position - self.center
        q = self.solve(x if self.centering is None else self.centering.from_displacement(x))
        return self.factor.from_linear(q) if self.is_block_arrow else q

    def pull_back(self, q: Any, gradient: Any) -> Any:
        """Return the gradient at ``q`` from one with respect to positions.

        Where the coordinates are not linear, it includes the log Jacobian determinant.
        """
        if self.centering is not None:
            gradient = self.centering.pull_back(self.to_expansion(q), gradient)
        return self.pull_back_expansion(q, gradient)

    def pull_back_expansion(self, q: Any, gradient: Any) -> Any:
        """Return the gradient at ``q`` from one with respect to ``x``, and the log Jacobian
        determinants of both maps.
        """
        if self.centering is not None:
            gradient = gradient - self.centering.log_jacobian_gradient(self.to_expansion(q))
        gradient = self.apply_transpose(gradient)
        return self.factor.pull_back(q, gradient) if self.is_block_arrow else gradient

    def gradient_to_expansion(self, x: Any, gradient: Any) -> Any:
        """Return the gradient with respect to ``x`` from one with respect to positions."""
        return gradient if self.centering is None else self.centering.pull_back(x, gradient)

    def as_function_of_expansion(self, gradient: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a gradient, a function of the position, as the one of ``x``."""
        if self.centering is None:
            return lambda x: gradient(self.center + x)
        return self.centering.wrap_gradient(gradient, self.center)

    def apply(self, v: Any) -> Any:
        """Return a displacement in model coordinates, ``L v``."""
        if self.is_common:
            return self.factor.apply(v)
        if not self.is_dense:
            return self.factor * (v if self.low_rank is None else self.low_rank.apply(v))
        return self.factor @ v if v.ndim == 1 else v @ self.factor.T

    def solve(self, v: Any) -> Any:
        """Return a displacement in preconditioned coordinates, ``L^-1 v``."""
        if self.is_common:
            return self.factor.solve(v)
        if not self.is_dense:
            v = v / self.factor
            return v if self.low_rank is None else self.low_rank.solve(v)
        solve = jnp.linalg.solve if isinstance(self.factor, jax.Array) else np.linalg.solve
        return solve(self.factor, v.T).T

    def apply_transpose(self, gradient: Any) -> Any:
        """Return a gradient with respect to ``q`` from one with respect to positions, ``L^T g``."""
        if self.is_common:
            return self.factor.apply_transpose(gradient)
        if self.is_dense:
            return gradient @ self.factor
        scaled = self.factor * gradient
        return scaled if self.low_rank is None else self.low_rank.apply(scaled)

    @property
    def has_uncertain_scales(self) -> bool:
        """True for a hierarchy in which a scale of effects is poorly determined.

        Gradients by the coordinates of a centred model have infinite variance if the posterior of
        the scale reaches zero: that by the mean of effects grows as the inverse of their scale.
        """
        return self.is_block_arrow and self.factor.prior_scaling is not None

    def to_report_coordinates(self, q: Any) -> Any:
        """Return the coordinates whose moments `bias_report` compares with gradients.

        They are those of the diagonal factor alone, each of which is a site's, or those that a
        block-arrow factor maps linearly to displacements. Where scales are uncertain, they are
        ``q``.
        """
        if self.has_uncertain_scales:
            return q
        if self.centering is not None:
            return self.solve(self.to_displacement(q))
        if self.is_block_arrow:
            return self.factor.to_linear(q)
        return q if self.low_rank is None else self.low_rank.apply(q)

    def gradient_to_report_coordinates(self, q: Any, gradient: Any) -> Any:
        """Return a gradient by :meth:`to_report_coordinates`, from one by ``q``."""
        if self.has_uncertain_scales:
            return gradient
        if self.is_block_arrow:
            gradient = self.factor.push_forward(q, gradient)
            if self.centering is None:
                return gradient
            x = self.to_expansion(q)
            gradient = self.factor.solve_transpose(gradient)
            gradient = gradient + self.centering.log_jacobian_gradient(x)
            gradient = self.centering.push_forward(x, gradient)
            return self.apply_transpose(gradient)
        return gradient if self.low_rank is None else self.low_rank.solve(gradient)

    def split_chains(self) -> tuple[Preconditioner, ...]:
        """Return the preconditioner of each chain, from arrays with a leading axis of chains.

        A factor and a Hessian have none where all chains have the same.
        """
        common = {}
        if self.is_common and not self.factor.has_chain_axis:
            common = {"factor": self.factor, "reference_hessian": self.reference_hessian}
        split = self._replace(**dict.fromkeys(common))
        chains = [jax.tree.map(lambda x, c=c: x[c], split) for c in range(len(self.center))]
        return tuple(p._replace(**common) for p in chains)

    def is_finite(self) -> bool:
        """Return whether all arrays are finite."""
        return all(np.isfinite(x).all() for x in jax.tree.leaves(self))

    def cast(self, dtype: Any) -> Preconditioner:
        """Return a copy with JAX arrays of a type, for compiled code; group numbers keep theirs."""

        def cast(x: Any) -> jax.Array:
            return jnp.asarray(x, np.int32 if x.dtype == np.int32 else dtype)

        return jax.tree.map(cast, self)

    def to_numpy(self) -> Preconditioner:
        """Return a copy with NumPy arrays of float64; group numbers keep their type."""
        return jax.tree.map(
            lambda x: np.asarray(x, np.int32 if x.dtype == np.int32 else np.float64), self
        )


def stack_preconditioners(preconditioners: Sequence[Preconditioner]) -> Preconditioner:
    """Return one preconditioner with a leading axis of chains.

    Low-rank factors are padded to the same number of directions.
    """
    if any(p.low_rank is not None for p in preconditioners):
        num = max(0 if p.low_rank is None else p.low_rank.scales.size for p in preconditioners)
        preconditioners = [p._replace(low_rank=_pad_low_rank(p, num)) for p in preconditioners]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *preconditioners)


def _pad_low_rank(preconditioner: Preconditioner, num_directions: int) -> LowRankFactor:
    """Return the low-rank factor with zero directions of scale one appended."""
    dim, dtype = preconditioner.center.size, preconditioner.center.dtype
    empty = LowRankFactor(jnp.zeros((dim, 0), dtype), jnp.ones(0, dtype))
    low_rank = preconditioner.low_rank or empty
    missing = num_directions - low_rank.scales.size
    return LowRankFactor(
        jnp.pad(low_rank.directions, ((0, 0), (0, missing))),
        jnp.pad(low_rank.scales, (0, missing), constant_values=1.0),
    )


@jax.jit
def _outer_product(factor: Any) -> Any:
    """Return ``L L^T``, of one chain or of each.

    Compiled, so that a step and the code after the run round alike.
    """
    if factor.ndim > 2:
        return lax.map(_outer_product, factor)
    return factor @ factor.T


@jax.jit
def _diagonal_of_outer_product(preconditioner: Preconditioner) -> Any:
    """Return the diagonal of ``L L^T`` of a common factor, of one chain or of each."""
    factor, center = preconditioner.factor, preconditioner.center
    if factor.has_chain_axis:
        return lax.map(_diagonal_of_outer_product, preconditioner)
    variances = factor.apply_squared(jnp.ones(center.shape[-1], center.dtype))
    return jnp.broadcast_to(variances, center.shape)
