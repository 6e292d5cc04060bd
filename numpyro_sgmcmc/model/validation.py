"""Check that a NumPyro model can be sampled with minibatches.

:func:`validate_model` runs the checks that need the traced model alone: latent sites, observed
data, sharded arrays and, in :mod:`~numpyro_sgmcmc.model.additivity`, additivity over rows.
:func:`check_local_latents_options` checks a kernel's options for a model with local latent
variables, and :func:`check_conditional_independence` that its rows are independent given the other
sites. Each check raises an error that names the site, plate or argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.row_proxies import RowLookup
from numpyro_sgmcmc.data.sharded_array import ShardedArray, Shards
from numpyro_sgmcmc.data.subsampling import Plate
from numpyro_sgmcmc.errors import (
    InvalidArgumentError,
    InvalidModelError,
    PlateWarning,
    ShardingWarning,
    warn_user,
)
from numpyro_sgmcmc.model.additivity import check_factorises_over_plates
from numpyro_sgmcmc.model.local_latents import (
    BatchLocalValues,
    LocalValues,
    select_collected_sites,
    with_local_values,
)
from numpyro_sgmcmc.model.local_moves import pointwise_local_potentials
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.trace import ModelTrace, SampleSite

# The check of independence compares a minibatch with its rows: rows per minibatch, number of
# minibatches, and tolerances relative to the terms, well above rounding.
_NUM_CHECKED_ROWS = 5
_NUM_INDEPENDENCE_CHECKS = 4
_TOLERANCE_FLOAT32 = 1e-3
_TOLERANCE_FLOAT64 = 1e-8


def validate_model(model_trace: ModelTrace) -> None:
    """Check that a model can be sampled, from its sites and plates to what its rows do.

    :raises ValueError: naming the site, plate or argument that cannot be used.
    """
    check_local_sites(model_trace)
    check_global_sites(model_trace)
    check_sharding(model_trace)
    check_factorises_over_plates(model_trace)
    warn_missing_plates(model_trace)


# --- Global sites and observed data -------------------------------------------------------------


def check_global_sites(model_trace: ModelTrace) -> None:
    """Check that latent sites outside of plates have a gradient, and that data are the minibatch's.

    :raises ValueError: naming the site.
    """
    for site in model_trace.sample_sites:
        if site.is_observed:
            _check_observed_shape(site)
        elif site.is_global:
            _check_differentiable(site)
    global_sites = [site for site in model_trace.sample_sites if site.is_global]
    has_coordinates = any(0 not in (site.unconstrained_shape or ()) for site in global_sites)
    if model_trace.local_sites and not has_coordinates:
        raise InvalidModelError(
            "All latent sites of the model are inside the subsampled plate.",
            "sample each row by itself, for example with NUTS: the rows have independent "
            "posteriors, and minibatches save nothing.",
            "only-local-latents",
        )


def _check_differentiable(site: SampleSite) -> None:
    """Check that a global latent site has a gradient."""
    if site.support.is_discrete:
        raise InvalidModelError(
            f"Site '{site.name}' is discrete and has no gradient.",
            f"sample it by Gibbs([(DiscreteGibbs(kernel.model), ['{site.name}']), (kernel, None)]) "
            "of numpyro.infer.",
            "discrete-site",
        )
    if site.is_delta:
        raise InvalidModelError(
            f"Site '{site.name}' has a delta distribution.",
            "use numpyro.deterministic.",
            "delta-site",
        )
    if site.unconstrained_shape is None:
        raise InvalidModelError(
            f"Site '{site.name}' has support {site.support}, without a map to unconstrained space.",
            "reparametrise the site.",
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
                    "index the data by the plate's indices.",
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


def warn_missing_plates(model_trace: ModelTrace) -> None:
    """Warn, as NumPyro does, of sites in plates that have further batch dimensions."""
    for site in model_trace.sample_sites:
        for dim in site.unplated_dims:
            warn_user(
                f"Missing a plate statement for batch dimension {dim} at site '{site.name}'.",
                PlateWarning,
                "add a plate, or `.to_event` if the dimension belongs to a row.",
                "missing-plate",
            )


# --- Sharded arrays -----------------------------------------------------------------------------


def check_sharding(model_trace: ModelTrace) -> None:
    """Check that all row arrays are sharded alike, and that no latent site is inside their plates.

    Warn of minibatches that do not divide evenly among the devices.

    :raises ValueError: naming array, plate or site.
    """
    shards = model_trace.shards
    if shards is None:
        return
    _check_equal_sharding(model_trace.arguments.sharded_arrays, model_trace.row_lookups)
    num_shards = len(shards.rows_per_shard)
    warned = set()
    for array, name in model_trace.row_lookups:
        plate = model_trace.unsharded_plates[name]
        if not isinstance(array, ShardedArray):
            raise InvalidArgumentError(
                f"The plate '{name}' indexes {array!r} and sharded arrays.",
                "make all of its arrays ShardedArrays, or ShardedArray(HostArray(rows)) where rows "
                "stay on the host.",
                "sharded-arrays",
            )
        _check_shard_sizes(plate, shards)
        num_rows = model_trace.plates[name].subsample_size
        if num_rows != plate.subsample_size and name not in warned:
            warned.add(name)
            warn_user(
                f"Plate '{name}' has subsample_size={plate.subsample_size}, not a multiple of "
                f"{num_shards} devices.",
                ShardingWarning,
                f"use subsample_size={num_rows}, which is used now: {num_rows // num_shards} rows "
                "per device.",
                "uneven-shards",
            )
    if model_trace.local_sites:
        raise InvalidModelError(
            f"Site '{_first_local_site(model_trace)}' is latent inside the subsampled plate, whose "
            "rows are sharded.",
            "pass arrays that all devices hold: local latent variables of sharded rows are not "
            "supported.",
            "sharded-arrays",
        )


def _first_local_site(model_trace: ModelTrace) -> str:
    """Return the name of a local site, one of HMC if there is any."""
    names = [site.name for site in model_trace.local_sites]
    return next((n for n in names if n not in model_trace.gibbs.site_names), names[0])


def _check_equal_sharding(arrays: Sequence[ShardedArray], row_lookups: Sequence[RowLookup]) -> None:
    """Check that a plate indexes each sharded array, and that all are sharded alike."""
    for array in arrays:
        if not any(lookup.array is array for lookup in row_lookups):
            raise InvalidArgumentError(
                f"{array!r} is not indexed by a subsampled plate's indices.",
                "index it by them, or pass an array that all devices hold.",
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


def _check_shard_sizes(plate: Plate, shards: Shards) -> None:
    """Check that every device holds its part of a minibatch."""
    num_shards, min_rows = len(shards.rows_per_shard), min(shards.rows_per_shard)
    num_rows = plate.with_shards(shards).subsample_size_per_shard
    if num_rows > min_rows:
        raise InvalidArgumentError(
            f"Plate '{plate.name}' has subsample_size={plate.subsample_size}, {num_rows} rows per "
            f"device, but a device holds only {min_rows}.",
            f"use a subsample_size of at most {num_shards * min_rows}.",
            "sharded-arrays",
        )


# --- Local latent variables ---------------------------------------------------------------------


def check_local_sites(model_trace: ModelTrace) -> None:
    """Check that latent sites inside subsampled plates can be updated row by row.

    :raises ValueError: naming the site.
    """
    plates, gibbs = model_trace.unsharded_plates, model_trace.gibbs
    sites = model_trace.local_sites
    for site in sites:
        _check_local_site(site, site.name in gibbs.site_names)
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
    if gibbs.num_sweeps is not None and name not in gibbs.site_names:
        raise InvalidArgumentError(
            f"Site '{name}' is latent inside the plate, but `gibbs_fn` does not sample it.",
            "name it in `gibbs_sites`, or leave out keep_locals=False, which needs this.",
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
            f"Site '{name}' is latent inside the plate '{next(iter(plates))}', without observed "
            "data.",
            "pass its data (is an argument None?), or move the site out of the plate.",
            "unobserved-plate",
        )


def _check_local_site(site: SampleSite, is_gibbs_site: bool) -> None:
    """Check one latent site inside subsampled plates.

    :param is_gibbs_site: whether ``gibbs_fn`` samples it.
    """
    site_in_plate = f"Site '{site.name}' inside the plate '{site.plate_frames[0].name}'"
    if len(site.plate_frames) > 1:
        plates = " and ".join(f"'{f.name}'" for f in site.plate_frames)
        raise InvalidModelError(
            f"Site '{site.name}' has a latent value per pair of rows of the plates {plates}.",
            "give one of the plates no subsample_size, or integrate the site out.",
            "local-latents-plates",
        )
    if is_gibbs_site:
        return
    if site.support.is_discrete:
        raise InvalidModelError(
            f"{site_in_plate} is discrete and has no data.",
            f"pass its data (is an argument None?); or sample it by gibbs_fn=... and gibbs_sites="
            f"['{site.name}'], or sum it out of the likelihood.",
            "discrete-site",
        )
    if site.is_delta:
        raise InvalidModelError(
            f"{site_in_plate} has a delta distribution.", "use numpyro.deterministic.", "delta-site"
        )
    if not site.has_fixed_support:
        raise InvalidModelError(
            f"{site_in_plate} has a support that depends on other values.",
            "rescale the site, for example a Uniform(0, 1) times its upper bound.",
            "unsupported-support",
        )
    if site.unconstrained_shape is None:
        raise InvalidModelError(
            f"{site_in_plate} has support {site.support}, without a map to unconstrained space.",
            "reparametrise the site, or sample it by gibbs_fn.",
            "unsupported-support",
        )


def check_local_latents_options(
    potential: Potential,
    arguments: Arguments,
    subsampling: str,
    gradient_estimator: str,
    collect_local_sites: bool | Sequence[str],
) -> None:
    """Check a kernel's options and data for a model with local latent variables.

    :raises ValueError: naming the site.
    """
    local = potential.local_latents
    if local is None:
        if collect_local_sites:
            raise InvalidArgumentError(
                "`collect_local_sites` needs latent sites inside a subsampled plate.",
                "leave it out: the model has none.",
                "collect-local-sites",
            )
        return
    site = f"Site '{local.names[0]}' is latent inside the plate '{local.plate.name}'"
    size, batch_size = local.plate.size, local.plate.subsample_size
    if subsampling == "iid":
        raise InvalidArgumentError(
            f"{site}, but an iid minibatch may hold a row twice.",
            "use subsampling='contiguous' or 'shuffled', and no `noise_compensation`.",
            "local-latents-subsampling",
        )
    if subsampling == "shuffled" and size % batch_size:
        raise InvalidArgumentError(
            f"{site}, but a minibatch between epochs may hold a row twice.",
            f"use subsampling='contiguous', or a subsample_size that divides {size}, unlike "
            f"{batch_size}.",
            "local-latents-subsampling",
        )
    if gradient_estimator == "second_order_control_variate":
        raise InvalidArgumentError(
            f"{site}, but its values change the Hessian that {gradient_estimator!r} keeps.",
            "use gradient_estimator='control_variate'.",
            "local-latents-control-variate",
        )
    if potential.is_stochastic:
        raise InvalidModelError(
            f"{site}, but the model draws random keys (numpyro.prng_key).",
            "make what they randomise a sample site, or integrate the site out.",
            "local-latents-random",
        )
    if arguments.host_arrays and local.hmc_sites:
        raise InvalidArgumentError(
            f"Site '{local.hmc_sites[0].name}' is latent inside the plate and needs gradients of "
            "single rows of a HostArray.",
            "pass arrays in memory, or sample the site by `gibbs_fn`.",
            "local-latents-host-array",
        )
    select_collected_sites(local, collect_local_sites)


def check_conditional_independence(
    potential: Potential, arguments: Arguments, global_position: Array, values: LocalValues
) -> None:
    """Check that rows are independent given the sites outside of the plate.

    A minibatch's potential must then be the mean of the potentials of its rows. It is not where a
    row's local value is used by other rows, or by a site outside of the plate.

    :raises ValueError: naming the local sites.
    """
    local = potential.local_latents
    assert local is not None
    rng = np.random.default_rng(3)
    size = local.plate.size
    num_rows = min(_NUM_CHECKED_ROWS, size)
    for _ in range(_NUM_INDEPENDENCE_CHECKS):
        start = rng.integers(size)
        rows = jnp.asarray((start + np.arange(num_rows)) % size if num_rows > 1 else [start])
        batch = values.take(rows)
        normals = rng.standard_normal(batch.hmc_position.shape)
        batch = batch._replace(hmc_position=jnp.asarray(normals, batch.hmc_position.dtype))
        (joint, joint_grad), (mean, mean_grad) = _compute_joint_and_pointwise(
            potential, global_position, rows, batch, arguments
        )
        if not (np.isfinite(joint) and np.isfinite(mean)):
            continue
        is_float32 = np.asarray(joint).dtype == np.float32
        tolerance = _TOLERANCE_FLOAT32 if is_float32 else _TOLERANCE_FLOAT64
        value_scale = 1.0 + abs(float(joint)) + abs(float(mean))
        grad_scale = 1.0 + np.abs(joint_grad).max(initial=0.0) + np.abs(mean_grad).max(initial=0.0)
        grad_difference = np.abs(joint_grad - mean_grad).max(initial=0.0)
        if (
            abs(float(joint - mean)) > tolerance * value_scale
            or grad_difference > tolerance * grad_scale
        ):
            names = " and ".join(f"'{n}'" for n in local.names)
            raise InvalidModelError(
                f"Site {names} is latent inside the plate '{local.plate.name}', but its rows are "
                "dependent.",
                "move the sites that use the values of other rows, or of all rows, into the plate "
                "one row at a time, or give the plate no subsample_size.",
                "dependent-rows",
            )


@partial(jax.jit, static_argnames="potential")
def _compute_joint_and_pointwise(
    potential: Potential,
    global_position: Array,
    indices: Array,
    values: BatchLocalValues,
    arguments: Arguments,
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Return a minibatch's potential and the mean of its rows' potentials, with gradients."""
    local = potential.local_latents
    assert local is not None

    def joint(position: Array) -> Array:
        with_values = with_local_values(arguments, values._replace(hmc_position=position))
        return potential.value(global_position, {local.plate.name: indices}, with_values)

    def mean_over_rows(position: Array) -> Array:
        potentials = pointwise_local_potentials(
            potential, global_position, indices, position, values.gibbs_values, arguments
        )
        return local.plate.size * potentials.mean()

    return (
        jax.value_and_grad(joint)(values.hmc_position),
        jax.value_and_grad(mean_over_rows)(values.hmc_position),
    )
