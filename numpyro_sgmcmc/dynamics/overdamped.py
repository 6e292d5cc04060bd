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
from numpyro_sgmcmc.dynamics.integrators import Flow, GradientFn, Part, Scheme

__all__ = ["Overdamped", "OverdampedState"]


class OverdampedState(NamedTuple):
    """- **position** - whitened position, shape ``(d,)``."""

    position: Array


@dataclass(frozen=True)
class Overdamped(Dynamics):
    """Overdamped Langevin dynamics with unit mass."""

    State = OverdampedState

    @property
    def schemes(self) -> Mapping[str, Scheme]:
        return {"euler": Scheme((Part("euler"),), order=1, step_size=0.05)}

    @property
    def linearised(self) -> Overdamped:
        return self

    @property
    def flows(self) -> Mapping[str, Flow]:
        return {"euler": Flow(_euler, gradients=1, draws=1)}

    def relaxation_time(self, step_size: Any, gradient_variance: Any = 0.0) -> float:
        return 2.0

    def noise_inflation(
        self, gradient_variance: Any, step_size: Any, varying: float = 1.0
    ) -> float:
        return gradient_variance * step_size / 2.0

    def stiffness(self, curvature: float) -> float:
        return curvature


def _euler(
    state: OverdampedState, time: Any, gradient: GradientFn, noise: Array
) -> OverdampedState:
    (q,) = state
    return OverdampedState(q - time * gradient(q) + jnp.sqrt(2.0 * time) * noise[0])
