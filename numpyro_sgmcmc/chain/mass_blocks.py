"""The inverse mass matrix as NumPyro shows it: a dict of blocks by tuples of site names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.linalg import solve_triangular

__all__ = ["MassMatrixBlocks", "compute_mass_matrix_sqrt"]


@jax.tree_util.register_static
@dataclass(frozen=True)
class MassMatrixBlocks:
    """
    - **site_sizes** - names of the latent sites with their numbers of coordinates, in their order.
    - **blocks** - tuples of site names, which hold each site once, and whether each block is shown
      as a matrix (True), by its diagonal (False), or as the matrix itself is (None).

    Part of a chain's state that no program changes, and therefore no leaf of it.
    """

    site_sizes: tuple[tuple[str, int], ...]
    blocks: tuple[tuple[tuple[str, ...], bool | None], ...]

    def extract(self, matrix: Array, is_dense: bool) -> dict[tuple[str, ...], Array]:
        """The blocks of a matrix.

        :param matrix: shape ``(d, d)``, or ``(d,)`` for a diagonal; axes of chains before.
        :param is_dense: which of the two.
        """
        return dict(self._iter_blocks(matrix, is_dense))

    def _iter_blocks(
        self, matrix: Array, is_dense: bool
    ) -> Iterator[tuple[tuple[str, ...], Array]]:
        for names, as_matrix in self.blocks:
            where = self._coordinate_indices(names)
            if not is_dense:
                variances = matrix[..., where]
                own = variances[..., None] * jnp.eye(where.size, dtype=matrix.dtype)
                yield names, own if as_matrix else variances
            elif as_matrix is False:
                yield names, matrix[..., where, where]
            else:
                yield names, matrix[..., where[:, None], where]

    def _coordinate_indices(self, site_names: tuple[str, ...]) -> np.ndarray:
        """Flat coordinates of a block, in the order of its names."""
        stops = np.cumsum([size for _, size in self.site_sizes], dtype=int)
        places = {
            n: np.arange(stop - k, stop)
            for (n, k), stop in zip(self.site_sizes, stops, strict=True)
        }
        return np.concatenate([np.empty(0, int), *(places[name] for name in site_names)])


def compute_mass_matrix_sqrt(inverse_mass_matrix: Array, is_dense: bool) -> tuple[Array, Array]:
    """Of an inverse mass matrix: S with ``S S^T`` the mass matrix, lower triangular, and ``S^-1``.

    :param inverse_mass_matrix: shape ``(k, k)``, or ``(k,)`` for a diagonal; axes of chains before.
    :param is_dense: which of the two.
    """
    if not is_dense:
        inverse = jnp.sqrt(inverse_mass_matrix)
        return 1.0 / inverse, inverse
    # Cholesky's of the mirrored matrix is a factor by an upper triangle, whose transpose is S^-1.
    upper = jnp.linalg.cholesky(inverse_mass_matrix[..., ::-1, ::-1])[..., ::-1, ::-1]
    inverse = jnp.swapaxes(upper, -2, -1)
    identity = jnp.broadcast_to(
        jnp.eye(inverse_mass_matrix.shape[-1], dtype=inverse_mass_matrix.dtype),
        inverse_mass_matrix.shape,
    )
    return solve_triangular(inverse, identity, lower=True), inverse
