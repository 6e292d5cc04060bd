"""The whitening after a window of pilot chains: from their draws and the gradients there."""

from __future__ import annotations

import numpy as np

from numpyro_sgmcmc.posterior.whitening import Stretch, Whitening
from numpyro_sgmcmc.warmup.context import Context
from numpyro_sgmcmc.warmup.effort import rows_a_gradient
from numpyro_sgmcmc.warmup.factors import as_matrix, factor_from_gradients, stretch_along
from numpyro_sgmcmc.warmup.measure import sharpened
from numpyro_sgmcmc.warmup.noise import Noise

__all__ = ["follow"]

_MANY_DRAWS = 1_024  # of a window, from which its widest directions are seen
_MOST_SHARPENED = 32
_SMALL_NOISE = 0.02  # variance: directions up to so many times as wide are seen, one over it


def follow(
    context: Context, whitening: Whitening, draws: np.ndarray, noise: Noise, is_settled: bool
) -> Whitening | None:
    """The whitening moved to the draws' mean, its factor from some of them and their gradients.

    :param draws: whitened draws, shape ``(chains, draws, d)``.
    :param noise: of the gradient's estimate by the anchor on a minibatch.
    :param is_settled: whether chains stay where they are; else another window follows.
    :return: None where the gradient there is not finite.
    """
    anchor = whitening.position(draws.mean((0, 1)))
    if context.settings.inverse_mass_matrix is not None:
        moved = context.whitening_at(anchor, whitening.factor)
        return moved if moved.is_finite() else None
    positions = whitening.position(_spread(draws, context.effort.draws))
    # In a matrix another window mends what noise has hidden; of many directions only some are seen.
    is_rough = context.settings.is_dense and not is_settled
    rows = context.effort.rows if is_rough else _rows_enough(context, noise)
    gradients = context.rows.on_all(positions, whitening, rows)
    fine = np.isfinite(gradients).all(1)
    more = whitening.position(_spread(draws, _MANY_DRAWS))
    may_stretch = not context.settings.is_by_site
    factor, stretch = factor_from_gradients(positions[fine], gradients[fine], more, may_stretch)
    is_sharp = context.target.is_randomized or anchor.size <= len(positions)
    if stretch is not None and not is_sharp:
        stretch = _sharpened(context, anchor, factor, stretch, positions[fine], gradients[fine])
    if context.settings.is_dense:
        factor, stretch = as_matrix(factor, stretch, context.settings.mask), None
    moved = context.whitening_at(anchor, factor)._replace(stretch=stretch)
    return moved if moved.is_finite() else None


def _sharpened(
    context: Context,
    anchor: np.ndarray,
    factor: np.ndarray,
    stretch: Stretch,
    positions: np.ndarray,
    gradients: np.ndarray,
) -> Stretch | None:
    """The stretch with its wide directions nearer to the posterior's."""
    wide = np.argsort(-stretch.factors)[:_MOST_SHARPENED]
    wide = wide[stretch.factors[wide] > 1.0]
    if not len(wide):
        return stretch
    others = np.setdiff1d(np.arange(len(stretch.factors)), wide)
    plain = Whitening(anchor, factor)
    directions = sharpened(context.rows, plain, stretch.directions[:, wide])
    directions = np.concatenate([directions, stretch.directions[:, others]], axis=1)
    return stretch_along(directions, factor, positions, gradients)


def _rows_enough(context: Context, noise: Noise) -> int:
    """Rows on which gradients are to be taken, so that a wide direction does not drown in noise."""
    effort, target = context.effort, context.target
    if target.is_randomized or not noise.variance > 0.0:
        return effort.rows
    wanted = noise.variance * rows_a_gradient(target, context.arguments) / _SMALL_NOISE
    return int(np.clip(wanted, effort.rows, effort.most_rows))


def _spread(draws: np.ndarray, num: int) -> np.ndarray:
    """About so many of the draws, as many of each chain; shape ``(n, d)``."""
    each = int(np.clip(num // len(draws), 2, draws.shape[1]))
    places = np.linspace(0, draws.shape[1] - 1, each).astype(int)
    return draws[:, places].reshape(-1, draws.shape[-1])
