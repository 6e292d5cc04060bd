"""What a model does with its row indices, read off its jaxpr.

JAX clamps an index that is out of range, so an array shorter than its plate would be read
wrongly without a word, and a longer one in part. The jaxpr shows which arrays the plate's own
indices reach, and how long these are.

The sites outside of the subsampled plates: which a gradient moves, which have draws to show.

Refused: rows that are spread over devices in a way in which no minibatch can be had of them.

Refused: a log density that is no sum over its plates' rows, with each in its place.

A minibatch stands for all rows only where every site that uses a plate's rows stands inside of the
plate, once a row, and where what the rows look up has as many. What breaks this gives numbers all
the same, so that it is looked for: on the model's jaxpr, which shows where the indices go, and on
its shapes with one row more.

Whether each row's local values can be moved by themselves, and where they begin.

What of a model cannot be sampled by minibatches, each refused where it belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Jaxpr
from numpyro import validation_enabled

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.row_proxies import RowLookup
from numpyro_sgmcmc.data.sharded_array import ShardedArray, Shards
from numpyro_sgmcmc.data.subsampling import Indices, Plate
from numpyro_sgmcmc.errors import InvalidArgumentError, summarise_error, warn_user
from numpyro_sgmcmc.jaxpr import find_dependent_outputs, propagate, propagate_labels, sub_jaxprs
from numpyro_sgmcmc.model.handlers import trace_prior
from numpyro_sgmcmc.model.local_latents import (
    BatchLocalValues,
    LocalValues,
    select_collected_sites,
    with_local_values,
)
from numpyro_sgmcmc.model.local_moves import (
    pointwise_local_potentials,
)
from numpyro_sgmcmc.model.potential import GlobalSite
from numpyro_sgmcmc.model.trace import ModelTrace, SampleSite, find_user_source_line

if TYPE_CHECKING:
    from numpyro_sgmcmc.model.potential import Potential

__all__ = [
    "RowGather",
    "check_conditional_independence",
    "check_factorises_over_plates",
    "check_global_sites",
    "check_local_latents_options",
    "check_local_sites",
    "check_sharding",
    "find_global_sites",
    "find_plate_free_deterministics",
    "find_row_gathers",
    "validate_model",
    "warn_missing_plates",
]

_INDEX_PRESERVING_PRIMITIVES = {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "expand_dims",
    "reshape",
    "rev",
    "select_n",
    "sort",
    "squeeze",
    "transpose",
}


class RowGather(NamedTuple):
    """A lookup by the rows of a plate.

    - **plate** - name of the plate whose indices are used.
    - **num_rows** - length of the dimension that they index.
    - **array_name** - name of the array, or None where it cannot be traced to an argument.
    """

    plate: str
    num_rows: int
    array_name: str | None


def find_row_gathers(
    jaxpr: Jaxpr, plate_names: Sequence[str], array_names: Sequence[str | None]
) -> list[RowGather]:
    """Return the gathers in which a plate's indices, unchanged, are the rows looked up.

    Arithmetic on an index (``i // 10``, ``i - 1``) makes it the user's own, and is not followed.

    :param jaxpr: the model's jaxpr, as a function of the plates' indices and then of the arrays.
    :param plate_names: the plate whose indices each of the first inputs holds.
    :param array_names: names of the other inputs.
    :return: one entry per gather.
    """
    gathers: list[RowGather] = []

    def transfer(eqn: Any, inputs: list[_Origin]) -> list[_Origin]:
        primitive, outputs = eqn.primitive.name, [_Origin()] * len(eqn.outvars)
        shape = getattr(eqn.invars[0].aval, "shape", ()) if eqn.invars else ()
        if primitive == "gather":
            dims = eqn.params["dimension_numbers"].start_index_map
            columns = inputs[1].columns
            if len(columns) == len(dims):
                gathers.extend(
                    RowGather(plate, shape[dim], inputs[0].array)
                    for plate, dim in zip(columns, dims, strict=True)
                    if plate is not None
                )
            return outputs
        if primitive == "dynamic_slice":  # at a scalar index, as in a loop over rows
            sizes = eqn.params["slice_sizes"]
            for num_rows, size, index in zip(shape, sizes, inputs[1:], strict=False):
                gathers.extend(
                    RowGather(plate, num_rows, inputs[0].array)
                    for plate in index.columns
                    if plate is not None and size == 1
                )
            return outputs
        for inner in sub_jaxprs(eqn):  # loops: their gathers count, their outputs are not followed
            propagate(inner, inputs, transfer, lambda atom: _Origin())
        columns = ()
        if any(x.columns for x in inputs):
            if primitive in _INDEX_PRESERVING_PRIMITIVES:
                columns = [x.columns for x in inputs if x.columns][-1]
            elif primitive == "concatenate" and eqn.params["dimension"] > 0:
                # X[i, 0] looks up pairs of indices: a column of the plate's beside one of zeros.
                columns = sum((x.columns or (None,) for x in inputs), ())
        names = {x.array for x in inputs} - {None}
        name = names.pop() if len(names) == 1 and len(outputs) == 1 else None
        return [_Origin(columns, name), *outputs[1:]]

    plates = [_Origin((name,)) for name in plate_names]
    arrays = [_Origin((), name) for name in array_names]
    propagate(jaxpr, [*plates, *arrays], transfer, lambda atom: _Origin())
    return gathers


class _Origin(NamedTuple):
    """
    - **columns** - for an array of indices, the plate whose indices each column holds; else empty.
    - **array** - name of the argument that it was computed from, where that is one alone.
    """

    columns: tuple[str | None, ...] = ()
    array: str | None = None


def find_global_sites(model_trace: ModelTrace) -> tuple[GlobalSite, ...]:
    """The latent sites outside of the subsampled plates, in the order of their coordinates."""
    found = []
    for site in model_trace.sample_sites:
        if not (site.is_observed or site.plate_frames):
            assert site.unconstrained_shape is not None
            support = site.support if site.has_fixed_support else None
            found.append(GlobalSite(site.name, site.unconstrained_shape, support))
    return tuple(sorted(found, key=lambda s: s.name))


def check_global_sites(model_trace: ModelTrace) -> None:
    """Refuse latent sites that a gradient cannot move, data that are not the minibatch's, and a
    model whose latent sites are the rows' alone.

    :raises ValueError: naming the site, with the way out.
    """
    found = []
    for site in model_trace.sample_sites:
        if site.is_observed:
            _check_observed_shape(site)
        elif not site.plate_frames:
            _check_differentiable(site)
            found.append(site)
    if any(0 not in (s.unconstrained_shape or ()) for s in found):
        return
    if any(s.plate_frames and not s.is_observed for s in model_trace.sample_sites):
        raise InvalidArgumentError(
            "All latent sites of the model are inside the subsampled plate: its rows are "
            "independent posteriors, and minibatches save nothing. Use NUTS on each."
        )


def warn_missing_plates(model_trace: ModelTrace) -> None:
    """Warn, as NumPyro does, of sites that have plates, but not for all of their dimensions."""
    for site in model_trace.sample_sites:
        for dim in site.unplated_dims:
            warn_user(
                f"Missing a plate statement for batch dimension {dim} at site '{site.name}', which "
                "stands in other plates: add one, or `.to_event` if the dimension belongs to a row."
            )


def _check_differentiable(site: SampleSite) -> None:
    """Refuse a latent site that a gradient cannot move."""
    if site.support.is_discrete:
        raise InvalidArgumentError(
            f"Site '{site.name}' is discrete and has no gradient. Sample it in a block of its own: "
            f"Gibbs([(DiscreteGibbs(kernel.model), ['{site.name}']), (kernel, None)]), with "
            "Gibbs and DiscreteGibbs from numpyro.infer and kernel this kernel."
        )
    if site.is_delta:
        raise InvalidArgumentError(
            f"Site '{site.name}' has a delta distribution; use numpyro.deterministic instead."
        )
    if site.unconstrained_shape is None:
        raise InvalidArgumentError(
            f"Site '{site.name}' has support {site.support}, which has no map to unconstrained "
            "space; reparametrise the site."
        )


def _check_observed_shape(site: SampleSite) -> None:
    """Refuse data that have not one entry for each row of a minibatch."""
    event_dim = len(site.event_shape)
    for frame in site.plate_frames:
        if len(site.shape) >= event_dim - frame.dim:
            rows = site.shape[frame.dim - event_dim]
            if rows not in (1, frame.size):
                raise InvalidArgumentError(
                    f"Site '{site.name}' observes {rows} rows where the plate '{frame.name}' "
                    f"has a minibatch of {frame.size}: index the data by the plate's indices."
                )
    try:
        np.broadcast_shapes(site.batch_shape, site.shape[: len(site.shape) - event_dim])
    except ValueError:
        raise InvalidArgumentError(
            f"Site '{site.name}' observes data of shape {site.shape}, which do not fit its "
            f"distribution's {site.batch_shape + site.event_shape}."
        ) from None


def find_plate_free_deterministics(
    model_trace: ModelTrace,
    evaluate_sites: Callable[[Indices, Arguments], dict[str, Array]],
    indices: Indices,
) -> set[str]:
    """Deterministic sites that are the same for every minibatch.

    :param evaluate_sites: maps rows and arguments to the values of all sites.
    :param indices: rows of each plate.
    """
    outside = [
        n
        for n, s in model_trace.traced_sites.items()
        if s.site_type == "deterministic" and not s.plates
    ]
    if outside and indices:
        jaxpr = jax.make_jaxpr(lambda i, a: [evaluate_sites(i, a)[k] for k in outside])(
            indices, model_trace.arguments
        )
        varies = find_dependent_outputs(jaxpr, len(indices))
        outside = [k for k, v in zip(outside, varies, strict=True) if not v]
    return set(outside)


def check_sharding(model_trace: ModelTrace) -> None:
    """Refuse arrays that are not spread alike or not indexed by a plate, and local sites with them;
    warn of minibatches that do not divide among the devices.

    :raises ValueError: naming array, plate or site.
    """
    if model_trace.shards is None:
        return
    _check_equal_sharding(model_trace.arguments.sharded_arrays, model_trace.row_lookups)
    warned = set()
    for array, name in model_trace.row_lookups:
        plate = model_trace.unsharded_plates[name]
        if not isinstance(array, ShardedArray):
            raise InvalidArgumentError(
                f"The plate '{name}' indexes {array!r} and rows that are spread over devices: "
                "make all of its arrays ShardedArrays, or ShardedArray(HostArray(rows)) where rows "
                "stay on the host."
            )
        _check_shard_sizes(plate, model_trace.shards)
        num, rows = len(model_trace.shards.rows_per_shard), model_trace.plates[name].subsample_size
        if rows != plate.subsample_size and name not in warned:
            warned.add(name)
            warn_user(
                f"Plate '{name}' has subsample_size={plate.subsample_size}, which does not "
                f"divide among {num} devices: each takes {rows // num} rows, {rows} in all."
            )
    local = [s.name for s in model_trace.sample_sites if s.plate_frames and not s.is_observed]
    if local:
        moved = [name for name in local if name not in model_trace.gibbs.site_names]
        raise InvalidArgumentError(
            f"Site '{(moved or local)[0]}' is latent inside the subsampled plate, which is not "
            "supported where rows are spread over devices: pass arrays that all devices have."
        )


def _check_equal_sharding(arrays: Sequence[ShardedArray], row_lookups: Sequence[RowLookup]) -> None:
    """Refuse arrays that no plate indexes, and such as are spread in different ways."""
    for array in arrays:
        if not any(found.array is array for found in row_lookups):
            raise InvalidArgumentError(
                f"{array!r} is not indexed by a subsampled plate's indices: index it, or pass an "
                "array that all devices have."
            )
    if len({x.shards for x in arrays}) > 1:
        listed = ", ".join(f"{x!r} with {list(x.shards.rows_per_shard)} rows" for x in arrays)
        raise InvalidArgumentError(
            f"All arrays that are spread over devices must be so in the same way, but there are "
            f"{listed} over meshes {[x.shards.mesh.shape for x in arrays]}."
        )


def _check_shard_sizes(plate: Plate, shards: Shards) -> None:
    """Refuse a minibatch of which a device has more rows to give than it holds."""
    num, least = len(shards.rows_per_shard), min(shards.rows_per_shard)
    part = plate.with_shards(shards).subsample_size_per_shard
    if part > least:
        raise InvalidArgumentError(
            f"Plate '{plate.name}' has subsample_size={plate.subsample_size}, {part} rows for each "
            f"of {num} devices, but one of them has only {least}: use at most {num * least}."
        )


_PlateNames = frozenset[str | None]
"""Names of the plates whose rows a value depends on, and None for the arguments."""


class _SiteLayout(NamedTuple):
    """
    - **plate_dims** - the plates' dimensions, by plate, at this site.
    - **batch_shape** - of the distribution.
    - **event_shape** - of the distribution.
    - **data_shape** - of the observed value; None for a latent site.
    - **log_prob_shape** - of the log density.
    """

    plate_dims: dict[str, int]
    batch_shape: tuple[int, ...]
    event_shape: tuple[int, ...]
    data_shape: tuple[int, ...] | None
    log_prob_shape: tuple[int, ...]


def check_factorises_over_plates(model_trace: ModelTrace) -> None:
    """Refuse a model whose log density is no sum over its plates' rows.

    :raises ValueError: naming site and plate, or plate and array.
    """
    plates, arguments = sorted(model_trace.plates.values()), model_trace.arguments
    rows = {p.name: np.arange(p.subsample_size) for p in plates}
    forms: dict[str, _SiteLayout] = {}

    def densities(indices: Indices, arguments: Arguments) -> dict[str, tuple[Any, Any]]:
        seen = trace_prior(model_trace.model_with_params, indices, arguments)
        found = _compute_log_probs(seen)
        forms.update(
            {
                name: _extract_site_layout(seen[name], log_prob)
                for name, (_, log_prob) in found.items()
            }
        )
        return found

    jaxpr, shapes = jax.make_jaxpr(densities, return_shape=True)(rows, arguments)
    if not plates:
        return
    given: list[_PlateNames] = [frozenset({p.name}) for p in plates]
    given += [frozenset({None})] * (len(jaxpr.jaxpr.invars) - len(given))
    found = jax.tree.unflatten(jax.tree.structure(shapes), propagate_labels(jaxpr.jaxpr, given))
    own = dict(forms)
    for name, form in own.items():
        value, log_prob = found[name]
        _check_rows_inside_plate(name, form, value | log_prob, plates)
        _check_data_subsampled(name, form, value, model_trace, rows)
    for p in plates:
        more = {**rows, p.name: np.arange(p.subsample_size + 1)}
        try:
            jax.eval_shape(densities, more, arguments)
        except Exception as error:
            raise InvalidArgumentError(
                f"The model can be run on {p.subsample_size} rows of the plate '{p.name}', but not "
                f"on {p.subsample_size + 1}{find_user_source_line(error)}: index whatever has one entry a row "
                f"by the plate's indices. ({summarise_error(error)})"
            ) from error
        for name, form in own.items():
            _check_no_row_pairs(name, form, forms[name], p)
    _check_array_lengths(jaxpr.jaxpr, model_trace)


def _compute_log_probs(traced_sites: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The value of each observed site, with the log density; the latter twice for a latent one."""
    found = {}
    for name, site in traced_sites.items():
        if site["type"] != "sample":
            continue
        try:
            log_prob = site["fn"].log_prob(site["value"])
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"Site '{name}' has no log density for its value, of type "
                f"{jnp.result_type(site['value'])} and shape {jnp.shape(site['value'])}: "
                f"{summarise_error(error)}."
            ) from error
        if jnp.iscomplexobj(log_prob):
            raise InvalidArgumentError(
                f"Site '{name}' has a complex log density: its data and the parameters of its "
                "distribution must be real."
            )
        found[name] = site["value"] if site["is_observed"] else log_prob, log_prob
    return found


