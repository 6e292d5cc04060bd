"""Inputs and results of the warm-up.

:class:`WarmupInputs` is what every stage reads, :class:`WarmupSettings` the part of it that the
user has fixed, :class:`Candidates` what a stage may still choose. :class:`Adaptation` is the
result, which all chains share; its :class:`AdaptationTrace` records the numbers behind the choices
for ``warmup_report``. All of them are immutable.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgmcmc.adaptation.batched_gradients import BatchedGradients
from numpyro_sgmcmc.adaptation.budget import WarmupBudget
from numpyro_sgmcmc.adaptation.gradient_noise import NO_NOISE, GradientNoiseStats
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import IIDSubsampling, Subsampling
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.dynamics.base import GradientNoiseCovariance
from numpyro_sgmcmc.errors import ModelWarning
from numpyro_sgmcmc.model.gradient_estimators import GradientEstimator, MinibatchGradient
from numpyro_sgmcmc.model.local_latents import LocalValues
from numpyro_sgmcmc.model.potential import IncludedRows, Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.progress import ProgressReporter

if TYPE_CHECKING:
    from numpyro_sgmcmc.adaptation.step_size import PredictedMeanBias

MAX_CONVERGED_R_HAT = 1.1
"""R-hat of pilot chains below which they count as converged (Gelman and Rubin 1992)."""

WARMUP_SEED = 0
"""Seed of the warm-up: its result depends on model, data and options, not on the run's key."""

# Largest allowed bias of a mean in posterior SDs, relative to the target for SDs.
_MEAN_BIAS_TO_TARGET_RATIO = 1.2
# Relative reduction of the step size below which a limit does not count as binding.
_BINDING_TOLERANCE = 0.01


@dataclass(frozen=True)
class WarmupSettings:
    """The kernel's options as the warm-up reads them; None stands for what it has to choose."""

    dynamics: Dynamics
    integrator: str
    hierarchy_integrator: str | None  # of models with effects of many groups; None for the same
    # maps a preconditioner to the SDE in its coordinates
    bind_dynamics: Callable[[Preconditioner], Dynamics]
    step_size: float | None
    has_constant_step_size: bool  # False for a schedule and for a traced step size
    num_steps: int | None  # steps per iteration
    estimator: GradientEstimator | None
    subsampling: Subsampling | None
    inverse_mass_matrix: np.ndarray | None  # shape `(d,)` or `(d, d)`
    is_dense: bool  # whether an adapted mass matrix is dense
    is_form_free: bool  # whether that was left to the warm-up
    # whether coordinates must be those of the sites: only a diagonal is adapted then
    is_site_aligned: bool
    # blocks of a structured dense matrix, shape `(d, d)`, or None
    mass_matrix_mask: np.ndarray | None
    target_sd_bias: float  # allowed relative error of posterior SDs
    noise_compensation: bool  # whether gradient noise is subtracted from the injected noise
    init_in_modes: bool  # whether chains start in each of the detected modes
    has_init_params: bool  # whether the first initial position is the user's

    def for_integrator(self, name: str) -> WarmupSettings:
        """Return the settings with another integrator."""
        if name == self.integrator:
            return self
        dynamics = self.dynamics.for_integrator(name)
        return replace(
            self, dynamics=dynamics, integrator=name, bind_dynamics=lambda preconditioner: dynamics
        )

    @property
    def max_mean_bias(self) -> float:
        """Largest allowed bias of a mean, in posterior SDs."""
        return _MEAN_BIAS_TO_TARGET_RATIO * self.target_sd_bias


