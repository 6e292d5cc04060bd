"""What the stages of the warm-up with local values share besides.

Windows of pilot chains, until their mean and covariance stay.

The chains go on from window to window, while anchor and whitening follow them.

Pilot chains over globals and local values, and other compiled work of that warm-up.

The warm-up's shared part for models with latent sites inside the subsampled plate.

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
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax, random

from numpyro_sgmcmc.adaptation.batched_gradients import JittedPotential
from numpyro_sgmcmc.adaptation.context import WarmupContext
from numpyro_sgmcmc.adaptation.gradient_noise import GradientNoiseStats
from numpyro_sgmcmc.adaptation.multimodality import Mode
from numpyro_sgmcmc.adaptation.pilot import (
    MAX_PILOT_STEP_SIZE,
    PILOT_DYNAMICS,
    PILOT_TARGET_SD_BIAS,
    PILOT_THINNING,
)
from numpyro_sgmcmc.adaptation.preconditioning import factorize_covariance, factorize_spd
from numpyro_sgmcmc.adaptation.settings import Adaptation, LocalLatentsInit
from numpyro_sgmcmc.adaptation.step_size import MAX_NUM_STEPS
from numpyro_sgmcmc.adaptation.subsampling_choice import (
    build_adaptation_from_settings,
    choose_sampler_settings,
)
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import ContiguousSubsampling, Indices
from numpyro_sgmcmc.errors import warn_user
from numpyro_sgmcmc.model.gradient_estimators import (
    GradientEstimator,
    MinibatchGradient,
    make_gradient_fn,
)
from numpyro_sgmcmc.model.local_latents import LocalValues, with_local_values
from numpyro_sgmcmc.model.local_moves import (
    LocalLatentsState,
    compute_local_hessian_diagonal,
    init_local_values,
    map_over_row_chunks,
    sweep_local_values,
    update_minibatch_locals,
)
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.model.validation import check_conditional_independence

__all__ = [
    "LocalContext",
    "LocalPilot",
    "PilotChains",
    "PilotWindow",
    "compute_abs_local_hessian_diagonal",
    "jitted_sweep_local_values",
    "optimize_globals",
    "run_local_pilot_windows",
    "warm_up",
]


class LocalContext:
    """A warm-up whose potential is asked for given local values.

    - **context** - of the warm-up; it looks at the values held last.
    - **arguments** - the model's arguments without local values.
    - **batches_per_epoch** - minibatches that visit all rows.
    """

    def __init__(self, context: WarmupContext) -> None:
        assert context.potential.local_latents is not None
        plate = context.potential.local_latents.plate
        self.context, self.arguments = context, context.arguments
        self.batches_per_epoch = -(-plate.size // plate.subsample_size)
        self._rng_key = random.key(0)

    def next_key(self) -> Array:
        """A fresh random key."""
        self._rng_key, key = random.split(self._rng_key)
        return key

    def set_local_values(self, local_values: LocalValues) -> None:
        """Have these local values in all that looks at the potential."""
        self.context.set_arguments(with_local_values(self.arguments, local_values))


class PilotWindow(NamedTuple):
    """
    - **preconditioner** - anchor and factor, moved to what the window's draws say.
    - **q** - the chains' positions there.
    - **is_converged** - whether that was a small move.
    """

    preconditioner: Preconditioner
    q: np.ndarray
    is_converged: bool


class PilotChains(Protocol):
    """What a loop over windows must know of the chains that run in them."""

    max_num_windows: int

    def measure_noise(
        self, preconditioner: Preconditioner, q: np.ndarray
    ) -> dict[GradientEstimator, GradientNoiseStats]:
        """The gradient's noise where the chains are."""
        ...

    def choose_window_steps(self, step_size: float) -> int:
        """Steps of the next window."""
        ...

    def run_window(
        self,
        preconditioner: Preconditioner,
        q: np.ndarray,
        step_size: float,
        num_steps: int,
        estimator: GradientEstimator,
    ) -> PilotWindow | None:
        """One window; None where the chains were lost."""
        ...

    def is_last_window(self, is_converged: bool) -> bool:
        """Whether that was the last window."""
        ...


