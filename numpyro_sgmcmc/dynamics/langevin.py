r"""Overdamped and underdamped Langevin dynamics, with Gaussian or monomial-gamma momenta.

:class:`OverdampedLangevin` (SGLD):

.. math:: d\theta = -\nabla U(\theta)\,dt + \sqrt{2}\,dW

with stationary density :math:`\propto e^{-U(\theta)}`.

:class:`UnderdampedLangevin` (SGHMC, SHMC, with :math:`K(p) = p^\top p/2`) and
:class:`MonomialGammaLangevin` (Laplacian HMC, with the softened :class:`Kinetics`):

.. math::

    d\theta = \nabla K(p)\,dt, \qquad
    dp = -\nabla U(\theta)\,dt - \gamma\nabla K(p)\,dt + \sqrt{2\gamma}\,dW

with stationary density :math:`\propto e^{-U(\theta) - K(p)}`.

:class:`OverdampedDynamics` and :class:`UnderdampedDynamics` hold what these SDEs share with the
thermostats, the Riemannian dynamics and the recipe: flows, noise variance, relaxation time.

References: those of the kernels; Leimkuhler and Matthews (2013), *Rational construction of
stochastic numerical methods for molecular sampling* (BAOAB); Zapatero (2019), *Word series for the
numerical integration of stochastic differential equations* (UBU).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_sgmcmc.dynamics.base import Dynamics, MomentumState, PositionState
from numpyro_sgmcmc.dynamics.integrators import (
    SYMMETRIC_SPLITTING,
    Flow,
    GradientFn,
    Integrator,
    Part,
)

# The table of momentum quantiles: its largest exponential variable, of tail probability exp(-40)
# (a float32 uniform variable ends at exp(-17)), and its number of entries, about five digits.
_MAX_TABLE_EXPONENTIAL = 40.0
_QUANTILE_TABLE_SIZE = 8192
# Points of the quadrature that makes the table, and of Gauss-Laguerre quadrature of the energy.
_TABLE_QUADRATURE_SIZE = 400_001
_NUM_LAGUERRE_NODES = 64
# Smallest g of the curvature, which has a pole at zero for a > 1.
_MIN_SOFTENED_G = 1e-4
# Bound of the argument of sinh, which overflows float32 at 89.
_MAX_SINH_ARGUMENT = 80.0
# Bound of h * num_leapfrog: momenta resampled every half period, at pi, would only change the sign
# of a direction of unit curvature; 1.5 is about a quarter period.
_MAX_TRAJECTORY_LENGTH = 1.5


@dataclass(frozen=True)
class Kinetics:
    r"""A softened monomial-gamma kinetic energy, elementwise.

    .. math::

        K_c(p) = \sum_i \int_0^{g_i} \tanh(cx/2)^a\,dx, \qquad g_i = |p_i|^{1/a}/m,

    whose gradient is :math:`\tfrac{1}{am}\operatorname{sign}(p)\,\tanh(cg/2)^a\,|p|^{1/a - 1}`. For
    :math:`a = 1/2` the energy is the Gaussian :math:`p^2/m`, without softening. For :math:`a = 1`
    and :math:`a = 2` it is, up to a constant, that of Zhang et al. (2017), appendix C. The paper's
    gradient for a general :math:`a` is misprinted.

    :param float a: shape, in [0.5, 2]. At 1/2 momenta are Gaussian; larger values have heavier
        tails.
    :param float mass: m, positive.
    :param float softening: c, positive. Larger values soften less.
    """

    a: float
    mass: float
    softening: float

    @property
    def is_gaussian(self) -> bool:
        """True for Gaussian momenta."""
        return self.a == 0.5

    def energy(self, p: Array) -> Array:
        """Return the energy of each coordinate, zero at zero.

        By quadrature: to rounding for a = 1 and a = 2, to about three digits in between.
        """
        if self.is_gaussian:
            return jnp.square(p) / self.mass
        # 1 - tanh(cx/2)^a decays as exp(-cx): Gauss-Laguerre nodes in cx integrate its tails.
        g, c = self._g(p), self.softening
        x, w = np.polynomial.laguerre.laggauss(_NUM_LAGUERRE_NODES)
        weights = w * np.exp(x)  # either factor alone leaves the range of float32
        tail = _one_minus_tanh_power(self.a, c * g[..., None] + x) @ weights
        tail_from_zero = _one_minus_tanh_power(self.a, x) @ weights
        return g + (tail - tail_from_zero) / c

    def velocity(self, p: Array) -> Array:
        r"""Return the gradient of the energy, :math:`\nabla K_c(p)`."""
        if self.is_gaussian:
            return 2.0 * p / self.mass
        size = jnp.abs(p)
        safe = jnp.maximum(size, jnp.finfo(p.dtype).tiny)
        psi = jnp.tanh(self.softening * self._g(safe) / 2.0)
        speed = psi**self.a * safe ** (1.0 / self.a - 1.0) / (self.a * self.mass)
        return jnp.where(size > 0.0, jnp.sign(p) * speed, 0.0)

    def curvature(self, p: Array) -> Array:
        r"""Return the second derivative of the energy.

        For :math:`a > 1` it has a pole at zero, which is cut off at :math:`g = 10^{-4}`.
        """
        if self.is_gaussian:
            return jnp.full_like(p, 2.0 / self.mass)
        a, m, c = self.a, self.mass, self.softening
        g = jnp.maximum(self._g(p), _MIN_SOFTENED_G)
        psi = jnp.tanh(c * g / 2.0)
        # psi' / psi = c / sinh(c g)
        factor = a * c * g / jnp.sinh(jnp.minimum(c * g, _MAX_SINH_ARGUMENT)) + 1.0 - a
        return (psi / (m * g)) ** a * (m * g) ** (1.0 - a) * factor / (a**2 * m)

    def apply_friction(self, p: Array, friction_time: Any) -> Array:
        r"""Return the solution of :math:`dp = -\xi\nabla K_c(p)\,dt` after a time t.

        Exact for a = 1/2 and a = 1, an explicit midpoint step otherwise.

        :param friction_time: :math:`\xi t`.
        """
        if self.is_gaussian:
            return p * jnp.exp(-2.0 * friction_time / self.mass)
        if self.a == 1.0:
            rate = self.softening / (2.0 * self.mass)
            # asinh(sinh(x) exp(-y)) by logarithms, because sinh leaves float32 at 89.
            x = rate * jnp.abs(p)
            log_sinh = x + jnp.log1p(-jnp.exp(-2.0 * x)) - np.log(2.0)
            w = log_sinh - rate * friction_time / self.mass
            above = w + jnp.log1p(jnp.sqrt(1.0 + jnp.exp(-2.0 * jnp.abs(w))))
            below = jnp.arcsinh(jnp.exp(jnp.minimum(w, 0.0)))
            return jnp.sign(p) * jnp.where(w > 0.0, above, below) / rate
        half = p - 0.5 * friction_time * self.velocity(p)
        return p - friction_time * self.velocity(half)

    def sample_momentum(self, rng_key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        r"""Sample momenta from the density :math:`\propto e^{-K_c(p)}`.

        By inversion: :math:`g^a` is tabulated as a function of an exponential variable, to about
        five digits.
        """
        if self.is_gaussian:
            return math.sqrt(self.mass / 2.0) * random.normal(rng_key, shape, dtype)
        size_key, sign_key = random.split(rng_key)
        e = random.exponential(size_key, shape, dtype)
        return random.rademacher(sign_key, shape, dtype) * self.magnitude_from_exponential(e)

    def magnitude_from_exponential(self, e: Array) -> Array:
        """Return |p| at which the stationary distribution has the tail probability exp(-e)."""
        table = jnp.asarray(_quantile_table(self.a, self.softening), e.dtype)
        place = jnp.minimum(e / _MAX_TABLE_EXPONENTIAL, 1.0) * (_QUANTILE_TABLE_SIZE - 1)
        left = jnp.clip(place.astype(int), 0, _QUANTILE_TABLE_SIZE - 2)
        power = table[left] + (place - left) * (table[left + 1] - table[left])
        return self.mass**self.a * power

    def _g(self, p: Array) -> Array:
        return jnp.abs(p) ** (1.0 / self.a) / self.mass


GAUSSIAN_KINETICS = Kinetics(a=0.5, mass=2.0, softening=1.0)
"""The energy of momenta of unit mass, p^2 / 2."""

LAPLACE_KINETICS = Kinetics(a=1.0, mass=1.0, softening=3.0)
"""The energy of Zhang et al. (2017) for a = 1; momenta have the tails of a Laplace distribution."""


def _one_minus_tanh_power(a: float, x: Any) -> Any:
    """Return ``1 - tanh(x / 2)^a`` without cancellation, for x >= 0."""
    e = jnp.exp(-x)
    return -jnp.expm1(a * (jnp.log1p(-e) - jnp.log1p(e)))


@cache
def _quantile_table(a: float, softening: float) -> np.ndarray:
    """Return ``g^a``, of density exp(-K), at tail probabilities exp(-e) for e on a grid."""
    from scipy.integrate import cumulative_trapezoid  # slow to import, and needed here alone

    # The grid is finest near zero, where the density of g^a is largest, and ends beyond the last
    # entry of the table.
    grid = np.linspace(0.0, 1.0, _TABLE_QUADRATURE_SIZE) ** 2
    y = grid * (_MAX_TABLE_EXPONENTIAL + 20.0 * max(a, 1.0)) ** a
    g = y ** (1.0 / a)
    rate = np.tanh(softening * g / 2.0) ** a
    density = np.exp(-cumulative_trapezoid(rate, g, initial=0.0))
    tail = -cumulative_trapezoid(density[::-1], y[::-1], initial=0.0)[::-1]
    with np.errstate(divide="ignore"):
        e = -np.log(tail / tail[0])
    return np.interp(np.linspace(0.0, _MAX_TABLE_EXPONENTIAL, _QUANTILE_TABLE_SIZE), e, y)


class OverdampedDynamics(Dynamics):
    """Base of SDEs without momentum: Euler's method, and predictions for a standard Gaussian."""

    State: ClassVar[type] = PositionState

    @property
    def flows(self) -> Mapping[str, Flow]:
        return {"euler": Flow(self._euler, num_gradients=1, num_noise=1)}

    def relaxation_time(self, step_size: Any, gradient_variance: Any = 0.0) -> float:
        return 2.0

    def variance_inflation(
        self, gradient_variance: Any, step_size: Any, position_dependent_fraction: float = 1.0
    ) -> float:
        return gradient_variance * step_size / 2.0

    def stiffness(self, curvature: float) -> float:
        return curvature

    def _euler(self, state: Any, time: Any, gradient_fn: GradientFn, normals: Array) -> Any:
        (q,) = state
        return PositionState(q - time * gradient_fn(q) + jnp.sqrt(2.0 * time) * normals[0])


