"""Pilot chains over globals and local values, and other compiled work of that warm-up."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax, random

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.minibatch import ContiguousSubsampling
from numpyro_sgmcmc.data.plates import Indices
from numpyro_sgmcmc.posterior.estimators import (
    GradientEstimator,
    MinibatchGradient,
    make_gradient_fn,
)
from numpyro_sgmcmc.posterior.locals.moves import (
    LocalLatentsState,
    compute_local_hessian_diagonal,
    map_over_row_chunks,
    sweep_local_values,
    update_minibatch_locals,
)
from numpyro_sgmcmc.posterior.locals.sites import LocalValues, with_local_values
from numpyro_sgmcmc.posterior.target import Potential
from numpyro_sgmcmc.posterior.whitening import Preconditioner
from numpyro_sgmcmc.warmup.eager_potential import JittedPotential
from numpyro_sgmcmc.warmup.factors import factorize_spd
from numpyro_sgmcmc.warmup.local_context import LocalContext
from numpyro_sgmcmc.warmup.noise import GradientNoiseStats
from numpyro_sgmcmc.warmup.pilot import PILOT_DYNAMICS, PILOT_THINNING
from numpyro_sgmcmc.warmup.windows import PilotWindow

__all__ = [
    "LocalPilot",
    "compute_abs_local_hessian_diagonal",
    "jitted_sweep_local_values",
    "optimize_globals",
]

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
