"""What a step of finite size makes of a standard normal, exactly where the step is linear.

Of a stationary chain the mean of all kicks is zero. So it is where gradients are taken that the
means of a posterior come right, and there the variances should be right: a scale that thousands of
effects share follows what spread these have at the kicks.
"""

from __future__ import annotations

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.interpreters.ad import JVPTracer

from numpyro_sgmcmc.dynamics import Dynamics

__all__ = ["kick_excess"]

_STANDS_STILL = 1.0 - 1e-6  # a state of which a step leaves so much: rounding hides what it does


@lru_cache(maxsize=64)
def kick_excess(dynamics: Dynamics, scheme: str, step_size: float) -> float:
    """Relative excess of a unit variance where gradients are taken, with exact ones.

    :param scheme: name of the integrator.
    :return: the mean over a step's gradients; zero for an SDE of which no linear form is known, and
        for a step that changes next to nothing.
    """
    linear = dynamics.linearised
    if linear is None or scheme not in linear.schemes:
        return 0.0
    if any(part.every > 1 for part in linear.schemes[scheme].parts):
        return 0.0
    step = linear.step(scheme)
    zero, unravel = ravel_pytree(linear.init(jnp.zeros(1), jax.random.key(0)))
    size = zero.size

    def response(entries: Array) -> tuple[Array, Array]:
        """The state after a step, and where it asked for gradients."""
        state, noise, places = unravel(entries[:size]), entries[size:, None], []

        def gradient(q: Array) -> Array:
            if not isinstance(q, JVPTracer):  # of a derivative
                places.append(q)
            return q

        end = step(state, step_size, gradient, noise)
        return ravel_pytree(end)[0], jnp.concatenate(places)

    inputs = np.eye(size + step.draws, dtype=zero.dtype)
    ends, places = jax.jit(jax.vmap(response, out_axes=1))(inputs)
    moved, at = np.asarray(ends, float), np.asarray(places, float)
    a, b = moved[:, :size], moved[:, size:]
    if np.abs(np.linalg.eigvals(a)).max() > _STANDS_STILL:
        return 0.0
    covariance = np.linalg.solve(np.eye(size**2) - np.kron(a, a), (b @ b.T).ravel())
    covariance = covariance.reshape(size, size)
    if dynamics.has_thermostat:
        # It cools or heats until momenta have the unit variance that the step alone denies them.
        covariance = covariance / covariance[1, 1]
    variances = ((at[:, :size] @ covariance) * at[:, :size]).sum(1) + np.square(at[:, size:]).sum(1)
    return float(variances.mean() - 1.0)
