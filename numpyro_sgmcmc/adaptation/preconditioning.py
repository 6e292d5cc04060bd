r"""Estimation of the preconditioner: from curvature, or from draws and their gradients.

Sampling runs in coordinates :math:`q = L^{-1}(\theta - c)` in which the posterior should be close
to a standard normal. The factor L is a vector (diagonal), a vector with a low-rank correction, or a
matrix:

- :func:`factor_from_curvature` takes the inverse square root of the Hessian.
- :func:`factor_from_gradients` balances the covariance of draws and that of their gradients
  (Seyboldt, Carlson and Carpenter 2026), which needs few draws and tolerates inflated ones.
- :func:`update_preconditioner` moves the center and refits the factor after a window of pilot
  chains. In high dimension it refines the low-rank directions by :func:`refine_directions`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from numpyro_sgmcmc.adaptation.batched_gradients import BatchedGradients, JittedPotential
from numpyro_sgmcmc.adaptation.block_arrow_coordinates import recenter_block_arrow
from numpyro_sgmcmc.adaptation.budget import count_rows_per_gradient
from numpyro_sgmcmc.adaptation.gradient_noise import GradientNoiseStats
from numpyro_sgmcmc.adaptation.settings import WarmupInputs
from numpyro_sgmcmc.model.hessian_factor import HessianFactor
from numpyro_sgmcmc.model.low_rank import LowRankFactor
from numpyro_sgmcmc.model.preconditioner import Preconditioner

# Smallest eigenvalue of a matrix with unit diagonal, relative to the largest: the rounding error
# of a Hessian in float32.
_MIN_RELATIVE_EIGENVALUE = 1e-7
# Random sign vectors for the diagonal of a Hessian: the SD of an entry is the norm of its
# off-diagonal row over 8. Estimates below a tenth of the median are raised to it.
_NUM_PROBE_VECTORS = 64
_MIN_DIAGONAL_TO_MEDIAN_RATIO, _MIN_DIAGONAL_TO_MAX_RATIO = 0.1, 1e-12
# Leading principal directions of the draws, and as many of their gradients: a bound on the size
# of the low-rank problem.
_MAX_LEADING_DIRECTIONS = 128
_NUM_SCALING_ITERATIONS = 3  # alternations between the diagonal and the low-rank correction
# Bound on the ratio of a diagonal entry and the SD of the draws, either way: for coordinates in
# which the gradient hardly varies.
_MAX_SCALE_TO_SD_RATIO = 100.0
# Ridge that is added to covariances in the subspace, relative to their mean variance.
_RIDGE_VARIANCE_FRACTION = 1e-5
# A direction is kept if its eigenvalue is above this value or below its inverse (nutpie: 2).
_LOW_RANK_EIGENVALUE_CUTOFF = 1.5
_LOW_RANK_MAX_DIM = 50_000  # beyond which only a diagonal is fitted: a bound on memory and time
# Conjugate gradients: iterations, and length of finite differences in preconditioned units.
_NUM_CG_ITERATIONS, _CG_STEP_LENGTH = 12, 0.3
# Directions that are refined, and draws of a window from which they are estimated.
_MAX_REFINED_DIRECTIONS, _NUM_DIRECTION_DRAWS = 32, 1_024
# Gradient noise variance to which full-data gradients are estimated. A direction is visible up to
# the variance 1 / 0.02 of the posterior along it.
_TARGET_GRADIENT_NOISE_VARIANCE = 0.02
MAX_CENTER_SHIFT_SD = 0.5
"""Largest mean of converged chains in preconditioned coordinates."""

# The same in coordinates of a Hessian's inverse root, root mean square over coordinates: about a
# center 0.46 SD from the mean of 7,850 weights, noise of second order has 2.2 times the variance.
_MAX_ROOT_CENTER_SHIFT_SD = 0.25

# Mean of the shared parameters of a hierarchy in preconditioned units, and ratio of their variances
# to one, beyond which they are refitted; the same relative to the sampling errors.
_MAX_SHIFT_SD, _MAX_VARIANCE_RATIO = 0.3, 1.7
_NUM_STANDARD_ERRORS_OF_SHIFT, _MAX_SAMPLED_VARIANCE_RATIO = 3.0, 1.2
# Ratios of variances: draws where no other gradients are needed; standard errors of lower bounds.
_NUM_RATIO_DRAWS, _NUM_STANDARD_ERRORS_OF_RATIO = 32, 2.0


def factorize_spd(matrix: np.ndarray, inverse: bool = False) -> np.ndarray:
    """Return R with ``R R^T`` the matrix, or its inverse, made positive definite where it is not.

    Rows and columns are scaled to a unit diagonal first, so that columns in very different units
    do not lose precision. Negative eigenvalues change sign and tiny ones are raised.

    :return: shape ``(d, d)``, not symmetric; NaN where the matrix is not finite.
    """
    if not np.isfinite(matrix).all():
        return np.full_like(matrix, np.nan)
    diagonal = np.abs(np.diagonal(matrix))
    scale = np.sqrt(np.where(diagonal > 0, diagonal, 1.0))
    eigenvalues, vectors = np.linalg.eigh(matrix / np.outer(scale, scale))
    eigenvalues = np.abs(eigenvalues)
    eigenvalues = np.maximum(eigenvalues, _MIN_RELATIVE_EIGENVALUE * (eigenvalues.max() or 1.0))
    if inverse:
        return vectors / np.sqrt(eigenvalues) / scale[:, None]
    return vectors * np.sqrt(eigenvalues) * scale[:, None]


def factorize_covariance(covariance: np.ndarray) -> np.ndarray:
    """Return L with ``L L^T`` the covariance: ``(d, d)``, or ``(d,)`` for variances."""
    return factorize_spd(covariance) if covariance.ndim == 2 else np.sqrt(covariance)


def factor_from_curvature(
    hessian: np.ndarray | None,
    mass_matrix_mask: np.ndarray | None,
    is_dense: bool,
    jitted_potential: JittedPotential,
    position: np.ndarray,
) -> np.ndarray:
    """Return L from the Hessian: its inverse root if dense, else that of its diagonal.

    :param hessian: the Hessian, or None where it is too large to form; its diagonal is then
        estimated from products with random sign vectors (Hutchinson 1990).
    :param mass_matrix_mask: blocks of a structured mass matrix, shape ``(d, d)``, or None.
    """
    if is_dense:
        assert hessian is not None
        return _apply_mask(factorize_spd(hessian, inverse=True), mass_matrix_mask)
    if hessian is not None:
        diagonal = np.abs(np.diagonal(hessian))
    else:
        signs = np.random.default_rng(0).choice([-1.0, 1.0], (_NUM_PROBE_VECTORS, position.size))
        diagonal = (signs * jitted_potential.hessian_products(position, signs)).mean(0)
        floor = _MIN_DIAGONAL_TO_MEDIAN_RATIO * np.median(np.abs(diagonal))
        diagonal = np.maximum(diagonal, floor)
    return 1.0 / np.sqrt(np.maximum(diagonal, _MIN_DIAGONAL_TO_MAX_RATIO * diagonal.max()))


def factor_from_gradients(
    positions: np.ndarray,
    gradients: np.ndarray,
    extra_positions: np.ndarray | None = None,
    allow_low_rank: bool = True,
) -> tuple[np.ndarray, LowRankFactor | None]:
    r"""Return a diagonal and a low-rank factor that balance draws and gradients.

    In the right coordinates draws and their gradients have the same covariance; if the posterior
    is Gaussian, this holds for any number of draws. The diagonal is
    :math:`(\operatorname{var} x / \operatorname{var} g)^{1/4}`. In its scale, the rest is the
    geometric mean :math:`C_x \# C_g^{-1}` of the covariances in the span of the leading directions
    of both, of which only directions with eigenvalues clearly different from one are kept.

    :param positions: approximately independent draws, shape ``(n, d)``.
    :param gradients: full-data gradients there, of the same shape.
    :param extra_positions: more draws, from which leading directions are chosen: in many
        coordinates a moderately wide direction does not stand out of a few hundred draws.

    Reference: Seyboldt, Carlson and Carpenter (2026), *Preconditioning Hamiltonian Monte Carlo by
    minimizing Fisher divergence*.
    """
    x, g = positions - positions.mean(0), gradients - gradients.mean(0)
    extra_x = x if extra_positions is None else extra_positions - extra_positions.mean(0)
    factor = _compute_balancing_scale(x, g)
    if x.shape[1] > _LOW_RANK_MAX_DIM or not allow_low_rank:
        return factor, None
    for _ in range(_NUM_SCALING_ITERATIONS):
        scale, low_rank = _fit_low_rank(x / factor, g * factor, extra_x / factor)
        factor = scale * factor
        if low_rank is None:
            break
        # A few stiff directions can involve many coordinates: refit the diagonal without them.
        factor = factor * _compute_balancing_scale(
            low_rank.solve(x / factor), low_rank.apply(g * factor)
        )
    scale, low_rank = _fit_low_rank(x / factor, g * factor, extra_x / factor)
    return scale * factor, low_rank


def _compute_balancing_scale(x: np.ndarray, g: np.ndarray) -> np.ndarray:
    """Return the diagonal D for which ``x / D`` and ``g * D`` have equal variances, ``(d,)``."""
    variance_x, variance_g = (np.maximum(v.var(0), np.finfo(np.float32).tiny) for v in (x, g))
    sd = np.sqrt(variance_x)
    min_scale, max_scale = sd / _MAX_SCALE_TO_SD_RATIO, sd * _MAX_SCALE_TO_SD_RATIO
    return np.clip((variance_x / variance_g) ** 0.25, min_scale, max_scale)


def _fit_low_rank(
    x: np.ndarray, g: np.ndarray, extra_x: np.ndarray
) -> tuple[float, LowRankFactor | None]:
    """Return the scale of most directions, and a low-rank factor of those that differ from it.

    Draws and gradients are centred and scaled. ``extra_x`` only chooses directions: the errors of
    ``x`` and ``g``, which belong to the same draws, cancel in the eigenvalues.
    """
    num_directions = min(_MAX_LEADING_DIRECTIONS, len(x) // 3, x.shape[1])
    leading = [_compute_leading_directions(v, num_directions) for v in (extra_x, g)]
    basis = np.linalg.qr(np.concatenate(leading).T)[0]
    if basis.shape[1] < 2:
        return 1.0, None
    eigenvalues, directions = _eigendecompose_in_subspace(basis, x, g)
    typical = float(np.median(eigenvalues))
    return np.sqrt(typical), _select_low_rank(eigenvalues / typical, directions)


def _eigendecompose_in_subspace(
    basis: np.ndarray, x: np.ndarray, g: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return eigenvalues and directions of ``Cov(x) # Cov(g)^-1`` within a subspace."""
    ridged = []
    for v in (x, g):
        covariance = np.atleast_2d(np.cov(v @ basis, rowvar=False))
        dim = len(covariance)
        ridge = _RIDGE_VARIANCE_FRACTION * np.eye(dim) * np.trace(covariance) / dim
        ridged.append(covariance + ridge)
    eigenvalues, vectors = np.linalg.eigh(compute_geometric_mean_with_inverse(*ridged))
    return eigenvalues, basis @ vectors


