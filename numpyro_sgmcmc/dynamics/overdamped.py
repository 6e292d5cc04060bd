r"""Overdamped Langevin dynamics (SGLD).

.. math:: d\theta = -\nabla U(\theta)\,dt + \sqrt{2}\,dW

Stationary density :math:`\propto e^{-U(\theta)}`.

Reference: Welling and Teh (2011), *Bayesian learning via stochastic gradient Langevin dynamics*;
their :math:`\epsilon` is :math:`2h`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from numpyro_sgmcmc.dynamics.base import Dynamics
from numpyro_sgmcmc.dynamics.integrators import Flow, GradientFn, Integrator, Part

__all__ = ["OverdampedLangevin", "OverdampedState"]


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
