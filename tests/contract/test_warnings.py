"""What NumPyro warns of in a model is warned of here."""

import warnings

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.contrib.control_flow import scan
from numpyro.infer import NUTS

from numpyro_sgmcmc import SGHMCSplit


def no_plate():
    numpyro.sample("x", dist.Normal(0, 1).expand([3]))


def whole():
    x = numpyro.sample("x", dist.Normal(0, 1))
    with numpyro.plate("N", 10):
        numpyro.sample("obs", dist.Normal(x, 1).expand([10]), obs=jnp.ones(10))


def event():
    x = numpyro.sample("x", dist.Normal(0, 1))
    with numpyro.plate("N", 10):
        numpyro.sample("obs", dist.Normal(x, 1).expand([10, 2]).to_event(1), obs=jnp.ones((10, 2)))


def of_data():
    x = numpyro.sample("x", dist.Normal(0, 1))
    with numpyro.plate("N", 10):
        numpyro.sample("obs", dist.Normal(x, 1), obs=jnp.ones((5, 10)))


def of_distribution():
    with numpyro.plate("groups", 4):
        x = numpyro.sample("x", dist.Normal(jnp.zeros((2, 3, 4)), 1))
    numpyro.sample("obs", dist.Normal(x.sum(), 1), obs=1.0)


def of_minibatch():
    x = numpyro.sample("x", dist.Normal(0, 1))
    with numpyro.plate("N", 10, subsample_size=2, dim=-2) as i:
        numpyro.sample("obs", dist.Normal(x, 1), obs=jnp.ones((10, 3))[i])


def steps():
    """The steps of a loop need no plate."""

    def step(x, y):
        with numpyro.plate("N", 3):
            x = numpyro.sample("x", dist.Normal(x, 1))
        return x, numpyro.sample("y", dist.Normal(x.sum(), 1), obs=y)

    scan(step, jnp.zeros(3), jnp.ones(5))


def missing(kernel):
    """The dimensions and sites that are warned of."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        kernel.init(jax.random.key(0), 0, None, (), {})
    found = [str(w.message).split("'")[:2] for w in seen if "Missing a plate" in str(w.message)]
    return sorted(map(tuple, found))


FIXED = {"step_size": 0.1, "num_steps": 1, "gradient_estimator": "minibatch", "subsampling": "iid"}


@pytest.mark.parametrize(
    ("model", "num"),
    [
        (no_plate, 0),
        (whole, 0),
        (event, 0),
        (steps, 0),
        (of_data, 1),
        (of_distribution, 2),
        (of_minibatch, 1),
    ],
)
def test_missing_plates(model, num):
    found = missing(SGHMCSplit(model, adapt_mass_matrix=False, **FIXED))
    assert len(found) == num
    if model is not of_minibatch:  # NUTS has none
        assert found == missing(NUTS(model))
