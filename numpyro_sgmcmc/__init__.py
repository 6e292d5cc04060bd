"""Stochastic-gradient MCMC for NumPyro: swap ``NUTS(model)`` for ``SGHMCSplit(model)``."""

from numpyro_sgmcmc import samplers
from numpyro_sgmcmc.checkpointing import CheckpointedMCMC, open_draws
from numpyro_sgmcmc.data import HostArray, ShardedArray
from numpyro_sgmcmc.diagnostics import bias_report, explain, log_likelihood, print_summary
from numpyro_sgmcmc.samplers import *  # noqa: F403

__all__ = [
    "CheckpointedMCMC",
    "HostArray",
    "ShardedArray",
    "bias_report",
    "explain",
    "log_likelihood",
    "open_draws",
    "print_summary",
]
__all__ += samplers.__all__
__version__ = "0.1.0"
