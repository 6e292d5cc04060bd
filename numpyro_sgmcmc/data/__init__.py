"""Model arguments, minibatches, and data that no device holds as a whole."""

from numpyro_sgmcmc.data.host_array import HostArray
from numpyro_sgmcmc.data.sharded_array import ShardedArray

__all__ = ["HostArray", "ShardedArray"]