@dataclass(frozen=True)
class WarmupInputs:
    """The input of every stage of the warm-up."""

    potential: Potential
    arguments: Arguments  # the model's arguments, concrete and on the device
    settings: WarmupSettings
    budget: WarmupBudget  # number of gradients that each stage may take
    progress: ProgressReporter = field(default_factory=ProgressReporter)  # display of the stages
    included_rows: IncludedRows = ()  # influential observations in every minibatch, by plate
    # longest step size that the other observations of a hierarchy allow with control variates
    max_step_size: float = math.inf
    # random generator, shared by all stages
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(WARMUP_SEED))

    @classmethod
    def create(
        cls,
        potential: Potential,
        arguments: Arguments,
        settings: WarmupSettings,
        progress: ProgressReporter | None = None,
    ) -> WarmupInputs:
        """Move the arguments to the device and choose the budget."""
        arguments = arguments.map_arrays(jnp.asarray)  # once, and not at every call
        budget = WarmupBudget.for_potential(potential, arguments)
        return cls(potential, arguments, settings, budget, progress or ProgressReporter())

    @cached_property
    def batched_gradients(self) -> BatchedGradients:
        """Gradients on minibatches, which the stages share."""
        return BatchedGradients(self.potential, self.arguments, self.budget, self.included_rows)

    @property
    def is_fully_specified(self) -> bool:
        """True where the user fixed, or the model determines, all that a warm-up chooses."""
        settings = self.settings
        estimator, subsampling = settings.estimator, settings.subsampling
        if not self.potential.has_minibatches:  # every step takes the whole data
            estimator, subsampling = MinibatchGradient(), IIDSubsampling()
        given = (settings.step_size, settings.num_steps, estimator, subsampling)
        has_all = all(x is not None for x in (*given, settings.inverse_mass_matrix))
        # A control variate needs a reference in the bulk of the posterior.
        has_reference = settings.has_init_params or not (estimator and estimator.needs_reference)
        return has_all and has_reference and not settings.noise_compensation

    def cast(self, x: np.ndarray | float) -> Array:
        """Return an array in the model's floating-point type."""
        return jnp.asarray(x, self.potential.dtype)


@dataclass(frozen=True)
class Candidates:
    """The gradient estimators and subsampling among which a stage may choose."""

    estimators: tuple[GradientEstimator, ...]
    subsampling: Subsampling | None  # None where it is to be chosen
    is_estimator_free: bool  # whether the estimator was left to the warm-up


@dataclass(frozen=True)
class SubsamplingChoice:
    """A gradient estimator, a subsampling, and the step size at which noise allows them."""

    estimator: GradientEstimator
    subsampling: Subsampling
    noise_stats: GradientNoiseStats  # gradient noise in preconditioned coordinates
    step_size: float  # longest step size for the curvature and this noise
    variance_inflation: float  # relative increase of posterior variances predicted at it
    max_curvature: float  # largest preconditioned curvature
    # longest step size that the gradients of single observations of a hierarchy allow
    max_step_size: float = math.inf
    # multiplications of a step by a large matrix, which do not depend on the batch size
    num_factor_products: int = 0


@dataclass(frozen=True)
class StepSizeTrace:
    """The limits that were applied to the step size one after the other.

    - **limits** - the step size after each limit, in the order of their application. ``"user"``
      stands alone; otherwise these are the ``"integrator"``'s default step size, ``"stability"`` at
      the largest curvature, ``"gradient_noise"`` (bias of SDs), ``"dynamics"`` (discretisation
      error with the kernel's options), ``"observations"`` (gradients of single observations of a
      hierarchy), ``"mean_bias"`` (bias of means) and, if chains start in several modes,
      ``"other_modes"``.
    """

    limits: dict[str, float]

    @property
    def step_size(self) -> float:
        """The step size after all limits."""
        return list(self.limits.values())[-1]

    @property
    def binding(self) -> dict[str, float]:
        """The limits that reduced the step size by at least 1%, in their order."""
        binding, current = {}, next(iter(self.limits.values()))
        for name, step_size in self.limits.items():
            if step_size < (1.0 - _BINDING_TOLERANCE) * current:
                binding[name] = current = step_size
        return binding


class MonitorGradients(NamedTuple):
    """Gradients from which a chain estimates its bias.

    - **interval** - steps between two such gradients, a divisor of the steps of an iteration; 0
      for none.
    - **estimator** - estimator of a gradient on a separate minibatch at the end of a step; None
      for the gradient of the step itself, where that is independent of the position.
    """

    interval: int = 1
    estimator: GradientEstimator | None = None


