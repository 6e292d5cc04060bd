"""From what a kernel is made of to the posterior: the model or the potential function, read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_sgmcmc.checks import Refusal
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.posterior.locals.checks import refuse_options_with_locals
from numpyro_sgmcmc.posterior.target import Target, function_target
from numpyro_sgmcmc.posterior.targets import target_of
from numpyro_sgmcmc.samplers.compatibility import refuse_unsuitable_options
from numpyro_sgmcmc.samplers.options import Options
from numpyro_sgmcmc.warmup.starts import refuse_no_values

__all__ = ["read_function", "read_model", "values_of_one_chain"]


def read_model(model: Callable, arguments: Arguments, options: Options) -> Target:
    """The posterior of a model that bears the options.

    :raises ValueError: naming the site, plate or option that cannot be sampled.
    """
    is_forward = options.forward_mode_differentiation
    target = target_of(model, arguments, options.init_strategy, options.gibbs, is_forward)
    refuse_options_with_locals(
        target, arguments, options.minibatch, options.gradient, options.collect_locals
    )
    refuse_unsuitable_options(target, options)
    return target


def read_function(
    potential_fn: Callable, values: Any, options: Options, known: dict[Any, Target]
) -> Target:
    """The posterior of a potential function.

    :param values: shapes and types of the values of which it is a function.
    :param known: those read before, by names and shapes of the values; gains this one.
    :raises ValueError: for what is no such function.
    """
    leaves, structure = jax.tree.flatten(values)
    form = structure, tuple(x.shape for x in leaves)
    if form not in known:
        is_forward = options.forward_mode_differentiation
        known[form] = function_target(potential_fn, values, is_forward)
    return known[form]


def values_of_one_chain(init_params: Any, is_batch: bool) -> Any:
    """Shapes and types of the values of which a potential is a function.

    :raises ValueError: where there are none.
    """
    if init_params is None:
        raise Refusal("Valid value of `init_params` must be provided with `potential_fn`.")
    refuse_no_values(init_params)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x)[int(is_batch) :], jnp.result_type(x)),
        init_params,
    )
