"""The inverse mass matrix as NumPyro shows it: a dict of blocks by tuples of site names.

A user's mass matrix, and the blocks of a structured one, on flat positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.linalg import solve_triangular

from numpyro_sgmcmc.errors import InvalidArgumentError, summarise_error
from numpyro_sgmcmc.model.potential import GlobalSite

if TYPE_CHECKING:
    from numpyro_sgmcmc.sampling.options import Options

__all__ = [
    "MassMatrixBlocks",
    "build_mass_matrix_blocks",
    "build_mass_matrix_mask",
    "compute_mass_matrix_sqrt",
    "parse_inverse_mass_matrix",
]


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


def build_mass_matrix_mask(
    dense_mass: Any, sites: tuple[GlobalSite, ...], dim: int
) -> np.ndarray | None:
    """Blocks of NumPyro's structured ``dense_mass=[("a", "b"), ...]``; None for a bool or None."""
    if dense_mass is None or isinstance(dense_mass, (bool, np.bool_)):
        return None
    if not isinstance(dense_mass, list):
        raise InvalidArgumentError(
            f"`dense_mass` is {dense_mass!r}, but must be True, False, None or a list of tuples "
            "of site names."
        )
    if not dense_mass:
        return None
    mask = np.eye(dim, dtype=bool)
    for names in dense_mass:
        block = _find_site_coordinates("dense_mass", names, sites)
        mask[np.ix_(block, block)] = True
    return mask


def parse_inverse_mass_matrix(
    inverse_mass_matrix: Any, sites: tuple[GlobalSite, ...], dim: int
) -> np.ndarray | None:
    """A user's inverse mass matrix as an array of shape ``(d,)`` or ``(d, d)``.

    A dict maps tuples of site names to blocks, as in NumPyro; sites it leaves out get ones.
    """
    if inverse_mass_matrix is None:
        return None
    matrix = (
        _assemble_inverse_mass_matrix(inverse_mass_matrix, sites, dim)
        if isinstance(inverse_mass_matrix, dict)
        else _as_float_array(inverse_mass_matrix)
    )
    if matrix.shape not in ((dim,), (dim, dim)):
        raise InvalidArgumentError(
            f"`inverse_mass_matrix` has shape {matrix.shape}, but the model has {dim} "
            f"unconstrained coordinates: give shape ({dim},) or ({dim}, {dim})."
        )
    if not (np.isfinite(matrix).all() and _is_positive_definite(matrix)):
        raise InvalidArgumentError("`inverse_mass_matrix` must be positive definite.")
    return matrix


def build_mass_matrix_blocks(
    options: Options, sites: tuple[GlobalSite, ...] | None
) -> MassMatrixBlocks | None:
    """How NumPyro would show the mass matrix that these options give; None without a model.

    Blocks of ``dense_mass`` are matrices; those of a user's dict have the form that they have
    there; all other sites stand together, by their variances. Without any block all sites do.

    :param options: ``dense_mass`` and ``inverse_mass_matrix``.
    :param sites: the latent sites.
    """
    dense_mass, value = options.dense_mass, options.inverse_mass_matrix
    if sites is None:
        return None
    sizes = tuple((site.name, site.size) for site in sites)
    names = tuple(name for name, _ in sizes)
    blocks: dict[tuple[str, ...], bool | None] = {}
    if isinstance(value, dict) and dense_mass is not True:
        blocks |= {_normalize_site_names(block): np.ndim(x) == 2 for block, x in value.items()}
    if isinstance(dense_mass, list) and (value is None or isinstance(value, dict)):
        blocks |= {_normalize_site_names(block): True for block in dense_mass}
    stated = [name for block in blocks for name in block]
    if not stated or len(set(stated)) < len(stated):
        blocks, stated = {names: True if dense_mass is True else None}, list(names)
    others = tuple(name for name in names if name not in stated)
    if others:
        blocks[others] = False
    return MassMatrixBlocks(sizes, tuple((k, x) for k, x in blocks.items() if k))


def _assemble_inverse_mass_matrix(
    matrix_by_block: dict[Any, Any], sites: tuple[GlobalSite, ...], dim: int
) -> np.ndarray:
    """The whole matrix, diagonal if all blocks are."""
    blocks = [
        (_find_site_coordinates("inverse_mass_matrix", k, sites), _as_float_array(v))
        for k, v in matrix_by_block.items()
    ]
    taken = np.concatenate([np.empty(0, int), *(where for where, _ in blocks)])
    if len(np.unique(taken)) < len(taken):
        raise InvalidArgumentError(
            f"`inverse_mass_matrix` names a site twice in {list(matrix_by_block)}: each may stand in one "
            "block."
        )
    full = np.eye(dim)
    for where, block in blocks:
        if block.shape not in ((where.size,), (where.size, where.size)):
            raise InvalidArgumentError(
                f"`inverse_mass_matrix` has a block of shape {block.shape} for "
                f"{where.size} coordinates."
            )
        full[np.ix_(where, where)] = np.diag(block) if block.ndim == 1 else block
    return full if any(b.ndim == 2 for _, b in blocks) else np.diagonal(full).copy()


def _find_site_slices(sites: tuple[GlobalSite, ...]) -> dict[str, slice]:
    """Where each site's coordinates lie in the flat position."""
    found, start = {}, 0
    for site in sites:
        size = int(np.prod(site.shape))
        found[site.name] = slice(start, start + size)
        start += size
    return found


def _find_site_coordinates(
    arg_name: str, site_names: Any, sites: tuple[GlobalSite, ...]
) -> np.ndarray:
    """Flat coordinates of a tuple of site names, in the order of the tuple."""
    slices = _find_site_slices(sites)
    if not isinstance(site_names, (str, tuple, list)) or not site_names:
        raise InvalidArgumentError(
            f"`{arg_name}` has {site_names!r} where a tuple of site names is expected."
        )
    site_names = _normalize_site_names(site_names)
    for name in site_names:
        if name not in slices:
            raise InvalidArgumentError(
                f"`{arg_name}` names site '{name}', but the latent sites are "
                f"{', '.join(repr(s) for s in slices) or 'not known for a potential function'}."
            )
    return np.concatenate([np.arange(slices[n].start, slices[n].stop) for n in site_names])


def _normalize_site_names(block: Any) -> tuple[str, ...]:
    """Site names of a block, of which one may stand alone."""
    return (block,) if isinstance(block, str) else tuple(block)


def _as_float_array(value: Any) -> np.ndarray:
    """A user's matrix or its diagonal as an array of floats."""
    try:
        found = np.asarray(value)
        if found.dtype.kind not in "iuf":
            raise TypeError(f"its type is {found.dtype}")
        return found.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"`inverse_mass_matrix` must be an array of numbers, but {summarise_error(error)}."
        ) from error


def _is_positive_definite(matrix: np.ndarray) -> bool:
    if matrix.ndim == 1:
        return bool((matrix > 0).all())
    is_symmetric = np.allclose(matrix, matrix.T, rtol=1e-4, atol=1e-6 * np.abs(matrix).max())
    return bool(is_symmetric and np.linalg.eigvalsh(matrix).min() > 0)
