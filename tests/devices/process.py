"""A run in one of several processes that share the rows, started by `test_devices.py`.

Arguments: index of this process, number of processes, port, file for the draws, number of draws.
"""

import sys

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_sgmcmc import SGHMCSplit, ShardedArray

COUNTS = (50, 70, 180, 101)
DIM = 2


def regression(X, y, batch_size):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ beta), obs=y[i])


def main(process, processes, port, path, num_samples):
    # Devices that are threads deadlock where each has begun another program.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"127.0.0.1:{port}",
            processes,
            process,
            heartbeat_timeout_seconds=20,
            shutdown_timeout_seconds=20,
        )
    rng = np.random.default_rng(0)
    X = rng.normal(size=(sum(COUNTS), DIM)).astype(np.float32)
    y = (rng.random(len(X)) < 1 / (1 + np.exp(-X @ np.array([1.0, -0.5])))).astype(np.float32)
    # Rows of this process, as if it had read no others.
    ends = np.cumsum((0, *COUNTS))
    own = slice(process * 4 // processes, (process + 1) * 4 // processes)
    rows = slice(ends[own.start], ends[own.stop])
    data = [ShardedArray(x[rows], counts=COUNTS[own]) for x in (X, y)]
    mcmc = MCMC(
        SGHMCSplit(regression),
        num_warmup=20,
        num_samples=num_samples,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.warmup(jax.random.key(0), *data, batch_size=20)
    print("sampling", flush=True)
    mcmc.run(mcmc.post_warmup_state.rng_key, *data, batch_size=20)
    np.save(path, np.asarray(mcmc.get_samples(group_by_chain=True)["beta"]))
    mcmc.print_summary()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4], int(sys.argv[5]))
