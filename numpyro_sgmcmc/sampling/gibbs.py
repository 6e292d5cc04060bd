"""A kernel as a block of NumPyro's Gibbs: where it warms up, and what other values change.

Gibbs initialises a block at draws of the other sites from their prior. Where that is wide, the
block's conditional posterior there is nothing like the one in which it will sample: data far from
what the others predict make the gradient noisy and steps tiny. So the other sites have values from
the midst of the joint posterior instead, by the start by volume that a kernel for all sites makes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from numpyro_sgmcmc.sampling.kernel import AdaptationRecord

__all__ = [
    "build_conditional_potential",
    "condition_on_variational_means",
    "recenter_state",
    "with_conditioning",
]


def build_conditional_potential(
    model: Callable, conditioning_values: Mapping[str, Any], arguments: Arguments, options: Options
) -> Potential:
    """The posterior of all sites of a block's model but those given."""
    with warnings.catch_warnings():  # which the block gives
        warnings.simplefilter("ignore", UserWarning)
        return build_potential_from_model(
            model, with_conditioning(arguments, conditioning_values), options
        )


def with_conditioning(arguments: Arguments, conditioning_values: Mapping[str, Any]) -> Arguments:
    """The arguments with these values of other blocks' sites."""
    return Arguments(
        arguments.args, {**arguments.kwargs, GIBBS_SITES_KWARG: dict(conditioning_values)}
    )


def recenter_state(potential: Potential, state: SGMCMCState, arguments: Arguments) -> SGMCMCState:
    """A state with the control variates anchored at its position.

    :param arguments: with the present values of other blocks' sites.
    """
    if state.local_state is not None:
        arguments = with_local_values(arguments, state.local_state.values)
    anchor = ravel_pytree(potential.select_global_values(state.z))[0].astype(potential.dtype)
    before = state.adapt_state
    whitening = before.preconditioner._replace(
        center=anchor, reference_gradient=potential.full_gradient(anchor, arguments)
    )
    if whitening.reference_hessian is not None:
        whitening = whitening._replace(
            reference_hessian=potential.full_value_grad_hessian(anchor, arguments)[2]
        )
    centre = (
        before.preconditioner.center if before.initial_center is None else before.initial_center
    )
    return state._replace(
        dynamics_state=state.dynamics_state._replace(position=jnp.zeros_like(anchor)),
        adapt_state=before._replace(preconditioner=whitening, initial_center=centre),
    )


def condition_on_variational_means(
    model: Callable,
    arguments: Arguments,
    options: Options,
    dynamics: Dynamics,
    integrator: str,
    record: AdaptationRecord | None,
) -> Arguments:
    """A block's arguments with likely values of the other sites in place of draws from the prior.

    Those that no gradient can move, and those of rows, keep the values that they have; the others
    are likely given these. Nothing changes for a block with local values of its own.

    :param arguments: the block's, concrete.
    :param options: the block's.
    :param record: of its last warm-up, whose values serve again where all else is the same.
    :raises RuntimeError: where no start of all sites is finite.
    """
    given = arguments.kwargs[GIBBS_SITES_KWARG]
    moved = _find_continuous_global_sites(model, given, arguments, options)
    if not moved:
        return arguments
    kept = {name: x for name, x in given.items() if name not in moved}
    joint = with_conditioning(arguments, kept)
    if record is not None and record.is_valid_for_gibbs_block(joint):
        return record.arguments
    shared = ("init_strategy", "forward_mode_differentiation")
    of_all = Options(**{name: getattr(options, name) for name in shared})
    target = build_conditional_potential(model, kept, arguments, of_all)
    if target.local_latents is not None:
        return arguments
    settings = build_warmup_settings(
        of_all,
        target,
        dynamics,
        integrator,
        lambda _: dynamics,
        has_init_params=False,
        is_site_aligned=False,
    )
    with show_adaptation_progress(arguments.host_arrays) as progress:
        starts = generate_init_positions(target, joint, None, has_chain_axis=False)
        position = fit_variational_mean(target, joint, settings, starts, progress)
    values = target.constrain(target.unravel(jnp.asarray(position, target.dtype)), joint)
    return with_conditioning(arguments, {**given, **{name: values[name] for name in moved}})


def _find_continuous_global_sites(
    model: Callable, names: Iterable[str], arguments: Arguments, options: Options
) -> list[str]:
    """Names of the sites, of these, that a gradient moves."""
    free = with_conditioning(arguments, {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        facts = trace_model(model, free, options.init_strategy, options.gibbs_config)
    return [
        site.name
        for site in facts.sample_sites
        if site.name in names
        and not (site.plate_frames or site.support.is_discrete or site.is_delta)
        and site.unconstrained_shape is not None
    ]
