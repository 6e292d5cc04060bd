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

__all__ = ["GradientNoise"]


class GradientNoise(NamedTuple):
    """Covariance of the whitened gradient's noise, by its eigenvalues.

    - **values** - eigenvalues, or variances where the covariance is taken as diagonal, ``(d,)``.
    - **vectors** - eigenvectors as columns, shape ``(d, d)``; None for a diagonal.
    """

    values: Array
    vectors: Array | None = None

    @classmethod
    def of(cls, covariance: Array) -> GradientNoise:
        """From a matrix of shape ``(d, d)``, or the diagonal of one, ``(d,)``."""
        return cls(covariance) if covariance.ndim == 1 else cls(*jnp.linalg.eigh(covariance))

    @property
    def covariance(self) -> Array:
        """The covariance, ``(d, d)`` or ``(d,)``."""
        if self.vectors is None:
            return self.values
        return (self.vectors * self.values) @ self.vectors.T

    def take_from(self, noise: Array, share: Any) -> Array:
        """Normal entries of covariance one, made to have ``1 - share * covariance``.

        :param noise: shape ``(..., d)``.
        :param share: what part of the injected variance a unit of this covariance is.
        :return: the same shape; zero in directions where the difference is negative.
        """
        scale = jnp.sqrt(jnp.maximum(1.0 - share * self.values, 0.0))
        if self.vectors is None:
            return scale * noise
        return ((noise @ self.vectors) * scale) @ self.vectors.T
