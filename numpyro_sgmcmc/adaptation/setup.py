"""The order of the warm-up's shared part, with everything it decides.

1. Adam, then second-order steps, from the start to the mode region.
2. Curvature there gives the whitening, and a few full gradients the anchor.
3. Two rounds of pilot chains move both to the posterior's own mean and covariance.
4. At the pilot's draws the gradient's noise is measured: for both estimators, for random rows and
   for blocks. It decides estimator, minibatches and step size.

Work over all rows happens a fixed number of times. The arrays are concrete, so that Python may
branch; nothing here runs under ``vmap`` or ``pmap``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_sgmcmc.adaptation.noise import draw_blocks, draw_rows, measure_noise
from numpyro_sgmcmc.adaptation.pilot import (
    KEEP_EVERY,
    PILOT,
    PILOT_BIAS,
    PILOT_STEP_SIZE,
    run_pilot,
)
from numpyro_sgmcmc.adaptation.step_size import (
    MAX_NUM_STEPS,
    choose_num_steps,
    choose_step_size,
)
from numpyro_sgmcmc.adaptation.surface import Surface
from numpyro_sgmcmc.adaptation.warm_start import (
    NEWTON_MAX_DIM,
    approach,
    descend,
    draw_subset,
    lbfgs,
    newton,
)
from numpyro_sgmcmc.adaptation.whitening import (
    factor_from_curvature,
    factor_from_draws,
    hessian_by_products,
    largest_curvature,
    symmetric_root,
)
from numpyro_sgmcmc.arguments import Arguments
from numpyro_sgmcmc.coordinates import Coordinates
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.gradients import ESTIMATORS, Anchored
from numpyro_sgmcmc.model import Target
from numpyro_sgmcmc.notices import notify

__all__ = ["Adaptation", "Settings", "adapt"]

_WORK = 1e8  # rows a minibatch times coordinates times steps: bounds each stage's cost
_PILOT_CHAINS = 16
_SHORTEST_PILOT = 400
_CLEARLY_NOISIER = 1.5
_LOST = 1e3  # whitened units from the anchor at which a pilot chain counts as lost


@dataclass(frozen=True)
class Settings:
    """
    - **dynamics** - the SDE.
    - **largest_step_size** - step size that suits a whitened Gaussian and an exact gradient.
    - **step_size** - the user's step size, or None to choose it.
    - **num_steps** - the user's steps an iteration, or None to choose.
    - **gradient** - ``"plain"``, ``"control_variate"`` or ``"auto"``.
    - **minibatch** - ``"iid"``, ``"epoch"``, ``"blocks"`` or ``"auto"``.
    - **inverse_mass_matrix** - the user's, shape ``(d,)`` or ``(d, d)``, or None to adapt it.
    - **is_dense** - whether the adapted one is dense.
    - **mask** - blocks of a structured dense one, shape ``(d, d)``, or None.
    - **target_bias** - allowed relative error of posterior sds.
    """

    dynamics: Dynamics
    largest_step_size: float
    step_size: float | None
    num_steps: int | None
    gradient: str
    minibatch: str
    inverse_mass_matrix: np.ndarray | None
    is_dense: bool
    mask: np.ndarray | None
    target_bias: float


class Adaptation(NamedTuple):
    """
    - **anchored** - coordinates and the full gradient at their anchor.
    - **step_size** - step size.
    - **num_steps** - steps an iteration.
    - **estimator** - ``"plain"`` or ``"control_variate"``.
    - **minibatch** - ``"iid"``, ``"epoch"`` or ``"blocks"``.
    """

    anchored: Anchored
    step_size: float
    num_steps: int
    estimator: str
    minibatch: str


def adapt(
    target: Target,
    arguments: Arguments,
    settings: Settings,
    starts: Iterable[np.ndarray],
    progress: Callable[[str], None] = lambda stage: None,
) -> Adaptation:
    """Find the mode region, whitening, anchor, estimator, minibatches and step size.

    :param target: the posterior.
    :param arguments: the model's arguments, concrete.
    :param settings: what the user has fixed.
    :param starts: first positions of shape ``(d,)``, of which the first finite one is taken.
    :param progress: called with the name of each stage before it starts.
    :return: what all chains share.
    :raises RuntimeError: where no start is finite, or the gradient on all rows is not.
    """
    return _Setup(target, arguments, settings, progress).run(starts)


class _Setup:
    """One run of :func:`adapt`; holds what its stages share and nothing that outlives them."""

    def __init__(
        self,
        target: Target,
        arguments: Arguments,
        settings: Settings,
        progress: Callable[[str], None],
    ) -> None:
        self.target, self.arguments, self.settings = target, arguments, settings
        self.progress = progress
        self.rng = np.random.default_rng(0)
        subset = draw_subset(target, 0)
        self.all_rows = Surface(target, arguments)
        self.some_rows = self.all_rows if subset is None else Surface(target, arguments, subset)
        batch = sum(p.subsample_size for p in target.plates) or 1
        self.affordable = int(_WORK / (batch * target.dim))

    def run(self, starts: Iterable[np.ndarray]) -> Adaptation:
        self.progress("warm start")
        position = self._optimise(self._first_finite(starts))
        self.progress("curvature")
        anchored = self._first_anchor(position)
        estimator = self.settings.gradient
        if estimator == "auto":
            has_rows = bool(self.target.plates) and not self.target.is_randomized
            estimator = "control_variate" if has_rows else "plain"
        last = None
        if self.affordable >= _SHORTEST_PILOT:
            for _ in range(2):
                self.progress("pilot chains")
                moved = self._pilot(anchored, estimator)
                if moved is None:
                    break
                anchored, last = moved
        self.progress("gradient noise")
        return self._decide(anchored, estimator, last)

    def _first_finite(self, starts: Iterable[np.ndarray]) -> np.ndarray:
        for position in starts:
            if self.some_rows.is_finite(position):
                return position
        raise RuntimeError(
            "Cannot find a starting point with a finite log density and gradient. "
            + self.target.explain(self._cast(position), self.arguments)
        )

    def _optimise(self, position: np.ndarray) -> np.ndarray:
        target, arguments = self.target, self.arguments
        if target.dim <= NEWTON_MAX_DIM:
            return newton(self.some_rows, np.asarray(position, np.float64))
        position = self._cast(position)
        if target.plates:
            num_steps = max(100, min(1000, self.affordable))
            keys = random.split(random.key(0), num_steps) if target.is_randomized else None
            rows = draw_rows(target, self.rng, (num_steps,))
            position = descend(target, arguments, position, rows, keys)
        return np.asarray(lbfgs(target, arguments, position, self.some_rows.subset), np.float64)

    def _hessian(self, surface: Surface, position: np.ndarray) -> np.ndarray | None:
        """The Hessian where it is small enough to form or the user wants it dense."""
        if self.target.dim <= NEWTON_MAX_DIM:
            return surface.expansion(position)[2]
        return hessian_by_products(surface, position) if self.settings.is_dense else None

    def _first_anchor(self, position: np.ndarray) -> Anchored:
        settings = self.settings
        matrix = settings.inverse_mass_matrix
        if matrix is None:
            hessian = self._hessian(self.all_rows, position)
            factor = factor_from_curvature(
                hessian, settings.mask, settings.is_dense, self.some_rows, position
            )
        else:
            factor = symmetric_root(matrix) if matrix.ndim == 2 else np.sqrt(matrix)
        position, gradient = approach(self.all_rows, position, factor)
        if not (np.isfinite(gradient).all() and np.isfinite(factor).all()):
            raise RuntimeError(
                "The gradient on all rows is not finite near the mode. "
                + self.target.explain(self._cast(position), self.arguments)
            )
        return self._anchored(position, factor, gradient)

    def _cast(self, x: np.ndarray) -> Array:
        return jnp.asarray(x, self.target.dtype)

    def _anchored(
        self, position: np.ndarray, factor: np.ndarray, gradient: np.ndarray
    ) -> Anchored:
        coordinates = Coordinates(self._cast(position), self._cast(factor))
        return Anchored(coordinates, self._cast(gradient))

    def _pilot(self, anchored: Anchored, estimator: str) -> tuple[Anchored, np.ndarray] | None:
        """Anchor and whitening moved to a pilot's mean and covariance, and its last positions."""
        step_size, _ = choose_step_size(
            PILOT,
            PILOT_STEP_SIZE,
            self._noise(anchored, None)[estimator, "random"],
            self._curvature(anchored, None),
            PILOT_BIAS,
        )
        draws = run_pilot(
            self.target,
            self.arguments,
            anchored,
            step_size,
            self.rng,
            estimator,
            _PILOT_CHAINS,
            min(2000, self.affordable),
        )
        alive = np.isfinite(draws).all((1, 2)) & (np.abs(draws).max((1, 2)) < _LOST)
        if alive.sum() <= _PILOT_CHAINS // 2:
            return None
        draws = draws[alive]
        flat = draws.reshape(-1, self.target.dim)
        mean = flat.mean(0)
        origin = np.asarray(anchored.coordinates.anchor, np.float64)
        factor = np.asarray(anchored.coordinates.factor, np.float64)

        def push(v: np.ndarray) -> np.ndarray:
            return v * factor if factor.ndim == 1 else v @ factor.T

        renewed = factor
        if self.settings.inverse_mass_matrix is None:
            time = draws.shape[0] * draws.shape[1] * KEEP_EVERY * step_size
            effective_size = time / PILOT.relaxation_time
            renewed = factor_from_draws(factor, flat, effective_size, self.settings.mask)
        position = origin + push(mean)
        gradient = self.all_rows.gradient(position)
        if not (np.isfinite(gradient).all() and np.isfinite(renewed).all()):
            return None
        last = push(draws[:, -1] - mean)
        last = last / renewed if renewed.ndim == 1 else np.linalg.solve(renewed, last.T).T
        return self._anchored(position, renewed, gradient), last

    def _curvature(self, anchored: Anchored, last: np.ndarray | None) -> float:
        """Largest whitened curvature, at the anchor and at one typical position."""
        if self.target.is_randomized:
            return 1.0
        origin = np.asarray(anchored.coordinates.anchor, np.float64)
        factor = np.asarray(anchored.coordinates.factor, np.float64)
        positions = [origin]
        if last is not None:
            positions.append(origin + (factor * last[0] if factor.ndim == 1 else factor @ last[0]))
        surface = self.some_rows
        return max(
            largest_curvature(self._hessian(surface, q), factor, surface, q) for q in positions
        )

    def _noise(self, anchored: Anchored, last: np.ndarray | None) -> dict[tuple[str, str], float]:
        """Variance of the whitened gradient's noise by estimator and kind of rows."""
        target = self.target
        if not target.plates:
            return dict.fromkeys(product(ESTIMATORS, ("random", "blocks")), 0.0)
        is_costly = self.affordable < 10_000
        num_positions, num_minibatches = (4, 4) if is_costly else (_PILOT_CHAINS, 32)
        if last is None:
            last = self.rng.standard_normal((num_positions, target.dim))
        positions = self._cast(last[:num_positions])
        estimators = ("plain",) if target.is_randomized else ESTIMATORS
        found = {}
        for kind, draw in (("random", draw_rows), ("blocks", draw_blocks)):
            rows = draw(target, self.rng, (len(positions), num_minibatches))
            values = measure_noise(
                target, self.arguments, anchored, positions, rows, estimators
            )
            found |= {(e, kind): float(v) for e, v in zip(estimators, values, strict=True)}
        return found

    def _decide(
        self, anchored: Anchored, estimator: str, last: np.ndarray | None
    ) -> Adaptation:
        """Estimator, minibatches and step size from the noise measured at typical positions."""
        settings, target, dynamics = self.settings, self.target, self.settings.dynamics
        noise = self._noise(anchored, last)
        # A second gradient a step must buy more than a smaller step would.
        if settings.gradient == "auto" and estimator == "control_variate":
            if noise["plain", "random"] < 2.0 * noise["control_variate", "random"]:
                estimator = "plain"
        in_blocks, random_rows = noise[estimator, "blocks"], noise[estimator, "random"]
        minibatch = settings.minibatch
        if minibatch == "auto":
            minibatch = "blocks"
            if in_blocks > _CLEARLY_NOISIER * random_rows:
                minibatch = "epoch"
                notify(
                    f"Blocks of consecutive rows are {in_blocks / random_rows:.1f} times as noisy "
                    "as random rows: the rows are sorted by something that matters. Random rows "
                    "are used instead, which cost more a step; to spare that, shuffle the data "
                    "once: i = numpy.random.permutation(len(y)); X, y = X[i], y[i]."
                )
        step_size = settings.step_size
        if step_size is None:
            step_size, inflation = choose_step_size(
                dynamics,
                settings.largest_step_size,
                in_blocks if minibatch == "blocks" else random_rows,
                self._curvature(anchored, last),
                settings.target_bias,
            )
            if inflation > 2.0 * settings.target_bias:
                excess = 100 * (np.sqrt(1 + inflation) - 1)
                cure = "" if estimator == "control_variate" else ", or gradient='control_variate'"
                notify(
                    f"The minibatch gradient is so noisy that posterior sds are predicted to be "
                    f"about {excess:.0f} % too wide, at {MAX_NUM_STEPS} steps a draw. Use a "
                    f"larger subsample_size{cure}."
                )
        num_steps = settings.num_steps or choose_num_steps(dynamics.relaxation_time, step_size)
        return Adaptation(anchored, step_size, num_steps, estimator, minibatch)
