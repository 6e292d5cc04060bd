"""The factor L of the whitened coordinates: from curvature first, then from a pilot's draws."""

from __future__ import annotations

import numpy as np

from numpyro_sgmcmc.posterior.whitening import Stretch, Whitening
from numpyro_sgmcmc.warmup.eager_potential import EagerPotential

__all__ = [
    "as_matrix",
    "factor_from_curvature",
    "factor_from_draws",
    "factor_from_gradients",
    "hessian_by_products",
    "largest_curvature",
    "root",
    "symmetric_root",
]

_PROBES = 64
_DIRECTIONS = 128  # leading ones of the draws, and as many of their gradients
_ROUNDS = 3
_RIDGE = 1e-3
_CLEARLY_STRETCHED = 1.5  # eigenvalue: beyond it, or below its inverse, a direction is kept
_STRETCH_MAX_DIM = 50_000


def symmetric_root(matrix: np.ndarray, inverse: bool = False) -> np.ndarray:
    """R with ``R R^T`` the matrix (or its inverse), made positive definite where it is not.

    Rows and columns are scaled to a unit diagonal first, so that columns measured in very
    different units do not drown each other; negative eigenvalues are turned round and tiny ones
    raised.

    :param matrix: symmetric, shape ``(d, d)``.
    :return: the root; NaN where the matrix is not finite.
    """
    if not np.isfinite(matrix).all():
        return np.full_like(matrix, np.nan)
    diagonal = np.abs(np.diagonal(matrix))
    scale = np.sqrt(np.where(diagonal > 0, diagonal, 1.0))
    values, vectors = np.linalg.eigh(matrix / np.outer(scale, scale))
    values = np.abs(values)
    values = np.maximum(values, 1e-7 * (values.max() or 1.0))
    if inverse:
        return vectors / np.sqrt(values) / scale[:, None]
    return vectors * np.sqrt(values) * scale[:, None]


def root(matrix: np.ndarray) -> np.ndarray:
    """L with ``L L^T`` the matrix, ``(d, d)``, or the diagonal one of shape ``(d,)``."""
    return symmetric_root(matrix) if matrix.ndim == 2 else np.sqrt(matrix)


