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

from numpyro_sgmcmc.checks import Refusal, first_line
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.plates import Indices, Plate
from numpyro_sgmcmc.posterior.dataflow import provenance, row_gathers
from numpyro_sgmcmc.posterior.facts import Facts
from numpyro_sgmcmc.posterior.failures import users_line
from numpyro_sgmcmc.posterior.handlers import prior_trace

__all__ = ["refuse_what_is_no_sum_over_rows"]

_Plates = frozenset[str | None]
"""Names of the plates whose rows a value depends on, and None for the arguments."""


class _Form(NamedTuple):
    """
    - **dims** - the plates' dimensions, by plate, at this site.
    - **batch_shape** - of the distribution.
    - **event_shape** - of the distribution.
    - **data_shape** - of the observed value; None for a latent site.
    - **shape** - of the log density.
    """

    dims: dict[str, int]
    batch_shape: tuple[int, ...]
    event_shape: tuple[int, ...]
    data_shape: tuple[int, ...] | None
    shape: tuple[int, ...]


def refuse_what_is_no_sum_over_rows(facts: Facts) -> None:
    """Refuse a model whose log density is no sum over its plates' rows.

    :raises ValueError: naming site and plate, or plate and array.
    """
    plates, arguments = sorted(facts.plates.values()), facts.arguments
    rows = {p.name: np.arange(p.subsample_size) for p in plates}
    forms: dict[str, _Form] = {}

    def densities(indices: Indices, arguments: Arguments) -> dict[str, tuple[Any, Any]]:
        seen = prior_trace(facts.settled_model, indices, arguments)
        found = _densities(seen)
        forms.update({name: _form(seen[name], log_prob) for name, (_, log_prob) in found.items()})
        return found

    jaxpr, shapes = jax.make_jaxpr(densities, return_shape=True)(rows, arguments)
    if not plates:
        return
    given: list[_Plates] = [frozenset({p.name}) for p in plates]
    given += [frozenset({None})] * (len(jaxpr.jaxpr.invars) - len(given))
    found = jax.tree.unflatten(jax.tree.structure(shapes), provenance(jaxpr.jaxpr, given))
    own = dict(forms)
    for name, form in own.items():
        value, log_prob = found[name]
        _refuse_rows_outside(name, form, value | log_prob, plates)
        _refuse_same_data(name, form, value, facts, rows)
    for p in plates:
        more = {**rows, p.name: np.arange(p.subsample_size + 1)}
        try:
            jax.eval_shape(densities, more, arguments)
        except Exception as error:
            raise Refusal(
                f"The model can be run on {p.subsample_size} rows of the plate '{p.name}', but not "
                f"on {p.subsample_size + 1}{users_line(error)}: index whatever has one entry a row "
                f"by the plate's indices. ({first_line(error)})"
            ) from error
        for name, form in own.items():
            _refuse_pairs(name, form, forms[name], p)
    _refuse_other_lengths(jaxpr.jaxpr, facts)