def _select_low_rank(eigenvalues: np.ndarray, directions: np.ndarray) -> LowRankFactor | None:
    """Return the directions whose eigenvalues differ clearly from one."""
    cutoff = _LOW_RANK_EIGENVALUE_CUTOFF
    is_kept = (eigenvalues > cutoff) | (eigenvalues < 1.0 / cutoff)
    if not is_kept.any():
        return None
    return LowRankFactor(directions[:, is_kept], np.sqrt(eigenvalues[is_kept]))


def _compute_leading_directions(samples: np.ndarray, num_directions: int) -> np.ndarray:
    """Return the directions in which samples vary most, shape ``(num_directions, d)``."""
    # Of the two products the smaller one is decomposed.
    if len(samples) >= samples.shape[1]:
        return np.linalg.eigh(samples.T @ samples)[1].T[::-1][:num_directions]
    eigenvalues, vectors = np.linalg.eigh(samples @ samples.T)
    directions = vectors.T[::-1][:num_directions] @ samples
    squared_norms = np.maximum(eigenvalues[::-1][:num_directions, None], np.finfo(float).tiny)
    return directions / np.sqrt(squared_norms)


def compute_geometric_mean_with_inverse(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    r"""Return the geometric mean :math:`a \# b^{-1}`, the symmetric S with ``S b S = a``.

    .. math:: S = b^{-1/2} (b^{1/2} a\, b^{1/2})^{1/2} b^{-1/2}

    :param a: positive semidefinite, shape ``(d, d)``.
    :param b: positive definite, shape ``(d, d)``.
    """
    eigenvalues, vectors = np.linalg.eigh(b)
    root = vectors * np.sqrt(eigenvalues) @ vectors.T
    inverse_root = vectors / np.sqrt(eigenvalues) @ vectors.T
    eigenvalues, vectors = np.linalg.eigh(root @ a @ root)
    middle = vectors * np.sqrt(np.maximum(eigenvalues, 0.0)) @ vectors.T
    return inverse_root @ middle @ inverse_root


def assemble_dense_factor(
    factor: np.ndarray, low_rank: LowRankFactor | None, mass_matrix_mask: np.ndarray | None
) -> np.ndarray:
    """Return a diagonal and its low-rank factor as one matrix, shape ``(d, d)``."""
    matrix = np.diag(factor)
    if low_rank is not None:
        matrix = factor[:, None] * low_rank.apply(np.eye(factor.size))
    return _apply_mask(matrix, mass_matrix_mask)


def _apply_mask(factor: np.ndarray, mass_matrix_mask: np.ndarray | None) -> np.ndarray:
    """Return the factor of the covariance without the entries outside the blocks of a mask."""
    if mass_matrix_mask is None:
        return factor
    return factorize_spd(np.where(mass_matrix_mask, factor @ factor.T, 0.0))


def refine_directions(
    batched_gradients: BatchedGradients, preconditioner: Preconditioner, directions: np.ndarray
) -> np.ndarray:
    r"""Move wide directions towards the widest ones, by one inverse iteration with the Hessian.

    With fewer draws than coordinates, estimated wide directions contain a little of all others, in
    which the gradient varies far more. The equation :math:`A x = b`, A the Hessian at the center
    and b a direction, is solved by conjugate gradients:

    .. math::
        \alpha = \frac{r \cdot r}{p \cdot A p}, \quad x \mathrel{+}= \alpha p, \quad
        r' = r - \alpha A p, \quad \beta = \frac{r' \cdot r'}{r \cdot r}, \quad p' = r' + \beta p

    Products with A are differences of gradients.

    :param directions: columns in preconditioned coordinates, shape ``(d, k)``.
    :return: of the same shape, not normalised; unchanged where the Hessian is not positive along
        the direction.
    """

    def hessian_product(p: np.ndarray) -> np.ndarray:
        length = _CG_STEP_LENGTH / np.maximum(np.linalg.norm(p, axis=1, keepdims=True), 1e-30)
        center, displacement = preconditioner.center, preconditioner.apply(length * p)
        _, gradients = batched_gradients.evaluate_on_subset(
            np.concatenate([center + displacement, center - displacement])
        )
        plus, minus = np.split(preconditioner.apply_transpose(gradients), 2)
        return (plus - minus) / (2.0 * length)

    x = np.zeros_like(directions.T)
    r = p = directions.T
    for _ in range(_NUM_CG_ITERATIONS):
        Ap = hessian_product(p)
        r_dot_r = np.square(r).sum(1, keepdims=True)
        p_dot_Ap = (p * Ap).sum(1, keepdims=True)
        # Along a direction of negative curvature the iteration stops.
        is_convex = p_dot_Ap > 0.0
        alpha = np.where(is_convex, r_dot_r / np.where(is_convex, p_dot_Ap, 1.0), 0.0)
        x = x + alpha * p
        r = r - alpha * Ap
        beta = np.square(r).sum(1, keepdims=True) / np.maximum(r_dot_r, 1e-30)
        p = np.where(is_convex, r + beta * p, p)
    is_usable = np.isfinite(x).all(1) & (x != 0.0).any(1)
    return np.where(is_usable, x.T, directions)


class PreconditionerUpdate(NamedTuple):
    r"""A preconditioner fitted to draws.

    - **preconditioner** - the new coordinates.
    - **min_variance_ratios** - lower bounds on the variances of the draws over those of the
      posterior in these coordinates, shape ``(d,)``. They are estimates of
      :math:`E[(q_j - E q_j)\,\partial_j U]`, which is 1 for any posterior.
    - **draws** - the draws and gradients to which the factor was fitted, shape ``(2, n, d)``; None
      if there are fewer than coordinates, or gradients of a randomised likelihood.
    """

    preconditioner: Preconditioner
    min_variance_ratios: np.ndarray
    draws: np.ndarray | None = None


def update_preconditioner(
    inputs: WarmupInputs,
    preconditioner: Preconditioner,
    draws: np.ndarray,
    noise_stats: GradientNoiseStats,
    is_converged: bool,
    num_independent: float = np.inf,
) -> PreconditionerUpdate | None:
    """Move the center to the mean of the draws, and refit the factor.

    :param draws: preconditioned draws, shape ``(chains, draws, d)``.
    :param noise_stats: gradient noise of the control variate.
    :param is_converged: whether the chains are stationary; if not, another window follows.
    :param num_independent: independent draws of all chains, by the relaxation time.
    :return: None where the gradient at the new center is not finite.
    """
    settings, budget, potential = inputs.settings, inputs.budget, inputs.potential
    batched_gradients = inputs.batched_gradients
    if preconditioner.is_block_arrow:
        return _update_block_arrow(inputs, preconditioner, draws, num_independent)
    if preconditioner.is_hessian_root:
        return _update_hessian_root(inputs, preconditioner, draws, num_independent)
    center, dim = preconditioner.to_position(draws.mean((0, 1))), draws.shape[-1]
    num_rows = budget.num_representative_rows
    if settings.inverse_mass_matrix is not None:
        full_gradient = batched_gradients.full_gradient(center)
        updated = Preconditioner(center, preconditioner.factor, full_gradient)
        if not (is_converged and updated.is_finite()):
            return PreconditionerUpdate(updated, np.ones(dim)) if updated.is_finite() else None
        thinned = thin_draws(draws, min(_NUM_RATIO_DRAWS, budget.num_full_gradients))
        positions = preconditioner.to_position(thinned.reshape(-1, dim))
        gradients = batched_gradients.estimate_full_gradients(positions, updated, num_rows)
        return PreconditionerUpdate(updated, _bound_variance_ratios(updated, positions, gradients))

    # A matrix of chains that are not stationary yet is refitted anyway. A low-rank factor keeps
    # only visible directions: with noisy gradients it needs more rows.
    is_provisional = settings.is_dense and not is_converged
    if not is_provisional and not potential.is_stochastic and noise_stats.variance > 0.0:
        needed_rows = (
            noise_stats.variance
            * count_rows_per_gradient(potential, inputs.arguments)
            / _TARGET_GRADIENT_NOISE_VARIANCE
        )
        num_rows = int(np.clip(needed_rows, num_rows, budget.max_representative_rows))
    thinned = thin_draws(draws, budget.num_full_gradients).reshape(-1, dim)
    positions = preconditioner.to_position(thinned)
    gradients = batched_gradients.estimate_full_gradients(positions, preconditioner, num_rows)
    is_finite = np.isfinite(gradients).all(1)
    positions, gradients = positions[is_finite], gradients[is_finite]
    extra_q = thin_draws(draws, _NUM_DIRECTION_DRAWS).reshape(-1, dim)
    factor, low_rank = factor_from_gradients(
        positions, gradients, preconditioner.to_position(extra_q), not settings.is_site_aligned
    )
    has_enough_draws = potential.is_stochastic or dim <= len(thinned)
    if low_rank is not None and not has_enough_draws:
        low_rank = _refine_low_rank(
            batched_gradients, center, factor, low_rank, positions, gradients
        )
    if settings.is_dense:
        factor = assemble_dense_factor(factor, low_rank, settings.mass_matrix_mask)
        low_rank = None
    full_gradient = batched_gradients.full_gradient(center)
    updated = Preconditioner(center, factor, full_gradient, low_rank=low_rank)
    if not updated.is_finite():
        return None
    is_exact = has_enough_draws and not potential.is_stochastic
    return PreconditionerUpdate(
        updated,
        _bound_variance_ratios(updated, positions, gradients),
        np.stack([positions, gradients]) if is_exact else None,
    )


def _update_block_arrow(
    inputs: WarmupInputs, preconditioner: Preconditioner, draws: np.ndarray, num_independent: float
) -> PreconditionerUpdate | None:
    """Refit mean and covariance of the shared parameters of a hierarchy, where these are off.

    The effects given the shared parameters are known better from their blocks than from draws.
    """
    shared = preconditioner.factor.layout.take_shared(draws).astype(np.float64)
    no_bounds = np.ones(draws.shape[-1])
    if (refit := refit_standard_normal(shared, num_independent)) is None:
        return PreconditionerUpdate(preconditioner, no_bounds)
    updated = recenter_block_arrow(inputs, preconditioner, *refit)
    return PreconditionerUpdate(updated, no_bounds) if updated is not None else None


def _update_hessian_root(
    inputs: WarmupInputs, preconditioner: Preconditioner, draws: np.ndarray, num_independent: float
) -> PreconditionerUpdate | None:
    """Take the Hessian at the mean of the draws, where that is far from the center."""
    mean, no_bounds = draws.mean((0, 1), dtype=np.float64), np.ones(draws.shape[-1])
    if is_root_centered(mean, num_independent):
        return PreconditionerUpdate(preconditioner, no_bounds)
    updated = build_hessian_root(inputs, preconditioner.to_position(mean))
    return PreconditionerUpdate(updated, no_bounds) if updated is not None else None


def is_root_centered(mean: np.ndarray, num_independent: float) -> bool:
    """Return whether the mean of so many draws is near the center, beyond its Monte Carlo error."""
    max_mean_square = _MAX_ROOT_CENTER_SHIFT_SD**2 + 1.0 / num_independent
    return bool(np.square(mean).mean() < max_mean_square)


def build_hessian_root(inputs: WarmupInputs, center: np.ndarray) -> Preconditioner | None:
    """Return coordinates of the inverse root of the full-data Hessian at a center.

    :return: None where the Hessian is not positive definite.
    """
    hessian = inputs.batched_gradients.full_hessian(center)
    factor = HessianFactor.from_hessian(hessian, inputs.potential.dtype)
    if factor is None:
        return None
    updated = Preconditioner(center, factor, inputs.batched_gradients.full_gradient(center))
    return updated if updated.is_finite() else None


def refit_standard_normal(
    draws: np.ndarray, num_independent: float
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return mean and factor of the covariance of draws, or None if they may be standard normal.

    The covariance of few draws has eigenvalues far from one by chance (law of Marchenko and
    Pastur): the covariance counts beyond these, and is shrunk towards the identity.

    :param draws: shape ``(chains, draws, s)``.
    :param num_independent: independent draws of all chains if these are standard normal. Where they
        are not, chains move slowly, and their effective sample size would excuse it.
    """
    num_draws, dim = _count_draws(draws, num_independent), draws.shape[-1]
    mean, covariance = _compute_moments(draws)
    is_off = is_covariance_off(draws, num_independent)
    max_shift = max(_MAX_SHIFT_SD, _NUM_STANDARD_ERRORS_OF_SHIFT / np.sqrt(num_draws))
    if not (is_off or np.abs(mean).max() > max_shift):
        return None
    if not is_off:
        return mean, np.eye(dim)
    weight = num_draws / (num_draws + dim)
    return mean, factorize_spd(weight * covariance + (1.0 - weight) * np.eye(dim))


def is_covariance_off(draws: np.ndarray, num_independent: float) -> bool:
    """Return whether the covariance of draws differs from the identity by more than by chance.

    :param draws: shape ``(chains, draws, s)``.
    :param num_independent: see :func:`refit_standard_normal`.
    """
    eigenvalues = np.linalg.eigvalsh(_compute_moments(draws)[1])
    error = np.sqrt(draws.shape[-1] / _count_draws(draws, num_independent))
    high = max(_MAX_VARIANCE_RATIO, _MAX_SAMPLED_VARIANCE_RATIO * (1.0 + error) ** 2)
    low = max(1.0 - error, 0.0) ** 2 / _MAX_SAMPLED_VARIANCE_RATIO
    low = min(1.0 / _MAX_VARIANCE_RATIO, low)
    return bool(eigenvalues.max() > high or eigenvalues.min() < low)


def _count_draws(draws: np.ndarray, num_independent: float) -> float:
    return min(num_independent, draws.shape[0] * draws.shape[1])


def _compute_moments(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    draws = draws.reshape(-1, draws.shape[-1])
    return draws.mean(0), np.atleast_2d(np.cov(draws, rowvar=False))


def _bound_variance_ratios(
    preconditioner: Preconditioner, positions: np.ndarray, gradients: np.ndarray
) -> np.ndarray:
    """Return lower bounds on the variances of positions over those of the posterior."""
    q = preconditioner.solve(positions - positions.mean(0))
    products = q * preconditioner.apply_transpose(gradients)
    standard_errors = products.std(0) / np.sqrt(len(products))
    return np.asarray(products.mean(0) - _NUM_STANDARD_ERRORS_OF_RATIO * standard_errors)


def _refine_low_rank(
    batched_gradients: BatchedGradients,
    center: np.ndarray,
    factor: np.ndarray,
    low_rank: LowRankFactor,
    positions: np.ndarray,
    gradients: np.ndarray,
) -> LowRankFactor | None:
    widest = np.argsort(-low_rank.scales)[:_MAX_REFINED_DIRECTIONS]
    widest = widest[low_rank.scales[widest] > 1.0]
    if not len(widest):
        return low_rank
    others = np.setdiff1d(np.arange(len(low_rank.scales)), widest)
    refined = refine_directions(
        batched_gradients, Preconditioner(center, factor), low_rank.directions[:, widest]
    )
    directions = np.concatenate([refined, low_rank.directions[:, others]], axis=1)
    basis = np.linalg.qr(directions)[0]
    x, g = positions - positions.mean(0), gradients - gradients.mean(0)
    return _select_low_rank(*_eigendecompose_in_subspace(basis, x / factor, g * factor))


def thin_draws(draws: np.ndarray, num_draws: int) -> np.ndarray:
    """Return evenly spaced draws, about ``num_draws`` and at least two of each chain.

    :param draws: shape ``(chains, draws, d)``.
    """
    per_chain = min(draws.shape[1], max(2, num_draws // len(draws)))
    return draws[:, np.linspace(0, draws.shape[1] - 1, per_chain).astype(int)]
