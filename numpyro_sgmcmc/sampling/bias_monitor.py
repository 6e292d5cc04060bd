r"""Moments that tell a chain's bias, accumulated while it runs.

For the exact posterior :math:`E[\nabla U] = 0` and
:math:`E[(q - m)(\nabla U)^\top] = I` (Stein's identity, integration by parts). A minibatch gradient
that is independent of the position is unbiased, so that its running mean tells how far the chain's
mean is off, and its covariance with the position how far the chain's covariance is.

Batch means give the error bars: a fixed number of batches, whose lengths grow with the run. They
are few numbers beside the draws and cost little beside a gradient.

The warm-up's check of its own step size: each chain watches its temperatures.

The step size is chosen from measured noise and curvature. Where those mislead (a posterior far
from Gaussian, tails that no pilot chain has seen), the chain itself tells: the mean of
:math:`q_j\,\partial_j U` is its configurational temperature in coordinate j, one on average for
an exact sampler. Where it is beyond prediction and error bar, or the chain diverges, the step
shrinks.

It costs two vectors in the state. Like NUTS's, each chain's step size is its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_sgmcmc.dynamics.integrators import GradientFn

__all__ = [
    "FULL_MOMENTS_MAX_DIM",
    "FirstGradientRecorder",
    "Moments",
    "RunningSums",
    "StepSizeMonitor",
    "compute_batch_index",
]

FULL_MOMENTS_MAX_DIM = 64
"""Up to so many coordinates the moments are matrices."""


_NUM_MOMENT_BATCHES, _NUM_MOMENT_BATCHES_HIGH_DIM = 16, 8


_MOMENTS_HIGH_DIM = 10_000


class RunningSums(NamedTuple):
    """Weighted sums over readings. A product of vectors is a matrix up to 64 coordinates.

    - **weight** - sum of the weights.
    - **position** - of whitened positions, shape ``(d,)``.
    - **gradient** - of whitened gradients, shape ``(d,)``.
    - **position_gradient** - of positions times gradients, shape ``(d, d)`` or ``(d,)``.
    - **position_position** - of positions times positions, of the same shape.
    - **kinetic_temperature** - of kinetic temperatures.
    """

    weight: Array
    position: Array
    gradient: Array
    position_gradient: Array
    position_position: Array
    kinetic_temperature: Array

    @classmethod
    def zeros(cls, dim: int, dtype: Any) -> RunningSums:
        """Sums of nothing."""
        square = jnp.zeros((dim, dim) if dim <= FULL_MOMENTS_MAX_DIM else (dim,), dtype)
        vector, scalar = jnp.zeros(dim, dtype), jnp.zeros((), dtype)
        return cls(scalar, vector, vector, square, square, scalar)

    def add(self, position: Array, gradient: Array) -> RunningSums:
        """With one reading more, of weight one."""
        return self._replace(
            weight=self.weight + 1.0,
            position=self.position + position,
            gradient=self.gradient + gradient,
            position_gradient=self.position_gradient + self.compute_product(position, gradient),
        )

    @property
    def configurational_temperatures(self) -> Array:
        """Mean product of position and gradient in each coordinate, shape ``(d,)``."""
        stein = (
            jnp.diagonal(self.position_gradient)
            if self.position_gradient.ndim == 2
            else self.position_gradient
        )
        return stein / self.weight

    def finalize_iteration(
        self, position: Array, kinetic_temperature: Any, weight: Array
    ) -> RunningSums:
        """The iteration's means times its weight, with what is read once an iteration."""
        share = weight / self.weight
        return jax.tree.map(
            lambda x: x * share,
            self._replace(
                position_position=self.weight * self.compute_product(position, position),
                kinetic_temperature=self.weight * kinetic_temperature,
            ),
        )

    def compute_product(self, a: Array, b: Array) -> Array:
        """The product of two vectors in the shape of the second moments."""
        return jnp.outer(a, b) if self.position_gradient.ndim == 2 else a * b


class Moments(NamedTuple):
    """
    - **batches** - :class:`Sums` with a leading axis of batches.
    - **num_iterations** - iterations so far, warm-up not counted.
    """

    batches: RunningSums
    num_iterations: Array

    @classmethod
    def zeros(cls, dim: int, dtype: Any) -> Moments:
        """Moments of a chain that has not begun."""
        num = _NUM_MOMENT_BATCHES if dim <= _MOMENTS_HIGH_DIM else _NUM_MOMENT_BATCHES_HIGH_DIM
        empty = jax.tree.map(
            lambda x: jnp.zeros((num, *x.shape), x.dtype), RunningSums.zeros(dim, dtype)
        )
        return cls(empty, jnp.array(0))

    def add(self, sums: RunningSums, is_sampling: Array, is_valid: Array) -> Moments:
        """With one iteration more.

        :param sums: the iteration's.
        :param is_sampling: False in warm-up, which does not count.
        :param is_valid: False where the sums are to be left out.
        """
        place = compute_batch_index(self.num_iterations, len(self.batches.weight))

        def put(batches: Array, x: Array) -> Array:
            return batches.at[place].add(jnp.where(is_valid, x, jnp.zeros_like(x)))

        batches = jax.tree.map(put, self.batches, sums)
        return Moments(batches, self.num_iterations + is_sampling)


