"""A kernel as a block of NumPyro's ``Gibbs``: its conditional potential and its warm-up.

``Gibbs`` initialises a block with draws of the other blocks' sites from their prior. If that prior
is wide, the block's conditional posterior given them is unlike the one that it will sample: data
far from their prediction make gradients noisy and steps tiny. The warm-up therefore conditions on
values in the bulk of the joint posterior, found by the variational initialisation that a kernel
for all sites makes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from numpyro.infer.gibbs import GIBBS_SITES_KWARG

from numpyro_sgmcmc.adaptation import fit_variational_mean
from numpyro_sgmcmc.adaptation.initialisation import generate_init_positions
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.model.local_latents import with_local_values
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.trace import trace_model
from numpyro_sgmcmc.progress import show_adaptation_progress
from numpyro_sgmcmc.sampling.options import (
    Options,
    build_potential_from_model,
    build_warmup_settings,
)
from numpyro_sgmcmc.sampling.state import SGMCMCState


def with_conditioning(arguments: Arguments, conditioning_values: Mapping[str, Any]) -> Arguments:
    """Return the arguments with these values of other blocks' sites."""
    return arguments.with_kwarg(GIBBS_SITES_KWARG, dict(conditioning_values))


def build_conditional_potential(
    model: Callable, conditioning_values: Mapping[str, Any], arguments: Arguments, options: Options
) -> Potential:
    """Return the potential of all sites of a block's model except those conditioned on."""
    # The block itself gives these warnings.
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        return build_potential_from_model(
            model, with_conditioning(arguments, conditioning_values), options
        )


def condition_on_variational_means(
    model: Callable,
    arguments: Arguments,
    options: Options,
    dynamics: Dynamics,
    integrator: str,
    get_cached: Callable[[Arguments], Arguments | None],
) -> Arguments:
    """Return a block's arguments with variational means in place of draws from the prior.

    Values of continuous sites outside of plates are replaced. The other conditioning values stay,
    and the means are conditional on them. A model with local latent variables keeps the draws from
    the prior.

    :param get_cached: returns the result of the last warm-up for arguments without the replaced
        values, or None if anything else has changed.
    """
    values = arguments.kwargs[GIBBS_SITES_KWARG]
    # The block itself gives these warnings.
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        trace = trace_model(
            model, with_conditioning(arguments, {}), options.init_strategy, options.gibbs_config
        )
    replaced_sites = [
        site.name
        for site in trace.sample_sites
        if site.name in values
        and not (site.plate_frames or site.support.is_discrete or site.is_delta)
        and site.unconstrained_shape is not None
    ]
    if not replaced_sites:
        return arguments
    kept = {name: x for name, x in values.items() if name not in replaced_sites}
    joint_arguments = with_conditioning(arguments, kept)
    if (cached := get_cached(joint_arguments)) is not None:
        return cached
    joint_options = Options(
        init_strategy=options.init_strategy,
        forward_mode_differentiation=options.forward_mode_differentiation,
    )
    potential = build_conditional_potential(model, kept, arguments, joint_options)
    if potential.local_latents is not None:
        return arguments
    settings = build_warmup_settings(joint_options, potential, dynamics, integrator)
    with show_adaptation_progress(arguments.host_arrays) as progress:
        init_positions = generate_init_positions(potential, joint_arguments, None, False)
        mean = fit_variational_mean(potential, joint_arguments, settings, init_positions, progress)
    z = potential.unravel(jnp.asarray(mean, potential.dtype))
    means = potential.constrain(z, joint_arguments)
    return with_conditioning(arguments, {**values, **{k: means[k] for k in replaced_sites}})


def recenter_state(potential: Potential, state: SGMCMCState, arguments: Arguments) -> SGMCMCState:
    """Return the state with the control variates' reference at its position."""
    if state.local_state is not None:
        arguments = with_local_values(arguments, state.local_state)
    center = ravel_pytree(potential.select_global_values(state.z))[0].astype(potential.dtype)
    adapt_state = state.adapt_state
    initial_center = adapt_state.initial_center
    if initial_center is None:
        initial_center = adapt_state.preconditioner.center
    preconditioner = adapt_state.preconditioner._replace(
        center=center, reference_gradient=potential.full_gradient(center, arguments)
    )
    if preconditioner.reference_hessian is not None:
        preconditioner = preconditioner._replace(
            reference_hessian=potential.full_value_grad_hessian(center, arguments)[2]
        )
    return state._replace(
        dynamics_state=state.dynamics_state._replace(position=jnp.zeros_like(center)),
        adapt_state=adapt_state._replace(
            preconditioner=preconditioner, initial_center=initial_center
        ),
    )
