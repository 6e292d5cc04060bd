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
from numpyro_sgmcmc.data.minibatch import Blocks
from numpyro_sgmcmc.data.plates import Indices
from numpyro_sgmcmc.posterior.estimators import Estimator, Plain, whitened_gradient
from numpyro_sgmcmc.posterior.locals.moves import (
    LocalState,
    by_chunks,
    curvatures,
    renew_minibatch,
    sweep,
)
from numpyro_sgmcmc.posterior.locals.sites import AllRows, with_locals
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.posterior.whitening import Whitening
from numpyro_sgmcmc.warmup.eager_potential import EagerPotential
from numpyro_sgmcmc.warmup.factors import symmetric_root
from numpyro_sgmcmc.warmup.local_context import LocalContext
from numpyro_sgmcmc.warmup.noise import Noise
from numpyro_sgmcmc.warmup.pilot import KEEP_EVERY, PILOT
from numpyro_sgmcmc.warmup.windows import Window

__all__ = ["LocalPilot", "curvature_everywhere", "descend_with_locals", "sweep_all"]

_FIRST_RATE, _LAST_RATE = 0.1, 0.003
_CHAINS = 4
_WINDOW_STEPS, _WINDOW_EPOCHS = 500, 4
_MIN_WINDOWS, _MAX_WINDOWS = 3, 8
_LONGEST_WINDOW = 4  # times the first
_SMALL_SHIFT = 0.5
_STEPS_A_CALL = 500
_TYPICAL = 16  # positions at which noise is measured at the end
_LOST = 1e4  # whitened units from the anchor at which the chains count as lost
_STEP = PILOT.step("symmetric")

sweep_all = jax.jit(sweep, static_argnames=("target", "num_moves"))


@partial(jax.jit, static_argnames="target")
def curvature_everywhere(
    target: Target, theta: Array, values: AllRows, arguments: Arguments, rng_key: Array
) -> Array:
    """Absolute second derivatives of all rows' potentials, none far below the others."""
    found = by_chunks(
        lambda rows, key: curvatures(target, theta, rows, values.take(rows), arguments),
        values.position.shape[0],
        rng_key,
    )
    found = jnp.where(jnp.isfinite(found), jnp.abs(found), jnp.nan)
    usual = jnp.nan_to_num(jnp.nanmedian(found, axis=0), nan=1.0)
    found = jnp.where(jnp.isnan(found), usual, found)
    return jnp.maximum(found, 1e-2 * jnp.maximum(usual, 1e-12))


@partial(jax.jit, static_argnames="target")
def descend_with_locals(
    target: Target,
    arguments: Arguments,
    theta: Array,
    state: LocalState,
    indices: Indices,
    rng_key: Array,
) -> tuple[Array, LocalState]:
    """Adam on the globals, the minibatch's local values renewed before each of its steps."""
    rows = next(iter(indices.values()))
    num_steps = rows.shape[0]
    rate = optax.cosine_decay_schedule(_FIRST_RATE, num_steps, _LAST_RATE / _FIRST_RATE)
    adam = optax.adam(rate)

    def step(carry: Any, xs: Any) -> tuple[Any, None]:
        theta, moments, state = carry
        minibatch, key = xs
        state, _, with_values = renew_minibatch(
            target, state, theta, minibatch, arguments, theta, theta, Plain(), key
        )
        gradient = target.gradient(theta, minibatch, with_values)
        gradient = jnp.where(jnp.isfinite(gradient), gradient, 0.0)
        change, moments = adam.update(gradient, moments, theta)
        return (optax.apply_updates(theta, change), moments, state), None

    start = theta, adam.init(theta), state
    (theta, _, state), _ = lax.scan(step, start, (indices, random.split(rng_key, num_steps)))
    return theta, state


@partial(jax.jit, static_argnames=("target", "estimator"))
def _advance(
    target: Target,
    arguments: Arguments,
    whitening: Whitening,
    carry: Any,
    scale: Array,
    step_size: Array,
    indices: Indices,
    rng_keys: Array,
    estimator: Estimator,
) -> tuple[Any, Array]:
    """One call's steps of all pilot chains, and the whitened positions every fifth step."""

    def chain(carry: Any, indices: Indices, rng_key: Array) -> tuple[Any, Array]:
        noise_key, local_key = random.split(rng_key)
        num_steps = next(iter(indices.values())).shape[0]
        noise = random.normal(noise_key, (num_steps, _STEP.draws, target.dim), target.dtype)

        def step(carry: Any, xs: Any) -> tuple[Any, Array]:
            dynamics, values, anchor_gradient = carry
            rows, noise, key = xs
            theta = whitening.position(dynamics.position)
            own = LocalState(values, scale, jnp.ones((), target.dtype))
            own, anchor_gradient, with_values = renew_minibatch(
                target,
                own,
                theta,
                rows,
                arguments,
                whitening.anchor,
                anchor_gradient,
                estimator,
                key,
            )
            held = whitening._replace(gradient=anchor_gradient)
            gradient = whitened_gradient(estimator, target, with_values, held, rows)
            dynamics = _STEP(dynamics, step_size, gradient, noise)
            return (dynamics, own.values, anchor_gradient), dynamics.position

        xs = indices, noise, random.split(local_key, num_steps)
        carry, positions = lax.scan(step, carry, xs)
        return carry, positions[KEEP_EVERY - 1 :: KEEP_EVERY]

    return jax.vmap(chain)(carry, indices, rng_keys)


