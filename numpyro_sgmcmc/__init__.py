"""Stochastic-gradient MCMC for NumPyro: swap ``NUTS(model)`` for ``SGHMCSplit(model)``."""

from numpyro_sgmcmc.checkpointing import CheckpointedMCMC, open_draws
from numpyro_sgmcmc.data import HostArray, ShardedArray
from numpyro_sgmcmc.diagnostics import bias_report, log_likelihood, print_summary
from numpyro_sgmcmc.samplers import (
    SGHMC,
    SGLD,
    SGMGT,
    SGNHT,
    SGRHMC,
    SGRLD,
    SHMC,
    RecipeKernel,
    SGHMCSplit,
    SGLaplaceHMC,
)

__all__ = [
    "SGHMC",
    "SGLD",
    "SGMGT",
    "SGNHT",
    "SGRHMC",
    "SGRLD",
    "SHMC",
    "CheckpointedMCMC",
    "HostArray",
    "RecipeKernel",
    "SGHMCSplit",
    "SGLaplaceHMC",
    "ShardedArray",
    "bias_report",
    "log_likelihood",
    "open_draws",
    "print_summary",
]
__version__ = "0.1.0"
