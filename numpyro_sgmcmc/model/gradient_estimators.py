r"""What an estimator of the gradient must tell of itself, and how one is asked.

The minibatch's own gradient, :math:`L^\top\nabla\tilde U(\theta)`.

Control variates: :math:`L^\top(\nabla\tilde U(\theta) - \nabla\tilde U(\hat\theta) +
\nabla U(\hat\theta))`, the same minibatch in the first two.

Its noise grows with :math:`|\theta - \hat\theta|^2`, so the anchor :math:`\hat\theta` lies in the
posterior's midst. Reference: Baker, Fearnhead, Fox and Nemeth (2019), *Control variates for
stochastic gradient MCMC*.

Second-order control variates: what :math:`\nabla\tilde U` is to first order about the anchor is
replaced by its exact value, for which the Hessian on all rows is kept.

The noise grows with :math:`|\theta - \hat\theta|^4`: for models in which a few rows decide a
coordinate, and few enough coordinates for the Hessian.

Estimators of the whitened gradient from one minibatch, and the variance of their noise.

A new one is a file here and a name in :data:`ESTIMATORS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import jax
import numpy as np
from jax import Array

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import Indices
from numpyro_sgmcmc.dynamics.integrators import GradientFn
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner

__all__ = [
    "ControlVariate",
    "GRADIENT_ESTIMATORS",
    "GradientEstimator",
    "MeanOverShards",
    "MinibatchGradient",
    "SecondOrderControlVariate",
    "make_gradient_fn",
]

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


@dataclass(frozen=True)
class MinibatchGradient(GradientEstimator):
    """Holds nothing: its noise is about the same everywhere."""

    name = "minibatch"
    relative_cost = 1.0
    needs_reference = False

    def estimate(
        self, q: Array, preconditioner: Preconditioner, mean_over_shards: MeanOverShards
    ) -> Array:
        position = preconditioner.to_position(q)
        return preconditioner.apply_transpose(mean_over_shards(lambda gradient: gradient(position)))

    def noise_eval_points(
        self, q: np.ndarray, preconditioner: Preconditioner
    ) -> list[tuple[np.ndarray, float]]:
        return [(preconditioner.to_position(q), 1.0)]


@dataclass(frozen=True)
class ControlVariate(GradientEstimator):
    """Holds the gradient at the anchor."""

    name = "control_variate"
    noise_exponent = 1
    relative_cost = 1.4

    def estimate(
        self, q: Array, preconditioner: Preconditioner, mean_over_shards: MeanOverShards
    ) -> Array:
        # One gather serves both gradients: XLA sees that they look up the same rows.
        position, anchor = preconditioner.to_position(q), preconditioner.center
        difference = mean_over_shards(lambda gradient: gradient(position) - gradient(anchor))
        return preconditioner.apply_transpose(difference + preconditioner.reference_gradient)

    def noise_eval_points(
        self, q: np.ndarray, preconditioner: Preconditioner
    ) -> list[tuple[np.ndarray, float]]:
        return [(preconditioner.to_position(q), 1.0), (preconditioner.center, -1.0)]


_FINITE_DIFFERENCE_FRACTION = (
    0.1  # of the way from the anchor, at which the bend is taken by differences
)


@dataclass(frozen=True)
class SecondOrderControlVariate(GradientEstimator):
    """Holds gradient and Hessian at the anchor."""

    name = "second_order_control_variate"
    noise_exponent = 2
    relative_cost = 2.0
    needs_hessian = True

    def estimate(
        self, q: Array, preconditioner: Preconditioner, mean_over_shards: MeanOverShards
    ) -> Array:
        v, anchor, hessian = (
            preconditioner.apply(q),
            preconditioner.center,
            preconditioner.reference_hessian,
        )

        def rest(gradient: GradientFn) -> Array:
            there, bend = jax.jvp(gradient, (anchor,), (v,))
            return gradient(anchor + v) - there - bend

        # Where noise alone is wanted the Hessian, which adds none, may be left out.
        exact = (
            preconditioner.reference_gradient
            if hessian is None
            else preconditioner.reference_gradient + hessian @ v
        )
        return preconditioner.apply_transpose(mean_over_shards(rest) + exact)

    def noise_eval_points(
        self, q: np.ndarray, preconditioner: Preconditioner
    ) -> list[tuple[np.ndarray, float]]:
        bent = (
            _FINITE_DIFFERENCE_FRACTION * preconditioner.apply(q),
            0.5 / _FINITE_DIFFERENCE_FRACTION,
        )
        return [
            (preconditioner.to_position(q), 1.0),
            (preconditioner.center, -1.0),
            (preconditioner.center + bent[0], -bent[1]),
            (preconditioner.center - bent[0], bent[1]),
        ]


GRADIENT_ESTIMATORS: dict[str, GradientEstimator] = {
    e.name: e for e in (MinibatchGradient(), ControlVariate(), SecondOrderControlVariate())
}
"""The estimators by the names of a kernel's ``gradient`` argument."""
