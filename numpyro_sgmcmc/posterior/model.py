"""From a NumPyro model to a :class:`~numpyro_sgmcmc.posterior.target.Target`, in three steps."""

from __future__ import annotations

from collections.abc import Callable

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.posterior.build import build
from numpyro_sgmcmc.posterior.check import check
from numpyro_sgmcmc.posterior.facts import NO_DRAWS, GibbsDraws
from numpyro_sgmcmc.posterior.read import read
from numpyro_sgmcmc.posterior.target import Target

__all__ = ["model_target"]


def model_target(
    model: Callable,
    arguments: Arguments,
    init_strategy: Callable,
    gibbs: GibbsDraws = NO_DRAWS,
) -> Target:
    """Read a NumPyro model and check that it can be sampled.

    :param model: a NumPyro model.
    :param arguments: its arguments; only shapes and static values count, except where the model
        has ``param`` or ``mutable`` sites (neural networks), whose first values are kept.
    :param init_strategy: NumPyro initialisation strategy.
    :param gibbs: the user's draws of local sites.
    :return: the target.
    :raises ValueError: naming the site, plate or argument that stands in the way.
    """
    facts = read(model, arguments, init_strategy, gibbs)
    check(facts)
    return build(facts)
