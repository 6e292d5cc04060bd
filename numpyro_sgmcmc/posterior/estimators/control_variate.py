r"""Control variates: :math:`L^\top(\nabla\tilde U(\theta) - \nabla\tilde U(\hat\theta) +
\nabla U(\hat\theta))`, the same minibatch in the first two.

Its noise grows with :math:`|\theta - \hat\theta|^2`, so the anchor :math:`\hat\theta` lies in the
posterior's midst. Reference: Baker, Fearnhead, Fox and Nemeth (2019), *Control variates for
stochastic gradient MCMC*.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jax import Array

from numpyro_sgmcmc.posterior.estimators.base import GradientEstimator, MeanOverShards
from numpyro_sgmcmc.posterior.whitening import Preconditioner

__all__ = ["ControlVariate"]


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
