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

from numpyro_sgmcmc.posterior.estimators.base import Estimator, OverRows
from numpyro_sgmcmc.posterior.whitening import Whitening

__all__ = ["ControlVariate"]


@dataclass(frozen=True)
class ControlVariate(Estimator):
    """Holds the gradient at the anchor."""

    name = "control_variate"
    noise_order = 1
    cost = 1.4

    def estimate(self, q: Array, whitening: Whitening, over_rows: OverRows) -> Array:
        # One gather serves both gradients: XLA sees that they look up the same rows.
        position, anchor = whitening.position(q), whitening.anchor
        difference = over_rows(lambda gradient: gradient(position) - gradient(anchor))
        return whitening.pull(difference + whitening.gradient)

    def probes(self, q: np.ndarray, whitening: Whitening) -> list[tuple[np.ndarray, float]]:
        return [(whitening.position(q), 1.0), (whitening.anchor, -1.0)]
