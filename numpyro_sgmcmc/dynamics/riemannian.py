r"""Dynamics in a metric that depends on the position: SGRLD and SGRHMC.

With :math:`S(\theta)S(\theta)^\top = G(\theta)^{-1}`, the inverse metric:

.. math::

    \text{SGRLD:}\quad & d\theta = (-G^{-1}\nabla U + \Gamma)\,dt + \sqrt{2}\,S\,dW,
        \quad \Gamma_i = \textstyle\sum_j \partial_j (G^{-1})_{ij} \\
    \text{SGRHMC:}\quad & d\theta = S p\,dt, \quad
        dp = (-S^\top\nabla U + \operatorname{div} S - \gamma S^\top S\,p)\,dt
        + \sqrt{2\gamma S^\top S}\,dW, \quad
        (\operatorname{div} S)_i = \textstyle\sum_j \partial_j S_{ji}

with stationary densities :math:`\propto e^{-U(\theta)}` and :math:`\propto e^{-U(\theta) - p^\top
p/2}`, of which the corrections :math:`\Gamma` and :math:`\operatorname{div} S` are a condition.

References: those of the kernels. The signs of Ma, Chen and Fox (2015), Algorithm 1, are right,
unlike those of equation (17).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from numpyro_sgmcmc.dynamics.base import (
    GradientNoiseCovariance,
    MomentumState,
    PositionState,
    as_matrix,
    divergence,
)
from numpyro_sgmcmc.dynamics.integrators import Flow, GradientFn, Integrator, Part
from numpyro_sgmcmc.dynamics.langevin import OverdampedDynamics, UnderdampedDynamics


def potential_metric(q: Array) -> Array:
    r"""Return the inverse metric of gSGRHMC, :math:`G^{-1} \propto \sqrt{|U + C|}`, a scalar.

    It is larger where the potential is larger, so that steps are longer in the tails. The potential
    is replaced by :math:`|q|^2/2`, its quadratic expansion about the center in preconditioned
    coordinates, which reads no data. This is valid, because any positive function of the position
    leaves the posterior invariant. As in the paper C = 1/2. The value is about one in the bulk.

    :param q: preconditioned position, shape ``(d,)``.
    :return: a positive scalar.
    """
    return jnp.sqrt((jnp.square(q).sum() + 1.0) / (q.size + 1.0))


@dataclass(frozen=True)
class RiemannianOverdampedLangevin(OverdampedDynamics):
    r"""Overdamped Langevin dynamics in a metric.

    :param inverse_metric: function from a preconditioned position to :math:`G^{-1}` there, as a
        scalar, a diagonal of shape ``(d,)``, or a matrix of shape ``(d, d)``.
    """

    inverse_metric: Callable[[Array], Array] = potential_metric

    has_constant_metric = False

    @property
    def integrators(self) -> Mapping[str, Integrator]:
        return {"euler": Integrator((Part("euler"),), order=1, step_size=0.04)}

    def compensate_gradient_noise(
        self, state: Any, normals: Array, step_size: Any, noise_covariance: GradientNoiseCovariance
    ) -> Array:
        # The noise of the step is S dW and the gradient enters by S S^T: relative to the injected
        # noise its covariance is S^T V S.
        s = _matrix_sqrt(self.inverse_metric(state.position))
        covariance = noise_covariance.covariance
        if s.ndim == 2:
            covariance = s.T @ as_matrix(covariance) @ s
        elif covariance.ndim == 2:
            covariance = covariance * (s * jnp.expand_dims(s, -1))
        else:
            covariance = covariance * s**2
        relative = GradientNoiseCovariance.from_covariance(covariance)
        return relative.subtract_from(normals, step_size / 2.0)

    def _euler(self, state: Any, time: Any, gradient_fn: GradientFn, normals: Array) -> Any:
        (q,) = state
        metric = self.inverse_metric(q)
        drift = divergence(self.inverse_metric, q) - _matvec(metric, gradient_fn(q))
        noise = _matvec(_matrix_sqrt(metric), normals[0])
        return PositionState(q + time * drift + jnp.sqrt(2.0 * time) * noise)


@dataclass(frozen=True)
class RiemannianUnderdampedLangevin(UnderdampedDynamics):
    r"""Underdamped Langevin dynamics in a metric.

    :param inverse_metric: as in :class:`RiemannianOverdampedLangevin`.
    :param float friction: friction coefficient :math:`\gamma`, positive.
    :param int momentum_period: steps between momentum resamplings, or None for no resampling.
    """

    inverse_metric: Callable[[Array], Array] = potential_metric
    friction: float = 1.5
    momentum_period: int | None = None

    State = MomentumState
    has_constant_metric = False

    @property
    def integrators(self) -> Mapping[str, Integrator]:
        half_drift = Part("midpoint_drift", 0.5)
        return {
            "euler": Integrator((Part("damped_kick"), Part("drift")), order=1, step_size=0.06),
            "explicit_euler": Integrator((Part("explicit_euler"),), order=1, step_size=0.03),
            "symmetric": Integrator((half_drift, Part("momentum"), half_drift), 2, step_size=0.25),
        }

    @property
    def flows(self) -> Mapping[str, Flow]:
        return {
            "drift": Flow(self._drift),
            "midpoint_drift": Flow(self._midpoint_drift),
            "momentum": Flow(self._momentum, num_gradients=1, num_noise=1),
            "damped_kick": Flow(self._damped_kick, num_gradients=1, num_noise=1),
            "explicit_euler": Flow(self._explicit_euler, num_gradients=1, num_noise=1),
        }

    def _metric_sqrt(self, q: Array) -> Array:
        return _matrix_sqrt(self.inverse_metric(q))

    def _sqrt_and_force(self, q: Array, gradient_fn: GradientFn) -> tuple[Array, Array]:
        """Return S, and the force without the friction."""
        s = self._metric_sqrt(q)
        return s, divergence(self._metric_sqrt, q) - _matvec(s.T, gradient_fn(q))

    def _drift(self, state: Any, time: Any, gradient_fn: GradientFn, normals: Array) -> Any:
        q, p = state
        return MomentumState(q + time * _matvec(self._metric_sqrt(q), p), p)

    def _midpoint_drift(
        self, state: Any, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> Any:
        """Follow dq = S(q) p dt by a midpoint step."""
        q, p = state
        half = q + 0.5 * time * _matvec(self._metric_sqrt(q), p)
        return MomentumState(q + time * _matvec(self._metric_sqrt(half), p), p)

    def _momentum(self, state: Any, time: Any, gradient_fn: GradientFn, normals: Array) -> Any:
        """Apply force, friction and noise at a fixed position: linear, solved exactly."""
        q, p = state
        s, force = self._sqrt_and_force(q, gradient_fn)
        if s.ndim < 2:
            p = _solve_ornstein_uhlenbeck(p, force, self.friction * s**2, time, normals[0])
            return MomentumState(q, p)
        values, vectors = jnp.linalg.eigh(s.T @ s)
        noise = vectors.T @ (s.T @ normals[0]) / jnp.sqrt(values)
        rate = self.friction * values
        along = _solve_ornstein_uhlenbeck(vectors.T @ p, vectors.T @ force, rate, time, noise)
        return MomentumState(q, vectors @ along)

    def _damped_kick(self, state: Any, time: Any, gradient_fn: GradientFn, normals: Array) -> Any:
        q, p = state
        s, force = self._sqrt_and_force(q, gradient_fn)
        damping = self.friction * _matvec(s.T, _matvec(s, p))
        noise = jnp.sqrt(2.0 * self.friction * time) * _matvec(s.T, normals[0])
        return MomentumState(q, p + time * (force - damping) + noise)


def _matrix_sqrt(inverse_metric: Array) -> Array:
    """Return S: the square root of a scalar or diagonal, the Cholesky factor of a matrix."""
    if inverse_metric.ndim == 2:
        return jnp.linalg.cholesky(inverse_metric)
    return jnp.sqrt(inverse_metric)


def _matvec(matrix: Array, v: Array) -> Array:
    """Return the product of a scalar, diagonal or dense matrix with a vector."""
    return matrix @ v if matrix.ndim == 2 else matrix * v


def _solve_ornstein_uhlenbeck(
    p: Array, force: Array, rate: Array, time: Any, normals: Array
) -> Array:
    """Return the solution of ``dp = (force - rate p) dt + sqrt(2 rate) dW``."""
    length = -jnp.expm1(-rate * time) / rate
    scale = jnp.sqrt(-jnp.expm1(-2.0 * rate * time))
    return jnp.exp(-rate * time) * p + length * force + scale * normals
