"""Long runs in segments: state and draws on disk, and a bitwise reproducible resume."""

from numpyro_sgmcmc.checkpoint.draws import open_draws
from numpyro_sgmcmc.checkpoint.mcmc import CheckpointedMCMC

__all__ = ["CheckpointedMCMC", "open_draws"]
