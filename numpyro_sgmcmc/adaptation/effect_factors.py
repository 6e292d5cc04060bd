r"""Factors of the covariances of each group's effects, and signs for points at that distance.

A factor F of shape ``(k, k, G)`` has, for each of G groups, the covariance :math:`FF^\top` of its k
effects given the shared parameters.
"""

from __future__ import annotations

import numpy as np
from scipy.linalg import hadamard

from numpyro_sgmcmc.model.block_arrow import map_groups

_MIN_BLOCK_EIGENVALUE = 1e-2  # of blocks with unit diagonal that are not positive definite


def factorize_inverse_blocks(blocks: np.ndarray) -> np.ndarray:
    """Return F with ``F F^T`` the inverse of each block, made positive definite where it is not.

    It is not finite where blocks are not.
    """
    inverse = map_groups(_invert_cholesky, blocks)
    if np.isfinite(inverse).all() or not np.isfinite(blocks).all():
        return np.ascontiguousarray(inverse.swapaxes(0, 1))
    matrices = np.moveaxis(blocks, 2, 0)
    diagonal = np.abs(np.diagonal(matrices, axis1=1, axis2=2))
    scale = 1.0 / np.sqrt(np.maximum(diagonal, _MIN_BLOCK_EIGENVALUE * np.median(diagonal, 0)))
    eigenvalues, vectors = np.linalg.eigh(matrices * scale[:, :, None] * scale[:, None, :])
    eigenvalues = np.maximum(np.abs(eigenvalues), _MIN_BLOCK_EIGENVALUE)
    factors = scale[:, :, None] * vectors / np.sqrt(eigenvalues)[:, None, :]
    return np.ascontiguousarray(np.moveaxis(factors, 0, 2))


def _invert_cholesky(blocks: np.ndarray) -> np.ndarray:
    """Return the inverses of the Cholesky factors, not finite where a block has none.

    Loops over the effects of a group, with arrays of groups, are faster than LAPACK for each group.
    """
    lower, inverse = np.zeros(blocks.shape), np.zeros(blocks.shape)
    with np.errstate(invalid="ignore", divide="ignore"):
        for j in range(len(blocks)):
            column = blocks[j:, j] - np.einsum("img,mg->ig", lower[j:, :j], lower[j, :j])
            lower[j:, j] = column / np.sqrt(column[0])
            inverse[j, :j] = -np.einsum("mg,mig->ig", lower[j, :j], inverse[:j, :j])
            inverse[j, j] = 1.0
            inverse[j, : j + 1] /= lower[j, j]
    return inverse


def make_symmetric_factors(factors: np.ndarray, prior_precisions: np.ndarray) -> np.ndarray:
    r"""Return the factors of the same covariances that are symmetric in units of the prior's SDs.

    Of all factors F of a group's covariance :math:`\Sigma`, this one changes nearest to diagonally,
    :math:`dF \approx F\,\mathrm{diag}`, when the prior's SD of an effect changes, so that a trend
    of SDs describes most of the change.

    :param factors: of shape ``(k, k, G)``.
    :param prior_precisions: of each effect, shape ``(k, G)``; where there is none, units of the
        posterior's SDs.
    """
    if len(factors) == 1:
        return factors
    prior_sds = 1.0 / np.sqrt(np.where(prior_precisions > 0.0, prior_precisions, np.inf))
    scales = np.where(prior_sds > 0.0, prior_sds, np.sqrt(np.square(factors).sum(1)))
    return map_groups(_make_symmetric, factors, scales)


def _make_symmetric(factors: np.ndarray, scales: np.ndarray) -> np.ndarray:
    scaled = np.moveaxis(factors / scales[:, None], 2, 0)
    eigenvalues, vectors = np.linalg.eigh(scaled @ scaled.swapaxes(1, 2))
    root = (vectors * np.sqrt(np.abs(eigenvalues))[:, None]) @ vectors.swapaxes(1, 2)
    return np.moveaxis(root, 0, 2) * scales[:, None]


def list_sign_patterns(num_effects: int) -> np.ndarray:
    """Return sign vectors ``(n, k)`` in which the products of different entries cancel."""
    return hadamard(1 << (num_effects - 1).bit_length())[:, :num_effects]


def balance_signs(factors: np.ndarray) -> np.ndarray:
    """Return random signs ``(k, G)`` in which products of different effects nearly cancel.

    Groups of a similar volume of their effects' distribution have all the sign vectors between
    them. Independent signs would move correlations of effects of few rows by more than their
    posterior SD.
    """
    patterns = list_sign_patterns(len(factors))
    num_groups, num_patterns = factors.shape[2], len(patterns)
    order = np.argsort(np.linalg.slogdet(np.moveaxis(factors, 2, 0))[1])
    flips = np.random.default_rng(0).choice(
        [-1.0, 1.0], (len(factors), -(-num_groups // num_patterns))
    )
    signs = np.empty(factors.shape[1:])
    signs[:, order] = np.einsum("pa,ab->abp", patterns, flips).reshape(len(factors), -1)[
        :, :num_groups
    ]
    return signs
