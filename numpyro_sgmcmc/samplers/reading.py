"""From what a kernel is made of to the posterior: the model or the potential function, read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_sgmcmc.checks import InvalidArgumentError
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.posterior.locals.checks import check_local_latents_options
from numpyro_sgmcmc.posterior.target import Potential, make_function_potential
from numpyro_sgmcmc.posterior.targets import get_model_potential
from numpyro_sgmcmc.samplers.compatibility import check_options_match_model
from numpyro_sgmcmc.samplers.options import Options
from numpyro_sgmcmc.warmup.starts import check_potential_fn_params

__all__ = ["build_potential_from_fn", "build_potential_from_model", "get_single_chain_shapes"]


def build_potential_from_model(
    model: Callable, arguments: Arguments, options: Options
) -> Potential:
    """The posterior of a model that bears the options.

    :raises ValueError: naming the site, plate or option that cannot be sampled.
    """
    is_forward = options.forward_mode_differentiation
    target = get_model_potential(
        model, arguments, options.init_strategy, options.gibbs_config, is_forward
    )
    check_local_latents_options(
        target,
        arguments,
        options.subsampling,
        options.gradient_estimator,
        options.collect_local_sites,
    )
    check_options_match_model(target, options)
    return target


def build_potential_from_fn(
    potential_fn: Callable,
    value_shapes: Any,
    options: Options,
    potential_cache: dict[Any, Potential],
) -> Potential:
    """The posterior of a potential function.

    :param value_shapes: shapes and types of the values of which it is a function.
    :param potential_cache: those read before, by names and shapes of the values; gains this one.
    :raises ValueError: for what is no such function.
    """
    leaves, structure = jax.tree.flatten(value_shapes)
    form = structure, tuple(x.shape for x in leaves)
    if form not in potential_cache:
        is_forward = options.forward_mode_differentiation
        potential_cache[form] = make_function_potential(potential_fn, value_shapes, is_forward)
    return potential_cache[form]


def get_single_chain_shapes(init_params: Any, is_batch: bool) -> Any:
    """Shapes and types of the values of which a potential is a function.

    :raises ValueError: where there are none.
    """
    if init_params is None:
        raise InvalidArgumentError(
            "Valid value of `init_params` must be provided with `potential_fn`."
        )
    check_potential_fn_params(init_params)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x)[int(is_batch) :], jnp.result_type(x)),
        init_params,
    )
