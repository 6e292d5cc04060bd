"""What an SDE must tell the rest of the library about itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_sgmcmc.dynamics.compensation import GradientNoise
from numpyro_sgmcmc.dynamics.integrators import Flow, Scheme, Step, compose

__all__ = ["Dynamics", "damped_oscillation"]


def damped_oscillation(friction: float, time: np.ndarray) -> np.ndarray:
    """Autocorrelation of a unit oscillator's position under friction and white noise.

    :param friction: friction, not negative.
    :param time: lags, of any shape.
    """
    decay = friction / 2.0
    # Where the two rates meet, at critical friction, they are held apart. Their product is one, by
    # which the slow one is exact at any friction. Neither exponential overflows.
    fast = decay + (np.sqrt(complex(decay**2 - 1.0)) or 1e-8)
    slow = 1.0 / fast
    turned = fast * np.exp(-slow * time) - slow * np.exp(-fast * time)
    return (turned / (fast - slow)).real


@dataclass(frozen=True)
class Dynamics:
    """An SDE over a flat position of shape ``(d,)`` and its auxiliary variables.

    Everything is in whitened coordinates: unit mass, posterior covariance about the identity.
    A state is a NamedTuple of arrays whose first field is the position. Subclasses are frozen
    dataclasses: they are compiled into the step. Their fields' defaults are the settings at which
    the schemes' step sizes are known to suit; at others a Gaussian is simulated to find one.

    A subclass has a ``State``, :attr:`flows`, :attr:`schemes`, :meth:`draw` (or an :meth:`init`),
    :meth:`relaxation_time`, :meth:`noise_inflation` and :meth:`stiffness`, and :meth:`energy` where
    there are auxiliary variables, for
    :func:`~numpyro_sgmcmc.diagnostics.check_invariance`. The rest has defaults.
    """

    State: ClassVar[type]
    """The state's NamedTuple: ``position``, then the auxiliary variables."""

    has_thermostat: ClassVar[bool] = False
    """Whether its friction adapts to the momenta's temperature."""

    is_uniform: ClassVar[bool] = True
    """Whether a step is as long everywhere: with a metric it is not."""

    @property
    def has_default_settings(self) -> bool:
        """Whether the schemes' step sizes are known to suit these settings."""
        return all(getattr(self, field.name) == field.default for field in fields(self))

    @property
    def schemes(self) -> Mapping[str, Scheme]:
        """The schemes that this SDE has, by name."""
        raise NotImplementedError

    @property
    def linearised(self) -> Dynamics | None:
        """About the same SDE, with steps that are linear on a normal; None if there is none."""
        return None

    @property
    def flows(self) -> Mapping[str, Flow]:
        """The flows from which the schemes are composed, by name."""
        raise NotImplementedError

    @property
    def resampling(self) -> Mapping[str, int]:
        """Auxiliary variables that are drawn afresh, with the number of steps between draws."""
        return {}

    def step(self, scheme: str) -> Step:
        """The step of one of the schemes."""
        return compose(self.flows, self.schemes[scheme])

    def draw(self, field: str, rng_key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        """Draws of an auxiliary variable from its stationary law.

        :param field: name of the variable.
        :param shape: the position's shape, with any number of axes before it.
        """
        raise NotImplementedError

    def energy(self, state: Any) -> Array:
        """Minus the log stationary density of the auxiliary variables, up to a constant."""
        return jnp.zeros(())

    def temperature(self, state: Any) -> Array:
        r"""Kinetic temperature, the mean over coordinates of :math:`p\,\partial_p K`.

        One on average for an exact sampler; NaN without momenta.
        """
        return jnp.full((), jnp.nan)

    def init(self, position: Array, rng_key: Array) -> Any:
        """The state at ``position``, auxiliary variables drawn from their stationary law."""
        names = self.State._fields[1:]  # type: ignore[attr-defined]
        keys = random.split(rng_key, max(1, len(names)))
        drawn = (
            self.draw(n, k, position.shape, position.dtype)
            for n, k in zip(names, keys, strict=False)
        )
        return self.State(position, *drawn)

    def relaxation_time(self, step_size: Any, gradient_variance: Any = 0.0) -> float:
        """Time between about independent draws of a whitened Gaussian."""
        raise NotImplementedError

    def autocorrelation(self, time: np.ndarray, step_size: Any) -> np.ndarray:
        """Autocorrelation of the position on a whitened Gaussian.

        :param time: lags, of any shape.
        :param step_size: step size.
        """
        return np.exp(-2.0 * time / self.relaxation_time(step_size))

    def noise_inflation(
        self, gradient_variance: Any, step_size: Any, varying: float = 1.0
    ) -> float:
        """Predicted relative excess of a unit posterior variance.

        :param gradient_variance: variance of the gradient's estimate, a coordinate.
        :param step_size: step size.
        :param varying: share of the noise that differs over the posterior, from 0 to 1, which
            no thermostat can take away.
        """
        raise NotImplementedError

    def compensate(
        self, state: Any, noise: Array, step_size: Any, gradient_noise: GradientNoise
    ) -> Array:
        """The step's normal entries, less what the gradient's own noise brings.

        :param state: the state before the step.
        :param noise: standard normal entries, shape ``(draws, d)``.
        :param step_size: step size.
        :param gradient_noise: covariance of the gradient's noise.
        """
        return gradient_noise.take_from(noise, self.noise_share(step_size))

    def noise_share(self, step_size: Any) -> float:
        """What part of the injected variance a gradient's variance of one brings."""
        return self.noise_inflation(1.0, step_size)

    @property
    def longest_step_size(self) -> float:
        """A bound on step sizes that has other reasons than bias and stability."""
        return math.inf

    def stiffness(self, curvature: float) -> float:
        """How many times shorter a step must be at ``curvature`` than at curvature one."""
        raise NotImplementedError
