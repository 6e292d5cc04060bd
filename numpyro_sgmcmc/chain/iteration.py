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

from numpyro_sgmcmc.chain.block import key_words
from numpyro_sgmcmc.chain.minibatch import RowsInMemory, RowSource, RowsReadAhead
from numpyro_sgmcmc.chain.moments import Sums
from numpyro_sgmcmc.chain.plan import ChainPlan, Keys, draw_rows
from numpyro_sgmcmc.chain.read_ahead import with_rows_ahead
from numpyro_sgmcmc.chain.readings import MomentReader
from numpyro_sgmcmc.chain.state import AdaptState, Moving, SGMCMCState
from numpyro_sgmcmc.chain.step import StepInputs, Stepper
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.warmup.step_control import StepControl

__all__ = ["advance", "iterate"]

_ESCAPE = 1e3  # whitened units in one iteration: no chain moves so far by its own dynamics
_SHORTEST_SHARE = 1 / 64  # of the step size chosen: where that fails too, it is not the step
_SHORTEST_OF_GIVEN = 2.0**-12  # of the user's, which may be in other units


def advance(
    plan: ChainPlan, state: SGMCMCState, arguments: Arguments, chain_axis: str | None = None
) -> SGMCMCState:
    """The state after one iteration, of one chain or of several.

    :param plan: what does not change from iteration to iteration.
    :param state: the state before, batched for several chains.
    :param arguments: the model's arguments.
    :param chain_axis: the mesh axis over which chains are spread, if they are.
    """
    if plan.target.dim == 0:
        return state._replace(i=state.i + 1)
    state = with_rows_ahead(plan, state, chain_axis)
    in_block = None if state.block is None else state.block.used.ravel()[0]
    one = partial(iterate, plan, arguments=arguments, in_block=in_block)
    return jax.vmap(one, spmd_axis_name=chain_axis)(state) if state.i.ndim else one(state)


def iterate(
    plan: ChainPlan, state: SGMCMCState, arguments: Arguments, in_block: Array | None = None
) -> SGMCMCState:
    """The state after one iteration.

    :param plan: what does not change from iteration to iteration.
    :param state: the state before.
    :param arguments: the model's arguments.
    :param in_block: the iteration's number in the block of rows that have been read, the same for
        all chains; None where all rows are in memory.
    """
    num_steps, adapt_state = plan.adaptation.num_steps, state.adapt_state
    keys = Keys.of(state.rng_key)
    streams, rows = draw_rows(plan, state.streams, keys.rows)
    counts = state.i * num_steps + jnp.arange(num_steps)
    source: RowSource = RowsInMemory(rows, arguments)
    if state.block is not None:
        assert in_block is not None
        source = RowsReadAhead(state.block, in_block, num_steps, plan.target.lookups, arguments)
    stepper, inputs = Stepper.of_iteration(plan, adapt_state, source, keys, counts)
    reader = MomentReader(plan, adapt_state.whitening, arguments)
    end, sums = _run(stepper, reader, _start(state), inputs, keys)
    if end.anchor_gradient is not None:
        adapt_state = adapt_state.with_anchor_gradient(end.anchor_gradient)

    step_size = plan.step_size(counts[-1], adapt_state)
    dynamics, diverging = _survive(plan, state, end.dynamics, step_size, keys.restart)
    weight = plan.weight(counts, adapt_state)
    control, factor = _check_step(plan, state, _temperatures(plan, state, sums, end), diverging)
    if factor is not None:
        step_size = factor * step_size
    block = state.block
    if block is not None:
        block = block._replace(used=block.used + 1, key=key_words(keys.following))
    return state._replace(
        i=state.i + 1,
        z=_sites(plan, adapt_state, dynamics.position, end),
        dynamics=dynamics,
        streams=streams,
        weight=weight,
        diverging=diverging,
        moments=reader.added(state, sums, dynamics, weight, diverging),
        step_control=control,
        adapt_state=adapt_state._replace(step_size=step_size),
        rng_key=keys.following,
        block=block,
        locals=end.locals,
    )


def _start(state: SGMCMCState) -> Moving:
    if state.locals is None:
        return Moving(state.dynamics)
    return Moving(state.dynamics, state.locals, state.adapt_state.whitening.gradient)


