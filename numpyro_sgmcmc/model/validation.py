"""Check that a NumPyro model can be sampled with minibatches.

:func:`validate_model` runs the checks that need the traced model alone: latent sites, observed
data, sharded arrays and, in :mod:`~numpyro_sgmcmc.model.additivity`, additivity over rows.
:func:`check_conditional_independence` checks that the rows of a model with local latent variables
are independent given the other sites. Each check raises an error that names the site, plate or
argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.handlers import seed, substitute
from numpyro.infer import init_to_sample

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.sharded_array import ShardedArray
from numpyro_sgmcmc.errors import (
    EnumerationWarning,
    InvalidArgumentError,
    InvalidModelError,
    LocalLatentsWarning,
    PlateWarning,
    ShardingWarning,
    import_optional,
    warn_user,
)
from numpyro_sgmcmc.jaxpr import propagate_labels
from numpyro_sgmcmc.model.additivity import check_factorises_over_plates
from numpyro_sgmcmc.model.enumeration import check_rows_are_independent
from numpyro_sgmcmc.model.handlers import set_subsample_indices, trace_run
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.trace import ModelTrace, SampleSite, is_fixed_support

# The check of independence compares a minibatch with its rows: rows per minibatch, number of
# minibatches, and tolerances relative to the terms, well above rounding.
_NUM_CHECKED_ROWS = 5
_NUM_INDEPENDENCE_CHECKS = 4
_TOLERANCE_FLOAT32 = 1e-3
_TOLERANCE_FLOAT64 = 1e-8

_UNOBSERVED_SITE_FIX = (
    "pass the data of the site (is an argument None?). If it replicates data, remove it from the "
    "model; numpyro_sgmcmc.posterior_predictive and numpyro.infer.Predictive replicate data."
)


def validate_model(model_trace: ModelTrace) -> dict[str, tuple[str, ...]]:
    """Check that a model can be sampled, from its sites and plates to what its rows do.

    :return: the sites of :func:`~numpyro_sgmcmc.model.additivity.check_factorises_over_plates`.
    """
    _check_local_sites(model_trace)
    _check_enumerated_sites(model_trace)
    _check_global_sites(model_trace)
    _check_sharding(model_trace)
    size_dependent_sites = check_factorises_over_plates(model_trace)
    if model_trace.local_sites:
        for site in _find_unused_sites(model_trace, model_trace.local_sites):
            warn_user(
                f"Site '{site.name}' is updated in every step, although no other site depends on "
                "it.",
                LocalLatentsWarning,
                _UNOBSERVED_SITE_FIX,
                "unobserved-site",
            )
    for site in model_trace.sample_sites:
        for dim in site.unplated_dims:  # as NumPyro does
            warn_user(
                f"Missing a plate statement for batch dimension {dim} at site '{site.name}'.",
                PlateWarning,
                "add a plate, or `.to_event` if the dimension belongs to a row.",
                "missing-plate",
            )
    return size_dependent_sites


# --- Sites --------------------------------------------------------------------------------------


def _check_local_sites(model_trace: ModelTrace) -> None:
    """Check that latent sites inside subsampled plates can be updated row by row."""
    plates, gibbs = model_trace.unsharded_plates, model_trace.gibbs
    sites = model_trace.local_sites
    for site in sites:
        if len(site.plate_frames) > 1:
            listed = " and ".join(f"'{f.name}'" for f in site.plate_frames)
            raise InvalidModelError(
                f"Site '{site.name}' has a latent value for each pair of rows of {listed}.",
                "give one of the plates no subsample_size, or integrate the site out.",
                "local-latents-plates",
            )
        if site.name not in gibbs.site_names:
            _check_latent_site(model_trace, site)
    missing = sorted(set(gibbs.site_names) - {s.name for s in sites})
    if missing:
        raise InvalidArgumentError(
            f"`gibbs_sites` names '{missing[0]}', which is not latent inside a subsampled plate.",
            "name latent sites inside the plate, or give the plate a subsample_size.",
            "gibbs-sites",
        )
    if not sites:
        return
    name = _first_local_site(model_trace)
    if gibbs.gibbs_fn is not None and name not in gibbs.site_names:
        raise InvalidArgumentError(
            f"Site '{name}' is latent inside the plate, but `gibbs_fn` does not sample it.",
            "sample all latent sites of the plate by `gibbs_fn`, or none of them.",
            "gibbs-sites",
        )
    if len(plates) > 1:
        raise InvalidModelError(
            f"Site '{name}' is latent inside one of the subsampled plates {sorted(plates)}.",
            "give only one of the plates a subsample_size.",
            "local-latents-plates",
        )
    if not any(s.is_observed and s.plate_frames for s in model_trace.sample_sites):
        raise InvalidModelError(
            f"Site '{name}' is latent inside the plate '{next(iter(plates))}', which has no "
            "observed data.",
            "pass the plate's data (is an argument None?), or move the site out of the plate.",
            "unobserved-plate",
        )


def _check_enumerated_sites(model_trace: ModelTrace) -> None:
    """Check that discrete sites can be summed out of each row, and warn of those not marked."""
    if (enumerated := model_trace.enumerated_sites) is None:
        return
    import_optional("funsor", "A model with discrete sites", "enumeration")
    sites = [site for site in model_trace.sample_sites if site.is_enumerated]
    for site in model_trace.sample_sites:
        names = [f.name for f in site.plate_frames]
        if site.is_enumerated:
            _check_latent_site(model_trace, site)
        if (site.is_enumerated or enumerated.plate in names) and names != [enumerated.plate]:
            listed = " and ".join(f"'{n}'" for n in sorted({enumerated.plate, *names}))
            raise InvalidModelError(
                f"Site '{sites[0].name}' is discrete, but site '{site.name}' is inside the "
                f"subsampled plates {listed}.",
                "give one of the plates no subsample_size.",
                "enumeration-plates",
            )
    check_rows_are_independent(
        model_trace.model_with_params, enumerated, model_trace.plates, model_trace.arguments
    )
    for site in sites:
        if not site.is_marked:
            warn_user(
                f"Discrete site '{site.name}' is summed out, but not marked for enumeration.",
                EnumerationWarning,
                'mark it by infer={"enumerate": "parallel"}, which does not change the draws.',
                "enumeration-mark",
            )


def _first_local_site(model_trace: ModelTrace) -> str:
    """Return the name of a local site, one of HMC if there is any."""
    names = [site.name for site in model_trace.local_sites]
    return min(names, key=lambda name: name in model_trace.gibbs.site_names)


def _check_global_sites(model_trace: ModelTrace) -> None:
    """Check that global latent sites have a gradient, and that data are the minibatch's."""
    for site in model_trace.sample_sites:
        if site.is_observed:
            _check_observed_shape(site)
        elif site.is_global:
            _check_latent_site(model_trace, site)
    global_sites = [site for site in model_trace.sample_sites if site.is_global]
    has_coordinates = any(0 not in (site.unconstrained_shape or ()) for site in global_sites)
    if model_trace.local_sites and not has_coordinates:
        raise InvalidModelError(
            "All latent sites of the model are inside the subsampled plate.",
            "sample each row by itself, for example with NUTS, because the rows have independent "
            "posteriors and minibatches save nothing.",
            "only-local-latents",
        )


