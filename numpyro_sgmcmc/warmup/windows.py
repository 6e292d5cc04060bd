"""Windows of pilot chains, until their mean and covariance stay.

The chains go on from window to window, while anchor and whitening follow them.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from numpyro_sgmcmc.posterior.estimators import Estimator
from numpyro_sgmcmc.posterior.whitening import Whitening
from numpyro_sgmcmc.warmup.context import Context
from numpyro_sgmcmc.warmup.noise import Noise
from numpyro_sgmcmc.warmup.pilot import (
    PILOT,
    PILOT_BIAS,
    PILOT_STEP_SIZE,
)

__all__ = ["PilotChains", "Window", "settle"]


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

    def num_steps(self, step_size: float) -> int:
        """Steps of the next window."""
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
        context.progress.begin("pilot chains")
        window = chains.run(whitening, q, step_size, num_steps, estimator)
        if window is None:
            shorter *= 4.0
            q = q / 2.0
            continue
        whitening, q, is_settled = window
        if chains.is_done(is_settled):
            break
    return whitening, q
