"""What the stages of the warm-up share: the potential, noise and curvature measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgmcmc.adaptation import initialisation
from numpyro_sgmcmc.adaptation.batched_gradients import (
    BatchedGradients,
    JittedPotential,
    assemble_hessian,
    sample_minibatch_indices,
)
from numpyro_sgmcmc.adaptation.budget import WarmupBudget
from numpyro_sgmcmc.adaptation.gradient_noise import (
    GradientNoiseStats,
    NoiseStatsBySubsampling,
    estimate_max_curvature,
    measure_noise,
)
from numpyro_sgmcmc.adaptation.pilot import PILOT_DYNAMICS
from numpyro_sgmcmc.adaptation.preconditioning import factor_from_curvature
from numpyro_sgmcmc.adaptation.settings import WarmupSettings
from numpyro_sgmcmc.adaptation.step_size import limit_step_size_by_noise
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import SUBSAMPLINGS, IIDSubsampling, Indices, Subsampling
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.model.gradient_estimators import (
    GRADIENT_ESTIMATORS,
    GradientEstimator,
    MinibatchGradient,
)
from numpyro_sgmcmc.model.potential import IncludedRows, Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.progress import ProgressReporter

__all__ = ["EstimatorChoice", "WarmupContext"]

_MAX_HESSIAN_DIM = 200  # beyond, a Hessian is formed only where it is asked for

EstimatorChoice = tuple[GradientEstimator, float, float]
"""An estimator, its step size, and the relative excess of the posterior variance predicted."""


class WarmupContext:
    """What the stages of one warm-up share, and nothing that outlives them.

    :param potential: the posterior.
    :param arguments: the model's arguments, concrete.
    :param settings: what the user has fixed.
    :param progress: told how far it has come.
    """

    def __init__(
        self,
        potential: Potential,
        arguments: Arguments,
        settings: WarmupSettings,
        progress: ProgressReporter,
    ) -> None:
        self.potential, self.progress = potential, progress
        self.rng = np.random.default_rng(initialisation.WARMUP_SEED)
        self.set_arguments(arguments)
        self.set_settings(settings)

    def set_settings(self, settings: WarmupSettings) -> None:
        """Take this from now on as what is fixed."""
        self.settings = settings
        self.candidate_estimators = self._list_candidate_estimators()

    @property
    def is_fully_specified(self) -> bool:
        """Whether all that a warm-up looks for is given, or there is nothing to choose from."""
        settings = self.settings
        if (
            not self.potential.plates
        ):  # all rows at every step: one estimator, one way to visit them
            settings = replace(
                settings, estimator=MinibatchGradient(), subsampling=IIDSubsampling()
            )
        return settings.is_fully_specified

    def set_arguments(self, arguments: Arguments) -> None:
        """Have these arguments in all that looks at the potential."""
        # On the device once, and not at every call.
        self.arguments = arguments = arguments.map_arrays(jnp.asarray)
        self.full_data_potential = JittedPotential(self.potential, arguments)
        self.subset_potential = JittedPotential.from_random_subset(self.potential, arguments)
        self.budget = WarmupBudget.for_potential(self.potential, arguments)
        self.set_included_rows(())

    def set_included_rows(self, included_rows: IncludedRows) -> None:
        """Have these rows in every minibatch of a step."""
        self.batched_gradients = BatchedGradients(
            self.potential, self.arguments, self.budget.num_representative_rows, included_rows
        )

    def _list_candidate_estimators(self) -> tuple[GradientEstimator, ...]:
        """The estimators among which to choose."""
        target, gradient = self.potential, self.settings.estimator
        # With local values the Hessian at the anchor moves with them.
        is_global = target.local_latents is None
        if is_global and (not target.plates or target.is_stochastic):
            return (MinibatchGradient(),)
        if gradient is not None:
            return (gradient,)
        has_hessian = is_global and self.settings.is_dense and target.dim <= _MAX_HESSIAN_DIM
        return tuple(e for e in GRADIENT_ESTIMATORS.values() if has_hessian or not e.needs_hessian)

    def cast(self, x: np.ndarray) -> Array:
        """In the model's type."""
        return jnp.asarray(x, self.potential.dtype)

    def sample_indices(self, shape: tuple[int, ...], subsampling: Subsampling) -> Indices:
        """Independent minibatches of a scheme's kind, ``shape + (subsample_size,)`` each plate."""
        return sample_minibatch_indices(
            self.batched_gradients.step_potential, self.rng, shape, subsampling
        )

    def find_finite_positions(
        self, init_positions: Iterable[np.ndarray], num_positions: int
    ) -> list[np.ndarray]:
        """The first different starts that are finite.

        :param init_positions: positions, of which as many are looked at as it takes.
        :param num_positions: number of them.
        :raises RuntimeError: where none is finite.
        """
        found: list[np.ndarray] = []
        for position in init_positions:
            is_new = not any(np.array_equal(position, other) for other in found)
            if is_new and self.batched_gradients.is_finite(position):
                found.append(position)
            if len(found) == num_positions:
                break
        if not found:
            raise RuntimeError(
                "Cannot find a starting point with a finite log density and gradient. "
                + self.potential.diagnose_nonfinite(self.cast(position), self.arguments)
            )
        return found

    def check_finite_gradient(self, preconditioner: Preconditioner) -> None:
        """Refuse to go on where the gradient on all rows is not finite.

        :raises RuntimeError: naming what is not.
        """
        if not preconditioner.is_finite():
            raise RuntimeError(
                "The gradient on all rows is not finite where the warm-up begins. "
                + self.potential.diagnose_nonfinite(
                    self.cast(preconditioner.center), self.arguments
                )
            )

    def compute_hessian(
        self, potential: JittedPotential, position: np.ndarray
    ) -> np.ndarray | None:
        """The Hessian where it is small enough to form or the user wants it dense."""
        if self.potential.dim <= _MAX_HESSIAN_DIM:
            return potential.value_grad_hessian(position)[2]
        return assemble_hessian(potential, position) if self.settings.is_dense else None

    def add_reference_hessian(
        self, preconditioner: Preconditioner, estimator: GradientEstimator
    ) -> Preconditioner:
        """With the full Hessian at its anchor, if the estimator needs it."""
        if not estimator.needs_hessian or preconditioner.reference_hessian is not None:
            return preconditioner
        return preconditioner._replace(
            reference_hessian=self.batched_gradients.full_hessian(preconditioner.center)
        )

    def compute_curvature_factor(self, position: np.ndarray) -> np.ndarray:
        """L from the curvature on all rows."""
        hessian = self.compute_hessian(self.full_data_potential, position)
        settings = self.settings
        return factor_from_curvature(
            hessian, settings.mass_matrix_mask, settings.is_dense, self.subset_potential, position
        )

    def build_preconditioner(self, center: np.ndarray, factor: np.ndarray) -> Preconditioner:
        """The coordinates about a position, with the gradient on all rows there."""
        return Preconditioner(center, factor, self.batched_gradients.full_gradient(center))

    def measure_max_curvature(self, preconditioner: Preconditioner, q: np.ndarray) -> float:
        """Largest whitened curvature at some typical positions."""
        if self.potential.is_stochastic:
            return 1.0
        return estimate_max_curvature(
            self.batched_gradients, preconditioner, q, self.budget.num_power_iterations, self.rng
        )

    def measure_noise_by_subsampling(
        self,
        preconditioner: Preconditioner,
        q: np.ndarray,
        estimators: tuple[GradientEstimator, ...] | None = None,
    ) -> NoiseStatsBySubsampling:
        """The whitened gradient's noise by kind of rows and estimator.

        :param q: whitened positions, of which the first few are taken.
        :param estimators: default: those among which the warm-up chooses.
        """
        schemes = SUBSAMPLINGS["iid"], SUBSAMPLINGS["contiguous"]
        estimators = estimators or self.candidate_estimators
        return NoiseStatsBySubsampling(
            *(self.measure_gradient_noise(preconditioner, q, estimators, s) for s in schemes)
        )

    def measure_gradient_noise(
        self,
        preconditioner: Preconditioner,
        q: np.ndarray,
        estimators: tuple[GradientEstimator, ...],
        subsampling: Subsampling,
    ) -> dict[GradientEstimator, GradientNoiseStats]:
        """The same for one kind of rows."""
        num = self.budget.max_noise_minibatches
        return measure_noise(
            self.batched_gradients, preconditioner, q, estimators, subsampling, num, self.rng
        )

    def choose_estimator(
        self,
        dynamics: Dynamics,
        integrator_step_size: float,
        noise_stats: dict[GradientEstimator, GradientNoiseStats],
        max_curvature: float,
        target_sd_bias: float,
    ) -> EstimatorChoice:
        """The estimator that goes furthest at the same cost."""
        choices = []
        for estimator in self.candidate_estimators:
            step_size, inflation = limit_step_size_by_noise(
                dynamics,
                integrator_step_size,
                noise_stats[estimator],
                max_curvature,
                target_sd_bias,
                is_compensated=self.settings.noise_compensation and dynamics is not PILOT_DYNAMICS,
            )
            # Beyond the target a shorter step is not to be had: what counts then is the noise.
            excess = max(1.0, 2.0 * inflation / target_sd_bias)
            time = dynamics.relaxation_time(step_size, noise_stats[estimator].variance)
            cost = estimator.relative_cost * excess * time / step_size
            choices.append((cost, estimator, step_size, inflation))
        return min(choices, key=lambda c: (c[0], c[1].name))[1:]
