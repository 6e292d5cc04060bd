r"""Dynamics in a metric that depends on the position: SGRLD and SGRHMC.

With :math:`S(\theta)S(\theta)^\top = G(\theta)^{-1}`, the inverse metric:

.. math::

    \text{SGRLD:}\quad & d\theta = (-G^{-1}\nabla U + \Gamma)\,dt + \sqrt{2}\,S\,dW,
        \quad \Gamma_i = \textstyle\sum_j \partial_j (G^{-1})_{ij} \\
    \text{SGRHMC:}\quad & d\theta = S p\,dt, \quad
        dp = (-S^\top\nabla U + \operatorname{div} S - \gamma S^\top S\,p)\,dt
        + \sqrt{2\gamma S^\top S}\,dW, \quad
        (\operatorname{div} S)_i = \textstyle\sum_j \partial_j S_{ji}

Stationary densities :math:`\propto e^{-U(\theta)}` and :math:`\propto e^{-U(\theta) - p^\top p/2}`.
Without :math:`\Gamma` and :math:`\operatorname{div} S` they would be others.

Reference: Ma, Chen and Fox (2015), *A complete recipe for stochastic gradient MCMC*, section 3.2
and Algorithm 1, whose signs are right where equation (17)'s are not; Patterson and Teh (2013),
*Stochastic gradient Riemannian Langevin dynamics on the probability simplex*.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_sgmcmc.dynamics.base import (
    Dynamics,
    GradientNoiseCovariance,
    damped_oscillator_autocorrelation,
    divergence,
)
from numpyro_sgmcmc.dynamics.integrators import Flow, GradientFn, Integrator, Part

__all__ = [
    "RiemannianOverdampedLangevin",
    "RiemannianOverdampedState",
    "RiemannianUnderdampedLangevin",
    "RiemannianUnderdampedState",
    "potential_metric",
]


def inverse_metric_sqrt(inverse_metric: Array) -> Array:
    """S: the square root of a scalar or diagonal inverse metric, a dense one's Cholesky factor."""
    if inverse_metric.ndim == 2:
        return jnp.linalg.cholesky(inverse_metric)
    return jnp.sqrt(inverse_metric)


def matvec(matrix: Array, v: Array) -> Array:
    """The product of a scalar, diagonal or dense matrix with a vector."""
    return matrix @ v if matrix.ndim == 2 else matrix * v


def potential_metric(q: Array) -> Array:
    r"""The inverse metric of gSGRHMC, :math:`G^{-1} \propto \sqrt{|U + C|}`, a scalar.

    Larger where the potential is, so that steps are longer in the tails. In place of the potential
    stands its quadratic expansion about the anchor in whitened units, :math:`|q|^2/2`: any
    positive function of the position leaves the posterior invariant, and this one reads no data.
    C = 1/2 as in the paper, and the value is about one at a typical position.

    :param q: whitened position, shape ``(d,)``.
    """
    return jnp.sqrt((jnp.square(q).sum() + 1.0) / (q.size + 1.0))


class RiemannianOverdampedState(NamedTuple):
    """- **position** - whitened position, shape ``(d,)``."""

    position: Array


