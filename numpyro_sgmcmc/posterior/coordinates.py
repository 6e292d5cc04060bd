r"""Whitened coordinates: :math:`\theta = \hat\theta + Lq` with :math:`LL^\top` about the posterior
covariance.

Every dynamic runs in :math:`q` with unit mass and gradient :math:`L^\top\nabla U`, so that it
needs to know nothing of mass matrices and one default step size fits every model.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

__all__ = ["Coordinates"]


class Coordinates(NamedTuple):
    """
    - **anchor** - the origin, a position of shape ``(d,)``.
    - **factor** - L: shape ``(d,)`` for a diagonal, ``(d, d)`` for a matrix.
    """

    anchor: Array
    factor: Array

    def position(self, q: Array) -> Array:
        """The position at whitened coordinates ``q``."""
        return self.anchor + self.push(q)

    def push(self, v: Array) -> Array:
        """A whitened displacement as a displacement of positions, ``L v``."""
        return self.factor @ v if self.factor.ndim == 2 else self.factor * v

    def whiten(self, v: Array) -> Array:
        """A displacement of positions as a whitened one, ``L^-1 v``."""
        return jnp.linalg.solve(self.factor, v) if self.factor.ndim == 2 else v / self.factor

    def pull(self, gradient: Array) -> Array:
        """A gradient with respect to positions as one with respect to ``q``, ``L^T g``."""
        return gradient @ self.factor if self.factor.ndim == 2 else self.factor * gradient

    @property
    def inverse_mass_matrix(self) -> Array:
        """``L L^T``, in the shape of the factor."""
        return self.factor @ self.factor.T if self.factor.ndim == 2 else jnp.square(self.factor)
