"""Check that the log density of a model is additive over the rows of its plates.

A minibatch represents all rows only where every site that uses a plate's rows is inside the plate,
once per row, and where the arrays that the rows look up have the length of the plate. A model that
violates this still returns numbers, so that :func:`check_factorises_over_plates` looks for it in
two ways: in the jaxpr, which shows where indices and data go, and in shapes and operations with one
row more. JAX clamps an index that is out of range, so that an array shorter than its plate would be
read wrongly without an error, and a longer one in part; :func:`find_row_gathers` shows which arrays
the plate's own indices look up, and how long these are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.extend.core import ClosedJaxpr, Jaxpr
from numpyro import validation_enabled

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import Indices, Plate
from numpyro_sgmcmc.errors import InvalidModelError, summarise_error
from numpyro_sgmcmc.jaxpr import propagate_labels
from numpyro_sgmcmc.model.handlers import plate_array_length_error, trace_prior
from numpyro_sgmcmc.model.index_lookups import ArrayIndex, LookupWalk, TracedArray
from numpyro_sgmcmc.model.row_count import compare_row_counts
from numpyro_sgmcmc.model.trace import ModelTrace, find_user_source_line

# Relative change up to which a log density is the same on twice as many copies of a row.
_SCALAR_TOLERANCE = 1e-3

# Names of the plates whose indices a value depends on; None stands for the model's arguments.
_Sources = frozenset[str | None]


class _SiteLayout(NamedTuple):
    """Shapes of a sample site."""

    plate_dims: dict[str, int]  # dimensions of the plates around it, by name
    batch_shape: tuple[int, ...]  # batch shape of the distribution
    event_shape: tuple[int, ...]  # event shape of the distribution
    data_shape: tuple[int, ...] | None  # shape of the observed value; None for a latent site
    log_prob_shape: tuple[int, ...]  # shape of the log density
    unexpanded_shape: tuple[int, ...]  # the same before plates expand it


class _SiteDensity(NamedTuple):
    """Traced values of a sample site."""

    value: Any  # the observed value; the log density of a latent site
    log_prob: Any  # the log density
    scale: Any  # its factor, of plates and of `handlers.scale`


def check_factorises_over_plates(model_trace: ModelTrace) -> dict[str, tuple[str, ...]]:
    """Check that the log density is a sum over the rows of each plate.

    :return: by plate, the sites whose contribution of a row may depend on the number of rows. Only
        their values show whether it does.
    """
    plates, arguments = sorted(model_trace.plates.values()), model_trace.arguments
    indices = {p.name: np.arange(p.subsample_size) for p in plates}
    layouts: dict[str, _SiteLayout] = {}

    def evaluate(indices: Indices, arguments: Arguments) -> dict[str, _SiteDensity]:
        sites = trace_prior(model_trace.model_with_params, indices, arguments)
        densities = _compute_densities(sites)
        for name, density in densities.items():
            layouts[name] = _describe_layout(sites[name], density.log_prob)
        return densities

    jaxpr, shapes = jax.make_jaxpr(evaluate, return_shape=True)(indices, arguments)
    if not plates:
        return {}
    labels: list[_Sources] = [frozenset({p.name}) for p in plates]
    labels += [frozenset({None})] * (len(jaxpr.jaxpr.invars) - len(plates))
    sources = jax.tree.unflatten(jax.tree.structure(shapes), propagate_labels(jaxpr, labels))
    layouts_of_minibatch = dict(layouts)
    for name, layout in layouts_of_minibatch.items():
        site = sources[name]
        _check_rows_inside_plate(name, layout, site.value | site.log_prob, plates)
        _check_data_subsampled(name, layout, site.value, model_trace, indices)
    size_dependent_sites = {}
    for p in plates:
        more_indices = {**indices, p.name: np.arange(p.subsample_size + 1)}
        try:
            larger_jaxpr = jax.make_jaxpr(evaluate)(more_indices, arguments)
        except Exception as error:
            raise InvalidModelError(
                f"The model runs on {p.subsample_size} rows of the plate '{p.name}', but not on "
                f"{p.subsample_size + 1}.",
                "index every array with one entry per row by the plate's indices i. Write the "
                "number of rows in the minibatch as len(i)"
                f"{find_user_source_line(error)}. ({summarise_error(error)})",
                "minibatch-indexing",
            ) from error
        for name, layout in layouts_of_minibatch.items():
            _check_one_entry_per_row(name, layout, layouts[name], p)
            if p.name in sources[name].log_prob - sources[name].value:
                _check_not_a_scalar(name, layout, layouts[name], p, model_trace)
        outputs = compare_row_counts(jaxpr, larger_jaxpr)
        ratios = jax.tree.unflatten(jax.tree.structure(shapes), outputs)
        names = []
        for name, layout in layouts_of_minibatch.items():
            # The plate scales a minibatch to all rows.
            is_inside, size = p.name in layout.plate_dims, p.subsample_size
            expected, scale = size / (size + 1) if is_inside else 1.0, ratios[name].scale
            is_expected = scale is not None and np.isclose(scale, expected, 1e-6)
            if ratios[name].log_prob != 1.0 or not is_expected:
                names.append(name)
        if names:
            size_dependent_sites[p.name] = tuple(names)
    _check_array_lengths(jaxpr, model_trace)
    return size_dependent_sites


def _compute_densities(traced_sites: Mapping[str, Any]) -> dict[str, _SiteDensity]:
    densities = {}
    for name, site in traced_sites.items():
        if site["type"] != "sample":
            continue
        try:
            log_prob = site["fn"].log_prob(site["value"])
        except (TypeError, ValueError) as error:
            raise InvalidModelError(
                f"Site '{name}' has no log density for its value of type "
                f"{jnp.result_type(site['value'])} and shape {jnp.shape(site['value'])}.",
                f"pass data of the distribution's type and shape ({summarise_error(error)}).",
                "no-log-density",
            ) from error
        if jnp.iscomplexobj(log_prob):
            raise InvalidModelError(
                f"Site '{name}' has a complex log density.",
                "make its data and the parameters of its distribution real.",
                "no-log-density",
            )
        scale = 1.0 if site["scale"] is None else site["scale"]
        value = site["value"] if site["is_observed"] else log_prob
        densities[name] = _SiteDensity(value, log_prob, scale)
    return densities


def _describe_layout(site: Any, log_prob: Any) -> _SiteLayout:
    fn, shape = site["fn"], jnp.shape(site["value"])
    unexpanded_shape = jnp.shape(log_prob)
    if isinstance(fn, dist.ExpandedDistribution):
        unexpanded_shape = np.broadcast_shapes(
            fn.base_dist.batch_shape, shape[: len(shape) - len(fn.event_shape)]
        )
    return _SiteLayout(
        {f.name: f.dim for f in site["cond_indep_stack"]},
        fn.batch_shape,
        fn.event_shape,
        shape if site["is_observed"] else None,
        jnp.shape(log_prob),
        unexpanded_shape,
    )


def _check_rows_inside_plate(
    name: str, layout: _SiteLayout, sources: _Sources, plates: list[Plate]
) -> None:
    """Check that a site which uses a plate's rows is inside the plate."""
    for p in plates:
        if p.name in sources and p.name not in layout.plate_dims:
            raise InvalidModelError(
                f"Site '{name}' uses rows of the plate '{p.name}' outside of the plate.",
                "move the site into the plate, which scales the minibatch to all rows.",
                "outside-plate",
            )


