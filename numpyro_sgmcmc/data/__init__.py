"""Model arguments, minibatches, tables, and data that no device holds as a whole."""

from numpyro_sgmcmc.data.host_array import HostArray
from numpyro_sgmcmc.data.sharded_array import ShardedArray
from numpyro_sgmcmc.data.shuffle import open_rows, shuffle_rows
from numpyro_sgmcmc.data.tables import Table, as_arrays

__all__ = ["HostArray", "ShardedArray", "Table", "as_arrays", "open_rows", "shuffle_rows"]
