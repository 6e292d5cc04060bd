r"""Latent sites inside the subsampled plate that the user's ``gibbs_fn`` samples, and their values.

:class:`LocalLatents` describes the sites. The values of all rows, :class:`LocalValues`, travel with
the model's arguments, so that an evaluation of the potential on some rows finds those rows' values.
Other latent sites inside the plate are coordinates of the potential, as those outside.

Values that are not kept between steps are sampled anew for each minibatch, from their prior given
the globals and then by a number of sweeps of ``gibbs_fn``. With enough sweeps they come from
:math:`p(z_S \mid \theta, y_S)`, and the mean of :math:`\nabla_\theta \log p(y_S, z_S \mid \theta)`
is the gradient of the likelihood with z integrated out (Fisher's identity). To the sampler this is
a potential that needs random keys.

Reference: Patterson and Teh (2013), *Stochastic gradient Riemannian Langevin dynamics on the
probability simplex*, section 4.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from numpyro.handlers import seed, substitute
from numpyro.infer.util import constrain_fn

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import Indices, Plate
from numpyro_sgmcmc.errors import InvalidArgumentError
from numpyro_sgmcmc.model.handlers import trace_run
from numpyro_sgmcmc.model.trace import LatentSite, ModelTrace

_LOCAL_VALUES_KWARG = "_local_values"


class LocalValues(NamedTuple):
    """Local values of all rows."""

    by_site: dict[str, Array]  # shape `(N, ...)` each

    def take(self, rows: Array) -> BatchLocalValues:
        """Return the values of some rows."""
        return BatchLocalValues({name: x[rows] for name, x in self.by_site.items()})

    def put(self, rows: Array, values: BatchLocalValues) -> LocalValues:
        """Return the values with those of some rows replaced; each row occurs once."""
        return LocalValues(
            {
                name: x.at[rows].set(values.by_site[name], unique_indices=True)
                for name, x in self.by_site.items()
            }
        )


class BatchLocalValues(LocalValues):
    """Local values of the rows of one evaluation of the model, in their order."""


@dataclass(frozen=True, eq=False)
class LocalLatents:
    """The latent sites inside the subsampled plate that ``gibbs_fn`` samples."""

    plate: Plate  # the subsampled plate
    sites: tuple[LatentSite, ...]
    gibbs_fn: Callable  # the user's function
    # how often it is called for values that are dropped after a step; None for values that are kept
    num_sweeps: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sites."""
        return tuple(s.name for s in self.sites)

    def to_model_layout(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Return values in the model's layout, from shapes ``(rows, ...)``."""
        return {s.name: jnp.moveaxis(values[s.name], 0, s.row_axis or 0) for s in self.sites}

    def to_row_layout(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Return values as ``(rows, ...)``, from the model's layout."""
        return {s.name: jnp.moveaxis(values[s.name], s.row_axis or 0, 0) for s in self.sites}

    def make_zero_values(self) -> LocalValues:
        """Return values of zero for all rows, as a template of shapes and types."""
        shapes = {s.name: (self.plate.size, *s.shape) for s in self.sites}
        return LocalValues({s.name: jnp.zeros(shapes[s.name], s.dtype) for s in self.sites})


def find_local_latents(model_trace: ModelTrace) -> LocalLatents | None:
    """Return the latent sites that ``gibbs_fn`` samples, or None where there are none."""
    gibbs = model_trace.gibbs
    sites = [site for site in model_trace.local_sites if site.name in gibbs.site_names]
    if not sites:
        return None
    assert gibbs.gibbs_fn is not None
    (plate,) = model_trace.plates.values()
    latent_sites = []
    for site in sites:
        axis = site.row_axis
        row_shape = site.shape[:axis] + site.shape[axis + 1 :]
        latent_sites.append(LatentSite(site.name, row_shape, site.support, axis, site.dtype))
    return LocalLatents(plate, tuple(latent_sites), gibbs.gibbs_fn, gibbs.num_sweeps)


def select_collected_sites(
    local_names: Sequence[str], collect_local_sites: bool | Sequence[str]
) -> tuple[str, ...]:
    """Return the names of the local sites that draws hold."""
    if not (local_names and collect_local_sites):
        return ()
    if isinstance(collect_local_sites, bool):
        return tuple(local_names)
    unknown = sorted(set(collect_local_sites) - set(local_names))
    if unknown:
        raise InvalidArgumentError(
            f"`collect_local_sites` names '{unknown[0]}', which is not latent inside the "
            "subsampled plate.",
            f"use names from {sorted(local_names)}, or pass True for all.",
            "collect-local-sites",
        )
    return tuple(collect_local_sites)


def with_local_values(arguments: Arguments, values: LocalValues) -> Arguments:
    """Return the arguments with local values, of all rows or of those that are evaluated."""
    return arguments.with_kwarg(_LOCAL_VALUES_KWARG, values)


def insert_local_values(
    local_latents: LocalLatents | None,
    model: Callable,
    z: Any,
    indices: Indices,
    arguments: Arguments,
) -> tuple[Callable, Arguments]:
    """Return the model with local values in place, and the arguments without them.

    :param z: unconstrained values of the other sites.
    :param arguments: with local values, or without any: then with samples from their prior.
    """
    if local_latents is None:
        return model, arguments
    values = arguments.kwargs.get(_LOCAL_VALUES_KWARG)
    arguments = arguments.without_kwarg(_LOCAL_VALUES_KWARG)
    if values is None:
        others = constrain_fn(seed(model, random.key(0)), arguments.args, arguments.kwargs, z)
        sites = trace_run(seed(model, random.key(0)), arguments, lax.stop_gradient(others))
        in_layout = {name: sites[name]["value"] for name in local_latents.names}
        return substitute(model, data=in_layout), arguments
    if not isinstance(values, BatchLocalValues):
        values = values.take(jnp.asarray(indices[local_latents.plate.name]))
    return substitute(model, data=local_latents.to_model_layout(values.by_site)), arguments


def resample_local_values(
    model: Callable,
    local_latents: LocalLatents,
    other_values: Mapping[str, Array],
    indices: Array | np.ndarray,
    arguments: Arguments,
    rng_key: Array,
) -> dict[str, Array]:
    """Sample the local sites from their prior and then by sweeps, in the model's layout."""
    assert local_latents.num_sweeps is not None
    prior_key, sweep_key = random.split(rng_key)
    sites = trace_run(seed(model, prior_key), arguments, other_values)
    prior_values = {name: jnp.asarray(sites[name]["value"]) for name in local_latents.names}

    def sweep(values: dict[str, Array], key: Array) -> tuple[dict[str, Array], None]:
        return call_gibbs_fn(local_latents, values, other_values, indices, arguments, key), None

    return lax.scan(sweep, prior_values, random.split(sweep_key, local_latents.num_sweeps))[0]


def get_gibbs_fn_keywords(gibbs_fn: Callable) -> tuple[str, ...]:
    """Return the keywords that a ``gibbs_fn`` is called with.

    The model's arguments are among them where the function takes them.
    """
    always = ("rng_key", "gibbs_sites", "hmc_sites", "rows")
    try:
        parameters = inspect.signature(gibbs_fn).parameters
    except (TypeError, ValueError):  # some built-in functions have no signature
        return always
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return always + tuple(k for k in ("model_args", "model_kwargs") if takes_any or k in parameters)


def call_gibbs_fn(
    local_latents: LocalLatents,
    current_values: dict[str, Array],
    other_values: Mapping[str, Array],
    indices: Array | np.ndarray,
    arguments: Arguments,
    rng_key: Array,
) -> dict[str, Array]:
    """Sample the local sites of some rows, and check names, shapes and types of the result.

    :param current_values: the values before, in the model's layout.
    """
    gibbs_fn, arguments = local_latents.gibbs_fn, arguments.without_kwarg(_LOCAL_VALUES_KWARG)
    keywords = {
        "rng_key": rng_key,
        "gibbs_sites": current_values,
        "hmc_sites": other_values,
        "rows": indices,
        "model_args": arguments.args,
        "model_kwargs": arguments.kwargs,
    }
    values = gibbs_fn(**{k: keywords[k] for k in get_gibbs_fn_keywords(gibbs_fn)})
    if not isinstance(values, Mapping):
        raise InvalidArgumentError(
            f"`gibbs_fn` returns {type(values).__name__}, which is not a dict.",
            f"return a dict with new values of {sorted(current_values)}.",
            "gibbs-fn",
        )
    expected = {k: v.shape for k, v in current_values.items()}
    shapes = {k: jnp.shape(v) for k, v in values.items()}
    if shapes != expected:
        raise InvalidArgumentError(
            f"`gibbs_fn` returns values of shapes {shapes}.",
            f"return {expected}: a value for each row of the minibatch at each of `gibbs_sites`.",
            "gibbs-fn",
        )
    for s in local_latents.sites:
        dtype = jnp.result_type(values[s.name])
        if not np.can_cast(dtype, s.dtype, "same_kind"):
            raise InvalidArgumentError(
                f"`gibbs_fn` returns {dtype} values of '{s.name}', whose type is {s.dtype}.",
                "return samples of the site, not probabilities.",
                "gibbs-fn",
            )
    return {s.name: jnp.asarray(values[s.name]).astype(s.dtype) for s in local_latents.sites}
