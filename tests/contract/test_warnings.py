"""Warnings of NumPyro about a model are given by kernels as well."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.contrib.control_flow import scan
from numpyro.infer import NUTS

from numpyro_sgmcmc import SGHMCSplit
from tests.contract.kernels import GIVEN
from tests.quick import quick_if


def no_plate():
    numpyro.sample("x", dist.Normal(0, 1).expand([3]))


def full_plate():
    x = numpyro.sample("x", dist.Normal(0, 1))
    with numpyro.plate("N", 10):
        numpyro.sample("obs", dist.Normal(x, 1).expand([10]), obs=jnp.ones(10))


def event_shape():
    x = numpyro.sample("x", dist.Normal(0, 1))
    with numpyro.plate("N", 10):
        numpyro.sample("obs", dist.Normal(x, 1).expand([10, 2]).to_event(1), obs=jnp.ones((10, 2)))


def batch_dim_of_data():
    x = numpyro.sample("x", dist.Normal(0, 1))
    with numpyro.plate("N", 10):
        numpyro.sample("obs", dist.Normal(x, 1), obs=jnp.ones((5, 10)))


def batch_dims_of_distribution():
    with numpyro.plate("groups", 4):
        x = numpyro.sample("x", dist.Normal(jnp.zeros((2, 3, 4)), 1))
    numpyro.sample("obs", dist.Normal(x.sum(), 1), obs=1.0)


def batch_dim_of_minibatch():
    x = numpyro.sample("x", dist.Normal(0, 1))
    with numpyro.plate("N", 10, subsample_size=2, dim=-2) as i:
        numpyro.sample("obs", dist.Normal(x, 1), obs=jnp.ones((10, 3))[i])


def scan_steps():
    """The steps of a loop need no plate."""

    def step(x, y):
        with numpyro.plate("N", 3):
            x = numpyro.sample("x", dist.Normal(x, 1))
        return x, numpyro.sample("y", dist.Normal(x.sum(), 1), obs=y)

    scan(step, jnp.zeros(3), jnp.ones(5))


def missing_plates(kernel):
    """Return the dimensions and sites of the warnings about missing plates."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernel.init(jax.random.key(0), 0, None, (), {})
    pattern = re.compile(r"plate.* dimension (-\d+).*?'(\w+)'")
    found = (pattern.search(str(w.message)) for w in caught)
    return sorted(match.groups() for match in found if match)


@pytest.mark.parametrize(
    ("model", "num"),
    [
        quick_if(False, no_plate, 0),
        (full_plate, 0),
        quick_if(False, event_shape, 0),
        (scan_steps, 0),
        (batch_dim_of_data, 1),
        (batch_dims_of_distribution, 2),
        (batch_dim_of_minibatch, 1),
    ],
)
def test_missing_plate_warns_as_with_nuts(model, num):
    found = missing_plates(SGHMCSplit(model, **GIVEN))
    assert len(found) == num
    if model is not batch_dim_of_minibatch:  # NUTS has no minibatches
        assert found == missing_plates(NUTS(model))
