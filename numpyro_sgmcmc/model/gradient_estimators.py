r"""Estimators of the preconditioned gradient from one minibatch.

With :math:`\tilde U` the minibatch potential, :math:`U` the full-data potential, and
:math:`\theta = \hat\theta + Lq`:

- :class:`MinibatchGradient`: :math:`L^\top\nabla\tilde U(\theta)`.
- :class:`ControlVariate`: :math:`L^\top(\nabla\tilde U(\theta) - \nabla\tilde U(\hat\theta) +
  \nabla U(\hat\theta))`, with one minibatch for the first two terms. Its noise SD grows with
  :math:`|\theta - \hat\theta|`, so that the reference point :math:`\hat\theta` lies in the bulk of
  the posterior. Reference: Baker, Fearnhead, Fox and Nemeth (2019), *Control variates for
  stochastic gradient MCMC*.
- :class:`SecondOrderControlVariate`: the first-order expansion of :math:`\nabla\tilde U` about the
  reference point is replaced by that of :math:`\nabla U`, which needs the full-data Hessian. Its
  noise SD grows with :math:`|\theta - \hat\theta|^2`. It is for models with few coordinates in
  which a few influential observations determine one of them, for regressions with up to thousands
  of weights (:mod:`~.hessian_factor`), and for hierarchies. In hierarchies both Hessians are of the
  rows' part of the potential, since the prior has no noise, and the gradient has terms of second
  order in the effects and some shared parameters, such as the scale of the rows
  (:class:`~.block_arrow.BlockDifferences`, :class:`~.block_arrow.EffectThirdDerivatives`).

:data:`GRADIENT_ESTIMATORS` lists them by name, and :func:`make_gradient_fn` evaluates one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import Indices
from numpyro_sgmcmc.dynamics.integrators import GradientFn
from numpyro_sgmcmc.model.block_arrow import BlockArrowMatrix
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner

# Step of the finite difference along the displacement from the reference point, as a fraction of
# that displacement: small against the scale on which curvature varies, large against rounding.
_FINITE_DIFFERENCE_FRACTION = 0.1


@dataclass(frozen=True)
class Minibatch:
    """Potential energy of one minibatch, or of its rows on one shard, as function of a position."""

    potential: Potential
    indices: Indices
    arguments: Arguments
    rng_key: Array | None = None

    def part_gradient(self, hessian: Any, position: Array) -> Array:
        """Return the gradient of the part of the potential of which a Hessian is.

        A block-arrow matrix is that of the rows' part, so that a step evaluates the prior once.
        """
        of_rows = isinstance(hessian, BlockArrowMatrix)
        fn = self.potential.rows_gradient if of_rows else self.potential.gradient
        return fn(position, self.indices, self.arguments, self.rng_key)

    def gradient(self, position: Array) -> Array:
        """Return its gradient, shape ``(d,)``."""
        return self.potential.gradient(position, self.indices, self.arguments, self.rng_key)


MeanOverShards: TypeAlias = Callable[[Callable[[Minibatch], Array]], Array]
"""Evaluates a function that is linear in the minibatch potential; where rows are sharded, the mean
of its values on the shards, weighted by their numbers of rows."""

WeightedPoints: TypeAlias = list[tuple[np.ndarray, float | np.ndarray]]
"""Points of shape ``(d,)``, each with a weight, or one of each coordinate."""


class GradientEstimator:
    """Base of estimators of the gradient from one minibatch.

    Subclasses are frozen dataclasses without fields: an estimator is compiled into the step.
    """

    name: ClassVar[str]
    """Its name as the kernels' ``gradient_estimator`` argument."""

    relative_cost: ClassVar[float]
    """Approximate cost of a step relative to that with a minibatch gradient; measured, see
    benchmarks/step_cost.py."""

    noise_exponent: ClassVar[int] = 0
    """Power of the distance from the reference point with which the noise SD grows."""

    needs_reference: ClassVar[bool] = True
    """Whether it needs the full-data gradient at the reference point."""

    needs_hessian: ClassVar[bool] = False
    """Whether it needs the full-data Hessian at the reference point."""

    def estimate(
        self, q: Array, preconditioner: Preconditioner, mean_over_shards: MeanOverShards
    ) -> Array:
        """Return the estimate of the preconditioned gradient at ``q``, shape ``(d,)``."""
        raise NotImplementedError

    def noise_eval_points(self, q: np.ndarray, preconditioner: Preconditioner) -> WeightedPoints:
        """Return points x of :meth:`.Preconditioner.to_expansion` and weights such that the
        weighted sum of the minibatch gradients there has the noise of the estimate at ``q``; in
        NumPy.
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
    """Return a function that estimates the preconditioned gradient at ``q`` from one minibatch."""

    def mean_over_shards(fn: Callable[[Minibatch], Array]) -> Array:
        def on_shard(shard: Potential, *batch: Any) -> Array:
            return fn(Minibatch(shard, *batch))

        return potential.mean_over_shards(on_shard, indices, arguments, rng_key)

    return lambda q: estimator.estimate(q, preconditioner, mean_over_shards)


@dataclass(frozen=True)
class MinibatchGradient(GradientEstimator):
    """Minibatch gradient without a control variate: its noise is similar everywhere."""

    name = "minibatch"
    relative_cost = 1.0
    needs_reference = False

    def estimate(
        self, q: Array, preconditioner: Preconditioner, mean_over_shards: MeanOverShards
    ) -> Array:
        position = preconditioner.to_position(q)
        return preconditioner.pull_back(q, mean_over_shards(lambda x: x.gradient(position)))

    def noise_eval_points(self, q: np.ndarray, preconditioner: Preconditioner) -> WeightedPoints:
        return [(preconditioner.to_expansion(q), 1.0)]


@dataclass(frozen=True)
class ControlVariate(GradientEstimator):
    """First-order control variate: needs the full-data gradient at the reference point."""

    name = "control_variate"
    noise_exponent = 1
    relative_cost = 1.4

    def estimate(
        self, q: Array, preconditioner: Preconditioner, mean_over_shards: MeanOverShards
    ) -> Array:
        # XLA merges the two lookups of the same rows into one gather.
        position, reference = preconditioner.to_position(q), preconditioner.center
        difference = mean_over_shards(lambda x: x.gradient(position) - x.gradient(reference))
        return preconditioner.pull_back(q, difference + preconditioner.reference_gradient)

    def noise_eval_points(self, q: np.ndarray, preconditioner: Preconditioner) -> WeightedPoints:
        return [(preconditioner.to_expansion(q), 1.0), (np.zeros_like(q), -1.0)]


@dataclass(frozen=True)
class SecondOrderControlVariate(GradientEstimator):
    """Second-order control variate: needs full-data gradient and Hessian at the reference point."""

    name = "second_order_control_variate"
    noise_exponent = 2
    relative_cost = 2.0
    needs_hessian = True

    def estimate(
        self, q: Array, preconditioner: Preconditioner, mean_over_shards: MeanOverShards
    ) -> Array:
        x, reference = preconditioner.to_expansion(q), preconditioner.center
        no_displacement, hessian = jnp.zeros_like(x), preconditioner.reference_hessian
        is_block_arrow = isinstance(hessian, BlockArrowMatrix)
        limited = hessian.limit_displacement(x) if is_block_arrow else x

        def remainder(minibatch: Minibatch) -> Array:
            gradient = preconditioner.as_function_of_expansion(minibatch.gradient)
            part = preconditioner.as_function_of_expansion(
                partial(minibatch.part_gradient, hessian)
            )
            _, first_order = jax.jvp(part, (no_displacement,), (limited,))
            terms = gradient(x) - minibatch.gradient(reference) - first_order
            if not is_block_arrow:
                return terms
            return hessian.subtract_second_order_of(part, terms, limited)

        expansion = preconditioner.reference_gradient
        # To measure noise the Hessian, which adds none, may be left out. It is the identity in
        # coordinates of its inverse root.
        if is_block_arrow:
            expansion = expansion + hessian.expand(limited)
        elif hessian is not None:
            expansion = expansion + hessian @ x
        gradient = preconditioner.pull_back_expansion(q, mean_over_shards(remainder) + expansion)
        return gradient + q if preconditioner.is_hessian_root else gradient

    def noise_eval_points(self, q: np.ndarray, preconditioner: Preconditioner) -> WeightedPoints:
        # The derivative along the displacement, by a central difference.
        x, hessian = preconditioner.to_expansion(q), preconditioner.reference_hessian
        is_block_arrow = isinstance(hessian, BlockArrowMatrix)
        displacement = hessian.limit_displacement(x) if is_block_arrow else x
        step = _FINITE_DIFFERENCE_FRACTION * displacement
        weight = 0.5 / _FINITE_DIFFERENCE_FRACTION
        points: WeightedPoints = [
            (x, 1.0),
            (np.zeros_like(q), -1.0),
            (step, -weight),
            (-step, weight),
        ]
        if is_block_arrow and hessian.has_second_order_terms:
            # Second derivatives along the effects' displacement, of the parameters with
            # differences and of the effects with third derivatives; of the effects' gradients also
            # along the displacement of these parameters.
            effects, shared = hessian.layout.split(displacement)
            step = hessian.layout.merge(effects, np.zeros_like(shared)) / 2.0
            has_differences = np.zeros(displacement.size)
            has_differences[hessian.difference_coordinates] = 1.0
            is_effect = hessian.layout.merge(np.ones_like(effects), np.zeros_like(shared))
            has_terms = has_differences + is_effect * (hessian.third_derivatives is not None)
            points += [
                (step, -2.0 * has_terms),
                (-step, -2.0 * has_terms),
                (np.zeros_like(q), 4.0 * has_terms),
            ]
            if hessian.differences is None:
                return points
            shared_step = has_differences * displacement / 2.0
            points += [
                (step + shared_step, -is_effect),
                (step - shared_step, is_effect),
                (-step + shared_step, is_effect),
                (-step - shared_step, -is_effect),
            ]
        return points


GRADIENT_ESTIMATORS: dict[str, GradientEstimator] = {
    e.name: e for e in (MinibatchGradient(), ControlVariate(), SecondOrderControlVariate())
}
"""The estimators by the names of a kernel's ``gradient_estimator`` argument."""
