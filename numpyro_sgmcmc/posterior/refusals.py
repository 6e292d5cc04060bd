"""What a model may get wrong about its plates' rows, and what a failed model run means.

A potential is a sum over rows, and a minibatch stands for all of them, only where every site that
uses a plate's rows stands inside of the plate, once a row. What breaks this gives numbers all the
same, so that it is looked for: on the model's jaxpr, which shows where the indices go, and on its
shapes with one row more.
"""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.checks import first_line
from numpyro_sgmcmc.data.arguments import Arguments, is_array
from numpyro_sgmcmc.data.host import HostArray
from numpyro_sgmcmc.data.plates import Indices, Plate
from numpyro_sgmcmc.data.sharded import ShardedArray
from numpyro_sgmcmc.posterior.dataflow import origins

__all__ = [
    "check_rows_of_sites",
    "failure",
]

_LIBRARIES = str(Path(__file__).parents[1]), sysconfig.get_path("stdlib")
_RIGHT = (np.generic, HostArray, ShardedArray)
_NOT_CONCRETE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


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


def check_rows_of_sites(
    run: Callable[[Indices, Arguments], Mapping[str, Any]],
    plates: Iterable[Plate],
    arguments: Arguments,
) -> None:
    """Refuse a model whose log density is no sum over its plates' rows.

    :param run: maps rows of the subsampled plates and the arguments to the model's trace.
    :param plates: the subsampled plates.
    :param arguments: the model's arguments.
    :raises ValueError: naming site and plate.
    """
    plates = sorted(plates)
    rows = {p.name: np.arange(p.subsample_size) for p in plates}
    forms: dict[str, _Form] = {}

    def sites(indices: Indices, arguments: Arguments) -> dict[str, tuple[Any, Any]]:
        found = {}
        forms.clear()
        for name, site in run(indices, arguments).items():
            if site["type"] != "sample":
                continue
            try:
                log_prob = site["fn"].log_prob(site["value"])
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"Site '{name}' has no log density for its value, of type "
                    f"{jnp.result_type(site['value'])} and shape {jnp.shape(site['value'])}: "
                    f"{first_line(error)}."
                ) from error
            if jnp.iscomplexobj(log_prob):
                raise ValueError(
                    f"Site '{name}' has a complex log density: its data and the parameters of its "
                    "distribution must be real."
                )
            value = site["value"] if site["is_observed"] else log_prob
            forms[name] = _Form(
                {f.name: f.dim for f in site["cond_indep_stack"]},
                site["fn"].batch_shape,
                site["fn"].event_shape,
                jnp.shape(value) if site["is_observed"] else None,
                jnp.shape(log_prob),
            )
            found[name] = value, log_prob
        return found

    jaxpr, shapes = jax.make_jaxpr(sites, return_shape=True)(rows, arguments)
    if not plates:
        return
    given: list[frozenset] = [frozenset({p.name}) for p in plates]
    given += [frozenset({None})] * (len(jaxpr.jaxpr.invars) - len(given))
    found = jax.tree.unflatten(jax.tree.structure(shapes), origins(jaxpr.jaxpr, given))
    own = dict(forms)
    for name, form in own.items():
        value, log_prob = found[name]
        for p in plates:
            if p.name in value | log_prob and p.name not in form.dims:
                raise ValueError(
                    f"Site '{name}' uses rows of the plate '{p.name}', but stands outside of it, "
                    "where a minibatch is not scaled up to all rows: move it into the plate."
                )
        for p in plates:
            if _is_fixed(form, value, p) and (
                None in value or not _is_uniform(run, rows, arguments, name, form, p)
            ):
                raise ValueError(
                    f"Site '{name}' observes the same data in every minibatch of the plate "
                    f"'{p.name}': index the data by the plate's indices."
                )
    for p in plates:
        more = {**rows, p.name: np.arange(p.subsample_size + 1)}
        try:
            jax.eval_shape(sites, more, arguments)
        except Exception as error:
            raise ValueError(
                f"The model can be run on {p.subsample_size} rows of the plate '{p.name}', but not "
                f"on {p.subsample_size + 1}{_place(error)}: index whatever has one entry a row by "
                f"the plate's indices. ({first_line(error)})"
            ) from error
        for name, form in own.items():
            _check_growth(name, form, forms[name], p)


def _is_fixed(form: _Form, origins_of_value: frozenset, plate: Plate) -> bool:
    """Whether an observed value has as many entries as the minibatch rows, but not the rows'."""
    if plate.name not in form.dims or plate.name in origins_of_value or not form.data_shape:
        return False
    if 0 in form.data_shape:  # a factor's
        return False
    axis = form.dims[plate.name] - len(form.event_shape)
    if len(form.data_shape) < -axis or form.data_shape[axis] != plate.subsample_size:
        return False
    # One entry may be meant for all rows, unless the data look like rows taken by hand.
    return plate.subsample_size > 1 or origins_of_value == {None}


def _is_uniform(
    run: Callable, rows: Indices, arguments: Arguments, name: str, form: _Form, plate: Plate
) -> bool:
    """Whether an observed value is the same for all rows, as where zeros stand for data."""
    value = np.asarray(run(rows, arguments)[name]["value"])
    axis = form.dims[plate.name] - len(form.event_shape)
    return bool((value == value.take([0], axis)).all())