def _extract_site_layout(site: Any, log_prob: Any) -> _SiteLayout:
    return _SiteLayout(
        {f.name: f.dim for f in site["cond_indep_stack"]},
        site["fn"].batch_shape,
        site["fn"].event_shape,
        jnp.shape(site["value"]) if site["is_observed"] else None,
        jnp.shape(log_prob),
    )


def _check_rows_inside_plate(
    name: str, layout: _SiteLayout, used_plates: _PlateNames, plates: list[Plate]
) -> None:
    """Refuse a site that uses a plate's rows outside of the plate."""
    for p in plates:
        if p.name in used_plates and p.name not in layout.plate_dims:
            raise InvalidArgumentError(
                f"Site '{name}' uses rows of the plate '{p.name}', but stands outside of it, "
                "where a minibatch is not scaled up to all rows: move it into the plate."
            )


def _check_data_subsampled(
    name: str,
    layout: _SiteLayout,
    source_plates: _PlateNames,
    model_trace: ModelTrace,
    indices: Indices,
) -> None:
    """Refuse data that are as many as the minibatch's rows, but not theirs."""
    for p in sorted(model_trace.plates.values()):
        if _is_same_in_every_minibatch(layout, source_plates, p) and (
            None in source_plates or not _has_identical_rows(name, layout, p, model_trace, indices)
        ):
            raise InvalidArgumentError(
                f"Site '{name}' observes the same data in every minibatch of the plate "
                f"'{p.name}': index the data by the plate's indices."
            )


