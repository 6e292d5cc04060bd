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

from numpyro_sgmcmc.compilation import jit_low_optimization
from numpyro_sgmcmc.data.arguments import Arguments, is_traced
from numpyro_sgmcmc.data.subsampling import init_stream
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.model.local_latents import with_local_values
from numpyro_sgmcmc.model.local_moves import LocalLatentsState, sweep_local_values
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.preconditioner import stack_preconditioners
from numpyro_sgmcmc.sampling.bias_monitor import Moments, StepSizeMonitor
from numpyro_sgmcmc.sampling.prefetch import attach_prefetch_buffer
from numpyro_sgmcmc.sampling.state import AdaptState, ChainConfig, SGMCMCState

__all__ = ["init_chains"]

_INIT_DISPERSION_SD = (
    2.0  # of the starts, in posterior sds: chains that agree have come there by themselves
)
_NUM_INIT_LOCAL_UPDATES = 20  # of the local values, before the first step
_NUM_INIT_GIBBS_UPDATES = 1  # where these come from `gibbs_fn`, and nothing but it is known


def init_chains(
    config: ChainConfig, dynamics: Dynamics, rng_key: Array, init_params: Any, arguments: Arguments
) -> SGMCMCState:
    """The first state of a chain, batched where the key is.

    :param config: what does not change from iteration to iteration.
    :param dynamics: the SDE, for the first values of its auxiliary variables.
    :param rng_key: one key, or one a chain.
    :param init_params: unconstrained values at which the chains start, or None.
    :param arguments: the model's arguments, concrete.
    """
    adaptation, target = config.adaptation, config.potential
    is_typed = jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key)
    is_batch = rng_key.ndim == (1 if is_typed else 2)
    num_chains = len(rng_key) if is_batch else 1
    start = partial(
        _init_states_jit if is_traced(rng_key) else _init_states_low_opt_jit,
        is_batch=is_batch,
        num_steps=jnp.asarray(adaptation.num_steps),
        num_temperatures=target.dim + (not adaptation.has_dominant_mode),
        arguments=arguments if adaptation.uses_init_strategy else None,
        potential=target,
        dynamics=dynamics,
    )
    if not adaptation.other_mode_preconditioners:
        number: Any = 0
    else:
        number = np.arange(num_chains) if is_batch else _sample_chain_index(rng_key)
    state = start(rng_key, init_params, _init_adapt_state(config, number))
    room = partial(attach_prefetch_buffer, config, num_chains=num_chains)
    state = (jax.vmap(room) if is_batch else room)(state)
    if target.local_latents is not None:
        state = _init_locals(config, state, arguments, init_params is not None)
    return state


def _init_adapt_state(config: ChainConfig, chain_indices: Any) -> AdaptState:
    """Where chains are told to be: the modes in turn, where the warm-up gives several.

    :param chain_indices: their numbers, of any shape.
    """
    adaptation = config.adaptation
    dtype = adaptation.preconditioner.center.dtype
    whitening, others = adaptation.preconditioner, adaptation.other_mode_preconditioners
    if others:
        modes = stack_preconditioners([whitening, *others])
        whitening = jax.tree.map(lambda x: x[chain_indices % (1 + len(others))], modes)
    step_size = jnp.full(np.shape(chain_indices), adaptation.step_size, dtype)
    if config.traced_step_size is not None:
        # One that is not positive makes every iteration diverge.
        given = config.traced_step_size.astype(dtype)
        step_size = jnp.where(given > 0.0, given, jnp.nan) * jnp.ones_like(step_size)
    return AdaptState(
        step_size, whitening, adaptation.gradient_noise_covariance, config.mass_matrix_blocks
    )


def _sample_chain_index(rng_key: Array) -> Array:
    """Of a chain that does not know its own; by a key that is none of its start's four."""
    return random.bits(random.fold_in(rng_key, 4), (), jnp.uint32) >> 1


def _init_states(
    rng_key: Array, init_params: Any, adapt_state: AdaptState, *, is_batch: bool, **shared: Any
) -> SGMCMCState:
    """The first state of a chain, or of several in one program.

    :param adapt_state: of all of them, or of each.
    """
    start: Callable[..., SGMCMCState] = partial(_init_chain, **shared)
    if is_batch:
        start = jax.vmap(start, (0, 0, 0 if adapt_state.step_size.ndim else None))
    return start(rng_key, init_params, adapt_state)


