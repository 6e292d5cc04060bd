"""The factor L of the whitened coordinates: from draws and gradients, or from curvature.

The whitening after a window of pilot chains: from their draws and the gradients there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from numpyro_sgmcmc.adaptation.batched_gradients import (
    BatchedGradients,
    JittedPotential,
)
from numpyro_sgmcmc.adaptation.budget import count_rows_per_gradient
from numpyro_sgmcmc.adaptation.gradient_noise import GradientNoiseStats
from numpyro_sgmcmc.model.preconditioner import LowRankFactor, Preconditioner

if TYPE_CHECKING:
    from numpyro_sgmcmc.adaptation.context import WarmupContext

__all__ = [
    "assemble_dense_factor",
    "factor_from_curvature",
    "factor_from_gradients",
    "factorize_covariance",
    "factorize_spd",
    "fit_low_rank_along",
    "refine_directions",
    "update_preconditioner",
]

_NUM_PROBE_VECTORS = 64


_MAX_LEADING_DIRECTIONS = 128  # leading ones of the draws, and as many of their gradients


_NUM_SCALING_ITERATIONS = 3


_MAX_SCALE_TO_SD_RATIO = (
    100.0  # times: a scale further from the draws' sd is none of the posterior's
)


_RIDGE_VARIANCE_FRACTION = 1e-5  # of the mean variance


_LOW_RANK_EIGENVALUE_CUTOFF = (
    1.5  # eigenvalue: beyond it, or below its inverse, a direction is kept
)


_LOW_RANK_MAX_DIM = 50_000


def factorize_spd(matrix: np.ndarray, inverse: bool = False) -> np.ndarray:
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


def factorize_covariance(covariance: np.ndarray) -> np.ndarray:
    """L with ``L L^T`` the matrix, ``(d, d)``, or the diagonal one of shape ``(d,)``."""
    return factorize_spd(covariance) if covariance.ndim == 2 else np.sqrt(covariance)


def factor_from_curvature(
    hessian: np.ndarray | None,
    mass_matrix_mask: np.ndarray | None,
    is_dense: bool,
    jitted_potential: JittedPotential,
    position: np.ndarray,
) -> np.ndarray:
    """L from the Hessian: its inverse root if dense, the inverse roots of its diagonal if not.

    :param hessian: the Hessian, or None where it is too large to form; its diagonal is then
        estimated from products with random signs (Hutchinson 1990).
    :param mass_matrix_mask: shape ``(d, d)``, True within the blocks of a structured mass matrix, or None.
    :param jitted_potential: on which to estimate the diagonal.
    :param position: where.
    :return: shape ``(d, d)`` or ``(d,)``.
    """
    if is_dense:
        assert hessian is not None
        factor = factorize_spd(hessian, inverse=True)
        return (
            factor
            if mass_matrix_mask is None
            else factorize_spd(np.where(mass_matrix_mask, factor @ factor.T, 0.0))
        )
    if hessian is not None:
        diagonal = np.abs(np.diagonal(hessian))
    else:
        signs = np.random.default_rng(0).choice([-1.0, 1.0], (_NUM_PROBE_VECTORS, position.size))
        diagonal = (signs * jitted_potential.hessian_products(position, signs)).mean(0)
        diagonal = np.maximum(diagonal, 0.1 * np.median(np.abs(diagonal)))
    return 1.0 / np.sqrt(np.maximum(diagonal, 1e-12 * diagonal.max()))


def factor_from_gradients(
    positions: np.ndarray,
    gradients: np.ndarray,
    extra_positions: np.ndarray | None = None,
    allow_low_rank: bool = True,
) -> tuple[np.ndarray, LowRankFactor | None]:
    r"""The diagonal, and the few directions besides, in which draws and gradients are alike.

    Under the right whitening the covariance of draws and that of their gradients are the same, in
    any number of draws if the posterior is Gaussian. So the diagonal is
    :math:`(\operatorname{var} x / \operatorname{var} g)^{1/4}`, and scaled by it the rest is the
    geometric mean :math:`C_x \# C_g^{-1}` of the covariances, in the span of the leading
    directions of both; only what clearly differs from one is kept.

    :param positions: about independent draws, shape ``(n, d)``.
    :param gradients: gradients on all rows there, of the same shape.
    :param extra_positions: further draws: in many coordinates a direction in which the posterior is wide
        stands out of a few hundred draws only if it is very wide.
    :param allow_low_rank: False for the diagonal alone.

    Reference: Seyboldt, Carlson and Carpenter (2026), *Preconditioning Hamiltonian Monte Carlo by
    minimizing Fisher divergence*.
    """
    x, g = positions - positions.mean(0), gradients - gradients.mean(0)
    extra_positions = x if extra_positions is None else extra_positions - extra_positions.mean(0)
    factor, stretch = _compute_balancing_scale(x, g), None
    if x.shape[1] > _LOW_RANK_MAX_DIM or not allow_low_rank:
        return factor, None
    for _ in range(_NUM_SCALING_ITERATIONS):
        scale, stretch = _fit_low_rank(x / factor, g * factor, extra_positions / factor)
        factor = scale * factor
        if stretch is None:
            break
        # A few stiff directions take part in many coordinates: the diagonal of what is left.
        factor = factor * _compute_balancing_scale(
            stretch.solve(x / factor), stretch.apply(g * factor)
        )
    scale, stretch = _fit_low_rank(x / factor, g * factor, extra_positions / factor)
    return scale * factor, stretch


def assemble_dense_factor(
    factor: np.ndarray, low_rank: LowRankFactor | None, mass_matrix_mask: np.ndarray | None
) -> np.ndarray:
    """The factor and the stretch as one matrix, ``(d, d)``.

    :param mass_matrix_mask: blocks of a structured mass matrix, or None.
    """
    matrix = np.diag(factor)
    if low_rank is not None:
        matrix = factor[:, None] * low_rank.apply(np.eye(factor.size))
    return (
        matrix
        if mass_matrix_mask is None
        else factorize_spd(np.where(mass_matrix_mask, matrix @ matrix.T, 0.0))
    )


def _compute_balancing_scale(x: np.ndarray, g: np.ndarray) -> np.ndarray:
    """The diagonal by which to divide draws and multiply gradients for equal variances.

    Where the gradient does not vary, as in a flat place, the draws' own width must do.
    """
    of_x, of_g = (np.maximum(v.var(0), np.finfo(np.float32).tiny) for v in (x, g))
    sd = np.sqrt(of_x)
    return np.clip((of_x / of_g) ** 0.25, sd / _MAX_SCALE_TO_SD_RATIO, sd * _MAX_SCALE_TO_SD_RATIO)


def _fit_low_rank(
    x: np.ndarray, g: np.ndarray, extra_x: np.ndarray
) -> tuple[float, LowRankFactor | None]:
    """The scale of most directions, and those that differ from it clearly.

    :param x: centred and scaled draws, shape ``(n, d)``.
    :param g: their gradients, likewise.
    :param extra_x: further draws, likewise; they choose directions and have no part in the rest, where
        what draws and their own gradients have in common cancels.
    """
    num = min(_MAX_LEADING_DIRECTIONS, len(x) // 3, x.shape[1])
    span = np.linalg.qr(
        np.concatenate([_compute_leading_directions(v, num) for v in (extra_x, g)]).T
    )[0]
    if span.shape[1] < 2:
        return 1.0, None
    values, vectors = _eigendecompose_in_subspace(span, x, g)
    most = float(np.median(values))
    return np.sqrt(most), _select_low_rank(values / most, vectors)


def fit_low_rank_along(
    directions: np.ndarray, factor: np.ndarray, positions: np.ndarray, gradients: np.ndarray
) -> LowRankFactor | None:
    """What draws and gradients say of some directions, the diagonal given.

    :param directions: columns, in the diagonal's whitened coordinates, shape ``(d, k)``.
    :param factor: the diagonal.
    :param positions: as for :func:`factor_from_gradients`.
    :param gradients: as there.
    """
    x, g = positions - positions.mean(0), gradients - gradients.mean(0)
    span = np.linalg.qr(directions)[0]
    return _select_low_rank(*_eigendecompose_in_subspace(span, x / factor, g * factor))


def _eigendecompose_in_subspace(
    basis: np.ndarray, x: np.ndarray, g: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Variances in a subspace by which draws and gradients are alike, and their directions."""
    of_x, of_g = (np.atleast_2d(np.cov(v @ basis, rowvar=False)) for v in (x, g))
    ridges = [
        _RIDGE_VARIANCE_FRACTION * np.eye(len(c)) * np.trace(c) / len(c) for c in (of_x, of_g)
    ]
    values, vectors = np.linalg.eigh(
        _spd_geometric_mean_with_inverse(of_x + ridges[0], of_g + ridges[1])
    )
    return values, basis @ vectors


