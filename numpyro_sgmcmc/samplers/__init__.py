"""The kernels, one short file each: an SDE, its schemes and defaults, and when to choose it."""

from numpyro_sgmcmc.samplers.sghmc import SGHMC
from numpyro_sgmcmc.samplers.sghmc_split import SGHMCSplit
from numpyro_sgmcmc.samplers.sgld import SGLD

__all__ = ["SGHMC", "SGLD", "SGHMCSplit"]
