"""Posteriors of known shape, as the warm-up sees them."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import init_to_uniform

from numpyro_sgmcmc.adaptation.batched_gradients import BatchedGradients, JittedPotential
from numpyro_sgmcmc.adaptation.budget import WarmupBudget
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.model.potential import make_function_potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.model.subsampled import get_model_potential

FACTORS = {"dense": np.array([[2.0, 0.0], [0.7, 0.1]]), "diagonal": np.array([3.0, 0.2])}


def random_covariance(d, seed=0, correlation=None):
    """A random covariance matrix, or one with equal correlations."""
    rng = np.random.default_rng(seed)
    if correlation is not None:
        return (1 - correlation) * np.eye(d) + correlation
    a = rng.standard_normal((d, 2 * d))
    return a @ a.T / (2 * d)


class QuadraticPotential:
    """The products with the Hessian of a Gaussian, as of ``JittedPotential``; counts the calls."""

    def __init__(self, hessian):
        self.hessian, self.num_calls = hessian, 0

    def hessian_products(self, position, vectors):
        self.num_calls += 1
        return vectors @ self.hessian


def jitted_potential(fn, dim):
    """A potential function on NumPy arrays."""
    return JittedPotential(make_function_potential(fn, jnp.zeros(dim)), Arguments())


def function_gradients(fn, dim, **budget):
    """Batched gradients of a potential function, which has no plates."""
    potential = make_function_potential(fn, jnp.zeros(dim))
    return BatchedGradients(potential, Arguments(), WarmupBudget(**budget))


def exponential_model(y, batch_size=None):
    """The potential is exp(t) sum(y) - n t: all derivatives from the second on are equal."""
    t = numpyro.sample("t", dist.ImproperUniform(dist.constraints.real, (), ()))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Exponential(jnp.exp(t)), obs=y[i])


def exponential_gradients(num_rows=200, batch_size=20, **budget):
    """Data, batched gradients and preconditioner of :func:`exponential_model`."""
    y = np.random.default_rng(0).exponential(size=num_rows)
    arguments = Arguments((jnp.asarray(y),), {"batch_size": batch_size})
    potential = get_model_potential(exponential_model, arguments, init_to_uniform)
    mode = np.array([np.log(num_rows / y.sum())])
    preconditioner = Preconditioner(mode, num_rows**-0.5 * np.ones(1), np.zeros(1))
    return y, BatchedGradients(potential, arguments, WarmupBudget(**budget)), preconditioner
