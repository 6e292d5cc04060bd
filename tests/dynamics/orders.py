"""Weak order of an integrator and stationary covariance of its steps, without sampling.

A step is a pure function ``(state, step_size, gradient, normals) -> state``: its expectation is a
quadrature over the normals, and on a Gaussian potential its stationary covariance solves a discrete
Lyapunov equation. All functions take any state (a NamedTuple of arrays with a field ``position``)
and any number of normal vectors per step, and need float64.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax.flatten_util import ravel_pytree

from numpyro_sgmcmc.diagnostics.invariance import SDE, make_step_expectation


def fitted_slope(step_sizes: Sequence[float], errors: Sequence[float]) -> float:
    """Return the exponent of the power law that fits the errors best."""
    return float(np.polyfit(np.log(step_sizes), np.log(errors), 1)[0])


# --- Gaussian potentials: a step is linear ------------------------------------------------------


@partial(jax.jit, static_argnums=(0, 1))
def _linearise(step: Callable, num_noise: int, state: Any, step_size: Any, curvature: Any) -> Any:
    """Return the Jacobians of a step by its state, its noise, and an offset of the gradient."""
    flat, unravel = ravel_pytree(state)
    dim = state.position.size

    def run(z: Any, noise: Any, offset: Any) -> Any:
        return ravel_pytree(step(unravel(z), step_size, lambda q: curvature @ q + offset, noise))[0]

    origin = (jnp.zeros_like(flat), jnp.zeros((num_noise, dim)), jnp.zeros(dim))
    return jax.jacobian(run, (0, 1, 2))(*origin)


def stationary_covariance(
    step: Callable,
    state: Any,
    num_noise: int,
    step_size: float,
    curvature: np.ndarray,
    gradient_variance: float = 0.0,
) -> np.ndarray:
    """Return the covariance of the flat state that a step leaves invariant, for ``U = q K q / 2``.

    :param state: any state of the right shapes.
    :param num_noise: standard normal vectors per step.
    :param curvature: K, shape ``(d, d)``.
    :param gradient_variance: variance of the minibatch noise: an offset of the gradient that is
        independent between steps and coordinates, and shared by all gradients of a step.
    """
    transition, noise, offset = map(
        np.asarray, _linearise(step, num_noise, state, step_size, curvature)
    )
    if np.abs(np.linalg.eigvals(transition)).max() >= 1:
        return np.full(transition.shape, np.inf)
    noise = noise.reshape(len(transition), -1)
    forcing = noise @ noise.T + gradient_variance * offset @ offset.T
    return scipy.linalg.solve_discrete_lyapunov(transition, forcing)


def covariance_errors(
    step: Callable,
    state: Any,
    num_noise: int,
    step_sizes: Sequence[float],
    curvature: np.ndarray,
    covariance: np.ndarray,
) -> list[float]:
    """Return the largest error of the stationary covariance at each step size."""
    return [
        float(
            np.abs(stationary_covariance(step, state, num_noise, h, curvature) - covariance).max()
        )
        for h in step_sizes
    ]


# --- Any potential: quadrature over the noise ---------------------------------------------------


def generator(sde: SDE, fn: Callable) -> Callable:
    """Return ``L fn``, the rate at which the expectation of a vector of functions changes."""

    def rate(z: Any) -> Any:
        jacobian = jax.jacfwd(fn)
        hessian = jax.jacfwd(jacobian)(z)
        return jacobian(z) @ sde.drift(z) + jnp.einsum("kij,ij->k", hessian, sde.diffusion(z))

    return rate


def semigroup_terms(sde: SDE, fn: Callable, z: Any, order: int) -> np.ndarray:
    """Return ``fn, L fn, L^2 fn, ...`` at ``z`` up to the power ``order``, one per row."""
    series = [fn]
    for _ in range(order):
        series.append(generator(sde, series[-1]))
    return np.asarray(jax.jit(lambda z: jnp.stack([term(z) for term in series]))(z))


def local_errors(
    step: Callable,
    state: Any,
    num_noise: int,
    gradient: Callable,
    fn: Callable,
    terms: np.ndarray,
    step_sizes: Sequence[float],
    num_nodes: int = 8,
) -> list[float]:
    """Return the error of one step's expectation of ``fn``, a vector, at each step size.

    The reference is the series ``fn + h L fn + h^2/2 L^2 fn + ...`` to the order claimed; the error
    of an integrator of that order is proportional to the next power of h.

    :param terms: of :func:`semigroup_terms` at the state.
    """
    z = ravel_pytree(state)[0]
    expect = jax.jit(
        make_step_expectation(step, state, num_noise, gradient, num_nodes), static_argnums=0
    )
    powers = np.arange(len(terms))
    factorials = np.cumprod(np.maximum(powers, 1))
    return [
        float(np.linalg.norm(expect(fn, z, h) - (h**powers / factorials) @ terms))
        for h in step_sizes
    ]
