r"""The minibatch's own gradient, :math:`L^\top\nabla\tilde U(\theta)`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jax import Array

from numpyro_sgmcmc.posterior.estimators.base import GradientEstimator, MeanOverShards
from numpyro_sgmcmc.posterior.whitening import Preconditioner

__all__ = ["MinibatchGradient"]


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