@dataclass(frozen=True)
class RiemannianOverdampedLangevin(Dynamics):
    r"""Overdamped Langevin dynamics in a metric.

    :param inverse_metric: maps a whitened position to :math:`G^{-1}` there: a scalar, the diagonal
        of shape ``(d,)``, or a matrix of shape ``(d, d)``.
    """

    inverse_metric: Callable[[Array], Array] = potential_metric

    State = RiemannianOverdampedState
    has_constant_metric = False

    @property
    def integrators(self) -> Mapping[str, Integrator]:
        return {"euler": Integrator((Part("euler"),), order=1, step_size=0.04)}

    @property
    def flows(self) -> Mapping[str, Flow]:
        return {"euler": Flow(self._euler, num_gradients=1, num_noise=1)}

    def relaxation_time(self, step_size: Any, gradient_variance: Any = 0.0) -> float:
        return 2.0

    def variance_inflation(
        self, gradient_variance: Any, step_size: Any, position_dependent_fraction: float = 1.0
    ) -> float:
        return gradient_variance * step_size / 2.0

    def compensate_gradient_noise(
        self, state: Any, normals: Array, step_size: Any, noise_covariance: GradientNoiseCovariance
    ) -> Array:
        s = inverse_metric_sqrt(self.inverse_metric(state.position))
        covariance = noise_covariance.covariance
        if s.ndim == 2:
            full = covariance if covariance.ndim == 2 else jnp.diag(covariance)
            covariance = s.T @ full @ s
        elif covariance.ndim == 2:
            covariance = covariance * jnp.outer(*(jnp.broadcast_to(s, covariance.shape[:1]),) * 2)
        else:
            covariance = covariance * s**2
        return GradientNoiseCovariance.from_covariance(covariance).subtract_from(
            normals, step_size / 2.0
        )

    def stiffness(self, curvature: float) -> float:
        return curvature

    def _euler(
        self, state: RiemannianOverdampedState, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> RiemannianOverdampedState:
        (q,) = state
        metric = self.inverse_metric(q)
        drift = divergence(self.inverse_metric, q) - matvec(metric, gradient_fn(q))
        spread = matvec(inverse_metric_sqrt(metric), normals[0])
        return RiemannianOverdampedState(q + time * drift + jnp.sqrt(2.0 * time) * spread)


class RiemannianUnderdampedState(NamedTuple):
    """
    - **position** - whitened position, shape ``(d,)``.
    - **momentum** - momentum at unit mass, shape ``(d,)``.
    """

    position: Array
    momentum: Array


@dataclass(frozen=True)
class RiemannianUnderdampedLangevin(Dynamics):
    r"""Underdamped Langevin dynamics in a metric.

    :param inverse_metric: as in :class:`RiemannianLangevin`.
    :param float friction: friction coefficient :math:`\gamma`, positive.
    :param int momentum_period: steps between fresh momenta; None for never.
    """

    inverse_metric: Callable[[Array], Array] = potential_metric
    friction: float = 1.5
    momentum_period: int | None = None

    State = RiemannianUnderdampedState
    has_constant_metric = False

    @property
    def integrators(self) -> Mapping[str, Integrator]:
        return {
            "euler": Integrator((Part("euler_momentum"), Part("euler_drift")), 1, step_size=0.06),
            "explicit_euler": Integrator((Part("explicit_euler"),), order=1, step_size=0.03),
            "symmetric": Integrator(
                (Part("drift", 0.5), Part("momentum"), Part("drift", 0.5)), 2, step_size=0.25
            ),
        }

    @property
    def flows(self) -> Mapping[str, Flow]:
        return {
            "drift": Flow(self._drift),
            "momentum": Flow(self._momentum, num_gradients=1, num_noise=1),
            "euler_momentum": Flow(self._euler_momentum, num_gradients=1, num_noise=1),
            "euler_drift": Flow(self._euler_drift),
            "explicit_euler": Flow(self._explicit_euler, num_gradients=1, num_noise=1),
        }

    @property
    def resampling_periods(self) -> Mapping[str, int]:
        return {} if self.momentum_period is None else {"momentum": self.momentum_period}

    def sample_auxiliary(
        self, name: str, rng_key: Array, shape: tuple[int, ...], dtype: Any
    ) -> Array:
        return random.normal(rng_key, shape, dtype)

    def energy(self, state: RiemannianUnderdampedState) -> Array:
        return jnp.square(state.momentum).sum() / 2.0

    def kinetic_temperature(self, state: RiemannianUnderdampedState) -> Array:
        return jnp.square(state.momentum).mean()

    def relaxation_time(self, step_size: Any, gradient_variance: Any = 0.0) -> float:
        return 2.0 * max(self.friction, 1.0 / self.friction)

    def autocorrelation(self, lag: np.ndarray, step_size: Any) -> np.ndarray:
        return damped_oscillator_autocorrelation(self.friction, lag)

    def variance_inflation(
        self, gradient_variance: Any, step_size: Any, position_dependent_fraction: float = 1.0
    ) -> float:
        return gradient_variance * step_size / (2.0 * self.friction)

    def stiffness(self, curvature: float) -> float:
        return curvature**0.5

    def _inverse_metric_sqrt(self, q: Array) -> Array:
        return inverse_metric_sqrt(self.inverse_metric(q))

    def _sqrt_and_force(self, q: Array, gradient_fn: GradientFn) -> tuple[Array, Array]:
        """S, and the force without the friction."""
        s = self._inverse_metric_sqrt(q)
        return s, divergence(self._inverse_metric_sqrt, q) - matvec(s.T, gradient_fn(q))

    def _drift(
        self, state: RiemannianUnderdampedState, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> RiemannianUnderdampedState:
        """The flow of dq = S(q) p dt by a midpoint step."""
        q, p = state
        half = q + 0.5 * time * matvec(self._inverse_metric_sqrt(q), p)
        return RiemannianUnderdampedState(q + time * matvec(self._inverse_metric_sqrt(half), p), p)

    def _momentum(
        self, state: RiemannianUnderdampedState, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> RiemannianUnderdampedState:
        """Force, friction and noise at a fixed position: linear, solved exactly."""
        q, p = state
        s, force = self._sqrt_and_force(q, gradient_fn)
        if s.ndim == 2:
            values, vectors = jnp.linalg.eigh(s.T @ s)
            rate = self.friction * values
            entries = vectors.T @ (s.T @ normals[0]) / jnp.sqrt(values)
            turned = self._ornstein_uhlenbeck(vectors.T @ p, vectors.T @ force, rate, time, entries)
            return RiemannianUnderdampedState(q, vectors @ turned)
        return RiemannianUnderdampedState(
            q, self._ornstein_uhlenbeck(p, force, self.friction * s**2, time, normals[0])
        )

    @staticmethod
    def _ornstein_uhlenbeck(
        p: Array, force: Array, rate: Array, time: Any, normals: Array
    ) -> Array:
        """Dp = (force - rate p) dt + sqrt(2 rate) dW."""
        length = -jnp.expm1(-rate * time) / rate
        spread = jnp.sqrt(-jnp.expm1(-2.0 * rate * time))
        return jnp.exp(-rate * time) * p + length * force + spread * normals

    def _euler_momentum(
        self, state: RiemannianUnderdampedState, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> RiemannianUnderdampedState:
        q, p = state
        s, force = self._sqrt_and_force(q, gradient_fn)
        damping = self.friction * matvec(s.T, matvec(s, p))
        spread = jnp.sqrt(2.0 * self.friction * time) * matvec(s.T, normals[0])
        return RiemannianUnderdampedState(q, p + time * (force - damping) + spread)

    def _euler_drift(
        self, state: RiemannianUnderdampedState, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> RiemannianUnderdampedState:
        q, p = state
        return RiemannianUnderdampedState(q + time * matvec(self._inverse_metric_sqrt(q), p), p)

    def _explicit_euler(
        self, state: RiemannianUnderdampedState, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> RiemannianUnderdampedState:
        moved = self._euler_drift(state, time, gradient_fn, normals)
        kicked = self._euler_momentum(state, time, gradient_fn, normals)
        return RiemannianUnderdampedState(moved.position, kicked.momentum)
