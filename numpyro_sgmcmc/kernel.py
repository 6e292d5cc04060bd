"""Where :class:`SGMCMCKernel`, the base of all kernels, may be imported from."""

from numpyro_sgmcmc.samplers.base import KernelOptions, SGMCMCKernel

__all__ = ["KernelOptions", "SGMCMCKernel"]
