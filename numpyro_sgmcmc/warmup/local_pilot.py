"""Compiled work of the warm-up with local values: sweeps over all rows, Adam, pilot chains."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax, random

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.plates import Indices
from numpyro_sgmcmc.posterior.gradients import Anchored, whitened_gradient
from numpyro_sgmcmc.posterior.locals.moves import (
    LocalState,
    by_chunks,
    curvatures,
    renew_minibatch,
    sweep,
)
from numpyro_sgmcmc.posterior.locals.sites import AllRows
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.warmup.pilot import KEEP_EVERY, PILOT

__all__ = ["advance", "curvature_everywhere", "descend_with_locals", "sweep_all"]

_FIRST_RATE, _LAST_RATE = 0.1, 0.003
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
        state, _, here = renew_minibatch(
            target, state, theta, minibatch, arguments, theta, theta, "plain", key
        )
        gradient = target.gradient(theta, minibatch, here)
        gradient = jnp.where(jnp.isfinite(gradient), gradient, 0.0)
        change, moments = adam.update(gradient, moments, theta)
        return (optax.apply_updates(theta, change), moments, state), None

    start = theta, adam.init(theta), state
    (theta, _, state), _ = lax.scan(step, start, (indices, random.split(rng_key, num_steps)))
    return theta, state


@partial(jax.jit, static_argnames=("target", "estimator"))
def advance(
    target: Target,
    arguments: Arguments,
    anchored: Anchored,
    carry: Any,
    scale: Array,
    step_size: Array,
    indices: Indices,
    rng_keys: Array,
    estimator: str,
) -> tuple[Any, Array]:
    """One call's steps of all pilot chains, and the whitened positions every fifth step."""

    def chain(carry: Any, indices: Indices, rng_key: Array) -> tuple[Any, Array]:
        noise_key, local_key = random.split(rng_key)
        num_steps = next(iter(indices.values())).shape[0]
        noise = random.normal(noise_key, (num_steps, _STEP.draws, target.dim), target.dtype)

        def step(carry: Any, xs: Any) -> tuple[Any, Array]:
            dynamics, values, anchor_gradient = carry
            rows, noise, key = xs
            coordinates = anchored.coordinates
            theta = coordinates.position(dynamics.position)
            own = LocalState(values, scale, jnp.ones((), target.dtype))
            own, anchor_gradient, here = renew_minibatch(
                target,
                own,
                theta,
                rows,
                arguments,
                coordinates.anchor,
                anchor_gradient,
                estimator,
                key,
            )
            origin = anchored._replace(anchor_gradient=anchor_gradient)
            gradient = whitened_gradient(estimator, target, here, origin, rows)
            dynamics = _STEP(dynamics, step_size, gradient, noise)
            return (dynamics, own.values, anchor_gradient), dynamics.position

        xs = indices, noise, random.split(local_key, num_steps)
        carry, positions = lax.scan(step, carry, xs)
        return carry, positions[KEEP_EVERY - 1 :: KEEP_EVERY]

    return jax.vmap(chain)(carry, indices, rng_keys)
