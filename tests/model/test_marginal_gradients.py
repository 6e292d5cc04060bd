"""Gradients of the globals' marginal posterior, by Fisher's identity."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.model.local_latents import LocalValues
from numpyro_sgmcmc.model.local_moves import estimate_marginal_gradients
from numpyro_sgmcmc.model.subsampled import make_model_potential
from numpyro_sgmcmc.model.trace import GibbsConfig
from numpyro_sgmcmc.sampling.options import Options
from tests.model.hierarchies import NOISE, normal_means, normal_means_data

ROWS = 300
POSITIONS = np.array([[0.6, -0.4], [1.0, 0.0], [1.5, 0.3]], np.float32)  # mu, log tau


def marginal_potential(position, y):
    mu, tau = position[0], jnp.exp(position[1])
    variance = tau**2 + NOISE**2
    likelihood = -0.5 * (len(y) * jnp.log(variance) + ((y - mu) ** 2).sum() / variance)
    return -(likelihood - 0.5 * (mu / 5) ** 2 - 0.5 * (tau / 2) ** 2 + position[1])


@pytest.mark.parametrize("offset", [pytest.param(0.0, marks=pytest.mark.slow), 3.0])
def test_estimate_marginal_gradients_any_initial_values_is_unbiased(offset):
    y = jnp.asarray(normal_means_data(ROWS))
    arguments = Arguments((y,), {"batch_size": 30})

    def move(rng_key, gibbs_sites, hmc_sites, rows):
        """Move half of the way to a sample: an autoregressive update with the same target."""
        precision = 1 / NOISE**2 + 1 / hmc_sites["tau"] ** 2
        mean = (y[rows] / NOISE**2 + hmc_sites["mu"] / hmc_sites["tau"] ** 2) / precision
        normals = jax.random.normal(rng_key, rows.shape)
        return {"z": mean + 0.5 * (gibbs_sites["z"] - mean) + jnp.sqrt(0.75 / precision) * normals}

    gibbs = GibbsConfig(move, ("z",))
    potential = make_model_potential(normal_means, arguments, Options().init_strategy, gibbs)
    values = LocalValues({"z": y + offset})

    def estimate(key):
        return estimate_marginal_gradients(
            potential, jnp.asarray(POSITIONS), values, arguments, key, 30
        )

    estimates = np.stack([estimate(key) for key in jax.random.split(jax.random.key(0), 30)])
    expected = jax.vmap(jax.grad(marginal_potential), (0, None))(POSITIONS, y)
    error = estimates.std(0) / np.sqrt(len(estimates))
    assert (error < 2.0).all()  # of gradients up to a hundred
    assert np.abs(expected).max() > 50
    assert (np.abs(estimates.mean(0) - expected) < 5 * error).all()
