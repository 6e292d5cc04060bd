r"""Moments that tell a chain's bias, accumulated while it runs.

For the exact posterior :math:`E[\nabla U] = 0` and
:math:`E[(q - m)(\nabla U)^\top] = I` (Stein's identity, integration by parts). A minibatch gradient
that is independent of the position is unbiased, so that its running mean tells how far the chain's
mean is off, and its covariance with the position how far the chain's covariance is.

Batch means give the error bars: a fixed number of batches, each as long as the next power of two
requires. They are few numbers beside the draws and cost nothing beside a gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

__all__ = ["FULL_MAX_DIM", "FirstGradient", "Moments", "Reading", "Sums"]

FULL_MAX_DIM = 64
"""Up to so many coordinates the moments are matrices."""

_BATCHES, _FEW_BATCHES = 16, 4
_MANY_DIM = 10_000


class Reading(NamedTuple):
    """Where the moments come from.

    - **every** - steps from reading to reading, a divisor of the steps of an iteration; 0 for no
      readings.
    - **estimator** - that of the gradient on a minibatch of its own, at the end of a step; None
      for the step's own gradient, where it does not depend on the position.
    """

    every: int = 1
    estimator: str | None = None


class Sums(NamedTuple):
    """Weighted sums over readings. A product of vectors is a matrix up to 64 coordinates.

    - **weight** - sum of the weights.
    - **position** - of whitened positions, shape ``(d,)``.
    - **gradient** - of whitened gradients, shape ``(d,)``.
    - **stein** - of positions times gradients, shape ``(d, d)`` or ``(d,)``.
    - **spread** - of positions times positions, of the same shape.
    - **temperature** - of kinetic temperatures.
    """

    weight: Array
    position: Array
    gradient: Array
    stein: Array
    spread: Array
    temperature: Array

    @classmethod
    def zeros(cls, dim: int, dtype: Any) -> Sums:
        """Sums of nothing."""
        square = jnp.zeros((dim, dim) if dim <= FULL_MAX_DIM else (dim,), dtype)
        vector, scalar = jnp.zeros(dim, dtype), jnp.zeros((), dtype)
        return cls(scalar, vector, vector, square, square, scalar)

    def add(self, position: Array, gradient: Array) -> Sums:
        """With one reading more, of weight one."""
        return self._replace(
            weight=self.weight + 1.0,
            position=self.position + position,
            gradient=self.gradient + gradient,
            stein=self.stein + self.product(position, gradient),
        )

    def finished(self, position: Array, temperature: Any, weight: Array) -> Sums:
        """The iteration's means times its weight, with what is read once an iteration."""
        share = weight / self.weight
        return jax.tree.map(
            lambda x: x * share,
            self._replace(
                spread=self.weight * self.product(position, position),
                temperature=self.weight * temperature,
            ),
        )

    def product(self, a: Array, b: Array) -> Array:
        """The product of two vectors in the shape of the second moments."""
        return jnp.outer(a, b) if self.stein.ndim == 2 else a * b


class Moments(NamedTuple):
    """
    - **batches** - :class:`Sums` with a leading axis of batches, in the order of time.
    - **length** - iterations that a batch holds when it is full.
    - **iterations** - iterations so far, warm-up not counted.
    """

    batches: Sums
    length: Array
    iterations: Array

    @classmethod
    def zeros(cls, dim: int, dtype: Any) -> Moments:
        """Moments of a chain that has not begun."""
        num = _BATCHES if dim <= _MANY_DIM else _FEW_BATCHES
        empty = jax.tree.map(lambda x: jnp.zeros((num, *x.shape), x.dtype), Sums.zeros(dim, dtype))
        return cls(empty, jnp.array(1), jnp.array(0))

    def add(self, sums: Sums, is_sampling: Array, is_good: Array) -> Moments:
        """With one iteration more.

        :param sums: the iteration's.
        :param is_sampling: False in warm-up, which does not count.
        :param is_good: False where the sums are to be left out.
        """
        slot = self.iterations // self.length

        def put(batches: Array, x: Array) -> Array:
            return batches.at[slot].add(jnp.where(is_good, x, jnp.zeros_like(x)))

        batches = jax.tree.map(put, self.batches, sums)
        return Moments(batches, self.length, self.iterations + is_sampling)

    def with_room(self) -> Moments:
        """Batches joined in pairs when all are full. Also for chains batched together.

        Not a part of :meth:`add`, because under ``vmap`` it would run at every iteration.
        """
        chain_axes = self.iterations.ndim
        num = self.batches.weight.shape[chain_axes]
        iterations, length = self.iterations.ravel()[0], self.length.ravel()[0]

        def join(moments: Moments) -> Moments:
            def pairs(x: Array) -> Array:
                shape = (*x.shape[:chain_axes], num // 2, 2, *x.shape[chain_axes + 1 :])
                joined = x.reshape(shape).sum(chain_axes + 1)
                return jnp.concatenate([joined, jnp.zeros_like(joined)], chain_axes)

            batches = jax.tree.map(pairs, moments.batches)
            return Moments(batches, 2 * moments.length, moments.iterations)

        return lax.cond(iterations >= num * length, join, lambda moments: moments, self)


class FirstGradient:
    """A gradient function that remembers what it was first asked for and said.

    :param gradient: maps a position to a gradient.
    """

    def __init__(self, gradient: Any) -> None:
        self._gradient = gradient
        self.value: Array | None = None

    def __call__(self, q: Array) -> Array:
        g = self._gradient(q)
        if self.value is None:
            self.value = g
        return g
