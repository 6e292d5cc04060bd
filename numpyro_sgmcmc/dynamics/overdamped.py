r"""Overdamped Langevin dynamics (SGLD).

.. math:: d\theta = -\nabla U(\theta)\,dt + \sqrt{2}\,dW

Stationary density :math:`\propto e^{-U(\theta)}`.

Reference: Welling and Teh (2011), *Bayesian learning via stochastic gradient Langevin dynamics*;
their :math:`\epsilon` is :math:`2h`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from numpyro_sgmcmc.integrators import Flow, GradientFn, Scheme

__all__ = ["Overdamped", "OverdampedState"]


class OverdampedState(NamedTuple):
    """- **position** - whitened position, shape ``(d,)``."""

    position: Array


def _euler(
    state: OverdampedState, time: Any, gradient: GradientFn, noise: Array
) -> OverdampedState:
    (q,) = state
    return OverdampedState(q - time * gradient(q) + jnp.sqrt(2.0 * time) * noise[0])


@dataclass(frozen=True)
class Overdamped:
    """Overdamped Langevin dynamics with unit mass."""

    schemes: ClassVar[Mapping[str, Scheme]] = {"euler": Scheme((("euler", 1.0),), order=1)}

    relaxation_time: ClassVar[float] = 2.0

    def init(self, position: Array, rng_key: Array) -> OverdampedState:
        return OverdampedState(position)

    def flows(self) -> Mapping[str, Flow]:
        return {"euler": _euler}

    def noise_inflation(self, gradient_variance: Any, step_size: Any) -> Any:
        return gradient_variance * step_size / 2.0

    def stiffness(self, curvature: Any) -> Any:
        return curvature
