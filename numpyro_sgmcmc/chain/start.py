"""Where chains start."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.flatten_util import ravel_pytree

from numpyro_sgmcmc.chain.moments import Moments
from numpyro_sgmcmc.chain.plan import ChainPlan
from numpyro_sgmcmc.chain.read_ahead import with_empty_block
from numpyro_sgmcmc.chain.state import AdaptState, SGMCMCState
from numpyro_sgmcmc.data.arguments import Arguments, is_traced
from numpyro_sgmcmc.data.minibatch import start_stream
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.posterior.locals.moves import LocalState, sweep
from numpyro_sgmcmc.posterior.locals.sites import with_locals
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.posterior.whitening import stacked
from numpyro_sgmcmc.warmup.ahead import quickly_compiled
from numpyro_sgmcmc.warmup.step_control import StepControl

__all__ = ["start_chains"]

_SPREAD = 2.0  # of the starts, in posterior sds: chains that agree have come there by themselves
_FIRST_MOVES = 20  # of the local values, before the first step
_FIRST_DRAWS = 1  # where these come from `gibbs_fn`, and nothing but it is known


def start_chains(
    plan: ChainPlan, dynamics: Dynamics, rng_key: Array, init_params: Any, arguments: Arguments
) -> SGMCMCState:
    """The first state of a chain, batched where the key is.

    :param plan: what does not change from iteration to iteration.
    :param dynamics: the SDE, for the first values of its auxiliary variables.
    :param rng_key: one key, or one a chain.
    :param init_params: unconstrained values at which the chains start, or None.
    :param arguments: the model's arguments, concrete.
    """
    adaptation, target = plan.adaptation, plan.target
    is_typed = jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key)
    is_batch = rng_key.ndim == (1 if is_typed else 2)
    num_chains = len(rng_key) if is_batch else 1
    start = partial(
        _start_in_program if is_traced(rng_key) else _start_at_once,
        is_batch=is_batch,
        num_steps=jnp.asarray(adaptation.num_steps),
        num_temperatures=target.dim + (not adaptation.has_region),
        arguments=arguments if adaptation.is_given else None,
        target=target,
        dynamics=dynamics,
    )
    if not adaptation.other_modes:
        number: Any = 0
    else:
        number = np.arange(num_chains) if is_batch else _any_number(rng_key)
    state = start(rng_key, init_params, _of_chains(plan, number))
    room = partial(with_empty_block, plan, num_chains=num_chains)
    state = (jax.vmap(room) if is_batch else room)(state)
    if target.locals is not None:
        state = _with_locals(plan, state, arguments, init_params is not None)
    return state


def _of_chains(plan: ChainPlan, chains: Any) -> AdaptState:
    """Where chains are told to be: the modes in turn, where the warm-up gives several.

    :param chains: their numbers, of any shape.
    """
    adaptation = plan.adaptation
    dtype = adaptation.whitening.anchor.dtype
    whitening, others = adaptation.whitening, adaptation.other_modes
    if others:
        modes = stacked([whitening, *others])
        whitening = jax.tree.map(lambda x: x[chains % (1 + len(others))], modes)
    step_size = jnp.full(np.shape(chains), adaptation.step_size, dtype)
    if plan.traced_step_size is not None:
        # One that is not positive makes every iteration diverge.
        given = plan.traced_step_size.astype(dtype)
        step_size = jnp.where(given > 0.0, given, jnp.nan) * jnp.ones_like(step_size)
    return AdaptState(step_size, whitening, adaptation.gradient_noise, plan.blocks)


def _any_number(rng_key: Array) -> Array:
    """Of a chain that does not know its own; by a key that is none of its start's four."""
    return random.bits(random.fold_in(rng_key, 4), (), jnp.uint32) >> 1


def _start(
    rng_key: Array, init_params: Any, adapt_state: AdaptState, *, is_batch: bool, **shared: Any
) -> SGMCMCState:
    """The first state of a chain, or of several in one program.

    :param adapt_state: of all of them, or of each.
    """
    start: Callable[..., SGMCMCState] = partial(_start_chain, **shared)
    if is_batch:
        start = jax.vmap(start, (0, 0, 0 if adapt_state.step_size.ndim else None))
    return start(rng_key, init_params, adapt_state)


