r"""Estimators of the whitened gradient from one minibatch, and the variance of their noise.

- plain: :math:`L^\top\nabla\tilde U(\theta)`.
- control variates (Baker, Fearnhead, Fox and Nemeth 2019, *Control variates for stochastic
  gradient MCMC*): :math:`L^\top(\nabla\tilde U(\theta) - \nabla\tilde U(\hat\theta) +
  \nabla U(\hat\theta))`, the same minibatch in the first two. Its noise grows with
  :math:`|\theta - \hat\theta|^2`, so the anchor :math:`\hat\theta` lies in the posterior's midst.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_sgmcmc.arguments import Arguments
from numpyro_sgmcmc.coordinates import Coordinates
from numpyro_sgmcmc.full_data import Indices
from numpyro_sgmcmc.integrators import GradientFn
from numpyro_sgmcmc.model import Target

__all__ = ["ESTIMATORS", "Anchored", "gradient_variance", "whitened_gradient"]

ESTIMATORS = ("plain", "control_variate")
"""The estimators by the names of a kernel's ``gradient`` argument."""


class Anchored(NamedTuple):
    """
    - **coordinates** - whitened coordinates; their origin is the control variates' anchor.
    - **anchor_gradient** - full-data gradient at the anchor, shape ``(d,)``, not whitened.
    """

    coordinates: Coordinates
    anchor_gradient: Array


def whitened_gradient(
    estimator: str,
    target: Target,
    arguments: Arguments,
    anchored: Anchored,
    indices: Indices,
    rng_key: Array | None = None,
) -> GradientFn:
    """The estimate of the whitened gradient that one minibatch gives, as a function of ``q``.

    :param estimator: ``"plain"`` or ``"control_variate"``.
    :param target: the posterior.
    :param arguments: the model's arguments.
    :param anchored: coordinates, with the full gradient at their origin.
    :param indices: the minibatch.
    :param rng_key: key of a randomised likelihood.
    :return: maps ``q`` of shape ``(d,)`` to a gradient of that shape.
    """
    coordinates, anchor_gradient = anchored

    def plain(q: Array) -> Array:
        position = coordinates.position(q)
        return coordinates.pull(target.gradient(position, indices, arguments, rng_key))

    def control_variate(q: Array) -> Array:
        # One gather serves both gradients: XLA sees that they look up the same rows.
        here = target.gradient(coordinates.position(q), indices, arguments, rng_key)
        there = target.gradient(coordinates.anchor, indices, arguments, rng_key)
        return coordinates.pull(here - there + anchor_gradient)

    return {"plain": plain, "control_variate": control_variate}[estimator]


def gradient_variance(
    estimator: str,
    target: Target,
    arguments: Arguments,
    anchored: Anchored,
    positions: Array,
    indices: Indices,
) -> Array:
    """Variance of the whitened gradient's noise, mean over coordinates and positions.

    :param estimator: ``"plain"`` or ``"control_variate"``.
    :param target: the posterior.
    :param arguments: the model's arguments.
    :param anchored: coordinates, with the full gradient at their origin.
    :param positions: whitened positions, shape ``(k, d)``.
    :param indices: for each plate, rows of shape ``(k, m, batch_size)``: m minibatches a position.
    :return: scalar.
    """

    def at(q: Array, minibatches: Indices) -> Array:
        def one(minibatch: Indices) -> Array:
            return whitened_gradient(estimator, target, arguments, anchored, minibatch)(q)

        return jnp.var(jax.vmap(one)(minibatches), axis=0, ddof=1).mean()

    return jax.lax.map(lambda x: at(*x), (positions, dict(indices))).mean()
