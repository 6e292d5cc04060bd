"""The warm-up: what all chains share is adapted once, before any of them starts."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import tee

import numpy as np

from numpyro_sgmcmc.adaptation.gradient_noise import NO_NOISE, GradientNoiseStats
from numpyro_sgmcmc.adaptation.initialisation import find_init_positions, fit_inits
from numpyro_sgmcmc.adaptation.local_warmup import warm_up_locals
from numpyro_sgmcmc.adaptation.settings import (
    Adaptation,
    StepSizeTrace,
    WarmupInputs,
    WarmupSettings,
    build_empty_adaptation,
)
from numpyro_sgmcmc.adaptation.warmup import warm_up_globals
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.errors import ModelWarning
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.validation import check_conditional_independence
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


# Values that are not finite are searched for and reported; NumPy need not warn as well.
@np.errstate(all="ignore")
def adapt(
    potential: Potential,
    arguments: Arguments,
    settings: WarmupSettings,
    init_positions: Iterable[np.ndarray],
    progress: ProgressReporter | None = None,
) -> Adaptation:
    """Choose preconditioner, gradient estimator, subsampling, step size and steps per draw.

    :param init_positions: positions of shape ``(d,)``: the user's, or several of which the first
        finite ones are taken.
    """
    if potential.dim == 0:
        return build_empty_adaptation(potential, settings)
    inputs = WarmupInputs.create(potential, arguments, settings, progress)
    if potential.local_latents is not None:
        return warm_up_locals(inputs, init_positions)
    if potential.local_names:
        init_positions, checked = tee(init_positions)
        check_conditional_independence(potential, arguments, inputs.cast(next(checked)))
    return warm_up_globals(inputs, init_positions)


@np.errstate(all="ignore")
def fit_variational_mean(
    potential: Potential,
    arguments: Arguments,
    settings: WarmupSettings,
    init_positions: Iterable[np.ndarray],
    progress: ProgressReporter,
) -> np.ndarray:
    """Return the mean of the mean-field variational fit with the largest ELBO, shape ``(d,)``."""
    inputs = WarmupInputs.create(potential, arguments, settings, progress)
    progress.begin_stage("variational fit")
    return fit_inits(inputs, *find_init_positions(inputs, init_positions))[0].mean