def _check_data_subsampled(
    name: str, layout: _SiteLayout, sources: _Sources, model_trace: ModelTrace, indices: Indices
) -> None:
    """Check that data with one entry per row of the minibatch are those of its rows."""
    for p in sorted(model_trace.plates.values()):
        if not _is_same_in_every_minibatch(layout, sources, p):
            continue
        if None not in sources:  # constants: zeros in place of data may be meant for all rows
            value = np.asarray(_evaluate_site(name, model_trace, indices)["value"])
            axis = layout.plate_dims[p.name] - len(layout.event_shape)
            if (value == value.take([0], axis)).all():
                continue
        raise InvalidModelError(
            f"Site '{name}' observes the same data in every minibatch of the plate '{p.name}'.",
            "index the data by the plate's indices.",
            "data-not-indexed",
        )


def _is_same_in_every_minibatch(layout: _SiteLayout, sources: _Sources, plate: Plate) -> bool:
    """Return whether data have one entry per row of a minibatch, but do not depend on its rows."""
    if plate.name not in layout.plate_dims or plate.name in sources or not layout.data_shape:
        return False
    if 0 in layout.data_shape:  # of a factor
        return False
    axis = layout.plate_dims[plate.name] - len(layout.event_shape)
    if len(layout.data_shape) < -axis or layout.data_shape[axis] != plate.subsample_size:
        return False
    # One entry may be meant for all rows, unless the data look like rows selected by hand.
    return plate.subsample_size > 1 or sources == {None}


def _evaluate_site(name: str, model_trace: ModelTrace, indices: Indices) -> Any:
    """Return a site with values, of a run of the model on some rows."""
    with validation_enabled(False):  # a prior value may be invalid where no chain ever is
        return trace_prior(model_trace.model_with_params, indices, model_trace.arguments)[name]


