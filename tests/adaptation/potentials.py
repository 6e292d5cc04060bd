"""Posteriors whose shape is known, as the warm-up sees them."""

import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.adaptation.batched_gradients import JittedPotential
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.model.potential import make_function_potential


def random_covariance(d, seed=0, correlation=None):
    rng = np.random.default_rng(seed)
    if correlation is not None:
        return (1 - correlation) * np.eye(d) + correlation
    a = rng.standard_normal((d, 2 * d))
    return a @ a.T / (2 * d)


class Quadratic:
    """The potential of a Gaussian, as :class:`EagerPotential` shows it; counts the calls."""

    def __init__(self, hessian, mode=0.0):
        self.matrix, self.mode, self.num_calls = hessian, mode + np.zeros(len(hessian)), 0

    def value(self, position):
        return self.expansion(position)[0]

    def gradient(self, position):
        return self.expansion(position)[1]

    def expansion(self, position):
        self.num_calls += 1
        slope = self.matrix @ (position - self.mode)
        return (position - self.mode) @ slope / 2, slope, self.matrix

    def hessian_products(self, position, vectors):
        self.num_calls += 1
        return vectors @ self.matrix


def eager_potential(fn, dim):
    """The package's potential of a potential function."""
    target = make_function_potential(fn, jnp.zeros(dim))
    return JittedPotential(target, Arguments())


LOWER = np.array([[2.0, 0.0], [0.7, 0.1]])
FACTORS = {"dense": LOWER, "diagonal": np.array([3.0, 0.2])}