def _select_low_rank(eigenvalues: np.ndarray, directions: np.ndarray) -> LowRankFactor | None:
    kept = (eigenvalues > _LOW_RANK_EIGENVALUE_CUTOFF) | (
        eigenvalues < 1.0 / _LOW_RANK_EIGENVALUE_CUTOFF
    )
    return LowRankFactor(directions[:, kept], np.sqrt(eigenvalues[kept])) if kept.any() else None


def _compute_leading_directions(samples: np.ndarray, num_directions: int) -> np.ndarray:
    """The directions in which the rows of ``samples`` vary most, shape ``(num, d)``."""
    # By the smaller of the two products: few rows are thousands of numbers long.
    if len(samples) >= samples.shape[1]:
        return np.linalg.eigh(samples.T @ samples)[1].T[::-1][:num_directions]
    values, vectors = np.linalg.eigh(samples @ samples.T)
    directions = vectors.T[::-1][:num_directions] @ samples
    return directions / np.sqrt(
        np.maximum(values[::-1][:num_directions, None], np.finfo(float).tiny)
    )


def _spd_geometric_mean_with_inverse(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The symmetric S with ``S b S = a``: the geometric mean of ``a`` and the inverse of ``b``."""
    values, vectors = np.linalg.eigh(b)
    root = vectors * np.sqrt(values) @ vectors.T
    inverse = vectors / np.sqrt(values) @ vectors.T
    values, vectors = np.linalg.eigh(root @ a @ root)
    middle = vectors * np.sqrt(np.maximum(values, 0.0)) @ vectors.T
    return inverse @ middle @ inverse


_NUM_CG_ITERATIONS, _CG_STEP_LENGTH = 12, 0.3


def refine_directions(
    batched_gradients: BatchedGradients, preconditioner: Preconditioner, directions: np.ndarray
) -> np.ndarray:
    """Wide directions nearer to the widest ones: one inverse iteration with the curvature.

    Of draws fewer than coordinates the widest directions come out with a little of all others, in
    which the gradient varies far more. The curvature at the anchor, asked for by differences of
    gradients, is inverted by conjugate gradients.

    :param directions: whitened ones as columns, shape ``(d, k)``.
    :return: of the same shape, not normalised.
    """

    def curved(v: np.ndarray) -> np.ndarray:
        length = _CG_STEP_LENGTH / np.maximum(np.linalg.norm(v, axis=1, keepdims=True), 1e-30)
        moved = preconditioner.apply(length * v)
        _, found = batched_gradients.evaluate_on_subset(
            np.concatenate([preconditioner.center + moved, preconditioner.center - moved])
        )
        above, below = np.split(preconditioner.apply_transpose(found), 2)
        return (above - below) / (2.0 * length)

    found = np.zeros_like(directions.T)
    rest = ahead = directions.T
    for _ in range(_NUM_CG_ITERATIONS):
        bent, square = curved(ahead), np.square(rest).sum(1, keepdims=True)
        along = (ahead * bent).sum(1, keepdims=True)
        # Where the posterior is not convex a direction is left as far as it has come.
        share = np.where(along > 0.0, square / np.where(along > 0.0, along, 1.0), 0.0)
        found = found + share * ahead
        rest = rest - share * bent
        following = np.square(rest).sum(1, keepdims=True) / np.maximum(square, 1e-30)
        ahead = np.where(along > 0.0, rest + following * ahead, ahead)
    fine = np.isfinite(found).all(1) & (found != 0.0).any(1)
    return np.where(fine, found.T, directions)


_NUM_DIRECTION_DRAWS = 1_024  # of a window, from which its widest directions are seen


_MAX_REFINED_DIRECTIONS = 32


_TARGET_GRADIENT_NOISE_VARIANCE = (
    0.02  # variance: directions up to so many times as wide are seen, one over it
)


def update_preconditioner(
    context: WarmupContext,
    preconditioner: Preconditioner,
    draws: np.ndarray,
    noise_stats: GradientNoiseStats,
    is_converged: bool,
) -> Preconditioner | None:
    """The whitening moved to the draws' mean, its factor from some of them and their gradients.

    :param draws: whitened draws, shape ``(chains, draws, d)``.
    :param noise_stats: of the gradient's estimate by the anchor on a minibatch.
    :param is_converged: whether chains stay where they are; else another window follows.
    :return: None where the gradient there is not finite.
    """
    anchor = preconditioner.to_position(draws.mean((0, 1)))
    if context.settings.inverse_mass_matrix is not None:
        moved = context.build_preconditioner(anchor, preconditioner.factor)
        return moved if moved.is_finite() else None
    positions = preconditioner.to_position(_thin_draws(draws, context.budget.num_full_gradients))
    # In a matrix another window mends what noise has hidden; of many directions only some are seen.
    is_rough = context.settings.is_dense and not is_converged
    rows = (
        context.budget.num_representative_rows
        if is_rough
        else _choose_num_gradient_rows(context, noise_stats)
    )
    gradients = context.batched_gradients.estimate_full_gradients(positions, preconditioner, rows)
    fine = np.isfinite(gradients).all(1)
    more = preconditioner.to_position(_thin_draws(draws, _NUM_DIRECTION_DRAWS))
    may_stretch = not context.settings.is_site_aligned
    factor, stretch = factor_from_gradients(positions[fine], gradients[fine], more, may_stretch)
    is_sharp = context.potential.is_stochastic or anchor.size <= len(positions)
    if stretch is not None and not is_sharp:
        stretch = _refine_low_rank(
            context, anchor, factor, stretch, positions[fine], gradients[fine]
        )
    if context.settings.is_dense:
        factor, stretch = (
            assemble_dense_factor(factor, stretch, context.settings.mass_matrix_mask),
            None,
        )
    moved = context.build_preconditioner(anchor, factor)._replace(low_rank=stretch)
    return moved if moved.is_finite() else None


def _refine_low_rank(
    context: WarmupContext,
    center: np.ndarray,
    factor: np.ndarray,
    low_rank: LowRankFactor,
    positions: np.ndarray,
    gradients: np.ndarray,
) -> LowRankFactor | None:
    """The stretch with its wide directions nearer to the posterior's."""
    wide = np.argsort(-low_rank.scales)[:_MAX_REFINED_DIRECTIONS]
    wide = wide[low_rank.scales[wide] > 1.0]
    if not len(wide):
        return low_rank
    others = np.setdiff1d(np.arange(len(low_rank.scales)), wide)
    plain = Preconditioner(center, factor)
    directions = refine_directions(context.batched_gradients, plain, low_rank.directions[:, wide])
    directions = np.concatenate([directions, low_rank.directions[:, others]], axis=1)
    return fit_low_rank_along(directions, factor, positions, gradients)


def _choose_num_gradient_rows(context: WarmupContext, noise_stats: GradientNoiseStats) -> int:
    """Rows on which gradients are to be taken, so that a wide direction does not drown in noise."""
    effort, target = context.budget, context.potential
    if target.is_stochastic or not noise_stats.variance > 0.0:
        return effort.num_representative_rows
    wanted = (
        noise_stats.variance
        * count_rows_per_gradient(target, context.arguments)
        / _TARGET_GRADIENT_NOISE_VARIANCE
    )
    return int(np.clip(wanted, effort.num_representative_rows, effort.max_representative_rows))


def _thin_draws(draws: np.ndarray, num_draws: int) -> np.ndarray:
    """About so many of the draws, as many of each chain; shape ``(n, d)``."""
    each = int(np.clip(num_draws // len(draws), 2, draws.shape[1]))
    places = np.linspace(0, draws.shape[1] - 1, each).astype(int)
    return draws[:, places].reshape(-1, draws.shape[-1])
