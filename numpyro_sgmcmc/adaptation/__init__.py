"""What all chains share, found once before any of them starts."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from numpyro_sgmcmc.adaptation import local_warmup, warmup
from numpyro_sgmcmc.adaptation.context import WarmupContext
from numpyro_sgmcmc.adaptation.gradient_noise import NO_NOISE, GradientNoiseStats
from numpyro_sgmcmc.adaptation.settings import Adaptation, WarmupSettings, build_empty_adaptation
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.errors import ModelWarning
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.progress import ProgressReporter

__all__ = [
    "NO_NOISE",
    "Adaptation",
    "GradientNoiseStats",
    "ModelWarning",
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
    """Find the typical set, whitening, anchor, estimator, minibatches and step size.

    :param potential: the posterior.
    :param arguments: the model's arguments, concrete.
    :param settings: what the user has fixed.
    :param init_positions: first positions of shape ``(d,)``, of which the first finite ones are tried: the
        user's alone, or several.
    :param progress: told how far it has come.
    :return: what all chains share.
    :raises RuntimeError: where no start is finite, or the gradient on all rows is not.
    :raises ValueError: where rows' local values cannot be moved one by one.
    """
    if potential.dim == 0:
        return build_empty_adaptation(potential, settings)
    # What is not finite is looked for, and named; NumPy need not warn of it as well.
    with np.errstate(all="ignore"):
        context = WarmupContext(potential, arguments, settings, progress or ProgressReporter())
        if potential.local_latents is None:
            return warmup.warm_up(context, init_positions)
        return local_warmup.warm_up(context, init_positions)


def fit_variational_mean(
    potential: Potential,
    arguments: Arguments,
    settings: WarmupSettings,
    init_positions: Iterable[np.ndarray],
    progress: ProgressReporter,
) -> np.ndarray:
    """Where most of the posterior is by the start by volume alone, shape ``(d,)``.

    :param potential: the posterior, without local sites.
    :raises RuntimeError: where no start is finite.
    """
    with np.errstate(all="ignore"):
        context = WarmupContext(potential, arguments, settings, progress)
        return warmup.fit_variational_mean(context, init_positions)
