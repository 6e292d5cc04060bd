"""The whitening after a window of pilot chains: from their draws and the gradients there."""

from __future__ import annotations

import numpy as np

from numpyro_sgmcmc.posterior.whitening import LowRankFactor, Preconditioner
from numpyro_sgmcmc.warmup.context import WarmupContext
from numpyro_sgmcmc.warmup.effort import count_rows_per_gradient
from numpyro_sgmcmc.warmup.factors import (
    assemble_dense_factor,
    factor_from_gradients,
    fit_low_rank_along,
)
from numpyro_sgmcmc.warmup.measure import refine_directions
from numpyro_sgmcmc.warmup.noise import GradientNoiseStats

__all__ = ["update_preconditioner"]

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
