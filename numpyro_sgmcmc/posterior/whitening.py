r"""Whitened coordinates: :math:`\theta = \hat\theta + Lq` with :math:`LL^\top` about the posterior
covariance, and what is known of the potential at their origin.

Every dynamic runs in :math:`q` with unit mass and gradient :math:`L^\top\nabla U`, so that it
needs to know nothing of mass matrices and one default step size fits every model. The origin
:math:`\hat\theta` is the anchor of the control variates, which need the gradient there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = ["Whitening"]


class Whitening(NamedTuple):
    """
    - **anchor** - the origin, a position of shape ``(d,)``.
    - **factor** - L: shape ``(d,)`` for a diagonal, ``(d, d)`` for a matrix.
    - **gradient** - gradient on all rows at the anchor, shape ``(d,)``, not whitened; None where
      only the map is wanted.
    - **hessian** - Hessian on all rows at the anchor, shape ``(d, d)``, not whitened; None unless
      it has been needed.

    In the warm-up NumPy arrays of float64, in the chains JAX arrays of the model's type. The
    methods take one vector of shape ``(d,)``, or several as rows.
    """

    anchor: Any
    factor: Any
    gradient: Any = None
    hessian: Any = None

    @property
    def is_dense(self) -> bool:
        """Whether the factor is a matrix; with or without a leading axis of chains."""
        return self.factor.ndim > self.anchor.ndim

    @property
    def inverse_mass_matrix(self) -> Any:
        """``L L^T``, in the shape of the factor."""
        return _outer(self.factor) if self.is_dense else self.factor * self.factor

    def position(self, q: Any) -> Any:
        """The position at whitened coordinates ``q``."""
        return self.anchor + self.push(q)

    def push(self, v: Any) -> Any:
        """A whitened displacement as a displacement of positions, ``L v``."""
        if not self.is_dense:
            return self.factor * v
        return self.factor @ v if v.ndim == 1 else v @ self.factor.T

    def whiten(self, v: Any) -> Any:
        """A displacement of positions as a whitened one, ``L^-1 v``."""
        if not self.is_dense:
            return v / self.factor
        solve = jnp.linalg.solve if isinstance(self.factor, jax.Array) else np.linalg.solve
        return solve(self.factor, v.T).T

    def pull(self, gradient: Any) -> Any:
        """A gradient with respect to positions as one with respect to ``q``, ``L^T g``."""
        return gradient @ self.factor if self.is_dense else self.factor * gradient

    def is_finite(self) -> bool:
        """Whether everything is finite."""
        return all(np.isfinite(x).all() for x in self if x is not None)

    def cast(self, dtype: Any) -> Whitening:
        """The same for compiled code, as JAX arrays of a type."""
        return jax.tree.map(lambda x: jnp.asarray(x, dtype), self)


@jax.jit
def _outer(factor: Any) -> Any:
    """``L L^T``, of one chain or of each: the same bits in a compiled step and after the run."""
    if factor.ndim > 2:
        return lax.map(_outer, factor)
    return factor @ factor.T
