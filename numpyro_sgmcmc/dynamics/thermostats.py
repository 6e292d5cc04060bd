r"""The stochastic-gradient Nosé-Hoover thermostat (SGNHT).

.. math::

    d\theta = p\,dt, \qquad
    dp = -\nabla U(\theta)\,dt - \xi p\,dt + \sqrt{2A}\,dW, \qquad
    d\xi = \left(\tfrac{p^\top p}{n} - 1\right)dt

Stationary density :math:`\propto e^{-U(\theta) - p^\top p/2 - n(\xi - A)^2/2}`, with :math:`n` the
number of coordinates that share a thermostat: all of them, or one each.

The friction :math:`\xi` is a variable: it rises while the momenta are too hot, whatever heats
them, so that gradient noise of a constant size does not widen the posterior.

References: Ding, Fang, Babbush, Chen, Skeel and Neven (2014), *Bayesian sampling using stochastic
gradient thermostats*; Chen, Ding and Carin (2015), *On the convergence of stochastic gradient MCMC
algorithms with high-order integrators*, Algorithm 3 and appendix A.3, whose stationary density
lacks the factor :math:`n`.

Softened monomial-gamma kinetic energies (Zhang et al. 2017).

.. math::

    K_c(p) = \sum_i \int_0^{g_i} \tanh(cx/2)^a\,dx, \qquad g_i = |p_i|^{1/a}/m,

whose gradient is :math:`\tfrac{1}{am}\operatorname{sign}(p)\,\tanh(cg/2)^a\,|p|^{1/a - 1}`. For
:math:`a = 1/2` the Gaussian :math:`p^2/m` needs no softening and gets none. Up to a constant,
these are the paper's energies for :math:`a = 1` and :math:`a = 2`; its gradient for a general
:math:`a` is misprinted.

Reference: Zhang, Chen, Gan, Henao and Carin (2017), *Stochastic gradient monomial gamma sampler*,
appendix C.

Dynamics with softened monomial-gamma kinetics: SGMGT, its "D" form, and Laplacian HMC.

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
from functools import cache
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_sgmcmc.dynamics.base import (
    Dynamics,
    GradientNoiseCovariance,
    damped_oscillator_autocorrelation,
)
from numpyro_sgmcmc.dynamics.integrators import (
    SYMMETRIC_SPLITTING,
    Flow,
    GradientFn,
    Integrator,
    Part,
)
from numpyro_sgmcmc.dynamics.langevin import UnderdampedLangevin

__all__ = [
    "Kinetics",
    "LAPLACE_KINETICS",
    "MonomialGammaLangevin",
    "MonomialGammaLangevinState",
    "MonomialGammaState",
    "MonomialGammaThermostat",
    "NoseHooverState",
    "NoseHooverThermostat",
]


class NoseHooverState(NamedTuple):
    """
    - **position** - whitened position, shape ``(d,)``.
    - **momentum** - momentum at unit mass, shape ``(d,)``.
    - **thermostat** - friction, shape ``()``, or ``(d,)`` with one a coordinate.
    """

    position: Array
    momentum: Array
    thermostat: Array


@dataclass(frozen=True)
class NoseHooverThermostat(Dynamics):
    """The Nosé-Hoover thermostat with unit mass.

    :param float friction: injected noise A, the friction's stationary mean; positive.
    :param bool per_coordinate: one thermostat a coordinate, in place of one for all.
    """

    friction: float = 1.5
    per_coordinate: bool = True

    State = NoseHooverState
    has_thermostat = True

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

    @property
    def flows(self) -> Mapping[str, Flow]:
        return {
            "drift": Flow(self._drift),
            "friction": Flow(self._friction),
            "noisy_kick": Flow(self._noisy_kick, num_gradients=1, num_noise=1),
            "damped_kick": Flow(self._damped_kick, num_gradients=1, num_noise=1),
            "explicit_euler": Flow(self._explicit_euler, num_gradients=1, num_noise=1),
        }

    def sample_auxiliary(
        self, name: str, rng_key: Array, shape: tuple[int, ...], dtype: Any
    ) -> Array:
        if name == "momentum":
            return random.normal(rng_key, shape, dtype)
        if self.per_coordinate:
            return self.friction + random.normal(rng_key, shape, dtype)
        return self.friction + random.normal(rng_key, shape[:-1], dtype) / math.sqrt(shape[-1])

    def energy(self, state: NoseHooverState) -> Array:
        shared = 1 if self.per_coordinate else state.position.size
        off = jnp.square(state.thermostat - self.friction).sum()
        return jnp.square(state.momentum).sum() / 2.0 + shared * off / 2.0

    def kinetic_temperature(self, state: NoseHooverState) -> Array:
        return jnp.square(state.momentum).mean()

    def relaxation_time(self, step_size: Any, gradient_variance: Any = 0.0) -> float:
        friction = self.friction + gradient_variance * step_size / 2.0
        return 2.0 * max(friction, 1.0 / friction)

    def autocorrelation(self, lag: np.ndarray, step_size: Any) -> np.ndarray:
        return damped_oscillator_autocorrelation(self.friction, lag)

    def variance_inflation(
        self, gradient_variance: Any, step_size: Any, position_dependent_fraction: float = 1.0
    ) -> float:
        inflation = gradient_variance * step_size / (2.0 * self.friction)
        if not self.per_coordinate:
            return inflation
        # What is the same everywhere the thermostats take away; simulated, about this is left.
        return gradient_variance * step_size**2 / 16.0 + position_dependent_fraction * inflation

    def gradient_noise_fraction(self, step_size: Any) -> float:
        return step_size / (2.0 * self.friction)

    def stiffness(self, curvature: float) -> float:
        return math.sqrt(curvature)

    def _thermostat_drift(self, p: Array) -> Array:
        """The rate at which the thermostat rises."""
        squares = jnp.square(p)
        return (squares if self.per_coordinate else squares.mean()) - 1.0

    def _drift(
        self, state: NoseHooverState, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> NoseHooverState:
        q, p, xi = state
        return NoseHooverState(q + time * p, p, xi + time * self._thermostat_drift(p))

    def _friction(
        self, state: NoseHooverState, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> NoseHooverState:
        q, p, xi = state
        return NoseHooverState(q, jnp.exp(-xi * time) * p, xi)

    def _noisy_kick(
        self, state: NoseHooverState, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> NoseHooverState:
        q, p, xi = state
        scale = jnp.sqrt(2.0 * self.friction * time)
        return NoseHooverState(q, p - time * gradient_fn(q) + scale * normals[0], xi)

    def _damped_kick(
        self, state: NoseHooverState, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> NoseHooverState:
        q, p, xi = self._noisy_kick(state, time, gradient_fn, normals)
        return NoseHooverState(q, p - time * xi * state.momentum, xi)

    def _explicit_euler(
        self, state: NoseHooverState, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> NoseHooverState:
        momentum = self._damped_kick(state, time, gradient_fn, normals).momentum
        return self._drift(state, time, gradient_fn, normals)._replace(momentum=momentum)


_MAX_TABLE_EXPONENTIAL = 40.0


_QUANTILE_TABLE_SIZE = 8192


_MIN_SOFTENED_G = 1e-4


@dataclass(frozen=True)
class Kinetics:
    """A kinetic energy, elementwise.

    :param float a: shape: 1/2 is Gaussian; heavier tails of the momentum above. In [0.5, 2].
    :param float mass: m, positive.
    :param float softening: c, positive; the larger, the less is softened.
    """

    a: float
    mass: float
    softening: float

    @property
    def is_gaussian(self) -> bool:
        return self.a == 0.5

    def energy(self, p: Array) -> Array:
        """The energy of each coordinate, zero at zero.

        By quadrature: to rounding for a = 1 and a = 2, to about three digits in between.
        """
        if self.is_gaussian:
            return jnp.square(p) / self.mass
        # The tail of the integral beyond g, by Gauss-Laguerre nodes in c x, is smooth and small.
        g, c = self._g(p), self.softening
        x, w = np.polynomial.laguerre.laggauss(64)
        weights = w * np.exp(x)  # of which neither factor is a float32
        tail = _one_minus_tanh_power(self.a, c * g[..., None] + x) @ weights
        start = _one_minus_tanh_power(self.a, x) @ weights
        return g + (tail - start) / c

    def velocity(self, p: Array) -> Array:
        r"""The energy's gradient :math:`\nabla K_c(p)`."""
        if self.is_gaussian:
            return 2.0 * p / self.mass
        size = jnp.abs(p)
        safe = jnp.maximum(size, jnp.finfo(p.dtype).tiny)
        psi = jnp.tanh(self.softening * self._g(safe) / 2.0)
        speed = psi**self.a * safe ** (1.0 / self.a - 1.0) / (self.a * self.mass)
        return jnp.where(size > 0.0, jnp.sign(p) * speed, 0.0)

    def curvature(self, p: Array) -> Array:
        r"""The energy's second derivative.

        For :math:`a > 1` it has a pole at zero, which is cut off at :math:`g = 10^{-4}`.
        """
        if self.is_gaussian:
            return jnp.full_like(p, 2.0 / self.mass)
        a, m, c = self.a, self.mass, self.softening
        g = jnp.maximum(self._g(p), _MIN_SOFTENED_G)
        psi = jnp.tanh(c * g / 2.0)
        # psi' / psi = c / sinh(c g)
        bend = a * c * g / jnp.sinh(jnp.minimum(c * g, 80.0)) + 1.0 - a
        return (psi / (m * g)) ** a * (m * g) ** (1.0 - a) * bend / (a**2 * m)

    def apply_friction(self, p: Array, friction_time: Any) -> Array:
        r"""The flow of :math:`dp = -\xi\nabla K_c(p)\,dt` for the time that makes :math:`\xi t`.

        Exact for a = 1/2 and a = 1, an explicit midpoint step otherwise.
        """
        if self.is_gaussian:
            return p * jnp.exp(-2.0 * friction_time / self.mass)
        if self.a == 1.0:
            rate = self.softening / (2.0 * self.mass)
            # asinh(sinh(x) exp(-y)) by logarithms: sinh leaves float32 at 88.
            x = rate * jnp.abs(p)
            log_sinh = x + jnp.log1p(-jnp.exp(-2.0 * x)) - np.log(2.0)
            w = log_sinh - rate * friction_time / self.mass
            above = w + jnp.log1p(jnp.sqrt(1.0 + jnp.exp(-2.0 * jnp.abs(w))))
            below = jnp.arcsinh(jnp.exp(jnp.minimum(w, 0.0)))
            return jnp.sign(p) * jnp.where(w > 0.0, above, below) / rate
        half = p - 0.5 * friction_time * self.velocity(p)
        return p - friction_time * self.velocity(half)

    def sample_momentum(self, rng_key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        r"""Draws from the density :math:`\propto e^{-K_c(p)}`.

        By inversion: :math:`g^a` is tabulated as a function of an exponential variable, to about
        five digits.
        """
        if self.is_gaussian:
            return np.sqrt(self.mass / 2.0) * random.normal(rng_key, shape, dtype)
        size_key, sign_key = random.split(rng_key)
        e = random.exponential(size_key, shape, dtype)
        return random.rademacher(sign_key, shape, dtype) * self.magnitude_from_exponential(e)

    def magnitude_from_exponential(self, e: Array) -> Array:
        """|p| at which the stationary law has the tail probability exp(-e)."""
        table = jnp.asarray(_quantile_table(self.a, self.softening), e.dtype)
        place = jnp.minimum(e / _MAX_TABLE_EXPONENTIAL, 1.0) * (_QUANTILE_TABLE_SIZE - 1)
        left = jnp.clip(place.astype(int), 0, _QUANTILE_TABLE_SIZE - 2)
        power = table[left] + (place - left) * (table[left + 1] - table[left])
        return self.mass**self.a * power

    def _g(self, p: Array) -> Array:
        return jnp.abs(p) ** (1.0 / self.a) / self.mass


LAPLACE_KINETICS = Kinetics(a=1.0, mass=1.0, softening=3.0)
"""The paper's energy for a = 1, whose momenta have the tails of a Laplace distribution."""


def _one_minus_tanh_power(a: float, x: Any) -> Any:
    """``1 - tanh(x / 2)^a`` without cancellation, for x >= 0."""
    e = jnp.exp(-x)
    return -jnp.expm1(a * (jnp.log1p(-e) - jnp.log1p(e)))


@cache
def _quantile_table(a: float, softening: float) -> np.ndarray:
    """``g^a``, whose density is exp(-K), where its tail probability is exp(-e); e on a grid."""
    # Fine near zero, where the density of g^a is largest, and long enough for the last entry.
    y = np.linspace(0.0, 1.0, 400_001) ** 2 * (_MAX_TABLE_EXPONENTIAL + 20.0 * max(a, 1.0)) ** a
    g = y ** (1.0 / a)
    rate = np.tanh(softening * g / 2.0) ** a
    energy = np.concatenate([[0.0], np.cumsum(np.diff(g) * (rate[1:] + rate[:-1]) / 2.0)])
    density = np.exp(-energy)
    tail = np.concatenate(
        [np.cumsum((np.diff(y) * (density[1:] + density[:-1]) / 2)[::-1])[::-1], [0.0]]
    )
    with np.errstate(divide="ignore"):
        e = -np.log(tail / tail[0])
    return np.interp(np.linspace(0.0, _MAX_TABLE_EXPONENTIAL, _QUANTILE_TABLE_SIZE), e, y)


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
