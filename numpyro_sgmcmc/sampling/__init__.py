"""The kernels, one short file each: an SDE, its schemes and defaults, and when to choose it."""

from numpyro_sgmcmc.sampling.kernels import (
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
    "RecipeKernel",
    "SGHMCSplit",
    "SGLaplaceHMC",
]
