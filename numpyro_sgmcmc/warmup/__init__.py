"""What all chains share, found once before any of them starts."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.progress import Stages
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.warmup import global_warmup, local_warmup
from numpyro_sgmcmc.warmup.context import Context
from numpyro_sgmcmc.warmup.findings import Finding
from numpyro_sgmcmc.warmup.noise import NO_NOISE, Noise
from numpyro_sgmcmc.warmup.settings import Adaptation, Settings, nothing_to_adapt

__all__ = ["NO_NOISE", "Adaptation", "Finding", "Noise", "Settings", "adapt", "fitted_position"]


def adapt(
    target: Target,
    arguments: Arguments,
    settings: Settings,
    starts: Iterable[np.ndarray],
    progress: Stages | None = None,
) -> Adaptation:
    """Find the typical set, whitening, anchor, estimator, minibatches and step size.

    :param target: the posterior.
    :param arguments: the model's arguments, concrete.
    :param settings: what the user has fixed.
    :param starts: first positions of shape ``(d,)``, of which the first finite ones are tried: the
        user's alone, or several.
    :param progress: told how far it has come.
    :return: what all chains share.
    :raises RuntimeError: where no start is finite, or the gradient on all rows is not.
    :raises ValueError: where rows' local values cannot be moved one by one.
    """
    if target.dim == 0:
        return nothing_to_adapt(target, settings)
    # What is not finite is looked for, and named; NumPy need not warn of it as well.
    with np.errstate(all="ignore"):
        warmup = global_warmup if target.locals is None else local_warmup
        return warmup.warm_up(Context(target, arguments, settings, progress or Stages()), starts)


def fitted_position(
    target: Target,
    arguments: Arguments,
    settings: Settings,
    starts: Iterable[np.ndarray],
    progress: Stages,
) -> np.ndarray:
    """Where most of the posterior is by the start by volume alone, shape ``(d,)``.

    :param target: the posterior, without local sites.
    :raises RuntimeError: where no start is finite.
    """
    with np.errstate(all="ignore"):
        context = Context(target, arguments, settings, progress)
        return global_warmup.fitted_position(context, starts)