def _check_one_entry_per_row(
    name: str, layout: _SiteLayout, larger_layout: _SiteLayout, plate: Plate
) -> None:
    """Check that one row more is one entry more along the plate's dimension, and nowhere else."""
    plate_dim = layout.plate_dims.get(plate.name)
    is_event_larger = larger_layout.event_shape != layout.event_shape
    if is_event_larger and plate_dim is not None:
        raise InvalidModelError(
            f"Site '{name}' has the rows of the plate '{plate.name}' in its event shape as well.",
            "leave out `to_event` for the dimension of the rows, so that each row has a density.",
            "rows-in-event",
        )
    before, after = layout.log_prob_shape, larger_layout.log_prob_shape
    larger_dims = [
        d
        for d in range(-max(len(before), len(after)), 0)
        if (before[d] if -d <= len(before) else 1) != (after[d] if -d <= len(after) else 1)
    ]
    if plate_dim is None and (larger_dims or is_event_larger):
        raise InvalidModelError(
            f"Site '{name}' has one entry per row of the plate '{plate.name}', but is outside it.",
            "move the site into the plate.",
            "outside-plate",
        )
    if any(d != plate_dim for d in larger_dims):
        data = "" if layout.data_shape is None else f"data of shape {layout.data_shape} and "
        raise InvalidModelError(
            f"Site '{name}' compares every row of the plate '{plate.name}' with every other row.",
            f"give its {data}distribution of shape {layout.batch_shape + layout.event_shape} the "
            "same shape, for example by y[:, 0].",
            "pairs-of-rows",
        )


def _check_not_a_scalar(
    name: str,
    layout: _SiteLayout,
    larger_layout: _SiteLayout,
    plate: Plate,
    model_trace: ModelTrace,
) -> None:
    """Check that a log density which depends on a plate's rows has one entry for each of them.

    The plate would count it once per row. A mean over the minibatch is right nevertheless: on
    copies of one row it has the same value, whatever their number.
    """
    plate_dim = layout.plate_dims[plate.name]
    shapes = [x.unexpanded_shape for x in (layout, larger_layout)]
    sizes = [(1, *shape)[max(plate_dim, -1 - len(shape))] for shape in shapes]
    if layout.data_shape is None or sizes[0] != sizes[1]:
        return
    first_rows = {p.name: np.arange(p.subsample_size) for p in model_trace.plates.values()}
    values = []
    for num_copies in (plate.subsample_size, 2 * plate.subsample_size):
        indices = {**first_rows, plate.name: np.zeros(num_copies, int)}
        site = _evaluate_site(name, model_trace, indices)
        values.append(np.asarray(site["fn"].log_prob(site["value"])).mean())
    if not np.isclose(values[0], values[1], rtol=_SCALAR_TOLERANCE, equal_nan=True):
        raise InvalidModelError(
            f"Site '{name}' is one number for the minibatch of the plate '{plate.name}', which "
            "counts it once per row.",
            "leave out the sum over rows, so that the site has one entry per row.",
            "scalar-in-plate",
        )


def _check_array_lengths(jaxpr: ClosedJaxpr, model_trace: ModelTrace) -> None:
    """Check that the arrays which a plate's rows look up have the length of the plate."""
    plates = model_trace.plates
    for array, plate in model_trace.row_lookups:
        if len(array) != plates[plate].size:
            raise plate_array_length_error(plate, plates[plate].size, repr(array), len(array))
    names = [name for name, _ in model_trace.arguments.named_arrays(model_trace.model)]
    for gather in find_row_gathers(jaxpr, sorted(plates), names):
        size = plates[gather.plate].size
        if gather.num_rows != size:
            array_name = gather.array_name or "an array"
            raise plate_array_length_error(gather.plate, size, array_name, gather.num_rows)


class RowGather(NamedTuple):
    """A lookup of an array by the rows of a plate."""

    plate: str  # name of the plate whose indices are used
    num_rows: int  # length of the dimension that they index
    array_name: str | None  # name of the array, or None where it does not come from one argument


def find_row_gathers(
    jaxpr: Jaxpr | ClosedJaxpr, plate_names: Sequence[str], array_names: Sequence[str]
) -> list[RowGather]:
    """Return the gathers in which a plate's indices, unchanged, are the rows that are looked up.

    Arithmetic on an index (``i // 10``, ``i - 1``) makes it the user's own, and is not followed.

    :param jaxpr: the model, as a function of the plates' indices and then of the arrays.
    """
    walk = LookupWalk(enters_while=True)
    indices = [ArrayIndex(plates=frozenset({p}), holder=p) for p in plate_names]
    indices += [ArrayIndex(sources=frozenset({name})) for name in array_names]
    walk.run(jaxpr, [TracedArray((index,)) for index in indices])
    gathers = []
    for x in walk.lookups:
        names = x.array.index.sources - {None}
        name = next(iter(names)) if len(names) == 1 else None
        gathers += [
            RowGather(column.holder, last + 1, name)
            for column, last, is_read in zip(x.columns, x.last, x.reads_entries, strict=True)
            if is_read and column.holder is not None and not column.sources
        ]
    return gathers
