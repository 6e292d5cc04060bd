"""One chain: its state, its steps, and what they leave behind."""

from numpyro_sgmcmc.chain.iteration import run_iteration
from numpyro_sgmcmc.chain.plan import ChainConfig
from numpyro_sgmcmc.chain.start import init_chains
from numpyro_sgmcmc.chain.state import AdaptState, SGMCMCState

__all__ = ["AdaptState", "ChainConfig", "SGMCMCState", "init_chains", "run_iteration"]
