"""What the stages of the warm-up share: the potential, the budget, noise and curvature measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.minibatch import MINIBATCH_SCHEMES, MinibatchScheme
from numpyro_sgmcmc.data.plates import Indices
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.posterior.estimators import ESTIMATORS, ControlVariate, Estimator, Plain
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.posterior.whitening import Whitening
from numpyro_sgmcmc.warmup.eager_potential import EagerPotential, draw_subset
from numpyro_sgmcmc.warmup.factors import (
    factor_from_curvature,
    hessian_by_products,
    largest_curvature,
)
from numpyro_sgmcmc.warmup.noise import NO_NOISE, Noise, NoiseOfRows, draw_rows, measure_noise
from numpyro_sgmcmc.warmup.pilot import PILOT
from numpyro_sgmcmc.warmup.row_gradients import RowGradients, minibatches_of
from numpyro_sgmcmc.warmup.settings import Settings
from numpyro_sgmcmc.warmup.step_size import choose_step_size
from numpyro_sgmcmc.warmup.warm_start import NEWTON_MAX_DIM

__all__ = ["Choice", "Context"]

_WORK = 5e8  # rows a minibatch times coordinates times steps: bounds each stage's cost
_CHEAP_STEPS = 2_000  # where so many steps are affordable, noise is measured with many minibatches
_POSITIONS, _MINIBATCHES = 16, 128
_FEW_POSITIONS, _FEW_MINIBATCHES = 4, 4

Choice = tuple[Estimator, float, float]
"""An estimator, its step size, and the relative excess of the posterior variance predicted."""


class Context:
    """What the stages of one warm-up share, and nothing that outlives them.

    :param target: the posterior.
    :param arguments: the model's arguments, concrete.
    :param settings: what the user has fixed.
    :param progress: called with the name of each stage before it starts.
    """

    def __init__(
        self,
        target: Target,
        arguments: Arguments,
        settings: Settings,
        progress: Callable[[str], None],
    ) -> None:
        self.target, self.settings, self.progress = target, settings, progress
        self.rng = np.random.default_rng(0)
        self.look_at(arguments)
        batch = sum(p.subsample_size for p in target.plates) or 1
        self.affordable = int(_WORK / (batch * target.dim))
        self.is_wide = target.dim > NEWTON_MAX_DIM and target.locals is None
        self.is_cheap = self.affordable >= _CHEAP_STEPS
        self.estimators = self._candidates()

    def look_at(self, arguments: Arguments) -> None:
        """Have these arguments in all that looks at the potential."""
        self.arguments = arguments
        self.all_rows = EagerPotential(self.target, arguments)
        self.some_rows = EagerPotential.on_some_rows(self.target, arguments)
        self.row_gradients = RowGradients(self.target, arguments)
        self.some_minibatches = list(
            minibatches_of(self.target.groups, draw_subset(self.target, 0))
        )
        self.trace = []

    def some_gradients(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Potentials and gradients on rows that stand for all, at each position."""
        return self.row_gradients.mean(positions, self.some_minibatches)

    def gradients_at(self, whitening: Whitening, positions: np.ndarray) -> np.ndarray:
        """Gradients on all rows, from some rows and the exact one at the anchor."""
        _, found = self.some_gradients(np.concatenate([positions, whitening.anchor[None]]))
        return found[:-1] + (whitening.gradient - found[-1])

    def row_noise(
        self,
        whitening: Whitening,
        q: np.ndarray,
        estimators: tuple[Estimator, ...],
        scheme: MinibatchScheme,
    ) -> dict[Estimator, Noise]:
        """The whitened gradient's noise on minibatches of a scheme's kind."""
        if not self.target.plates:
            return dict.fromkeys(estimators, NO_NOISE)
        num_positions, num = 8, 64
        rows = self.draw_rows((num,), scheme)
        minibatches = [{name: r[m] for name, r in rows.items()} for m in range(num)]
        positions = whitening.position(q[:num_positions])
        at = np.concatenate([positions, whitening.anchor[None]])
        pairs = [(x, rows) for x in at for rows in minibatches]
        found = np.stack([g for _, g in self.row_gradients.each(pairs)])
        found = whitening.pull(found).reshape(len(at), num, -1)
        of = {Plain(): found[:-1], ControlVariate(): found[:-1] - found[-1]}
        return {
            e: Noise.of(of[e].var(1, ddof=1), num, True)._replace(order=e.noise_order)
            for e in estimators
            if e in of
        }

    def mean_shift(
        self, whitening: Whitening, q: np.ndarray, variances: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        r"""How far small excess variances move the posterior's mean, to first order.

        .. math:: \Delta = -\tfrac12 E[D^2\nabla U(\zeta, \zeta)], \qquad \zeta \sim N(0, \text{excess})

        :param variances: the excess, in whitened units, shape ``(d,)``.
        :return: the shift in whitened units, a unit of excess, and its standard error.
        """
        unit = variances.max()
        at = whitening.position(q[:8])
        zeta = self.rng.standard_normal((4, *at.shape)) * np.sqrt(variances / unit)
        reach = 0.5
        step = reach * whitening.push(zeta.reshape(-1, at.shape[1])).reshape(zeta.shape)
        points = np.concatenate([at[None], at + step, at - step]).reshape(-1, at.shape[1])
        _, g = self.some_gradients(points)
        g = whitening.pull(g).reshape(-1, *at.shape)
        bend = (g[1:5] + g[5:] - 2.0 * g[0]) / reach**2
        shift = -0.5 * bend.reshape(-1, at.shape[1])
        return shift.mean(0), shift.std(0) / np.sqrt(len(shift))

    def row_curvature(self, whitening: Whitening, q: np.ndarray) -> float:
        """Largest whitened curvature at typical positions, by power iterations."""
        positions = whitening.position(q[:4])
        v = self.rng.standard_normal(q[:4].shape)
        _, base = self.some_gradients(positions)
        largest = np.ones(len(v))
        for _ in range(8):
            v /= np.linalg.norm(v, axis=1, keepdims=True)
            _, moved = self.some_gradients(positions + whitening.push(0.1 * v))
            v = whitening.pull(moved - base) / 0.1
            largest = np.linalg.norm(v, axis=1)
        return float(np.max(largest))

    def _candidates(self) -> tuple[Estimator, ...]:
        """The estimators among which to choose."""
        target, gradient = self.target, self.settings.gradient
        # With local values the Hessian at the anchor moves with them.
        is_global = target.locals is None
        if is_global and (not target.plates or target.is_randomized):
            return (Plain(),)
        if gradient is not None:
            return (gradient,)
        has_hessian = is_global and self.settings.is_dense and target.dim <= NEWTON_MAX_DIM
        return tuple(e for e in ESTIMATORS.values() if has_hessian or not e.needs_hessian)

    def cast(self, x: np.ndarray) -> Array:
        """In the model's type."""
        return jnp.asarray(x, self.target.dtype)

    def draw_rows(self, shape: tuple[int, ...], scheme: MinibatchScheme) -> Indices:
        """Independent minibatches of a scheme's kind, ``shape + (subsample_size,)`` each plate."""
        return draw_rows(self.target, self.rng, shape, scheme)

    def finite_starts(self, starts: Iterable[np.ndarray], wanted: int) -> list[np.ndarray]:
        """The first different starts that are finite.

        :param starts: positions, of which as many are looked at as it takes.
        :param wanted: number of them.
        :raises RuntimeError: where none is finite.
        """
        found: list[np.ndarray] = []
        for position in starts:
            is_new = not any(np.array_equal(position, other) for other in found)
            if is_new and self.some_rows.is_finite(position):
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
                "The gradient on all rows is not finite near the mode. "
                + self.target.explain(self.cast(whitening.anchor), self.arguments)
            )

    def hessian(self, potential: EagerPotential, position: np.ndarray) -> np.ndarray | None:
        """The Hessian where it is small enough to form or the user wants it dense."""
        if self.target.dim <= NEWTON_MAX_DIM:
            return potential.expansion(position)[2]
        return hessian_by_products(potential, position) if self.settings.is_dense else None

    def with_hessian(self, whitening: Whitening, estimator: Estimator) -> Whitening:
        """With the full Hessian at its anchor, if the estimator needs it."""
        if not estimator.needs_hessian or whitening.hessian is not None:
            return whitening
        return whitening._replace(hessian=self.hessian(self.all_rows, whitening.anchor))

    def factor_at(self, position: np.ndarray) -> np.ndarray:
        """L from the curvature on all rows."""
        hessian = self.hessian(self.all_rows, position)
        settings = self.settings
        return factor_from_curvature(
            hessian, settings.mask, settings.is_dense, self.some_rows, position
        )

    def whitening_at(self, anchor: np.ndarray, factor: np.ndarray) -> Whitening:
        """The coordinates about a position, with the gradient on all rows there."""
        return Whitening(anchor, factor, self.all_rows.gradient(anchor))

    def curvature(self, whitening: Whitening, q: np.ndarray) -> float:
        """Largest whitened curvature, at the anchor and at one typical position."""
        if self.target.is_randomized:
            return 1.0
        if self.is_wide:
            return self.row_curvature(whitening, q)
        potential = self.some_rows
        typical = whitening._replace(anchor=whitening.position(q[0]))
        return max(
            largest_curvature(self.hessian(potential, w.anchor), w, potential)
            for w in (whitening, typical)
        )

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
        target, estimators = self.target, estimators or self.estimators
        if not target.plates:
            return NoiseOfRows(*2 * (dict.fromkeys(estimators, NO_NOISE),))
        if self.is_wide:
            return NoiseOfRows(
                *(
                    self.row_noise(whitening, q, estimators, MINIBATCH_SCHEMES[scheme])
                    for scheme in ("iid", "blocks")
                )
            )
        num_positions, num_minibatches = (
            (_POSITIONS, _MINIBATCHES) if self.is_cheap else (_FEW_POSITIONS, _FEW_MINIBATCHES)
        )
        positions = self.cast(q[:num_positions])
        cast = whitening._replace(hessian=None).cast(target.dtype)
        found: list[dict[Estimator, Noise]] = []
        for scheme in (MINIBATCH_SCHEMES["iid"], MINIBATCH_SCHEMES["blocks"]):
            rows = self.draw_rows((len(positions), num_minibatches), scheme)
            values = measure_noise(target, self.arguments, cast, positions, rows, estimators)
            found.append(
                {
                    e: Noise.of(
                        np.asarray(v, np.float64), num_minibatches, self.is_cheap
                    )._replace(order=e.noise_order)
                    for e, v in zip(estimators, values, strict=True)
                }
            )
        return NoiseOfRows(*found)

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
