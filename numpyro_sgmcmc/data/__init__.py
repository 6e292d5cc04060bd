"""Data that stay outside the device's memory."""

from numpyro_sgmcmc.data.host import HostArray

__all__ = ["HostArray"]
