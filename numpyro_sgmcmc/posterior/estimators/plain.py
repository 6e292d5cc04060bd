r"""The minibatch's own gradient, :math:`L^\top\nabla\tilde U(\theta)`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jax import Array

from numpyro_sgmcmc.posterior.estimators.base import Estimator, OverRows
from numpyro_sgmcmc.posterior.whitening import Whitening

__all__ = ["Plain"]


@dataclass(frozen=True)
class Plain(Estimator):
    """Holds nothing: its noise is about the same everywhere."""

    name = "plain"
    cost = 1.0
    has_anchor = False

    def estimate(self, q: Array, whitening: Whitening, over_rows: OverRows) -> Array:
        position = whitening.position(q)
        return whitening.pull(over_rows(lambda gradient: gradient(position)))

    def probes(self, q: np.ndarray, whitening: Whitening) -> list[tuple[np.ndarray, float]]:
        return [(whitening.position(q), 1.0)]
