"""How far the gradient's noise has moved a run's means, which no gradient shows.

In a stationary chain the gradients have mean zero, whatever their noise. Where the posterior is
Gaussian the means are then right; elsewhere the noise, which widens many coordinates a little,
moves one that they have in common, such as the scale of hundreds of effects, and only third
derivatives tell (:func:`~numpyro_sgmcmc.warmup.measure.shift_by_noise`).
"""

from __future__ import annotations

import numpy as np
from numpyro.infer import MCMC

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.diagnostics.coordinates import compute_center_offsets, get_chain_preconditioners
from numpyro_sgmcmc.diagnostics.estimates import Estimate
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.samplers.base import SGMCMCKernel
from numpyro_sgmcmc.warmup.effort import HIGH_DIM, WarmupBudget
from numpyro_sgmcmc.warmup.measure import predict_mean_bias_from_noise
from numpyro_sgmcmc.warmup.noise import GradientNoiseStats
from numpyro_sgmcmc.warmup.row_gradients import BatchedGradients
from numpyro_sgmcmc.warmup.settings import Adaptation

__all__ = ["predict_noise_mean_bias"]

_NUM_NOISE_BIAS_POSITIONS = 8
_NOISE_BIAS_RELATIVE_ERROR = 0.25  # of what is predicted to first order: its error


def predict_noise_mean_bias(mcmc: MCMC, kernel: SGMCMCKernel, draws: np.ndarray) -> Estimate:
    """How far noise is predicted to have moved each mean, in posterior sds; zeros where unknown.

    :param draws: all of them, shape ``(chains, draws, d)``.
    """
    target, arguments = kernel.potential, Arguments(mcmc._args, mcmc._kwargs)
    nothing = Estimate(np.zeros(target.dim), np.zeros(target.dim))
    adaptation = kernel.get_cached_adaptation(arguments)
    coordinates = get_chain_preconditioners(mcmc.last_state)
    if adaptation is None or not _is_noise_bias_predictable(kernel, adaptation):
        return nothing
    if compute_center_offsets(coordinates).any():  # chains in several modes
        return nothing
    step_size = float(np.max(mcmc.last_state.adapt_state.step_size))
    rows = BatchedGradients(target, arguments, included_rows=adaptation.included_rows)
    flat = draws.reshape(-1, target.dim)
    some = flat[np.linspace(0, len(flat) - 1, _NUM_NOISE_BIAS_POSITIONS).astype(int)]
    whitening = coordinates[0]
    moved = predict_mean_bias_from_noise(
        rows,
        whitening,
        whitening.solve(some - whitening.center),
        adaptation.estimator,
        adaptation.subsampling,
        _predict_unit_variance_inflation(adaptation.noise_stats, kernel.dynamics, step_size),
        WarmupBudget.num_bias_probes,
        np.random.default_rng(0),
    )
    return Estimate(moved, _NOISE_BIAS_RELATIVE_ERROR * np.abs(moved))


def _is_noise_bias_predictable(kernel: SGMCMCKernel, adaptation: Adaptation) -> bool:
    """Whether noise is heard, and whitened coordinates are those of a single region."""
    target, options = kernel.potential, kernel.options
    is_heard = bool(target.plates) and not (options.noise_compensation or target.is_stochastic)
    is_learnt = options.adapt_mass_matrix and options.inverse_mass_matrix is None
    is_whitened = adaptation.trace is not None and adaptation.has_dominant_mode and is_learnt
    return is_heard and is_whitened and target.dim <= HIGH_DIM


def _predict_unit_variance_inflation(
    noise_stats: GradientNoiseStats, dynamics: Dynamics, step_size: float
) -> float:
    """Of a unit variance, that noise of variance one makes, less what an epoch cancels."""
    excess = dynamics.variance_inflation(1.0, step_size, noise_stats.position_dependent_fraction)
    by_all = dynamics.variance_inflation(
        noise_stats.variance, step_size, noise_stats.position_dependent_fraction
    )
    return (
        excess * noise_stats.predict_variance_inflation(dynamics, step_size) / by_all
        if by_all > 0.0
        else 0.0
    )
