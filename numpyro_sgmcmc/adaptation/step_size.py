"""The step size: as large as noise, stiffness and the scheme allow."""

from __future__ import annotations

import math
from typing import Any

from numpyro_sgmcmc.adaptation.noise import Noise
from numpyro_sgmcmc.dynamics import Dynamics

__all__ = ["MAX_NUM_STEPS", "choose_num_steps", "choose_step_size"]

MAX_NUM_STEPS = 500
_FREE_CURVATURE = 3.5
_UNCERTAIN = 0.03  # relative error of the covariance that is compensated


def choose_step_size(
    dynamics: Dynamics,
    largest: float,
    noise: Noise,
    curvature: float,
    target_bias: float,
    is_compensated: bool = False,
) -> tuple[float, float]:
    """The largest step size whose predicted bias stays within the target.

    :param dynamics: tells how noise and curvature act.
    :param largest: step size that suits a whitened Gaussian and an exact gradient.
    :param noise: the whitened gradient's noise.
    :param curvature: largest whitened curvature; up to 3.5 it costs nothing.
    :param target_bias: allowed relative error of posterior sds. Noise may use a quarter of it (of
        the variance, a half): where it differs over the posterior it shifts means as well.
    :param is_compensated: whether the noise's mean size is taken from what is injected.
    :return: the step size, and the relative excess of the posterior variance predicted at it.
    """
    step_size = largest / dynamics.stiffness(max(1.0, curvature / _FREE_CURVATURE))

    def inflation() -> float:
        """The part of noise that differs from place to place, and what exceeds the injected."""
        if not is_compensated:
            return dynamics.noise_inflation(noise.variance, step_size, noise.varying)
        share = dynamics.noise_inflation(noise.variance, step_size)
        return max(noise.varying, _UNCERTAIN) * min(share, 1.0) + max(share - 1.0, 0.0)

    shortest = dynamics.relaxation_time(step_size) / MAX_NUM_STEPS
    while step_size > shortest:
        if inflation() <= target_bias / 2.0:
            break
        step_size = max(0.99 * step_size, shortest)
    return step_size, inflation()


def choose_num_steps(relaxation_time: float, step_size: Any) -> int:
    """Steps between draws that are about independent, from 1 to 500."""
    return max(1, min(MAX_NUM_STEPS, math.ceil(relaxation_time / float(step_size) - 1e-6)))