class LocalPilot:
    """Pilot chains over globals and local values, as :func:`~.windows.settle` runs them.

    - **state** - local values of all rows, those of each chain, and the scales of their moves.

    :param local: of the warm-up.
    :param state: local values from which all chains start.
    """

    max_windows = _MAX_WINDOWS

    def __init__(self, local: LocalContext, state: LocalState) -> None:
        self.local, self.context = local, local.context
        self.state = state._replace(
            values=jax.tree.map(lambda x: jnp.broadcast_to(x, (_CHAINS, *x.shape)), state.values)
        )
        self._shortest = max(_WINDOW_STEPS, _WINDOW_EPOCHS * local.epoch)
        self._windows = 0
        self._positions: np.ndarray | None = None

    def first_positions(self) -> np.ndarray:
        """Close to the centre."""
        return 0.3 * self.context.rng.standard_normal((_CHAINS, self.context.target.dim))

    def values_of(self, chain: int) -> AllRows:
        """One chain's local values."""
        return jax.tree.map(lambda x: x[chain], self.state.values)

    def noise(self, whitening: Whitening, q: np.ndarray) -> dict[Estimator, Noise]:
        self._windows += 1
        dim = self.context.target.dim
        typical = np.concatenate([q, self.context.rng.standard_normal((_CHAINS, dim))])
        self.local.hold(self.values_of(0))
        return self.context.noise(whitening, typical).blocks

    def num_steps(self, step_size: float) -> int:
        return min(self._windows, _LONGEST_WINDOW) * self._shortest

    def run(
        self,
        whitening: Whitening,
        q: np.ndarray,
        step_size: float,
        num_steps: int,
        estimator: Estimator,
    ) -> Window | None:
        gradients = np.stack([self._gradient_at(whitening.anchor, c) for c in range(_CHAINS)])
        draws, state = self._draws(whitening, gradients, q, step_size, num_steps, estimator)
        if not (np.isfinite(draws).all() and np.abs(draws).max() < _LOST):
            return None
        self.state = state
        flat = draws.reshape(-1, draws.shape[-1])
        mean = flat.mean(0)
        is_settled = bool((np.abs(mean) < _SMALL_SHIFT * flat.std(0)).all())
        ends, anchor = whitening.position(draws[:, -1]), whitening.position(mean)
        self._positions = whitening.position(flat)
        factor = whitening.factor
        if self.context.settings.inverse_mass_matrix is None:
            factor = self._mean_factor(ends)
        self.local.hold(self.values_of(0))
        moved = self.context.whitening_at(anchor, factor)
        return Window(moved, moved.whiten(ends - anchor), is_settled)

    def is_done(self, is_settled: bool) -> bool:
        return is_settled and self._windows >= _MIN_WINDOWS

    def found(self, whitening: Whitening) -> tuple[np.ndarray, np.ndarray]:
        """What the last window says of the globals, in whitened coordinates.

        :return: some positions from about the posterior, and its covariance or its diagonal.
        :raises RuntimeError: where every window's chains were lost.
        """
        if self._positions is None:
            raise RuntimeError(
                "The warm-up's chains ran off from every start: is the posterior proper? Try "
                "other init_params, or a larger subsample_size."
            )
        flat, dim = whitening.whiten(self._positions - whitening.anchor), self.context.target.dim
        is_dense = whitening.is_dense
        spread = np.cov(flat, rowvar=False).reshape(dim, dim) if is_dense else flat.var(0)
        return flat[self.context.rng.choice(len(flat), _TYPICAL)], spread

    def _gradient_at(self, anchor: np.ndarray, chain: int) -> np.ndarray:
        arguments = with_locals(self.local.arguments, self.values_of(chain))
        return EagerPotential(self.context.target, arguments).gradient(anchor)

    def _mean_factor(self, positions: np.ndarray) -> np.ndarray:
        """L from the mean curvature over the chains' globals, each given its local values."""
        precisions = []
        for chain, position in enumerate(positions):
            self.local.hold(self.values_of(chain))
            factor = self.context.factor_at(position)
            if factor.ndim == 1:
                precisions.append(1.0 / np.square(factor))
            else:
                inverse = np.linalg.inv(factor)
                precisions.append(inverse.T @ inverse)
        mean = np.mean(precisions, 0)
        return 1.0 / np.sqrt(mean) if mean.ndim == 1 else symmetric_root(mean, inverse=True)

    def _draws(
        self,
        whitening: Whitening,
        gradients: np.ndarray,
        starts: np.ndarray,
        step_size: float,
        num_steps: int,
        estimator: Estimator,
    ) -> tuple[np.ndarray, LocalState]:
        """Draws of the globals in whitened coordinates, the first half forgotten, and the end."""
        context, target = self.context, self.context.target
        cast = whitening.cast(target.dtype)
        q = context.cast(starts)
        dynamics = PILOT.State(q, context.cast(context.rng.standard_normal(q.shape)))
        carry = dynamics, self.state.values, context.cast(gradients)
        draws = []
        for _ in range(-(-num_steps // _STEPS_A_CALL)):
            rows = context.draw_rows((_CHAINS, _STEPS_A_CALL), Blocks())
            carry, kept = _advance(
                target,
                self.local.arguments,
                cast,
                carry,
                self.state.scale,
                jnp.asarray(step_size, target.dtype),
                jax.tree.map(jnp.asarray, dict(rows)),
                random.split(self.local.next_key(), _CHAINS),
                estimator,
            )
            draws.append(np.asarray(kept, np.float64))
        end = self.state._replace(values=carry[1])
        return np.concatenate(draws[len(draws) // 2 :], axis=1), end
