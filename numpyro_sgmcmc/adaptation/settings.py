"""Where the local values of the chains start.

Where the moments that tell the bias come from: each step for nothing, or now and then apart.

Minibatches of an epoch are not independent of the position, which earlier ones of the same epoch
have moved: where their noise matters the gradient must come from a minibatch of its own. So must
one whose noise would drown what it tells.

What was weighed when the warm-up chose: kept for who asks why.

What the warm-up's shared part is given, and what it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jax import Array

from numpyro_sgmcmc.adaptation.gradient_noise import (
    NO_NOISE,
    GradientNoiseStats,
    NoiseStatsBySubsampling,
)
from numpyro_sgmcmc.data.subsampling import IIDSubsampling, Subsampling
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.dynamics.base import GradientNoiseCovariance
from numpyro_sgmcmc.errors import ModelWarning
from numpyro_sgmcmc.model.gradient_estimators import GradientEstimator, MinibatchGradient
from numpyro_sgmcmc.model.local_latents import LocalValues
from numpyro_sgmcmc.model.potential import IncludedRows, Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner

__all__ = [
    "Adaptation",
    "AdaptationTrace",
    "LocalLatentsInit",
    "MAX_CONVERGED_R_HAT",
    "MONITOR_INTERVAL",
    "MonitorGradients",
    "WarmupSettings",
    "build_empty_adaptation",
    "choose_separate_gradients",
    "choose_step_gradients",
]


class LocalLatentsInit(NamedTuple):
    """
    - **values** - local values of all rows from several pilot chains, which the leading axis
      numbers.
    - **scale** - length scales of the local moves, shape ``(N, k)``.
    - **covariance_factor** - R with ``R R^T`` the covariance of the globals' posterior in whitened
      coordinates, shape ``(d, d)`` or ``(d,)``.
    """

    values: LocalValues
    scale: Array
    covariance_factor: Array


MONITOR_INTERVAL = 20
"""Steps between gradients on a minibatch of their own."""


_MIN_MONITOR_VARIANCE_RATIO = 4.0


_MAX_DIM_MONITORED_EACH_STEP = 10_000


_MAX_STEP_GRADIENT_INTERVAL = 5


class MonitorGradients(NamedTuple):
    """
    - **interval** - steps from one gradient that counts to the next, a divisor of the steps of an
      iteration; 0 for none.
    - **estimator** - that of a gradient on a minibatch of its own, at the end of a step; None for
      the step's own gradient, where it does not depend on the position.
    """

    interval: int = 1
    estimator: GradientEstimator | None = None


def choose_step_gradients(dim: int, num_steps: int) -> MonitorGradients:
    """The steps' own gradients: at every step, or at some where vectors are long.

    Sums of long vectors cost as much as the step's other arithmetic.
    """
    most = 1 if dim <= _MAX_DIM_MONITORED_EACH_STEP else _MAX_STEP_GRADIENT_INTERVAL
    return MonitorGradients(max(k for k in range(1, most + 1) if num_steps % k == 0))


def choose_separate_gradients(
    noise_variances: Mapping[GradientEstimator, float],
    estimator: GradientEstimator,
    is_independent: bool,
    num_steps: int,
) -> MonitorGradients | None:
    """Gradients apart, or None where the steps' own serve.

    :param noise_variances: the gradient's noise by estimator.
    :param estimator: the one with which the chain runs.
    :param is_independent: whether the chain's own minibatches do not depend on its position.
    :param num_steps: steps of an iteration.
    """
    divisors = (k for k in range(1, num_steps + 1) if num_steps % k == 0)
    every = next(k for k in divisors if k >= min(MONITOR_INTERVAL, num_steps))
    best = min(noise_variances, key=lambda e: noise_variances[e])
    own, apart = (
        noise_variances[estimator] / num_steps,
        noise_variances[best] / (num_steps // every),
    )
    if is_independent and own <= _MIN_MONITOR_VARIANCE_RATIO * apart:
        return None
    return MonitorGradients(every, best)


MAX_CONVERGED_R_HAT = 1.1
"""R-hat of pilot chains that have forgotten their starts."""


class AdaptationTrace(NamedTuple):
    """
    - **step_size_limits** - how the step size came to be: by the name of what limits it, how long a step
      may be after that; ``"integrator"``, ``"curvature"``, ``"noise"``, ``"settings"``, ``"means"`` in
      this order, or ``"given"`` alone.
    - **max_curvature** - the largest whitened curvature at typical positions.
    - **noise_variances** - variance of the gradient's noise, mean over whitened coordinates, by estimator: of
      random rows and of blocks; empty where every step reads all rows.
    - **variance_inflation** - relative excess of posterior variances predicted at the step size chosen.
    - **mean_bias** - by how many sds a mean is predicted to be off at most.
    - **num_pilot_windows** - of pilot chains; 0 where there were none of this kind.
    - **r_hat** - of these chains in the last window, the largest of any coordinate.
    """

    step_size_limits: dict[str, float]
    max_curvature: float
    noise_variances: dict[str, tuple[float, float]]
    variance_inflation: float
    mean_bias: float
    num_pilot_windows: int = 0
    r_hat: float = 1.0

    @staticmethod
    def tabulate_noise_variances(
        noise_by_subsampling: NoiseStatsBySubsampling,
    ) -> dict[str, tuple[float, float]]:
        """The noise of each estimator by its name, of random rows and of blocks."""
        return {
            e.name: (of.mean_variance, noise_by_subsampling.contiguous[e].mean_variance)
            for e, of in noise_by_subsampling.iid.items()
        }


@dataclass(frozen=True)
class WarmupSettings:
    """
    - **dynamics** - the SDE.
    - **integrator** - name of the integrator.
    - **bind_dynamics** - the SDE for given coordinates.
    - **step_size** - the user's step size, or None to choose it.
    - **has_constant_step_size** - whether that is the one of all steps: no schedule, and not traced.
    - **num_steps** - the user's steps an iteration, or None to choose.
    - **estimator** - the user's estimator, or None to choose it.
    - **subsampling** - the user's way to visit the rows, or None to choose it.
    - **inverse_mass_matrix** - the user's, shape ``(d,)`` or ``(d, d)``, or None to adapt it.
    - **is_dense** - whether the adapted one is dense.
    - **is_site_aligned** - whether coordinates must be the sites' own, each in its unit: nothing besides
      a diagonal is adapted then.
    - **mass_matrix_mask** - blocks of a structured dense one, shape ``(d, d)``, or None.
    - **target_sd_bias** - allowed relative error of posterior sds.
    - **noise_compensation** - whether the gradient's noise is taken from what is injected.
    - **init_in_modes** - whether chains start in each of the modes found.
    - **has_init_params** - whether the first start is the user's.
    - **has_dominant_mode** - whether pilot chains have found one in which means can be predicted.
    """

    dynamics: Dynamics
    integrator: str
    bind_dynamics: Callable[[Preconditioner], Dynamics]
    step_size: float | None
    has_constant_step_size: bool
    num_steps: int | None
    estimator: GradientEstimator | None
    subsampling: Subsampling | None
    inverse_mass_matrix: np.ndarray | None
    is_dense: bool
    is_site_aligned: bool
    mass_matrix_mask: np.ndarray | None
    target_sd_bias: float
    noise_compensation: bool
    init_in_modes: bool
    has_init_params: bool
    has_dominant_mode: bool = True

    @property
    def is_fully_specified(self) -> bool:
        """Whether all that a warm-up looks for is given: then it need not look for it."""
        given = (self.step_size, self.num_steps, self.estimator, self.subsampling)
        has_all = all(x is not None for x in (*given, self.inverse_mass_matrix))
        # Control variates need an anchor in the posterior's midst.
        has_anchor = self.has_init_params or not (self.estimator and self.estimator.needs_reference)
        return has_all and has_anchor and not self.noise_compensation


class Adaptation(NamedTuple):
    """
    - **preconditioner** - coordinates and the full gradient at their anchor.
    - **step_size** - step size.
    - **num_steps** - steps an iteration.
    - **estimator** - how the gradient is estimated.
    - **subsampling** - how the rows are visited.
    - **gradient_noise_covariance** - covariance of the gradient's noise, if it is compensated; else None.
    - **noise_stats** - the noise measured at typical positions.
    - **monitor_gradients** - where the moments come from that tell the bias.
    - **allowed_variance_inflation** - excess of temperature at which a chain in warm-up does not shorten its
      step; None where the step size is the user's.
    - **relaxation_time** - time between about independent draws.
    - **uses_init_strategy** - whether nothing was looked for: the chains then start where the initialisation
      strategy says.
    - **included_rows** - rows that are in every minibatch, by plate.
    - **model_warnings** - what makes the posterior wrong whatever the chains say.
    - **other_mode_preconditioners** - coordinates about other modes, in which chains start in turn.
    - **has_dominant_mode** - whether pilot chains have found a single region.
    - **local_init** - where the local values start, a
      :class:`~numpyro_sgmcmc.adaptation.settings.LocalStart`; None where there are none.
    - **trace** - what these choices were made by; None where nothing was looked for.
    """

    preconditioner: Preconditioner
    step_size: float
    num_steps: int
    estimator: GradientEstimator
    subsampling: Subsampling
    gradient_noise_covariance: GradientNoiseCovariance | None
    noise_stats: GradientNoiseStats
    monitor_gradients: MonitorGradients
    allowed_variance_inflation: float | None
    relaxation_time: float
    uses_init_strategy: bool = False
    included_rows: IncludedRows = ()
    model_warnings: tuple[ModelWarning, ...] = ()
    other_mode_preconditioners: tuple[Preconditioner, ...] = ()
    has_dominant_mode: bool = True
    local_init: LocalLatentsInit | None = None
    trace: AdaptationTrace | None = None


def build_empty_adaptation(potential: Potential, settings: WarmupSettings) -> Adaptation:
    """What chains of a model without latent values share: nothing that matters."""
    nowhere = np.zeros(0)
    whitening = Preconditioner(nowhere, np.zeros((0, 0)) if settings.is_dense else nowhere, nowhere)
    return Adaptation(
        preconditioner=whitening.cast(potential.dtype),
        step_size=settings.step_size or 1.0,
        num_steps=settings.num_steps or 1,
        estimator=MinibatchGradient(),
        subsampling=settings.subsampling or IIDSubsampling(),
        gradient_noise_covariance=None,
        noise_stats=NO_NOISE,
        monitor_gradients=MonitorGradients(),
        allowed_variance_inflation=None,
        relaxation_time=1.0,
    )