def _find_unused_sites(model_trace: ModelTrace, sites: Sequence[SampleSite]) -> list[SampleSite]:
    """Return the latent sites among these on which the density of no other site depends."""
    indices = {p.name: np.arange(p.subsample_size) for p in model_trace.plates.values()}
    values = {s.name: jax.ShapeDtypeStruct(s.shape, s.dtype) for s in sites}

    def log_probs(values: dict[str, Array], arguments: Arguments) -> dict[str, Array]:
        def get_value(site: dict[str, Any]) -> Any:
            return values[site["name"]] if site["name"] in values else init_to_sample(site)

        model = substitute(
            seed(model_trace.model_with_params, random.key(0)), substitute_fn=get_value
        )
        traced = trace_run(set_subsample_indices(model, indices), arguments)
        return {n: s["fn"].log_prob(s["value"]) for n, s in traced.items() if s["type"] == "sample"}

    jaxpr, shapes = jax.make_jaxpr(log_probs, return_shape=True)(values, model_trace.arguments)
    labels = [frozenset({name}) for name in sorted(values)]
    outputs = zip(sorted(shapes), propagate_labels(jaxpr, labels), strict=True)
    used = frozenset[str]().union(*(found - {name} for name, found in outputs))
    return [s for s in sites if s.name not in used]


