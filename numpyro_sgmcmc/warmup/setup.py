"""The order of the warm-up's shared part, with everything it decides.

1. Adam, then second-order steps, from the start to the mode region.
2. Curvature there gives the whitening, and a few full gradients the anchor.
3. Pilot chains, a window at a time, move both to the posterior's own mean and covariance.
4. At the pilot's draws the gradient's noise is measured: for each estimator, for random rows and
   for blocks. It decides estimator, minibatches and step size.

Work over all rows happens a fixed number of times. The arrays are concrete, so that Python may
branch; nothing here runs under ``vmap`` or ``pmap``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_sgmcmc.checks import notify
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.dynamics.compensation import GradientNoise
from numpyro_sgmcmc.posterior.gradients import ESTIMATORS, Anchored
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.warmup.frame import Frame
from numpyro_sgmcmc.warmup.noise import (
    NO_NOISE,
    Noise,
    draw_blocks,
    draw_rows,
    measure_covariance,
    measure_noise,
)
from numpyro_sgmcmc.warmup.pilot import KEEP_EVERY, PILOT, PILOT_BIAS, PILOT_STEP_SIZE, run_pilot
from numpyro_sgmcmc.warmup.reading import READING_APART, Reading, choose_reading, own_reading
from numpyro_sgmcmc.warmup.settings import Adaptation, Settings
from numpyro_sgmcmc.warmup.step_size import (
    MAX_NUM_STEPS,
    choose_num_steps,
    choose_step_size,
    shorten_until_right,
)
from numpyro_sgmcmc.warmup.surface import Surface
from numpyro_sgmcmc.warmup.warm_start import (
    NEWTON_MAX_DIM,
    approach,
    centre,
    descend,
    lbfgs,
    newton_from,
)
from numpyro_sgmcmc.warmup.whitening import (
    factor_from_curvature,
    factor_from_draws,
    hessian_by_products,
    largest_curvature,
    symmetric_root,
)

__all__ = ["Setup"]

_WORK = 5e8  # rows a minibatch times coordinates times steps: bounds each stage's cost
_PILOT_CHAINS = 16
_MAX_WINDOWS = 20
_STARTS = 12
_FIRST_WINDOW = 30.0
_LAST_WINDOW = 240.0
_LONGEST_EARLY_WINDOW = 1_000
_LONGEST_WINDOW = 4_000
_SHORTEST_PILOT = 400
_SMALL_SHIFT = 0.5
_SMALL_STRETCH = 2.5
_CLEARLY_NOISIER = 1.5
_FREE_NOISE = 0.025  # variance that noise adds at most, where it may depend on the position
_SURPRISE = 1.5  # times the predicted excess: less is no surprise
_LOST = 1e3  # whitened units from the anchor at which a pilot chain counts as lost


def _variances(draws: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Of each column, in float64, without a second array of the draws' size."""
    squares = np.zeros_like(mean)
    for draw in draws:
        squares += np.square(draw - mean)
    return squares / (len(draws) - 1)


def _rounded_up(number: float) -> int:
    """To two significant digits."""
    unit = 10 ** max(0, math.floor(math.log10(number)) - 1)
    return math.ceil(number / unit) * unit


