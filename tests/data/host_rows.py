"""A regression whose rows are on the host, and a source of rows that records its reads."""

import threading

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_sgmcmc import SGHMCSplit
from tests.contract.kernels import quietly

NUM_ROWS, BATCH = 3_000, 20
# Everything that a warm-up adapts. It would read other rows on the host, and so choose other
# coordinates than for the same rows in memory.
GIVEN = {
    "inverse_mass_matrix": np.full(2, 1.0 / NUM_ROWS),
    "gradient_estimator": "control_variate",
    "subsampling": "contiguous",
}
RNG = np.random.default_rng(0)
X = RNG.standard_normal((NUM_ROWS, 2)).astype(np.float32)
Y = (X @ np.array([1.0, -0.5]) + RNG.standard_normal(NUM_ROWS)).astype(np.float32)


def by_index(X, y, batch_size=None):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(X[i] @ beta, 1.0), obs=y[i])


def by_column(X, y, batch_size=None):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(X[i, 0] * beta[0] + X[i, 1] * beta[1], 1.0), obs=y[i])


def by_subsample(X, y, batch_size=None):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0], subsample_size=batch_size):
        mean = numpyro.subsample(X, event_dim=1) @ beta
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=numpyro.subsample(y, event_dim=0))


class Source:
    """Rows by integer arrays only, with a record of the size and thread of each read."""

    def __init__(self, array, answer=None):
        self.array, self.answer = array, answer
        self.shape, self.dtype = array.shape, array.dtype
        self.read_sizes, self.threads = [], []

    def __getitem__(self, indices):
        assert isinstance(indices, np.ndarray)
        assert indices.ndim == 1
        self.read_sizes.append(indices.size)
        self.threads.append(threading.current_thread().name)
        if self.answer is not None:
            return self.answer(self.array, indices)
        return self.array[indices]


def fit(X, y, model=by_index, num_samples=30, options=(), **settings):
    """Return a finished run; with the options of :data:`GIVEN` it has no warm-up."""
    options = {"step_size": 0.3, "num_steps": 3, **dict(options)}
    settings = {"num_chains": 2, "chain_method": "vectorized", "num_warmup": 4, **settings}
    mcmc = quietly(SGHMCSplit(model, **options), num_samples=num_samples, **settings)
    init_params = None
    if options.keys() >= GIVEN.keys():
        beta = np.tile(np.float32([1.0, -0.5]), (mcmc.num_chains, 1))
        init_params = {"beta": beta if mcmc.num_chains > 1 else beta[0]}
    mcmc.run(jax.random.key(0), X, y, batch_size=BATCH, init_params=init_params)
    return mcmc


def get_draws(mcmc):
    return np.asarray(mcmc.get_samples(group_by_chain=True)["beta"])


def assert_same(a, b):
    """Draws are equal to rounding: the programs differ, so that XLA may add in another order."""
    sd = a.reshape(-1, a.shape[-1]).std(0)
    assert (sd > 1e-3).all()
    assert np.abs((a - b) / sd).max() < 1e-4
