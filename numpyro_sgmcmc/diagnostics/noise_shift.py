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
from numpyro_sgmcmc.diagnostics.coordinates import away_from_first, coordinates_of_chains
from numpyro_sgmcmc.diagnostics.estimates import Estimate
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.samplers.base import SGMCMCKernel
from numpyro_sgmcmc.warmup.effort import MANY_DIM, Effort
from numpyro_sgmcmc.warmup.measure import shift_by_noise
from numpyro_sgmcmc.warmup.noise import Noise
from numpyro_sgmcmc.warmup.row_gradients import RowGradients
from numpyro_sgmcmc.warmup.settings import Adaptation

__all__ = ["moved_by_noise"]

_POSITIONS = 8
_ROUGH = 0.25  # of what is predicted to first order: its error


def moved_by_noise(mcmc: MCMC, kernel: SGMCMCKernel, draws: np.ndarray) -> Estimate:
    """How far noise is predicted to have moved each mean, in posterior sds; zeros where unknown.

    :param draws: all of them, shape ``(chains, draws, d)``.
    """
    target, arguments = kernel.target, Arguments(mcmc._args, mcmc._kwargs)
    nothing = Estimate(np.zeros(target.dim), np.zeros(target.dim))
    adaptation = kernel.adaptation_to(arguments)
    coordinates = coordinates_of_chains(mcmc.last_state)
    if adaptation is None or not _can_be_told(kernel, adaptation):
        return nothing
    if away_from_first(coordinates).any():  # chains in several modes
        return nothing
    step_size = float(np.max(mcmc.last_state.adapt_state.step_size))
    rows = RowGradients(target, arguments, decisive=adaptation.decisive)
    flat = draws.reshape(-1, target.dim)
    some = flat[np.linspace(0, len(flat) - 1, _POSITIONS).astype(int)]
    whitening = coordinates[0]
    moved = shift_by_noise(
        rows,
        whitening,
        whitening.whiten(some - whitening.anchor),
        adaptation.estimator,
        adaptation.minibatch,
        _excess(adaptation.noise, kernel.dynamics, step_size),
        Effort.probes,
        np.random.default_rng(0),
    )
    return Estimate(moved, _ROUGH * np.abs(moved))


def _can_be_told(kernel: SGMCMCKernel, adaptation: Adaptation) -> bool:
    """Whether noise is heard, and whitened coordinates are those of a single region."""
    target, options = kernel.target, kernel.options
    is_heard = bool(target.plates) and not (options.noise_compensation or target.is_randomized)
    is_learnt = options.adapt_mass_matrix and options.inverse_mass_matrix is None
    is_whitened = adaptation.weighed is not None and adaptation.has_region and is_learnt
    return is_heard and is_whitened and target.dim <= MANY_DIM


def _excess(noise: Noise, dynamics: Dynamics, step_size: float) -> float:
    """Of a unit variance, that noise of variance one makes, less what an epoch cancels."""
    excess = dynamics.noise_inflation(1.0, step_size, noise.varying)
    by_all = dynamics.noise_inflation(noise.variance, step_size, noise.varying)
    return excess * noise.inflation(dynamics, step_size) / by_all if by_all > 0.0 else 0.0