def _is_same_in_every_minibatch(
    layout: _SiteLayout, source_plates: _PlateNames, plate: Plate
) -> bool:
    """Whether an observed value has as many entries as the minibatch rows, but not the rows'."""
    if plate.name not in layout.plate_dims or plate.name in source_plates or not layout.data_shape:
        return False
    if 0 in layout.data_shape:  # a factor's
        return False
    axis = layout.plate_dims[plate.name] - len(layout.event_shape)
    if len(layout.data_shape) < -axis or layout.data_shape[axis] != plate.subsample_size:
        return False
    # One entry may be meant for all rows, unless the data look like rows taken by hand.
    return plate.subsample_size > 1 or source_plates == {None}


def _has_identical_rows(
    name: str, layout: _SiteLayout, plate: Plate, model_trace: ModelTrace, indices: Indices
) -> bool:
    """Whether an observed value is the same for all rows, as where zeros stand for data."""
    with validation_enabled(False):  # a draw from the prior may be one that no chain comes to
        found = trace_prior(model_trace.model_with_params, indices, model_trace.arguments)
    value = np.asarray(found[name]["value"])
    axis = layout.plate_dims[plate.name] - len(layout.event_shape)
    return bool((value == value.take([0], axis)).all())


def _check_no_row_pairs(
    name: str, layout: _SiteLayout, larger_layout: _SiteLayout, plate: Plate
) -> None:
    """Refuse a site where one row more is not one entry more along the plate's dimension."""
    own = layout.plate_dims.get(plate.name)
    if larger_layout.event_shape != layout.event_shape and own is not None:
        raise InvalidArgumentError(
            f"Site '{name}' has the rows of the plate '{plate.name}' in its event, of shape "
            f"{layout.event_shape}, and once more in the plate: leave out `to_event`, so that each "
            "row has a density of its own."
        )
    before, after = layout.log_prob_shape, larger_layout.log_prob_shape
    grown = [
        d
        for d in range(-max(len(before), len(after)), 0)
        if (before[d] if -d <= len(before) else 1) != (after[d] if -d <= len(after) else 1)
    ]
    if own is None and (grown or larger_layout.event_shape != layout.event_shape):
        raise InvalidArgumentError(
            f"Site '{name}' has one entry for each row of the plate '{plate.name}', but stands "
            "outside of it: move it into the plate."
        )
    if any(d != own for d in grown):
        data = "" if layout.data_shape is None else f"its data have shape {layout.data_shape} and "
        raise InvalidArgumentError(
            f"Site '{name}' compares every row of the plate '{plate.name}' with every other: "
            f"{data}its distribution {layout.batch_shape + layout.event_shape}. Make the two agree, "
            "for example by y[:, 0]."
        )