def run_local_pilot_windows(
    context: WarmupContext, pilot_chains: PilotChains, preconditioner: Preconditioner, q: np.ndarray
) -> tuple[Preconditioner, np.ndarray]:
    """Window after window until mean and covariance stay.

    :param q: the chains' first positions, whitened, shape ``(num_chains, d)``.
    :return: the whitening, and whitened positions from about the posterior.
    """
    shorter = 1.0
    for _ in range(pilot_chains.max_num_windows):
        noise = pilot_chains.measure_noise(preconditioner, q)
        curvature = context.measure_max_curvature(preconditioner, q)
        estimator, step_size, _ = context.choose_estimator(
            PILOT_DYNAMICS, MAX_PILOT_STEP_SIZE / shorter, noise, curvature, PILOT_TARGET_SD_BIAS
        )
        num_steps = pilot_chains.choose_window_steps(step_size)
        context.progress.begin_stage("pilot chains")
        window = pilot_chains.run_window(preconditioner, q, step_size, num_steps, estimator)
        if window is None:
            shorter *= 4.0
            q = q / 2.0
            continue
        preconditioner, q, is_settled = window
        if pilot_chains.is_last_window(is_settled):
            break
    return preconditioner, q


_INIT_LEARNING_RATE, _FINAL_LEARNING_RATE = 0.1, 0.003


_NUM_PILOT_CHAINS = 4


_MIN_WINDOW_STEPS, _MIN_WINDOW_EPOCHS = 500, 4


_MIN_NUM_WINDOWS, _MAX_NUM_WINDOWS = 3, 8


_MAX_WINDOW_LENGTH_RATIO = 4  # times the first


_MAX_CENTER_OFFSET_SD = 0.5


_STEPS_PER_CALL = 500


_NUM_NOISE_POSITIONS = 16  # positions at which noise is measured at the end


_MAX_DISTANCE_FROM_CENTER = 1e4  # whitened units from the anchor at which the chains count as lost


_PILOT_STEP = PILOT_DYNAMICS.make_step("symmetric")


jitted_sweep_local_values = jax.jit(
    sweep_local_values, static_argnames=("potential", "num_updates")
)


@partial(jax.jit, static_argnames="potential")
def compute_abs_local_hessian_diagonal(
    potential: Potential,
    global_position: Array,
    local_values: LocalValues,
    arguments: Arguments,
    rng_key: Array,
) -> Array:
    """Absolute second derivatives of all rows' potentials, none far below the others."""
    found = map_over_row_chunks(
        lambda rows, key: compute_local_hessian_diagonal(
            potential, global_position, rows, local_values.take(rows), arguments
        ),
        local_values.hmc_position.shape[0],
        rng_key,
    )
    found = jnp.where(jnp.isfinite(found), jnp.abs(found), jnp.nan)
    usual = jnp.nan_to_num(jnp.nanmedian(found, axis=0), nan=1.0)
    found = jnp.where(jnp.isnan(found), usual, found)
    return jnp.maximum(found, 1e-2 * jnp.maximum(usual, 1e-12))


@partial(jax.jit, static_argnames="potential")
def optimize_globals(
    potential: Potential,
    arguments: Arguments,
    global_position: Array,
    local_state: LocalLatentsState,
    indices: Indices,
    rng_key: Array,
) -> tuple[Array, LocalLatentsState]:
    """Adam on the globals, the minibatch's local values renewed before each of its steps."""
    rows = next(iter(indices.values()))
    num_steps = rows.shape[0]
    rate = optax.cosine_decay_schedule(
        _INIT_LEARNING_RATE, num_steps, _FINAL_LEARNING_RATE / _INIT_LEARNING_RATE
    )
    adam = optax.adam(rate)

    def step(carry: Any, xs: Any) -> tuple[Any, None]:
        theta, moments, state = carry
        minibatch, key = xs
        state, _, with_values = update_minibatch_locals(
            potential, state, theta, minibatch, arguments, theta, theta, MinibatchGradient(), key
        )
        gradient = potential.gradient(theta, minibatch, with_values)
        gradient = jnp.where(jnp.isfinite(gradient), gradient, 0.0)
        change, moments = adam.update(gradient, moments, theta)
        return (optax.apply_updates(theta, change), moments, state), None

    start = global_position, adam.init(global_position), local_state
    (global_position, _, local_state), _ = lax.scan(
        step, start, (indices, random.split(rng_key, num_steps))
    )
    return global_position, local_state


