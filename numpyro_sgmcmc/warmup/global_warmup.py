"""The order of the warm-up's shared part, for models without local sites.

1. Adam, then second-order steps, from the start to the mode region.
2. Curvature there gives the whitening, and a few full gradients the anchor.
3. Pilot chains, a window at a time, move both to the posterior's own mean and covariance.
4. At the pilot's draws the gradient's noise is measured: for each estimator, for random rows and
   for blocks. It decides estimator, minibatches and step size.

Work over all rows happens a fixed number of times. The arrays are concrete, so that Python may
branch; nothing here runs under ``vmap`` or ``pmap``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from jax import random

from numpyro_sgmcmc.data.minibatch import IID
from numpyro_sgmcmc.posterior.whitening import Whitening
from numpyro_sgmcmc.warmup.context import Context
from numpyro_sgmcmc.warmup.decide import decide
from numpyro_sgmcmc.warmup.factors import root
from numpyro_sgmcmc.warmup.settings import Adaptation
from numpyro_sgmcmc.warmup.typical_set import find_typical_set
from numpyro_sgmcmc.warmup.warm_start import (
    NEWTON_MAX_DIM,
    approach,
    centre,
    descend,
    lbfgs,
    newton_from,
)
from numpyro_sgmcmc.warmup.windows import GlobalPilot, settle

__all__ = ["optimise", "warm_up"]

_STARTS = 12
_FEWEST_STEPS, _MOST_STEPS = 100, 1_000  # of Adam


def warm_up(context: Context, starts: Iterable[np.ndarray]) -> Adaptation:
    """Find what all chains share.

    :param starts: first positions, of which the first finite ones are tried.
    """
    if context.is_wide:
        one = context.settings.has_start
        whitening, q = find_typical_set(context, context.finite_starts(starts, 1 if one else 4))
        context.progress("gradient noise")
        return decide(context, whitening, q)
    context.progress("warm start")
    is_one = context.settings.has_start or context.target.dim > NEWTON_MAX_DIM
    position = optimise(context, context.finite_starts(starts, 1 if is_one else _STARTS))
    context.progress("curvature")
    whitening = _first_whitening(context, position)
    pilot = GlobalPilot(context)
    whitening, q = settle(context, pilot, whitening, pilot.first_positions())
    context.progress("gradient noise")
    return decide(context, whitening, q)


def optimise(context: Context, starts: Sequence[np.ndarray]) -> np.ndarray:
    """A position in the mode region: from one start, or the best of several."""
    target, arguments = context.target, context.arguments
    if target.dim <= NEWTON_MAX_DIM:
        return centre(context.some_rows, newton_from(context.some_rows, starts), 0)
    q = context.cast(starts[0])
    if target.plates:
        num_steps = max(_FEWEST_STEPS, min(_MOST_STEPS, context.affordable))
        keys = random.split(random.key(0), num_steps) if target.is_randomized else None
        rows = context.draw_rows((num_steps,), IID())
        q = descend(target, arguments, q, rows, keys)
    return np.asarray(lbfgs(target, arguments, q, context.some_rows.subset), np.float64)


def _first_whitening(context: Context, position: np.ndarray) -> Whitening:
    """The whitening by curvature at a position, moved to where the gradient is about zero."""
    matrix = context.settings.inverse_mass_matrix
    factor = context.factor_at(position) if matrix is None else root(matrix)
    whitening = approach(context.all_rows, context.whitening_at(position, factor))
    context.refuse_infinite_gradient(whitening)
    return whitening
