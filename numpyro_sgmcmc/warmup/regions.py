"""Posteriors without a single region, as those of neural networks' weights.

There pilot chains do not come to agree, whatever the whitening: units may be exchanged and turned,
and a whitening learnt about one place is wrong a little further on. Its control variates are worse
than none. Most weights are about as free as under the prior, whose sds are units that suit
everywhere; with plain gradients in these, a chain goes from place to place.
"""

from __future__ import annotations

import numpy as np
from jax import random

from numpyro_sgmcmc.data.minibatch import IID
from numpyro_sgmcmc.posterior.estimators import ControlVariate, Estimator, Plain
from numpyro_sgmcmc.warmup.ahead import quickly_compiled
from numpyro_sgmcmc.warmup.context import Context
from numpyro_sgmcmc.warmup.effort import MANY_DIM
from numpyro_sgmcmc.warmup.findings import Finding
from numpyro_sgmcmc.warmup.modes import Mode
from numpyro_sgmcmc.warmup.pilot import run_pilot

__all__ = ["NO_REGION", "in_units_of_the_prior"]

NO_REGION = Finding(
    (),
    "no region",
    "Pilot chains find no single region, as in a neural network's weights, and most coordinates "
    "are not much narrower than under the prior: chains take plain gradients in units of the "
    "prior's sds. Judge them by what they predict, as "
    "numpyro_sgmcmc.diagnostics.predictive_summary and bias_report(mcmc, fn, rows) do: R-hat of "
    "weights that may be exchanged means little.",
)

_NOWHERE = 2.0  # R-hat of pilot chains: 2.5 to 3.7 in a network, 1.5 in a Gaussian process
_FREE = 0.1  # median ratio of sds to the prior's: 0.25 to 0.75 in networks, 0.05 in regressions
_SHORT_STEP, _TRIAL_STEPS = 1e-3, 400  # about the shortest that chains come to in their warm-up
_HOT = 0.5
_CLEARLY_LESS = 0.5  # noise of control variates over plain: 0.58, 0.94 in a network, 0.28 in groups
_NUMBERS, _MOST_DRAWS = 2**22, 1_024  # of the prior
_NORMAL_RANGE = 1.349  # between the quartiles of a standard normal


def in_units_of_the_prior(context: Context, first: Mode) -> Mode | None:
    """The same positions in coordinates that suit where there is no single region.

    :param first: where pilot chains have ended.
    :return: None where they agree, where the prior says little of the posterior's width or plain
        gradients are too noisy, and where the user has said what coordinates or gradients to take.
    """
    settings = context.settings
    is_free = settings.inverse_mass_matrix is None and not settings.is_by_site
    is_plain = settings.gradient in (None, Plain()) and not settings.noise_compensation
    if first.r_hat < _NOWHERE or not (is_free and is_plain):
        return None
    if context.target.dim > MANY_DIM and _is_known_about(context, first):
        return None
    sds = _prior_sds(context)
    if sds is None or np.median(first.whitening.sds / sds) < _FREE:
        return None
    whitening = first.whitening._replace(factor=sds, stretch=None)
    found = first._replace(whitening=whitening, q=whitening.whiten(first.draws - whitening.anchor))
    return found if _heat(context, found) < _HOT else None


def _is_known_about(context: Context, mode: Mode) -> bool:
    """Whether control variates are clearly less noisy than plain gradients about a mode.

    Of very many coordinates some have a large R-hat after a short window, region or not.
    """
    both: tuple[Estimator, ...] = (Plain(), ControlVariate())
    if context.target.is_randomized or not context.target.plates:
        return False
    plain, anchored = context.noise_of(mode.whitening, mode.q, both, IID()).values()
    return anchored.mean < _CLEARLY_LESS * plain.mean


def _heat(context: Context, mode: Mode) -> float:
    """By how much plain gradients heat the positions in short steps, as an excess of temperature.

    In a funnel, and with few rows of many, no step that gets anywhere is short enough. Where
    gradients cost much there are fewer steps, and longer ones that bring in as much noise.
    """
    num_steps = min(_TRIAL_STEPS, context.effort.windows[0])
    draws = run_pilot(
        context.rows.step_target,
        context.arguments,
        mode.whitening.cast(context.target.dtype),
        mode.q,
        _SHORT_STEP * (_TRIAL_STEPS / num_steps) ** 0.5,
        num_steps,
        context.rng,
        Plain(),
        context.progress,
    )
    ends = mode.whitening.position(draws[:, -1].astype(np.float64))
    before, after = (context.rows.on_some(x)[0] for x in (mode.draws, ends))
    excess = float(np.mean(after) - np.mean(before)) / (0.5 * context.target.dim)
    return excess if np.isfinite(excess) else np.inf


def _prior_sds(context: Context) -> np.ndarray | None:
    """About the sds of the unconstrained coordinates under the prior, if it can be drawn from.

    Of an improper prior those of the values with which NumPyro stands in for draws.
    """
    target = context.target
    if target.start_by_prior is None:
        return None
    draw = quickly_compiled(target.start_by_prior)
    keys = map(random.key, range(min(_MOST_DRAWS, _NUMBERS // target.dim)))
    draws = np.stack([np.asarray(draw(key, context.arguments)) for key in keys])
    low, high = np.quantile(draws, (0.25, 0.75), axis=0)
    sds = (high - low) / _NORMAL_RANGE
    return sds if np.isfinite(sds).all() and (sds > 0.0).all() else None
