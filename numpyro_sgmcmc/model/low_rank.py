"""Symmetric matrices that scale a few directions: a low-rank change of the identity."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class LowRankFactor(NamedTuple):
    r"""A symmetric matrix :math:`I + U(S - I)U^\top` that scales a few directions."""

    directions: Any  # U, orthonormal columns, shape `(d, k)`
    scales: Any  # diagonal of S, positive, shape `(k,)`

    def apply(self, v: Any) -> Any:
        """Return the matrix times ``v``, or times each row of it."""
        return v + ((v @ self.directions) * (self.scales - 1.0)) @ self.directions.mT

    def solve(self, v: Any) -> Any:
        """Return the inverse matrix times ``v``, or times each row of it."""
        return self._replace(scales=1.0 / self.scales).apply(v)

    def split(self, v: Any) -> Any:
        """Return the part of ``v`` orthogonal to the directions, then its components along them.

        :return: shape ``(d + k,)``, or as many rows.
        """
        xp = jnp if isinstance(v, jax.Array) else np
        components = v @ self.directions
        return xp.concatenate([v - components @ self.directions.mT, components], -1)

    def apply_squared(self, variances: Any) -> Any:
        """Return the variances of the product with uncorrelated entries.

        Exact for equal variances; others are averaged over each direction.
        """
        squares = self.directions**2
        return variances + ((variances @ squares) * (self.scales**2 - 1.0)) @ squares.mT

    @property
    def diagonal_of_square(self) -> Any:
        """Diagonal of the squared matrix, of one chain or of each."""
        more = jnp.square(self.scales)[..., None, :] - 1.0
        return 1.0 + (jnp.square(self.directions) * more).sum(-1)
