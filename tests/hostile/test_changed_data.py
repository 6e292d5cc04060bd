"""Data that change between the warm-up and a run."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_sgmcmc import HostArray, SGHMCSplit
from tests.contract.kernels import quietly


def _mean_model(y, batch_size=None):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


@pytest.mark.slow
@pytest.mark.parametrize("on_host", [False, True])
def test_run_with_data_changed_in_place_adapts_again(on_host):
    """The gradient at the reference point depends on the values, not on the array object."""
    y = np.random.default_rng(0).standard_normal(2000).astype(np.float32)
    data = HostArray(y) if on_host else y
    mcmc = quietly(SGHMCSplit(_mean_model), num_samples=100)
    for shift in (0.0, 1.0):
        y += shift
        mcmc.run(jax.random.key(0), data, batch_size=50)
        assert abs(float(mcmc.get_samples()["mu"].mean()) - y.mean()) < 0.03


def test_run_with_other_data_than_the_warm_up_raises():
    y = np.random.default_rng(0).standard_normal(2000).astype(np.float32)
    given = {
        "step_size": 0.3,
        "num_steps": 2,
        "gradient_estimator": "control_variate",
        "subsampling": "contiguous",
        "inverse_mass_matrix": np.full(1, 1 / 2000),
    }
    mcmc = quietly(SGHMCSplit(_mean_model, **given), num_samples=20)
    init_params = {"mu": np.zeros((), np.float32)}
    mcmc.warmup(jax.random.key(0), y, batch_size=50, init_params=init_params)
    mcmc.run(jax.random.key(1), jnp.array(y), batch_size=50)  # the same in another object
    with pytest.raises(ValueError, match=r"data.*warm-up"):
        mcmc.run(jax.random.key(1), y + 1.0, batch_size=50)
    y += 1.0  # in place; NumPyro would not compile `run` anew for the same object
    sample = jax.jit(lambda state: mcmc.sampler.sample(state, (y,), {"batch_size": 50}))
    with pytest.raises(ValueError, match=r"data.*warm-up"):
        sample(mcmc.post_warmup_state)