def _check_latent_site(model_trace: ModelTrace, site: SampleSite) -> None:
    """Check that a latent site has a gradient, and a local one a fixed support."""
    described = f"Site '{site.name}'"
    if site.is_local:
        described += f" inside the plate '{site.plate_frames[0].name}'"
    if site.support.is_discrete and _find_unused_sites(model_trace, [site]):
        raise InvalidModelError(
            f"{described} has no data, and no other site depends on it.",
            _UNOBSERVED_SITE_FIX,
            "unobserved-site",
        )
    if site.is_enumerated:
        return
    if site.support.is_discrete and site.is_local:
        raise InvalidModelError(
            f"{described} is discrete, but its states cannot be enumerated.",
            f"sum it out of the likelihood, sample it by gibbs_fn=... and gibbs_sites="
            f"['{site.name}'], or use a Categorical over the states that matter.",
            "discrete-site",
        )
    if site.is_enumerable and site.full_plates and not model_trace.plates:
        raise InvalidModelError(
            f"{described} is discrete and inside the plate '{site.full_plates[-1]}', which is not "
            "subsampled.",
            "give the plate a subsample_size below its size, so that the site is summed out of "
            "each row, or use NUTS, which sums it out on all rows.",
            "discrete-site",
        )
    if site.support.is_discrete:
        raise InvalidModelError(
            f"{described} is discrete and has no gradient.",
            f"sample it by Gibbs([(DiscreteGibbs(kernel.model), ['{site.name}']), (kernel, None)]) "
            "of numpyro.infer, or sum it out of the model by hand. (It is not summed out here, "
            "because the marginal log likelihood would not be additive over rows.)",
            "discrete-site",
        )
    if site.is_delta:
        raise InvalidModelError(
            f"{described} has a delta distribution.", "use numpyro.deterministic.", "delta-site"
        )
    if site.is_local and not is_fixed_support(site.support):
        raise InvalidModelError(
            f"{described} has bounds that are taken from data or from other sites.",
            "use a site with fixed bounds and rescale it, such as a Uniform(0, 1) site times an "
            "upper bound.",
            "unsupported-support",
        )
    if site.unconstrained_shape is None:
        raise InvalidModelError(
            f"{described} has support {site.support}, which has no map to unconstrained space.",
            f"reparametrise the site{', or sample it by gibbs_fn' if site.is_local else ''}.",
            "unsupported-support",
        )


def _check_observed_shape(site: SampleSite) -> None:
    """Check that data have one entry per row of a minibatch."""
    event_dim = len(site.event_shape)
    for frame in site.plate_frames:
        if len(site.shape) >= event_dim - frame.dim:
            num_rows = site.shape[frame.dim - event_dim]
            if num_rows not in (1, frame.size):
                raise InvalidModelError(
                    f"Site '{site.name}' observes {num_rows} rows, but the minibatch of the plate "
                    f"'{frame.name}' has {frame.size}.",
                    "index the data by the plate's indices. With handlers.condition(model, data), "
                    "pass one value for each row of the plate.",
                    "data-not-indexed",
                )
    try:
        np.broadcast_shapes(site.batch_shape, site.shape[: len(site.shape) - event_dim])
    except ValueError:
        raise InvalidModelError(
            f"Site '{site.name}' observes data of shape {site.shape}, but its distribution has "
            f"shape {site.batch_shape + site.event_shape}.",
            "make the two shapes agree.",
            "data-shape",
        ) from None


# --- Sharded arrays -----------------------------------------------------------------------------


