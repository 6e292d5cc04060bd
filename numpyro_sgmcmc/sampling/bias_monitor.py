r"""Running sums of a chain: for the bias report, and for the warm-up's check of the step size.

For the exact posterior :math:`E[\nabla U] = 0` and :math:`E[(q - m)(\nabla U)^\top] = I` (Stein's
identity, by integration by parts). A minibatch gradient that is independent of the position is
unbiased, so that its running mean estimates the bias of the chain's mean, and its covariance with
the position that of the chain's covariance. :class:`Moments` keeps these sums in a fixed number of
batches, whose length grows with the run: batch means give the standard errors.

:math:`E[q_j\,\partial_j U]` is the configurational temperature of coordinate j, one for an exact
sampler. Step sizes are chosen from measured noise and curvature, which can mislead if the
posterior is far from Gaussian or has tails that no pilot chain has reached.
:class:`StepSizeMonitor` therefore compares each chain's temperatures in warm-up with the predicted
ones, and shortens that chain's step where they are too high or too low.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from scipy.special import ndtri

from numpyro_sgmcmc.dynamics.integrators import GradientFn
from numpyro_sgmcmc.model.low_rank import LowRankFactor
from numpyro_sgmcmc.model.preconditioner import Preconditioner

FULL_MOMENTS_MAX_DIM = 64
"""Number of coordinates up to which second moments are matrices: a bound on a step's cost."""

# Batches per chain, and fewer above this number of coordinates: a bound on memory.
_NUM_MOMENT_BATCHES, _NUM_MOMENT_BATCHES_HIGH_DIM, _MOMENTS_HIGH_DIM = 16, 8, 10_000

# A temperature differs from one beyond this many standard errors, and beyond as many as one of all
# coordinates exceeds by chance with this probability.
_MIN_NUM_STANDARD_ERRORS, _MAX_ERROR_PROBABILITY = 4.0, 0.003
# Iterations below which standard errors are not reliable.
_MIN_MONITORED_ITERATIONS = 20.0
# Range of the factor by which one check shortens the step.
_MIN_STEP_SCALE, _MAX_STEP_SCALE = 1 / 8, 1 / 2


def count_moment_batches(dim: int) -> int:
    """Return the number of batches of running moments of ``dim`` coordinates."""
    return _NUM_MOMENT_BATCHES if dim <= _MOMENTS_HIGH_DIM else _NUM_MOMENT_BATCHES_HIGH_DIM


def get_split_factor(preconditioner: Preconditioner) -> LowRankFactor | None:
    """Return the low-rank factor whose directions have separate second moments, or None.

    Full matrices need none. The diagonal in coordinates of sites alone would mix wide and narrow
    directions.
    """
    is_full = preconditioner.center.shape[-1] <= FULL_MOMENTS_MAX_DIM
    return None if is_full else preconditioner.low_rank


class RunningSums(NamedTuple):
    """Weighted sums over positions and gradients, in coordinates of the preconditioner's scale.

    Second moments are matrices up to :data:`FULL_MOMENTS_MAX_DIM` coordinates, else diagonals. If a
    low-rank factor has decorrelated more than so many coordinates, the diagonals of a run's sums
    are those of vectors by :meth:`LowRankFactor.split`: n is d plus the number of its directions.
    """

    weight: Array  # sum of the weights
    position: Array  # sum of positions, shape `(n,)`
    gradient: Array  # sum of gradients, shape `(n,)`
    position_gradient: Array  # sum of positions times gradients, shape `(n, n)` or `(n,)`
    position_position: Array  # sum of positions times positions, of the same shape
    kinetic_temperature: Array  # sum of kinetic temperatures

    @classmethod
    def zeros(cls, dim: int, dtype: Any) -> RunningSums:
        """Return empty sums of vectors of length ``dim``."""
        square = jnp.zeros((dim, dim) if dim <= FULL_MOMENTS_MAX_DIM else (dim,), dtype)
        vector, scalar = jnp.zeros(dim, dtype), jnp.zeros((), dtype)
        return cls(scalar, vector, vector, square, square, scalar)

    def add(self, position: Array, gradient: Array) -> RunningSums:
        """Return the sums with one more (position, gradient) pair of weight one."""
        return self._replace(
            weight=self.weight + 1.0,
            position=self.position + position,
            gradient=self.gradient + gradient,
            position_gradient=self.position_gradient + self._product(position, gradient),
        )

    @property
    def configurational_temperatures(self) -> Array:
        """Mean product of position and gradient in each coordinate, shape ``(d,)``."""
        is_full = self.position_gradient.ndim == 2
        sums = jnp.diagonal(self.position_gradient) if is_full else self.position_gradient
        return sums / self.weight

    def finalize_iteration(
        self, position: Array, kinetic_temperature: Any, weight: Array
    ) -> RunningSums:
        """Return the iteration's means times the draw's weight, with the sums at the draw alone."""
        completed = self._replace(
            position_position=self.weight * self._product(position, position),
            kinetic_temperature=self.weight * kinetic_temperature,
        )
        factor = weight / self.weight
        return jax.tree.map(lambda x: x * factor, completed)

    def _product(self, a: Array, b: Array) -> Array:
        """Return the product of two vectors in the shape of the second moments."""
        return jnp.outer(a, b) if self.position_gradient.ndim == 2 else a * b


