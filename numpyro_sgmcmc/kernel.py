"""Where :class:`SGMCMCKernel`, the base of all kernels, may be imported from."""

from numpyro_sgmcmc.chain import SGMCMCState
from numpyro_sgmcmc.samplers.base import SGMCMCKernel
from numpyro_sgmcmc.samplers.options import KernelOptions

__all__ = ["KernelOptions", "SGMCMCKernel", "SGMCMCState"]