@partial(jax.jit, static_argnames=("potential", "estimator"))
def _run_local_pilot_steps(
    potential: Potential,
    arguments: Arguments,
    preconditioner: Preconditioner,
    carry: Any,
    local_scale: Array,
    step_size: Array,
    indices: Indices,
    rng_keys: Array,
    estimator: GradientEstimator,
) -> tuple[Any, Array]:
    """One call's steps of all pilot chains, and the whitened positions every fifth step."""

    def chain(carry: Any, indices: Indices, rng_key: Array) -> tuple[Any, Array]:
        noise_key, local_key = random.split(rng_key)
        num_steps = next(iter(indices.values())).shape[0]
        noise = random.normal(
            noise_key, (num_steps, _PILOT_STEP.num_noise, potential.dim), potential.dtype
        )

        def step(carry: Any, xs: Any) -> tuple[Any, Array]:
            dynamics, values, anchor_gradient = carry
            rows, noise, key = xs
            theta = preconditioner.to_position(dynamics.position)
            own = LocalLatentsState(values, local_scale, jnp.ones((), potential.dtype))
            own, anchor_gradient, with_values = update_minibatch_locals(
                potential,
                own,
                theta,
                rows,
                arguments,
                preconditioner.center,
                anchor_gradient,
                estimator,
                key,
            )
            held = preconditioner._replace(reference_gradient=anchor_gradient)
            gradient = make_gradient_fn(estimator, potential, with_values, held, rows)
            dynamics = _PILOT_STEP(dynamics, step_size, gradient, noise)
            return (dynamics, own.values, anchor_gradient), dynamics.position

        xs = indices, noise, random.split(local_key, num_steps)
        carry, positions = lax.scan(step, carry, xs)
        return carry, positions[PILOT_THINNING - 1 :: PILOT_THINNING]

    return jax.vmap(chain)(carry, indices, rng_keys)


