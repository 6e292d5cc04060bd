r"""Triangular inverse root of a Hessian, for posteriors of up to thousands of coordinates.

With :math:`L^\top H L = I` the expansion of the gradient about the reference point is the identity
in preconditioned coordinates, :math:`L^\top H L q = q`, so that a second-order control variate
takes no product with H.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg


class HessianFactor(NamedTuple):
    """L with ``L^T H L`` the identity, H the full-data Hessian at the center.

    All chains have the same: a product reads the matrix once for all of them.
    """

    matrix: Any  # L, upper triangular, shape `(d, d)`

    @classmethod
    def from_hessian(cls, hessian: np.ndarray, dtype: Any) -> HessianFactor | None:
        """Factorise a Hessian, or return None where it is not positive definite."""
        try:
            cholesky = scipy.linalg.cholesky(hessian, lower=True)
        except (np.linalg.LinAlgError, ValueError):  # not positive definite, or not finite
            return None
        inverse, _ = scipy.linalg.lapack.dtrtri(cholesky, lower=1, overwrite_c=1)
        return cls(np.ascontiguousarray(np.tril(inverse).T, dtype))

    @property
    def has_chain_axis(self) -> bool:
        """True where each chain has its own, as in a batch of one chain."""
        return self.matrix.ndim > 2

    def apply(self, q: Any) -> Any:
        """Return ``L q``, or its product with each row."""
        return _multiply(q, self.matrix.mT)

    def solve(self, v: Any) -> Any:
        """Return ``L^-1 v``, or its product with each row."""
        linalg = jax.scipy.linalg if isinstance(self.matrix, jax.Array) else scipy.linalg
        return linalg.solve_triangular(self.matrix, v.astype(self.matrix.dtype).T).T

    def apply_transpose(self, gradient: Any) -> Any:
        """Return ``L^T g``, or its product with each row."""
        return _multiply(gradient, self.matrix)

    def apply_squared(self, variances: Any) -> Any:
        """Return the variances of ``L q`` for uncorrelated q."""
        return _multiply(variances, (self.matrix * self.matrix).mT)

    @property
    def log_det(self) -> float:
        """Logarithm of the determinant; for NumPy arrays."""
        return float(np.log(np.diagonal(self.matrix).astype(np.float64)).sum())


def _multiply(v: Any, matrix: Any) -> Any:
    """Return ``v @ matrix`` in the type of the matrix, so that NumPy does not copy the matrix."""
    v = v.astype(matrix.dtype)
    if isinstance(matrix, jax.Array):
        # GPUs round to 10 bits otherwise, so that the Hessian would differ from the identity.
        return jnp.matmul(v, matrix, precision="highest")
    return v @ matrix
