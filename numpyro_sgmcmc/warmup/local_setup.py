r"""The warm-up's shared part for models with latent sites inside the subsampled plate.

The joint mode of globals and local values is no place to be: a scale goes to zero there with all
that it scales. So the local values are always drawn, never optimised:

1. Minibatch by minibatch, local values are renewed and Adam moves the globals. With draws for
   local values the mean of its gradient is that of the globals' own posterior (Fisher's identity).
2. A few sweeps over all local values in turn with Newton steps of the globals given them (Monte
   Carlo EM), which do not mind badly scaled coordinates.
3. Pilot chains over globals and local values, until the mean stays, where the anchor goes.
4. The mean Hessian of the globals given the local values, over the pilot's ends, is the whitening:
   a step moves the globals with the local values held, and must be as short as that allows.
   How much wider the posterior is than that says how many epochs a draw takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_sgmcmc.checks import notify
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.posterior.locals.checks import first_values, refuse_dependent_rows
from numpyro_sgmcmc.posterior.locals.moves import LocalState
from numpyro_sgmcmc.posterior.locals.sites import AllRows, with_locals
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.warmup.frame import Frame
from numpyro_sgmcmc.warmup.local_pilot import (
    advance,
    curvature_everywhere,
    descend_with_locals,
    sweep_all,
)
from numpyro_sgmcmc.warmup.local_start import LocalStart
from numpyro_sgmcmc.warmup.noise import Noise, draw_blocks
from numpyro_sgmcmc.warmup.pilot import PILOT, PILOT_BIAS, PILOT_STEP_SIZE
from numpyro_sgmcmc.warmup.settings import Adaptation, Settings
from numpyro_sgmcmc.warmup.setup import Setup
from numpyro_sgmcmc.warmup.step_size import MAX_NUM_STEPS
from numpyro_sgmcmc.warmup.surface import Surface
from numpyro_sgmcmc.warmup.whitening import symmetric_root

__all__ = ["LocalSetup"]

_CHAINS = 4
_ADAM_STEPS, _ADAM_EPOCHS = 1_000, 3
_NEWTON_STEPS = 10
_LONGEST_STEP = 3.0
_SCALE_ROUNDS = 8
_MOVES = 4
_TARGET_ACCEPTANCE = 0.8
_WINDOW_STEPS, _WINDOW_EPOCHS = 500, 4
_MIN_WINDOWS, _MAX_WINDOWS = 3, 8
_SMALL_SHIFT = 0.5
_DRAW_EPOCHS = 20
_STEPS_A_CALL = 500


class LocalSetup(Setup):
    """One run for a model with local sites. Whatever is asked of all rows holds local values."""

    out_of_epochs = "a larger subsample_size, or a kernel without a thermostat"

    def __init__(
        self,
        target: Target,
        arguments: Arguments,
        settings: Settings,
        progress: Callable[[str], None],
    ) -> None:
        super().__init__(target, arguments, settings, progress)
        assert target.locals is not None
        self.plain_arguments = arguments
        plate = target.locals.plate
        self.epoch = -(-plate.size // plate.subsample_size)
        self.key = random.key(0)

    def run(self, starts: Iterable[np.ndarray]) -> Adaptation:
        self.progress("warm start")
        position = self._finite(starts)[0]
        values = first_values(self.target, self.plain_arguments, self._cast(position))
        refuse_dependent_rows(self.target, self.plain_arguments, self._cast(position), values)
        state = self._scaled(position, values)
        position, state = self._adam(position, state)
        self._hold(state.values)
        self.progress("curvature")
        position, state = self._newton(position, state)
        state = self._scaled(position, state.values)
        self._hold(state.values)
        frame, q, state, spread = self._pilot(self._first_frame_at(position), state)
        self.progress("gradient noise")
        self._hold(jax.tree.map(lambda x: x[0], state.values))
        adaptation = self._decide(frame, q)
        return adaptation._replace(
            num_steps=self._num_steps(adaptation, spread),
            locals=LocalStart(state.values, state.scale, self._cast(_root(spread))),
        )

    def _candidates(self) -> tuple[str, ...]:
        gradient = self.settings.gradient
        return ("plain", "control_variate") if gradient == "auto" else (gradient,)

    def _next_key(self) -> Array:
        self.key, key = random.split(self.key)
        return key

    def _hold(self, values: AllRows) -> None:
        """Have these local values in all that looks at the potential."""
        self.arguments = with_locals(self.plain_arguments, values)
        self.all_rows = Surface(self.target, self.arguments)
        self.some_rows = Surface.on_some_rows(self.target, self.arguments)

    def _first_frame_at(self, position: np.ndarray) -> Frame:
        matrix = self.settings.inverse_mass_matrix
        factor = self._factor_at(position) if matrix is None else _root(matrix)
        return Frame(position, factor, self.all_rows.gradient(position))

    def _scaled(self, position: np.ndarray, values: AllRows) -> LocalState:
        """Length scales of the local moves: from the rows' curvature, shorter where rejected."""
        theta = self._cast(position)
        one = jnp.ones((), self.target.dtype)
        state = LocalState(values, jnp.ones_like(values.position), one)
        if not values.position.size:
            return state
        total = jnp.zeros_like(values.position)
        for n in range(_SCALE_ROUNDS):
            keys = self._next_key(), self._next_key()
            total += curvature_everywhere(
                self.target, theta, state.values, self.plain_arguments, keys[0]
            )
            state = state._replace(scale=jnp.sqrt((n + 1) / total))
            values, _ = sweep_all(self.target, theta, state, self.plain_arguments, keys[1], _MOVES)
            state = state._replace(values=values)
        for _ in range(_SCALE_ROUNDS):
            values, acceptance = sweep_all(
                self.target, theta, state, self.plain_arguments, self._next_key(), _MOVES
            )
            factor = jnp.exp(jnp.minimum(acceptance - _TARGET_ACCEPTANCE, 0.0))
            state = state._replace(values=values, scale=state.scale * factor[:, None])
        return state

    def _adam(self, position: np.ndarray, state: LocalState) -> tuple[np.ndarray, LocalState]:
        num_steps = max(_ADAM_STEPS, _ADAM_EPOCHS * self.epoch)
        rows = draw_blocks(self.target, self.rng, (num_steps,))
        theta, state = descend_with_locals(
            self.target,
            self.plain_arguments,
            self._cast(position),
            state,
            {k: jnp.asarray(v) for k, v in rows.items()},
            self._next_key(),
        )
        found = np.asarray(theta, np.float64)
        return (found if np.isfinite(found).all() else position), state

    def _newton(self, position: np.ndarray, state: LocalState) -> tuple[np.ndarray, LocalState]:
        for _ in range(_NEWTON_STEPS):
            frame = self._first_frame_at(position)
            if not frame.is_finite():
                raise RuntimeError(
                    "The gradient on all rows is not finite near the mode. "
                    + self.target.explain(self._cast(position), self.arguments)
                )
            step = frame.pull(frame.gradient)
            step *= min(1.0, _LONGEST_STEP * math.sqrt(step.size) / np.linalg.norm(step))
            position = position - frame.push(step)
            values, _ = sweep_all(
                self.target,
                self._cast(position),
                state,
                self.plain_arguments,
                self._next_key(),
                _MOVES,
            )
            state = state._replace(values=values)
            self._hold(values)
        return position, state

    def _pilot(
        self, frame: Frame, state: LocalState
    ) -> tuple[Frame, np.ndarray, LocalState, np.ndarray]:
        """Pilot chains until their mean stays.

        :return: the frame, whitened positions from about the posterior, the chains' local values,
            and the posterior's covariance in whitened coordinates, or its diagonal.
        """
        dim = self.target.dim
        q = 0.3 * self.rng.standard_normal((_CHAINS, dim))
        state = state._replace(
            values=jax.tree.map(lambda x: jnp.broadcast_to(x, (_CHAINS, *x.shape)), state.values)
        )
        least = max(_WINDOW_STEPS, _WINDOW_EPOCHS * self.epoch)
        is_settled, n, shorter = False, 0, 1.0
        while not (is_settled and n >= _MIN_WINDOWS) and n < _MAX_WINDOWS:
            self.progress("pilot chains")
            n += 1
            typical = np.concatenate([q, self.rng.standard_normal((_CHAINS, dim))])
            self._hold(jax.tree.map(lambda x: x[0], state.values))
            noise = self._noise(frame, typical)
            estimator, step_size, _ = self._cheapest(
                PILOT,
                PILOT_STEP_SIZE / shorter,
                noise["blocks"],
                self._curvature(frame, q),
                PILOT_BIAS,
            )
            gradients = [self._gradient_at(frame.anchor, state, c) for c in range(_CHAINS)]
            num_steps = min(n, 4) * least
            draws, moved = self._run(
                frame, np.stack(gradients), q, state, step_size, num_steps, estimator
            )
            if not (np.isfinite(draws).all() and np.abs(draws).max() < 1e4):
                shorter *= 4.0
                q = q / 2.0
                continue
            state = moved
            flat = draws.reshape(-1, dim)
            mean = flat.mean(0)
            is_settled = bool((np.abs(mean) < _SMALL_SHIFT * flat.std(0)).all())
            ends = frame.anchor + frame.push(draws[:, -1])
            anchor = frame.anchor + frame.push(mean)
            positions = frame.anchor + frame.push(flat)
            factor = frame.factor
            if self.settings.inverse_mass_matrix is None:
                factor = self._mean_factor(ends, state)
            self._hold(jax.tree.map(lambda x: x[0], state.values))
            frame = Frame(anchor, factor, self.all_rows.gradient(anchor))
            q = frame.whiten(ends - anchor)
        flat = frame.whiten(positions - frame.anchor)
        is_dense = frame.factor.ndim == 2
        spread = np.cov(flat, rowvar=False).reshape(dim, dim) if is_dense else flat.var(0)
        some = flat[self.rng.choice(len(flat), 16)]
        return frame, some, state, spread

    def _gradient_at(self, anchor: np.ndarray, state: LocalState, chain: int) -> np.ndarray:
        values = jax.tree.map(lambda x: x[chain], state.values)
        return Surface(self.target, with_locals(self.plain_arguments, values)).gradient(anchor)

    def _mean_factor(self, positions: np.ndarray, state: LocalState) -> np.ndarray:
        """L from the mean curvature over the chains' globals, each given its local values."""
        precisions = []
        for chain, position in enumerate(positions):
            self._hold(jax.tree.map(lambda x, c=chain: x[c], state.values))
            factor = self._factor_at(position)
            if factor.ndim == 1:
                precisions.append(1.0 / np.square(factor))
            else:
                inverse = np.linalg.inv(factor)
                precisions.append(inverse.T @ inverse)
        mean = np.mean(precisions, 0)
        return 1.0 / np.sqrt(mean) if mean.ndim == 1 else symmetric_root(mean, inverse=True)

    def _run(
        self,
        frame: Frame,
        gradients: np.ndarray,
        starts: np.ndarray,
        state: LocalState,
        step_size: float,
        num_steps: int,
        estimator: str,
    ) -> tuple[np.ndarray, LocalState]:
        """Draws of the globals in whitened coordinates, the first half forgotten, and the end."""
        target, anchored = self.target, frame.anchored(self.target.dtype)
        q = self._cast(starts)
        dynamics = PILOT.State(q, self._cast(self.rng.standard_normal(q.shape)))
        carry = dynamics, state.values, self._cast(gradients)
        draws = []
        for _ in range(-(-num_steps // _STEPS_A_CALL)):
            rows = draw_blocks(target, self.rng, (_CHAINS, _STEPS_A_CALL))
            carry, kept = advance(
                target,
                self.plain_arguments,
                anchored,
                carry,
                state.scale,
                jnp.asarray(step_size, target.dtype),
                {k: jnp.asarray(v) for k, v in rows.items()},
                random.split(self._next_key(), _CHAINS),
                estimator,
            )
            draws.append(np.asarray(kept, np.float64))
        end = state._replace(values=carry[1])
        return np.concatenate(draws[len(draws) // 2 :], axis=1), end

    def _choose_minibatch(
        self, noise: dict[str, dict[str, Noise]], choices: dict[str, tuple[str, float, float]]
    ) -> str:
        assert self.target.locals is not None
        plate = self.target.locals.plate
        # Where an epoch has a seam, a minibatch across it may hold a row twice.
        if self.settings.minibatch == "auto" and plate.size % plate.subsample_size:
            return "blocks"
        chosen = super()._choose_minibatch(noise, choices)
        # Independent minibatches may hold a row twice, too.
        return "blocks" if chosen == "iid" else chosen

    def _num_steps(self, adaptation: Adaptation, spread: np.ndarray) -> int:
        """Steps a draw: until globals and local values have about forgotten each other."""
        if self.settings.num_steps is not None:
            return self.settings.num_steps
        widest = spread.max() if spread.ndim == 1 else np.linalg.eigvalsh(spread).max()
        epochs = min(max(1.0, 2.0 * float(widest)), _DRAW_EPOCHS)
        longest = max(MAX_NUM_STEPS, _DRAW_EPOCHS * self.epoch)
        num_steps = min(max(adaptation.num_steps, math.ceil(epochs * self.epoch)), longest)
        if num_steps > 4 * MAX_NUM_STEPS:
            notify(
                f"A draw takes {num_steps} steps, so that the latent values of all rows are "
                f"renewed about {num_steps / self.epoch:.2g} times between draws: a larger "
                "subsample_size takes fewer, or set `num_steps`."
            )
        return num_steps


def _root(matrix: np.ndarray) -> np.ndarray:
    return symmetric_root(matrix) if matrix.ndim == 2 else np.sqrt(matrix)
