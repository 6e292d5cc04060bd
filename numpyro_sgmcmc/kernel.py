"""Public import path of :class:`SGMCMCKernel`, the base class of all kernels."""

from numpyro_sgmcmc.sampling.kernel import SGMCMCKernel
from numpyro_sgmcmc.sampling.options import KernelOptions, Options
from numpyro_sgmcmc.sampling.state import SGMCMCState

__all__ = ["KernelOptions", "Options", "SGMCMCKernel", "SGMCMCState"]