class Setup:
    """One run of :func:`~numpyro_sgmcmc.warmup.adapt`.

    Holds what its stages share and nothing that outlives them.
    """

    out_of_epochs = "minibatch='iid', or leave it out"

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
        self.all_rows = Surface(target, arguments)
        self.some_rows = Surface.on_some_rows(target, arguments)
        batch = sum(p.subsample_size for p in target.plates) or 1
        self.affordable = int(_WORK / (batch * target.dim))
        self.is_cheap = self.affordable >= 2_000
        self.estimators = self._candidates()

    def run(self, starts: Iterable[np.ndarray]) -> Adaptation:
        self.progress("warm start")
        position = self._optimise(self._finite(starts))
        self.progress("curvature")
        frame, q = self._settle(self._first_frame(position))
        self.progress("gradient noise")
        return self._decide(frame, q)

    def _candidates(self) -> tuple[str, ...]:
        """The estimators among which to choose."""
        target, gradient = self.target, self.settings.gradient
        if not target.plates or target.is_randomized:
            return ("plain",)
        if gradient != "auto":
            return (gradient,)
        has_hessian = self.settings.is_dense and target.dim <= NEWTON_MAX_DIM
        return tuple(ESTIMATORS)[: 3 if has_hessian else 2]

    def _finite(self, starts: Iterable[np.ndarray]) -> list[np.ndarray]:
        """The first starts that are finite: the user's alone, or several different ones."""
        is_one = self.settings.has_start or self.target.dim > NEWTON_MAX_DIM
        wanted = 1 if is_one else _STARTS
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
                + self.target.explain(self._cast(position), self.arguments)
            )
        return found

    def _optimise(self, starts: list[np.ndarray]) -> np.ndarray:
        target, arguments = self.target, self.arguments
        if target.dim <= NEWTON_MAX_DIM:
            return centre(self.some_rows, newton_from(self.some_rows, starts), 0)
        position = starts[0]
        q = self._cast(position)
        if target.plates:
            num_steps = max(100, min(1000, self.affordable))
            keys = random.split(random.key(0), num_steps) if target.is_randomized else None
            rows = draw_rows(target, self.rng, (num_steps,))
            q = descend(target, arguments, q, rows, keys)
        return np.asarray(lbfgs(target, arguments, q, self.some_rows.subset), np.float64)

    def _hessian(self, surface: Surface, position: np.ndarray) -> np.ndarray | None:
        """The Hessian where it is small enough to form or the user wants it dense."""
        if self.target.dim <= NEWTON_MAX_DIM:
            return surface.expansion(position)[2]
        return hessian_by_products(surface, position) if self.settings.is_dense else None

    def _first_frame(self, position: np.ndarray) -> Frame:
        settings = self.settings
        matrix = settings.inverse_mass_matrix
        if matrix is None:
            factor = self._factor_at(position)
        else:
            factor = symmetric_root(matrix) if matrix.ndim == 2 else np.sqrt(matrix)
        frame = approach(self.all_rows, Frame(position, factor, self.all_rows.gradient(position)))
        if not frame.is_finite():
            raise RuntimeError(
                "The gradient on all rows is not finite near the mode. "
                + self.target.explain(self._cast(frame.anchor), self.arguments)
            )
        return frame

    def _factor_at(self, position: np.ndarray) -> np.ndarray:
        hessian = self._hessian(self.all_rows, position)
        return factor_from_curvature(
            hessian, self.settings.mask, self.settings.is_dense, self.some_rows, position
        )

    def _cast(self, x: np.ndarray) -> Array:
        return jnp.asarray(x, self.target.dtype)

    def _settle(self, frame: Frame) -> tuple[Frame, np.ndarray]:
        """Run pilot chains, window after window, until their mean and covariance stay.

        The chains go on from window to window, while anchor and whitening follow them.

        :return: the frame, and whitened positions from about the posterior.
        """
        # Close to the centre at first: where it is not Gaussian, a sd away may be nowhere.
        typical = self.rng.standard_normal((_PILOT_CHAINS, self.target.dim))
        q = 0.3 * typical
        steps_left, shorter, time = self.affordable, 1.0, _FIRST_WINDOW
        for _ in range(_MAX_WINDOWS):
            # A coordinate whose noise grows faster than its friction takes away runs off, and one
            # is enough: the worst counts, at the distance that the chains will reach.
            noise = self._noise(frame, typical)
            curvature = self._curvature(frame, q)
            estimator, step_size, _ = self._cheapest(
                PILOT, PILOT_STEP_SIZE / shorter, noise["random"], curvature, PILOT_BIAS
            )
            longest = _LONGEST_WINDOW if time >= _LAST_WINDOW else _LONGEST_EARLY_WINDOW
            num_steps = min(int(time / step_size), longest)
            if steps_left < max(num_steps, _SHORTEST_PILOT):
                break
            steps_left -= num_steps
            self.progress("pilot chains")
            frame = self._with_hessian(frame, estimator)
            draws = run_pilot(
                self.target,
                self.arguments,
                frame.anchored(self.target.dtype),
                q,
                step_size,
                num_steps,
                self.rng,
                estimator,
            )
            alive = np.isfinite(draws).all((1, 2)) & (np.abs(draws).max((1, 2)) < _LOST)
            if alive.sum() <= _PILOT_CHAINS // 2:
                shorter *= 4.0
                q = q / 2.0
                continue
            sampled = alive.sum() * draws.shape[1] * KEEP_EVERY * step_size
            moved, is_settled = self._follow(
                frame, draws[alive], sampled / PILOT.relaxation_time(step_size)
            )
            q = draws[self.rng.choice(np.flatnonzero(alive), _PILOT_CHAINS), -1]
            q[: alive.sum()] = draws[alive, -1]
            q = typical = moved.whiten(frame.anchor + frame.push(q) - moved.anchor)
            frame = moved
            if is_settled and time >= _LAST_WINDOW:
                break
            time = min(2.0 * time, _LAST_WINDOW)
        return frame, q

    def _follow(self, frame: Frame, draws: np.ndarray, effective_size: float) -> tuple[Frame, bool]:
        """The frame moved to the draws' mean and covariance, and whether that was a small move."""
        flat = draws.reshape(-1, draws.shape[-1])
        mean, d = flat.mean(0, dtype=np.float64), flat.shape[1]
        if frame.factor.ndim == 1:
            covariance = spread = _variances(flat, mean)
            slack = 1.0 + np.sqrt(2.0 / effective_size)
        else:
            covariance = np.cov(flat, rowvar=False).reshape(d, d)
            spread = np.linalg.eigvalsh(covariance)
            slack = 1.0 + np.sqrt(d / effective_size)
        factor = frame.factor
        if self.settings.inverse_mass_matrix is None:
            factor = factor_from_draws(factor, covariance, effective_size, self.settings.mask)
        moved = self._frame_at(frame, mean, factor)
        size = np.square(moved.pull(moved.gradient)).sum()
        if not size < 4.0 * d:
            # On a curved ridge the mean lies beside it: anchor on the ridge instead.
            nearest = min(flat, key=lambda draw: float(np.square(draw - mean).sum()))
            on_ridge = self._frame_at(frame, nearest, factor)
            if not np.square(on_ridge.pull(on_ridge.gradient)).sum() >= size:
                moved = on_ridge
        is_near = np.abs(mean).max() < _SMALL_SHIFT
        is_settled = bool(is_near and spread.max() < _SMALL_STRETCH * slack**2)
        if not is_settled and self.settings.inverse_mass_matrix is None:
            # Chains on their way tell little of the spread where they arrive; curvature does.
            moved = moved._replace(factor=self._factor_at(moved.anchor))
        return (moved, is_settled) if moved.is_finite() else (frame, False)

    def _frame_at(self, frame: Frame, q: np.ndarray, factor: np.ndarray) -> Frame:
        anchor = frame.anchor + frame.push(q)
        return Frame(anchor, factor, self.all_rows.gradient(anchor))

    def _curvature(self, frame: Frame, q: np.ndarray) -> float:
        """Largest whitened curvature, at the anchor and at one typical position."""
        if self.target.is_randomized:
            return 1.0
        surface = self.some_rows
        typical = frame._replace(anchor=frame.anchor + frame.push(q[0]))
        return max(
            largest_curvature(self._hessian(surface, f.anchor), f, surface)
            for f in (frame, typical)
        )

    def _with_hessian(self, frame: Frame, estimator: str) -> Frame:
        """The frame with the full Hessian at its anchor, if the estimator needs it."""
        if estimator != "second_order_control_variate" or frame.hessian is not None:
            return frame
        return frame._replace(hessian=self._hessian(self.all_rows, frame.anchor))

    def _noise(
        self, frame: Frame, q: np.ndarray, estimators: tuple[str, ...] | None = None
    ) -> dict[str, dict[str, Noise]]:
        """The whitened gradient's noise by kind of rows and estimator."""
        target, estimators = self.target, estimators or self.estimators
        if not target.plates:
            return dict.fromkeys(("random", "blocks"), dict.fromkeys(estimators, NO_NOISE))
        num_positions, num_minibatches = (_PILOT_CHAINS, 128) if self.is_cheap else (4, 4)
        positions = self._cast(q[:num_positions])
        anchored = frame._replace(hessian=None).anchored(target.dtype)
        found: dict[str, dict[str, Noise]] = {}
        for kind, draw in (("random", draw_rows), ("blocks", draw_blocks)):
            rows = draw(target, self.rng, (len(positions), num_minibatches))
            values = measure_noise(target, self.arguments, anchored, positions, rows, estimators)
            found[kind] = {
                e: Noise.of(np.asarray(v, np.float64), num_minibatches, self.is_cheap)
                for e, v in zip(estimators, values, strict=True)
            }
        return found

    def _cheapest(
        self,
        dynamics: Dynamics,
        largest: float,
        noise: dict[str, Noise],
        curvature: float,
        target_bias: float,
    ) -> tuple[str, float, float]:
        """The estimator that goes furthest at the same cost: its name, step size and inflation."""
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
            cost = ESTIMATORS[estimator] * excess * time / step_size
            choices.append((cost, estimator, step_size, inflation))
        return min(choices)[1:]

    def _decide(self, frame: Frame, q: np.ndarray) -> Adaptation:
        """Estimator, minibatches and step size from the noise measured at typical positions."""
        settings, target, dynamics = self.settings, self.target, self.settings.dynamics
        noise = self._noise(frame, q)
        curvature = self._curvature(frame, q)
        choices = {
            kind: self._cheapest(
                dynamics,
                dynamics.schemes[settings.scheme].step_size,
                noise[kind],
                curvature,
                settings.target_bias,
            )
            for kind in noise
        }
        minibatch = self._choose_minibatch(noise, choices)
        kind = "blocks" if minibatch == "blocks" else "random"
        estimator, step_size, inflation = choices[kind]
        located = settings.locate(frame.anchored(target.dtype).coordinates)
        if settings.step_size is not None:
            step_size = settings.step_size
        elif not located.has_default_settings:
            heard = 0.0 if settings.noise_compensation else noise[kind][estimator].mean
            step_size, excess = shorten_until_right(
                located, settings.scheme, step_size, target.dim, settings.target_bias, heard
            )
            inflation = max(inflation, np.square(1.0 + excess) - 1.0)
        chosen = self._over_epochs(noise[kind][estimator], minibatch)
        if chosen.per_epoch:
            inflation = min(inflation, chosen.inflation(dynamics, float(step_size)))
        if settings.step_size is None and inflation > 2.0 * settings.target_bias:
            self._warn_of_noise(inflation)
        if minibatch != "iid" and self._is_thermostat_at_work(noise[kind][estimator], step_size):
            notify(
                f"minibatch={minibatch!r} makes noise that cancels over an epoch, which the "
                "thermostat takes for heat: posterior sds may be too narrow. Use "
                f"{self.out_of_epochs}."
            )
        variance = noise[kind][estimator].variance
        relaxation_time = dynamics.relaxation_time(float(step_size), variance)
        num_steps = settings.num_steps or choose_num_steps(relaxation_time, step_size)
        frame = self._with_hessian(frame, estimator)
        anchored = frame.anchored(target.dtype)
        gradient_noise = None
        if settings.noise_compensation and target.plates:
            gradient_noise = self._gradient_noise(anchored, q, estimator, float(step_size))
        return Adaptation(
            anchored,
            step_size,
            num_steps,
            estimator,
            minibatch,
            gradient_noise,
            chosen,
            self._reading(frame, q, noise[kind], estimator, minibatch, float(step_size), num_steps),
            self._allowed_excess(inflation),
            float(relaxation_time),
        )

    def _over_epochs(self, noise: Noise, minibatch: str) -> Noise:
        """The noise, with the minibatches over which it cancels."""
        if minibatch == "iid" or not self.target.plates:
            return noise
        return noise._replace(per_epoch=max(p.per_epoch for p in self.target.plates))

    def _allowed_excess(self, inflation: float) -> float | None:
        """Excess of temperature that is no reason for a shorter step."""
        if self.settings.step_size is not None:
            return None
        return max(2.0 * self.settings.target_bias, _SURPRISE * inflation)

    def _warn_of_noise(self, inflation: float) -> None:
        """Say that the target cannot be met, by how much, and what would meet it."""
        target_bias = self.settings.target_bias
        times = inflation / (2.0 * target_bias)
        more = [
            f"of '{p.name}' about {min(p.size, _rounded_up(p.subsample_size * times))}"
            for p in self.target.plates
        ]
        cure = ", or gradient='auto'" if self.settings.gradient == "plain" else ""
        notify(
            f"The minibatch gradient is so noisy that posterior sds are predicted to be "
            f"{100 * (np.sqrt(1 + inflation) - 1):.0f} % too wide, where target_bias allows "
            f"{100 * target_bias:.2g} %, at {MAX_NUM_STEPS} steps a draw: do not trust them. Use "
            f"a larger subsample_size ({' and '.join(more)}){cure}."
        )

    def _reading(
        self,
        frame: Frame,
        q: np.ndarray,
        noise: dict[str, Noise],
        estimator: str,
        minibatch: str,
        step_size: float,
        num_steps: int,
    ) -> Reading:
        """Where the moments that tell the bias come from."""
        dynamics, variance = self.settings.dynamics, noise[estimator].variance
        excess = dynamics.noise_inflation(variance, step_size)
        # Where a reading apart costs much, a little dependence is let pass.
        free = _FREE_NOISE if num_steps >= READING_APART else 4.0 * _FREE_NOISE
        is_independent = minibatch == "iid" or excess <= free
        if is_independent and noise[estimator].mean <= num_steps:
            return own_reading(self.target.dim, num_steps)
        # The Hessian at the anchor is there only if the chain's own estimator needs it.
        kept = [e for e in noise if e in (estimator, "plain", "control_variate")]
        variances = {e: noise[e].mean for e in kept}
        if self.estimators == ("plain",) and not self.target.is_randomized:
            both = ("plain", "control_variate")
            found = self._noise(frame, q, both)["blocks" if minibatch == "blocks" else "random"]
            variances = {e: n.mean for e, n in found.items()}
        apart = choose_reading(variances, estimator, is_independent, num_steps)
        return apart or own_reading(self.target.dim, num_steps)

    def _choose_minibatch(
        self, noise: dict[str, dict[str, Noise]], choices: dict[str, tuple[str, float, float]]
    ) -> str:
        """How to draw rows: the user's way, or the cheapest that does no harm."""
        settings = self.settings
        if settings.minibatch != "auto":
            return settings.minibatch
        estimator, longest, _ = choices["random"]
        # Over an epoch the noise of its minibatches cancels: it heats the momenta and not the
        # positions, which a thermostat would cool too far.
        if self._is_thermostat_at_work(noise["random"][estimator], settings.step_size or longest):
            return "iid"
        estimator, step_size, _ = choices["blocks"]
        in_blocks, random_rows = (noise[k][estimator].mean for k in ("blocks", "random"))
        # Noise that shortens no step does no harm, and blocks are cheaper.
        if in_blocks > _CLEARLY_NOISIER * random_rows and longest > step_size:
            notify(
                f"Blocks of consecutive rows are {in_blocks / random_rows:.1f} times as noisy as "
                "random rows: the rows are sorted by something that matters. Random rows are used "
                "instead, which cost more a step; to spare that, shuffle the data once: "
                "i = numpy.random.permutation(len(y)); X, y = X[i], y[i]."
            )
            return "epoch"
        return "blocks"

    def _is_thermostat_at_work(self, noise: Noise, step_size: float) -> bool:
        """Whether a thermostat must take away more noise than may be left."""
        dynamics = self.settings.dynamics
        inflation = dynamics.noise_inflation(noise.variance, step_size)
        return dynamics.has_thermostat and inflation > self.settings.target_bias

    def _gradient_noise(
        self, anchored: Anchored, q: np.ndarray, estimator: str, step_size: float
    ) -> GradientNoise:
        """The covariance to compensate; says so where that is more than is injected."""
        target, is_dense = self.target, anchored.coordinates.factor.ndim == 2
        covariance = measure_covariance(
            target, self.arguments, anchored, self._cast(q), self.rng, estimator, is_dense
        )
        found = GradientNoise.of(jnp.asarray(covariance, target.dtype))
        shares = np.asarray(found.values) * self.settings.dynamics.noise_share(step_size)
        if (worst := shares.max()) > 1.0:
            notify(
                f"Gradient noise is up to {worst:.1f} times what the sampler injects at step size "
                f"{step_size:.3g}, so that it cannot be compensated in {(shares > 1.0).sum()} of "
                f"{target.dim} directions: posterior sds will be up to "
                f"{100 * (np.sqrt(worst) - 1):.0f} % too wide. Use a shorter step_size or a larger "
                "subsample_size."
            )
        return found
