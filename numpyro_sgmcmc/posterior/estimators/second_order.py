r"""Second-order control variates: what :math:`\nabla\tilde U` is to first order about the anchor is
replaced by its exact value, for which the Hessian on all rows is kept.

The noise grows with :math:`|\theta - \hat\theta|^4`: for models in which a few rows decide a
coordinate, and few enough coordinates for the Hessian.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
from jax import Array

from numpyro_sgmcmc.dynamics.integrators import GradientFn
from numpyro_sgmcmc.posterior.estimators.base import GradientEstimator, MeanOverShards
from numpyro_sgmcmc.posterior.whitening import Preconditioner

__all__ = ["SecondOrderControlVariate"]

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
