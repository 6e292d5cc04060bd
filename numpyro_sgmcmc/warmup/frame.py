"""Whitened coordinates on the host, in float64: what the warm-up moves from stage to stage."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.posterior.coordinates import Coordinates
from numpyro_sgmcmc.posterior.gradients import Anchored

__all__ = ["Frame"]


class Frame(NamedTuple):
    """
    - **anchor** - origin, a position of shape ``(d,)``.
    - **factor** - L, shape ``(d,)`` or ``(d, d)``.
    - **gradient** - gradient on all rows at the anchor, shape ``(d,)``.
    - **hessian** - Hessian on all rows at the anchor, shape ``(d, d)``, where it has been needed.

    The methods take one vector of shape ``(d,)`` or several as rows.
    """

    anchor: np.ndarray
    factor: np.ndarray
    gradient: np.ndarray
    hessian: np.ndarray | None = None

    def push(self, v: np.ndarray) -> np.ndarray:
        """Whitened displacements as displacements of positions, ``L v``."""
        return v * self.factor if self.factor.ndim == 1 else v @ self.factor.T

    def whiten(self, v: np.ndarray) -> np.ndarray:
        """Displacements of positions as whitened ones, ``L^-1 v``."""
        return v / self.factor if self.factor.ndim == 1 else np.linalg.solve(self.factor, v.T).T

    def pull(self, gradient: np.ndarray) -> np.ndarray:
        """Gradients with respect to positions as whitened ones, ``L^T g``."""
        return gradient * self.factor if self.factor.ndim == 1 else gradient @ self.factor

    def is_finite(self) -> bool:
        """Whether everything is finite."""
        return all(np.isfinite(x).all() for x in self if x is not None)

    def anchored(self, dtype: Any) -> Anchored:
        """The same for compiled code."""
        anchor, factor, gradient = (jnp.asarray(x, dtype) for x in self[:3])
        hessian = None if self.hessian is None else jnp.asarray(self.hessian, dtype)
        return Anchored(Coordinates(anchor, factor), gradient, hessian)
