"""The bias of the globals of a model with latent sites inside the subsampled plate.

The moments of such a run are those of the globals given the local values: how far these are off is
not how far the globals' own law is. So gradients of the globals' own posterior are taken at draws,
after the run, by Fisher's identity.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from numpyro.infer import MCMC

from numpyro_sgmcmc.data.arguments import Arguments, HeldArrays
from numpyro_sgmcmc.data.host import plain_failures
from numpyro_sgmcmc.data.progress import passes_shown
from numpyro_sgmcmc.diagnostics.by_draws import told_by_draws
from numpyro_sgmcmc.diagnostics.estimates import Estimates
from numpyro_sgmcmc.diagnostics.evidence import Evidence
from numpyro_sgmcmc.diagnostics.runs import evenly, unconstrained_draws
from numpyro_sgmcmc.posterior.locals.marginal import NUM_MOVES, marginal_gradients
from numpyro_sgmcmc.samplers.base import SGMCMCKernel

__all__ = ["told_of_globals"]

_SEED = 0


def told_of_globals(mcmc: MCMC, kernel: SGMCMCKernel, num_draws: int) -> tuple[Estimates, Evidence]:
    """What gradients of the globals' own posterior at some of the draws tell.

    The local values start from the run's last ones and follow the draws back in time.

    :param kernel: the run's, which has its data.
    :param num_draws: number of draws, taken evenly.
    """
    target, arguments = kernel.target, Arguments(mcmc._args, mcmc._kwargs)
    draws = np.asarray(unconstrained_draws(mcmc, kernel), np.float64)
    some = evenly(draws.shape[1], -(-num_draws // len(draws)))
    back = jnp.asarray(draws[:, some][:, ::-1], target.dtype)
    state = mcmc.last_state.locals
    if mcmc.num_chains == 1:
        state = jax.tree.map(lambda x: x[None], state)
    keys = random.split(random.key(_SEED), len(back))
    held = HeldArrays().hold(arguments)
    passes = back.shape[0] * back.shape[1] * NUM_MOVES
    shown = passes_shown("gradients on all rows", arguments.hosts, passes)
    with plain_failures(arguments.hosts), shown:
        gradients = [
            np.asarray(
                marginal_gradients(
                    target, back[c], jax.tree.map(lambda x, c=c: x[c], state), held, keys[c]
                )
            )
            for c in range(len(back))
        ]
    return told_by_draws(draws, some, np.stack(gradients)[:, ::-1])
