"""Sharded data that are invalid, or changed with a warning, on four devices."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from jax.sharding import NamedSharding, PartitionSpec
from numpyro.infer import MCMC

from numpyro_sgmcmc import HostArray, SGHMCSplit, ShardedArray
from tests.devices.sharded import DIM, LAYOUTS, make_mesh, make_potential, regression, shard, table


def check_batch_size_that_does_not_divide_is_rounded_up_with_a_warning():
    with pytest.warns(UserWarning, match=r"'rows'.*subsample_size"):
        potential, _, _ = make_potential((16, 15, 15, 15), batch_size=10)
    assert potential.plates[0].subsample_size == 12


def check_invalid_sharded_data_raise():
    X, y, group = table()
    even = LAYOUTS["even"]
    sharded, labels = shard(X, even), shard(y, even)
    key, keywords = random.key(0), {"batch_size": 8}

    def assert_raises(match, model=regression, arguments=None, keywords=keywords, **options):
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

    assert_raises(r"ShardedArray.*whole", whole)
    assert_raises(r"ShardedArray.*indexed", shifted)
    assert_raises("subsample_size", keywords={"batch_size": 61})
    assert_raises("noise_compensation", noise_compensation=True)
    other = shard(y, LAYOUTS["uneven"])
    assert_raises("sharded arrays", arguments=(sharded, other, group, 0.1))
    uneven = (shard(X, LAYOUTS["uneven"]), other, group, 0.1)
    assert_raises(
        "subsample_size.*'rows'|'rows'.*subsample_size",
        arguments=uneven,
        keywords={"batch_size": 20},
    )
    on_host = HostArray(y, name="y")
    assert_raises(r"'rows'.*sharded", arguments=(sharded, on_host, group, 0.1))
    short = shard(y[:60], (15,) * 4)
    assert_raises("sharded arrays", arguments=(sharded, short, group, 0.1))
    unused = shard(np.zeros(61, np.float32), even)

    def ignores(X, y, group, offset, batch_size):
        regression(X, y, group, 0.0, batch_size)

    assert_raises(r"ShardedArray.*indexed", ignores, (sharded, labels, group, unused))
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
    assert_raises("explicit", arguments=(rows, y[:60], group[:60], 0.1))
    with pytest.raises(ValueError, match="int32"):
        ShardedArray(2**38 * np.arange(8))
    with pytest.raises(ValueError, match="dtype"):
        ShardedArray(np.array(["a", "b"]))
    with pytest.raises(ValueError, match="`counts`"):
        shard(X, (1, 2, 3, 4))
    with pytest.raises(ValueError, match="devices"):
        ShardedArray(X[:2], make_mesh(4))
    with pytest.raises(ValueError, match="`axis`"):
        ShardedArray(X, make_mesh(4), "columns")
    with pytest.raises(ValueError, match="no shape"):
        ShardedArray(3.0)
