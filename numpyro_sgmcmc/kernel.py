"""Where :class:`SGMCMCKernel`, the base of all kernels, may be imported from."""

from numpyro_sgmcmc.sampling.kernel import SGMCMCKernel
from numpyro_sgmcmc.sampling.options import KernelOptions
from numpyro_sgmcmc.sampling.state import SGMCMCState

__all__ = ["KernelOptions", "SGMCMCKernel", "SGMCMCState"]
