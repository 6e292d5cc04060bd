"""Stochastic-gradient MCMC for NumPyro: replace ``NUTS(model)`` by ``SGHMCSplit(model)``."""

import numpyro.infer
from numpyro.infer import initialization

from numpyro_sgmcmc import sampling
from numpyro_sgmcmc.checkpoint import CheckpointedMCMC, open_draws
from numpyro_sgmcmc.data import HostArray, ShardedArray, Table, as_arrays, open_rows, shuffle_rows
from numpyro_sgmcmc.diagnostics import (
    bias_report,
    log_likelihood,
    loo,
    posterior_predictive,
    print_summary,
    running_moments,
    suggest_subsample_size,
    to_arviz,
    warmup_report,
)
from numpyro_sgmcmc.model.handlers import localised
from numpyro_sgmcmc.sampling import *  # noqa: F403
from numpyro_sgmcmc.sampling.training import train_and_sample, train_weights

__all__ = [
    "CheckpointedMCMC",
    "HostArray",
    "ShardedArray",
    "Table",
    "as_arrays",
    "bias_report",
    "localised",
    "log_likelihood",
    "loo",
    "open_draws",
    "open_rows",
    "posterior_predictive",
    "print_summary",
    "running_moments",
    "shuffle_rows",
    "suggest_subsample_size",
    "to_arviz",
    "train_and_sample",
    "train_weights",
    "warmup_report",
]
__all__ += sampling.__all__
__version__ = "0.1.0"

# ArviZ 1.x, imported before NumPyro, replaces it by a lazy module whose `infer` lacks the submodule
# that `az.from_numpyro` uses.
numpyro.infer.initialization = initialization
