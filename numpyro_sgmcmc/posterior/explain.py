"""Why the log density is not finite somewhere: the sites and the arguments to look at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpyro
from jax import Array
from numpyro.distributions import constraints
from numpyro.handlers import substitute, trace

from numpyro_sgmcmc.data.arguments import Arguments, as_jax_arrays
from numpyro_sgmcmc.posterior.locals.draws import resample_local_values
from numpyro_sgmcmc.posterior.locals.sites import insert_local_values
from numpyro_sgmcmc.posterior.on_rows import SubsampledModel

__all__ = ["diagnose_nonfinite"]

_MAX_DIAGNOSED_ROWS = 20_000  # of rows elsewhere, which may be more than memory holds


def diagnose_nonfinite(
    model: SubsampledModel, user_model: Callable, position: Array, arguments: Arguments
) -> str:
    """A sentence that names the sites and the arguments that are not finite.

    :param user_model: the model as the user gave it, whose signature names the arguments.
    :param position: a flat position.
    """
    culprits = _find_nonfinite_sites(model, position, arguments)
    local = model.local_latents or model.resampled_latents
    if drawn := [s.name for s in local.gibbs_sites if s.name in culprits] if local else []:
        return (
            f"`gibbs_fn` draws values of '{drawn[0]}' at which its own density is not finite "
            f"({culprits[drawn[0]]}), such as a share of exactly 0: keep them off the boundary of "
            "its support, for example by jnp.clip."
        )
    arrays = [(n, int((~jnp.isfinite(x)).sum())) for n, x in arguments.named_arrays(user_model)]
    missing = [f"{n} ({bad} of its values)" for n, bad in arrays if bad]
    found = ""
    if culprits:
        listed = ", ".join(f"'{name}' ({told})" for name, told in culprits.items())
        found = (
            f"Log density or gradient is not finite at site {listed}: look there for "
            "missing values, data outside the distribution's support, parameters out of range, or "
            "overflow. "
        )
    if missing:
        found += f"Among the arguments, not all is finite in {', '.join(missing)}."
    if found:
        return found.strip()
    way_out = "ry other init_params, or another init_strategy such as init_to_median."
    if not model.plates:
        return f"T{way_out}"
    return (
        "On all rows at once every site's log density is finite: if the model divides by something "
        "of the minibatch's own rows, such as their standard deviation, it may be zero there; "
        f"compute it before the run. Else t{way_out}"
    )


def _find_nonfinite_sites(
    model: SubsampledModel, position: Array, arguments: Arguments
) -> dict[str, str]:
    """What is wrong by the sites' names, such as how many values are not finite."""
    is_elsewhere = bool(arguments.host_arrays or arguments.sharded_arrays)
    most = _MAX_DIAGNOSED_ROWS if is_elsewhere else max((p.size for p in model.plates), default=0)
    rows = {p.name: jnp.arange(min(p.size, most)) for p in model.plates}
    z = model.unravel(position)
    values = model.constrain(z, arguments)
    run, own, arguments = insert_local_values(
        model.local_latents, model.with_subsample_indices(rows, model.rng_key), z, rows, arguments
    )
    if model.local_latents is not None:
        values = values | model.local_latents.constrain(own)
    if (local := model.resampled_latents) is not None:
        assert model.rng_key is not None
        own_rows = rows[local.plate.name]
        values |= resample_local_values(
            model.with_subsample_indices(rows), local, values, own_rows, arguments, model.rng_key
        )
    args, kwargs = as_jax_arrays((arguments.args, arguments.kwargs))
    culprits = {}
    with numpyro.validation_enabled(False):  # it would stop at the first bad value
        for name, site in trace(substitute(run, data=values)).get_trace(*args, **kwargs).items():
            if site["type"] != "sample":
                continue
            if bad := _count_nonfinite(site):
                culprits[name] = f"{bad[0]} of {bad[1]} values"
            elif wrong := _find_invalid_parameters(site["fn"]):
                culprits[name] = wrong
    return culprits


def _find_invalid_parameters(fn: Any) -> str:
    """The distribution's parameters that are out of range, as they may be with a finite density."""
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    wrong = []
    for name, constraint in fn.arg_constraints.items():
        value = getattr(fn, name, None)
        if value is None or isinstance(constraint, type(constraints.dependent)):
            continue
        if bad := int((~jnp.asarray(constraint(value))).sum()):
            wrong.append(f"`{name}` of {type(fn).__name__}: {bad} of {jnp.size(value)} values")
    return f"out of range: {', '.join(wrong)}" if wrong else ""


def _count_nonfinite(site: Any) -> tuple[int, int] | None:
    """How many of a site's log densities are not finite, of how many; None where all are."""
    log_prob = site["fn"].log_prob(site["value"])
    is_bad = ~jnp.isfinite(log_prob)
    if site["is_observed"]:  # a density may be finite outside of its support
        is_outside = ~site["fn"].support(site["value"])
        if is_outside.shape == is_bad.shape:  # a factor has no value
            is_bad |= is_outside
    bad = int(is_bad.sum())
    return (bad, log_prob.size) if bad else None
