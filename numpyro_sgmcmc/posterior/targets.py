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

from numpyro_sgmcmc.checks import Refusal
from numpyro_sgmcmc.data.arguments import Arguments, ByIdentity
from numpyro_sgmcmc.data.plates import Indices
from numpyro_sgmcmc.posterior.facts import NO_DRAWS, GibbsDraws
from numpyro_sgmcmc.posterior.locals.moves import renew
from numpyro_sgmcmc.posterior.model import model_target
from numpyro_sgmcmc.posterior.program_key import program_key
from numpyro_sgmcmc.posterior.target import Target

__all__ = ["target_of"]

_targets: WeakValueDictionary[Hashable, Target] = WeakValueDictionary()


def target_of(
    model: Callable,
    arguments: Arguments,
    init_strategy: Callable,
    gibbs: GibbsDraws = NO_DRAWS,
    is_forward: bool = False,
) -> Target:
    """:func:`~numpyro_sgmcmc.posterior.model.model_target`, or one made before that is the same.

    :param is_forward: whether gradients are taken in forward mode.
    :raises ValueError: as there, and for a model that has no other gradient where that is wanted.
    """
    target = model_target(model, arguments, init_strategy, gibbs)
    target = replace(target, is_forward=is_forward)
    try:
        key = _key(model, arguments, target)
        return _targets.setdefault(key, target)
    except Exception as error:
        _refuse_reverse_mode(error)
        # What fails here fails again where it is used, with the words that belong there.
        return target


def _refuse_reverse_mode(error: Exception) -> None:
    """Refuse a model with a loop of unknown length, unless gradients are taken in forward mode."""
    if "Reverse-mode differentiation does not work" in str(error):
        raise Refusal(
            "The model has a loop whose number of turns JAX does not know (`lax.while_loop`), "
            "through which gradients go forward alone: use forward_mode_differentiation=True, or "
            "`lax.scan`."
        ) from error


def _key(model: Callable, arguments: Arguments, target: Target) -> Hashable:
    """All that tells two targets apart."""
    local = target.locals
    return (
        # Every access makes a new bound method, equal to the others of its object.
        model if isinstance(model, MethodType) else ByIdentity(model),
        arguments.signature,
        target.plates,
        target.groups,
        tuple((s.name, s.shape) for s in target.sites or ()),
        target.dtype,
        target.is_randomized,
        target.is_forward,
        local and (local.plate, *(s._replace(support=None) for s in local.moved + local.drawn)),
        local and local.gibbs_fn,
        target.lookups,
        target.shards,
        program_key(_program(target, arguments)),
    )


def _program(target: Target, arguments: Arguments) -> Any:
    """Everything that a target computes and the derivatives wanted of it, traced."""
    rows = {p.name: jax.ShapeDtypeStruct((p.subsample_size,), jnp.int32) for p in target.plates}
    position = jax.ShapeDtypeStruct((target.dim,), target.dtype)
    local = target.locals

    def expansion(position: Array, rows: Indices, arguments: Arguments, rng_key: Any) -> Any:
        def on(part: Target, rows: Indices, arguments: Arguments, rng_key: Any) -> Any:
            def gradient(q: Array) -> Any:
                return part.potential_and_gradient(q, rows, arguments, rng_key)

            return jax.jvp(gradient, (position,), (position,))

        return target.over_shards(on, rows, arguments, rng_key)

    def everything(position: Array, rows: Indices, arguments: Arguments, rng_key: Array) -> Any:
        z = target.unravel(position)
        found = [
            expansion(position, rows, arguments, rng_key if target.is_randomized else None),
            target.constrain(z, arguments),
            target.postprocess(z, arguments),
            target.start(rng_key, arguments),
            # A model may do other things with other numbers of rows, as passes over all have.
            target.full_potential(position, arguments),
        ]
        if local is not None:
            own = jnp.asarray(rows[local.plate.name])
            values = local.zeros().take(own)
            scale = jnp.ones_like(values.position)
            found += [
                renew(target, position, own, values, scale, arguments, rng_key),
                local.constrain(local.unconstrained(values)),
            ]
        if local is not None and local.drawn:
            assert target.draw_prior is not None
            found.append(target.draw_prior(position, rows, arguments, rng_key))
        return found

    return jax.make_jaxpr(everything)(position, rows, arguments, random.key(0))
