r"""The warm-up's check of its own step size: each chain watches its temperatures.

The step size is chosen from measured noise and curvature. Where those mislead (a posterior far
from Gaussian, tails that no pilot chain has seen), the chain itself tells: the mean of
:math:`q_j\,\partial_j U` is its configurational temperature in coordinate j, one on average for
an exact sampler. Where it is beyond prediction and error bar, or the chain diverges, the step
shrinks.

It costs two vectors in the state. Like NUTS's, each chain's step size is its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

__all__ = ["StepSizeMonitor"]

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