def _densities(seen: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The value of each observed site, with the log density; the latter twice for a latent one."""
    found = {}
    for name, site in seen.items():
        if site["type"] != "sample":
            continue
        try:
            log_prob = site["fn"].log_prob(site["value"])
        except (TypeError, ValueError) as error:
            raise Refusal(
                f"Site '{name}' has no log density for its value, of type "
                f"{jnp.result_type(site['value'])} and shape {jnp.shape(site['value'])}: "
                f"{first_line(error)}."
            ) from error
        if jnp.iscomplexobj(log_prob):
            raise Refusal(
                f"Site '{name}' has a complex log density: its data and the parameters of its "
                "distribution must be real."
            )
        found[name] = site["value"] if site["is_observed"] else log_prob, log_prob
    return found


def _form(site: Any, log_prob: Any) -> _Form:
    return _Form(
        {f.name: f.dim for f in site["cond_indep_stack"]},
        site["fn"].batch_shape,
        site["fn"].event_shape,
        jnp.shape(site["value"]) if site["is_observed"] else None,
        jnp.shape(log_prob),
    )


def _refuse_rows_outside(name: str, form: _Form, used: _Plates, plates: list[Plate]) -> None:
    """Refuse a site that uses a plate's rows outside of the plate."""
    for p in plates:
        if p.name in used and p.name not in form.dims:
            raise Refusal(
                f"Site '{name}' uses rows of the plate '{p.name}', but stands outside of it, "
                "where a minibatch is not scaled up to all rows: move it into the plate."
            )


def _refuse_same_data(
    name: str, form: _Form, origins: _Plates, facts: Facts, rows: Indices
) -> None:
    """Refuse data that are as many as the minibatch's rows, but not theirs."""
    for p in sorted(facts.plates.values()):
        if _is_fixed(form, origins, p) and (
            None in origins or not _is_uniform(name, form, p, facts, rows)
        ):
            raise Refusal(
                f"Site '{name}' observes the same data in every minibatch of the plate "
                f"'{p.name}': index the data by the plate's indices."
            )


def _is_fixed(form: _Form, origins: _Plates, plate: Plate) -> bool:
    """Whether an observed value has as many entries as the minibatch rows, but not the rows'."""
    if plate.name not in form.dims or plate.name in origins or not form.data_shape:
        return False
    if 0 in form.data_shape:  # a factor's
        return False
    axis = form.dims[plate.name] - len(form.event_shape)
    if len(form.data_shape) < -axis or form.data_shape[axis] != plate.subsample_size:
        return False
    # One entry may be meant for all rows, unless the data look like rows taken by hand.
    return plate.subsample_size > 1 or origins == {None}


def _is_uniform(name: str, form: _Form, plate: Plate, facts: Facts, rows: Indices) -> bool:
    """Whether an observed value is the same for all rows, as where zeros stand for data."""
    with validation_enabled(False):  # a draw from the prior may be one that no chain comes to
        found = prior_trace(facts.settled_model, rows, facts.arguments)
    value = np.asarray(found[name]["value"])
    axis = form.dims[plate.name] - len(form.event_shape)
    return bool((value == value.take([0], axis)).all())


def _refuse_pairs(name: str, form: _Form, larger: _Form, plate: Plate) -> None:
    """Refuse a site where one row more is not one entry more along the plate's dimension."""
    own = form.dims.get(plate.name)
    if larger.event_shape != form.event_shape and own is not None:
        raise Refusal(
            f"Site '{name}' has the rows of the plate '{plate.name}' in its event, of shape "
            f"{form.event_shape}, and once more in the plate: leave out `to_event`, so that each "
            "row has a density of its own."
        )
    before, after = form.shape, larger.shape
    grown = [
        d
        for d in range(-max(len(before), len(after)), 0)
        if (before[d] if -d <= len(before) else 1) != (after[d] if -d <= len(after) else 1)
    ]
    if own is None and (grown or larger.event_shape != form.event_shape):
        raise Refusal(
            f"Site '{name}' has one entry for each row of the plate '{plate.name}', but stands "
            "outside of it: move it into the plate."
        )
    if any(d != own for d in grown):
        data = "" if form.data_shape is None else f"its data have shape {form.data_shape} and "
        raise Refusal(
            f"Site '{name}' compares every row of the plate '{plate.name}' with every other: "
            f"{data}its distribution {form.batch_shape + form.event_shape}. Make the two agree, "
            "for example by y[:, 0]."
        )


def _refuse_other_lengths(jaxpr: Jaxpr, facts: Facts) -> None:
    """Refuse arrays that a plate's rows look up, with another number of rows than the plate.

    :param jaxpr: of the model, as a function of the rows and the arguments.
    """
    plates = facts.plates
    for array, plate in facts.indexed:
        if len(array) != plates[plate].size:
            raise Refusal(
                f"The plate '{plate}' has size {plates[plate].size}, but {array!r}, which it "
                f"indexes, has {len(array)} rows. Make the two agree."
            )
    rows = dict(zip(jaxpr.invars, sorted(plates), strict=False))
    named = [name for name, _ in facts.arguments.named_arrays(facts.model)]
    arrays = dict(zip(jaxpr.invars[len(plates) :], named, strict=True))
    for found in row_gathers(jaxpr, rows, arrays):
        size = plates[found.plate].size
        if found.length != size:
            raise Refusal(
                f"The plate '{found.plate}' has size {size}, but {found.array or 'an array'} that "
                f"it indexes has {found.length} rows. Make the two agree: JAX would read other "
                "rows without a word."
            )
