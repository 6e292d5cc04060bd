"""Posteriors without a single region, as those of neural networks' weights.

There pilot chains do not come to agree, whatever the whitening: units may be exchanged and turned,
and a whitening learnt about one place is wrong a little further on. Its control variates are worse
than none. Most weights are about as free as under the prior, whose sds are units that suit
everywhere; with plain gradients in these, a chain goes from place to place.
"""

from __future__ import annotations

import numpy as np
from jax import random

from numpyro_sgmcmc.data.minibatch import IIDSubsampling
from numpyro_sgmcmc.posterior.estimators import ControlVariate, GradientEstimator, MinibatchGradient
from numpyro_sgmcmc.warmup.ahead import jit_low_optimization
from numpyro_sgmcmc.warmup.context import WarmupContext
from numpyro_sgmcmc.warmup.effort import HIGH_DIM
from numpyro_sgmcmc.warmup.findings import ModelWarning
from numpyro_sgmcmc.warmup.modes import Mode
from numpyro_sgmcmc.warmup.pilot import run_pilot

__all__ = ["NON_IDENTIFIED_WARNING", "rescale_to_prior"]

NON_IDENTIFIED_WARNING = ModelWarning(
    (),
    "no region",
    "Pilot chains find no single region, as in a neural network's weights, and most coordinates "
    "are not much narrower than under the prior: chains take plain gradients in units of the "
    "prior's sds. Judge them by what they predict, as "
    "numpyro_sgmcmc.diagnostics.predictive_summary and bias_report(mcmc, fn, rows) do: R-hat of "
    "weights that may be exchanged means little.",
)

_MIN_NON_IDENTIFIED_R_HAT = (
    2.0  # R-hat of pilot chains: 2.5 to 3.7 in a network, 1.5 in a Gaussian process
)
_MIN_PRIOR_SD_RATIO = (
    0.1  # median ratio of sds to the prior's: 0.25 to 0.75 in networks, 0.05 in regressions
)
_TRIAL_STEP_SIZE, _NUM_TRIAL_STEPS = (
    1e-3,
    400,
)  # about the shortest that chains come to in their warm-up
_MAX_TRIAL_VARIANCE_INFLATION = 0.5
_MAX_CONTROL_VARIATE_NOISE_RATIO = (
    0.5  # noise of control variates over plain: 0.58, 0.94 in a network, 0.28 in groups
)
_MAX_PRIOR_SAMPLE_VALUES, _MAX_PRIOR_SAMPLES = 2**22, 1_024  # of the prior
_NORMAL_INTERQUARTILE_RANGE = 1.349  # between the quartiles of a standard normal


def rescale_to_prior(context: WarmupContext, main_mode: Mode) -> Mode | None:
    """The same positions in coordinates that suit where there is no single region.

    :param main_mode: where pilot chains have ended.
    :return: None where they agree, where the prior says little of the posterior's width or plain
        gradients are too noisy, and where the user has said what coordinates or gradients to take.
    """
    settings = context.settings
    is_free = settings.inverse_mass_matrix is None and not settings.is_site_aligned
    is_plain = settings.estimator in (None, MinibatchGradient()) and not settings.noise_compensation
    if main_mode.r_hat < _MIN_NON_IDENTIFIED_R_HAT or not (is_free and is_plain):
        return None
    if context.potential.dim > HIGH_DIM and _has_effective_control_variates(context, main_mode):
        return None
    sds = _estimate_prior_sds(context)
    if sds is None or np.median(main_mode.preconditioner.sds / sds) < _MIN_PRIOR_SD_RATIO:
        return None
    whitening = main_mode.preconditioner._replace(factor=sds, low_rank=None)
    found = main_mode._replace(
        preconditioner=whitening, q=whitening.solve(main_mode.positions - whitening.center)
    )
    return (
        found
        if _measure_trial_variance_inflation(context, found) < _MAX_TRIAL_VARIANCE_INFLATION
        else None
    )


def _has_effective_control_variates(context: WarmupContext, mode: Mode) -> bool:
    """Whether control variates are clearly less noisy than plain gradients about a mode.

    Of very many coordinates some have a large R-hat after a short window, region or not.
    """
    both: tuple[GradientEstimator, ...] = (MinibatchGradient(), ControlVariate())
    if context.potential.is_stochastic or not context.potential.plates:
        return False
    plain, anchored = context.measure_gradient_noise(
        mode.preconditioner, mode.q, both, IIDSubsampling()
    ).values()
    return anchored.mean_variance < _MAX_CONTROL_VARIATE_NOISE_RATIO * plain.mean_variance


def _measure_trial_variance_inflation(context: WarmupContext, mode: Mode) -> float:
    """By how much plain gradients heat the positions in short steps, as an excess of temperature.

    In a funnel, and with few rows of many, no step that gets anywhere is short enough. Where
    gradients cost much there are fewer steps, and longer ones that bring in as much noise.
    """
    num_steps = min(_NUM_TRIAL_STEPS, context.budget.pilot_window_steps[0])
    draws = run_pilot(
        context.batched_gradients.step_potential,
        context.arguments,
        mode.preconditioner.cast(context.potential.dtype),
        mode.q,
        _TRIAL_STEP_SIZE * (_NUM_TRIAL_STEPS / num_steps) ** 0.5,
        num_steps,
        context.rng,
        MinibatchGradient(),
        context.progress,
    )
    ends = mode.preconditioner.to_position(draws[:, -1].astype(np.float64))
    before, after = (
        context.batched_gradients.evaluate_on_subset(x)[0] for x in (mode.positions, ends)
    )
    excess = float(np.mean(after) - np.mean(before)) / (0.5 * context.potential.dim)
    return excess if np.isfinite(excess) else np.inf


def _estimate_prior_sds(context: WarmupContext) -> np.ndarray | None:
    """About the sds of the unconstrained coordinates under the prior, if it can be drawn from.

    Of an improper prior those of the values with which NumPyro stands in for draws.
    """
    target = context.potential
    if target.sample_prior_position is None:
        return None
    draw = jit_low_optimization(target.sample_prior_position)
    keys = map(random.key, range(min(_MAX_PRIOR_SAMPLES, _MAX_PRIOR_SAMPLE_VALUES // target.dim)))
    draws = np.stack([np.asarray(draw(key, context.arguments)) for key in keys])
    low, high = np.quantile(draws, (0.25, 0.75), axis=0)
    sds = (high - low) / _NORMAL_INTERQUARTILE_RANGE
    return sds if np.isfinite(sds).all() and (sds > 0.0).all() else None
