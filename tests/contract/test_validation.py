"""NumPyro's validation: an error for parameters that a chain reaches, and for no others."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import validation_enabled

from numpyro_sgmcmc import SGHMCSplit
from tests.contract.kernels import GIVEN, quietly

X = np.random.default_rng(0).standard_normal(40).astype(np.float32)


def scale():
    """In float32 all but a few draws are zero or infinite, which are invalid scales of a Normal."""
    return numpyro.sample("scale", dist.LogNormal(0, 500))


def differences(X, batch_size=None):
    """The observations are the same for all rows."""
    sd = scale()
    with numpyro.plate("rows", len(X), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(jnp.asarray(X)[i], sd), obs=jnp.zeros(len(i)))


def with_parameter(X, batch_size=None):
    """The initial value of a parameter comes from a run of the model."""
    sd, level = scale(), numpyro.param("level", 0.5)
    with numpyro.plate("rows", len(X), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(level, sd), obs=jnp.asarray(X)[i])


@pytest.mark.parametrize("model", [differences, with_parameter])
def test_invalid_draws_from_the_prior_do_not_raise(model):
    mcmc = quietly(SGHMCSplit(model, **GIVEN), num_samples=5)
    with validation_enabled():
        with pytest.raises(ValueError, match="scale"):  # an example of such draws
            dist.Normal(0.0, dist.LogNormal(0, 500).sample(jax.random.key(0), (10,)))
        mcmc.run(jax.random.key(0), X, batch_size=8)
    assert np.isfinite(mcmc.get_samples()["scale"]).all()


def test_invalid_parameter_of_the_model_raises():
    def model(X, batch_size=None):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with numpyro.plate("rows", len(X), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(mean, np.float32(-1.0)), obs=jnp.asarray(X)[i])

    with validation_enabled(), pytest.raises(ValueError, match="scale"):
        quietly(SGHMCSplit(model)).run(jax.random.key(0), X, batch_size=8)
