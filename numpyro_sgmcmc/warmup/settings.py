"""What the warm-up's shared part is given, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.dynamics.compensation import GradientNoise
from numpyro_sgmcmc.posterior.coordinates import Coordinates
from numpyro_sgmcmc.posterior.gradients import Anchored
from numpyro_sgmcmc.warmup.local_start import LocalStart
from numpyro_sgmcmc.warmup.noise import Noise
from numpyro_sgmcmc.warmup.reading import Reading

__all__ = ["Adaptation", "Settings"]


@dataclass(frozen=True)
class Settings:
    """
    - **dynamics** - the SDE.
    - **scheme** - name of the integrator.
    - **locate** - the SDE for given coordinates.
    - **step_size** - the user's step size, or None to choose it.
    - **num_steps** - the user's steps an iteration, or None to choose.
    - **gradient** - ``"plain"``, ``"control_variate"`` or ``"auto"``.
    - **minibatch** - ``"iid"``, ``"epoch"``, ``"blocks"`` or ``"auto"``.
    - **inverse_mass_matrix** - the user's, shape ``(d,)`` or ``(d, d)``, or None to adapt it.
    - **is_dense** - whether the adapted one is dense.
    - **mask** - blocks of a structured dense one, shape ``(d, d)``, or None.
    - **target_bias** - allowed relative error of posterior sds.
    - **noise_compensation** - whether the gradient's noise is taken from what is injected.
    - **has_start** - whether the first start is the user's.
    """

    dynamics: Dynamics
    scheme: str
    locate: Callable[[Coordinates], Dynamics]
    step_size: float | None
    num_steps: int | None
    gradient: str
    minibatch: str
    inverse_mass_matrix: np.ndarray | None
    is_dense: bool
    mask: np.ndarray | None
    target_bias: float
    noise_compensation: bool
    has_start: bool


class Adaptation(NamedTuple):
    """
    - **anchored** - coordinates and the full gradient at their anchor.
    - **step_size** - step size.
    - **num_steps** - steps an iteration.
    - **estimator** - one of ESTIMATORS.
    - **minibatch** - ``"iid"``, ``"epoch"`` or ``"blocks"``.
    - **gradient_noise** - covariance of the gradient's noise, if it is compensated; else None.
    - **noise** - the noise measured at typical positions.
    - **reading** - where the moments come from that tell the bias.
    - **allowed_excess** - excess of temperature at which a chain in warm-up does not shorten its
      step; None where the step size is the user's.
    - **relaxation_time** - time between about independent draws.
    - **locals** - where the local values start, a
      :class:`~numpyro_sgmcmc.warmup.local_start.LocalStart`; None where there are none.
    """

    anchored: Anchored
    step_size: float
    num_steps: int
    estimator: str
    minibatch: str
    gradient_noise: GradientNoise | None
    noise: Noise
    reading: Reading
    allowed_excess: float | None
    relaxation_time: float
    locals: LocalStart | None = None
