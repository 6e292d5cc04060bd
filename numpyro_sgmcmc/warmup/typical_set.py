"""To the typical set in many dimensions: a start by volume, then windows of pilot chains.

No Hessian and no optimum is asked for. What is known of the posterior are minibatch gradients, and
gradients on all rows at some draws (:class:`~numpyro_sgmcmc.warmup.row_gradients.RowGradients`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from numpyro_sgmcmc.data.minibatch import IID
from numpyro_sgmcmc.posterior.estimators import ControlVariate, Estimator, Plain
from numpyro_sgmcmc.posterior.whitening import Whitening
from numpyro_sgmcmc.warmup import variational
from numpyro_sgmcmc.warmup.context import Context
from numpyro_sgmcmc.warmup.factors import factor_from_gradients, root
from numpyro_sgmcmc.warmup.noise import Noise
from numpyro_sgmcmc.warmup.pilot import KEEP_EVERY, PILOT, PILOT_BIAS, PILOT_STEP_SIZE, run_pilot
from numpyro_sgmcmc.warmup.step_size import choose_step_size
from numpyro_sgmcmc.warmup.variational import MeanField

__all__ = ["find", "fit_by_volume"]

_CHAINS = 16
_STARTS = 4
_FIT_STEPS = 4_000
_ELBO_DRAWS = 8
_DRAWS = 192  # at which gradients are taken, a window
_WINDOWS = (400, 800, 1600, 1600, 1600, 1600)
_LOST = 1e3
_AGREE = 1.1  # R-hat of the pilots
_SMALL_SHIFT = 0.5


def fit_by_volume(context: Context, starts: Sequence[np.ndarray]) -> MeanField:
    """The fit with the largest evidence bound."""
    target = context.target
    fits = variational.fit(
        target,
        context.arguments,
        np.stack(starts),
        lambda shape: context.draw_rows(shape, IID()),
        _FIT_STEPS,
        context.rng,
    )
    noise = context.rng.standard_normal((_ELBO_DRAWS // 2, target.dim))
    noise = np.concatenate([noise, -noise])
    bounds = []
    for mean, sd in fits:
        values, _ = context.some_gradients(mean + sd * noise)
        bounds.append(np.log(sd).sum() - values.mean())
    context.bounds = bounds
    return fits[int(np.nanargmax(np.where(np.isfinite(bounds), bounds, -np.inf)))]


def find(context: Context, starts: Sequence[np.ndarray]) -> tuple[Whitening, np.ndarray]:
    """The whitening, and whitened positions from about the posterior."""
    context.progress("start by volume")
    mean, sd = fit_by_volume(context, starts)
    matrix = context.settings.inverse_mass_matrix
    whitening = context.whitening_at(mean, sd if matrix is None else root(matrix))
    context.refuse_infinite_gradient(whitening)
    q = context.rng.standard_normal((_CHAINS, context.target.dim))
    if matrix is not None:
        q = whitening.whiten(sd * q)
    shorter = 1.0
    for num_steps in _WINDOWS:
        context.progress("pilot chains")
        estimator, step_size = _pilot_step(context, whitening, q, shorter)
        draws = run_pilot(
            context.target,
            context.arguments,
            whitening.cast(context.target.dtype),
            q,
            step_size,
            num_steps,
            context.rng,
            estimator,
        )
        alive = np.isfinite(draws).all((1, 2)) & (np.abs(draws).max((1, 2)) < _LOST)
        if alive.sum() <= _CHAINS // 2:
            shorter *= 4.0
            q = q / 2.0
            continue
        ends = draws[context.rng.choice(np.flatnonzero(alive), _CHAINS), -1]
        ends[: alive.sum()] = draws[alive, -1]
        found = draws[alive].astype(np.float64)
        r_hat = _disagreement(found)
        shift = np.abs(found.mean((0, 1))).max()
        moved = _follow(context, whitening, found)
        q = moved.whiten(whitening.position(ends) - moved.anchor)
        whitening = moved
        context.trace.append((num_steps, step_size, estimator.name, np.quantile(r_hat, [.5, .9, 1]), shift, 0 if moved.stretch is None else len(moved.stretch.factors)))
        if r_hat.max() < _AGREE and shift < _SMALL_SHIFT:
            break
    return whitening, q


def _pilot_step(
    context: Context, whitening: Whitening, q: np.ndarray, shorter: float
) -> tuple[Estimator, float]:
    """Plain gradients or control variates, whichever goes further, and how far a step may go."""
    noise = context.row_noise(whitening, q, (Plain(), ControlVariate()), IID())
    curvature = context.row_curvature(whitening, q)
    found = []
    for estimator, of_it in noise.items():
        step_size, _ = choose_step_size(
            PILOT, PILOT_STEP_SIZE / shorter, of_it, curvature, PILOT_BIAS
        )
        found.append((step_size, estimator.name, estimator))
    context.trace.append((curvature, {e.name: n for e, n in noise.items()}))
    step_size, _, estimator = max(found)
    return estimator, step_size


def _disagreement(draws: np.ndarray) -> np.ndarray:
    """R-hat of each coordinate."""
    means, within = draws.mean(1), draws.var(1).mean(0)
    return np.sqrt(1.0 + means.var(0, ddof=1) / np.maximum(within, 1e-30))


def _follow(context: Context, whitening: Whitening, draws: np.ndarray) -> Whitening:
    """The whitening moved to the draws' mean, its factor from some of them and their gradients."""
    each = max(1, _DRAWS // len(draws))
    some = draws[:, np.linspace(0, draws.shape[1] - 1, each).astype(int)].reshape(-1, draws.shape[-1])
    positions = whitening.position(some)
    gradients = context.gradients_at(whitening, positions)
    anchor = whitening.position(draws.mean((0, 1)))
    if context.settings.inverse_mass_matrix is not None:
        return whitening._replace(anchor=anchor, gradient=context.whitening_at(anchor, whitening.factor).gradient)
    factor, stretch = factor_from_gradients(positions, gradients)
    return context.whitening_at(anchor, factor)._replace(stretch=stretch)
