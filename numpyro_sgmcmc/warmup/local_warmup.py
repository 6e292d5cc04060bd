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

from numpyro_sgmcmc.checks import warn_user
from numpyro_sgmcmc.data.minibatch import ContiguousSubsampling
from numpyro_sgmcmc.posterior.locals.checks import check_conditional_independence, init_local_values
from numpyro_sgmcmc.posterior.locals.moves import LocalLatentsState
from numpyro_sgmcmc.posterior.locals.sites import LocalValues
from numpyro_sgmcmc.posterior.whitening import Preconditioner
from numpyro_sgmcmc.warmup.context import WarmupContext
from numpyro_sgmcmc.warmup.decide import choose_sampler_settings
from numpyro_sgmcmc.warmup.factors import factorize_covariance
from numpyro_sgmcmc.warmup.given import build_adaptation_from_settings
from numpyro_sgmcmc.warmup.local_context import LocalContext
from numpyro_sgmcmc.warmup.local_pilot import (
    LocalPilot,
    compute_abs_local_hessian_diagonal,
    jitted_sweep_local_values,
    optimize_globals,
)
from numpyro_sgmcmc.warmup.local_start import LocalLatentsInit
from numpyro_sgmcmc.warmup.modes import Mode
from numpyro_sgmcmc.warmup.settings import Adaptation
from numpyro_sgmcmc.warmup.step_size import MAX_NUM_STEPS
from numpyro_sgmcmc.warmup.windows import run_local_pilot_windows

__all__ = ["warm_up"]

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
