"""A kernel as a block of NumPyro's Gibbs: where it warms up, and what other values change.

Gibbs initialises a block at draws of the other sites from their prior. Where that is wide, the
block's conditional posterior there is nothing like the one in which it will sample: data far from
what the others predict make the gradient noisy and steps tiny. So the other sites have values from
the midst of the joint posterior instead, by the start by volume that a kernel for all sites makes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from numpyro.infer.gibbs import GIBBS_SITES_KWARG

from numpyro_sgmcmc.chain import SGMCMCState
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.progress import stages_shown
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.posterior.locals.sites import with_locals
from numpyro_sgmcmc.posterior.read import read
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.samplers.init_cache import AdaptationRecord
from numpyro_sgmcmc.samplers.options import Options
from numpyro_sgmcmc.samplers.reading import read_model
from numpyro_sgmcmc.samplers.warmup_settings import warmup_settings
from numpyro_sgmcmc.warmup import fitted_position
from numpyro_sgmcmc.warmup.starts import first_positions

__all__ = ["anchored_here", "at_likely_values", "given_to_block", "joint_target"]


def joint_target(
    model: Callable, given: Mapping[str, Any], arguments: Arguments, options: Options
) -> Target:
    """The posterior of all sites of a block's model but those given."""
    with warnings.catch_warnings():  # which the block gives
        warnings.simplefilter("ignore", UserWarning)
        return read_model(model, given_to_block(arguments, given), options)


def given_to_block(arguments: Arguments, values: Mapping[str, Any]) -> Arguments:
    """The arguments with these values of other blocks' sites."""
    return Arguments(arguments.args, {**arguments.kwargs, GIBBS_SITES_KWARG: dict(values)})


def anchored_here(target: Target, state: SGMCMCState, arguments: Arguments) -> SGMCMCState:
    """A state with the control variates anchored at its position.

    :param arguments: with the present values of other blocks' sites.
    """
    if state.locals is not None:
        arguments = with_locals(arguments, state.locals.values)
    anchor = ravel_pytree(target.globals_among(state.z))[0].astype(target.dtype)
    before = state.adapt_state
    whitening = before.whitening._replace(
        anchor=anchor, gradient=target.full_gradient(anchor, arguments)
    )
    if whitening.hessian is not None:
        whitening = whitening._replace(hessian=target.full_expansion(anchor, arguments)[2])
    centre = before.whitening.anchor if before.centre is None else before.centre
    return state._replace(
        dynamics=state.dynamics._replace(position=jnp.zeros_like(anchor)),
        adapt_state=before._replace(whitening=whitening, centre=centre),
    )


def at_likely_values(
    model: Callable,
    arguments: Arguments,
    options: Options,
    dynamics: Dynamics,
    scheme: str,
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
    moved = _movable(model, given, arguments, options)
    if not moved:
        return arguments
    kept = {name: x for name, x in given.items() if name not in moved}
    joint = given_to_block(arguments, kept)
    if record is not None and record.holds_with_likely_values(joint):
        return record.arguments
    shared = ("init_strategy", "forward_mode_differentiation")
    of_all = Options(**{name: getattr(options, name) for name in shared})
    target = joint_target(model, kept, arguments, of_all)
    if target.locals is not None:
        return arguments
    settings = warmup_settings(
        of_all, target, dynamics, scheme, lambda _: dynamics, has_start=False, is_by_site=False
    )
    with stages_shown(arguments.hosts) as progress:
        starts = first_positions(target, joint, None, is_batch=False)
        position = fitted_position(target, joint, settings, starts, progress)
    values = target.constrain(target.unravel(jnp.asarray(position, target.dtype)), joint)
    return given_to_block(arguments, {**given, **{name: values[name] for name in moved}})


def _movable(
    model: Callable, names: Iterable[str], arguments: Arguments, options: Options
) -> list[str]:
    """Names of the sites, of these, that a gradient moves."""
    free = given_to_block(arguments, {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        facts = read(model, free, options.init_strategy, options.gibbs)
    return [
        site.name
        for site in facts.samples
        if site.name in names
        and not (site.frames or site.support.is_discrete or site.is_delta)
        and site.free_shape is not None
    ]
