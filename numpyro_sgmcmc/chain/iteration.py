"""One iteration of one chain: ``num_steps`` stochastic-gradient steps in a ``lax.scan``.

Pure functions of the chain's state; what they need besides is in a
:class:`~numpyro_sgmcmc.chain.plan.ChainPlan`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_sgmcmc.chain.block import get_key_data
from numpyro_sgmcmc.chain.minibatch import (
    InMemoryMinibatchSource,
    MinibatchSource,
    PrefetchedMinibatchSource,
)
from numpyro_sgmcmc.chain.moments import RunningSums
from numpyro_sgmcmc.chain.plan import ChainConfig, Keys, sample_iteration_indices
from numpyro_sgmcmc.chain.read_ahead import refill_prefetch_buffer
from numpyro_sgmcmc.chain.readings import MomentAccumulator
from numpyro_sgmcmc.chain.state import AdaptState, SGMCMCState, StepCarry
from numpyro_sgmcmc.chain.step import StepInputs, Stepper
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.warmup.step_control import StepSizeMonitor

__all__ = ["run_chain_iteration", "run_iteration"]

_MAX_DISPLACEMENT_SD = (
    1e3  # whitened units in one iteration: no chain moves so far by its own dynamics
)
_MIN_STEP_SIZE_FRACTION = (
    1 / 64
)  # of the step size chosen: where that fails too, it is not the step
_MIN_USER_STEP_SIZE_FRACTION = 2.0**-12  # of the user's, which may be in other units


def run_iteration(
    config: ChainConfig, state: SGMCMCState, arguments: Arguments, chain_axis: str | None = None
) -> SGMCMCState:
    """The state after one iteration, of one chain or of several.

    :param config: what does not change from iteration to iteration.
    :param state: the state before, batched for several chains.
    :param arguments: the model's arguments.
    :param chain_axis: the mesh axis over which chains are spread, if they are.
    """
    if config.potential.dim == 0:
        return state._replace(i=state.i + 1)
    state = refill_prefetch_buffer(config, state, chain_axis)
    in_block = None if state.prefetch_buffer is None else state.prefetch_buffer.num_used.ravel()[0]
    one = partial(run_chain_iteration, config, arguments=arguments, buffer_index=in_block)
    return jax.vmap(one, spmd_axis_name=chain_axis)(state) if state.i.ndim else one(state)


def run_chain_iteration(
    config: ChainConfig, state: SGMCMCState, arguments: Arguments, buffer_index: Array | None = None
) -> SGMCMCState:
    """The state after one iteration.

    :param config: what does not change from iteration to iteration.
    :param state: the state before.
    :param arguments: the model's arguments.
    :param buffer_index: the iteration's number in the block of rows that have been read, the same for
        all chains; None where all rows are in memory.
    """
    num_steps, adapt_state = config.adaptation.num_steps, state.adapt_state
    keys = Keys.split(state.rng_key)
    streams, rows = sample_iteration_indices(config, state.streams, keys.indices)
    counts = state.i * num_steps + jnp.arange(num_steps)
    source: MinibatchSource = InMemoryMinibatchSource(rows, arguments)
    if state.prefetch_buffer is not None:
        assert buffer_index is not None
        source = PrefetchedMinibatchSource(
            state.prefetch_buffer, buffer_index, num_steps, config.potential.host_lookups, arguments
        )
    stepper, inputs = Stepper.prepare_iteration(config, adapt_state, source, keys, counts)
    reader = MomentAccumulator(config, adapt_state.preconditioner, arguments)
    end, sums = _scan_steps(stepper, reader, _init_carry(state), inputs, keys)
    if end.reference_gradient is not None:
        adapt_state = adapt_state.with_reference_gradient(end.reference_gradient)

    step_size = config.get_step_size(counts[-1], adapt_state)
    dynamics, diverging = _restart_if_diverged(
        config, state, end.dynamics_state, step_size, keys.restart
    )
    weight = config.compute_weight(counts, adapt_state)
    control, factor = _adapt_step_size(
        config, state, _compute_temperatures(config, state, sums, end), diverging
    )
    if factor is not None:
        step_size = factor * step_size
    block = state.prefetch_buffer
    if block is not None:
        block = block._replace(
            num_used=block.num_used + 1, next_key_data=get_key_data(keys.next_key)
        )
    return state._replace(
        i=state.i + 1,
        z=_collect_site_values(config, adapt_state, dynamics.position, end),
        dynamics_state=dynamics,
        streams=streams,
        weight=weight,
        diverging=diverging,
        moments=reader.update_moments(state, sums, dynamics, weight, diverging),
        step_size_monitor=control,
        adapt_state=adapt_state._replace(step_size=step_size),
        rng_key=keys.next_key,
        prefetch_buffer=block,
        local_state=end.local_state,
    )


def _init_carry(state: SGMCMCState) -> StepCarry:
    if state.local_state is None:
        return StepCarry(state.dynamics_state)
    return StepCarry(
        state.dynamics_state, state.local_state, state.adapt_state.preconditioner.reference_gradient
    )


def _scan_steps(
    stepper: Stepper,
    accumulator: MomentAccumulator,
    init_carry: StepCarry,
    inputs: StepInputs,
    keys: Keys,
) -> tuple[StepCarry, RunningSums]:
    """All steps, with a look at position and gradient at some of them."""
    num_steps = len(inputs.step_index)
    every = accumulator.monitor_gradients.interval or num_steps

    def to_next_look(
        carry: tuple[StepCarry, RunningSums], xs: Any
    ) -> tuple[tuple[StepCarry, RunningSums], None]:
        (moving, sums), (some, fresh_key) = carry, xs
        if every == 1:
            moving, q, g = stepper.step(moving, jax.tree.map(lambda x: x[0], some))
        else:
            blank = moving.dynamics_state.position, jnp.zeros_like(moving.dynamics_state.position)
            (moving, q, g), _ = lax.scan(
                lambda c, x: (stepper.step(c[0], x), None), (moving, *blank), some
            )
        return (moving, accumulator.accumulate(sums, moving, q, g, fresh_key)), None

    grouped = jax.tree.map(lambda x: x.reshape(num_steps // every, every, *x.shape[1:]), inputs)
    fresh_keys = accumulator.split_keys(keys.moments, num_steps // every)
    (end, sums), _ = lax.scan(
        to_next_look, (init_carry, accumulator.init_sums()), (grouped, fresh_keys)
    )
    return end, sums


def _compute_temperatures(
    config: ChainConfig, state: SGMCMCState, sums: RunningSums, final_carry: StepCarry
) -> Array | None:
    """What should be one on average: of each coordinate, and of the momenta where that alone tells.

    Where there is no single region noise heats directions that are no coordinates. Of all others
    the momenta are the surest witness, and a step is short enough not to change them itself.
    """
    if not config.adaptation.monitor_gradients.interval:
        return None
    temperatures = sums.configurational_temperatures
    if (centre := state.adapt_state.initial_center) is not None:
        # Positions are told from the iteration's start, which they depend on: not from a fixed one.
        w = state.adapt_state.preconditioner
        temperatures += w.apply_low_rank(w.solve(w.center - centre)) * sums.gradient / sums.weight
    if config.adaptation.has_dominant_mode:
        return temperatures
    kinetic = config.bind_dynamics(state.adapt_state.preconditioner).kinetic_temperature(
        final_carry.dynamics_state
    )
    kinetic = jnp.where(jnp.isnan(kinetic), 1.0, kinetic)  # there are none
    return jnp.append(temperatures, kinetic)


def _adapt_step_size(
    config: ChainConfig, state: SGMCMCState, temperatures: Array | None, diverging: Array
) -> tuple[StepSizeMonitor, Array | None]:
    """What the chain has seen of its step size, and by what to multiply it: 1 after warm-up.

    Checks come halfway through the warm-up and at its end, on the iterations since the quarter
    and since the half; a divergence shortens the step at once, but for the over-dispersed start's.
    A step of the user's is shortened by divergences alone.
    """
    num_warmup, adaptation = config.num_warmup, config.adaptation
    if temperatures is None or adaptation.allowed_variance_inflation is None:
        if not config.can_shrink_user_step_size:
            return state.step_size_monitor, None
        one = jnp.ones_like(state.adapt_state.step_size)
        factor = _shrink_after_divergence(
            config, state, one, diverging, _MIN_USER_STEP_SIZE_FRACTION
        )
        return state.step_size_monitor, factor
    quarter, half = num_warmup // 4, num_warmup // 2
    is_warmup = state.i < num_warmup
    control = state.step_size_monitor.add(
        temperatures, (state.i >= quarter) & is_warmup & ~diverging
    )
    is_due = (state.i + 1 == half) | (state.i + 1 == num_warmup)
    allowed = jnp.asarray(adaptation.allowed_variance_inflation, temperatures.dtype)
    time = adaptation.num_steps * state.adapt_state.step_size
    independent = jnp.minimum(time / adaptation.relaxation_time, 1.0)
    factor = jnp.where(is_due, control.compute_step_scale(allowed, independent), 1.0)
    factor = _shrink_after_divergence(config, state, factor, diverging, _MIN_STEP_SIZE_FRACTION)
    control = jax.tree.map(lambda x: jnp.where(is_due, jnp.zeros_like(x), x), control)
    return control, factor


def _shrink_after_divergence(
    config: ChainConfig, state: SGMCMCState, scale: Array, diverging: Array, min_fraction: float
) -> Array:
    """By what to multiply a step that a divergence in warm-up may halve; 1 after warm-up.

    :param min_fraction: share of the first step size, below which none is shortened.
    """
    is_warmup = state.i < config.num_warmup
    is_blamed = is_warmup & diverging & (state.diverging | (state.i >= config.num_warmup // 4))
    scale = jnp.where(is_blamed, 0.5 * scale, scale)
    shortest = min_fraction * config.adaptation.step_size / state.adapt_state.step_size
    return jnp.where(is_warmup, jnp.maximum(scale, jnp.minimum(shortest, 1.0)), 1.0)


def _restart_if_diverged(
    config: ChainConfig,
    state: SGMCMCState,
    final_dynamics_state: Any,
    last_step_size: Array,
    rng_key: Array,
) -> tuple[Any, Array]:
    """Where the chain goes on, and whether the iteration has failed."""
    is_finite = jnp.stack(
        [jnp.isfinite(x).all() for x in jax.tree.leaves(final_dynamics_state)]
    ).all()
    moved = jnp.abs(final_dynamics_state.position - state.dynamics_state.position).max()
    # A chain of finite numbers that stands still is stuck, unless its schedule has come to rest.
    has_moved = (moved > 0) | (last_step_size == 0)
    diverging = ~(is_finite & has_moved & (moved < _MAX_DISPLACEMENT_SD))
    # An over-dispersed start, or the last finite position, may be one that no step leaves:
    # in warm-up, and where the iteration before failed too, come nearer to the anchor.
    is_stuck = (state.i < config.num_warmup) | state.diverging
    nearer = jnp.where(is_stuck, 0.5, 1.0).astype(config.potential.dtype)
    dynamics = config.bind_dynamics(state.adapt_state.preconditioner)
    restart = dynamics.init(nearer * state.dynamics_state.position, rng_key)
    return jax.tree.map(partial(jnp.where, diverging), restart, final_dynamics_state), diverging


def _collect_site_values(
    config: ChainConfig, adapt_state: AdaptState, q: Array, final_carry: StepCarry
) -> dict[str, Array]:
    """The unconstrained values of the sites that a draw holds."""
    target = config.potential
    z: dict[str, Array] = target.unravel(adapt_state.preconditioner.to_position(q))
    if config.collected_local_sites:
        assert target.local_latents is not None
        assert final_carry.local_state is not None
        of_rows = target.local_latents.to_unconstrained_sites(final_carry.local_state.values)
        z |= {name: of_rows[name] for name in config.collected_local_sites}
    return z
