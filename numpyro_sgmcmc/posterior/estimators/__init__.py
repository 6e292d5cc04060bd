"""Estimators of the whitened gradient from one minibatch, and the variance of their noise.

A new one is a file here and a name in :data:`ESTIMATORS`.
"""

from numpyro_sgmcmc.posterior.estimators.base import (
    Estimator,
    whitened_gradient,
)
from numpyro_sgmcmc.posterior.estimators.control_variate import ControlVariate
from numpyro_sgmcmc.posterior.estimators.plain import Plain
from numpyro_sgmcmc.posterior.estimators.second_order import SecondOrderControlVariate

__all__ = [
    "ESTIMATORS",
    "ControlVariate",
    "Estimator",
    "Plain",
    "SecondOrderControlVariate",
    "whitened_gradient",
]

ESTIMATORS: dict[str, Estimator] = {
    e.name: e for e in (Plain(), ControlVariate(), SecondOrderControlVariate())
}
"""The estimators by the names of a kernel's ``gradient`` argument."""
