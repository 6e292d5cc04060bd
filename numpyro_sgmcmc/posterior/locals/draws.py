r"""The user's draws of local values: one call for values that stay, sweeps for such as are dropped.

Values that nobody keeps are drawn anew for each minibatch, from their prior given the globals and
by so many calls of ``gibbs_fn``. With the sweeps long enough they come from
:math:`p(z_S \mid \theta, y_S)`, and the mean of
:math:`\nabla_\theta \log p(y_S, z_S \mid \theta)` is the gradient of the likelihood with z
integrated out (Fisher's identity): to the sampler the potential is one that draws random keys.

Reference: Patterson and Teh (2013), *Stochastic gradient Riemannian Langevin dynamics on the
probability simplex*, section 4.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from numpyro.handlers import seed, substitute, trace

from numpyro_sgmcmc.checks import InvalidArgumentError
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.posterior.locals.sites import LocalLatents, without_local_values

__all__ = ["call_gibbs_fn", "get_gibbs_fn_keywords", "resample_local_values"]


def resample_local_values(
    model: Callable,
    local_latents: LocalLatents,
    other_values: Mapping[str, Array],
    indices: Array | np.ndarray,
    arguments: Arguments,
    rng_key: Array,
) -> dict[str, Array]:
    """Values of the sites that ``gibbs_fn`` draws, from nothing, as the model sees them.

    :param model: the model, its plates answered by the rows.
    :param other_values: values of all other latent sites.
    :param indices: the very rows that the plate answers with.
    """
    assert local_latents.num_sweeps is not None
    prior_key, sweep_key = random.split(rng_key)
    drawn = trace(substitute(seed(model, prior_key), data=dict(other_values))).get_trace(
        *arguments.args, **arguments.kwargs
    )
    first = {s.name: jnp.asarray(drawn[s.name]["value"]) for s in local_latents.gibbs_sites}

    def sweep(values: dict[str, Array], key: Array) -> tuple[dict[str, Array], None]:
        return call_gibbs_fn(local_latents, values, other_values, indices, arguments, key), None

    return lax.scan(sweep, first, random.split(sweep_key, local_latents.num_sweeps))[0]


def get_gibbs_fn_keywords(gibbs_fn: Callable) -> tuple[str, ...]:
    """The keywords of a ``gibbs_fn``: the model's arguments are among them where it takes them."""
    always = ("rng_key", "gibbs_sites", "hmc_sites", "rows")
    try:
        taken = inspect.signature(gibbs_fn).parameters
    except (TypeError, ValueError):  # some built-in functions have none
        return always
    takes_any = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    return always + tuple(k for k in ("model_args", "model_kwargs") if takes_any or k in taken)


def call_gibbs_fn(
    local_latents: LocalLatents,
    current_values: dict[str, Array],
    other_values: Mapping[str, Array],
    indices: Array | np.ndarray,
    arguments: Arguments,
    rng_key: Array,
) -> dict[str, Array]:
    """What ``gibbs_fn`` draws for some rows, checked for its names, shapes and types.

    :param current_values: the values before, as the model sees them.
    :param other_values: values of all other latent sites.
    :raises ValueError: for a function that returns something else.
    """
    assert local_latents.gibbs_fn is not None
    arguments = without_local_values(arguments)
    keywords = {
        "rng_key": rng_key,
        "gibbs_sites": current_values,
        "hmc_sites": other_values,
        "rows": indices,
        "model_args": arguments.args,
        "model_kwargs": arguments.kwargs,
    }
    found = local_latents.gibbs_fn(
        **{k: keywords[k] for k in get_gibbs_fn_keywords(local_latents.gibbs_fn)}
    )
    if not isinstance(found, Mapping):
        raise InvalidArgumentError(
            f"`gibbs_fn` returns {type(found).__name__}, but must return a dict of new values of "
            f"{sorted(current_values)}."
        )
    expected = {k: v.shape for k, v in current_values.items()}
    shapes = {k: jnp.shape(v) for k, v in found.items()}
    if shapes != expected:
        raise InvalidArgumentError(
            f"`gibbs_fn` returns values of shapes {shapes}, but must return {expected}: a value "
            "for each row of the minibatch at each of `gibbs_sites`."
        )
    for s in local_latents.gibbs_sites:
        if not np.can_cast(jnp.result_type(found[s.name]), s.dtype, "same_kind"):
            raise InvalidArgumentError(
                f"`gibbs_fn` returns {jnp.result_type(found[s.name])} values of '{s.name}', whose "
                f"type is {s.dtype}: it must return draws (not probabilities)."
            )
    return {s.name: jnp.asarray(found[s.name]).astype(s.dtype) for s in local_latents.gibbs_sites}