def _check_growth(name: str, form: _Form, larger: _Form, plate: Plate) -> None:
    """Whether one row more is one entry more of the site along the plate's dimension."""
    own = form.dims.get(plate.name)
    if larger.event_shape != form.event_shape and own is not None:
        raise ValueError(
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
        raise ValueError(
            f"Site '{name}' has one entry for each row of the plate '{plate.name}', but stands "
            "outside of it: move it into the plate."
        )
    if any(d != own for d in grown):
        data = "" if form.data_shape is None else f"its data have shape {form.data_shape} and "
        raise ValueError(
            f"Site '{name}' compares every row of the plate '{plate.name}' with every other: "
            f"{data}its distribution {form.batch_shape + form.event_shape}. Make the two agree, "
            "for example by y[:, 0]."
        )


def failure(
    error: Exception, model: Callable, arguments: Arguments, fails_on_all_rows: Callable[[], bool]
) -> Exception | None:
    """The error to raise for one that a model run ended with; None where the rows are to blame.

    :param error: what was raised.
    :param model: the model.
    :param arguments: its arguments.
    :param fails_on_all_rows: whether the model fails on all rows as well.
    """
    if isinstance(error, TypeError) and (misfit := _misfit(model, arguments)):
        return TypeError(f"The model cannot be called with these arguments: {misfit}.")
    if str(error).startswith("Inside numpyro.plate"):
        return ValueError(f"{first_line(error)}. Make the array as long as the plate.")
    if isinstance(error, AssertionError):
        empty = [n for n, x in arguments.named_arrays(model) if 0 in np.shape(x)[:1]]
        if "size of plate" not in str(error) or not empty:
            return error
        return ValueError(f"A plate has no rows: {' and '.join(empty)} has none.")
    unusual = list(_unusual(model, arguments))
    if isinstance(error, _NOT_CONCRETE):
        if _is_in_plate_statement(error):
            return ValueError(
                f"The size or subsample_size of a plate is an array{_place(error)}, which JAX "
                "traces: pass a Python integer."
            )
        if unusual:
            return ValueError(f"The model cannot use {' and '.join(unusual)}.")
        return ValueError(
            f"The model turns what JAX traces into a Python or NumPy value{_place(error)}: latent "
            "sites, arrays among the arguments and a plate's indices have no value there. Use "
            "jax.numpy (jnp.where in place of `if`), and compute what is needed of the data before "
            f"the run. ({type(error).__name__})"
        )
    if not isinstance(error, (TypeError, ValueError)):
        return error
    if any(str(error).startswith(repr(a)) for a in (*arguments.hosts, *arguments.sharded)):
        return ValueError(f"The model fails{_place(error)}: {error}")
    if unusual:
        return ValueError(f"The model cannot use {' and '.join(unusual)}. ({first_line(error)})")
    if fails_on_all_rows():
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        none = [f"`{n}` is None" for n, x in _named(model, arguments) if x is None]
        if none and "NoneType" in str(error):
            return ValueError(
                f"The model fails{_place(error)}: {' and '.join(none)}. ({first_line(error)})"
            )
        # The user's own line, or a sentence of NumPyro's, says it best.
        is_numpyros = "numpyro" in Path(last).parts and "shapes" not in str(error)
        if is_numpyros or not _is_library(last):
            return error
        shapes = ", ".join(f"{n} {np.shape(x)}" for n, x in arguments.named_arrays(model))
        return ValueError(
            f"The model fails{_place(error)}, on all rows as well: look at the shapes of its "
            f"arguments, {shapes or 'none of them an array'}. ({first_line(error)})"
        )
    return None


def _misfit(model: Callable, arguments: Arguments) -> str:
    """Why the arguments do not fit the model's signature, if they do not."""
    try:
        signature = inspect.signature(model)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*arguments.args, **arguments.kwargs)
    except TypeError as error:
        return str(error)
    return ""


def _named(model: Callable, arguments: Arguments) -> Iterable[tuple[str, Any]]:
    """The arguments with the names that they have in the model's signature."""
    try:
        names = list(inspect.signature(model).parameters)
    except (TypeError, ValueError):
        names = []
    named = {
        (names[k] if k < len(names) else f"argument {k}"): x for k, x in enumerate(arguments.args)
    }
    return {**named, **arguments.kwargs}.items()


def _unusual(model: Callable, arguments: Arguments) -> Iterable[str]:
    """What is passed in place of arrays, each with its name and what to do."""
    for name, x in _named(model, arguments):
        yield from _not_arrays(name, x)


def _not_arrays(name: str, x: Any) -> Iterable[str]:
    if isinstance(x, dict):
        for key, value in x.items():
            yield from _not_arrays(f"{name}[{key!r}]", value)
    elif isinstance(x, (list, tuple)):
        if x and all(isinstance(leaf, (bool, int, float)) for leaf in jax.tree.leaves(x)):
            yield f"`{name}`, a {type(x).__name__} of numbers: pass numpy.asarray({name})"
    elif isinstance(x, np.ndarray) and not is_array(x):
        yield f"`{name}`, an array of type {x.dtype}: pass numbers"
    elif hasattr(x, "iloc"):
        yield f"`{name}`, a {type(x).__name__}: pass {name}.to_numpy()"
    elif hasattr(x, "__array__") and not is_array(x) and not isinstance(x, _RIGHT):
        yield f"`{name}`, a {type(x).__name__}: pass numpy.asarray({name})"


def _is_library(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file or file.startswith(_LIBRARIES)


def _place(error: BaseException) -> str:
    """The user's line that an error comes from, as a part of a sentence."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not (_is_library(frame.filename) or frame.filename.startswith("<")):
            line = f", `{frame.line}`" if frame.line else ""
            return f" at {Path(frame.filename).name}:{frame.lineno}{line}"
    return ""


def _is_in_plate_statement(error: BaseException) -> bool:
    return any(
        f.name == "_subsample" and f.filename.endswith("primitives.py")
        for f in traceback.extract_tb(error.__traceback__)
    )
