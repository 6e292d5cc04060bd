"""Long runs: in segments, each kept on disk, resumed to the same bits."""

from numpyro_sgmcmc.checkpoint.draws import open_draws
from numpyro_sgmcmc.checkpoint.mcmc import CheckpointedMCMC

__all__ = ["CheckpointedMCMC", "open_draws"]
