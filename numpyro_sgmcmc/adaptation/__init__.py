"""The warm-up: what all chains share is adapted once, before any of them starts."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from numpyro_sgmcmc.adaptation import local_warmup, warmup
from numpyro_sgmcmc.adaptation.gradient_noise import NO_NOISE, GradientNoiseStats
from numpyro_sgmcmc.adaptation.settings import (
    Adaptation,
    StepSizeTrace,
    WarmupInputs,
    WarmupSettings,
    build_empty_adaptation,
)
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.errors import ModelWarning
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.progress import ProgressReporter

__all__ = [
    "NO_NOISE",
    "Adaptation",
    "GradientNoiseStats",
    "ModelWarning",
    "StepSizeTrace",
    "WarmupSettings",
    "adapt",
    "fit_variational_mean",
]


def adapt(
    potential: Potential,
    arguments: Arguments,
    settings: WarmupSettings,
    init_positions: Iterable[np.ndarray],
    progress: ProgressReporter | None = None,
) -> Adaptation:
    """Choose preconditioner, gradient estimator, subsampling, step size and steps per draw.

    :param potential: the posterior.
    :param arguments: the model's arguments, concrete.
    :param settings: the user's settings.
    :param init_positions: positions of shape ``(d,)``: the user's, or several of which the first
        finite ones are taken.
    :param progress: display of the stages.
    :raises InitializationError: where no position, or the full-data gradient, is finite.
    :raises InvalidModelError: where local latents of different observations are dependent.
    """
    if potential.dim == 0:
        return build_empty_adaptation(potential, settings)
    # Values that are not finite are searched for and reported; NumPy need not warn as well.
    with np.errstate(all="ignore"):
        inputs = WarmupInputs.create(potential, arguments, settings, progress)
        if potential.local_latents is None:
            return warmup.warm_up_globals(inputs, init_positions)
        return local_warmup.warm_up_locals(inputs, init_positions)


def fit_variational_mean(
    potential: Potential,
    arguments: Arguments,
    settings: WarmupSettings,
    init_positions: Iterable[np.ndarray],
    progress: ProgressReporter,
) -> np.ndarray:
    """Return the mean of a mean-field variational fit, shape ``(d,)``.

    :param potential: the posterior, without local latents.
    :raises InitializationError: where no initial position is finite.
    """
    with np.errstate(all="ignore"):
        inputs = WarmupInputs.create(potential, arguments, settings, progress)
        return warmup.fit_variational_mean(inputs, init_positions)