def _run(
    stepper: Stepper, reader: MomentReader, start: Moving, inputs: StepInputs, keys: Keys
) -> tuple[Moving, Sums]:
    """All steps, with a look at position and gradient at some of them."""
    num_steps = len(inputs.steps_before)
    every = reader.source.every or num_steps

    def to_next_look(carry: tuple[Moving, Sums], xs: Any) -> tuple[tuple[Moving, Sums], None]:
        (moving, sums), (some, fresh_key) = carry, xs
        if every == 1:
            moving, q, g = stepper.step(moving, jax.tree.map(lambda x: x[0], some))
        else:
            blank = moving.dynamics.position, jnp.zeros_like(moving.dynamics.position)
            (moving, q, g), _ = lax.scan(
                lambda c, x: (stepper.step(c[0], x), None), (moving, *blank), some
            )
        return (moving, reader.look(sums, moving, q, g, fresh_key)), None

    grouped = jax.tree.map(lambda x: x.reshape(num_steps // every, every, *x.shape[1:]), inputs)
    fresh_keys = reader.keys(keys.moments, num_steps // every)
    (end, sums), _ = lax.scan(to_next_look, (start, reader.zeros()), (grouped, fresh_keys))
    return end, sums


def _temperatures(plan: ChainPlan, state: SGMCMCState, sums: Sums, end: Moving) -> Array | None:
    """What should be one on average: of each coordinate, and of the momenta where that alone tells.

    Where there is no single region noise heats directions that are no coordinates. Of all others
    the momenta are the surest witness, and a step is short enough not to change them itself.
    """
    if not plan.adaptation.moment_source.every:
        return None
    temperatures = sums.temperatures
    if (centre := state.adapt_state.centre) is not None:
        # Positions are told from the iteration's start, which they depend on: not from a fixed one.
        w = state.adapt_state.whitening
        temperatures += w.unstretch(w.whiten(w.anchor - centre)) * sums.gradient / sums.weight
    if plan.adaptation.has_region:
        return temperatures
    kinetic = plan.locate(state.adapt_state.whitening).temperature(end.dynamics)
    kinetic = jnp.where(jnp.isnan(kinetic), 1.0, kinetic)  # there are none
    return jnp.append(temperatures, kinetic)


def _check_step(
    plan: ChainPlan, state: SGMCMCState, temperatures: Array | None, diverging: Array
) -> tuple[StepControl, Array | None]:
    """What the chain has seen of its step size, and by what to multiply it: 1 after warm-up.

    Checks come halfway through the warm-up and at its end, on the iterations since the quarter
    and since the half; a divergence shortens the step at once, but for the over-dispersed start's.
    A step of the user's is shortened by divergences alone.
    """
    num_warmup, adaptation = plan.num_warmup, plan.adaptation
    if temperatures is None or adaptation.allowed_excess is None:
        if not plan.shortens_given_step:
            return state.step_control, None
        one = jnp.ones_like(state.adapt_state.step_size)
        factor = _after_divergence(plan, state, one, diverging, _SHORTEST_OF_GIVEN)
        return state.step_control, factor
    quarter, half = num_warmup // 4, num_warmup // 2
    is_warmup = state.i < num_warmup
    control = state.step_control.add(temperatures, (state.i >= quarter) & is_warmup & ~diverging)
    is_due = (state.i + 1 == half) | (state.i + 1 == num_warmup)
    allowed = jnp.asarray(adaptation.allowed_excess, temperatures.dtype)
    time = adaptation.num_steps * state.adapt_state.step_size
    independent = jnp.minimum(time / adaptation.relaxation_time, 1.0)
    factor = jnp.where(is_due, control.factor(allowed, independent), 1.0)
    factor = _after_divergence(plan, state, factor, diverging, _SHORTEST_SHARE)
    control = jax.tree.map(lambda x: jnp.where(is_due, jnp.zeros_like(x), x), control)
    return control, factor


def _after_divergence(
    plan: ChainPlan, state: SGMCMCState, factor: Array, diverging: Array, least: float
) -> Array:
    """By what to multiply a step that a divergence in warm-up may halve; 1 after warm-up.

    :param least: share of the first step size, below which none is shortened.
    """
    is_warmup = state.i < plan.num_warmup
    is_blamed = is_warmup & diverging & (state.diverging | (state.i >= plan.num_warmup // 4))
    factor = jnp.where(is_blamed, 0.5 * factor, factor)
    shortest = least * plan.adaptation.step_size / state.adapt_state.step_size
    return jnp.where(is_warmup, jnp.maximum(factor, jnp.minimum(shortest, 1.0)), 1.0)


def _survive(
    plan: ChainPlan, state: SGMCMCState, end: Any, last_step_size: Array, rng_key: Array
) -> tuple[Any, Array]:
    """Where the chain goes on, and whether the iteration has failed."""
    is_finite = jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(end)]).all()
    moved = jnp.abs(end.position - state.dynamics.position).max()
    # A chain of finite numbers that stands still is stuck, unless its schedule has come to rest.
    has_moved = (moved > 0) | (last_step_size == 0)
    diverging = ~(is_finite & has_moved & (moved < _ESCAPE))
    # An over-dispersed start, or the last finite position, may be one that no step leaves:
    # in warm-up, and where the iteration before failed too, come nearer to the anchor.
    is_stuck = (state.i < plan.num_warmup) | state.diverging
    nearer = jnp.where(is_stuck, 0.5, 1.0).astype(plan.target.dtype)
    dynamics = plan.locate(state.adapt_state.whitening)
    restart = dynamics.init(nearer * state.dynamics.position, rng_key)
    return jax.tree.map(partial(jnp.where, diverging), restart, end), diverging


def _sites(plan: ChainPlan, adapt_state: AdaptState, q: Array, end: Moving) -> dict[str, Array]:
    """The unconstrained values of the sites that a draw holds."""
    target = plan.target
    z: dict[str, Array] = target.unravel(adapt_state.whitening.position(q))
    if plan.collected:
        assert target.locals is not None
        assert end.locals is not None
        of_rows = target.locals.unconstrained(end.locals.values)
        z |= {name: of_rows[name] for name in plan.collected}
    return z
