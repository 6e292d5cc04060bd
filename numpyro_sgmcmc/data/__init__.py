"""Data that no device holds as a whole: rows on the host or on disk, or spread over devices."""

from numpyro_sgmcmc.data.host import HostArray
from numpyro_sgmcmc.data.sharded import ShardedArray

__all__ = ["HostArray", "ShardedArray"]
