r"""Overdamped Langevin dynamics (SGLD).

.. math:: d\theta = -\nabla U(\theta)\,dt + \sqrt{2}\,dW

Stationary density :math:`\propto e^{-U(\theta)}`.

Reference: Welling and Teh (2011), *Bayesian learning via stochastic gradient Langevin dynamics*;
their :math:`\epsilon` is :math:`2h`.

Underdamped Langevin dynamics (SGHMC, SHMC) and its integrators up to order three.

.. math::

    d\theta = p\,dt, \qquad
    dp = -\nabla U(\theta)\,dt - \gamma p\,dt + \sqrt{2\gamma}\,dW

Stationary density :math:`\propto e^{-U(\theta) - p^\top p/2}`.

References: Chen, Fox and Guestrin (2014), *Stochastic gradient Hamiltonian Monte Carlo*; Chen,
Ding and Carin (2015), *On the convergence of stochastic gradient MCMC algorithms with high-order
integrators*, section 2 and equation (8), where :math:`\gamma` is :math:`D`; Franzese, Milios,
Filippone and Michiardi (2021), *Revisiting the effects of stochasticity for Hamiltonian
samplers*, appendix B.5; Leimkuhler and Matthews (2013), *Rational construction of stochastic
numerical methods for molecular sampling*.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
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

__all__ = [
    "OverdampedLangevin",
    "OverdampedState",
    "UnderdampedLangevin",
    "UnderdampedState",
]


class OverdampedState(NamedTuple):
    """- **position** - whitened position, shape ``(d,)``."""

    position: Array


@dataclass(frozen=True)
class OverdampedLangevin(Dynamics):
    """Overdamped Langevin dynamics with unit mass."""

    State = OverdampedState

    @property
    def integrators(self) -> Mapping[str, Integrator]:
        return {"euler": Integrator((Part("euler"),), order=1, step_size=0.05)}

    @property
    def linear_approximation(self) -> OverdampedLangevin:
        return self

    @property
    def flows(self) -> Mapping[str, Flow]:
        return {"euler": Flow(_euler_maruyama_overdamped, num_gradients=1, num_noise=1)}

    def relaxation_time(self, step_size: Any, gradient_variance: Any = 0.0) -> float:
        return 2.0

    def variance_inflation(
        self, gradient_variance: Any, step_size: Any, position_dependent_fraction: float = 1.0
    ) -> float:
        return gradient_variance * step_size / 2.0

    def stiffness(self, curvature: float) -> float:
        return curvature


def _euler_maruyama_overdamped(
    state: OverdampedState, time: Any, gradient_fn: GradientFn, normals: Array
) -> OverdampedState:
    (q,) = state
    return OverdampedState(q - time * gradient_fn(q) + jnp.sqrt(2.0 * time) * normals[0])


class UnderdampedState(NamedTuple):
    """
    - **position** - whitened position, shape ``(d,)``.
    - **momentum** - momentum at unit mass, shape ``(d,)``.
    - **gradient** - the last kick's gradient, for schemes that use it twice; None for others.
    """

    position: Array
    momentum: Array
    gradient: Array | None = None


@dataclass(frozen=True)
class UnderdampedLangevin(Dynamics):
    """Underdamped Langevin dynamics with unit mass.

    :param float friction: friction coefficient, positive, in units of one over time.
    :param int num_leapfrog: leapfrog steps between refreshments, for Lie-Trotter; None for
        other schemes.
    :param bool keeps_gradient: whether the state keeps the last gradient, as BAOAB and OBABO need.
    """

    friction: float = 1.5
    num_leapfrog: int | None = None
    is_fsal: bool = False

    State = UnderdampedState

    @property
    def has_default_settings(self) -> bool:
        # One leapfrog step between refreshments is Lie-Trotter's default, and what the state keeps
        # is up to the scheme.
        return self.friction == type(self).friction and self.num_leapfrog in (None, 1)

    @property
    def integrators(self) -> Mapping[str, Integrator]:
        leapfrog = (Part("drift", 0.5), Part("kick"), Part("drift", 0.5))
        found = {
            "euler": Integrator((Part("damped_kick"), Part("drift")), order=1, step_size=0.1),
            "explicit_euler": Integrator((Part("explicit_euler"),), order=1, step_size=0.03),
            "leapfrog": Integrator(
                (Part("drift", 0.5), Part("damped_kick"), Part("drift", 0.5)), 1, step_size=0.3
            ),
            "symmetric": Integrator(SYMMETRIC_SPLITTING, order=2, step_size=0.3),
            "lie_trotter": Integrator(
                (*leapfrog, Part("fluctuation", every_n_steps=self.num_leapfrog or 1)),
                2,
                step_size=0.3,
            ),
            "mt3": Integrator((Part("mt3"),), order=3, step_size=0.5),
        }
        if self.is_fsal:
            found["baoab"] = Integrator(
                (
                    Part("kept_kick", 0.5),
                    Part("drift", 0.5),
                    Part("fluctuation"),
                    Part("drift", 0.5),
                    Part("kick", 0.5),
                ),
                order=2,
                step_size=0.3,
                gradient_at_end=True,
            )
            found["obabo"] = Integrator(
                (
                    Part("fluctuation", 0.5),
                    Part("kept_kick", 0.5),
                    Part("drift"),
                    Part("kick", 0.5),
                    Part("fluctuation", 0.5),
                ),
                order=2,
                step_size=0.3,
                gradient_at_end=True,
            )
        return found

    @property
    def linear_approximation(self) -> UnderdampedLangevin:
        return self

    @property
    def flows(self) -> Mapping[str, Flow]:
        return {
            "drift": Flow(self._drift),
            "friction": Flow(self._friction),
            "fluctuation": Flow(self._ornstein_uhlenbeck, num_noise=1),
            "kick": Flow(self._kick, num_gradients=1),
            "kept_kick": Flow(self._fsal_kick),
            "noisy_kick": Flow(self._noisy_kick, num_gradients=1, num_noise=1),
            "damped_kick": Flow(self._damped_kick, num_gradients=1, num_noise=1),
            "explicit_euler": Flow(self._explicit_euler, num_gradients=1, num_noise=1),
            "mt3": Flow(self._mt3, num_gradients=3, num_noise=2),
        }

    def sample_auxiliary(
        self, name: str, rng_key: Array, shape: tuple[int, ...], dtype: Any
    ) -> Array:
        return random.normal(rng_key, shape, dtype)

    def init(self, position: Array, rng_key: Array) -> UnderdampedState:
        momentum = self.sample_auxiliary("momentum", rng_key, position.shape, position.dtype)
        kept = jnp.zeros_like(position) if self.is_fsal else None
        return UnderdampedState(position, momentum, kept)

    def energy(self, state: UnderdampedState) -> Array:
        return jnp.square(state.momentum).sum() / 2.0

    def kinetic_temperature(self, state: UnderdampedState) -> Array:
        return jnp.square(state.momentum).mean()

    def relaxation_time(self, step_size: Any, gradient_variance: Any = 0.0) -> float:
        friction = self._effective_friction(step_size)
        return 2.0 * max(friction, 1.0 / friction)

    def autocorrelation(self, lag: np.ndarray, step_size: Any) -> np.ndarray:
        return damped_oscillator_autocorrelation(self._effective_friction(step_size), lag)

    def variance_inflation(
        self, gradient_variance: Any, step_size: Any, position_dependent_fraction: float = 1.0
    ) -> float:
        return gradient_variance * step_size / (2.0 * self._effective_friction(step_size))

    @property
    def max_step_size(self) -> float:
        # Refreshed every half period, a direction of unit curvature would only change its sign.
        return math.inf if self.num_leapfrog is None else 1.5 / self.num_leapfrog

    def stiffness(self, curvature: float) -> float:
        return math.sqrt(curvature)

    def _effective_friction(self, step_size: float) -> float:
        """The friction that takes away as much between refreshments as the refreshment does."""
        if self.num_leapfrog is None:
            return self.friction
        length = self.num_leapfrog * step_size
        return math.tanh(self.friction * length) / length

    def _drift(
        self, state: UnderdampedState, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> UnderdampedState:
        return state._replace(position=state.position + time * state.momentum)

    def _friction(
        self, state: UnderdampedState, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> UnderdampedState:
        return state._replace(momentum=jnp.exp(-self.friction * time) * state.momentum)

    def _ornstein_uhlenbeck(
        self, state: UnderdampedState, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> UnderdampedState:
        """Friction and noise together: an Ornstein-Uhlenbeck process, solved exactly."""
        spread = jnp.sqrt(-jnp.expm1(-2.0 * self.friction * time))
        state = self._friction(state, time, gradient_fn, normals)
        return state._replace(momentum=state.momentum + spread * normals[0])

    def _kick(
        self, state: UnderdampedState, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> UnderdampedState:
        g = gradient_fn(state.position)
        kept = g if self.is_fsal else None
        return UnderdampedState(state.position, state.momentum - time * g, kept)

    def _fsal_kick(
        self, state: UnderdampedState, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> UnderdampedState:
        return state._replace(momentum=state.momentum - time * state.gradient)

    def _noisy_kick(
        self, state: UnderdampedState, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> UnderdampedState:
        state = self._kick(state, time, gradient_fn, normals)
        scale = jnp.sqrt(2.0 * self.friction * time)
        return state._replace(momentum=state.momentum + scale * normals[0])

    def _damped_kick(
        self, state: UnderdampedState, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> UnderdampedState:
        kicked = self._noisy_kick(state, time, gradient_fn, normals)
        damping = self.friction * time * state.momentum
        return kicked._replace(momentum=kicked.momentum - damping)

    def _explicit_euler(
        self, state: UnderdampedState, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> UnderdampedState:
        kicked = self._damped_kick(state, time, gradient_fn, normals)
        return kicked._replace(position=state.position + time * state.momentum)

    def _mt3(
        self, state: UnderdampedState, h: Any, gradient_fn: GradientFn, normals: Array
    ) -> UnderdampedState:
        """Third order, after Milstein and Tretyakov (2003); Franzese et al. (2021), B.5.2.

        The stages are implicit in the momentum, but linear, and solved here.
        """
        q, p, friction = state.position, state.momentum, self.friction
        w1, w2 = normals[0], normals[1] / math.sqrt(12.0)
        root = (2.0 * friction) ** 0.5

        def stage(q: Array, p: Array, part: float) -> tuple[Array, Array]:
            """The momentum r with r = p + part h F(q, r), and that force."""
            g = gradient_fn(q)
            r = (p - part * h * g) / (1.0 + part * h * friction)
            return r, -g - friction * r

        _, f1 = stage(q + 7 / 24 * h * p, p, 7 / 24)
        q2 = q + 25 / 24 * h * p + h**2 / 2 * f1
        _, f2 = stage(q2, p + 2 / 3 * h * f1, 3 / 8)
        q3 = q + h * p + h**2 * (17 / 36 * f1 + f2 / 36)
        p3, _ = stage(q3, p + 2 / 3 * h * (f1 - f2), 1.0)
        bend = jax.jvp(gradient_fn, (q3,), (w1,))[1]
        half = w1 / 2.0 + w2
        q_noise = h**1.5 * half - friction * h**2.5 * w1 / 6.0
        p_noise = h**0.5 * w1 - friction * h**1.5 * half + h**2.5 * (friction**2 * w1 - bend) / 6.0
        return state._replace(position=q3 + root * q_noise, momentum=p3 + root * p_noise)
