"""What an SDE must tell the rest of the library about itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_sgmcmc.dynamics.compensation import GradientNoiseCovariance
from numpyro_sgmcmc.dynamics.integrators import Flow, Integrator, Step, compose

__all__ = ["Dynamics", "damped_oscillator_autocorrelation"]


def damped_oscillator_autocorrelation(friction: float, lag: np.ndarray) -> np.ndarray:
    """Autocorrelation of a unit oscillator's position under friction and white noise.

    :param friction: friction, not negative.
    :param lag: lags, of any shape.
    """
    decay = friction / 2.0
    # Where the two rates meet, at critical friction, they are held apart. Their product is one, by
    # which the slow one is exact at any friction. Neither exponential overflows.
    fast = decay + (np.sqrt(complex(decay**2 - 1.0)) or 1e-8)
    slow = 1.0 / fast
    turned = fast * np.exp(-slow * lag) - slow * np.exp(-fast * lag)
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

    has_constant_metric: ClassVar[bool] = True
    """Whether a step is as long everywhere: with a metric it is not."""

    @property
    def has_default_settings(self) -> bool:
        """Whether the schemes' step sizes are known to suit these settings."""
        return all(getattr(self, field.name) == field.default for field in fields(self))

    @property
    def integrators(self) -> Mapping[str, Integrator]:
        """The schemes that this SDE has, by name."""
        raise NotImplementedError

    @property
    def linear_approximation(self) -> Dynamics | None:
        """About the same SDE, with steps that are linear on a normal; None if there is none."""
        return None

    @property
    def flows(self) -> Mapping[str, Flow]:
        """The flows from which the schemes are composed, by name."""
        raise NotImplementedError

    @property
    def resampling_periods(self) -> Mapping[str, int]:
        """Auxiliary variables that are drawn afresh, with the number of steps between draws."""
        return {}

    def make_step(self, integrator: str) -> Step:
        """The step of one of the schemes."""
        return compose(self.flows, self.integrators[integrator])

    def sample_auxiliary(
        self, name: str, rng_key: Array, shape: tuple[int, ...], dtype: Any
    ) -> Array:
        """Draws of an auxiliary variable from its stationary law.

        :param name: name of the variable.
        :param shape: the position's shape, with any number of axes before it.
        """
        raise NotImplementedError

    def energy(self, state: Any) -> Array:
        """Minus the log stationary density of the auxiliary variables, up to a constant."""
        return jnp.zeros(())

    def kinetic_temperature(self, state: Any) -> Array:
        r"""Kinetic temperature, the mean over coordinates of :math:`p\,\partial_p K`.

        One on average for an exact sampler; NaN without momenta.
        """
        return jnp.full((), jnp.nan)

    def init(self, position: Array, rng_key: Array) -> Any:
        """The state at ``position``, auxiliary variables drawn from their stationary law."""
        names = self.State._fields[1:]  # type: ignore[attr-defined]
        keys = random.split(rng_key, max(1, len(names)))
        drawn = (
            self.sample_auxiliary(n, k, position.shape, position.dtype)
            for n, k in zip(names, keys, strict=False)
        )
        return self.State(position, *drawn)

    def relaxation_time(self, step_size: Any, gradient_variance: Any = 0.0) -> float:
        """Time between about independent draws of a whitened Gaussian."""
        raise NotImplementedError

    def autocorrelation(self, lag: np.ndarray, step_size: Any) -> np.ndarray:
        """Autocorrelation of the position on a whitened Gaussian.

        :param lag: lags, of any shape.
        :param step_size: step size.
        """
        return np.exp(-2.0 * lag / self.relaxation_time(step_size))

    def variance_inflation(
        self, gradient_variance: Any, step_size: Any, position_dependent_fraction: float = 1.0
    ) -> float:
        """Predicted relative excess of a unit posterior variance.

        :param gradient_variance: variance of the gradient's estimate, a coordinate.
        :param step_size: step size.
        :param position_dependent_fraction: share of the noise that differs over the posterior, from 0 to 1, which
            no thermostat can take away.
        """
        raise NotImplementedError

    def compensate_gradient_noise(
        self, state: Any, normals: Array, step_size: Any, noise_covariance: GradientNoiseCovariance
    ) -> Array:
        """The step's normal entries, less what the gradient's own noise brings.

        :param state: the state before the step.
        :param normals: standard normal entries, shape ``(draws, d)``.
        :param step_size: step size.
        :param noise_covariance: covariance of the gradient's noise.
        """
        return noise_covariance.subtract_from(normals, self.gradient_noise_fraction(step_size))

    def gradient_noise_fraction(self, step_size: Any) -> float:
        """What part of the injected variance a gradient's variance of one brings."""
        return self.variance_inflation(1.0, step_size)

    @property
    def max_step_size(self) -> float:
        """A bound on step sizes that has other reasons than bias and stability."""
        return math.inf

    def stiffness(self, curvature: float) -> float:
        """How many times shorter a step must be at ``curvature`` than at curvature one."""
        raise NotImplementedError