class LocalPilot:
    """Pilot chains over globals and local values, as :func:`~.windows.settle` runs them.

    - **local_state** - local values of all rows, those of each chain, and the scales of their moves.

    :param local_context: of the warm-up.
    :param local_state: local values from which all chains start.
    """

    max_num_windows = _MAX_NUM_WINDOWS

    def __init__(self, local_context: LocalContext, local_state: LocalLatentsState) -> None:
        self.local_context, self.context = local_context, local_context.context
        self.local_state = local_state._replace(
            values=jax.tree.map(
                lambda x: jnp.broadcast_to(x, (_NUM_PILOT_CHAINS, *x.shape)), local_state.values
            )
        )
        self._min_window_steps = max(
            _MIN_WINDOW_STEPS, _MIN_WINDOW_EPOCHS * local_context.batches_per_epoch
        )
        self._num_windows = 0
        self._window_positions: np.ndarray | None = None

    def sample_init_q(self) -> np.ndarray:
        """Close to the centre."""
        return 0.3 * self.context.rng.standard_normal(
            (_NUM_PILOT_CHAINS, self.context.potential.dim)
        )

    def get_local_values(self, chain: int) -> LocalValues:
        """One chain's local values."""
        return jax.tree.map(lambda x: x[chain], self.local_state.values)

    def measure_noise(
        self, preconditioner: Preconditioner, q: np.ndarray
    ) -> dict[GradientEstimator, GradientNoiseStats]:
        self._num_windows += 1
        dim = self.context.potential.dim
        typical = np.concatenate([q, self.context.rng.standard_normal((_NUM_PILOT_CHAINS, dim))])
        self.local_context.set_local_values(self.get_local_values(0))
        return self.context.measure_noise_by_subsampling(preconditioner, typical).contiguous

    def choose_window_steps(self, step_size: float) -> int:
        return min(self._num_windows, _MAX_WINDOW_LENGTH_RATIO) * self._min_window_steps

    def run_window(
        self,
        preconditioner: Preconditioner,
        q: np.ndarray,
        step_size: float,
        num_steps: int,
        estimator: GradientEstimator,
    ) -> PilotWindow | None:
        gradients = np.stack(
            [self._full_gradient(preconditioner.center, c) for c in range(_NUM_PILOT_CHAINS)]
        )
        draws, state = self._sample_window(
            preconditioner, gradients, q, step_size, num_steps, estimator
        )
        if not (np.isfinite(draws).all() and np.abs(draws).max() < _MAX_DISTANCE_FROM_CENTER):
            return None
        self.local_state = state
        flat = draws.reshape(-1, draws.shape[-1])
        mean = flat.mean(0)
        is_settled = bool((np.abs(mean) < _MAX_CENTER_OFFSET_SD * flat.std(0)).all())
        ends, anchor = preconditioner.to_position(draws[:, -1]), preconditioner.to_position(mean)
        self._window_positions = preconditioner.to_position(flat)
        factor = preconditioner.factor
        if self.context.settings.inverse_mass_matrix is None:
            factor = self._factor_from_mean_curvature(ends)
        self.local_context.set_local_values(self.get_local_values(0))
        moved = self.context.build_preconditioner(anchor, factor)
        return PilotWindow(moved, moved.solve(ends - anchor), is_settled)

    def is_last_window(self, is_converged: bool) -> bool:
        return is_converged and self._num_windows >= _MIN_NUM_WINDOWS

    def summarize_last_window(
        self, preconditioner: Preconditioner
    ) -> tuple[np.ndarray, np.ndarray]:
        """What the last window says of the globals, in whitened coordinates.

        :return: some positions from about the posterior, and its covariance or its diagonal.
        :raises RuntimeError: where every window's chains were lost.
        """
        if self._window_positions is None:
            raise RuntimeError(
                "The warm-up's chains ran off from every start: is the posterior proper? Try "
                "other init_params, or a larger subsample_size."
            )
        flat, dim = (
            preconditioner.solve(self._window_positions - preconditioner.center),
            self.context.potential.dim,
        )
        is_dense = preconditioner.is_dense
        spread = np.cov(flat, rowvar=False).reshape(dim, dim) if is_dense else flat.var(0)
        return flat[self.context.rng.choice(len(flat), _NUM_NOISE_POSITIONS)], spread

    def _full_gradient(self, center: np.ndarray, chain: int) -> np.ndarray:
        arguments = with_local_values(self.local_context.arguments, self.get_local_values(chain))
        return JittedPotential(self.context.potential, arguments).gradient(center)

    def _factor_from_mean_curvature(self, positions: np.ndarray) -> np.ndarray:
        """L from the mean curvature over the chains' globals, each given its local values."""
        precisions = []
        for chain, position in enumerate(positions):
            self.local_context.set_local_values(self.get_local_values(chain))
            factor = self.context.compute_curvature_factor(position)
            if factor.ndim == 1:
                precisions.append(1.0 / np.square(factor))
            else:
                inverse = np.linalg.inv(factor)
                precisions.append(inverse.T @ inverse)
        mean = np.mean(precisions, 0)
        return 1.0 / np.sqrt(mean) if mean.ndim == 1 else factorize_spd(mean, inverse=True)

    def _sample_window(
        self,
        preconditioner: Preconditioner,
        reference_gradients: np.ndarray,
        init_q: np.ndarray,
        step_size: float,
        num_steps: int,
        estimator: GradientEstimator,
    ) -> tuple[np.ndarray, LocalLatentsState]:
        """Draws of the globals in whitened coordinates, the first half forgotten, and the end."""
        context, target = self.context, self.context.potential
        cast = preconditioner.cast(target.dtype)
        q = context.cast(init_q)
        dynamics = PILOT_DYNAMICS.State(q, context.cast(context.rng.standard_normal(q.shape)))
        carry = dynamics, self.local_state.values, context.cast(reference_gradients)
        draws = []
        for _ in range(-(-num_steps // _STEPS_PER_CALL)):
            rows = context.sample_indices(
                (_NUM_PILOT_CHAINS, _STEPS_PER_CALL), ContiguousSubsampling()
            )
            carry, kept = _run_local_pilot_steps(
                target,
                self.local_context.arguments,
                cast,
                carry,
                self.local_state.scale,
                jnp.asarray(step_size, target.dtype),
                jax.tree.map(jnp.asarray, dict(rows)),
                random.split(self.local_context.next_key(), _NUM_PILOT_CHAINS),
                estimator,
            )
            draws.append(np.asarray(kept, np.float64))
        end = self.local_state._replace(values=carry[1])
        return np.concatenate(draws[len(draws) // 2 :], axis=1), end


_MIN_ADAM_STEPS, _MIN_ADAM_EPOCHS = 1_000, 3


_NUM_NEWTON_STEPS = 10


_MAX_NEWTON_STEP_RMS = 3.0


_NUM_LOCAL_SCALE_ROUNDS = 8


_NUM_UPDATES_PER_SWEEP = 4


_TARGET_ACCEPT_PROB = 0.8


_MAX_EPOCHS_PER_DRAW = 20


def warm_up(context: WarmupContext, init_positions: Iterable[np.ndarray]) -> Adaptation:
    """Find what all chains share. Whatever is asked of all rows holds local values.

    :param init_positions: first positions, of which the first finite one is taken.
    """
    local = LocalContext(context)
    context.progress.begin_stage("warm start")
    (position,) = context.find_finite_positions(init_positions, 1)
    values = init_local_values(context.potential, local.arguments, context.cast(position))
    check_conditional_independence(
        context.potential, local.arguments, context.cast(position), values
    )
    state = _adapt_local_scale(local, position, values)
    if context.is_fully_specified:
        return _adapt_to_user_settings(local, position, state)
    position, state = _run_adam(local, position, state)
    local.set_local_values(state.values)
    context.progress.begin_stage("curvature")
    position, state = _run_monte_carlo_em(local, position, state)
    state = _adapt_local_scale(local, position, state.values)
    local.set_local_values(state.values)
    pilot = LocalPilot(local, state)
    whitening, _ = run_local_pilot_windows(
        context, pilot, _build_preconditioner(context, position), pilot.sample_init_q()
    )
    q, spread = pilot.summarize_last_window(whitening)
    context.progress.begin_stage("gradient noise")
    local.set_local_values(pilot.get_local_values(0))
    adaptation = choose_sampler_settings(context, Mode(whitening, q))
    num_steps = _choose_num_local_steps(local, adaptation, spread)
    return adaptation._replace(
        # The gradients that count come evenly in an iteration.
        num_steps=num_steps + -num_steps % max(1, adaptation.monitor_gradients.interval),
        local_init=LocalLatentsInit(
            pilot.local_state.values,
            pilot.local_state.scale,
            context.cast(factorize_covariance(spread)),
        ),
    )


def _adapt_to_user_settings(
    local_context: LocalContext, position: np.ndarray, local_state: LocalLatentsState
) -> Adaptation:
    """What the user has given, about a first position and local values for it."""
    local_context.set_local_values(local_state.values)
    adaptation = build_adaptation_from_settings(local_context.context, position)
    values = jax.tree.map(lambda x: x[None], local_state.values)
    spread = jnp.ones(position.shape, local_context.context.potential.dtype)
    return adaptation._replace(local_init=LocalLatentsInit(values, local_state.scale, spread))


def _build_preconditioner(context: WarmupContext, position: np.ndarray) -> Preconditioner:
    matrix = context.settings.inverse_mass_matrix
    factor = (
        context.compute_curvature_factor(position)
        if matrix is None
        else factorize_covariance(matrix)
    )
    return context.build_preconditioner(position, factor)


def _adapt_local_scale(
    local_context: LocalContext, position: np.ndarray, local_values: LocalValues
) -> LocalLatentsState:
    """Length scales of the local moves: from the rows' curvature, shorter where rejected."""
    target, arguments = local_context.context.potential, local_context.arguments
    theta = local_context.context.cast(position)
    one = jnp.ones((), target.dtype)
    state = LocalLatentsState(local_values, jnp.ones_like(local_values.hmc_position), one)
    if not local_values.hmc_position.size:
        return state
    total = jnp.zeros_like(local_values.hmc_position)
    for n in range(_NUM_LOCAL_SCALE_ROUNDS):
        keys = local_context.next_key(), local_context.next_key()
        total += compute_abs_local_hessian_diagonal(target, theta, state.values, arguments, keys[0])
        state = state._replace(scale=jnp.sqrt((n + 1) / total))
        local_values, _ = jitted_sweep_local_values(
            target, theta, state, arguments, keys[1], _NUM_UPDATES_PER_SWEEP
        )
        state = state._replace(values=local_values)
    for _ in range(_NUM_LOCAL_SCALE_ROUNDS):
        local_values, acceptance = jitted_sweep_local_values(
            target, theta, state, arguments, local_context.next_key(), _NUM_UPDATES_PER_SWEEP
        )
        factor = jnp.exp(jnp.minimum(acceptance - _TARGET_ACCEPT_PROB, 0.0))
        state = state._replace(values=local_values, scale=state.scale * factor[:, None])
    return state


def _run_adam(
    local_context: LocalContext, position: np.ndarray, local_state: LocalLatentsState
) -> tuple[np.ndarray, LocalLatentsState]:
    context = local_context.context
    num_steps = max(_MIN_ADAM_STEPS, _MIN_ADAM_EPOCHS * local_context.batches_per_epoch)
    rows = context.sample_indices((num_steps,), ContiguousSubsampling())
    theta, local_state = optimize_globals(
        context.potential,
        local_context.arguments,
        context.cast(position),
        local_state,
        jax.tree.map(jnp.asarray, dict(rows)),
        local_context.next_key(),
    )
    found = np.asarray(theta, np.float64)
    return (found if np.isfinite(found).all() else position), local_state


def _run_monte_carlo_em(
    local_context: LocalContext, position: np.ndarray, local_state: LocalLatentsState
) -> tuple[np.ndarray, LocalLatentsState]:
    context = local_context.context
    for _ in range(_NUM_NEWTON_STEPS):
        whitening = _build_preconditioner(context, position)
        context.check_finite_gradient(whitening)
        step = whitening.apply_transpose(whitening.reference_gradient)
        step *= min(1.0, _MAX_NEWTON_STEP_RMS * math.sqrt(step.size) / np.linalg.norm(step))
        position = position - whitening.apply(step)
        theta, key = context.cast(position), local_context.next_key()
        values, _ = jitted_sweep_local_values(
            context.potential,
            theta,
            local_state,
            local_context.arguments,
            key,
            _NUM_UPDATES_PER_SWEEP,
        )
        local_state = local_state._replace(values=values)
        local_context.set_local_values(values)
    return position, local_state


def _choose_num_local_steps(
    local_context: LocalContext, adaptation: Adaptation, covariance: np.ndarray
) -> int:
    """Steps a draw: until globals and local values have about forgotten each other."""
    settings = local_context.context.settings
    if settings.num_steps is not None:
        return settings.num_steps
    widest = covariance.max() if covariance.ndim == 1 else np.linalg.eigvalsh(covariance).max()
    epochs = min(max(1.0, 2.0 * float(widest)), _MAX_EPOCHS_PER_DRAW)
    longest = max(MAX_NUM_STEPS, _MAX_EPOCHS_PER_DRAW * local_context.batches_per_epoch)
    num_steps = min(
        max(adaptation.num_steps, math.ceil(epochs * local_context.batches_per_epoch)), longest
    )
    if num_steps > 4 * MAX_NUM_STEPS:
        warn_user(
            f"A draw takes {num_steps} steps, so that the latent values of all rows are "
            f"renewed about {num_steps / local_context.batches_per_epoch:.2g} times between draws: a larger "
            "subsample_size takes fewer, or set `num_steps`."
        )
    return num_steps
