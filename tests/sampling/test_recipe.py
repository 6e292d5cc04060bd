"""The complete recipe, whose step size is found by simulating it."""

import jax.numpy as jnp
import pytest
from jax import random

from numpyro_sgmcmc import RecipeKernel

pytestmark = pytest.mark.usefixtures("optimised")


@pytest.mark.filterwarnings("ignore:The model has no subsampled plate")
def test_settings_that_no_step_size_suits_are_refused():
    settings = {
        "diffusion": jnp.zeros_like,
        "curl": lambda z: jnp.zeros((z.size, z.size)),
        "hamiltonian": lambda z: 0.0 * z.sum(),
    }
    kernel = RecipeKernel(potential_fn=lambda q: jnp.square(q).sum() / 2, **settings)
    with pytest.raises(ValueError, match="no step size"):
        kernel.init(random.key(0), 10, jnp.ones(2), (), {})
