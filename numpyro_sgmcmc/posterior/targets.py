"""One target for all kernels on one model, so that they share what JAX has compiled for it.

A target is a static argument of compiled functions, which are compiled anew for each. A kernel
therefore takes the target that another one on the same model has, where the two are the same. The
model is read for every kernel all the same, with its refusals and warnings. A target is shared only
where the traced posterior is the same operation by operation and constant by constant, because a
model may use what it does not get as an argument: data closed over and changed in place, globals
that mean something else by now. Tracing takes some hundredths of a second, compiling seconds.
What is not seen: other things that a model does with numbers of rows that are neither a minibatch's
nor a full pass's, and changes of what the model uses while a kernel is in use. Nor does JAX itself
see that a function which it has compiled before uses a global with another value by now.

No kernel and no compiled program is kept alive by this. A target lives as long as some kernel has
it or JAX holds programs compiled for it (until ``jax.clear_caches()``, or until others have taken
their place); with it the model, and what the model closes over.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from types import MethodType
from typing import Any
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
from jax import Array, random

from numpyro_sgmcmc.checks import InvalidArgumentError
from numpyro_sgmcmc.data.arguments import Arguments, IdentityKey
from numpyro_sgmcmc.data.plates import Indices
from numpyro_sgmcmc.posterior.facts import NO_GIBBS, GibbsConfig
from numpyro_sgmcmc.posterior.locals.moves import update_local_values
from numpyro_sgmcmc.posterior.model import make_model_potential
from numpyro_sgmcmc.posterior.program_key import fingerprint_jaxpr
from numpyro_sgmcmc.posterior.target import Potential

__all__ = ["get_model_potential"]

_potential_cache: WeakValueDictionary[Hashable, Potential] = WeakValueDictionary()


def get_model_potential(
    model: Callable,
    arguments: Arguments,
    init_strategy: Callable,
    gibbs: GibbsConfig = NO_GIBBS,
    forward_mode_differentiation: bool = False,
) -> Potential:
    """:func:`~numpyro_sgmcmc.posterior.model.model_target`, or one made before that is the same.

    :param forward_mode_differentiation: whether gradients are taken in forward mode.
    :raises ValueError: as there, and for a model that has no other gradient where that is wanted.
    """
    target = make_model_potential(model, arguments, init_strategy, gibbs)
    target = replace(target, forward_mode_differentiation=forward_mode_differentiation)
    try:
        key = _potential_cache_key(model, arguments, target)
        return _potential_cache.setdefault(key, target)
    except Exception as error:
        _check_reverse_mode_error(error)
        # What fails here fails again where it is used, with the words that belong there.
        return target


def _check_reverse_mode_error(error: Exception) -> None:
    """Refuse a model with a loop of unknown length, unless gradients are taken in forward mode."""
    if "Reverse-mode differentiation does not work" in str(error):
        raise InvalidArgumentError(
            "The model has a loop whose number of turns JAX does not know (`lax.while_loop`), "
            "through which gradients go forward alone: use forward_mode_differentiation=True, or "
            "`lax.scan`."
        ) from error


def _potential_cache_key(model: Callable, arguments: Arguments, potential: Potential) -> Hashable:
    """All that tells two targets apart."""
    local = potential.local_latents
    return (
        # Every access makes a new bound method, equal to the others of its object.
        model if isinstance(model, MethodType) else IdentityKey(model),
        arguments.signature,
        potential.plates,
        potential.plate_groups,
        tuple((s.name, s.shape) for s in potential.sites or ()),
        potential.dtype,
        potential.is_stochastic,
        potential.forward_mode_differentiation,
        local
        and (local.plate, *(s._replace(support=None) for s in local.hmc_sites + local.gibbs_sites)),
        local and local.gibbs_fn,
        potential.host_lookups,
        potential.shards,
        fingerprint_jaxpr(_trace_potential(potential, arguments)),
    )


def _trace_potential(potential: Potential, arguments: Arguments) -> Any:
    """Everything that a target computes and the derivatives wanted of it, traced."""
    rows = {p.name: jax.ShapeDtypeStruct((p.subsample_size,), jnp.int32) for p in potential.plates}
    position = jax.ShapeDtypeStruct((potential.dim,), potential.dtype)
    local = potential.local_latents

    def expansion(position: Array, rows: Indices, arguments: Arguments, rng_key: Any) -> Any:
        def on(part: Potential, rows: Indices, arguments: Arguments, rng_key: Any) -> Any:
            def gradient(q: Array) -> Any:
                return part.value_and_grad(q, rows, arguments, rng_key)

            return jax.jvp(gradient, (position,), (position,))

        return potential.mean_over_shards(on, rows, arguments, rng_key)

    def everything(position: Array, rows: Indices, arguments: Arguments, rng_key: Array) -> Any:
        z = potential.unravel(position)
        found = [
            expansion(position, rows, arguments, rng_key if potential.is_stochastic else None),
            potential.constrain(z, arguments),
            potential.postprocess(z, arguments),
            potential.sample_init_position(rng_key, arguments),
            # A model may do other things with other numbers of rows, as passes over all have.
            potential.full_value(position, arguments),
        ]
        if local is not None:
            own = jnp.asarray(rows[local.plate.name])
            values = local.make_zero_values().take(own)
            scale = jnp.ones_like(values.hmc_position)
            found += [
                update_local_values(potential, position, own, values, scale, arguments, rng_key),
                local.constrain(local.to_unconstrained_sites(values)),
            ]
        if local is not None and local.gibbs_sites:
            assert potential.sample_conditional_prior is not None
            found.append(potential.sample_conditional_prior(position, rows, arguments, rng_key))
        return found

    return jax.make_jaxpr(everything)(position, rows, arguments, random.key(0))
