"""Data that no device holds as a whole: rows on the host or on disk, or spread over devices."""

from numpyro_sgmcmc.data.host_array import HostArray
from numpyro_sgmcmc.data.sharded_array import ShardedArray

__all__ = ["HostArray", "ShardedArray"]
