"""Replicated data: draws of the observed sites at the run's rows, by chunks."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random

from numpyro_sgmcmc import HostArray, SGHMCSplit, posterior_predictive
from numpyro_sgmcmc.diagnostics import predictive
from tests.contract.kernels import quietly

pytestmark = pytest.mark.filterwarnings("ignore:The deterministic sites")

N, DRAWS = 60, 400
X = np.random.default_rng(0).standard_normal(N).astype(np.float32)
SD, NEXT_SD = 0.5, 0.1


def model(x, y, batch_size=None):
    """Of the two outcomes the second follows the first; a factor is no outcome."""
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    with numpyro.plate("rows", len(x), subsample_size=batch_size) as i:
        mean = numpyro.deterministic("mean", slope * x[i])
        first = numpyro.sample("first", dist.Normal(mean, SD), obs=y[i])
        numpyro.sample("next", dist.Normal(first, NEXT_SD), obs=y[i])
        numpyro.factor("more", -0.5 * jnp.square(slope) * jnp.ones_like(mean))


def run(x, y):
    settings = {
        "step_size": 0.2,
        "num_steps": 3,
        "gradient_estimator": "minibatch",
        "subsampling": "contiguous",
    }
    kernel = SGHMCSplit(model, inverse_mass_matrix=np.full(1, 1e-3), **settings)
    mcmc = quietly(kernel, num_warmup=5, num_samples=DRAWS, num_chains=2, chain_method="vectorized")
    mcmc.run(random.key(0), x, y, batch_size=20)
    return mcmc


@pytest.fixture(scope="module")
def mcmc():
    return run(jnp.asarray(X), jnp.asarray(3.0 * X))


def test_they_have_the_law_that_the_model_gives_them(mcmc, monkeypatch):
    monkeypatch.setattr(
        predictive, "_MAX_ROWS_PER_CHUNK", 25
    )  # the last overlaps with the one before
    found = posterior_predictive(mcmc, random.key(1))
    assert set(found) == {"mean", "first", "next"}
    slope = np.asarray(mcmc.get_samples(group_by_chain=True)["slope"])
    np.testing.assert_allclose(found["mean"], slope[..., None] * X, rtol=1e-5)
    noise = (found["first"] - found["mean"]) / SD, (found["next"] - found["first"]) / NEXT_SD
    for z in noise:
        assert z.shape == (2, DRAWS, N)
        assert abs(z.mean()) < 5 / np.sqrt(z.size)
        assert abs(z.std() - 1) < 5 / np.sqrt(2 * z.size)
        assert len(np.unique(z)) > 0.99 * z.size  # float32 meets some numbers twice
        for axis in range(3):  # neither draws, nor rows of other chunks, share their noise
            for lag in (1, 10, 25) if axis else (1,):
                others = np.roll(z, lag, axis)
                assert abs((z * others).mean()) < 5 * np.sqrt(2 / z.size)


def test_some_rows_and_some_draws(mcmc):
    rows = np.array([59, 0, 7])
    found = posterior_predictive(mcmc, random.key(1), rows, num_draws=3)
    slope = np.asarray(mcmc.get_samples(group_by_chain=True)["slope"])[:, [0, 199, 399]]
    np.testing.assert_allclose(found["mean"], slope[..., None] * X[rows], rtol=1e-5)
    assert found["first"].shape == (2, 3, 3)
    again = posterior_predictive(mcmc, random.key(1), rows, num_draws=3)
    np.testing.assert_array_equal(found["next"], again["next"])
    assert posterior_predictive(mcmc, random.key(1), rows, 10**6)["mean"].shape == (2, DRAWS, 3)


@pytest.mark.slow
def test_rows_on_the_host(monkeypatch):
    """They are never loaded whole, and give what rows in memory give."""
    monkeypatch.setattr("numpyro_sgmcmc.model.handlers.FullDataModel.max_bytes", 1)
    on_host, in_memory = run(HostArray(X), HostArray(3.0 * X)), run(X, 3.0 * X)
    found, same = (
        posterior_predictive(m, random.key(1), num_draws=5) for m in (on_host, in_memory)
    )
    for name, values in found.items():
        np.testing.assert_allclose(values, same[name], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="HostArray.*posterior_predictive"):
        on_host.sampler.model(*on_host._args)


def test_what_makes_no_sense_is_refused(mcmc):
    for wrong, words in [
        ({"rng_key": 0}, "`rng_key`"),
        ({"rng_key": random.key(0), "rows": [60]}, "between 0 and 59"),
        ({"rng_key": random.key(0), "num_draws": 0}, "`num_draws`"),
    ]:
        with pytest.raises(ValueError, match=words):
            posterior_predictive(mcmc, **wrong)
