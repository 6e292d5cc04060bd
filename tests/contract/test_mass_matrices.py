"""The mass matrix has the format of NUTS: keys, shapes, and the values that the user gives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import NUTS

from numpyro_sgmcmc import SGHMCSplit
from tests.contract.kernels import GIVEN
from tests.quick import quick_if

MATRICES = ("inverse_mass_matrix", "mass_matrix_sqrt", "mass_matrix_sqrt_inv")

pytestmark = pytest.mark.filterwarnings("ignore:The model has no subsampled plate")


def three_sites() -> None:
    """Sites of several shapes, whose alphabetical order is not that of the program."""
    numpyro.sample("slope", dist.Normal(0, 1).expand([2, 2]))
    numpyro.sample("level", dist.HalfNormal(1))
    numpyro.sample("noise", dist.Normal(0, 1).expand([3]))


def mass_matrices(kernel, num_chains=None):
    """Return the mass matrix of the initial state, of one chain or several."""
    key = jax.random.key(0)
    keys = key if num_chains is None else jax.random.split(key, num_chains)
    adapt_state = kernel.init(keys, 0, None, (), {}).adapt_state
    return {name: getattr(adapt_state, name) for name in MATRICES}


def kernel_without_warmup(**options):
    """Return a kernel whose settings are all given."""
    return SGHMCSplit(three_sites, **GIVEN, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"dense_mass": False},
        {"dense_mass": True},
        quick_if(False, {"dense_mass": np.True_}),
        {"dense_mass": []},
        quick_if(False, {"dense_mass": [("slope", "level", "noise")]}),
        quick_if(False, {"dense_mass": [("noise", "level")]}),
        quick_if(False, {"dense_mass": [("slope",), ("level",)]}),
        {"inverse_mass_matrix": np.arange(1.0, 9.0)},
        quick_if(False, {"inverse_mass_matrix": np.arange(1.0, 9.0), "dense_mass": True}),
        {"inverse_mass_matrix": np.eye(8) + 0.3, "dense_mass": True},
        {"inverse_mass_matrix": {("noise",): np.arange(1.0, 4.0)}},
        {"inverse_mass_matrix": {("noise",): np.arange(1.0, 4.0)}, "dense_mass": [("noise",)]},
        {
            "inverse_mass_matrix": {
                ("noise", "level"): np.eye(4)
                + np.diag([0.5, 0.2, 0.1], 1)
                + np.diag([0.5, 0.2, 0.1], -1),
                ("slope",): np.full(4, 2.0),
            },
            "dense_mass": [("noise", "level")],
        },
    ],
)
def test_mass_matrix_of_the_user_has_the_format_of_nuts(options):
    # NUTS writes into the dict that it is given, and takes no NumPy arrays.
    matrix = jax.tree.map(jnp.asarray, options.get("inverse_mass_matrix"))
    nuts_options = {**options, "inverse_mass_matrix": matrix}
    if options.get("dense_mass") is np.True_:
        nuts_options["dense_mass"] = True
    expected = mass_matrices(NUTS(three_sites, adapt_mass_matrix=False, **nuts_options))
    found = mass_matrices(kernel_without_warmup(**options), num_chains=2)
    for name in MATRICES:
        assert set(found[name]) == set(expected[name])
        for block, matrix in expected[name].items():
            of_two_chains = np.stack([matrix] * 2)
            assert found[name][block].shape == of_two_chains.shape
            np.testing.assert_allclose(found[name][block], of_two_chains, atol=1e-5)


def test_adapted_mass_matrix_has_blocks_of_dense_mass():
    covariance = np.eye(4)
    covariance[:2, :2] = [[2.0, 1.0], [1.0, 3.0]]
    covariance[2:, 2:] = np.diag([0.5, 4.0])

    def model():
        names = ("a", "b", "c")
        sites = [numpyro.sample(n, dist.Normal(0, 100).expand([1 + (n == "c")])) for n in names]
        x = jnp.concatenate([sites[0], sites[1], sites[2]])
        numpyro.sample("obs", dist.MultivariateNormal(jnp.zeros(4), covariance), obs=x)

    kernel = SGHMCSplit(model, dense_mass=[("b", "a")])
    adapt_state = kernel.init(jax.random.key(0), 10, None, (), {}).adapt_state
    blocks = adapt_state.inverse_mass_matrix
    assert set(blocks) == {("b", "a"), ("c",)}
    np.testing.assert_allclose(blocks["b", "a"], [[3.0, 1.0], [1.0, 2.0]], rtol=0.3, atol=0.2)
    np.testing.assert_allclose(blocks["c",], [0.5, 4.0], rtol=0.3)
    root = adapt_state.mass_matrix_sqrt["b", "a"]
    np.testing.assert_allclose(np.linalg.inv(root @ root.T), blocks["b", "a"], rtol=1e-4)


def test_mass_matrix_of_a_potential_function_is_one_array():
    kernel = SGHMCSplit(
        potential_fn=lambda z: jnp.square(z).sum() / 2,
        step_size=0.1,
        num_steps=1,
        gradient_estimator="minibatch",
        inverse_mass_matrix=np.array([4.0, 9.0]),
    )
    state = kernel.init(jax.random.key(0), 0, jnp.zeros(2), (), {}).adapt_state
    np.testing.assert_allclose(state.inverse_mass_matrix, [4.0, 9.0], rtol=1e-6)
    np.testing.assert_allclose(state.mass_matrix_sqrt, [1 / 2, 1 / 3], rtol=1e-6)
    np.testing.assert_allclose(state.mass_matrix_sqrt_inv, [2.0, 3.0], rtol=1e-6)