@dataclass(frozen=True)
class OverdampedLangevin(OverdampedDynamics):
    """Overdamped Langevin dynamics with unit mass."""

    @property
    def integrators(self) -> Mapping[str, Integrator]:
        return {"euler": Integrator((Part("euler"),), order=1, step_size=0.05)}

    @property
    def linear_approximation(self) -> OverdampedLangevin:
        return self


class UnderdampedDynamics(Dynamics):
    r"""Base of SDEs with a momentum, friction :math:`\xi` and injected noise A.

    .. math::

        d\theta = \nabla K(p)\,dt, \qquad
        dp = -\nabla U(\theta)\,dt - \xi\nabla K(p)\,dt + \sqrt{2A}\,dW

    The friction is a constant, equal to A, or a thermostat, a field of the state whose stationary
    mean is A. The flows are drift, friction, kick with noise, and the kicks of Euler's methods.
    Subclasses have :attr:`friction` as a field, and override :attr:`kinetics` unless momenta are
    Gaussian.
    """

    relaxation_factor: ClassVar[float] = 2.0
    """Relaxation time at friction one, where it is shortest: 2 for a damped oscillator."""

    @property
    def kinetics(self) -> Kinetics:
        """Kinetic energy."""
        return GAUSSIAN_KINETICS

    @property
    def friction(self) -> float:
        """Stationary mean of the friction, which is the level A of the injected noise."""
        raise NotImplementedError

    def effective_friction(self, step_size: Any) -> float:
        """Return the constant friction that damps as much as the integrator does."""
        return self.friction

    @property
    def flows(self) -> Mapping[str, Flow]:
        return {
            "drift": Flow(self._drift),
            "friction": Flow(self._apply_friction),
            "noisy_kick": Flow(self._noisy_kick, num_gradients=1, num_noise=1),
            "damped_kick": Flow(self._damped_kick, num_gradients=1, num_noise=1),
            "explicit_euler": Flow(self._explicit_euler, num_gradients=1, num_noise=1),
        }

    def sample_auxiliary(
        self, name: str, rng_key: Array, shape: tuple[int, ...], dtype: Any
    ) -> Array:
        return self.kinetics.sample_momentum(rng_key, shape, dtype)

    def energy(self, state: Any) -> Array:
        return self.kinetics.energy(state.momentum).sum()

    def kinetic_temperature(self, state: Any) -> Array:
        return (state.momentum * self.kinetics.velocity(state.momentum)).mean()

    def relaxation_time(self, step_size: Any, gradient_variance: Any = 0.0) -> float:
        friction = self.effective_friction(step_size)
        if self.has_thermostat:  # which rises to balance gradient noise as it does injected noise
            friction = friction + gradient_variance * step_size / 2.0
        return self.relaxation_factor * max(friction, 1.0 / friction)

    def autocorrelation(self, lag: np.ndarray, step_size: Any) -> np.ndarray:
        r"""Return the autocorrelation of the position of a damped oscillator.

        With the rates :math:`r_\pm = \gamma/2 \pm \sqrt{\gamma^2/4 - 1}` it is
        :math:`(r_+ e^{-r_- t} - r_- e^{-r_+ t}) / (r_+ - r_-)` at the lag t.
        """
        decay = self.effective_friction(step_size) / 2.0
        # At critical friction the rates coincide and the quotient is 0 / 0: 1e-8 separates them,
        # below which the difference would be rounding. The product of the rates is one, so that the
        # slow one is exact at any friction, and neither exponential overflows.
        fast = decay + (np.sqrt(complex(decay**2 - 1.0)) or 1e-8)
        slow = 1.0 / fast
        combined = fast * np.exp(-slow * lag) - slow * np.exp(-fast * lag)
        return (combined / (fast - slow)).real

    def variance_inflation(
        self, gradient_variance: Any, step_size: Any, position_dependent_fraction: float = 1.0
    ) -> float:
        # A step adds the variance h^2 V of the gradient to the injected 2 A h.
        return gradient_variance * step_size / (2.0 * self.effective_friction(step_size))

    def stiffness(self, curvature: float) -> float:
        return math.sqrt(curvature)

    def _friction(self, state: Any) -> Any:
        return self.friction

    def _drift(self, state: Any, time: Any, gradient_fn: GradientFn, normals: Array) -> Any:
        velocity = self.kinetics.velocity(state.momentum)
        return state._replace(position=state.position + time * velocity)

    def _apply_friction(
        self, state: Any, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> Any:
        friction_time = self._friction(state) * time
        return state._replace(momentum=self.kinetics.apply_friction(state.momentum, friction_time))

    def _apply_gradient(self, state: Any, time: Any, gradient: Array) -> Any:
        return state._replace(momentum=state.momentum - time * gradient)

    def _kick(self, state: Any, time: Any, gradient_fn: GradientFn, normals: Array) -> Any:
        return self._apply_gradient(state, time, gradient_fn(state.position))

    def _noisy_kick(self, state: Any, time: Any, gradient_fn: GradientFn, normals: Array) -> Any:
        kicked = self._kick(state, time, gradient_fn, normals)
        scale = jnp.sqrt(2.0 * self.friction * time)
        return kicked._replace(momentum=kicked.momentum + scale * normals[0])

    def _damped_kick(self, state: Any, time: Any, gradient_fn: GradientFn, normals: Array) -> Any:
        """Apply force, noise and friction, the latter by Euler's method."""
        kicked = self._noisy_kick(state, time, gradient_fn, normals)
        damping = time * self._friction(state) * self.kinetics.velocity(state.momentum)
        return kicked._replace(momentum=kicked.momentum - damping)

    def _explicit_euler(
        self, state: Any, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> Any:
        kicked = self._damped_kick(state, time, gradient_fn, normals)
        return self._drift(state, time, gradient_fn, normals)._replace(momentum=kicked.momentum)


class UnderdampedState(NamedTuple):
    """State of underdamped Langevin dynamics."""

    position: Array  # preconditioned position, shape `(d,)`
    momentum: Array  # momentum at unit mass, shape `(d,)`
    # gradient of the last kick, for integrators that use it twice, otherwise None
    gradient: Array | None = None


@dataclass(frozen=True)
class UnderdampedLangevin(UnderdampedDynamics):
    """Underdamped Langevin dynamics with unit mass.

    :param float friction: friction coefficient, positive, in units of one over time.
    :param int num_leapfrog: leapfrog steps between momentum refreshments, for Lie-Trotter. None for
        other integrators.
    :param bool is_fsal: whether the state stores the last gradient for the next step ("first same
        as last"), as BAOAB and OBABO need.
    """

    friction: float = 1.5
    num_leapfrog: int | None = None
    is_fsal: bool = False

    State = UnderdampedState

    @property
    def has_default_settings(self) -> bool:
        # One leapfrog step between refreshments is Lie-Trotter's default, and `is_fsal` depends on
        # the integrator alone.
        return self.friction == type(self).friction and self.num_leapfrog in (None, 1)

    @property
    def integrators(self) -> Mapping[str, Integrator]:
        half_drift, fluctuation = Part("drift", 0.5), "ornstein_uhlenbeck"
        refreshment = Part(fluctuation, every_n_steps=self.num_leapfrog or 1)
        integrators = {
            "euler": Integrator((Part("damped_kick"), Part("drift")), order=1, step_size=0.1),
            "explicit_euler": Integrator((Part("explicit_euler"),), order=1, step_size=0.03),
            "leapfrog": Integrator((half_drift, Part("damped_kick"), half_drift), 1, step_size=0.3),
            "symmetric": Integrator(SYMMETRIC_SPLITTING, order=2, step_size=0.3),
            "lie_trotter": Integrator(
                (half_drift, Part("kick"), half_drift, refreshment), order=2, step_size=0.3
            ),
            "ubu": Integrator(
                (Part("free_motion", 0.5), Part("kick"), Part("free_motion", 0.5)), 2, step_size=0.3
            ),
            "mt3": Integrator((Part("mt3"),), order=3, step_size=0.5),
        }
        if self.is_fsal:
            first, last = Part("fsal_kick", 0.5), Part("kick", 0.5)
            baoab = (first, half_drift, Part(fluctuation), half_drift, last)
            half = Part(fluctuation, 0.5)
            obabo = (half, first, Part("drift"), last, half)
            integrators["baoab"] = Integrator(baoab, 2, step_size=0.3, gradient_at_end=True)
            integrators["obabo"] = Integrator(obabo, 2, step_size=0.3, gradient_at_end=True)
        return integrators

    def for_integrator(self, name: str) -> UnderdampedLangevin:
        return replace(self, is_fsal=name in ("baoab", "obabo"))

    @property
    def linear_approximation(self) -> UnderdampedLangevin:
        return self

    @property
    def flows(self) -> Mapping[str, Flow]:
        return {
            **super().flows,
            "ornstein_uhlenbeck": Flow(self._ornstein_uhlenbeck, num_noise=1),
            "free_motion": Flow(self._free_motion, num_noise=2),
            "kick": Flow(self._kick, num_gradients=1),
            "fsal_kick": Flow(self._fsal_kick),
            "mt3": Flow(self._mt3, num_gradients=3, num_noise=2),
        }

    def init(self, position: Array, rng_key: Array) -> UnderdampedState:
        momentum = self.sample_auxiliary("momentum", rng_key, position.shape, position.dtype)
        gradient = jnp.zeros_like(position) if self.is_fsal else None
        return UnderdampedState(position, momentum, gradient)

    def effective_friction(self, step_size: Any) -> float:
        """Return the friction, for Lie-Trotter the one that damps as much as the refreshments."""
        if self.num_leapfrog is None:
            return self.friction
        length = self.num_leapfrog * step_size
        return math.tanh(self.friction * length) / length

    @property
    def max_step_size(self) -> float:
        return math.inf if self.num_leapfrog is None else _MAX_TRAJECTORY_LENGTH / self.num_leapfrog

    def _ornstein_uhlenbeck(
        self, state: Any, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> Any:
        """Apply friction and noise together: an Ornstein-Uhlenbeck process, solved exactly."""
        scale = jnp.sqrt(-jnp.expm1(-2.0 * self.friction * time))
        damped = self._apply_friction(state, time, gradient_fn, normals)
        return damped._replace(momentum=damped.momentum + scale * normals[0])

    def _free_motion(self, state: Any, time: Any, gradient_fn: GradientFn, normals: Array) -> Any:
        r"""Move without a force: :math:`d\theta = p\,dt`, p an Ornstein-Uhlenbeck process, exact.

        Given both momenta, the position moves by :math:`\tanh(x)(p + p')/\gamma` with the variance
        :math:`4(x - \tanh x)/\gamma^2`, where :math:`x = \gamma t/2`.
        """
        x = 0.5 * self.friction * jnp.asarray(time, state.position.dtype)
        # x - tanh(x) cancels for small x; there a continued fraction of tanh gives it.
        ratio = x**2 / (3.0 + x**2 / (5.0 + x**2 / (7.0 + x**2 / (9.0 + x**2 / 11.0))))
        difference = jnp.where(x < 1.0, x * ratio / (1.0 + ratio), x - jnp.tanh(x))
        moved = self._ornstein_uhlenbeck(state, time, gradient_fn, normals[:1])
        mean = jnp.tanh(x) * (state.momentum + moved.momentum)
        displacement = (mean + 2.0 * jnp.sqrt(difference) * normals[1]) / self.friction
        return moved._replace(position=state.position + displacement)

    def _apply_gradient(self, state: UnderdampedState, time: Any, gradient: Array) -> Any:
        kicked = super()._apply_gradient(state, time, gradient)
        return kicked._replace(gradient=gradient if self.is_fsal else None)

    def _fsal_kick(self, state: Any, time: Any, gradient_fn: GradientFn, normals: Array) -> Any:
        """Kick by the gradient that the last kick computed at the same position."""
        return state._replace(momentum=state.momentum - time * state.gradient)

    def _mt3(self, state: Any, h: Any, gradient_fn: GradientFn, normals: Array) -> Any:
        """Take a step of order three: Milstein and Tretyakov (2003); Franzese et al. (2021), B.5.2.

        The stages are implicit in the momentum, but linear, and solved here.
        """
        q, p, friction = state.position, state.momentum, self.friction
        w1, w2 = normals[0], normals[1] / math.sqrt(12.0)
        noise_scale = (2.0 * friction) ** 0.5

        def stage(q: Array, p: Array, fraction: float) -> tuple[Array, Array]:
            """Return the momentum r with r = p + fraction h F(q, r), and that force F."""
            g = gradient_fn(q)
            r = (p - fraction * h * g) / (1.0 + fraction * h * friction)
            return r, -g - friction * r

        _, f1 = stage(q + 7 / 24 * h * p, p, 7 / 24)
        q2 = q + 25 / 24 * h * p + h**2 / 2 * f1
        _, f2 = stage(q2, p + 2 / 3 * h * f1, 3 / 8)
        q3 = q + h * p + h**2 * (17 / 36 * f1 + f2 / 36)
        p3, _ = stage(q3, p + 2 / 3 * h * (f1 - f2), 1.0)
        hessian_w1 = jax.jvp(gradient_fn, (q3,), (w1,))[1]
        half = w1 / 2.0 + w2
        q_noise = h**1.5 * half - friction * h**2.5 * w1 / 6.0
        p_noise = (
            h**0.5 * w1 - friction * h**1.5 * half + h**2.5 * (friction**2 * w1 - hessian_w1) / 6.0
        )
        return state._replace(
            position=q3 + noise_scale * q_noise, momentum=p3 + noise_scale * p_noise
        )


@dataclass(frozen=True)
class MonomialGammaLangevin(UnderdampedDynamics):
    r"""Underdamped Langevin dynamics with monomial-gamma kinetics.

    :param Kinetics kinetics: kinetic energy.
    :param float friction: friction coefficient A, positive.
    """

    kinetics: Kinetics = LAPLACE_KINETICS
    friction: float = 1.5

    State = MomentumState
    relaxation_factor = 3.0  # bounded velocities mix more slowly than Gaussian ones; rounded up
    autocorrelation = Dynamics.autocorrelation

    @property
    def integrators(self) -> Mapping[str, Integrator]:
        return {
            "euler": Integrator((Part("damped_kick"), Part("drift")), order=1, step_size=0.05),
            "symmetric": Integrator(SYMMETRIC_SPLITTING, order=2, step_size=0.2),
        }
