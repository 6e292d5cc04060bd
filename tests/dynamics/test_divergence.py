"""The divergence of a diagonal: exact for every function, and O(d) for elementwise ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from numpyro_sgmcmc.dynamics.base import divergence, is_elementwise

DIM = 6
COEFFICIENTS = jnp.arange(1.0, DIM + 1)
pytestmark = pytest.mark.usefixtures("x64")


def by_site(q):
    sites = {"a": q[:2], "b": q[2:].reshape(2, 2)}
    return ravel_pytree({"b": jax.nn.softplus(sites["b"]), "a": jnp.exp(sites["a"])})[0]


ELEMENTWISE = {
    "exp": jnp.exp,
    "coefficients": lambda q: COEFFICIENTS * q**2 + 1,
    "constant": lambda q: COEFFICIENTS,
    "sites": by_site,
    "where": lambda q: jnp.where(q > 0, jnp.exp(q), 1.0),
    "clip": lambda q: jnp.clip(jnp.exp(q), 0.1, 2.0),
    "custom derivative": lambda q: jax.nn.sigmoid(q) + jnp.logaddexp(q, 0.0),
    "vmap": jax.vmap(lambda x: 1 + jnp.tanh(x) ** 2),
}
MIXED = {
    "sum": lambda q: 1 + q**2 + jnp.square(q).sum(),
    "first": lambda q: jnp.exp(q[0]) * COEFFICIENTS,
    "reversed": lambda q: jnp.exp(q[::-1]),
    "swapped sites": lambda q: jnp.exp(jnp.concatenate([q[2:], q[:2]])),
    "condition on another entry": lambda q: jnp.where(q[0] > 0, jnp.exp(q), 1.0),
    "condition that is rarely true": lambda q: jnp.where(jnp.roll(q, 1) > 9, q, 1.0),
    "product": lambda q: 1 + (jnp.eye(DIM) @ q) ** 2,
    "softmax": lambda q: jax.nn.softmax(q),
    "cumulative sum": lambda q: jnp.exp(jnp.cumsum(q)),
}


@pytest.mark.parametrize("name", [*ELEMENTWISE, *MIXED])
def test_divergence_of_diagonal_equals_that_of_the_jacobian(name):
    fn = {**ELEMENTWISE, **MIXED}[name]
    q = jnp.asarray(np.random.default_rng(0).standard_normal(DIM))
    assert is_elementwise(fn, q) == (name in ELEMENTWISE)
    jacobian = jax.jacfwd(lambda x: jnp.diag(fn(x)))(q)  # of M_ji by x_k
    np.testing.assert_allclose(divergence(fn, q), jnp.einsum("jij->i", jacobian), rtol=1e-12)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_divergence_of_elementwise_diagonal_forms_no_matrix(name):
    jaxpr = str(jax.make_jaxpr(lambda x: divergence(ELEMENTWISE[name], x))(jnp.zeros(DIM)))
    assert f"f64[{DIM},{DIM}]" not in jaxpr
