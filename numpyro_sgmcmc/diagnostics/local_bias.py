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

from numpyro_sgmcmc.data.arguments import Arguments, DeviceArrayCache
from numpyro_sgmcmc.data.host import unwrap_callback_errors
from numpyro_sgmcmc.data.progress import show_data_passes
from numpyro_sgmcmc.diagnostics.by_draws import estimate_bias_from_draws
from numpyro_sgmcmc.diagnostics.estimates import SteinEstimates
from numpyro_sgmcmc.diagnostics.evidence import BiasDiagnostics
from numpyro_sgmcmc.diagnostics.runs import get_unconstrained_draws, make_thinning_slice
from numpyro_sgmcmc.posterior.locals.marginal import NUM_LOCAL_UPDATES, estimate_marginal_gradients
from numpyro_sgmcmc.samplers.base import SGMCMCKernel

__all__ = ["estimate_bias_of_globals"]

_MARGINAL_GRADIENT_SEED = 0


def estimate_bias_of_globals(
    mcmc: MCMC, kernel: SGMCMCKernel, num_draws: int
) -> tuple[SteinEstimates, BiasDiagnostics]:
    """What gradients of the globals' own posterior at some of the draws tell.

    The local values start from the run's last ones and follow the draws back in time.

    :param kernel: the run's, which has its data.
    :param num_draws: number of draws, taken evenly.
    """
    target, arguments = kernel.potential, Arguments(mcmc._args, mcmc._kwargs)
    draws = np.asarray(get_unconstrained_draws(mcmc, kernel), np.float64)
    some = make_thinning_slice(draws.shape[1], -(-num_draws // len(draws)))
    back = jnp.asarray(draws[:, some][:, ::-1], target.dtype)
    state = mcmc.last_state.locals
    if mcmc.num_chains == 1:
        state = jax.tree.map(lambda x: x[None], state)
    keys = random.split(random.key(_MARGINAL_GRADIENT_SEED), len(back))
    held = DeviceArrayCache().cache_arrays(arguments)
    passes = back.shape[0] * back.shape[1] * NUM_LOCAL_UPDATES
    shown = show_data_passes("gradients on all rows", arguments.host_arrays, passes)
    with unwrap_callback_errors(arguments.host_arrays), shown:
        gradients = [
            np.asarray(
                estimate_marginal_gradients(
                    target, back[c], jax.tree.map(lambda x, c=c: x[c], state), held, keys[c]
                )
            )
            for c in range(len(back))
        ]
    return estimate_bias_from_draws(draws, some, np.stack(gradients)[:, ::-1])