def _start_chain(
    rng_key: Array,
    init_params: Any,
    adapt_state: AdaptState,
    *,
    num_steps: Array,
    num_temperatures: int,
    arguments: Arguments | None,
    target: Target,
    dynamics: Dynamics,
) -> SGMCMCState:
    """A chain's first state: over-dispersed about the anchor, or where the user says.

    :param num_temperatures: how many the chain watches.
    :param arguments: the model's, where the initialisation strategy decides; else None.
    """
    whitening = adapt_state.whitening
    rng_key, position_key, state_key, stream_key = random.split(rng_key, 4)
    if init_params is None and arguments is not None:
        flat = target.start(position_key, arguments).astype(target.dtype)
        q = whitening.whiten(flat - whitening.anchor)
    elif init_params is None:
        q = _SPREAD * random.normal(position_key, (target.dim,), target.dtype)
    else:
        flat = ravel_pytree(init_params)[0].astype(target.dtype)
        q = whitening.whiten(flat - whitening.anchor)
    stream_keys = random.split(stream_key, len(target.plates))
    return SGMCMCState(
        i=jnp.array(0),
        z=target.unravel(whitening.position(q)),
        dynamics=dynamics.init(q, state_key),
        streams={
            p.name: start_stream(p, key) for p, key in zip(target.plates, stream_keys, strict=True)
        },
        num_steps=num_steps,
        weight=jnp.zeros_like(adapt_state.step_size),
        diverging=jnp.array(False),
        moments=Moments.zeros(target.dim, target.dtype),
        step_control=StepControl.zeros(num_temperatures, target.dtype),
        adapt_state=adapt_state,
        rng_key=rng_key,
    )


_STATIC = ("is_batch", "target", "dynamics", "num_temperatures")
_start_in_program = jax.jit(_start, static_argnames=_STATIC)
_start_at_once = quickly_compiled(_start, static_argnames=_STATIC)


@partial(jax.jit, static_argnames=("target", "num_moves"))
def _swept(
    target: Target,
    theta: Array,
    state: LocalState,
    arguments: Arguments,
    anchor: Array,
    key: Array,
    num_moves: int,
) -> tuple[LocalState, Array]:
    """Local values moved until they suit the globals, and the gradient at the anchor for them."""
    values, acceptance = sweep(target, theta, state, arguments, key, num_moves)
    gradient = target.full_gradient(anchor, with_locals(arguments, values))
    return LocalState(values, state.scale, acceptance.mean()), gradient


def _with_locals(
    plan: ChainPlan, state: SGMCMCState, arguments: Arguments, has_start: bool
) -> SGMCMCState:
    """A first state with local values, or that of several chains.

    The globals start over-dispersed about the anchor, in units of their posterior's spread, unless
    the user says where, or all settings. The local values are those of a pilot chain, moved until
    they suit the globals: where they know much of these, chains would else start where the pilot
    ended.

    :param has_start: whether the globals' start is the user's.
    """
    target, found, is_given = plan.target, plan.adaptation.locals, plan.adaptation.is_given
    local = target.locals
    assert found is not None
    assert local is not None
    num_moves = _FIRST_MOVES if local.moved or not is_given else _FIRST_DRAWS

    def one(state: SGMCMCState) -> SGMCMCState:
        pilot_key, spread_key, move_key, following = random.split(state.rng_key, 4)
        whitening, dynamics = state.adapt_state.whitening, state.dynamics
        if not (has_start or is_given):
            noise = _SPREAD * random.normal(spread_key, (target.dim,), target.dtype)
            q = found.spread @ noise if found.spread.ndim == 2 else found.spread * noise
            dynamics = dynamics._replace(position=q)
        theta = whitening.position(dynamics.position)
        pilot = random.randint(pilot_key, (), 0, len(jax.tree.leaves(found.values)[0]))
        values = jax.tree.map(lambda x: x[pilot], found.values)
        first = LocalState(values, found.scale, jnp.ones((), target.dtype))
        own, gradient = _swept(
            target, theta, first, arguments, whitening.anchor, move_key, num_moves
        )
        z: Any = target.unravel(theta)
        of_rows = local.unconstrained(own.values)
        return state._replace(
            z={**z, **{name: of_rows[name] for name in plan.collected}},
            dynamics=dynamics,
            adapt_state=state.adapt_state.with_anchor_gradient(gradient),
            rng_key=following,
            locals=own,
        )

    return jax.vmap(one)(state) if state.i.ndim else one(state)