class LocalLatentsInit(NamedTuple):
    """Initial local latent variables."""

    # local values of all observations, stacked along a leading axis of pilot chains
    values: LocalValues
    # R with `R R^T` the posterior covariance of the global parameters in preconditioned
    # coordinates, shape `(d, d)` or `(d,)`
    covariance_factor: Array


class AdaptationTrace(NamedTuple):
    """The numbers behind the choices of a warm-up.

    - **max_curvature** - the largest preconditioned curvature in the bulk of the posterior.
    - **noise_variances** - variance of the gradient noise, mean over preconditioned coordinates,
      by name of the estimator: with iid and with contiguous minibatches; empty where every step
      takes the whole data.
    - **variance_inflation** - relative increase of posterior variances predicted at the step size.
    - **mean_bias** - largest predicted bias of a mean, in posterior SDs.
    - **num_pilot_windows** - windows of pilot chains; 0 for the warm-up with local latents.
    - **r_hat** - largest R-hat of the pilot chains in their last window.
    - **is_converged** - whether these chains agreed.
    - **hierarchy_note** - why the effects of many groups have no coordinates by group; empty where
      they have, and where there are no such effects.
    - **choice**, **predicted_mean_bias** - from which draws with minibatches of other sizes are
      predicted; None where nothing can be predicted.
    """

    step_size_limits: StepSizeTrace
    max_curvature: float
    noise_variances: dict[str, tuple[float, float]]
    variance_inflation: float
    mean_bias: float
    num_pilot_windows: int = 0
    r_hat: float = 1.0
    is_converged: bool = True
    hierarchy_note: str = ""
    choice: SubsamplingChoice | None = None
    predicted_mean_bias: PredictedMeanBias | None = None


class Adaptation(NamedTuple):
    """The result of the warm-up, which all chains share."""

    preconditioner: Preconditioner  # coordinates and the full-data gradient at their center
    step_size: float
    num_steps: int  # steps per iteration
    estimator: GradientEstimator
    subsampling: Subsampling
    # covariance of the gradient noise if that is compensated, or None
    gradient_noise_covariance: GradientNoiseCovariance | None = None
    noise_stats: GradientNoiseStats = NO_NOISE  # gradient noise in the bulk of the posterior
    monitor_gradients: MonitorGradients = MonitorGradients()  # from which the bias is estimated
    # increase of the kinetic temperature up to which a chain in warm-up keeps its step size; None
    # for the user's step size
    allowed_variance_inflation: float | None = None
    relaxation_time: float = 1.0  # time between approximately independent draws
    # whether chains start by the initialisation strategy, since every setting was given
    uses_init_strategy: bool = False
    # influential observations included in every minibatch, by plate
    included_rows: IncludedRows = ()
    # detected properties of the posterior that make draws wrong
    model_warnings: tuple[ModelWarning, ...] = ()
    # coordinates about the other modes in which chains start
    other_mode_preconditioners: tuple[Preconditioner, ...] = ()
    # whether pilot chains found one mode that holds most of the mass
    has_dominant_mode: bool = True
    local_init: LocalLatentsInit | None = None  # initial local latent variables, or None
    integrator: str | None = None  # the integrator, where it differs from the kernel's default
    # the numbers behind these choices; None where every setting was given
    trace: AdaptationTrace | None = None


def build_empty_adaptation(potential: Potential, settings: WarmupSettings) -> Adaptation:
    """Return the adaptation of a model without latent sites."""
    empty = np.zeros(0)
    preconditioner = Preconditioner(empty, np.zeros((0, 0)) if settings.is_dense else empty, empty)
    return Adaptation(
        preconditioner=preconditioner.cast(potential.dtype),
        step_size=settings.step_size or 1.0,
        num_steps=settings.num_steps or 1,
        estimator=MinibatchGradient(),
        subsampling=settings.subsampling or IIDSubsampling(),
    )
