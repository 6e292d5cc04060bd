"""Mass matrices by site: the user's, parsed, and the adapted one in NumPyro's format.

NumPyro shows an inverse mass matrix as a dict from tuples of site names to blocks. Here the
preconditioner is one flat matrix or diagonal; :class:`MassMatrixBlocks` extracts the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.linalg import solve_triangular

from numpyro_sgmcmc import errors
from numpyro_sgmcmc.errors import InvalidArgumentError, describe_value
from numpyro_sgmcmc.model.trace import LatentSite

# Relative asymmetry that float32 arithmetic can cause in a symmetric matrix, and the same in units
# of the largest entry, for entries near zero.
_SYMMETRY_RTOL, _SYMMETRY_ATOL = 1e-4, 1e-6


def build_mass_matrix_mask(
    dense_mass: Any, sites: tuple[LatentSite, ...], dim: int
) -> np.ndarray | None:
    """Return the mask of NumPyro's structured ``dense_mass=[("a", "b"), ...]``, shape ``(d, d)``.

    None for a bool, None or an empty list.
    """
    if dense_mass is None or isinstance(dense_mass, bool):
        return None
    if not isinstance(dense_mass, list):
        raise InvalidArgumentError(
            f"`dense_mass` is {describe_value(dense_mass)}, "
            "which is neither a bool nor a list of tuples.",
            "pass True, False, None or a list of tuples of site names.",
            "dense-mass",
        )
    if not dense_mass:
        return None
    mask = np.eye(dim, dtype=bool)
    for block in dense_mass:
        indices = _find_block_indices("dense_mass", block, sites)
        mask[np.ix_(indices, indices)] = True
    return mask


def parse_inverse_mass_matrix(
    inverse_mass_matrix: Any, sites: tuple[LatentSite, ...], dim: int
) -> np.ndarray | None:
    """Return a user's inverse mass matrix as an array of shape ``(d,)`` or ``(d, d)``.

    A dict maps tuples of site names to blocks, as in NumPyro; sites that it leaves out get ones.
    """
    if inverse_mass_matrix is None:
        return None
    if isinstance(inverse_mass_matrix, dict):
        matrix = _assemble_blocks(inverse_mass_matrix, sites, dim)
    else:
        matrix = _as_float_array(inverse_mass_matrix)
    if matrix.shape not in ((dim,), (dim, dim)):
        raise InvalidArgumentError(
            f"`inverse_mass_matrix` has shape {matrix.shape}, but the model has {dim} "
            "unconstrained coordinates.",
            f"pass shape ({dim},) or ({dim}, {dim}), or a dict of blocks by site names.",
            "mass-matrix-shape",
        )
    if not is_positive_definite(matrix):
        raise InvalidArgumentError(
            "`inverse_mass_matrix` is not positive definite.",
            "pass the posterior covariance in unconstrained space, or its diagonal.",
            "positive-definite",
        )
    return matrix


def _assemble_blocks(
    matrix_by_block: dict[Any, Any], sites: tuple[LatentSite, ...], dim: int
) -> np.ndarray:
    """Return the full matrix, or its diagonal if all blocks are diagonals."""
    blocks = [
        (_find_block_indices("inverse_mass_matrix", names, sites), _as_float_array(value))
        for names, value in matrix_by_block.items()
    ]
    used = np.concatenate([np.empty(0, int), *(indices for indices, _ in blocks)])
    if len(np.unique(used)) < len(used):
        raise InvalidArgumentError(
            f"`inverse_mass_matrix` names a site twice: its blocks are {list(matrix_by_block)}.",
            "name each site in one block only.",
            "mass-matrix-blocks",
        )
    full = np.eye(dim)
    for indices, block in blocks:
        if block.shape not in ((indices.size,), (indices.size, indices.size)):
            raise InvalidArgumentError(
                f"`inverse_mass_matrix` has a block of shape {block.shape} for "
                f"{indices.size} coordinates.",
                f"pass shape ({indices.size},) or ({indices.size}, {indices.size}) for the block.",
                "mass-matrix-shape",
            )
        full[np.ix_(indices, indices)] = np.diag(block) if block.ndim == 1 else block
    return full if any(block.ndim == 2 for _, block in blocks) else np.diagonal(full).copy()


def _find_block_indices(arg_name: str, block: Any, sites: tuple[LatentSite, ...]) -> np.ndarray:
    """Return the flat coordinates of a user's tuple of site names, in the order of the tuple."""
    if not isinstance(block, (str, tuple, list)) or not block:
        raise InvalidArgumentError(
            f"`{arg_name}` has {describe_value(block)} where a tuple of site names is expected.",
            "write a block as a tuple of names, for example ('a', 'b').",
            "mass-matrix-blocks",
        )
    indices_by_site = _coordinate_indices_by_site(tuple((s.name, s.size) for s in sites))
    names = _as_tuple(block)
    for name in names:
        if name not in indices_by_site:
            listed = ", ".join(repr(s) for s in indices_by_site) or "there are none"
            raise InvalidArgumentError(
                f"`{arg_name}` names site '{name}', which is not a latent site of the model.",
                f"use names of latent sites ({listed}), or pass an array.",
                "mass-matrix-blocks",
            )
    return np.concatenate([indices_by_site[name] for name in names])


