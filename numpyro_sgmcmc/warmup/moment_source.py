"""Where the moments that tell the bias come from: each step for nothing, or now and then apart.

Minibatches of an epoch are not independent of the position, which earlier ones of the same epoch
have moved: where their noise matters the gradient must come from a minibatch of its own. So must
one whose noise would drown what it tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from numpyro_sgmcmc.posterior.estimators import GradientEstimator

__all__ = [
    "MONITOR_INTERVAL",
    "MonitorGradients",
    "choose_separate_gradients",
    "choose_step_gradients",
]

MONITOR_INTERVAL = 20
"""Steps between gradients on a minibatch of their own."""

_MIN_MONITOR_VARIANCE_RATIO = 4.0
_MAX_DIM_MONITORED_EACH_STEP = 10_000
_MAX_STEP_GRADIENT_INTERVAL = 5


class MonitorGradients(NamedTuple):
    """
    - **interval** - steps from one gradient that counts to the next, a divisor of the steps of an
      iteration; 0 for none.
    - **estimator** - that of a gradient on a minibatch of its own, at the end of a step; None for
      the step's own gradient, where it does not depend on the position.
    """

    interval: int = 1
    estimator: GradientEstimator | None = None


def choose_step_gradients(dim: int, num_steps: int) -> MonitorGradients:
    """The steps' own gradients: at every step, or at some where vectors are long.

    Sums of long vectors cost as much as the step's other arithmetic.
    """
    most = 1 if dim <= _MAX_DIM_MONITORED_EACH_STEP else _MAX_STEP_GRADIENT_INTERVAL
    return MonitorGradients(max(k for k in range(1, most + 1) if num_steps % k == 0))


def choose_separate_gradients(
    noise_variances: Mapping[GradientEstimator, float],
    estimator: GradientEstimator,
    is_independent: bool,
    num_steps: int,
) -> MonitorGradients | None:
    """Gradients apart, or None where the steps' own serve.

    :param noise_variances: the gradient's noise by estimator.
    :param estimator: the one with which the chain runs.
    :param is_independent: whether the chain's own minibatches do not depend on its position.
    :param num_steps: steps of an iteration.
    """
    divisors = (k for k in range(1, num_steps + 1) if num_steps % k == 0)
    every = next(k for k in divisors if k >= min(MONITOR_INTERVAL, num_steps))
    best = min(noise_variances, key=lambda e: noise_variances[e])
    own, apart = (
        noise_variances[estimator] / num_steps,
        noise_variances[best] / (num_steps // every),
    )
    if is_independent and own <= _MIN_MONITOR_VARIANCE_RATIO * apart:
        return None
    return MonitorGradients(every, best)
