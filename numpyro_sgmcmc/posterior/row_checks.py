"""Refused: a log density that is no sum over its plates' rows, with each in its place.

A minibatch stands for all rows only where every site that uses a plate's rows stands inside of the
plate, once a row, and where what the rows look up has as many. What breaks this gives numbers all
the same, so that it is looked for: on the model's jaxpr, which shows where the indices go, and on
its shapes with one row more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr
from numpyro import validation_enabled

from numpyro_sgmcmc.checks import InvalidArgumentError, summarise_error
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.plates import Indices, Plate
from numpyro_sgmcmc.posterior.dataflow import find_row_gathers, propagate_labels
from numpyro_sgmcmc.posterior.facts import ModelTrace
from numpyro_sgmcmc.posterior.failures import find_user_source_line
from numpyro_sgmcmc.posterior.handlers import trace_prior

__all__ = ["check_factorises_over_plates"]

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
    rows = dict(zip(jaxpr.invars, sorted(plates), strict=False))
    named = [name for name, _ in model_trace.arguments.named_arrays(model_trace.model)]
    arrays = dict(zip(jaxpr.invars[len(plates) :], named, strict=True))
    for found in find_row_gathers(jaxpr, rows, arrays):
        size = plates[found.plate].size
        if found.num_rows != size:
            raise InvalidArgumentError(
                f"The plate '{found.plate}' has size {size}, but {found.array_name or 'an array'} that "
                f"it indexes has {found.num_rows} rows. Make the two agree: JAX would read other "
                "rows without a word."
            )
