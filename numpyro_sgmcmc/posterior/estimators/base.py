"""What an estimator of the gradient must tell of itself, and how one is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import numpy as np
from jax import Array

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.plates import Indices
from numpyro_sgmcmc.dynamics.integrators import GradientFn
from numpyro_sgmcmc.posterior.target import Potential
from numpyro_sgmcmc.posterior.whitening import Preconditioner

__all__ = ["GradientEstimator", "MeanOverShards", "make_gradient_fn"]

MeanOverShards: TypeAlias = Callable[[Callable[[GradientFn], Array]], Array]
"""Maps a function that is linear in the minibatch's gradient function to its value: where rows are
spread over devices, the sum of what each makes of its own."""


class GradientEstimator:
    """A way to estimate the gradient from one minibatch.

    Subclasses are frozen dataclasses without fields: an estimator is compiled into the step.
    """

    name: ClassVar[str]
    """What the kernels' ``gradient`` argument calls it."""

    relative_cost: ClassVar[float]
    """About what a step with it costs beside one with the plain gradient, measured."""

    noise_exponent: ClassVar[int] = 0
    """Its noise grows with this power of the distance from the anchor."""

    needs_reference: ClassVar[bool] = True
    """Whether it holds the gradient on all rows at the anchor."""

    needs_hessian: ClassVar[bool] = False
    """Whether it holds the Hessian there as well."""

    def estimate(
        self, q: Array, preconditioner: Preconditioner, mean_over_shards: MeanOverShards
    ) -> Array:
        """The whitened gradient's estimate at ``q``.

        :param q: whitened position, shape ``(d,)``.
        :param preconditioner: coordinates, with what the estimator holds at their origin.
        :param mean_over_shards: gives access to the minibatch's gradient.
        """
        raise NotImplementedError

    def noise_eval_points(
        self, q: np.ndarray, preconditioner: Preconditioner
    ) -> list[tuple[np.ndarray, float]]:
        """Positions and weights: the weighted minibatch gradients there have the estimate's noise.

        :param q: whitened position, shape ``(d,)``.
        :param preconditioner: coordinates, in NumPy.
        """
        raise NotImplementedError


def make_gradient_fn(
    estimator: GradientEstimator,
    potential: Potential,
    arguments: Arguments,
    preconditioner: Preconditioner,
    indices: Indices,
    rng_key: Array | None = None,
) -> GradientFn:
    """The estimate of the whitened gradient that one minibatch gives, as a function of ``q``.

    :param estimator: how.
    :param potential: the posterior.
    :param arguments: the model's arguments.
    :param preconditioner: coordinates, with what the estimator holds at their origin.
    :param indices: the minibatch.
    :param rng_key: key of a randomised likelihood.
    :return: maps ``q`` of shape ``(d,)`` to a gradient of that shape.
    """

    def over_rows(fn: Callable[[GradientFn], Array]) -> Array:
        def on_shard(shard: Potential, indices: Indices, arguments: Arguments, key: Any) -> Array:
            return fn(lambda position: shard.gradient(position, indices, arguments, key))

        return potential.mean_over_shards(on_shard, indices, arguments, rng_key)

    return lambda q: estimator.estimate(q, preconditioner, over_rows)
