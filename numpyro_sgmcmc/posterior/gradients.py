r"""Estimators of the whitened gradient from one minibatch, and the variance of their noise.

- plain: :math:`L^\top\nabla\tilde U(\theta)`.
- control variates (Baker, Fearnhead, Fox and Nemeth 2019, *Control variates for stochastic
  gradient MCMC*): :math:`L^\top(\nabla\tilde U(\theta) - \nabla\tilde U(\hat\theta) +
  \nabla U(\hat\theta))`, the same minibatch in the first two. Its noise grows with
  :math:`|\theta - \hat\theta|^2`, so the anchor :math:`\hat\theta` lies in the posterior's midst.
- second-order control variates: the expansion of :math:`\nabla\tilde U` about the anchor to first
  order in :math:`\theta - \hat\theta` is replaced by its exact value, for which the full Hessian at
  the anchor is kept. The noise grows with :math:`|\theta - \hat\theta|^4`: for models in which a
  few rows decide a coordinate, and few enough coordinates for the Hessian.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.plates import Indices
from numpyro_sgmcmc.dynamics.integrators import GradientFn
from numpyro_sgmcmc.posterior.coordinates import Coordinates
from numpyro_sgmcmc.posterior.target import Target

__all__ = ["ESTIMATORS", "Anchored", "gradient_variance", "whitened_gradient"]

ESTIMATORS = {"plain": 1.0, "control_variate": 1.4, "second_order_control_variate": 2.0}
"""The estimators by the names of a kernel's ``gradient`` argument, and about what a step with each
costs beside the plain one."""


class Anchored(NamedTuple):
    """
    - **coordinates** - whitened coordinates; their origin is the control variates' anchor.
    - **anchor_gradient** - full-data gradient at the anchor, shape ``(d,)``, not whitened.
    - **anchor_hessian** - full-data Hessian at the anchor, shape ``(d, d)``, not whitened; None
      unless the second-order control variates need it.
    """

    coordinates: Coordinates
    anchor_gradient: Array
    anchor_hessian: Array | None = None


def whitened_gradient(
    estimator: str,
    target: Target,
    arguments: Arguments,
    anchored: Anchored,
    indices: Indices,
    rng_key: Array | None = None,
) -> GradientFn:
    """The estimate of the whitened gradient that one minibatch gives, as a function of ``q``.

    :param estimator: one of ESTIMATORS.
    :param target: the posterior.
    :param arguments: the model's arguments.
    :param anchored: coordinates, with the full gradient at their origin.
    :param indices: the minibatch.
    :param rng_key: key of a randomised likelihood.
    :return: maps ``q`` of shape ``(d,)`` to a gradient of that shape.
    """
    coordinates, anchor_gradient, anchor_hessian = anchored

    def over_rows(fn: Callable[[GradientFn], Array]) -> Array:
        """What ``fn`` makes of the minibatch's gradient; where rows are spread, summed once."""

        def here(target: Target, indices: Indices, arguments: Arguments, key: Any) -> Array:
            return fn(lambda position: target.gradient(position, indices, arguments, key))

        return target.over_shards(here, indices, arguments, rng_key)

    def plain(q: Array) -> Array:
        position = coordinates.position(q)
        return coordinates.pull(over_rows(lambda gradient: gradient(position)))

    def control_variate(q: Array) -> Array:
        # One gather serves both gradients: XLA sees that they look up the same rows.
        position, anchor = coordinates.position(q), coordinates.anchor
        difference = over_rows(lambda gradient: gradient(position) - gradient(anchor))
        return coordinates.pull(difference + anchor_gradient)

    def second_order(q: Array) -> Array:
        v, anchor = coordinates.push(q), coordinates.anchor

        def rest(gradient: GradientFn) -> Array:
            there, bend = jax.jvp(gradient, (anchor,), (v,))
            return gradient(anchor + v) - there - bend

        exact = anchor_gradient if anchor_hessian is None else anchor_gradient + anchor_hessian @ v
        return coordinates.pull(over_rows(rest) + exact)

    estimators = {
        "plain": plain,
        "control_variate": control_variate,
        "second_order_control_variate": second_order,
    }
    return estimators[estimator]


def gradient_variance(
    estimator: str,
    target: Target,
    arguments: Arguments,
    anchored: Anchored,
    positions: Array,
    indices: Indices,
) -> Array:
    """Variance of the whitened gradient's noise at each position.

    :param estimator: one of ESTIMATORS.
    :param target: the posterior.
    :param arguments: the model's arguments.
    :param anchored: coordinates, with the full gradient at their origin.
    :param positions: whitened positions, shape ``(k, d)``.
    :param indices: for each plate, rows of shape ``(k, m, batch_size)``: m minibatches a position.
    :return: one variance a coordinate, shape ``(k, d)``.
    """

    def at(q: Array, minibatches: Indices) -> Array:
        def one(minibatch: Indices, key: Array | None) -> Array:
            return whitened_gradient(estimator, target, arguments, anchored, minibatch, key)(q)

        num = next(iter(minibatches.values())).shape[0]
        keys = random.split(random.key(0), num) if target.is_randomized else None
        return jnp.var(jax.vmap(one)(minibatches, keys), axis=0, ddof=1)

    return jax.lax.map(lambda x: at(*x), (positions, dict(indices)))
