"""One chain: its state, its steps, and what they leave behind."""

from numpyro_sgmcmc.chain.iteration import advance
from numpyro_sgmcmc.chain.plan import ChainPlan
from numpyro_sgmcmc.chain.start import start_chains
from numpyro_sgmcmc.chain.state import AdaptState, SGMCMCState

__all__ = ["AdaptState", "ChainPlan", "SGMCMCState", "advance", "start_chains"]
