"""What the warm-up's shared part is given, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from numpyro_sgmcmc.data.minibatch import IIDSubsampling, Subsampling
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.dynamics.compensation import GradientNoiseCovariance
from numpyro_sgmcmc.posterior.estimators import GradientEstimator, MinibatchGradient
from numpyro_sgmcmc.posterior.target import IncludedRows, Potential
from numpyro_sgmcmc.posterior.whitening import Preconditioner
from numpyro_sgmcmc.warmup.findings import ModelWarning
from numpyro_sgmcmc.warmup.local_start import LocalLatentsInit
from numpyro_sgmcmc.warmup.moment_source import MonitorGradients
from numpyro_sgmcmc.warmup.noise import NO_NOISE, GradientNoiseStats
from numpyro_sgmcmc.warmup.weighed import AdaptationTrace

__all__ = ["Adaptation", "WarmupSettings", "build_empty_adaptation"]


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
      :class:`~numpyro_sgmcmc.warmup.local_start.LocalStart`; None where there are none.
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
