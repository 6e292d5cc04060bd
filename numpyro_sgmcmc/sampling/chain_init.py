"""Initial states of chains: over-dispersed about the center, or where the user wants them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.flatten_util import ravel_pytree

from numpyro_sgmcmc.compilation import jit_low_optimization
from numpyro_sgmcmc.data.arguments import Arguments, is_traced
from numpyro_sgmcmc.data.subsampling import init_streams
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.model.local_latents import LocalValues, with_local_values
from numpyro_sgmcmc.model.local_moves import sweep_local_values
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.preconditioner import stack_preconditioners
from numpyro_sgmcmc.sampling.bias_monitor import Moments, StepSizeMonitor, get_split_factor
from numpyro_sgmcmc.sampling.prefetch import attach_prefetch_buffer
from numpyro_sgmcmc.sampling.state import (
    AdaptState,
    ChainConfig,
    SGMCMCState,
    StaticSettings,
    has_chain_axis,
    make_chain_axes,
)

# SD of the initial positions in posterior SDs: chains that agree then have converged, not started
# together. R-hat needs such initial positions (Gelman and Rubin 1992).
_INIT_DISPERSION_SD = 2.0
# Updates of the local latent variables before the first step, and where the warm-up has estimated
# nothing.
_NUM_INIT_UPDATES, _NUM_INIT_UPDATES_WITHOUT_WARMUP = 20, 1


def init_chains(
    config: ChainConfig, dynamics: Dynamics, rng_key: Array, init_params: Any, arguments: Arguments
) -> SGMCMCState:
    """Return the initial state of a chain, batched if the key is."""
    adaptation, potential, options = config.adaptation, config.potential, config.options
    is_batch = has_chain_axis(rng_key)
    num_chains = len(rng_key) if is_batch else 1
    preconditioner, dtype = adaptation.preconditioner, adaptation.preconditioner.center.dtype
    step_size = jnp.asarray(adaptation.step_size, dtype)
    if others := adaptation.other_mode_preconditioners:
        # Chains take the modes in turn. A single chain has no number: a random one, by a key that
        # `_init_states` does not use.
        chain_indices: Any = np.arange(num_chains)
        if not is_batch:
            chain_indices = random.bits(random.fold_in(rng_key, 4), (), jnp.uint32) >> 1
        mode = chain_indices % (1 + len(others))
        by_mode = stack_preconditioners([preconditioner, *others])
        preconditioner = jax.tree.map(lambda x: x[mode], by_mode)
        step_size = jnp.full(np.shape(chain_indices), adaptation.step_size, dtype)
    if options.traced_step_size is not None:
        # NaN for one that is not positive: every iteration then diverges.
        traced = options.traced_step_size.astype(dtype)
        step_size = jnp.where(traced > 0.0, traced, jnp.nan) * jnp.ones_like(step_size)
    split_factor = get_split_factor(preconditioner)
    num_directions = 0 if split_factor is None else split_factor.scales.shape[-1]
    num_temperatures = potential.dim + (not adaptation.has_dominant_mode)
    constants = {
        "i": jnp.array(0),
        "num_steps": jnp.asarray(adaptation.num_steps),
        "diverging": jnp.array(False),
        "moments": Moments.zeros(potential.dim + num_directions, potential.dtype),
        "step_size_monitor": StepSizeMonitor.zeros(num_temperatures, potential.dtype),
    }
    covariance, blocks = adaptation.gradient_noise_covariance, config.mass_matrix_blocks
    static_settings = StaticSettings.create(adaptation)
    adapt_state = AdaptState(
        step_size, preconditioner, covariance, blocks, static_settings=static_settings
    )
    init_arguments = arguments if adaptation.uses_init_strategy else None
    init_states = _init_states_jit if is_traced(rng_key) else _init_states_low_opt_jit
    inputs = rng_key, init_params, adapt_state, init_arguments, constants
    state = init_states(*inputs, potential=potential, dynamics=dynamics)
    attach = partial(attach_prefetch_buffer, config, num_chains=num_chains)
    axes = make_chain_axes(preconditioner)
    state = (jax.vmap(attach, (axes,), axes) if is_batch else attach)(state)
    if potential.local_latents is not None:
        init_locals = partial(_init_locals, config, arguments, init_params is not None)
        state = (jax.vmap(init_locals) if is_batch else init_locals)(state)
    return state


def _init_states(
    rng_key: Array,
    init_params: Any,
    adapt_state: AdaptState,
    arguments: Arguments | None,
    constants: dict[str, Any],
    potential: Potential,
    dynamics: Dynamics,
) -> SGMCMCState:
    """Return the initial state of a chain, or of several, without local latent variables.

    :param adapt_state: that of all chains, or one per chain.
    :param arguments: the model's, if the initialisation strategy chooses the position; else None.
    :param constants: fields of the state that are the same for all chains.
    """

    def init_chain(rng_key: Array, init_params: Any, adapt_state: AdaptState) -> SGMCMCState:
        preconditioner = adapt_state.preconditioner
        rng_key, position_key, state_key, stream_key = random.split(rng_key, 4)
        if init_params is None and arguments is None:
            q = _INIT_DISPERSION_SD * random.normal(position_key, (potential.dim,), potential.dtype)
        else:
            if init_params is None:
                assert arguments is not None
                position = potential.sample_init_position(position_key, arguments)
            else:
                position = ravel_pytree(init_params)[0]
            q = preconditioner.from_position(position.astype(potential.dtype))
        return SGMCMCState(
            z=potential.unravel(preconditioner.to_position(q)),
            dynamics_state=dynamics.init(q, state_key),
            streams=init_streams(potential.plates, stream_key),
            weight=jnp.zeros_like(adapt_state.step_size),
            adapt_state=adapt_state,
            rng_key=rng_key,
            **constants,
        )

    if has_chain_axis(rng_key):
        axes = make_chain_axes(adapt_state.preconditioner)
        init_chain = jax.vmap(init_chain, (0, 0, 0 if adapt_state.step_size.ndim else None), axes)
    return init_chain(rng_key, init_params, adapt_state)


_init_states_jit = jax.jit(_init_states, static_argnames=("potential", "dynamics"))
_init_states_low_opt_jit = jit_low_optimization(
    _init_states, static_argnames=("potential", "dynamics")
)


def _init_locals(
    config: ChainConfig, arguments: Arguments, has_init_params: bool, state: SGMCMCState
) -> SGMCMCState:
    """Return a chain's initial state with local latent variables.

    Unless the user chooses them, the global sites start over-dispersed about the center, in units
    of their posterior covariance. The local variables are those of a random pilot chain,
    updated given the global sites: chains would otherwise start where that pilot chain ended, if
    the local variables are informative about the global sites.
    """
    potential, adaptation = config.potential, config.adaptation
    local_latents, local_init = potential.local_latents, adaptation.local_init
    assert local_latents is not None
    assert local_init is not None
    preconditioner, dynamics_state = state.adapt_state.preconditioner, state.dynamics_state
    pilot_key, position_key, update_key, next_key = random.split(state.rng_key, 4)
    if not (has_init_params or adaptation.uses_init_strategy):
        normals = random.normal(position_key, (potential.dim,), potential.dtype)
        normals, factor = _INIT_DISPERSION_SD * normals, local_init.covariance_factor
        q = factor @ normals if factor.ndim == 2 else factor * normals
        dynamics_state = dynamics_state._replace(position=q)
    position = preconditioner.to_position(dynamics_state.position)

    num_pilot_chains = len(jax.tree.leaves(local_init.values)[0])
    pilot = random.randint(pilot_key, (), 0, num_pilot_chains)
    pilot_values = jax.tree.map(lambda x: x[pilot], local_init.values)
    has_warmup = not adaptation.uses_init_strategy
    num_updates = _NUM_INIT_UPDATES if has_warmup else _NUM_INIT_UPDATES_WITHOUT_WARMUP
    inputs = position, pilot_values, arguments, preconditioner.center, update_key, num_updates
    local_state, reference_gradient = _update_init_locals(potential, *inputs)
    z: Any = potential.unravel(position)
    local_values = local_latents.to_model_layout(local_state.by_site)
    return state._replace(
        z={**z, **{name: local_values[name] for name in config.collected_sites.local}},
        dynamics_state=dynamics_state,
        adapt_state=state.adapt_state.with_reference_gradient(reference_gradient),
        rng_key=next_key,
        local_state=local_state,
    )


@partial(jax.jit, static_argnames=("potential", "num_updates"))
def _update_init_locals(
    potential: Potential,
    global_position: Array,
    values: LocalValues,
    arguments: Arguments,
    reference: Array,
    rng_key: Array,
    num_updates: int,
) -> tuple[LocalValues, Array]:
    """Return local variables updated given the global sites, and the gradient at the reference."""
    values = sweep_local_values(potential, global_position, values, arguments, rng_key, num_updates)
    gradient = potential.full_gradient(reference, with_local_values(arguments, values))
    return values, gradient
