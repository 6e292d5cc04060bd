"""Windows of pilot chains, until their mean and covariance stay.

The chains go on from window to window, while anchor and whitening follow them. Which chains these
are differs: of the globals alone (:class:`GlobalPilot`), or with the local values of all rows.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from numpyro_sgmcmc.posterior.estimators import Estimator
from numpyro_sgmcmc.posterior.whitening import Whitening
from numpyro_sgmcmc.warmup.context import Context
from numpyro_sgmcmc.warmup.factors import factor_from_draws
from numpyro_sgmcmc.warmup.noise import Noise
from numpyro_sgmcmc.warmup.pilot import (
    KEEP_EVERY,
    PILOT,
    PILOT_BIAS,
    PILOT_STEP_SIZE,
    run_pilot,
)

__all__ = ["GlobalPilot", "PilotChains", "Window", "settle"]

_CHAINS = 16
_MAX_WINDOWS = 20
_FIRST_WINDOW = 30.0
_LAST_WINDOW = 240.0
_LONGEST_EARLY_WINDOW = 1_000
_LONGEST_WINDOW = 4_000
_SHORTEST_PILOT = 400
_SMALL_SHIFT = 0.5
_SMALL_STRETCH = 2.5
_LOST = 1e3  # whitened units from the anchor at which a pilot chain counts as lost


class Window(NamedTuple):
    """
    - **whitening** - anchor and factor, moved to what the window's draws say.
    - **q** - the chains' positions there.
    - **is_settled** - whether that was a small move.
    """

    whitening: Whitening
    q: np.ndarray
    is_settled: bool


class PilotChains(Protocol):
    """What a loop over windows must know of the chains that run in them."""

    max_windows: int

    def noise(self, whitening: Whitening, q: np.ndarray) -> dict[Estimator, Noise]:
        """The gradient's noise where the chains are."""
        ...

    def num_steps(self, step_size: float) -> int | None:
        """Steps of the next window; None where no more are affordable."""
        ...

    def run(
        self,
        whitening: Whitening,
        q: np.ndarray,
        step_size: float,
        num_steps: int,
        estimator: Estimator,
    ) -> Window | None:
        """One window; None where the chains were lost."""
        ...

    def is_done(self, is_settled: bool) -> bool:
        """Whether that was the last window."""
        ...


def settle(
    context: Context, chains: PilotChains, whitening: Whitening, q: np.ndarray
) -> tuple[Whitening, np.ndarray]:
    """Window after window until mean and covariance stay.

    :param q: the chains' first positions, whitened, shape ``(num_chains, d)``.
    :return: the whitening, and whitened positions from about the posterior.
    """
    shorter = 1.0
    for _ in range(chains.max_windows):
        noise = chains.noise(whitening, q)
        curvature = context.curvature(whitening, q)
        estimator, step_size, _ = context.cheapest(
            PILOT, PILOT_STEP_SIZE / shorter, noise, curvature, PILOT_BIAS
        )
        num_steps = chains.num_steps(step_size)
        if num_steps is None:
            break
        context.progress("pilot chains")
        window = chains.run(whitening, q, step_size, num_steps, estimator)
        if window is None:
            shorter *= 4.0
            q = q / 2.0
            continue
        whitening, q, is_settled = window
        if chains.is_done(is_settled):
            break
    return whitening, q


class GlobalPilot:
    """Pilot chains of a model without local sites.

    :param context: of the warm-up.
    """

    max_windows = _MAX_WINDOWS

    def __init__(self, context: Context) -> None:
        self.context = context
        self._steps_left = context.affordable
        self._time = _FIRST_WINDOW
        # The worst noise counts, at the distance that the chains will reach: a coordinate whose
        # noise grows faster than its friction takes away runs off, and one is enough.
        self._typical = context.rng.standard_normal((_CHAINS, context.target.dim))

    def first_positions(self) -> np.ndarray:
        """Close to the centre: where the posterior is not Gaussian, a sd away may be nowhere."""
        return 0.3 * self._typical

    def noise(self, whitening: Whitening, q: np.ndarray) -> dict[Estimator, Noise]:
        return self.context.noise(whitening, self._typical).random

    def num_steps(self, step_size: float) -> int | None:
        longest = _LONGEST_WINDOW if self._time >= _LAST_WINDOW else _LONGEST_EARLY_WINDOW
        num_steps = min(int(self._time / step_size), longest)
        if self._steps_left < max(num_steps, _SHORTEST_PILOT):
            return None
        self._steps_left -= num_steps
        return num_steps

    def run(
        self,
        whitening: Whitening,
        q: np.ndarray,
        step_size: float,
        num_steps: int,
        estimator: Estimator,
    ) -> Window | None:
        context = self.context
        whitening = context.with_hessian(whitening, estimator)
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
            return None
        sampled = alive.sum() * draws.shape[1] * KEEP_EVERY * step_size
        effective_size = sampled / PILOT.relaxation_time(step_size)
        moved, is_settled = self._follow(whitening, draws[alive], effective_size)
        q = draws[context.rng.choice(np.flatnonzero(alive), _CHAINS), -1]
        q[: alive.sum()] = draws[alive, -1]
        q = self._typical = moved.whiten(whitening.position(q) - moved.anchor)
        return Window(moved, q, is_settled)

    def is_done(self, is_settled: bool) -> bool:
        is_last = is_settled and self._time >= _LAST_WINDOW
        self._time = min(2.0 * self._time, _LAST_WINDOW)
        return is_last

    def _follow(
        self, whitening: Whitening, draws: np.ndarray, effective_size: float
    ) -> tuple[Whitening, bool]:
        """The whitening moved to the draws' mean and covariance, and whether it moved little."""
        context, settings = self.context, self.context.settings
        flat = draws.reshape(-1, draws.shape[-1])
        mean, d = flat.mean(0, dtype=np.float64), flat.shape[1]
        if whitening.is_dense:
            covariance = np.cov(flat, rowvar=False).reshape(d, d)
            spread = np.linalg.eigvalsh(covariance)
            slack = 1.0 + np.sqrt(d / effective_size)
        else:
            covariance = spread = _variances(flat, mean)
            slack = 1.0 + np.sqrt(2.0 / effective_size)
        factor = whitening.factor
        if settings.inverse_mass_matrix is None:
            factor = factor_from_draws(factor, covariance, effective_size, settings.mask)
        moved = context.whitening_at(whitening.position(mean), factor)
        size = np.square(moved.pull(moved.gradient)).sum()
        if not size < 4.0 * d:
            # On a curved ridge the mean lies beside it: anchor on the ridge instead.
            nearest = min(flat, key=lambda draw: float(np.square(draw - mean).sum()))
            on_ridge = context.whitening_at(whitening.position(nearest), factor)
            if not np.square(on_ridge.pull(on_ridge.gradient)).sum() >= size:
                moved = on_ridge
        is_near = np.abs(mean).max() < _SMALL_SHIFT
        is_settled = bool(is_near and spread.max() < _SMALL_STRETCH * slack**2)
        if not is_settled and settings.inverse_mass_matrix is None:
            # Chains on their way tell little of the spread where they arrive; curvature does.
            moved = moved._replace(factor=context.factor_at(moved.anchor))
        return (moved, is_settled) if moved.is_finite() else (whitening, False)


def _variances(draws: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Of each column, in float64, without a second array of the draws' size."""
    squares = np.zeros_like(mean)
    for draw in draws:
        squares += np.square(draw - mean)
    return squares / (len(draws) - 1)
