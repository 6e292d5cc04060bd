r"""Gradient-noise compensation: inject less noise where the gradient brings its own.

A minibatch gradient of covariance V adds :math:`h^2 V` to a step that should add
:math:`2\gamma h`. Injecting :math:`2\gamma h - h^2\hat V` in its place leaves the sum right
(Ma, Chen and Fox 2015, *A complete recipe for stochastic gradient MCMC*, equation (9); Chen, Fox
and Guestrin 2014). Where :math:`\hat V` exceeds what is injected, nothing is left to inject.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

__all__ = ["GradientNoiseCovariance"]


class GradientNoiseCovariance(NamedTuple):
    """Covariance of the whitened gradient's noise, by its eigenvalues.

    - **eigenvalues** - eigenvalues, or variances where the covariance is taken as diagonal, ``(d,)``.
    - **eigenvectors** - eigenvectors as columns, shape ``(d, d)``; None for a diagonal.
    """

    eigenvalues: Array
    eigenvectors: Array | None = None

    @classmethod
    def from_covariance(cls, covariance: Array) -> GradientNoiseCovariance:
        """From a matrix of shape ``(d, d)``, or the diagonal of one, ``(d,)``."""
        return cls(covariance) if covariance.ndim == 1 else cls(*jnp.linalg.eigh(covariance))

    @property
    def covariance(self) -> Array:
        """The covariance, ``(d, d)`` or ``(d,)``."""
        if self.eigenvectors is None:
            return self.eigenvalues
        return (self.eigenvectors * self.eigenvalues) @ self.eigenvectors.T

    def subtract_from(self, normals: Array, fraction: Any) -> Array:
        """Normal entries of covariance one, made to have ``1 - share * covariance``.

        :param normals: shape ``(..., d)``.
        :param fraction: what part of the injected variance a unit of this covariance is.
        :return: the same shape; zero in directions where the difference is negative.
        """
        scale = jnp.sqrt(jnp.maximum(1.0 - fraction * self.eigenvalues, 0.0))
        if self.eigenvectors is None:
            return scale * normals
        return ((normals @ self.eigenvectors) * scale) @ self.eigenvectors.T
