r"""Thermostats: dynamics whose friction :math:`\xi` is a variable of the SDE.

The friction rises while the kinetic temperature is above one, whatever the cause, so that gradient
noise of a constant size does not widen the posterior.

:class:`NoseHooverThermostat` (SGNHT):

.. math::

    d\theta = p\,dt, \qquad
    dp = -\nabla U(\theta)\,dt - \xi p\,dt + \sqrt{2A}\,dW, \qquad
    d\xi = \left(\tfrac{p^\top p}{n} - 1\right)dt

with stationary density :math:`\propto e^{-U(\theta) - p^\top p/2 - n(\xi - A)^2/2}`, where
:math:`n` is the number of coordinates that share a thermostat: all of them, or one each.

:class:`MonomialGammaThermostat` (SGMGT and its "D" form), elementwise:

.. math::

    d\theta &= (\nabla K(p) - \sigma_\theta\nabla U(\theta))\,dt + \sqrt{2\sigma_\theta}\,dW_1 \\
    dp &= (-\nabla U(\theta) - \xi\nabla K(p))\,dt + \sqrt{2\sigma_p}\,dW_2 \\
    d\xi &= (\gamma[\nabla K(p)^2 - \nabla^2 K(p)] - \tfrac{\sigma_\xi}{\gamma}(\xi - \sigma_p))\,dt
            + \sqrt{2\sigma_\xi}\,dW_3

with stationary density :math:`\propto e^{-U(\theta) - K(p) - (\xi - \sigma_p)^2/2\gamma}`. The "D"
form has :math:`\sigma_\theta, \sigma_\xi > 0`; without it both are zero.

References: those of the kernels. The stationary density of Chen, Ding and Carin (2015) lacks the
factor :math:`n`; Zhang et al. (2017) misprint the thermostat's resampling distribution and the
middle flow of the splitting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, random

from numpyro_sgmcmc.dynamics.base import Dynamics, GradientNoiseCovariance
from numpyro_sgmcmc.dynamics.integrators import (
    SYMMETRIC_SPLITTING,
    Flow,
    GradientFn,
    Integrator,
    Part,
)
from numpyro_sgmcmc.dynamics.langevin import (
    LAPLACE_KINETICS,
    Kinetics,
    UnderdampedDynamics,
    UnderdampedLangevin,
)

# Gradient noise V that is the same everywhere inflates variances by this fraction of h^2 V if each
# coordinate has a thermostat: fitted to simulated Gaussians.
_RESIDUAL_INFLATION = 1.0 / 16.0


class ThermostatState(NamedTuple):
    """State with a momentum of shape ``(d,)`` and a thermostat, the friction.

    The thermostat has shape ``()``, or ``(d,)`` for one per coordinate.
    """

    position: Array
    momentum: Array
    thermostat: Array


class ThermostatDynamics(UnderdampedDynamics):
    r"""Base of the thermostats: the friction is the state's ``thermostat``.

    It rises at the rate :math:`\gamma[\nabla K(p)^2 - \nabla^2 K(p)]`, or its mean over coordinates
    if these share one, which for Gaussian momenta is the kinetic temperature minus one.
    """

    State = ThermostatState
    has_thermostat = True

    gamma: float = 1.0
    """Stationary variance of a thermostat, times the number of coordinates that share it."""

    per_coordinate: bool = True
    """Whether there is one thermostat per coordinate; otherwise all share one."""

    @property
    def balances_constant_noise(self) -> bool:
        """True if gradient noise that is the same everywhere hardly widens the posterior."""
        return self.per_coordinate

    def sample_auxiliary(
        self, name: str, rng_key: Array, shape: tuple[int, ...], dtype: Any
    ) -> Array:
        if name == "momentum":
            return super().sample_auxiliary(name, rng_key, shape, dtype)
        if not self.per_coordinate:
            return self.friction + random.normal(rng_key, shape[:-1], dtype) / math.sqrt(shape[-1])
        return self.friction + math.sqrt(self.gamma) * random.normal(rng_key, shape, dtype)

    def energy(self, state: ThermostatState) -> Array:
        num_shared = 1 if self.per_coordinate else state.position.size
        squares = jnp.square(state.thermostat - self.friction).sum()
        return super().energy(state) + num_shared * squares / (2.0 * self.gamma)

    def variance_inflation(
        self, gradient_variance: Any, step_size: Any, position_dependent_fraction: float = 1.0
    ) -> float:
        variance_inflation = super().variance_inflation(gradient_variance, step_size)
        if not self.balances_constant_noise:
            return variance_inflation
        residual = _RESIDUAL_INFLATION * gradient_variance * step_size**2
        return residual + position_dependent_fraction * variance_inflation

    def gradient_noise_fraction(self, step_size: Any) -> float:
        # The ratio of variances of one kick, in which the thermostats take no part.
        return super().variance_inflation(1.0, step_size)

    def thermostat_drift(self, p: Array) -> Array:
        """Return the rate at which the thermostat rises at a momentum."""
        squares, curvature = jnp.square(self.kinetics.velocity(p)), self.kinetics.curvature(p)
        if not self.per_coordinate:
            squares, curvature = squares.mean(), curvature.mean()
        return self.gamma * (squares - curvature)

    def _friction(self, state: ThermostatState) -> Array:
        return state.thermostat

    def _drift(self, state: Any, time: Any, gradient_fn: GradientFn, normals: Array) -> Any:
        moved = super()._drift(state, time, gradient_fn, normals)
        thermostat = state.thermostat + time * self.thermostat_drift(state.momentum)
        return moved._replace(thermostat=thermostat)


@dataclass(frozen=True)
class NoseHooverThermostat(ThermostatDynamics):
    """The Nosé-Hoover thermostat with unit mass.

    :param float friction: injected noise A, positive; without gradient noise, the mean friction.
    :param bool per_coordinate: whether there is one thermostat per coordinate. Otherwise all
        coordinates share one.
    """

    friction: float = 1.5
    per_coordinate: bool = True

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


@dataclass(frozen=True)
class MonomialGammaThermostat(ThermostatDynamics):
    r"""The monomial-gamma thermostat, one per coordinate.

    :param Kinetics kinetics: kinetic energy.
    :param float sigma_p: noise of the momentum and stationary mean of the friction, positive.
    :param float gamma: stationary variance of the friction, positive.
    :param float sigma_theta: noise of the position, not negative.
    :param float sigma_xi: noise of the friction, not negative.
    :param int momentum_period: steps between momentum resamplings, or None for no resampling.
    :param int thermostat_period: steps between friction resamplings, or None for no resampling.
    """

    kinetics: Kinetics = LAPLACE_KINETICS
    sigma_p: float = 1.5
    gamma: float = 1.0
    sigma_theta: float = 0.0
    sigma_xi: float = 0.0
    momentum_period: int | None = 100
    thermostat_period: int | None = 100

    relaxation_factor = 3.0  # as MonomialGammaLangevin
    autocorrelation = Dynamics.autocorrelation

    @property
    def integrators(self) -> Mapping[str, Integrator]:
        # With noise in the position the middle flow is not exact.
        order = 1 if self.sigma_theta > 0.0 else 2
        return {
            "euler": Integrator((Part("euler"),), order=1, step_size=0.05),
            "symmetric": Integrator(SYMMETRIC_SPLITTING, order=order, step_size=0.2),
        }

    @property
    def flows(self) -> Mapping[str, Flow]:
        num_noise = 1 + (self.sigma_theta > 0.0) + (self.sigma_xi > 0.0)
        return {
            "drift": Flow(self._drift),
            "friction": Flow(self._apply_friction),
            "noisy_kick": Flow(self._noisy_kick, num_gradients=1, num_noise=num_noise),
            "euler": Flow(self._euler, num_gradients=1, num_noise=num_noise),
        }

    @property
    def friction(self) -> float:
        return self.sigma_p

    @property
    def balances_constant_noise(self) -> bool:
        return self.sigma_theta == 0.0  # no thermostat balances the noise of the position

    def compensate_gradient_noise(
        self, state: Any, normals: Array, step_size: Any, noise_covariance: GradientNoiseCovariance
    ) -> Array:
        # One gradient moves the momentum and, with sigma_theta, the position: its noise lies along
        # one direction of the two vectors of normals.
        coefficients = [1.0 / math.sqrt(self.sigma_p)]
        if self.sigma_theta > 0.0:
            coefficients.append(math.sqrt(self.sigma_theta))
        size = math.hypot(*coefficients)
        unit = jnp.array(coefficients) / size
        direction = jnp.zeros(len(normals)).at[: unit.size].set(unit)
        along = direction @ normals
        compensated = noise_covariance.subtract_from(along, step_size * size**2 / 2.0)
        return normals + jnp.outer(direction, compensated - along)

    def stiffness(self, curvature: float) -> float:
        return curvature if self.sigma_theta > 0.0 else super().stiffness(curvature)

    def _drift(self, state: Any, time: Any, gradient_fn: GradientFn, normals: Array) -> Any:
        moved = super()._drift(state, time, gradient_fn, normals)
        rate = self.sigma_xi / self.gamma
        if rate == 0.0:
            return moved
        # At a fixed momentum the thermostat's equation is linear, and solved exactly.
        xi, length = state.thermostat, -jnp.expm1(-rate * time) / rate
        xi = xi + length * (self.thermostat_drift(state.momentum) - rate * (xi - self.sigma_p))
        return moved._replace(thermostat=xi)

    def _apply_gradient(self, state: ThermostatState, time: Any, gradient: Array) -> Any:
        kicked = super()._apply_gradient(state, time, gradient)
        if self.sigma_theta == 0.0:
            return kicked
        return kicked._replace(position=state.position - self.sigma_theta * time * gradient)

    def _noisy_kick(self, state: Any, time: Any, gradient_fn: GradientFn, normals: Array) -> Any:
        q, p, xi = super()._noisy_kick(state, time, gradient_fn, normals)
        used = 1
        if self.sigma_theta > 0.0:
            q = q + jnp.sqrt(2.0 * self.sigma_theta * time) * normals[used]
            used += 1
        if self.sigma_xi > 0.0:
            xi = xi + jnp.sqrt(2.0 * self.sigma_xi * time) * normals[used]
        return ThermostatState(q, p, xi)

    def _euler(self, state: Any, time: Any, gradient_fn: GradientFn, normals: Array) -> Any:
        q, p, xi = self._damped_kick(state, time, gradient_fn, normals)
        own_drift = self.sigma_xi / self.gamma * (state.thermostat - self.sigma_p)
        rate = self.thermostat_drift(p) - own_drift
        return ThermostatState(q + time * self.kinetics.velocity(p), p, xi + time * rate)