def compute_batch_index(iteration: Array, num_batches: int) -> Array:
    """The batch that an iteration belongs to, so that batches grow with the run, untouched.

    A quarter of the batches hold one iteration each, the next quarter two, then four, and so on,
    round and round: what a batch held before weighs a sixteenth of what comes to it.
    """
    quarter = num_batches // 4
    octave = 31 - lax.clz(jnp.asarray(iteration // quarter + 1, jnp.int32))
    first = quarter * ((1 << octave) - 1)
    return (quarter * octave + ((iteration - first) >> octave)) % num_batches


class FirstGradientRecorder:
    """A gradient function that remembers what it was first asked for and said.

    :param gradient_fn: maps a position to a gradient.
    """

    def __init__(self, gradient_fn: GradientFn) -> None:
        self._gradient_fn = gradient_fn
        self._first_gradient: Array | None = None

    def __call__(self, q: Array) -> Array:
        g = self._gradient_fn(q)
        if self._first_gradient is None:
            self._first_gradient = g
        return g

    @property
    def first_gradient(self) -> Array:
        """The first gradient, once there is one."""
        assert self._first_gradient is not None
        return self._first_gradient


_NUM_STANDARD_ERRORS = 4.0


_MIN_MONITORED_ITERATIONS = 20.0  # iterations that tell anything


_MIN_STEP_SCALE, _MAX_STEP_SCALE = 1 / 8, 1 / 2


class StepSizeMonitor(NamedTuple):
    """Temperatures of the iterations since the last check.

    - **num_iterations** - their number.
    - **temperature_sum** - sum of their temperatures, those of the coordinates and the mean of all last,
      shape ``(d + 1,)``.
    - **temperature_sq_sum** - sum of their squares, of the same shape.
    """

    num_iterations: Array
    temperature_sum: Array
    temperature_sq_sum: Array

    @classmethod
    def zeros(cls, dim: int, dtype: Any) -> StepSizeMonitor:
        """Nothing seen yet of so many temperatures."""
        blank = jnp.zeros(dim + 1, dtype)
        return cls(jnp.zeros((), dtype), blank, blank)

    def add(self, temperatures: Array, is_valid: Array) -> StepSizeMonitor:
        """With one iteration more.

        :param temperatures: means over the iteration of position times gradient, shape ``(d,)``.
        :param is_valid: False for an iteration that does not count.
        """
        all_and_mean = jnp.append(temperatures, temperatures.mean())
        seen = jnp.where(is_valid, all_and_mean, 0.0)
        return StepSizeMonitor(
            self.num_iterations + is_valid,
            self.temperature_sum + seen,
            self.temperature_sq_sum + jnp.square(seen),
        )

    def compute_step_scale(
        self, allowed_variance_inflation: Array, ess_per_iteration: Array
    ) -> Array:
        """By what to multiply the step size: 1, or from 1/8 to 1/2 where it proves too long.

        The excess grows with the step size at least proportionally.

        :param allowed_variance_inflation: excess of temperature that is no surprise.
        :param ess_per_iteration: how many independent draws an iteration is worth, from 0 to 1.
        """
        size = jnp.maximum(self.num_iterations, 2.0)
        mean = self.temperature_sum / size
        variance = (self.temperature_sq_sum / size - jnp.square(mean)) * size / (size - 1.0)
        error = jnp.sqrt(jnp.maximum(variance, 0.0) / (size * ess_per_iteration))
        excess = mean - 1.0
        # Squares are skewed: by chance their mean is small and its error underrated together.
        least = jnp.sqrt(2.0 / (size * ess_per_iteration)) * (excess < 0.0)
        error = jnp.maximum(error, least.at[-1].set(0.0))
        is_clear = jnp.abs(excess) - _NUM_STANDARD_ERRORS * error > allowed_variance_inflation
        is_clear &= self.num_iterations >= _MIN_MONITORED_ITERATIONS
        worst = jnp.where(is_clear, jnp.abs(excess), 0.0).max()
        shorter = jnp.clip(
            allowed_variance_inflation / jnp.maximum(worst, 1e-30), _MIN_STEP_SCALE, _MAX_STEP_SCALE
        )
        return jnp.where(is_clear.any(), shorter, 1.0)