def _init_chain(
    rng_key: Array,
    init_params: Any,
    adapt_state: AdaptState,
    *,
    num_steps: Array,
    num_temperatures: int,
    arguments: Arguments | None,
    potential: Potential,
    dynamics: Dynamics,
) -> SGMCMCState:
    """A chain's first state: over-dispersed about the anchor, or where the user says.

    :param num_temperatures: how many the chain watches.
    :param arguments: the model's, where the initialisation strategy decides; else None.
    """
    whitening = adapt_state.preconditioner
    rng_key, position_key, state_key, stream_key = random.split(rng_key, 4)
    if init_params is None and arguments is not None:
        flat = potential.sample_init_position(position_key, arguments).astype(potential.dtype)
        q = whitening.solve(flat - whitening.center)
    elif init_params is None:
        q = _INIT_DISPERSION_SD * random.normal(position_key, (potential.dim,), potential.dtype)
    else:
        flat = ravel_pytree(init_params)[0].astype(potential.dtype)
        q = whitening.solve(flat - whitening.center)
    stream_keys = random.split(stream_key, len(potential.plates))
    return SGMCMCState(
        i=jnp.array(0),
        z=potential.unravel(whitening.to_position(q)),
        dynamics_state=dynamics.init(q, state_key),
        streams={
            p.name: init_stream(p, key)
            for p, key in zip(potential.plates, stream_keys, strict=True)
        },
        num_steps=num_steps,
        weight=jnp.zeros_like(adapt_state.step_size),
        diverging=jnp.array(False),
        moments=Moments.zeros(potential.dim, potential.dtype),
        step_size_monitor=StepSizeMonitor.zeros(num_temperatures, potential.dtype),
        adapt_state=adapt_state,
        rng_key=rng_key,
    )


_INIT_STATIC_ARGNAMES = ("is_batch", "potential", "dynamics", "num_temperatures")
_init_states_jit = jax.jit(_init_states, static_argnames=_INIT_STATIC_ARGNAMES)
_init_states_low_opt_jit = jit_low_optimization(_init_states, static_argnames=_INIT_STATIC_ARGNAMES)


@partial(jax.jit, static_argnames=("potential", "num_updates"))
def _burn_in_locals(
    potential: Potential,
    global_position: Array,
    local_state: LocalLatentsState,
    arguments: Arguments,
    reference: Array,
    rng_key: Array,
    num_updates: int,
) -> tuple[LocalLatentsState, Array]:
    """Local values moved until they suit the globals, and the gradient at the anchor for them."""
    values, acceptance = sweep_local_values(
        potential, global_position, local_state, arguments, rng_key, num_updates
    )
    gradient = potential.full_gradient(reference, with_local_values(arguments, values))
    return LocalLatentsState(values, local_state.scale, acceptance.mean()), gradient


def _init_locals(
    config: ChainConfig, state: SGMCMCState, arguments: Arguments, has_init_params: bool
) -> SGMCMCState:
    """A first state with local values, or that of several chains.

    The globals start over-dispersed about the anchor, in units of their posterior's spread, unless
    the user says where, or all settings. The local values are those of a pilot chain, moved until
    they suit the globals: where they know much of these, chains would else start where the pilot
    ended.

    :param has_init_params: whether the globals' start is the user's.
    """
    target, found, is_given = (
        config.potential,
        config.adaptation.local_init,
        config.adaptation.uses_init_strategy,
    )
    local = target.local_latents
    assert found is not None
    assert local is not None
    num_moves = (
        _NUM_INIT_LOCAL_UPDATES if local.hmc_sites or not is_given else _NUM_INIT_GIBBS_UPDATES
    )

    def one(state: SGMCMCState) -> SGMCMCState:
        pilot_key, spread_key, move_key, following = random.split(state.rng_key, 4)
        whitening, dynamics = state.adapt_state.preconditioner, state.dynamics_state
        if not (has_init_params or is_given):
            noise = _INIT_DISPERSION_SD * random.normal(spread_key, (target.dim,), target.dtype)
            q = (
                found.covariance_factor @ noise
                if found.covariance_factor.ndim == 2
                else found.covariance_factor * noise
            )
            dynamics = dynamics._replace(position=q)
        theta = whitening.to_position(dynamics.position)
        pilot = random.randint(pilot_key, (), 0, len(jax.tree.leaves(found.values)[0]))
        values = jax.tree.map(lambda x: x[pilot], found.values)
        first = LocalLatentsState(values, found.scale, jnp.ones((), target.dtype))
        own, gradient = _burn_in_locals(
            target, theta, first, arguments, whitening.center, move_key, num_moves
        )
        z: Any = target.unravel(theta)
        of_rows = local.to_unconstrained_sites(own.values)
        return state._replace(
            z={**z, **{name: of_rows[name] for name in config.collected_local_sites}},
            dynamics_state=dynamics,
            adapt_state=state.adapt_state.with_reference_gradient(gradient),
            rng_key=following,
            local_state=own,
        )

    return jax.vmap(one)(state) if state.i.ndim else one(state)
