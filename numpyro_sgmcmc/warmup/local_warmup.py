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
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.checks import notify
from numpyro_sgmcmc.data.minibatch import Blocks
from numpyro_sgmcmc.posterior.locals.checks import first_values, refuse_dependent_rows
from numpyro_sgmcmc.posterior.locals.moves import LocalState
from numpyro_sgmcmc.posterior.locals.sites import AllRows
from numpyro_sgmcmc.posterior.whitening import Whitening
from numpyro_sgmcmc.warmup.context import Context
from numpyro_sgmcmc.warmup.decide import decide
from numpyro_sgmcmc.warmup.factors import root
from numpyro_sgmcmc.warmup.given import as_given
from numpyro_sgmcmc.warmup.local_context import LocalContext
from numpyro_sgmcmc.warmup.local_pilot import (
    LocalPilot,
    curvature_everywhere,
    descend_with_locals,
    sweep_all,
)
from numpyro_sgmcmc.warmup.local_start import LocalStart
from numpyro_sgmcmc.warmup.modes import Mode
from numpyro_sgmcmc.warmup.settings import Adaptation
from numpyro_sgmcmc.warmup.step_size import MAX_NUM_STEPS
from numpyro_sgmcmc.warmup.windows import settle

__all__ = ["warm_up"]

_ADAM_STEPS, _ADAM_EPOCHS = 1_000, 3
_NEWTON_STEPS = 10
_LONGEST_STEP = 3.0
_SCALE_ROUNDS = 8
_MOVES = 4
_TARGET_ACCEPTANCE = 0.8
_DRAW_EPOCHS = 20


def warm_up(context: Context, starts: Iterable[np.ndarray]) -> Adaptation:
    """Find what all chains share. Whatever is asked of all rows holds local values.

    :param starts: first positions, of which the first finite one is taken.
    """
    local = LocalContext(context)
    context.progress.begin("warm start")
    (position,) = context.finite_starts(starts, 1)
    values = first_values(context.target, local.arguments, context.cast(position))
    refuse_dependent_rows(context.target, local.arguments, context.cast(position), values)
    state = _scaled(local, position, values)
    if context.leaves_nothing_to_find:
        return _as_given(local, position, state)
    position, state = _adam(local, position, state)
    local.hold(state.values)
    context.progress.begin("curvature")
    position, state = _newton(local, position, state)
    state = _scaled(local, position, state.values)
    local.hold(state.values)
    pilot = LocalPilot(local, state)
    whitening, _ = settle(context, pilot, _whitening(context, position), pilot.first_positions())
    q, spread = pilot.found(whitening)
    context.progress.begin("gradient noise")
    local.hold(pilot.values_of(0))
    adaptation = decide(context, Mode(whitening, q))
    num_steps = _num_steps(local, adaptation, spread)
    return adaptation._replace(
        # The gradients that count come evenly in an iteration.
        num_steps=num_steps + -num_steps % max(1, adaptation.moment_source.every),
        locals=LocalStart(pilot.state.values, pilot.state.scale, context.cast(root(spread))),
    )


def _as_given(local: LocalContext, position: np.ndarray, state: LocalState) -> Adaptation:
    """What the user has given, about a first position and local values for it."""
    local.hold(state.values)
    adaptation = as_given(local.context, position)
    values = jax.tree.map(lambda x: x[None], state.values)
    spread = jnp.ones(position.shape, local.context.target.dtype)
    return adaptation._replace(locals=LocalStart(values, state.scale, spread))


def _whitening(context: Context, position: np.ndarray) -> Whitening:
    matrix = context.settings.inverse_mass_matrix
    factor = context.factor_at(position) if matrix is None else root(matrix)
    return context.whitening_at(position, factor)


def _scaled(local: LocalContext, position: np.ndarray, values: AllRows) -> LocalState:
    """Length scales of the local moves: from the rows' curvature, shorter where rejected."""
    target, arguments = local.context.target, local.arguments
    theta = local.context.cast(position)
    one = jnp.ones((), target.dtype)
    state = LocalState(values, jnp.ones_like(values.position), one)
    if not values.position.size:
        return state
    total = jnp.zeros_like(values.position)
    for n in range(_SCALE_ROUNDS):
        keys = local.next_key(), local.next_key()
        total += curvature_everywhere(target, theta, state.values, arguments, keys[0])
        state = state._replace(scale=jnp.sqrt((n + 1) / total))
        values, _ = sweep_all(target, theta, state, arguments, keys[1], _MOVES)
        state = state._replace(values=values)
    for _ in range(_SCALE_ROUNDS):
        values, acceptance = sweep_all(target, theta, state, arguments, local.next_key(), _MOVES)
        factor = jnp.exp(jnp.minimum(acceptance - _TARGET_ACCEPTANCE, 0.0))
        state = state._replace(values=values, scale=state.scale * factor[:, None])
    return state


def _adam(
    local: LocalContext, position: np.ndarray, state: LocalState
) -> tuple[np.ndarray, LocalState]:
    context = local.context
    num_steps = max(_ADAM_STEPS, _ADAM_EPOCHS * local.epoch)
    rows = context.draw_rows((num_steps,), Blocks())
    theta, state = descend_with_locals(
        context.target,
        local.arguments,
        context.cast(position),
        state,
        jax.tree.map(jnp.asarray, dict(rows)),
        local.next_key(),
    )
    found = np.asarray(theta, np.float64)
    return (found if np.isfinite(found).all() else position), state


def _newton(
    local: LocalContext, position: np.ndarray, state: LocalState
) -> tuple[np.ndarray, LocalState]:
    context = local.context
    for _ in range(_NEWTON_STEPS):
        whitening = _whitening(context, position)
        context.refuse_infinite_gradient(whitening)
        step = whitening.pull(whitening.gradient)
        step *= min(1.0, _LONGEST_STEP * math.sqrt(step.size) / np.linalg.norm(step))
        position = position - whitening.push(step)
        theta, key = context.cast(position), local.next_key()
        values, _ = sweep_all(context.target, theta, state, local.arguments, key, _MOVES)
        state = state._replace(values=values)
        local.hold(values)
    return position, state


def _num_steps(local: LocalContext, adaptation: Adaptation, spread: np.ndarray) -> int:
    """Steps a draw: until globals and local values have about forgotten each other."""
    settings = local.context.settings
    if settings.num_steps is not None:
        return settings.num_steps
    widest = spread.max() if spread.ndim == 1 else np.linalg.eigvalsh(spread).max()
    epochs = min(max(1.0, 2.0 * float(widest)), _DRAW_EPOCHS)
    longest = max(MAX_NUM_STEPS, _DRAW_EPOCHS * local.epoch)
    num_steps = min(max(adaptation.num_steps, math.ceil(epochs * local.epoch)), longest)
    if num_steps > 4 * MAX_NUM_STEPS:
        notify(
            f"A draw takes {num_steps} steps, so that the latent values of all rows are "
            f"renewed about {num_steps / local.epoch:.2g} times between draws: a larger "
            "subsample_size takes fewer, or set `num_steps`."
        )
    return num_steps
