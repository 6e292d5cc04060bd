"""What a step of finite size makes of a standard normal, exactly where the step is linear.

Of a stationary chain the mean of all kicks is zero. So it is where gradients are taken that the
means of a posterior come right, and there the variances should be right: a scale that thousands of
effects share follows what spread these have at the kicks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.interpreters.ad import JVPTracer

from numpyro_sgmcmc.dynamics import Dynamics

__all__ = ["compute_draw_variance_inflation", "compute_kick_variance_inflation"]

_MAX_RESOLVED_EIGENVALUE = (
    1.0 - 1e-6
)  # a state of which a step leaves so much: rounding hides what it does
_MAX_ACCURATE_EIGENVALUE = 1.0 - 1e-5  # the same where a variance is to be right
_MIN_FORGOTTEN_FRACTION = (
    1e-4  # share that the SDE forgets in a step, of which more than 1e-5 should be seen
)

LinearStep = tuple[np.ndarray, np.ndarray, np.ndarray]
"""A step on a normal: the factors of state and entries in it, and in where gradients are taken."""


@lru_cache(maxsize=64)
def compute_kick_variance_inflation(dynamics: Dynamics, integrator: str, step_size: float) -> float:
    """Relative excess of a unit variance where gradients are taken, with exact ones.

    :param integrator: name of the integrator.
    :return: the mean over a step's gradients; zero for an SDE of which no linear form is known, and
        for a step that changes next to nothing.
    """
    linear = _linearise_step(dynamics, integrator, step_size, 1.0)
    if linear is None or abs(_find_slowest_eigenvalue(linear)) > _MAX_RESOLVED_EIGENVALUE:
        return 0.0
    covariance, at = _compute_stationary_covariance(dynamics, linear), linear[2]
    size = len(covariance)
    variances = ((at[:, :size] @ covariance) * at[:, :size]).sum(1) + np.square(at[:, size:]).sum(1)
    return float(variances.mean() - 1.0)


@lru_cache(maxsize=64)
def compute_draw_variance_inflation(
    dynamics: Dynamics,
    integrator: str,
    step_size: float,
    curvature: float = 1.0,
    noise_variance: float = 0.0,
) -> float | None:
    """Relative excess of a normal's variance that draws have.

    :param integrator: name of the integrator.
    :param curvature: of the normal's potential.
    :param noise_variance: of the gradient's noise, a new one each step.
    :return: infinite for a step that is not stable, -1 for one that friction brings to a stand, and
        None for an SDE of which no linear form is known, for a thermostat, which is not linear, and
        for noise where a step forgets too little to be told from rounding.
    """
    linear = _linearise_step(dynamics, integrator, step_size, curvature, noise_variance)
    if linear is None or dynamics.has_thermostat:
        return None
    slowest = _find_slowest_eigenvalue(linear)
    if (
        abs(slowest) > _MAX_ACCURATE_EIGENVALUE
        and abs(slowest - 1.0) > 1.0 - _MAX_ACCURATE_EIGENVALUE
    ):
        return math.inf
    if abs(slowest) > _MAX_ACCURATE_EIGENVALUE and noise_variance > 0.0:
        return None
    if abs(slowest) > _MAX_ACCURATE_EIGENVALUE:
        forgotten = -math.expm1(-2.0 * step_size / dynamics.relaxation_time(step_size))
        return -1.0 if forgotten > _MIN_FORGOTTEN_FRACTION else 0.0
    return float(curvature * _compute_stationary_covariance(dynamics, linear)[0, 0] - 1.0)


def _linearise_step(
    dynamics: Dynamics,
    integrator: str,
    step_size: float,
    curvature: float,
    noise_variance: float = 0.0,
) -> LinearStep | None:
    """The step on a normal of some curvature; None for an SDE of which no linear form is known.

    :param noise_variance: of the gradient's noise, the last entry.
    """
    linear = dynamics.linear_approximation
    if linear is None or integrator not in linear.integrators:
        return None
    if any(part.every_n_steps > 1 for part in linear.integrators[integrator].parts):
        return None
    size, respond = _compile_step_jacobian(linear, integrator)
    found = respond(step_size, curvature, math.sqrt(noise_variance))
    ends, places = (np.asarray(x, float) for x in found)
    return ends[:, :size], ends[:, size:], places


@lru_cache(maxsize=64)
def _compile_step_jacobian(linear_dynamics: Dynamics, integrator: str) -> tuple[int, Callable]:
    """Numbers in a state of one coordinate, and ``(step_size, curvature, sd) -> the factors``."""
    step = linear_dynamics.make_step(integrator)
    form = jax.eval_shape(linear_dynamics.init, jnp.zeros(1), jax.random.key(0))
    size = sum(math.prod(x.shape) for x in jax.tree.leaves(form))
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), form)

    @jax.jit
    def respond(step_size: Array, curvature: Array, sd: Array) -> tuple[Array, Array]:
        def response(entries: Array) -> tuple[Array, Array]:
            """The state after a step, and where it asked for gradients."""
            _, unravel = ravel_pytree(zeros)
            state, noise, places = unravel(entries[:size]), entries[size:-1, None], []

            def gradient(q: Array) -> Array:
                if not isinstance(q, JVPTracer):  # of a derivative
                    places.append(q)
                return curvature * q + sd * entries[-1]

            end = step(state, step_size, gradient, noise)
            return ravel_pytree(end)[0], jnp.concatenate(places)

        return jax.vmap(response, out_axes=1)(jnp.eye(size + step.num_noise + 1))

    return size, respond


def _find_slowest_eigenvalue(linear_step: LinearStep) -> complex:
    """By what a step multiplies the slowest part of a state; infinite where numbers end."""
    a, b, _ = linear_step
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.inf
    return complex(max(np.linalg.eigvals(a), key=abs))


def _compute_stationary_covariance(dynamics: Dynamics, linear_step: LinearStep) -> np.ndarray:
    """Of the stationary state."""
    a, b, _ = linear_step
    size = len(a)
    covariance = np.linalg.solve(np.eye(size**2) - np.kron(a, a), (b @ b.T).ravel())
    covariance = covariance.reshape(size, size)
    if dynamics.has_thermostat:
        # It cools or heats until momenta have the unit variance that the step alone denies them.
        covariance = covariance / covariance[1, 1]
    return covariance
