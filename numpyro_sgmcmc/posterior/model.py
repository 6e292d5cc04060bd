"""From a NumPyro model to a :class:`~numpyro_sgmcmc.posterior.target.Target`, in three steps."""

from __future__ import annotations

from collections.abc import Callable

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.posterior.build import build_potential
from numpyro_sgmcmc.posterior.check import validate_model
from numpyro_sgmcmc.posterior.facts import NO_GIBBS, GibbsConfig
from numpyro_sgmcmc.posterior.read import trace_model
from numpyro_sgmcmc.posterior.target import Potential

__all__ = ["make_model_potential"]


def make_model_potential(
    model: Callable,
    arguments: Arguments,
    init_strategy: Callable,
    gibbs: GibbsConfig = NO_GIBBS,
) -> Potential:
    """Read a NumPyro model and check that it can be sampled.

    :param model: a NumPyro model.
    :param arguments: its arguments; only shapes and static values count, except where the model
        has ``param`` or ``mutable`` sites (neural networks), whose first values are kept.
    :param init_strategy: NumPyro initialisation strategy.
    :param gibbs: the user's draws of local sites.
    :return: the target.
    :raises ValueError: naming the site, plate or argument that stands in the way.
    """
    facts = trace_model(model, arguments, init_strategy, gibbs)
    validate_model(facts)
    return build_potential(facts)
