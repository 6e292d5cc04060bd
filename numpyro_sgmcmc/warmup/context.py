"""What the stages of the warm-up share: the potential, noise and curvature measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.minibatch import IID, MINIBATCH_SCHEMES, MinibatchScheme
from numpyro_sgmcmc.data.plates import Indices
from numpyro_sgmcmc.data.progress import Stages
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.posterior.estimators import ESTIMATORS, Estimator, Plain
from numpyro_sgmcmc.posterior.target import Decisive, Target
from numpyro_sgmcmc.posterior.whitening import Whitening
from numpyro_sgmcmc.warmup import starts
from numpyro_sgmcmc.warmup.eager_potential import EagerPotential
from numpyro_sgmcmc.warmup.effort import Effort
from numpyro_sgmcmc.warmup.factors import (
    factor_from_curvature,
    hessian_by_products,
)
from numpyro_sgmcmc.warmup.measure import largest_curvature_on, measure_noise
from numpyro_sgmcmc.warmup.noise import Noise, NoiseOfRows, draw_rows
from numpyro_sgmcmc.warmup.pilot import PILOT
from numpyro_sgmcmc.warmup.row_gradients import RowGradients
from numpyro_sgmcmc.warmup.settings import Settings
from numpyro_sgmcmc.warmup.step_size import choose_step_size

__all__ = ["Choice", "Context"]

_HESSIAN_MAX_DIM = 200  # beyond, a Hessian is formed only where it is asked for

Choice = tuple[Estimator, float, float]
"""An estimator, its step size, and the relative excess of the posterior variance predicted."""


class Context:
    """What the stages of one warm-up share, and nothing that outlives them.

    :param target: the posterior.
    :param arguments: the model's arguments, concrete.
    :param settings: what the user has fixed.
    :param progress: told how far it has come.
    """

    def __init__(
        self,
        target: Target,
        arguments: Arguments,
        settings: Settings,
        progress: Stages,
    ) -> None:
        self.target, self.progress = target, progress
        self.rng = np.random.default_rng(starts.SEED)
        self.look_at(arguments)
        self.fix(settings)

    def fix(self, settings: Settings) -> None:
        """Take this from now on as what is fixed."""
        self.settings = settings
        self.estimators = self._candidates()

    @property
    def leaves_nothing_to_find(self) -> bool:
        """Whether all that a warm-up looks for is given, or there is nothing to choose from."""
        settings = self.settings
        if not self.target.plates:  # all rows at every step: one estimator, one way to visit them
            settings = replace(settings, gradient=Plain(), minibatch=IID())
        return settings.leaves_nothing_to_find

    def look_at(self, arguments: Arguments) -> None:
        """Have these arguments in all that looks at the potential."""
        # On the device once, and not at every call.
        self.arguments = arguments = arguments.map_arrays(jnp.asarray)
        self.all_rows = EagerPotential(self.target, arguments)
        self.some_rows = EagerPotential.on_some_rows(self.target, arguments)
        self.effort = Effort.of(self.target, arguments)
        self.hold(())

    def hold(self, decisive: Decisive) -> None:
        """Have these rows in every minibatch of a step."""
        self.rows = RowGradients(self.target, self.arguments, self.effort.rows, decisive)

    def _candidates(self) -> tuple[Estimator, ...]:
        """The estimators among which to choose."""
        target, gradient = self.target, self.settings.gradient
        # With local values the Hessian at the anchor moves with them.
        is_global = target.locals is None
        if is_global and (not target.plates or target.is_randomized):
            return (Plain(),)
        if gradient is not None:
            return (gradient,)
        has_hessian = is_global and self.settings.is_dense and target.dim <= _HESSIAN_MAX_DIM
        return tuple(e for e in ESTIMATORS.values() if has_hessian or not e.needs_hessian)

    def cast(self, x: np.ndarray) -> Array:
        """In the model's type."""
        return jnp.asarray(x, self.target.dtype)

    def draw_rows(self, shape: tuple[int, ...], scheme: MinibatchScheme) -> Indices:
        """Independent minibatches of a scheme's kind, ``shape + (subsample_size,)`` each plate."""
        return draw_rows(self.rows.step_target, self.rng, shape, scheme)

    def finite_starts(self, starts: Iterable[np.ndarray], wanted: int) -> list[np.ndarray]:
        """The first different starts that are finite.

        :param starts: positions, of which as many are looked at as it takes.
        :param wanted: number of them.
        :raises RuntimeError: where none is finite.
        """
        found: list[np.ndarray] = []
        for position in starts:
            is_new = not any(np.array_equal(position, other) for other in found)
            if is_new and self.rows.is_finite(position):
                found.append(position)
            if len(found) == wanted:
                break
        if not found:
            raise RuntimeError(
                "Cannot find a starting point with a finite log density and gradient. "
                + self.target.explain(self.cast(position), self.arguments)
            )
        return found

    def refuse_infinite_gradient(self, whitening: Whitening) -> None:
        """Refuse to go on where the gradient on all rows is not finite.

        :raises RuntimeError: naming what is not.
        """
        if not whitening.is_finite():
            raise RuntimeError(
                "The gradient on all rows is not finite where the warm-up begins. "
                + self.target.explain(self.cast(whitening.anchor), self.arguments)
            )

    def hessian(self, potential: EagerPotential, position: np.ndarray) -> np.ndarray | None:
        """The Hessian where it is small enough to form or the user wants it dense."""
        if self.target.dim <= _HESSIAN_MAX_DIM:
            return potential.expansion(position)[2]
        return hessian_by_products(potential, position) if self.settings.is_dense else None

    def with_hessian(self, whitening: Whitening, estimator: Estimator) -> Whitening:
        """With the full Hessian at its anchor, if the estimator needs it."""
        if not estimator.needs_hessian or whitening.hessian is not None:
            return whitening
        return whitening._replace(hessian=self.rows.hessian(whitening.anchor))

    def factor_at(self, position: np.ndarray) -> np.ndarray:
        """L from the curvature on all rows."""
        hessian = self.hessian(self.all_rows, position)
        settings = self.settings
        return factor_from_curvature(
            hessian, settings.mask, settings.is_dense, self.some_rows, position
        )

    def whitening_at(self, anchor: np.ndarray, factor: np.ndarray) -> Whitening:
        """The coordinates about a position, with the gradient on all rows there."""
        return Whitening(anchor, factor, self.rows.everywhere(anchor))

    def curvature(self, whitening: Whitening, q: np.ndarray) -> float:
        """Largest whitened curvature at some typical positions."""
        if self.target.is_randomized:
            return 1.0
        return largest_curvature_on(self.rows, whitening, q, self.effort.rounds, self.rng)

    def noise(
        self,
        whitening: Whitening,
        q: np.ndarray,
        estimators: tuple[Estimator, ...] | None = None,
    ) -> NoiseOfRows:
        """The whitened gradient's noise by kind of rows and estimator.

        :param q: whitened positions, of which the first few are taken.
        :param estimators: default: those among which the warm-up chooses.
        """
        schemes = MINIBATCH_SCHEMES["iid"], MINIBATCH_SCHEMES["blocks"]
        estimators = estimators or self.estimators
        return NoiseOfRows(*(self.noise_of(whitening, q, estimators, s) for s in schemes))

    def noise_of(
        self,
        whitening: Whitening,
        q: np.ndarray,
        estimators: tuple[Estimator, ...],
        scheme: MinibatchScheme,
    ) -> dict[Estimator, Noise]:
        """The same for one kind of rows."""
        num = self.effort.minibatches
        return measure_noise(self.rows, whitening, q, estimators, scheme, num, self.rng)

    def cheapest(
        self,
        dynamics: Dynamics,
        largest: float,
        noise: dict[Estimator, Noise],
        curvature: float,
        target_bias: float,
    ) -> Choice:
        """The estimator that goes furthest at the same cost."""
        choices = []
        for estimator in self.estimators:
            step_size, inflation = choose_step_size(
                dynamics,
                largest,
                noise[estimator],
                curvature,
                target_bias,
                is_compensated=self.settings.noise_compensation and dynamics is not PILOT,
            )
            # Beyond the target a shorter step is not to be had: what counts then is the noise.
            excess = max(1.0, 2.0 * inflation / target_bias)
            time = dynamics.relaxation_time(step_size, noise[estimator].variance)
            cost = estimator.cost * excess * time / step_size
            choices.append((cost, estimator, step_size, inflation))
        return min(choices, key=lambda c: (c[0], c[1].name))[1:]
