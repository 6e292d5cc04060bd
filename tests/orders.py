"""Order of a scheme and invariance of its SDE, without sampling.

A step is a pure function ``(state, step_size, gradient, noise) -> state``, so its expectation is
a quadrature over the noise, on a Gaussian potential its stationary covariance solves a discrete
Lyapunov equation, and its small-step limit is the SDE that it follows. Everything here takes any
state (a NamedTuple of arrays with a field ``position``) and any number of noise vectors a step,
and needs float64.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax.flatten_util import ravel_pytree


class SDE(NamedTuple):
    """``dz = drift(z) dt + sqrt(2 diffusion(z)) dW`` on flat states.

    - **drift** - maps ``z`` of shape ``(n,)`` to that shape.
    - **diffusion** - maps ``z`` to a matrix of shape ``(n, n)``.
    """

    drift: Callable
    diffusion: Callable


def fitted_slope(step_sizes: Sequence[float], errors: Sequence[float]) -> float:
    """Exponent of the power law that fits the errors best."""
    return float(np.polyfit(np.log(step_sizes), np.log(errors), 1)[0])


# --- Gaussian potentials: a step is linear ------------------------------------------------------


def stationary_covariance(
    step: Callable,
    state: Any,
    num_draws: int,
    step_size: float,
    curvature: np.ndarray,
    gradient_variance: float = 0.0,
) -> np.ndarray:
    """Covariance of the flat state that the step leaves invariant, for ``U = q K q / 2``.

    :param state: any state of the right shapes.
    :param num_draws: standard normal vectors a step.
    :param curvature: K, shape ``(d, d)``.
    :param gradient_variance: variance of an offset, independent at each step and coordinate and
        shared by all gradients of the step: a minibatch's noise.
    """
    flat, unravel = ravel_pytree(state)
    dim = state.position.size

    def run(z: Any, noise: Any, offset: Any) -> Any:
        return ravel_pytree(step(unravel(z), step_size, lambda q: curvature @ q + offset, noise))[0]

    origin = (jnp.zeros_like(flat), jnp.zeros((num_draws, dim)), jnp.zeros(dim))
    transition, noise, offset = (np.asarray(x) for x in jax.jacobian(run, (0, 1, 2))(*origin))
    if np.abs(np.linalg.eigvals(transition)).max() >= 1:
        return np.full(transition.shape, np.inf)
    noise = noise.reshape(flat.size, -1)
    forcing = noise @ noise.T + gradient_variance * offset @ offset.T
    return scipy.linalg.solve_discrete_lyapunov(transition, forcing)


def covariance_errors(
    step: Callable,
    state: Any,
    num_draws: int,
    step_sizes: Sequence[float],
    curvature: np.ndarray,
    covariance: np.ndarray,
) -> list[float]:
    """Distance of the stationary covariance from the right one, at each step size."""
    return [
        float(
            np.abs(stationary_covariance(step, state, num_draws, h, curvature) - covariance).max()
        )
        for h in step_sizes
    ]


# --- Any potential: quadrature over the noise ---------------------------------------------------


def noise_quadrature(num_draws: int, dim: int, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Gauss-Hermite points, shape ``(m, num_draws, dim)``, and their weights, which add up to 1."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
    count = num_draws * dim
    points = np.array(list(itertools.product(nodes, repeat=count)))
    products = np.array(list(itertools.product(weights / weights.sum(), repeat=count)))
    return points.reshape(-1, num_draws, dim), products.prod(1)


def expectation(
    step: Callable, state: Any, num_draws: int, gradient: Callable, num_nodes: int
) -> Callable:
    """``(fn, z, step_size) -> E[fn(z')]`` for the flat state z' that a step from z reaches."""
    unravel = ravel_pytree(state)[1]
    points, weights = noise_quadrature(num_draws, state.position.size, num_nodes)

    def expect(fn: Callable, z: Any, step_size: Any) -> Any:
        def one(noise: Any) -> Any:
            return fn(ravel_pytree(step(unravel(z), step_size, gradient, noise))[0])

        return jnp.tensordot(weights, jax.vmap(one)(points), 1)

    return expect


def generator(sde: SDE, fn: Callable) -> Callable:
    """``L fn`` of a vector of functions: the rate at which its expectation changes."""

    def rate(z: Any) -> Any:
        slope = jax.jacfwd(fn)
        bend = jax.jacfwd(slope)(z)
        return slope(z) @ sde.drift(z) + jnp.einsum("kij,ij->k", bend, sde.diffusion(z))

    return rate


def semigroup_terms(sde: SDE, fn: Callable, z: Any, order: int) -> np.ndarray:
    """``fn, L fn, L^2 fn, ...`` at ``z``, up to the power ``order``, as rows."""
    series = [fn]
    for _ in range(order):
        series.append(generator(sde, series[-1]))
    return np.asarray(jax.jit(lambda z: jnp.stack([term(z) for term in series]))(z))


def local_errors(
    step: Callable,
    state: Any,
    num_draws: int,
    gradient: Callable,
    fn: Callable,
    terms: np.ndarray,
    step_sizes: Sequence[float],
    num_nodes: int = 8,
) -> list[float]:
    """Error of one step's expectation of ``fn``, a vector of test functions, at each step size.

    The truth is the series ``fn + h L fn + h^2/2 L^2 fn + ...`` to the order claimed; the error of
    a scheme of that order falls as the next power of h.

    :param terms: of :func:`semigroup_terms` at the state.
    """
    z = ravel_pytree(state)[0]
    expect = jax.jit(expectation(step, state, num_draws, gradient, num_nodes), static_argnums=0)
    powers = np.arange(len(terms))
    factorials = np.cumprod(np.maximum(powers, 1))
    return [
        float(np.linalg.norm(expect(fn, z, h) - (h**powers / factorials) @ terms))
        for h in step_sizes
    ]


# --- The SDE itself -----------------------------------------------------------------------------


def small_step_limit(step: Callable, state: Any, num_draws: int, gradient: Callable) -> SDE:
    """The SDE that a step follows, read off the step as the step size goes to zero.

    The mean and the second moment of a step's displacement are analytic in the step size; a
    polynomial through eight small step sizes gives their rates at zero to about 1e-12.
    """
    expect = expectation(step, state, num_draws, gradient, num_nodes=4)
    sizes = 0.003 * np.arange(1, 9)
    others = [sizes[sizes != h] for h in sizes]
    weights = np.array([np.prod(o / (o - h)) for o, h in zip(others, sizes, strict=True)])

    def rate_at_zero(fn: Callable, z: Any) -> Any:
        return jnp.tensordot(weights / sizes, jax.vmap(lambda h: expect(fn, z, h))(sizes), 1)

    def drift(z: Any) -> Any:
        return rate_at_zero(lambda x: x - z, z)

    def diffusion(z: Any) -> Any:
        return rate_at_zero(lambda x: jnp.outer(x - z, x - z), z) / 2.0

    return SDE(drift, diffusion)


def fokker_planck_residual(sde: SDE, log_density: Callable, z: Any) -> Any:
    """Relative rate at which the SDE changes the density at ``z``: zero where it is invariant."""

    def flux(x: Any) -> Any:
        def ratio(y: Any) -> Any:
            return jnp.exp(log_density(y) - log_density(z))

        spread = jax.jacfwd(lambda y: sde.diffusion(y) * ratio(y))(x)
        return sde.drift(x) * ratio(x) - jnp.einsum("ijj->i", spread)

    return -jnp.trace(jax.jacfwd(flux)(z))
