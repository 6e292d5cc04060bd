"""One iteration of one chain: ``num_steps`` stochastic-gradient steps in a ``lax.scan``.

Pure functions of the chain's state; what they need besides is in a :class:`Program`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree

from numpyro_sgmcmc.chain.block import key_words
from numpyro_sgmcmc.chain.moments import FirstGradient, Moments, Sums
from numpyro_sgmcmc.chain.program import Keys, Program, draw_rows
from numpyro_sgmcmc.chain.state import AdaptState, SGMCMCState
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.minibatch import independent_minibatch, stream_of
from numpyro_sgmcmc.data.stand_ins import with_rows_read
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.dynamics.compensation import GradientNoise
from numpyro_sgmcmc.dynamics.integrators import GradientFn
from numpyro_sgmcmc.posterior.gradients import Anchored, whitened_gradient
from numpyro_sgmcmc.posterior.locals.moves import renew_minibatch
from numpyro_sgmcmc.posterior.locals.sites import with_locals
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.warmup.step_control import StepControl

__all__ = [
    "iterate",
    "start_chain",
]

_NOISE_AHEAD = 2**22
_ESCAPE = 1e3
_SHORTEST_SHARE = 1 / 64  # of the step size chosen: where that fails too, it is not the step


@partial(jax.jit, static_argnames=("target", "dynamics", "minibatch"))
def start_chain(
    rng_key: Array,
    init_params: Any,
    *,
    anchored: Anchored,
    step_size: Array,
    num_steps: Array,
    gradient_noise: GradientNoise | None,
    target: Target,
    dynamics: Dynamics,
    minibatch: str,
) -> SGMCMCState:
    """A chain's first state: over-dispersed about the anchor, or where the user says."""
    coordinates, anchor_gradient, anchor_hessian = anchored
    rng_key, position_key, state_key, stream_key = random.split(rng_key, 4)
    if init_params is None:
        q = 2.0 * random.normal(position_key, (target.dim,), target.dtype)
    else:
        flat = ravel_pytree(init_params)[0].astype(target.dtype)
        q = coordinates.whiten(flat - coordinates.anchor)
    stream_keys = random.split(stream_key, len(target.plates))
    return SGMCMCState(
        i=jnp.array(0),
        z=target.unravel(coordinates.position(q)),
        dynamics=dynamics.init(q, state_key),
        streams={
            p.name: stream_of(p, minibatch).init(key)
            for p, key in zip(target.plates, stream_keys, strict=True)
        },
        num_steps=num_steps,
        weight=jnp.zeros_like(step_size),
        diverging=jnp.array(False),
        moments=Moments.zeros(target.dim, target.dtype),
        step_control=StepControl.zeros(target.dim, target.dtype),
        adapt_state=AdaptState(
            step_size=step_size,
            inverse_mass_matrix=coordinates.inverse_mass_matrix,
            mass_matrix_sqrt_inv=coordinates.factor,
            anchor=coordinates.anchor,
            anchor_gradient=anchor_gradient,
            anchor_hessian=anchor_hessian,
            gradient_noise=gradient_noise,
        ),
        rng_key=rng_key,
    )


