"""Where the moments that tell the bias come from: each step for nothing, or now and then apart.

Minibatches of an epoch are not independent of the position, which earlier ones of the same epoch
have moved: where their noise matters the gradient must come from a minibatch of its own. So must
one whose noise would drown what it tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from numpyro_sgmcmc.posterior.estimators import Estimator

__all__ = ["STEPS_APART", "MomentSource", "choose_source", "own_gradients"]

STEPS_APART = 20
"""Steps between gradients on a minibatch of their own."""

_CLEARLY_BETTER = 4.0
_MANY_DIM = 10_000
_SOME_STEPS = 5


class MomentSource(NamedTuple):
    """
    - **every** - steps from one gradient that counts to the next, a divisor of the steps of an
      iteration; 0 for none.
    - **estimator** - that of a gradient on a minibatch of its own, at the end of a step; None for
      the step's own gradient, where it does not depend on the position.
    """

    every: int = 1
    estimator: Estimator | None = None


def own_gradients(dim: int, num_steps: int) -> MomentSource:
    """The steps' own gradients: at every step, or at some where vectors are long.

    Sums of long vectors cost as much as the step's other arithmetic.
    """
    most = 1 if dim <= _MANY_DIM else _SOME_STEPS
    return MomentSource(max(k for k in range(1, most + 1) if num_steps % k == 0))


def choose_source(
    variances: Mapping[Estimator, float],
    estimator: Estimator,
    is_independent: bool,
    num_steps: int,
) -> MomentSource | None:
    """Gradients apart, or None where the steps' own serve.

    :param variances: the gradient's noise by estimator.
    :param estimator: the one with which the chain runs.
    :param is_independent: whether the chain's own minibatches do not depend on its position.
    :param num_steps: steps of an iteration.
    """
    divisors = (k for k in range(1, num_steps + 1) if num_steps % k == 0)
    every = next(k for k in divisors if k >= min(STEPS_APART, num_steps))
    best = min(variances, key=lambda e: variances[e])
    own, apart = variances[estimator] / num_steps, variances[best] / (num_steps // every)
    if is_independent and own <= _CLEARLY_BETTER * apart:
        return None
    return MomentSource(every, best)
