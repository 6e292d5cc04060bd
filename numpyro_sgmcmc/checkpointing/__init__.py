"""Long runs: in segments, each kept on disk, resumed to the same bits."""

from numpyro_sgmcmc.checkpointing.draws import open_draws
from numpyro_sgmcmc.checkpointing.driver import CheckpointedMCMC

__all__ = ["CheckpointedMCMC", "open_draws"]
