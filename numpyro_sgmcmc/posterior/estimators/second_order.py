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
from numpyro_sgmcmc.posterior.estimators.base import Estimator, OverRows
from numpyro_sgmcmc.posterior.whitening import Whitening

__all__ = ["SecondOrderControlVariate"]

_PROBE_LENGTH = 0.1  # of the way from the anchor, at which the bend is taken by differences


@dataclass(frozen=True)
class SecondOrderControlVariate(Estimator):
    """Holds gradient and Hessian at the anchor."""

    name = "second_order_control_variate"
    noise_order = 2
    cost = 2.0
    needs_hessian = True

    def estimate(self, q: Array, whitening: Whitening, over_rows: OverRows) -> Array:
        v, anchor, hessian = whitening.push(q), whitening.anchor, whitening.hessian

        def rest(gradient: GradientFn) -> Array:
            there, bend = jax.jvp(gradient, (anchor,), (v,))
            return gradient(anchor + v) - there - bend

        # Where noise alone is wanted the Hessian, which adds none, may be left out.
        exact = whitening.gradient if hessian is None else whitening.gradient + hessian @ v
        return whitening.pull(over_rows(rest) + exact)

    def probes(self, q: np.ndarray, whitening: Whitening) -> list[tuple[np.ndarray, float]]:
        bent = _PROBE_LENGTH * whitening.push(q), 0.5 / _PROBE_LENGTH
        return [
            (whitening.position(q), 1.0),
            (whitening.anchor, -1.0),
            (whitening.anchor + bent[0], -bent[1]),
            (whitening.anchor - bent[0], bent[1]),
        ]