class Moments(NamedTuple):
    """Sums over the iterations of a chain, in batches."""

    batches: RunningSums  # `RunningSums` with a leading axis of batches
    num_iterations: Array  # iterations so far, without those of the warm-up

    @classmethod
    def zeros(cls, dim: int, dtype: Any) -> Moments:
        """Return the moments of a chain before its first iteration."""
        num = count_moment_batches(dim)
        batches = jax.tree.map(
            lambda x: jnp.zeros((num, *x.shape), x.dtype), RunningSums.zeros(dim, dtype)
        )
        return cls(batches, jnp.array(0))

    def add(self, sums: RunningSums, is_sampling: Array, is_valid: Array) -> Moments:
        """Return the moments with one more iteration.

        :param is_valid: False if the sums are to be left out.
        """
        index = compute_batch_index(self.num_iterations, len(self.batches.weight))
        added = jax.tree.map(lambda x: jnp.where(is_valid, x, jnp.zeros_like(x)), sums)
        batches = jax.tree.map(lambda batches, x: batches.at[index].add(x), self.batches, added)
        return Moments(batches, self.num_iterations + is_sampling)


def compute_batch_index(iteration: Array, num_batches: int) -> Array:
    """Return the batch of an iteration, so that batches grow with the run without being moved.

    A quarter of the batches hold one iteration each, the next quarter two, then four, and so on,
    cyclically: what a batch held before is a sixteenth of what is added to it.
    """
    quarter = num_batches // 4
    octave = 31 - lax.clz(jnp.asarray(iteration // quarter + 1, jnp.int32))
    octave_start = quarter * ((1 << octave) - 1)
    return (quarter * octave + ((iteration - octave_start) >> octave)) % num_batches


class FirstGradientRecorder:
    """A step's gradient function, which scales gradients down to a maximal norm.

    :ivar first_gradient: the first gradient, at the integrator's start, not scaled.
    """

    def __init__(self, gradient_fn: GradientFn, max_norm: float | None = None) -> None:
        self._gradient_fn, self._max_norm = gradient_fn, max_norm
        self.first_gradient: Any = None

    def __call__(self, q: Array) -> Array:
        gradient = self._gradient_fn(q)
        if self.first_gradient is None:
            self.first_gradient = gradient
        if self._max_norm is None:
            return gradient
        return gradient * jnp.minimum(1.0, self._max_norm / jnp.linalg.norm(gradient))


class StepSizeMonitor(NamedTuple):
    """Sums of temperatures over the iterations since the last check of the step size."""

    num_iterations: Array  # number of these iterations
    # sum of their temperatures, shape `(d + 1,)`: those of the coordinates, then their mean
    temperature_sum: Array
    temperature_sq_sum: Array  # sum of their squares, of the same shape

    @classmethod
    def zeros(cls, dim: int, dtype: Any) -> StepSizeMonitor:
        """Return empty sums of ``dim`` temperatures."""
        zeros = jnp.zeros(dim + 1, dtype)
        return cls(jnp.zeros((), dtype), zeros, zeros)

    def add(self, temperatures: Array, is_valid: Array) -> StepSizeMonitor:
        """Return the sums with one more iteration.

        :param is_valid: False if the iteration is to be left out.
        """
        temperatures = jnp.append(temperatures, temperatures.mean())
        temperatures = jnp.where(is_valid, temperatures, 0.0)
        return StepSizeMonitor(
            self.num_iterations + is_valid,
            self.temperature_sum + temperatures,
            self.temperature_sq_sum + jnp.square(temperatures),
        )

    def compute_step_scale(
        self, allowed_variance_inflation: Array, ess_per_iteration: Array
    ) -> Array:
        """Return a factor for the step size: 1, or 1/8 to 1/2 if the step is too long.

        The deviation of a temperature from one grows at least in proportion to the step size.
        """
        size = jnp.maximum(self.num_iterations, 2.0)
        mean = self.temperature_sum / size
        variance = (self.temperature_sq_sum / size - jnp.square(mean)) * size / (size - 1.0)
        error = jnp.sqrt(jnp.maximum(variance, 0.0) / (size * ess_per_iteration))
        deviation = mean - 1.0
        # Squares of normal numbers are skewed: a mean that is small by chance comes with a standard
        # error that is too small. The SD of such a mean, sqrt(2 / ESS), is a lower bound there.
        min_error = jnp.sqrt(2.0 / (size * ess_per_iteration)) * (deviation < 0.0)
        error = jnp.maximum(error, min_error.at[-1].set(0.0))
        num_errors = max(
            _MIN_NUM_STANDARD_ERRORS, -ndtri(_MAX_ERROR_PROBABILITY / (mean.shape[-1] - 1))
        )
        # The error is estimated from few iterations.
        num_errors = _compute_student_quantile(num_errors, size - 1.0)
        lower_limit = jnp.abs(deviation) - num_errors * error
        is_significant = lower_limit > allowed_variance_inflation
        is_significant &= self.num_iterations >= _MIN_MONITORED_ITERATIONS
        largest = jnp.where(is_significant, jnp.abs(deviation), 0.0).max()
        scale = allowed_variance_inflation / jnp.maximum(largest, 1e-30)  # 0 if none is significant
        scale = jnp.clip(scale, _MIN_STEP_SCALE, _MAX_STEP_SCALE)
        return jnp.where(is_significant.any(), scale, 1.0)


def _compute_student_quantile(z: float, degrees_of_freedom: Array) -> Array:
    """Return the quantile of Student's t distribution with the probability of a normal quantile.

    This is the expansion in the inverse degrees of freedom (Abramowitz and Stegun, 26.7.5), within
    1% for ``z = 5.5`` and 19 degrees of freedom.
    """
    terms = (
        (z**3 + z) / 4.0,
        (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0,
        (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / 384.0,
    )
    quantile = jnp.full_like(degrees_of_freedom, z)
    for power, term in enumerate(terms, 1):
        quantile = quantile + term / degrees_of_freedom**power
    return quantile
