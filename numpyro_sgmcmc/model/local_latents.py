r"""Local latent variables: latent sites inside the subsampled plate, and their values.

:class:`LocalLatents` describes the sites. The values of all rows, :class:`LocalValues`, travel with
the model's arguments, so that an evaluation of the potential on some rows finds those rows' values.

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

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
from numpyro.distributions import biject_to
from numpyro.handlers import seed, substitute
from numpyro.infer.util import constrain_fn

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import Indices, Plate
from numpyro_sgmcmc.errors import InvalidArgumentError
from numpyro_sgmcmc.model.handlers import trace_run
from numpyro_sgmcmc.model.trace import LatentSite, ModelTrace, site_slices

_LOCAL_VALUES_KWARG = "_local_values"


class LocalValues(NamedTuple):
    """Local values of all rows.

    With slopes, local values move with the globals, which are then free to move although the data
    determine local values tightly. The change of variables has volume one.
    """

    # Unconstrained values of the sites that are updated by HMC, those of a row side by side, shape
    # `(N, k)`; with slopes, what they differ by from `slope @ globals`.
    hmc_position: Array
    gibbs_values: dict[str, Array]  # of the sites that `gibbs_fn` samples, `(N, ...)` each
    slope: Array | None = None  # derivatives of rows' conditional modes in the globals, `(N, k, d)`

    def get_unconstrained(self, global_position: Array) -> Array:
        """Return the unconstrained values of the sites that are updated by HMC."""
        if self.slope is None:
            return self.hmc_position
        moved = jnp.matmul(self.slope, global_position, precision=lax.Precision.HIGHEST)
        return self.hmc_position + moved

    def with_slope(self, slope: Array, global_position: Array) -> LocalValues:
        """Return the same values with other slopes."""
        unconstrained = self.get_unconstrained(global_position)
        negative = self._replace(hmc_position=unconstrained, slope=-slope)
        hmc_position = negative.get_unconstrained(global_position)
        return self._replace(hmc_position=hmc_position, slope=slope)

    def take(self, indices: Array) -> BatchLocalValues:
        """Return the values of some rows."""
        return BatchLocalValues(*jax.tree.map(lambda x: x[indices], self))

    def put(self, indices: Array, values: BatchLocalValues) -> LocalValues:
        """Return the values with those of some rows replaced; each row occurs once."""
        hmc_position, gibbs_values = jax.tree.map(
            lambda x, new: x.at[indices].set(new, unique_indices=True), self[:2], values[:2]
        )
        return self._replace(hmc_position=hmc_position, gibbs_values=gibbs_values)


class BatchLocalValues(LocalValues):
    """Local values of the rows of one evaluation of the model, in their order."""


@dataclass(frozen=True, eq=False)
class LocalLatents:
    """The latent sites inside the subsampled plate."""

    plate: Plate  # the subsampled plate
    hmc_sites: tuple[LatentSite, ...]  # the sites that are updated by HMC
    gibbs_sites: tuple[LatentSite, ...]  # the sites that `gibbs_fn` samples
    gibbs_fn: Callable | None = None  # the user's function, or None
    # how often it is called for values that are dropped after a step; None for values that are kept
    num_sweeps: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all local sites."""
        return tuple(s.name for s in (*self.hmc_sites, *self.gibbs_sites))

    @property
    def hmc_dim(self) -> int:
        """Unconstrained coordinates per row that HMC updates."""
        return sum(s.size for s in self.hmc_sites)

    def unravel(self, hmc_position: Array) -> dict[str, Array]:
        """Return unconstrained values in the model's layout, from shape ``(rows, k)``."""
        values, slices = {}, site_slices(self.hmc_sites)
        for s in self.hmc_sites:
            rows = hmc_position[:, slices[s.name]].reshape(len(hmc_position), *s.shape)
            values[s.name] = jnp.moveaxis(rows, 0, s.row_axis)
        return values

    def to_model_layout(self, gibbs_values: Mapping[str, Array]) -> dict[str, Array]:
        """Return values of the Gibbs sites in the model's layout, from shapes ``(rows, ...)``."""
        return {s.name: jnp.moveaxis(gibbs_values[s.name], 0, s.row_axis) for s in self.gibbs_sites}

    def to_row_layout(self, gibbs_values: Mapping[str, Array]) -> dict[str, Array]:
        """Return values of the Gibbs sites as ``(rows, ...)``, from the model's layout."""
        return {s.name: jnp.moveaxis(gibbs_values[s.name], s.row_axis, 0) for s in self.gibbs_sites}

    def to_unconstrained_sites(
        self, values: LocalValues, global_position: Array
    ) -> dict[str, Array]:
        """Return all local sites in the model's layout; those of HMC are unconstrained."""
        hmc_sites = self.unravel(values.get_unconstrained(global_position))
        return {**hmc_sites, **self.to_model_layout(values.gibbs_values)}

    def constrain(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Return the local sites among ``values``, constrained."""
        supports = {s.name: s.support for s in self.hmc_sites}
        return {
            k: biject_to(supports[k])(values[k]) if k in supports else values[k]
            for k in self.names
            if k in values
        }

    def make_zero_values(self) -> LocalValues:
        """Return values of zero for all rows, as a template of shapes and types."""
        num = self.plate.size
        return LocalValues(
            jnp.zeros((num, self.hmc_dim)),
            {s.name: jnp.zeros((num, *s.shape), s.dtype) for s in self.gibbs_sites},
        )


def find_local_latents(model_trace: ModelTrace) -> LocalLatents | None:
    """Return the latent sites inside the subsampled plate, or None where there are none."""
    if not model_trace.local_sites:
        return None
    gibbs = model_trace.gibbs
    sites: dict[bool, list[LatentSite]] = {False: [], True: []}  # by whether `gibbs_fn` samples it
    for site in model_trace.local_sites:
        is_gibbs_site = site.name in gibbs.site_names
        axis = len(site.batch_shape) + site.plate_frames[0].dim
        shape = site.shape if is_gibbs_site else site.unconstrained_shape
        assert shape is not None
        row_shape = shape[:axis] + shape[axis + 1 :]
        latent = LatentSite(site.name, row_shape, site.support, axis, site.dtype)
        sites[is_gibbs_site].append(latent)
    (plate,) = model_trace.plates.values()
    hmc_sites, gibbs_sites = map(tuple, sites.values())
    return LocalLatents(plate, hmc_sites, gibbs_sites, gibbs.gibbs_fn, gibbs.num_sweeps)


def select_collected_sites(
    local_latents: LocalLatents | None, collect_local_sites: bool | Sequence[str]
) -> tuple[str, ...]:
    """Return the names of the local sites that draws hold."""
    if local_latents is None or not collect_local_sites:
        return ()
    if isinstance(collect_local_sites, bool):
        return local_latents.names
    unknown = sorted(set(collect_local_sites) - set(local_latents.names))
    if unknown:
        raise InvalidArgumentError(
            f"`collect_local_sites` names '{unknown[0]}', which is not latent inside the "
            "subsampled plate.",
            f"name some of {sorted(local_latents.names)}, or pass True for all.",
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
) -> tuple[Callable, Any, Arguments]:
    """Return the model, the unconstrained values and the arguments with local values in place.

    :param arguments: with local values, or without any: then with default values.
    """
    if local_latents is None:
        return model, z, arguments
    values = arguments.kwargs.get(_LOCAL_VALUES_KWARG)
    arguments = arguments.without_kwarg(_LOCAL_VALUES_KWARG)
    rows = jnp.asarray(indices[local_latents.plate.name])
    if values is None:
        values = _default_local_values(local_latents, model, z, len(rows), arguments)
    if not isinstance(values, BatchLocalValues):
        values = values.take(rows)
    if local_latents.gibbs_sites:
        model = substitute(model, data=local_latents.to_model_layout(values.gibbs_values))
    hmc_position = values.hmc_position
    if values.slope is not None:
        hmc_position = values.get_unconstrained(ravel_pytree(z)[0])
    return model, {**z, **local_latents.unravel(hmc_position)}, arguments


def _default_local_values(
    local_latents: LocalLatents, model: Callable, z: Any, num_rows: int, arguments: Arguments
) -> BatchLocalValues:
    """Return values for rows without any: zeros in unconstrained space, and prior samples of the
    sites that ``gibbs_fn`` samples, whose support need not contain zero.
    """
    hmc_position = jnp.zeros((num_rows, local_latents.hmc_dim))
    if not local_latents.gibbs_sites:
        return BatchLocalValues(hmc_position, {})
    model, z = seed(model, random.key(0)), {**z, **local_latents.unravel(hmc_position)}
    others = lax.stop_gradient(constrain_fn(model, arguments.args, arguments.kwargs, z))
    sites = trace_run(model, arguments, others)
    values = {s.name: sites[s.name]["value"] for s in local_latents.gibbs_sites}
    return BatchLocalValues(hmc_position, local_latents.to_row_layout(values))


def resample_local_values(
    model: Callable,
    local_latents: LocalLatents,
    other_values: Mapping[str, Array],
    indices: Array | np.ndarray,
    arguments: Arguments,
    rng_key: Array,
) -> dict[str, Array]:
    """Sample the Gibbs sites from their prior and then by sweeps, in the model's layout."""
    assert local_latents.num_sweeps is not None
    prior_key, sweep_key = random.split(rng_key)
    sites = trace_run(seed(model, prior_key), arguments, other_values)
    prior_values = {s.name: jnp.asarray(sites[s.name]["value"]) for s in local_latents.gibbs_sites}

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
    """Sample the Gibbs sites of some rows, and check names, shapes and types of the result.

    :param current_values: the values before, in the model's layout.
    """
    gibbs_fn, arguments = local_latents.gibbs_fn, arguments.without_kwarg(_LOCAL_VALUES_KWARG)
    assert gibbs_fn is not None
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
    for s in local_latents.gibbs_sites:
        dtype = jnp.result_type(values[s.name])
        if not np.can_cast(dtype, s.dtype, "same_kind"):
            raise InvalidArgumentError(
                f"`gibbs_fn` returns {dtype} values of '{s.name}', whose type is {s.dtype}.",
                "return samples of the site, not probabilities.",
                "gibbs-fn",
            )
    return {s.name: jnp.asarray(values[s.name]).astype(s.dtype) for s in local_latents.gibbs_sites}
