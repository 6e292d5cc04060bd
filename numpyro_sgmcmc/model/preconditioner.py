r"""Whitened coordinates: :math:`\theta = \hat\theta + Lq` with :math:`LL^\top` about the posterior
covariance, and what is known of the potential at their origin.

Every dynamic runs in :math:`q` with unit mass and gradient :math:`L^\top\nabla U`, so that it
needs to know nothing of mass matrices and one default step size fits every model. The origin
:math:`\hat\theta` is the anchor of the control variates, which need the gradient there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = ["LowRankFactor", "Preconditioner", "stack_preconditioners"]


class LowRankFactor(NamedTuple):
    """
    A symmetric matrix that stretches a few directions and leaves all others as they are.

    - **directions** - U, orthonormal columns, shape ``(d, k)``.
    - **scales** - diagonal of S, positive, shape ``(k,)``.
    """

    directions: Any
    scales: Any

    def apply(self, v: Any) -> Any:
        """The matrix times ``v``, or times each row of it."""
        return v + ((v @ self.directions) * (self.scales - 1.0)) @ self.directions.mT

    def solve(self, v: Any) -> Any:
        """The inverse matrix times ``v``, or times each row of it."""
        return self._replace(scales=1.0 / self.scales).apply(v)

    @property
    def diagonal_of_square(self) -> Any:
        """The diagonal of the matrix's square, of one chain or of each."""
        more = jnp.square(self.scales)[..., None, :] - 1.0
        return 1.0 + (jnp.square(self.directions) * more).sum(-1)


class Preconditioner(NamedTuple):
    """
    - **center** - the origin, a position of shape ``(d,)``.
    - **factor** - L: shape ``(d,)`` for a diagonal, ``(d, d)`` for a matrix.
    - **reference_gradient** - gradient on all rows at the anchor, shape ``(d,)``, not whitened; None where
      only the map is wanted.
    - **reference_hessian** - Hessian on all rows at the anchor, shape ``(d, d)``, not whitened; None unless
      it has been needed.
    - **low_rank** - for a diagonal D: what L has besides, ``L = D (I + U (S - I) U^T)``, a
      :class:`Stretch`; None for nothing.

    In the warm-up NumPy arrays of float64, in the chains JAX arrays of the model's type. The
    methods take one vector of shape ``(d,)``, or several as rows.
    """

    center: Any
    factor: Any
    reference_gradient: Any = None
    reference_hessian: Any = None
    low_rank: LowRankFactor | None = None

    @property
    def is_dense(self) -> bool:
        """Whether the factor is a matrix; with or without a leading axis of chains."""
        return self.factor.ndim > self.center.ndim

    @property
    def inverse_mass_matrix(self) -> Any:
        """``L L^T``, or its diagonal where the factor is one."""
        if self.is_dense:
            return _outer_product(self.factor)
        variances = self.factor * self.factor
        return variances if self.low_rank is None else variances * self.low_rank.diagonal_of_square

    @property
    def sds(self) -> np.ndarray:
        """About the posterior sds, shape ``(d,)``, of NumPy's arrays."""
        if self.is_dense:
            return np.sqrt(np.square(self.factor).sum(1))
        return np.sqrt(np.asarray(self.inverse_mass_matrix))

    def to_position(self, q: Any) -> Any:
        """The position at whitened coordinates ``q``."""
        return self.center + self.apply(q)

    def apply(self, v: Any) -> Any:
        """A whitened displacement as a displacement of positions, ``L v``."""
        if not self.is_dense:
            return self.factor * (v if self.low_rank is None else self.low_rank.apply(v))
        return self.factor @ v if v.ndim == 1 else v @ self.factor.T

    def solve(self, v: Any) -> Any:
        """A displacement of positions as a whitened one, ``L^-1 v``."""
        if not self.is_dense:
            v = v / self.factor
            return v if self.low_rank is None else self.low_rank.solve(v)
        solve = jnp.linalg.solve if isinstance(self.factor, jax.Array) else np.linalg.solve
        return solve(self.factor, v.T).T

    def apply_transpose(self, gradient: Any) -> Any:
        """A gradient with respect to positions as one with respect to ``q``, ``L^T g``."""
        if self.is_dense:
            return gradient @ self.factor
        pulled = self.factor * gradient
        return pulled if self.low_rank is None else self.low_rank.apply(pulled)

    def apply_low_rank(self, q: Any) -> Any:
        """Whitened positions in units of the factor alone, each coordinate a site's own."""
        return q if self.low_rank is None else self.low_rank.apply(q)

    def solve_low_rank(self, gradient: Any) -> Any:
        """A whitened gradient as one with respect to :meth:`unstretch` of ``q``."""
        return gradient if self.low_rank is None else self.low_rank.solve(gradient)

    @property
    def log_det(self) -> float:
        """Logarithm of the determinant of L, of NumPy's arrays."""
        if self.is_dense:
            return float(np.linalg.slogdet(self.factor)[1])
        of_stretch = 0.0 if self.low_rank is None else np.log(self.low_rank.scales).sum()
        return float(np.log(self.factor).sum() + of_stretch)

    def is_finite(self) -> bool:
        """Whether everything is finite."""
        return all(np.isfinite(x).all() for x in jax.tree.leaves(self))

    def cast(self, dtype: Any) -> Preconditioner:
        """The same for compiled code, as JAX arrays of a type."""
        return jax.tree.map(lambda x: jnp.asarray(x, dtype), self)


def stack_preconditioners(preconditioners: Sequence[Preconditioner]) -> Preconditioner:
    """One with a leading axis, stretches made to have as many directions."""
    if any(w.low_rank is not None for w in preconditioners):
        most = max(0 if w.low_rank is None else w.low_rank.scales.size for w in preconditioners)
        preconditioners = [w._replace(low_rank=_pad_low_rank(w, most)) for w in preconditioners]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *preconditioners)


def _pad_low_rank(preconditioner: Preconditioner, num_directions: int) -> LowRankFactor:
    """The stretch with directions besides that are none, to be of this number."""
    dim, dtype = preconditioner.center.size, preconditioner.center.dtype
    own = preconditioner.low_rank or LowRankFactor(jnp.zeros((dim, 0), dtype), jnp.ones(0, dtype))
    more = num_directions - own.scales.size
    return LowRankFactor(
        jnp.pad(own.directions, ((0, 0), (0, more))),
        jnp.pad(own.scales, (0, more), constant_values=1.0),
    )


@jax.jit
def _outer_product(factor: Any) -> Any:
    """``L L^T``, of one chain or of each: the same bits in a compiled step and after the run."""
    if factor.ndim > 2:
        return lax.map(_outer_product, factor)
    return factor @ factor.T
