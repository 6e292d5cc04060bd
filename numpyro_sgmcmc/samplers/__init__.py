"""The kernels, one short file each: an SDE, its schemes and defaults, and when to choose it."""

from numpyro_sgmcmc.samplers.recipe import RecipeKernel
from numpyro_sgmcmc.samplers.sghmc import SGHMC
from numpyro_sgmcmc.samplers.sghmc_split import SGHMCSplit
from numpyro_sgmcmc.samplers.sglaplacehmc import SGLaplaceHMC
from numpyro_sgmcmc.samplers.sgld import SGLD
from numpyro_sgmcmc.samplers.sgmgt import SGMGT
from numpyro_sgmcmc.samplers.sgnht import SGNHT
from numpyro_sgmcmc.samplers.sgrhmc import SGRHMC
from numpyro_sgmcmc.samplers.sgrld import SGRLD
from numpyro_sgmcmc.samplers.shmc import SHMC

__all__ = [
    "SGHMC",
    "SGLD",
    "SGMGT",
    "SGNHT",
    "SGRHMC",
    "SGRLD",
    "SHMC",
    "RecipeKernel",
    "SGHMCSplit",
    "SGLaplaceHMC",
]
