"""What must be refused, or said, where rows are spread over four devices."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from jax.sharding import NamedSharding, PartitionSpec
from numpyro.infer import MCMC

from numpyro_sgmcmc import HostArray, SGHMCSplit, ShardedArray
from tests.devices.sharded import DIM, LAYOUTS, mesh_of, read, regression, spread, table


def check_a_minibatch_that_does_not_divide_is_rounded_up_and_said():
    with pytest.warns(UserWarning, match=r"each takes 3 rows, 12 in all"):
        target, _, _ = read((16, 15, 15, 15), batch_size=10)
    assert target.plates[0].subsample_size == 12


def check_what_cannot_be_right_is_refused():
    X, y, group = table()
    even = LAYOUTS["four, as even as can be"]
    sharded, labels = spread(X, even), spread(y, even)
    key, keywords = random.key(0), {"batch_size": 8}

    def refused(match, model=regression, arguments=None, keywords=keywords, **options):
        arguments = arguments or (sharded, labels, group, 0.1)
        with pytest.raises((ValueError, TypeError), match=match):
            SGHMCSplit(model, **options).init(key, 2, None, arguments, keywords)

    def whole(X, y, group, offset, batch_size):
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([DIM]).to_event(1))
        with numpyro.plate("rows", X.shape[0], subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal((X @ beta)[i], 1), obs=y[i])

    def shifted(X, y, group, offset, batch_size):
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([DIM]).to_event(1))
        with numpyro.plate("rows", X.shape[0], subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(X[i // 2] @ beta, 1), obs=y[i])

    refused("on no device as a whole", whole)
    refused("not indexed by", shifted)
    refused("below its size", keywords={"batch_size": 61})
    refused("noise_compensation", noise_compensation=True)
    other = spread(y, LAYOUTS["four, uneven"])
    refused("in the same way", arguments=(sharded, other, group, 0.1))
    uneven = (spread(X, LAYOUTS["four, uneven"]), other, group, 0.1)
    refused("one of them has only 2", arguments=uneven, keywords={"batch_size": 20})
    on_host = HostArray(y, name="y")
    refused("make all of its arrays ShardedArrays", arguments=(sharded, on_host, group, 0.1))
    short = spread(y[:60], (15,) * 4)
    refused("in the same way", arguments=(sharded, short, group, 0.1))
    unused = spread(np.zeros(61, np.float32), even)

    def ignores(X, y, group, offset, batch_size):
        regression(X, y, group, 0.0, batch_size)

    refused("not indexed by", ignores, (sharded, labels, group, unused))
    with pytest.raises(ValueError, match="chain_method='vectorized'"):
        MCMC(
            SGHMCSplit(regression),
            num_warmup=2,
            num_samples=2,
            num_chains=2,
            chain_method="parallel",
            progress_bar=False,
        ).run(key, sharded, labels, group, 0.1, batch_size=8)
    explicit = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Explicit,))
    rows = jax.device_put(X[:60], NamedSharding(explicit, PartitionSpec("rows")))
    refused("explicit axes", arguments=(rows, y[:60], group[:60], 0.1))
    with pytest.raises(ValueError, match="int32"):
        ShardedArray(2**38 * np.arange(8))
    with pytest.raises(ValueError, match="dtype"):
        ShardedArray(np.array(["a", "b"]))
    with pytest.raises(ValueError, match="`counts`"):
        spread(X, (1, 2, 3, 4))
    with pytest.raises(ValueError, match="fewer devices"):
        ShardedArray(X[:2], mesh_of(4))
    with pytest.raises(ValueError, match="`axis`"):
        ShardedArray(X, mesh_of(4), "columns")
    with pytest.raises(ValueError, match="no shape"):
        ShardedArray(3.0)