def _resampling(
    dynamics: Dynamics, rng_key: Array, counts: Array, target: Target
) -> Callable[[Any, Array], Any]:
    """Draws auxiliary variables afresh at the steps where the dynamic has them due.

    :param counts: the iteration's steps, counted from the run's first.
    :return: ``(state, count) -> state``.
    """
    fresh = {}
    for k, (field, period) in enumerate(dynamics.resampling.items()):
        num = len(counts) // period + 2
        key = random.fold_in(rng_key, k)
        fresh[field] = dynamics.draw(field, key, (num, target.dim), target.dtype), period

    def resample(state: Any, count: Array) -> Any:
        for field, (draws, period) in fresh.items():
            draw = draws[count // period - counts[0] // period]
            value = jnp.where(count % period == 0, draw, getattr(state, field))
            state = state._replace(**{field: value})
        return state

    return resample


def _step(
    program: Program,
    state: SGMCMCState,
    arguments: Arguments,
    place: Array | None,
    resample_key: Array,
    noise_key: Array,
    counts: Array,
) -> tuple[Callable[[Any, Any], tuple[Any, Array, Array]], Array]:
    """One step as a function, and the noise of all steps.

    Only where the noise of all would fill the memory is it drawn step by step, from keys.

    :param place: iteration in the block of rows that have been read.
    :param counts: the iteration's steps, counted from the run's first.
    :return: the function takes the chain's state with its local values and their gradient at the
        anchor, and the step's rows (its number in the iteration, where they are read from a block),
        noise, model key, count and key of the local moves; it returns the next of the first, and a
        position with its gradient's estimate.
    """
    target, adaptation, adapt_state = program.target, program.adaptation, state.adapt_state
    anchored = program.anchored(state)
    dynamics = program.locate(anchored.coordinates)
    integrate = dynamics.step(program.scheme)
    resample = _resampling(dynamics, resample_key, counts, target)
    shape = (integrate.draws, target.dim)
    is_ahead = len(counts) * integrate.draws * target.dim <= _NOISE_AHEAD

    def step(carry: Any, xs: Any) -> tuple[Any, Array, Array]:
        chain, own, anchor_gradient = carry
        rows, noise, key, count, local_key = xs
        values: tuple[Array, ...] = ()
        if state.block is not None:
            assert place is not None
            rows, values = state.block.at(place, rows)
        if not is_ahead:
            noise = random.normal(noise, shape, target.dtype)
        here, origin = with_rows_read(arguments, target.lookups, rows, values), anchored
        if target.locals is not None:
            coordinates = anchored.coordinates
            theta = coordinates.position(chain.position)
            own, anchor_gradient, here = renew_minibatch(
                target,
                own,
                theta,
                rows,
                here,
                coordinates.anchor,
                anchor_gradient,
                adaptation.estimator,
                local_key,
            )
            origin = anchored._replace(anchor_gradient=anchor_gradient)
        gradient = FirstGradient(
            whitened_gradient(adaptation.estimator, target, here, origin, rows, key)
        )
        chain = resample(chain, count)
        step_size = program.step_size(count, adapt_state)
        if adapt_state.gradient_noise is not None:
            noise = dynamics.compensate(chain, noise, step_size, adapt_state.gradient_noise)
        end = integrate(chain, step_size, gradient, noise, count)
        assert gradient.value is not None
        carry = end, own, anchor_gradient
        return carry, (end if integrate.reads_end else chain).position, gradient.value

    if is_ahead:
        return step, random.normal(noise_key, (len(counts), *shape), target.dtype)
    return step, random.split(noise_key, len(counts))


def _independent_gradient(
    estimator: str, program: Program, arguments: Arguments, anchored: Anchored, rng_key: Array
) -> GradientFn:
    """The whitened gradient's estimate on a minibatch that no step has seen."""
    target = program.target
    model_key, *keys = random.split(rng_key, 1 + len(target.plates))
    rows = {
        p.name: independent_minibatch(p, program.adaptation.minibatch, k)
        for p, k in zip(target.plates, keys, strict=True)
    }
    return whitened_gradient(
        estimator,
        target,
        arguments,
        anchored,
        rows,
        model_key if target.is_randomized else None,
    )


def _check_step(
    program: Program, state: SGMCMCState, temperatures: Array, diverging: Array
) -> tuple[StepControl, Array]:
    """What the chain has seen of its step size, and by what to multiply it: 1 after warm-up.

    Checks come halfway through the warm-up and at its end, on the iterations since the quarter
    and since the half; a divergence shortens the step at once, but for the over-dispersed start's.
    """
    num_warmup, adaptation = program.num_warmup, program.adaptation
    quarter, half = num_warmup // 4, num_warmup // 2
    is_warmup = state.i < num_warmup
    control = state.step_control.add(temperatures, (state.i >= quarter) & is_warmup & ~diverging)
    is_due = (state.i + 1 == half) | (state.i + 1 == num_warmup)
    allowed = jnp.asarray(adaptation.allowed_excess, temperatures.dtype)
    time = adaptation.num_steps * state.adapt_state.step_size
    independent = jnp.minimum(time / adaptation.relaxation_time, 1.0)
    factor = jnp.where(is_due, control.factor(allowed, independent), 1.0)
    is_blamed = is_warmup & diverging & (state.diverging | (state.i >= quarter))
    factor = jnp.where(is_blamed, 0.5 * factor, factor)
    shortest = _SHORTEST_SHARE * adaptation.step_size / state.adapt_state.step_size
    factor = jnp.where(is_warmup, jnp.maximum(factor, jnp.minimum(shortest, 1.0)), 1.0)
    control = jax.tree.map(lambda x: jnp.where(is_due, jnp.zeros_like(x), x), control)
    return control, factor


def _survive(
    program: Program, state: SGMCMCState, end: Any, last_step_size: Array, rng_key: Array
) -> tuple[Any, Array]:
    """Where the chain goes on, and whether the iteration has failed."""
    is_finite = jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(end)]).all()
    moved = jnp.abs(end.position - state.dynamics.position).max()
    # A chain of finite numbers that stands still is stuck, unless its schedule has come to rest.
    has_moved = (moved > 0) | (last_step_size == 0)
    diverging = ~(is_finite & has_moved & (moved < _ESCAPE))
    # An over-dispersed start, or the last finite position, may be one that no step leaves:
    # in warm-up, and where the iteration before failed too, come nearer to the anchor.
    is_stuck = (state.i < program.num_warmup) | state.diverging
    nearer = jnp.where(is_stuck, 0.5, 1.0).astype(program.target.dtype)
    dynamics = program.locate(program.anchored(state).coordinates)
    restart = dynamics.init(nearer * state.dynamics.position, rng_key)
    return jax.tree.map(partial(jnp.where, diverging), restart, end), diverging


