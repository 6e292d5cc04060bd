"""Estimators of the whitened gradient from one minibatch, and the variance of their noise.

A new one is a file here and a name in :data:`ESTIMATORS`.
"""

from numpyro_sgmcmc.posterior.estimators.base import (
    GradientEstimator,
    make_gradient_fn,
)
from numpyro_sgmcmc.posterior.estimators.control_variate import ControlVariate
from numpyro_sgmcmc.posterior.estimators.plain import MinibatchGradient
from numpyro_sgmcmc.posterior.estimators.second_order import SecondOrderControlVariate

__all__ = [
    "GRADIENT_ESTIMATORS",
    "ControlVariate",
    "GradientEstimator",
    "MinibatchGradient",
    "SecondOrderControlVariate",
    "make_gradient_fn",
]

GRADIENT_ESTIMATORS: dict[str, GradientEstimator] = {
    e.name: e for e in (MinibatchGradient(), ControlVariate(), SecondOrderControlVariate())
}
"""The estimators by the names of a kernel's ``gradient`` argument."""
