r"""The stochastic-gradient Nosé-Hoover thermostat (SGNHT).

.. math::

    d\theta = p\,dt, \qquad
    dp = -\nabla U(\theta)\,dt - \xi p\,dt + \sqrt{2A}\,dW, \qquad
    d\xi = \left(\tfrac{p^\top p}{n} - 1\right)dt

Stationary density :math:`\propto e^{-U(\theta) - p^\top p/2 - n(\xi - A)^2/2}`, with :math:`n` the
number of coordinates that share a thermostat: all of them, or one each.

The friction :math:`\xi` is a variable: it rises while the momenta are too hot, whatever heats
them, so that gradient noise of a constant size does not widen the posterior.

References: Ding, Fang, Babbush, Chen, Skeel and Neven (2014), *Bayesian sampling using stochastic
gradient thermostats*; Chen, Ding and Carin (2015), *On the convergence of stochastic gradient MCMC
algorithms with high-order integrators*, Algorithm 3 and appendix A.3, whose stationary density
lacks the factor :math:`n`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_sgmcmc.dynamics.base import Dynamics, damped_oscillator_autocorrelation
from numpyro_sgmcmc.dynamics.integrators import (
    SYMMETRIC_SPLITTING,
    Flow,
    GradientFn,
    Integrator,
    Part,
)
from numpyro_sgmcmc.dynamics.underdamped import UnderdampedLangevin

__all__ = ["NoseHooverState", "NoseHooverThermostat"]


class NoseHooverState(NamedTuple):
    """
    - **position** - whitened position, shape ``(d,)``.
    - **momentum** - momentum at unit mass, shape ``(d,)``.
    - **thermostat** - friction, shape ``()``, or ``(d,)`` with one a coordinate.
    """

    position: Array
    momentum: Array
    thermostat: Array


@dataclass(frozen=True)
class NoseHooverThermostat(Dynamics):
    """The Nosé-Hoover thermostat with unit mass.

    :param float friction: injected noise A, the friction's stationary mean; positive.
    :param bool per_coordinate: one thermostat a coordinate, in place of one for all.
    """

    friction: float = 1.5
    per_coordinate: bool = True

    State = NoseHooverState
    has_thermostat = True

    @property
    def integrators(self) -> Mapping[str, Integrator]:
        return {
            "euler": Integrator((Part("damped_kick"), Part("drift")), order=1, step_size=0.05),
            "explicit_euler": Integrator((Part("explicit_euler"),), order=1, step_size=0.03),
            "symmetric": Integrator(SYMMETRIC_SPLITTING, order=2, step_size=0.3),
        }

    @property
    def linear_approximation(self) -> UnderdampedLangevin:
        # The thermostats stay near their mean.
        return UnderdampedLangevin(self.friction)

    @property
    def flows(self) -> Mapping[str, Flow]:
        return {
            "drift": Flow(self._drift),
            "friction": Flow(self._friction),
            "noisy_kick": Flow(self._noisy_kick, num_gradients=1, num_noise=1),
            "damped_kick": Flow(self._damped_kick, num_gradients=1, num_noise=1),
            "explicit_euler": Flow(self._explicit_euler, num_gradients=1, num_noise=1),
        }

    def sample_auxiliary(
        self, name: str, rng_key: Array, shape: tuple[int, ...], dtype: Any
    ) -> Array:
        if name == "momentum":
            return random.normal(rng_key, shape, dtype)
        if self.per_coordinate:
            return self.friction + random.normal(rng_key, shape, dtype)
        return self.friction + random.normal(rng_key, shape[:-1], dtype) / math.sqrt(shape[-1])

    def energy(self, state: NoseHooverState) -> Array:
        shared = 1 if self.per_coordinate else state.position.size
        off = jnp.square(state.thermostat - self.friction).sum()
        return jnp.square(state.momentum).sum() / 2.0 + shared * off / 2.0

    def kinetic_temperature(self, state: NoseHooverState) -> Array:
        return jnp.square(state.momentum).mean()

    def relaxation_time(self, step_size: Any, gradient_variance: Any = 0.0) -> float:
        friction = self.friction + gradient_variance * step_size / 2.0
        return 2.0 * max(friction, 1.0 / friction)

    def autocorrelation(self, lag: np.ndarray, step_size: Any) -> np.ndarray:
        return damped_oscillator_autocorrelation(self.friction, lag)

    def variance_inflation(
        self, gradient_variance: Any, step_size: Any, position_dependent_fraction: float = 1.0
    ) -> float:
        inflation = gradient_variance * step_size / (2.0 * self.friction)
        if not self.per_coordinate:
            return inflation
        # What is the same everywhere the thermostats take away; simulated, about this is left.
        return gradient_variance * step_size**2 / 16.0 + position_dependent_fraction * inflation

    def gradient_noise_fraction(self, step_size: Any) -> float:
        return step_size / (2.0 * self.friction)

    def stiffness(self, curvature: float) -> float:
        return math.sqrt(curvature)

    def _thermostat_drift(self, p: Array) -> Array:
        """The rate at which the thermostat rises."""
        squares = jnp.square(p)
        return (squares if self.per_coordinate else squares.mean()) - 1.0

    def _drift(
        self, state: NoseHooverState, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> NoseHooverState:
        q, p, xi = state
        return NoseHooverState(q + time * p, p, xi + time * self._thermostat_drift(p))

    def _friction(
        self, state: NoseHooverState, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> NoseHooverState:
        q, p, xi = state
        return NoseHooverState(q, jnp.exp(-xi * time) * p, xi)

    def _noisy_kick(
        self, state: NoseHooverState, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> NoseHooverState:
        q, p, xi = state
        scale = jnp.sqrt(2.0 * self.friction * time)
        return NoseHooverState(q, p - time * gradient_fn(q) + scale * normals[0], xi)

    def _damped_kick(
        self, state: NoseHooverState, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> NoseHooverState:
        q, p, xi = self._noisy_kick(state, time, gradient_fn, normals)
        return NoseHooverState(q, p - time * xi * state.momentum, xi)

    def _explicit_euler(
        self, state: NoseHooverState, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> NoseHooverState:
        momentum = self._damped_kick(state, time, gradient_fn, normals).momentum
        return self._drift(state, time, gradient_fn, normals)._replace(momentum=momentum)