def _check_sharding(model_trace: ModelTrace) -> None:
    """Check that all row arrays are sharded alike, and that no latent site is inside their plates.

    Warn of minibatches that do not divide evenly among the devices.
    """
    shards, row_lookups = model_trace.shards, model_trace.row_lookups
    if shards is None:
        return
    arrays = model_trace.arguments.sharded_arrays
    for array in arrays:
        if not any(lookup.array is array for lookup in row_lookups):
            raise InvalidArgumentError(
                f"{array!r} is not indexed by a subsampled plate's indices.",
                "index it by these, or pass an array that all devices hold.",
                "sharded-arrays",
            )
    if len({x.shards for x in arrays}) > 1:
        listed = ", ".join(
            f"{x!r} with {list(x.shards.rows_per_shard)} rows over {x.shards.mesh.shape}"
            for x in arrays
        )
        raise InvalidArgumentError(
            "The sharded arrays are not sharded in the same way.",
            f"use one mesh and the same rows per device for {listed}.",
            "sharded-arrays",
        )
    for array, name in row_lookups:
        if not isinstance(array, ShardedArray):
            raise InvalidArgumentError(
                f"The plate '{name}' indexes sharded arrays and {array!r}, which is not sharded.",
                "make all arrays of the plate ShardedArrays. If rows stay on the host, use "
                "ShardedArray(HostArray(rows)).",
                "sharded-arrays",
            )
    num_shards, min_rows = len(shards.rows_per_shard), min(shards.rows_per_shard)
    for name in dict.fromkeys(lookup.plate for lookup in row_lookups):
        plate, requested = model_trace.plates[name], model_trace.unsharded_plates[name]
        if plate.subsample_size_per_shard > min_rows:
            raise InvalidArgumentError(
                f"Plate '{name}' has subsample_size={requested.subsample_size}, which is "
                f"{plate.subsample_size_per_shard} rows per device, but a device holds only "
                f"{min_rows} rows.",
                f"use a subsample_size of at most {num_shards * min_rows}.",
                "sharded-arrays",
            )
        if plate.subsample_size != requested.subsample_size:
            warn_user(
                f"Plate '{name}' has subsample_size={requested.subsample_size}, which is not a "
                f"multiple of the {num_shards} devices.",
                ShardingWarning,
                f"use subsample_size={plate.subsample_size}, the size of this run "
                f"({plate.subsample_size_per_shard} rows per device).",
                "uneven-shards",
            )
    if model_trace.local_sites:
        raise InvalidModelError(
            f"Site '{_first_local_site(model_trace)}' is latent inside the subsampled plate, whose "
            "rows are sharded.",
            "pass arrays that all devices hold, because local latent variables of sharded rows are "
            "not supported.",
            "sharded-arrays",
        )


# --- Local latent variables ---------------------------------------------------------------------


def check_conditional_independence(
    potential: Potential, arguments: Arguments, position: Array
) -> None:
    """Check that rows with local latent variables are independent given the sites outside.

    A minibatch's potential must then be the mean of the potentials of its rows. It is not where a
    row's local value is used by other rows, or by a site outside of the plate.

    :param arguments: with the values of the sites that ``gibbs_fn`` samples.
    """
    (plate,) = potential.plates
    rng = np.random.default_rng(3)
    num_rows = min(_NUM_CHECKED_ROWS, plate.size)
    tolerance = _TOLERANCE_FLOAT32 if position.dtype == np.float32 else _TOLERANCE_FLOAT64
    for _ in range(_NUM_INDEPENDENCE_CHECKS):
        # Sorted, because an evaluation of all rows takes them in order.
        rows = np.sort((rng.integers(plate.size) + np.arange(num_rows)) % plate.size)
        q = position + jnp.asarray(rng.standard_normal(position.size), position.dtype)
        joint, *singles = (
            _evaluate_rows(potential, q, jnp.asarray(x, jnp.int32), arguments)
            for x in (rows, *rows[:, None])
        )
        joint, mean = np.asarray(joint), np.mean(singles, 0)
        scale = 1.0 + np.abs(singles).max(0) + np.abs(joint)
        if (
            np.isfinite(joint[0])
            and np.isfinite(singles).all()
            and (np.abs(joint - mean) > tolerance * scale).any()
        ):
            names = " and ".join(f"'{n}'" for n in potential.local_names)
            raise InvalidModelError(
                f"Site {names} is latent inside the plate '{plate.name}', but the rows of the "
                "plate are dependent.",
                "use the latent values of a row only in sites of the same row, or give the plate "
                "no subsample_size.",
                "dependent-rows",
            )


@partial(jax.jit, static_argnames="potential")
def _evaluate_rows(
    potential: Potential, position: Array, rows: Array, arguments: Arguments
) -> Array:
    """Return the potential and its gradient on some rows, shape ``(1 + d,)``."""
    (plate,) = potential.plates
    return jnp.append(*potential.value_and_grad(position, {plate.name: rows}, arguments))