def hessian_by_products(potential: EagerPotential, position: np.ndarray) -> np.ndarray:
    """A large Hessian, 64 columns at a time, so that memory is that of the matrix."""
    d = position.size
    columns = np.eye(-(-d // _PROBES) * _PROBES, d)
    blocks = columns.reshape(-1, _PROBES, d)
    hessian = np.concatenate([potential.hessian_products(position, v) for v in blocks])[:d]
    return (hessian + hessian.T) / 2


def factor_from_curvature(
    hessian: np.ndarray | None,
    mask: np.ndarray | None,
    is_dense: bool,
    potential: EagerPotential,
    position: np.ndarray,
) -> np.ndarray:
    """L from the Hessian: its inverse root if dense, the inverse roots of its diagonal if not.

    :param hessian: the Hessian, or None where it is too large to form; its diagonal is then
        estimated from products with random signs (Hutchinson 1990).
    :param mask: shape ``(d, d)``, True within the blocks of a structured mass matrix, or None.
    :param potential: on which to estimate the diagonal.
    :param position: where.
    :return: shape ``(d, d)`` or ``(d,)``.
    """
    if is_dense:
        assert hessian is not None
        factor = symmetric_root(hessian, inverse=True)
        return factor if mask is None else symmetric_root(np.where(mask, factor @ factor.T, 0.0))
    if hessian is not None:
        diagonal = np.abs(np.diagonal(hessian))
    else:
        signs = np.random.default_rng(0).choice([-1.0, 1.0], (_PROBES, position.size))
        diagonal = (signs * potential.hessian_products(position, signs)).mean(0)
        diagonal = np.maximum(diagonal, 0.1 * np.median(np.abs(diagonal)))
    return 1.0 / np.sqrt(np.maximum(diagonal, 1e-12 * diagonal.max()))


def factor_from_draws(
    factor: np.ndarray, covariance: np.ndarray, effective_size: float, mask: np.ndarray | None
) -> np.ndarray:
    """L renewed by the covariance of whitened draws, shrunk towards the identity.

    The intensity is Ledoit and Wolf's (2004): the covariance's sampling variance over its squared
    distance from the identity, so that a factor that was right already stays as it was.

    :param factor: the factor in whose coordinates the draws are, ``(d,)`` or ``(d, d)``.
    :param covariance: of the draws; only their variances, shape ``(d,)``, for a diagonal factor.
    :param effective_size: effective number of independent draws.
    :param mask: blocks of a structured mass matrix, or None.
    """
    d = factor.shape[0]
    is_diagonal = factor.ndim == 1
    excess = covariance - (1.0 if is_diagonal else np.eye(d))
    sampling_variance = (2 * d if is_diagonal else d * (d + 1)) / effective_size
    shrinkage = min(1.0, sampling_variance / max(np.square(excess).sum(), 1e-12))
    covariance = covariance - shrinkage * excess
    if is_diagonal:
        return factor * np.sqrt(np.clip(covariance, 1e-2, 1e2))
    if mask is None:
        return factor @ symmetric_root(covariance)
    return symmetric_root(np.where(mask, factor @ covariance @ factor.T, 0.0))


def largest_curvature(
    hessian: np.ndarray | None, whitening: Whitening, potential: EagerPotential
) -> float:
    """Largest absolute eigenvalue of the whitened Hessian at the whitening's anchor.

    :param hessian: the Hessian there; where None, power iteration by Hessian products.
    :return: the eigenvalue, or one where the curvature is not finite.
    """
    if hessian is not None:
        if not np.isfinite(hessian).all():
            return 1.0
        whitened = whitening.pull(whitening.pull(hessian).T)
        return float(np.abs(np.linalg.eigvalsh(whitened)).max())
    v = np.random.default_rng(0).standard_normal(whitening.anchor.size)
    norm = np.linalg.norm(v)
    for _ in range(20):
        product = potential.hessian_products(whitening.anchor, whitening.push(v / norm)[None])[0]
        v = whitening.pull(product)
        norm = np.linalg.norm(v)
        if not np.isfinite(norm) or norm == 0:
            return 1.0
    return float(norm)


def factor_from_gradients(
    positions: np.ndarray, gradients: np.ndarray
) -> tuple[np.ndarray, Stretch | None]:
    r"""The diagonal, and the few directions besides, in which draws and gradients are alike.

    Under the right whitening the covariance of draws and that of their gradients are the same, in
    any number of draws if the posterior is Gaussian. So the diagonal is
    :math:`(\operatorname{var} x / \operatorname{var} g)^{1/4}`, and scaled by it the rest is the
    geometric mean :math:`C_x \# C_g^{-1}` of the covariances, in the span of the leading
    directions of both; only what clearly differs from one is kept.

    :param positions: about independent draws, shape ``(n, d)``.
    :param gradients: gradients on all rows there, of the same shape.

    Reference: Seyboldt, Carlson and Carpenter (2026), *Preconditioning Hamiltonian Monte Carlo by
    minimizing Fisher divergence*.
    """
    x, g = positions - positions.mean(0), gradients - gradients.mean(0)
    factor, stretch = _alike(x, g), None
    if x.shape[1] > _STRETCH_MAX_DIM:
        return factor, None
    for _ in range(_ROUNDS):
        stretch = _stretch(x / factor, g * factor)
        if stretch is None:
            break
        # A few stiff directions take part in many coordinates: the diagonal of what is left.
        factor = factor * _alike(stretch.undo(x / factor), stretch.apply(g * factor))
    return factor, _stretch(x / factor, g * factor)


def as_matrix(factor: np.ndarray, stretch: Stretch | None, mask: np.ndarray | None) -> np.ndarray:
    """The factor and the stretch as one matrix, ``(d, d)``.

    :param mask: blocks of a structured mass matrix, or None.
    """
    matrix = np.diag(factor)
    if stretch is not None:
        matrix = factor[:, None] * stretch.apply(np.eye(factor.size))
    return matrix if mask is None else symmetric_root(np.where(mask, matrix @ matrix.T, 0.0))


def _alike(x: np.ndarray, g: np.ndarray) -> np.ndarray:
    """The diagonal by which to divide draws and multiply gradients for equal variances."""
    of_x, of_g = (np.maximum(v.var(0), np.finfo(np.float32).tiny) for v in (x, g))
    return (of_x / of_g) ** 0.25


def _stretch(x: np.ndarray, g: np.ndarray) -> Stretch | None:
    """The directions in which draws and gradients differ clearly, of centred and scaled ones."""
    num = min(_DIRECTIONS, len(x) // 2, x.shape[1])
    leading = [np.linalg.svd(v, full_matrices=False)[2][:num] for v in (x, g)]
    span = np.linalg.qr(np.concatenate(leading).T)[0]
    of_x, of_g = (np.cov(v @ span, rowvar=False) + _RIDGE * np.eye(span.shape[1]) for v in (x, g))
    values, vectors = np.linalg.eigh(_geometric_mean(of_x, of_g))
    kept = (values > _CLEARLY_STRETCHED) | (values < 1.0 / _CLEARLY_STRETCHED)
    if not kept.any():
        return None
    return Stretch(span @ vectors[:, kept], np.sqrt(values[kept]))


def _geometric_mean(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The symmetric S with ``S b S = a``: the geometric mean of ``a`` and the inverse of ``b``."""
    values, vectors = np.linalg.eigh(b)
    root = vectors * np.sqrt(values) @ vectors.T
    inverse = vectors / np.sqrt(values) @ vectors.T
    values, vectors = np.linalg.eigh(root @ a @ root)
    middle = vectors * np.sqrt(np.maximum(values, 0.0)) @ vectors.T
    return inverse @ middle @ inverse
