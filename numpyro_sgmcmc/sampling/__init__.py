"""The sampling kernels, and what they share: options, states, steps, schedules and metrics."""

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