def _check_array_lengths(jaxpr: Jaxpr, model_trace: ModelTrace) -> None:
    """Refuse arrays that a plate's rows look up, with another number of rows than the plate.

    :param jaxpr: of the model, as a function of the rows and the arguments.
    """
    plates = model_trace.plates
    for array, plate in model_trace.row_lookups:
        if len(array) != plates[plate].size:
            raise InvalidArgumentError(
                f"The plate '{plate}' has size {plates[plate].size}, but {array!r}, which it "
                f"indexes, has {len(array)} rows. Make the two agree."
            )
    names = [name for name, _ in model_trace.arguments.named_arrays(model_trace.model)]
    for found in find_row_gathers(jaxpr, sorted(plates), names):
        size = plates[found.plate].size
        if found.num_rows != size:
            raise InvalidArgumentError(
                f"The plate '{found.plate}' has size {size}, but {found.array_name or 'an array'} that "
                f"it indexes has {found.num_rows} rows. Make the two agree: JAX would read other "
                "rows without a word."
            )


_NUM_CHECKED_ROWS = 5


_NUM_INDEPENDENCE_CHECKS = 4


@partial(jax.jit, static_argnames="potential")
def _compute_joint_and_pointwise(
    potential: Potential,
    global_position: Array,
    indices: Array,
    values: BatchLocalValues,
    arguments: Arguments,
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """The minibatch's potential and the mean of its rows', with gradients in the local values."""
    local = potential.local_latents
    assert local is not None

    def together(position: Array) -> Array:
        with_values = with_local_values(arguments, values._replace(hmc_position=position))
        return potential.value(global_position, {local.plate.name: indices}, with_values)

    def apart(position: Array) -> Array:
        own = pointwise_local_potentials(
            potential, global_position, indices, position, values.gibbs_values, arguments
        )
        return local.plate.size * own.mean()

    found = (jax.value_and_grad(fn)(values.hmc_position) for fn in (together, apart))
    first, second = found
    return first, second


def check_conditional_independence(
    potential: Potential, arguments: Arguments, global_position: Array, values: LocalValues
) -> None:
    """Refuse a model in which rows are tied together other than through the globals.

    A minibatch's potential must be the mean of those of its rows. It is not where a row's
    value serves other rows, or a site outside of the plate.

    :raises ValueError: naming the local sites, with the way out.
    """
    local = potential.local_latents
    assert local is not None
    rng = np.random.default_rng(3)
    size = local.plate.size
    num = min(_NUM_CHECKED_ROWS, size)
    for _ in range(_NUM_INDEPENDENCE_CHECKS):
        start = rng.integers(size)
        rows = jnp.asarray((start + np.arange(num)) % size if num > 1 else [start])
        some = values.take(rows)
        noise = rng.standard_normal(some.hmc_position.shape)
        some = some._replace(hmc_position=jnp.asarray(noise, some.hmc_position.dtype))
        (whole, pull), (mean, own) = _compute_joint_and_pointwise(
            potential, global_position, rows, some, arguments
        )
        if not (np.isfinite(whole) and np.isfinite(mean)):
            continue
        tolerance = 1e-3 if np.asarray(whole).dtype == np.float32 else 1e-8
        terms = 1.0 + abs(float(whole)) + abs(float(mean))
        pulls = 1.0 + np.abs(pull).max(initial=0.0) + np.abs(own).max(initial=0.0)
        is_off = abs(float(whole - mean)) > tolerance * terms
        if is_off or np.abs(pull - own).max(initial=0.0) > tolerance * pulls:
            names = " and ".join(f"'{n}'" for n in local.names)
            raise InvalidArgumentError(
                f"Site {names} has a latent value for each row of the plate '{local.plate.name}', "
                "but the rows are not independent given the other sites: a row's value serves "
                "another row, or a site outside of the plate. Move what needs it into the plate, "
                "or give the plate no subsample_size."
            )


def check_local_latents_options(
    potential: Potential,
    arguments: Arguments,
    subsampling: str,
    gradient_estimator: str,
    collect_local_sites: bool | Sequence[str],
) -> None:
    """Refuse what is wrong, or not there, for a model with local sites.

    :raises ValueError: naming the site, with the way out.
    """
    local = potential.local_latents
    if local is None:
        if collect_local_sites:
            raise InvalidArgumentError(
                "`collect_local_sites` asks for latent sites inside a subsampled plate, but the model "
                "has none: leave it out."
            )
        return
    site = f"Site '{local.names[0]}' has a latent value for each row of '{local.plate.name}'"
    size, batch = local.plate.size, local.plate.subsample_size
    if subsampling == "iid":
        raise InvalidArgumentError(
            f"{site}, and a minibatch of independent rows may hold a row twice: use "
            "subsampling='contiguous' or 'shuffled', and no `noise_compensation`."
        )
    if subsampling == "shuffled" and size % batch:
        raise InvalidArgumentError(
            f"{site}, and where {batch} rows do not divide {size}, a minibatch between two epochs "
            "may hold a row twice: use subsampling='contiguous', or another subsample_size."
        )
    if gradient_estimator == "second_order_control_variate":
        raise InvalidArgumentError(
            f"{site}, whose values move the Hessian that {gradient_estimator!r} would hold: use "
            "gradient_estimator='control_variate'."
        )
    if potential.is_stochastic:
        raise InvalidArgumentError(
            f"{site}, and the model draws random keys (numpyro.prng_key), so that the rows' own "
            "densities are random: sample what they randomise, or integrate the site out."
        )
    if arguments.host_arrays and local.hmc_sites:
        raise InvalidArgumentError(
            f"Site '{local.hmc_sites[0].name}' has a latent value for each row, moved along the "
            "gradient of the row's own density, for which rows of a HostArray would be read once "
            "more, one by one: pass arrays in memory, or draw the site by `gibbs_fn`."
        )
    select_collected_sites(local, collect_local_sites)


def check_local_sites(model_trace: ModelTrace) -> None:
    """Refuse latent sites inside subsampled plates whose rows cannot be moved one by one.

    :raises ValueError: naming the site, with the way out.
    """
    plates, gibbs_sites = model_trace.unsharded_plates, model_trace.gibbs.site_names
    found = [s for s in model_trace.sample_sites if s.plate_frames and not s.is_observed]
    for site in found:
        _check_local_site(site, site.name in gibbs_sites)
    missing = sorted(set(gibbs_sites) - {s.name for s in found})
    if missing:
        raise InvalidArgumentError(
            f"`gibbs_sites` names '{missing[0]}', which is no latent site inside a subsampled "
            "plate: give it the names of such sites, or the plate a subsample_size."
        )
    if not found:
        return
    name = next((s.name for s in found if s.name not in gibbs_sites), found[0].name)
    if model_trace.gibbs.num_sweeps is not None and name not in gibbs_sites:
        raise InvalidArgumentError(
            f"Site '{name}' has a latent value for each row, which `gibbs_fn` does not draw: with "
            "`keep_locals=False` it must draw all of them. Name the site "
            "in `gibbs_sites`, or leave out `keep_locals`."
        )
    if len(plates) > 1:
        raise InvalidArgumentError(
            f"Site '{name}' has a latent value for each row of a subsampled plate, and the model "
            f"has the subsampled plates {sorted(plates)}: leave one of them its subsample_size."
        )
    (plate,) = plates
    if not any(s.is_observed and s.plate_frames for s in model_trace.sample_sites):
        raise InvalidArgumentError(
            f"Site '{name}' is latent inside the subsampled plate '{plate}', in which "
            "nothing is observed: pass its data (is an argument None?), or move it out of the "
            "plate."
        )


def _check_local_site(site: SampleSite, is_gibbs_site: bool) -> None:
    """Refuse one such site; ``is_gibbs_site`` where ``gibbs_fn`` draws it."""
    where = f"Site '{site.name}' inside the subsampled plate '{site.plate_frames[0].name}'"
    if len(site.plate_frames) > 1:
        others = " and ".join(f"'{f.name}'" for f in site.plate_frames)
        raise InvalidArgumentError(
            f"Site '{site.name}' has a latent value for each pair of rows of the subsampled plates "
            f"{others}: give one of them no subsample_size, or integrate the site out."
        )
    if is_gibbs_site:
        return
    if site.support.is_discrete:
        raise InvalidArgumentError(
            f"{where} is discrete and has no data: pass them (is an argument None?), or if it is "
            f"latent, draw it by gibbs_fn=... and gibbs_sites=['{site.name}'], or sum it out of "
            "the likelihood."
        )
    if site.is_delta:
        raise InvalidArgumentError(
            f"{where} has a delta distribution; use numpyro.deterministic instead."
        )
    if not site.has_fixed_support:
        raise InvalidArgumentError(
            f"{where} has a support that depends on other values: rescale it, for example a "
            "Uniform(0, 1) times its upper bound."
        )
    if site.unconstrained_shape is None:
        raise InvalidArgumentError(
            f"{where} has support {site.support}, which has no map to unconstrained space: "
            "reparametrise the site, or draw it by gibbs_fn."
        )


def validate_model(model_trace: ModelTrace) -> None:
    """Refuse a model that cannot be sampled; from what its statements show to what its rows do.

    :raises ValueError: naming the site, plate or argument that stands in the way.
    """
    check_local_sites(model_trace)
    check_global_sites(model_trace)
    check_sharding(model_trace)
    check_factorises_over_plates(model_trace)
    warn_missing_plates(model_trace)
