r"""Dynamics with softened monomial-gamma kinetics: SGMGT, its "D" form, and Laplacian HMC.

The thermostat, elementwise:

.. math::

    d\theta &= (\nabla K(p) - \sigma_\theta\nabla U(\theta))\,dt + \sqrt{2\sigma_\theta}\,dW_1 \\
    dp &= (-\nabla U(\theta) - \xi\nabla K(p))\,dt + \sqrt{2\sigma_p}\,dW_2 \\
    d\xi &= (\gamma[\nabla K(p)^2 - \nabla^2 K(p)] - \tfrac{\sigma_\xi}{\gamma}(\xi - \sigma_p))\,dt
            + \sqrt{2\sigma_\xi}\,dW_3

with stationary density :math:`\propto e^{-U(\theta) - K(p) - (\xi - \sigma_p)^2/2\gamma}`. The "D"
form has :math:`\sigma_\theta, \sigma_\xi > 0`; without it both are zero. A fixed friction
:math:`\xi = A` gives the stochastic Laplacian HMC.

Reference: Zhang, Chen, Gan, Henao and Carin (2017), *Stochastic gradient monomial gamma sampler*,
appendix E, and equation (27) for the Laplacian HMC. The thermostat's resampling law and the middle
flow of its splitting are misprinted there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, random

from numpyro_sgmcmc.dynamics.base import Dynamics
from numpyro_sgmcmc.dynamics.compensation import GradientNoiseCovariance
from numpyro_sgmcmc.dynamics.integrators import (
    SYMMETRIC_SPLITTING,
    Flow,
    GradientFn,
    Integrator,
    Part,
)
from numpyro_sgmcmc.dynamics.kinetics import LAPLACE_KINETICS, Kinetics

__all__ = [
    "MonomialGammaLangevin",
    "MonomialGammaLangevinState",
    "MonomialGammaState",
    "MonomialGammaThermostat",
]


class MonomialGammaState(NamedTuple):
    """
    - **position** - whitened position, shape ``(d,)``.
    - **momentum** - momentum, shape ``(d,)``.
    - **thermostat** - friction, one a coordinate, shape ``(d,)``.
    """

    position: Array
    momentum: Array
    thermostat: Array


@dataclass(frozen=True)
class MonomialGammaThermostat(Dynamics):
    r"""The monomial-gamma thermostat.

    :param Kinetics kinetics: kinetic energy.
    :param float sigma_p: noise of the momentum and the friction's stationary mean, positive.
    :param float gamma: the friction's stationary variance, positive.
    :param float sigma_theta: noise of the position, not negative.
    :param float sigma_xi: noise of the friction, not negative.
    :param int momentum_period: steps between fresh momenta; None for never.
    :param int thermostat_period: steps between fresh frictions; None for never.
    """

    kinetics: Kinetics = LAPLACE_KINETICS
    sigma_p: float = 1.5
    gamma: float = 1.0
    sigma_theta: float = 0.0
    sigma_xi: float = 0.0
    momentum_period: int | None = 100
    thermostat_period: int | None = 100

    State = MonomialGammaState
    has_thermostat = True

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
        draws = 1 + (self.sigma_theta > 0.0) + (self.sigma_xi > 0.0)
        return {
            "drift": Flow(self._drift),
            "friction": Flow(self._friction),
            "noisy_kick": Flow(self._noisy_kick, num_gradients=1, num_noise=draws),
            "euler": Flow(self._euler, num_gradients=1, num_noise=draws),
        }

    @property
    def resampling_periods(self) -> Mapping[str, int]:
        periods = {"momentum": self.momentum_period, "thermostat": self.thermostat_period}
        return {field: period for field, period in periods.items() if period is not None}

    def sample_auxiliary(
        self, name: str, rng_key: Array, shape: tuple[int, ...], dtype: Any
    ) -> Array:
        if name == "momentum":
            return self.kinetics.sample_momentum(rng_key, shape, dtype)
        return self.sigma_p + math.sqrt(self.gamma) * random.normal(rng_key, shape, dtype)

    def energy(self, state: MonomialGammaState) -> Array:
        off = jnp.square(state.thermostat - self.sigma_p) / (2.0 * self.gamma)
        return (self.kinetics.energy(state.momentum) + off).sum()

    def kinetic_temperature(self, state: MonomialGammaState) -> Array:
        return (state.momentum * self.kinetics.velocity(state.momentum)).mean()

    def relaxation_time(self, step_size: Any, gradient_variance: Any = 0.0) -> float:
        friction = self.sigma_p + gradient_variance * step_size / 2.0
        return 3.0 * max(friction, 1.0 / friction)

    def variance_inflation(
        self, gradient_variance: Any, step_size: Any, position_dependent_fraction: float = 1.0
    ) -> float:
        return gradient_variance * step_size / (2.0 * self.sigma_p)

    def compensate_gradient_noise(
        self, state: Any, normals: Array, step_size: Any, noise_covariance: GradientNoiseCovariance
    ) -> Array:
        # The momentum's row and the position's, where it has one, hear the same gradient.
        heard = [1.0 / math.sqrt(self.sigma_p)]
        if self.sigma_theta > 0.0:
            heard.append(math.sqrt(self.sigma_theta))
        size = math.hypot(*heard)
        direction = jnp.zeros(len(normals)).at[: len(heard)].set(jnp.array(heard) / size)
        along = direction @ normals
        shrunk = noise_covariance.subtract_from(along, step_size * size**2 / 2.0)
        return normals + jnp.outer(direction, shrunk - along)

    def stiffness(self, curvature: float) -> float:
        return curvature if self.sigma_theta > 0.0 else math.sqrt(curvature)

    def _thermostat_drift(self, p: Array) -> Array:
        """The rate at which the thermostat rises, but for its own friction."""
        k = self.kinetics
        return self.gamma * (jnp.square(k.velocity(p)) - k.curvature(p))

    def _drift(
        self, state: MonomialGammaState, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> MonomialGammaState:
        q, p, xi = state
        rate = self.sigma_xi / self.gamma
        # The thermostat's equation is linear at a fixed momentum.
        length = -jnp.expm1(-rate * time) / rate if rate > 0.0 else time
        xi = xi + length * (self._thermostat_drift(p) - rate * (xi - self.sigma_p))
        return MonomialGammaState(q + time * self.kinetics.velocity(p), p, xi)

    def _friction(
        self, state: MonomialGammaState, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> MonomialGammaState:
        q, p, xi = state
        return MonomialGammaState(q, self.kinetics.apply_friction(p, xi * time), xi)

    def _noisy_kick(
        self, state: MonomialGammaState, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> MonomialGammaState:
        q, p, xi = state
        g = gradient_fn(q)
        used = 1
        p = p - time * g + jnp.sqrt(2.0 * self.sigma_p * time) * normals[0]
        if self.sigma_theta > 0.0:
            spread = jnp.sqrt(2.0 * self.sigma_theta * time)
            q = q - self.sigma_theta * time * g + spread * normals[used]
            used += 1
        if self.sigma_xi > 0.0:
            xi = xi + jnp.sqrt(2.0 * self.sigma_xi * time) * normals[used]
        return MonomialGammaState(q, p, xi)

    def _euler(
        self, state: MonomialGammaState, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> MonomialGammaState:
        q, p, xi = self._noisy_kick(state, time, gradient_fn, normals)
        p = p - time * state.thermostat * self.kinetics.velocity(state.momentum)
        rate = self._thermostat_drift(p) - self.sigma_xi / self.gamma * (
            state.thermostat - self.sigma_p
        )
        return MonomialGammaState(q + time * self.kinetics.velocity(p), p, xi + time * rate)


class MonomialGammaLangevinState(NamedTuple):
    """
    - **position** - whitened position, shape ``(d,)``.
    - **momentum** - momentum, shape ``(d,)``.
    """

    position: Array
    momentum: Array


@dataclass(frozen=True)
class MonomialGammaLangevin(Dynamics):
    r"""Langevin dynamics with monomial-gamma kinetics and a fixed friction.

    :param Kinetics kinetics: kinetic energy.
    :param float friction: friction coefficient A, positive.
    """

    kinetics: Kinetics = LAPLACE_KINETICS
    friction: float = 1.5

    State = MonomialGammaLangevinState

    @property
    def integrators(self) -> Mapping[str, Integrator]:
        return {
            "euler": Integrator((Part("damped_kick"), Part("drift")), order=1, step_size=0.05),
            "symmetric": Integrator(SYMMETRIC_SPLITTING, order=2, step_size=0.2),
        }

    @property
    def flows(self) -> Mapping[str, Flow]:
        return {
            "drift": Flow(self._drift),
            "friction": Flow(self._friction),
            "noisy_kick": Flow(self._noisy_kick, num_gradients=1, num_noise=1),
            "damped_kick": Flow(self._damped_kick, num_gradients=1, num_noise=1),
        }

    def sample_auxiliary(
        self, name: str, rng_key: Array, shape: tuple[int, ...], dtype: Any
    ) -> Array:
        return self.kinetics.sample_momentum(rng_key, shape, dtype)

    def energy(self, state: MonomialGammaLangevinState) -> Array:
        return self.kinetics.energy(state.momentum).sum()

    def kinetic_temperature(self, state: MonomialGammaLangevinState) -> Array:
        return (state.momentum * self.kinetics.velocity(state.momentum)).mean()

    def relaxation_time(self, step_size: Any, gradient_variance: Any = 0.0) -> float:
        return 3.0 * max(self.friction, 1.0 / self.friction)

    def variance_inflation(
        self, gradient_variance: Any, step_size: Any, position_dependent_fraction: float = 1.0
    ) -> float:
        return gradient_variance * step_size / (2.0 * self.friction)

    def stiffness(self, curvature: float) -> float:
        return math.sqrt(curvature)

    def _drift(
        self, state: MonomialGammaLangevinState, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> MonomialGammaLangevinState:
        q, p = state
        return MonomialGammaLangevinState(q + time * self.kinetics.velocity(p), p)

    def _friction(
        self, state: MonomialGammaLangevinState, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> MonomialGammaLangevinState:
        q, p = state
        return MonomialGammaLangevinState(q, self.kinetics.apply_friction(p, self.friction * time))

    def _noisy_kick(
        self, state: MonomialGammaLangevinState, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> MonomialGammaLangevinState:
        q, p = state
        scale = jnp.sqrt(2.0 * self.friction * time)
        return MonomialGammaLangevinState(q, p - time * gradient_fn(q) + scale * normals[0])

    def _damped_kick(
        self, state: MonomialGammaLangevinState, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> MonomialGammaLangevinState:
        q, p = self._noisy_kick(state, time, gradient_fn, normals)
        return MonomialGammaLangevinState(
            q, p - time * self.friction * self.kinetics.velocity(state.momentum)
        )
