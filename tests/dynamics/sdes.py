"""The SDEs on flat states by the formulas of the literature, and their stationary densities.

They use no code of the package and are the reference for its steps. All are in preconditioned
coordinates; a flat state is the position, then the auxiliary variables.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.dynamics.orders import SDE

FRICTION = 1.3
MASS, SOFTENING = 1.1, 1.2
SIGMA_P, GAMMA, SIGMA_THETA, SIGMA_XI = 1.4, 0.7, 0.3, 0.2


# --- Langevin -----------------------------------------------------------------------------------


def overdamped(gradient: Callable, dim: int) -> SDE:
    """``dq = -grad U dt + sqrt(2) dW``."""
    return SDE(lambda q: -gradient(q), lambda q: jnp.eye(dim))


def underdamped(gradient: Callable, dim: int, friction: float = FRICTION) -> SDE:
    """``dq = p dt, dp = -grad U dt - friction p dt + sqrt(2 friction) dW``."""

    def drift(z: Any) -> Any:
        q, p = z[:dim], z[dim:]
        return jnp.concatenate([p, -gradient(q) - friction * p])

    def diffusion(z: Any) -> Any:
        return jnp.diag(jnp.concatenate([jnp.zeros(dim), jnp.full(dim, friction)]))

    return SDE(drift, diffusion)


def position_only(potential: Callable, dim: int) -> Callable:
    return lambda q: -potential(q)


def with_momentum(potential: Callable, dim: int) -> Callable:
    return lambda z: -potential(z[:dim]) - jnp.square(z[dim:]).sum() / 2


def with_unit_momentum(covariance: np.ndarray) -> np.ndarray:
    d = len(covariance)
    return np.block([[covariance, np.zeros((d, d))], [np.zeros((d, d)), np.eye(d)]])


# --- Thermostats --------------------------------------------------------------------------------


def nose_hoover(num_thermostats: Callable) -> Callable:
    """``dq = p dt, dp = (-grad U - xi p) dt + sqrt(2 A) dW, dxi = (p.p / n - 1) dt``."""

    def sde(gradient: Callable, dim: int) -> SDE:
        def drift(z: Any) -> Any:
            q, p, xi = z[:dim], z[dim : 2 * dim], z[2 * dim :]
            thermostat_drift = (jnp.square(p).reshape(xi.size, -1) - 1).mean(1)
            return jnp.concatenate([p, -gradient(q) - xi * p, thermostat_drift])

        def diffusion(z: Any) -> Any:
            zeros = jnp.zeros(num_thermostats(dim))
            return jnp.diag(jnp.concatenate([jnp.zeros(dim), jnp.full(dim, FRICTION), zeros]))

        return SDE(drift, diffusion)

    return sde


def with_thermostat(factor: Callable) -> Callable:
    """``exp(-U - p.p/2 - n (xi - A)^2 / 2)``."""

    def log_density(potential: Callable, dim: int) -> Callable:
        def fn(z: Any) -> Any:
            squares = jnp.square(z[2 * dim :] - FRICTION).sum()
            kinetic = jnp.square(z[dim : 2 * dim]).sum()
            return -potential(z[:dim]) - kinetic / 2 - factor(dim) * squares / 2

        return fn

    return log_density


def kinetic_energy(a: float) -> Callable:
    """Return the softened energy of one coordinate in the closed form of the paper."""
    c, m = SOFTENING, MASS
    return {
        0.5: lambda p: p**2 / m,
        1.0: lambda p: -p / m + 2 / c * jnp.log1p(jnp.exp(c * p / m)),
        2.0: lambda p: (
            jnp.sqrt(jnp.abs(p)) / m + 4 / (c * (1 + jnp.exp(c * jnp.sqrt(jnp.abs(p)) / m)))
        ),
    }[a]


def monomial_gamma(a: float, sigma_theta: float, sigma_xi: float) -> Callable:
    """Return the thermostat with softened kinetics, elementwise."""
    velocity = jax.vmap(jax.grad(kinetic_energy(a)))
    curvature = jax.vmap(jax.grad(jax.grad(kinetic_energy(a))))

    def sde(gradient: Callable, dim: int) -> SDE:
        def drift(z: Any) -> Any:
            q, p, xi = z[:dim], z[dim : 2 * dim], z[2 * dim :]
            v = velocity(p)
            dq = v - sigma_theta * gradient(q)
            dp = -gradient(q) - xi * v
            dxi = GAMMA * (v**2 - curvature(p)) - sigma_xi / GAMMA * (xi - SIGMA_P)
            return jnp.concatenate([dq, dp, dxi])

        def diffusion(z: Any) -> Any:
            levels = jnp.array([sigma_theta, SIGMA_P, sigma_xi])
            return jnp.diag(jnp.repeat(levels, dim))

        return SDE(drift, diffusion)

    return sde


def with_softened_momentum(a: float, has_thermostat: bool) -> Callable:
    def log_density(potential: Callable, dim: int) -> Callable:
        def fn(z: Any) -> Any:
            energy = potential(z[:dim]) + jax.vmap(kinetic_energy(a))(z[dim : 2 * dim]).sum()
            if has_thermostat:
                energy += jnp.square(z[2 * dim :] - SIGMA_P).sum() / (2 * GAMMA)
            return -energy

        return fn

    return log_density


def laplacian(a: float) -> Callable:
    """``dq = grad K dt, dp = -(grad U + A grad K) dt + sqrt(2 A) dW``."""
    velocity = jax.vmap(jax.grad(kinetic_energy(a)))

    def sde(gradient: Callable, dim: int) -> SDE:
        def drift(z: Any) -> Any:
            v = velocity(z[dim:])
            return jnp.concatenate([v, -gradient(z[:dim]) - FRICTION * v])

        return SDE(drift, underdamped(gradient, dim).diffusion)

    return sde


# --- Metrics ------------------------------------------------------------------------------------


def scalar_metric(q: Any) -> Any:
    return 0.5 + 0.3 * jnp.tanh(q.sum())


def diagonal_metric(q: Any) -> Any:
    return 0.6 + 0.3 * jnp.sin(q + jnp.roll(q, 1))


def dense_metric(q: Any) -> Any:
    v = jnp.cos(q)
    return 0.5 * jnp.eye(q.size) + 0.4 * jnp.outer(v, v)


def as_matrix(metric: Callable) -> Callable:
    def fn(q: Any) -> Any:
        value = metric(q)
        return value if jnp.ndim(value) == 2 else value * jnp.eye(q.size)

    return fn


def matrix_divergence(matrix: Callable, q: Any) -> Any:
    """Return the divergence of each column, ``sum_j d_j M_ji``."""
    return jnp.einsum("jij->i", jax.jacfwd(matrix)(q))


def riemannian_langevin(metric: Callable) -> Callable:
    def sde(gradient: Callable, dim: int) -> SDE:
        inverse = as_matrix(metric)
        return SDE(lambda q: matrix_divergence(inverse, q) - inverse(q) @ gradient(q), inverse)

    return sde


def riemannian(metric: Callable, with_correction: bool = True) -> Callable:
    def sde(gradient: Callable, dim: int) -> SDE:
        def root(q: Any) -> Any:
            return jnp.linalg.cholesky(as_matrix(metric)(q))

        def drift(z: Any) -> Any:
            q, p, s = z[:dim], z[dim:], root(z[:dim])
            dp = -s.T @ gradient(q) - FRICTION * s.T @ s @ p
            if with_correction:
                dp += matrix_divergence(root, q)
            return jnp.concatenate([s @ p, dp])

        def diffusion(z: Any) -> Any:
            s = root(z[:dim])
            return jnp.zeros((2 * dim, 2 * dim)).at[dim:, dim:].set(FRICTION * s.T @ s)

        return SDE(drift, diffusion)

    return sde


# --- The complete recipe ------------------------------------------------------------------------


def recipe_diffusion(z: Any) -> Any:
    return 0.6 + 0.3 * jnp.sin(z + 2 * jnp.roll(z, 1))


def recipe_curl(z: Any) -> Any:
    upper = jnp.triu(jnp.sin(jnp.add.outer(z, 2 * z)), 1)
    return upper - upper.T


def recipe_energy(dim: int) -> Callable:
    return lambda z: jnp.square(z[dim:]).sum() / 2 + 0.1 * jnp.sin(z[dim:]).sum()


def recipe(dim_of_auxiliary: Callable) -> Callable:
    """Return the recipe, with the correction as the divergence of each row of D + Q."""

    def sde(gradient: Callable, dim: int) -> SDE:
        def matrix(z: Any) -> Any:
            return jnp.diag(recipe_diffusion(z)) + recipe_curl(z)

        def drift(z: Any) -> Any:
            energy_gradient = jax.grad(recipe_energy(dim))(z) + jnp.concatenate(
                [gradient(z[:dim]), jnp.zeros(z.size - dim)]
            )
            jacobian = jax.jacfwd(matrix)(z)
            correction = [sum(jacobian[i, j, j] for j in range(z.size)) for i in range(z.size)]
            return jnp.stack(correction) - matrix(z) @ energy_gradient

        return SDE(drift, lambda z: jnp.diag(recipe_diffusion(z)))

    return sde


def with_recipe_energy(potential: Callable, dim: int) -> Callable:
    return lambda z: -potential(z[:dim]) - recipe_energy(dim)(z)


def quartic(q: Any) -> Any:
    """Return a potential that is neither Gaussian nor separable."""
    along = jnp.cos(jnp.arange(q.size)) @ q
    return jnp.square(q).sum() / 2 + 0.1 * along**3 + along**4 / 24
