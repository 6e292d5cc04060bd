"""What an SDE must tell the rest of the library about itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from jax import Array

from numpyro_sgmcmc.integrators import Flow, Scheme

__all__ = ["Dynamics"]


class Dynamics(Protocol):
    """An SDE over a flat position of shape ``(d,)`` and its auxiliary variables.

    Everything is in whitened coordinates: unit mass, posterior covariance about the identity.
    A state is a NamedTuple of arrays whose field ``position`` is the position.
    """

    schemes: ClassVar[Mapping[str, Scheme]]
    """The schemes that this SDE has, by name."""

    @property
    def relaxation_time(self) -> float:
        """Time between about independent draws of a whitened Gaussian."""
        ...

    def init(self, position: Array, rng_key: Array) -> Any:
        """The state at ``position``, auxiliary variables drawn from their stationary law."""
        ...

    def flows(self) -> Mapping[str, Flow]:
        """The flows from which the schemes are composed, by name."""
        ...

    def noise_inflation(self, gradient_variance: Any, step_size: Any) -> Any:
        """Predicted relative excess of a unit posterior variance.

        :param gradient_variance: variance of the gradient's estimate, a coordinate.
        :param step_size: step size.
        """
        ...

    def stiffness(self, curvature: Any) -> Any:
        """How many times shorter a step must be at ``curvature`` than at curvature one."""
        ...