def iterate(
    program: Program, state: SGMCMCState, arguments: Arguments, place: Array | None = None
) -> SGMCMCState:
    """The state after one iteration.

    :param program: what does not change from iteration to iteration.
    :param state: the state before.
    :param arguments: the model's arguments.
    :param place: the place in the block of rows that have been read, the same for all chains.
    """
    target, adaptation = program.target, program.adaptation
    num_steps, adapt_state = adaptation.num_steps, state.adapt_state
    anchored = program.anchored(state)
    dynamics = program.locate(anchored.coordinates)
    keys = Keys.of(state.rng_key)
    rows: Any
    streams, rows = draw_rows(program, state.streams, keys.rows)
    block = state.block
    if block is not None:
        rows = jnp.arange(num_steps)
        block = block._replace(place=block.place + 1, key=key_words(keys.following))
    counts = state.i * num_steps + jnp.arange(num_steps)
    step, noise = _step(program, state, arguments, place, keys.resample, keys.noise, counts)
    model_keys = random.split(keys.model, num_steps) if target.is_randomized else None
    local_keys = None
    if target.locals is not None:
        local_keys = random.split(random.fold_in(keys.model, 1), num_steps)

    reading = adaptation.reading
    every = reading.every or num_steps
    fresh_keys = random.split(keys.reading, num_steps // every) if reading.estimator else None

    def read(carry: tuple[Any, Sums], xs: Any) -> tuple[tuple[Any, Sums], None]:
        """The steps from one reading to the next, and the reading."""
        (carried, sums), (steps, fresh_key) = carry, xs
        first, *_ = jax.tree.leaves(steps)
        if len(first) == 1:
            carried, q, g = step(carried, jax.tree.map(lambda x: x[0], steps))
        else:
            blank = carried[0].position, jnp.zeros_like(carried[0].position)
            (carried, q, g), _ = lax.scan(
                lambda c, x: (step(c[0], x), None), (carried, *blank), steps
            )
        if reading.estimator:
            chain, own, anchor_gradient = carried
            everywhere = arguments if own is None else with_locals(arguments, own.values)
            origin = anchored
            if own is not None:
                origin = anchored._replace(anchor_gradient=anchor_gradient)
            q = chain.position
            g = _independent_gradient(reading.estimator, program, everywhere, origin, fresh_key)(q)
        return (carried, sums.add(q, g) if reading.every else sums), None

    xs = jax.tree.map(
        lambda x: x.reshape(num_steps // every, every, *x.shape[1:]),
        (rows, noise, model_keys, counts, local_keys),
    )
    sums = Sums.zeros(target.dim, target.dtype)
    # Without local values the gradient at the anchor stays, and is no part of the loop.
    moving = None if state.locals is None else adapt_state.anchor_gradient
    start = state.dynamics, state.locals, moving
    ((end, own, moving), sums), _ = lax.scan(read, (start, sums), (xs, fresh_keys))
    if moving is not None:
        adapt_state = adapt_state._replace(anchor_gradient=moving)

    step_size = program.step_size(counts[-1], adapt_state)
    end, diverging = _survive(program, state, end, step_size, keys.restart)
    weight = program.weight(counts, adapt_state)
    moments, control = state.moments, state.step_control
    if reading.every and adaptation.allowed_excess is not None:
        control, factor = _check_step(program, state, sums.temperatures, diverging)
        step_size = factor * step_size
    if reading.every:
        is_sampling = state.i >= program.num_warmup
        sums = sums.finished(end.position, dynamics.temperature(end), weight)
        moments = moments.add(sums, is_sampling, is_sampling & ~diverging)
    z = target.unravel(anchored.coordinates.position(end.position))
    if program.collected:
        assert target.locals is not None
        assert own is not None
        of_rows = target.locals.unconstrained(own.values)
        z |= {name: of_rows[name] for name in program.collected}
    return SGMCMCState(
        i=state.i + 1,
        z=z,
        dynamics=end,
        streams=streams,
        num_steps=state.num_steps,
        weight=weight,
        diverging=diverging,
        moments=moments,
        step_control=control,
        adapt_state=adapt_state._replace(step_size=step_size),
        rng_key=keys.following,
        block=block,
        locals=own,
    )