def _as_tuple(block: Any) -> tuple[str, ...]:
    """Return the site names of a block, which may be one name."""
    return (block,) if isinstance(block, str) else tuple(block)


def _as_float_array(value: Any) -> np.ndarray:
    """Return a user's matrix or diagonal as an array of floats."""
    return errors.validate_real_array("inverse_mass_matrix", value).astype(np.float64)


def is_positive_definite(matrix: np.ndarray) -> bool:
    """Return whether a matrix, a diagonal or a scalar is finite and positive definite."""
    if not np.isfinite(matrix).all():
        return False
    if matrix.ndim < 2:
        return bool((matrix > 0).all())
    atol = _SYMMETRY_ATOL * np.abs(matrix).max(initial=0.0)
    is_symmetric = np.allclose(matrix, matrix.T, rtol=_SYMMETRY_RTOL, atol=atol)
    return bool(is_symmetric and (np.linalg.eigvalsh(matrix) > 0).all())


# The matrix in NumPyro's format.


@jax.tree_util.register_static
@dataclass(frozen=True)
class MassMatrixBlocks:
    """
    - **site_sizes** - names and numbers of coordinates of the latent sites, in flat order.
    - **blocks** - tuples of site names, together each site once, and the form of each block: a
      matrix (True), a diagonal (False), or the form of the full matrix (None).

    It is a static part of a chain's state: no leaf of the pytree.
    """

    site_sizes: tuple[tuple[str, int], ...]
    blocks: tuple[tuple[tuple[str, ...], bool | None], ...]

    def extract(self, matrix: Array, is_dense: bool) -> dict[tuple[str, ...], Array]:
        """Return the blocks of a matrix.

        :param matrix: shape ``(d, d)``, or ``(d,)`` for a diagonal; leading axes of chains.
        """
        indices_by_site = _coordinate_indices_by_site(self.site_sizes)
        extracted = {}
        for names, as_matrix in self.blocks:
            indices = np.concatenate([np.empty(0, int), *(indices_by_site[n] for n in names)])
            if is_dense:
                rows = indices if as_matrix is False else indices[:, None]
                extracted[names] = matrix[..., rows, indices]
            elif as_matrix:
                diagonal = matrix[..., indices, None]
                extracted[names] = diagonal * jnp.eye(indices.size, dtype=matrix.dtype)
            else:
                extracted[names] = matrix[..., indices]
        return extracted


def build_mass_matrix_blocks(
    dense_mass: Any, inverse_mass_matrix: Any, sites: tuple[LatentSite, ...] | None
) -> MassMatrixBlocks | None:
    """Return the blocks in which NumPyro would show the mass matrix; None for a potential function.

    Blocks of ``dense_mass`` are matrices. Blocks of a dict ``inverse_mass_matrix`` have the form
    that they have there. All other sites form one diagonal block. Without any of these there is
    one block of all sites.
    """
    if sites is None:
        return None
    is_dict = isinstance(inverse_mass_matrix, dict)
    names = tuple(site.name for site in sites)
    blocks: dict[tuple[str, ...], bool | None] = {}
    if is_dict and dense_mass is not True:
        blocks |= {_as_tuple(k): np.ndim(x) == 2 for k, x in inverse_mass_matrix.items()}
    if isinstance(dense_mass, list) and (inverse_mass_matrix is None or is_dict):
        blocks |= {_as_tuple(k): True for k in dense_mass}
    in_blocks = [name for block in blocks for name in block]
    if not in_blocks or len(set(in_blocks)) < len(in_blocks):
        blocks, in_blocks = {names: True if dense_mass is True else None}, list(names)
    others = tuple(name for name in names if name not in in_blocks)
    if others:
        blocks[others] = False
    site_sizes = tuple((site.name, site.size) for site in sites)
    return MassMatrixBlocks(site_sizes, tuple((k, x) for k, x in blocks.items() if k))


def compute_mass_matrix_sqrt(inverse_mass_matrix: Array, is_dense: bool) -> tuple[Array, Array]:
    """Return S, lower triangular with ``S S^T`` the mass matrix, and its inverse.

    :param inverse_mass_matrix: shape ``(k, k)``, or ``(k,)`` for a diagonal; leading axes of
        chains.
    """
    if not is_dense:
        inverse_sqrt = jnp.sqrt(inverse_mass_matrix)
        return 1.0 / inverse_sqrt, inverse_sqrt
    # With J the reversal of the coordinates and M^-1 = U U^T, U upper triangular:
    # J M^-1 J = (J U J)(J U J)^T is a Cholesky factorisation, and S^-1 = U^T.
    upper = jnp.linalg.cholesky(inverse_mass_matrix[..., ::-1, ::-1])[..., ::-1, ::-1]
    inverse_sqrt = jnp.swapaxes(upper, -2, -1)
    identity = jnp.eye(inverse_mass_matrix.shape[-1], dtype=inverse_mass_matrix.dtype)
    identity = jnp.broadcast_to(identity, inverse_mass_matrix.shape)
    return solve_triangular(inverse_sqrt, identity, lower=True), inverse_sqrt


def _coordinate_indices_by_site(site_sizes: tuple[tuple[str, int], ...]) -> dict[str, np.ndarray]:
    stops = np.cumsum([size for _, size in site_sizes], dtype=int)
    return {
        name: np.arange(stop - size, stop)
        for (name, size), stop in zip(site_sizes, stops, strict=True)
    }
