r"""Underdamped Langevin dynamics (SGHMC).

.. math::

    d\theta = p\,dt, \qquad
    dp = -\nabla U(\theta)\,dt - \gamma p\,dt + \sqrt{2\gamma}\,dW

Stationary density :math:`\propto e^{-U(\theta) - p^\top p/2}`.

References: Chen, Fox and Guestrin (2014), *Stochastic gradient Hamiltonian Monte Carlo*; Chen,
Ding and Carin (2015), *On the convergence of stochastic gradient MCMC algorithms with high-order
integrators*, section 2 and equation (8), where :math:`\gamma` is :math:`D`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array, random

from numpyro_sgmcmc.integrators import Flow, GradientFn, Scheme

__all__ = ["Underdamped", "UnderdampedState"]


class UnderdampedState(NamedTuple):
    """
    - **position** - whitened position, shape ``(d,)``.
    - **momentum** - momentum at unit mass, shape ``(d,)``.
    """

    position: Array
    momentum: Array


@dataclass(frozen=True)
class Underdamped:
    """Underdamped Langevin dynamics with unit mass.

    :param float friction: friction coefficient, positive, in units of one over time.
    """

    friction: float

    schemes: ClassVar[Mapping[str, Scheme]] = {
        "euler": Scheme((("euler_kick", 1.0), ("drift", 1.0)), order=1),
        "symmetric": Scheme(
            (
                ("drift", 0.5),
                ("friction", 0.5),
                ("noisy_kick", 1.0),
                ("friction", 0.5),
                ("drift", 0.5),
            ),
            order=2,
        ),
    }

    @property
    def relaxation_time(self) -> float:
        return 2.0 * max(self.friction, 1.0 / self.friction)

    def init(self, position: Array, rng_key: Array) -> UnderdampedState:
        return UnderdampedState(position, random.normal(rng_key, position.shape, position.dtype))

    def flows(self) -> Mapping[str, Flow]:
        return {
            "drift": self._drift,
            "friction": self._friction,
            "noisy_kick": self._noisy_kick,
            "euler_kick": self._euler_kick,
        }

    def noise_inflation(self, gradient_variance: Any, step_size: Any) -> Any:
        return gradient_variance * step_size / (2.0 * self.friction)

    def stiffness(self, curvature: Any) -> Any:
        return jnp.sqrt(curvature)

    def _drift(
        self, state: UnderdampedState, time: Any, gradient: GradientFn, noise: Array
    ) -> UnderdampedState:
        q, p = state
        return UnderdampedState(q + time * p, p)

    def _friction(
        self, state: UnderdampedState, time: Any, gradient: GradientFn, noise: Array
    ) -> UnderdampedState:
        q, p = state
        return UnderdampedState(q, jnp.exp(-self.friction * time) * p)

    def _noisy_kick(
        self, state: UnderdampedState, time: Any, gradient: GradientFn, noise: Array
    ) -> UnderdampedState:
        q, p = state
        scale = jnp.sqrt(2.0 * self.friction * time)
        return UnderdampedState(q, p - time * gradient(q) + scale * noise[0])

    def _euler_kick(
        self, state: UnderdampedState, time: Any, gradient: GradientFn, noise: Array
    ) -> UnderdampedState:
        q, p = self._noisy_kick(state, time, gradient, noise)
        return UnderdampedState(q, p - self.friction * time * state.momentum)
