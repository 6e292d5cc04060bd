"""The factor L of the whitened coordinates: from curvature first, then from a pilot's draws."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax, random

from numpyro_sgmcmc.arguments import Arguments
from numpyro_sgmcmc.coordinates import Coordinates
from numpyro_sgmcmc.full_data import Indices
from numpyro_sgmcmc.model import Target

__all__ = [
    "factor_from_curvature",
    "factor_from_draws",
    "largest_curvature",
    "symmetric_root",
]

_EXACT_DIAGONAL_MAX_DIM = 2_000
_PROBES = 64


def symmetric_root(matrix: Array, inverse: bool = False) -> Array:
    """R with ``R R^T`` the matrix (or its inverse), made positive definite where it is not.

    Rows and columns are scaled to a unit diagonal first, so that columns measured in very
    different units do not drown each other in float32; negative eigenvalues are turned round
    and tiny ones raised.

    :param matrix: symmetric, shape ``(d, d)``.
    """
    diagonal = jnp.abs(jnp.diagonal(matrix))
    tiny = jnp.finfo(matrix.dtype).tiny
    scale = jnp.sqrt(jnp.where(diagonal > tiny, diagonal, 1.0))
    values, vectors = jnp.linalg.eigh(matrix / jnp.outer(scale, scale))
    values = jnp.abs(values)
    values = jnp.maximum(values, 10 * jnp.finfo(matrix.dtype).eps * values.max())
    if inverse:
        return vectors / jnp.sqrt(values) / scale[:, None]
    return vectors * jnp.sqrt(values) * scale[:, None]


@partial(jax.jit, static_argnames=("target", "is_dense"))
def factor_from_curvature(
    target: Target,
    arguments: Arguments,
    position: Array,
    mask: Array | None,
    subset: Indices | None,
    rng_key: Array,
    is_dense: bool,
) -> Array:
    """L from the Hessian: its inverse root if dense, the inverse roots of its diagonal if not.

    :param mask: shape ``(d, d)``, True within the blocks of a structured mass matrix, or None.
    :param subset: rows from which the diagonal of a large Hessian is estimated.
    :return: shape ``(d, d)`` or ``(d,)``.
    """
    if is_dense:
        root = symmetric_root(target.full_hessian(position, arguments), inverse=True)
        return root if mask is None else symmetric_root(jnp.where(mask, root @ root.T, 0.0))
    if target.dim <= _EXACT_DIAGONAL_MAX_DIM:
        diagonal = jnp.diagonal(target.full_hessian(position, arguments))
    else:
        # Hutchinson: E[v * Hv] is the diagonal for signs v.
        probes = random.rademacher(rng_key, (_PROBES, target.dim), target.dtype)
        products = target.full_hessian_products(position, probes, arguments, subset)
        diagonal = (probes * products).mean(0)
        diagonal = jnp.maximum(diagonal, 0.1 * jnp.median(jnp.abs(diagonal)))
    diagonal = jnp.abs(diagonal)
    floor = jnp.finfo(target.dtype).eps * diagonal.max()
    return 1.0 / jnp.sqrt(jnp.maximum(diagonal, floor))


@partial(jax.jit, static_argnames="is_dense")
def factor_from_draws(
    factor: Array, draws: Array, effective_size: float, mask: Array | None, is_dense: bool
) -> Array:
    """L renewed by the covariance of whitened draws, shrunk towards the identity.

    The intensity is Ledoit and Wolf's (2004): the covariance's sampling variance over its squared
    distance from the identity, so that a factor that was right already stays as it was.

    :param factor: the factor in whose coordinates the draws are.
    :param draws: shape ``(n, d)``.
    :param effective_size: effective number of independent draws.
    """
    d = draws.shape[1]
    centred = draws - draws.mean(0)
    if is_dense:
        covariance = centred.T @ centred / (draws.shape[0] - 1)
        excess = covariance - jnp.eye(d, dtype=draws.dtype)
        shrinkage = jnp.clip(d * (d + 1) / effective_size / jnp.square(excess).sum(), 0.0, 1.0)
        covariance = covariance - shrinkage * excess
        if mask is None:
            return factor @ symmetric_root(covariance)
        return symmetric_root(jnp.where(mask, factor @ covariance @ factor.T, 0.0))
    variance = jnp.square(centred).sum(0) / (draws.shape[0] - 1)
    excess = variance - 1.0
    shrinkage = jnp.clip(2 * d / effective_size / jnp.square(excess).sum(), 0.0, 1.0)
    return factor * jnp.sqrt(jnp.clip(variance - shrinkage * excess, 1e-2, 1e2))


@partial(jax.jit, static_argnames="target")
def largest_curvature(
    target: Target,
    arguments: Arguments,
    coordinates: Coordinates,
    q: Array,
    subset: Indices | None,
    rng_key: Array,
) -> Array:
    """Largest absolute eigenvalue of the whitened Hessian at ``q``, by power iteration."""
    position = coordinates.position(q)

    def step(_: int, v: Array) -> Array:
        v = v / jnp.linalg.norm(v)
        product = target.full_hessian_products(
            position, coordinates.push(v)[None], arguments, subset
        )[0]
        return coordinates.pull(product)

    v = lax.fori_loop(0, 20, step, random.normal(rng_key, (target.dim,), target.dtype))
    return jnp.linalg.norm(v)
