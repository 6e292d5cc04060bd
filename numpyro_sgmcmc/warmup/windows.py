"""Windows of pilot chains, until their mean and covariance stay.

The chains go on from window to window, while anchor and whitening follow them.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from numpyro_sgmcmc.posterior.estimators import GradientEstimator
from numpyro_sgmcmc.posterior.whitening import Preconditioner
from numpyro_sgmcmc.warmup.context import WarmupContext
from numpyro_sgmcmc.warmup.noise import GradientNoiseStats
from numpyro_sgmcmc.warmup.pilot import (
    MAX_PILOT_STEP_SIZE,
    PILOT_DYNAMICS,
    PILOT_TARGET_SD_BIAS,
)

__all__ = ["PilotChains", "PilotWindow", "run_local_pilot_windows"]


class PilotWindow(NamedTuple):
    """
    - **preconditioner** - anchor and factor, moved to what the window's draws say.
    - **q** - the chains' positions there.
    - **is_converged** - whether that was a small move.
    """

    preconditioner: Preconditioner
    q: np.ndarray
    is_converged: bool


class PilotChains(Protocol):
    """What a loop over windows must know of the chains that run in them."""

    max_num_windows: int

    def measure_noise(
        self, preconditioner: Preconditioner, q: np.ndarray
    ) -> dict[GradientEstimator, GradientNoiseStats]:
        """The gradient's noise where the chains are."""
        ...

    def choose_window_steps(self, step_size: float) -> int:
        """Steps of the next window."""
        ...

    def run_window(
        self,
        preconditioner: Preconditioner,
        q: np.ndarray,
        step_size: float,
        num_steps: int,
        estimator: GradientEstimator,
    ) -> PilotWindow | None:
        """One window; None where the chains were lost."""
        ...

    def is_last_window(self, is_converged: bool) -> bool:
        """Whether that was the last window."""
        ...


def run_local_pilot_windows(
    context: WarmupContext, pilot_chains: PilotChains, preconditioner: Preconditioner, q: np.ndarray
) -> tuple[Preconditioner, np.ndarray]:
    """Window after window until mean and covariance stay.

    :param q: the chains' first positions, whitened, shape ``(num_chains, d)``.
    :return: the whitening, and whitened positions from about the posterior.
    """
    shorter = 1.0
    for _ in range(pilot_chains.max_num_windows):
        noise = pilot_chains.measure_noise(preconditioner, q)
        curvature = context.measure_max_curvature(preconditioner, q)
        estimator, step_size, _ = context.choose_estimator(
            PILOT_DYNAMICS, MAX_PILOT_STEP_SIZE / shorter, noise, curvature, PILOT_TARGET_SD_BIAS
        )
        num_steps = pilot_chains.choose_window_steps(step_size)
        context.progress.begin_stage("pilot chains")
        window = pilot_chains.run_window(preconditioner, q, step_size, num_steps, estimator)
        if window is None:
            shorter *= 4.0
            q = q / 2.0
            continue
        preconditioner, q, is_settled = window
        if pilot_chains.is_last_window(is_settled):
            break
    return preconditioner, q
