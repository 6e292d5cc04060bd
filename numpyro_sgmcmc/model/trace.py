"""Trace a NumPyro model once and describe its sites and plates.

:func:`trace_model` runs the model on the first rows of its plates, without computing on data, and
returns a :class:`ModelTrace`: plain descriptions of all sites and plates, from which the checks of
:mod:`~numpyro_sgmcmc.model.validation` and the potential are built. A run that fails raises an
error with a fix; :func:`translate_model_error` is the only place that recognises errors of NumPyro,
JAX and Python by their type and text.
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro import validation_enabled
from numpyro.distributions import biject_to
from numpyro.handlers import substitute

from numpyro_sgmcmc.data.arguments import MAX_CONSTANT_BYTES, Arguments, is_array
from numpyro_sgmcmc.data.host_array import RowArray, RowIndexError
from numpyro_sgmcmc.data.row_proxies import IndexingRecorder, PlateIndexRegistry, RowLookup
from numpyro_sgmcmc.data.sharded_array import Shards
from numpyro_sgmcmc.data.subsampling import Plate
from numpyro_sgmcmc.errors import (
    InvalidArgumentError,
    InvalidModelError,
    format_message,
    is_library_file,
    summarise_error,
)
from numpyro_sgmcmc.model.enumeration import EnumeratedSites
from numpyro_sgmcmc.model.handlers import FullDataModel, trace_prior
from numpyro_sgmcmc.model.numpy_values import NumPyArgumentsModel


class TracedSite(NamedTuple):
    """NumPyro's type of a named statement, and the names of the subsampled plates around it."""

    site_type: str
    plates: tuple[str, ...]


class SampleSite(NamedTuple):
    """A sample statement of the model; the fields from ``dtype`` on are those of a latent site."""

    name: str
    plate_frames: tuple[Any, ...]  # NumPyro's (name, dim, size) of the subsampled plates around it
    is_observed: bool
    shape: tuple[int, ...]
    batch_shape: tuple[int, ...]
    event_shape: tuple[int, ...]
    full_plates: tuple[str, ...]  # names of the other plates around it, the outermost last
    unplated_dims: tuple[int, ...] = ()  # batch dimensions without a plate, where others have one
    dtype: Any = None
    support: Any = None
    is_delta: bool = False  # whether its distribution is a point mass
    is_enumerable: bool = False  # whether it is discrete and NumPyro can enumerate its states
    is_marked: bool = False  # whether its `infer` has a value of "enumerate"
    unconstrained_shape: tuple[int, ...] | None = None  # None where there is no bijection

    @property
    def is_enumerated(self) -> bool:
        """True if it is a discrete site inside a subsampled plate that is summed out."""
        return self.is_enumerable and bool(self.plate_frames)

    @property
    def is_local(self) -> bool:
        """True if it is a latent site inside a subsampled plate that is not summed out."""
        return bool(self.plate_frames) and not (self.is_observed or self.is_enumerated)

    @property
    def row_axis(self) -> int:
        """Axis of the rows in the value of a site inside a subsampled plate."""
        return len(self.batch_shape) + self.plate_frames[0].dim

    @property
    def is_global(self) -> bool:
        """True if it is a latent site outside of all subsampled plates."""
        return not self.plate_frames and not self.is_observed


class LatentSite(NamedTuple):
    """A latent site as coordinates of a position."""

    name: str  # name of the site
    # Of the unconstrained value, of all rows inside a subsampled plate; of one row's constrained
    # value where `gibbs_fn` samples it.
    shape: tuple[int, ...]
    support: Any  # the distribution's support; None where it depends on other values
    # inside a subsampled plate, axis of the rows in the values that the model sees
    row_axis: int | None = None
    dtype: Any = None  # inside a subsampled plate, type of the values

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return math.prod(self.shape)


class GibbsConfig(NamedTuple):
    """Settings for local sites that the user samples from their conditionals."""

    gibbs_fn: Callable | None = None  # the user's function, or None
    site_names: tuple[str, ...] = ()  # names of the sites that it samples
    # Calls for values that start from their prior at each minibatch and are dropped after the step;
    # None for values that are kept.
    num_sweeps: int | None = None


NO_GIBBS = GibbsConfig()


@dataclass(frozen=True, eq=False)
class ModelTrace:
    """Description of a model from one run on the first rows of its plates."""

    model: Callable  # the model as the user gave it
    model_with_params: Callable  # the model with the first values of `param` and `mutable` sites
    arguments: Arguments
    init_strategy: Callable
    gibbs: GibbsConfig
    unsharded_plates: Mapping[str, Plate]  # the subsampled plates by name, as the model states them
    traced_sites: Mapping[str, TracedSite]  # all named statements
    sample_sites: tuple[SampleSite, ...]  # the sample statements, in the model's order
    row_lookups: tuple[RowLookup, ...]  # the host and sharded arrays that a plate's rows index
    max_plate_nesting: int  # number of batch dimensions that plates use

    @property
    def enumerated_sites(self) -> EnumeratedSites | None:
        """The discrete sites that are summed out, or None where there are none."""
        sites = [site for site in self.sample_sites if site.is_enumerated]
        if not sites:
            return None
        plate = self.unsharded_plates[sites[0].plate_frames[0].name]
        observed = [
            s.name
            for s in self.sample_sites
            if s.is_observed and plate.name in [f.name for f in s.plate_frames]
        ]
        return EnumeratedSites(
            names=tuple(s.name for s in sites),
            plate=plate.name,
            plate_size=plate.size,
            max_plate_nesting=self.max_plate_nesting,
            row_name=observed[0] if len(observed) == 1 else plate.name,
        )

    @property
    def local_sites(self) -> list[SampleSite]:
        """Latent sites inside a subsampled plate that are not summed out."""
        return [site for site in self.sample_sites if site.is_local]

    @property
    def shards(self) -> Shards | None:
        """Layout of the rows over devices, or None where they are not sharded."""
        arrays = self.arguments.sharded_arrays
        return arrays[0].shards if arrays else None

    @cached_property
    def plates(self) -> dict[str, Plate]:
        """The subsampled plates by name; sharded ones take the same number of rows per device."""
        shards, plates = self.shards, dict(self.unsharded_plates)
        if shards is not None:
            for name in {x.plate for x in self.row_lookups}:
                plates[name] = plates[name].with_shards(shards)
        return plates

    @property
    def plate_groups(self) -> tuple[tuple[Plate, ...], ...]:
        """The plates; those that enclose a common site are in one group."""
        groups = [{name} for name in self.plates]
        for site in self.traced_sites.values():
            joined = [group for group in groups if group & set(site.plates)]
            if len(joined) > 1:
                groups = [g for g in groups if g not in joined] + [set().union(*joined)]
        return tuple(tuple(self.plates[n] for n in self.plates if n in g) for g in groups)


def site_slices(sites: Iterable[LatentSite]) -> dict[str, slice]:
    """Return each site's slice of the flat coordinates, by name."""
    slices, start = {}, 0
    for site in sites:
        slices[site.name] = slice(start, start + site.size)
        start += site.size
    return slices


def is_fixed_support(support: Any) -> bool:
    """Return whether a support is the same whatever the data and the other sites."""
    # An array among its bounds may be the value of another site, or come from the data.
    return all(isinstance(x, (int, float)) for x in jax.tree.leaves(support))


def get_base_distribution(fn: Any) -> Any:
    """Return the innermost distribution of one that may be expanded, masked or transformed."""
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return fn


def trace_model(
    model: Callable, arguments: Arguments, init_strategy: Callable, gibbs: GibbsConfig = NO_GIBBS
) -> ModelTrace:
    """Run a model once on the first rows of its plates and describe its statements.

    A model that fails with traced arguments is run as a :class:`.NumPyArgumentsModel`.

    :param arguments: only shapes and static values count, except where the model has ``param`` or
        ``mutable`` sites (neural networks), whose first values are kept, or computes with NumPy.
    """
    run = _TracingRun(arguments)
    try:
        return _trace_model(model, run, arguments, init_strategy, gibbs)
    except (InvalidArgumentError, InvalidModelError):
        raise
    except Exception as error:
        numpy_model, numpy_run = NumPyArgumentsModel(model, arguments), _TracingRun(arguments)
        try:
            return _trace_model(numpy_model, numpy_run, arguments, init_strategy, gibbs)
        except Exception as numpy_error:
            if isinstance(error, _CONCRETIZATION_ERRORS):
                error, run = numpy_error, numpy_run
            if isinstance(error, (InvalidArgumentError, InvalidModelError)):
                raise error from None
            plates = tuple(run.plates.values())
            translated = translate_model_error(error, numpy_model, arguments, plates)
            if translated is error:
                raise error from None
            raise translated from error


def _trace_model(
    model: Callable,
    run: _TracingRun,
    arguments: Arguments,
    init_strategy: Callable,
    gibbs: GibbsConfig,
) -> ModelTrace:
    """Return the description of a model's statements in one run."""
    traced_sites: dict[str, TracedSite] = {}
    sample_sites: list[SampleSite] = []
    plate_dims: set[int] = set()

    def describe(arguments: Arguments) -> None:
        # Values exist only while they are traced, so that they are described at once.
        for name, site in run.trace(model, arguments).items():
            frames = tuple(f for f in site.get("cond_indep_stack", ()) if f.name in run.plates)
            traced_sites[name] = TracedSite(site["type"], tuple(f.name for f in frames))
            if site["type"] == "sample":
                plate_dims.update(f.dim for f in site["cond_indep_stack"])
                sample_sites.append(_describe_sample_site(site, frames, name in gibbs.site_names))

    jax.eval_shape(describe, arguments)
    param_names = [n for n, s in traced_sites.items() if s.site_type in ("param", "mutable")]
    with validation_enabled(False):  # a prior value may be invalid where no chain ever is
        params = _TracingRun(arguments).trace(model, arguments) if param_names else {}
    return ModelTrace(
        model=model,
        model_with_params=substitute(model, data={n: params[n]["value"] for n in param_names}),
        arguments=arguments,
        init_strategy=init_strategy,
        gibbs=gibbs,
        unsharded_plates=run.plates,
        traced_sites=traced_sites,
        sample_sites=tuple(sample_sites),
        row_lookups=tuple(run.row_lookups),
        max_plate_nesting=-min(plate_dims, default=0),
    )


class _TracingRun:
    """One run of a model on the first rows of its plates; its records remain where it fails."""

    def __init__(self, arguments: Arguments) -> None:
        self.sharded_arrays = arguments.sharded_arrays
        self.plates: dict[str, Plate] = {}
        self.index_registry = PlateIndexRegistry()
        self.row_lookups: dict[RowLookup, None] = {}

    def trace(self, model: Callable, arguments: Arguments) -> dict[str, Any]:
        """Return the model's trace, with latent sites from the prior."""
        user_arrays = iter(self.sharded_arrays)
        arguments = arguments.map_arrays(jnp.asarray)
        arguments = arguments.map_host_arrays(
            lambda a: IndexingRecorder(a, self.index_registry, self.row_lookups)
        )
        arguments = arguments.map_sharded_arrays(
            lambda a: IndexingRecorder(a, self.index_registry, self.row_lookups, next(user_arrays))
        )
        return trace_prior(model, self._register_plate, arguments)

    def _register_plate(self, name: str, size: int, subsample_size: Any) -> Array:
        # An array without dimensions comes from an argument of the model.
        is_array = isinstance(subsample_size, np.ndarray) and subsample_size.ndim == 0
        subsample_size = subsample_size[()] if is_array else subsample_size
        is_int = isinstance(subsample_size, (int, np.integer))
        is_int = is_int and not isinstance(subsample_size, bool)
        if not (is_int and 0 < subsample_size <= size):
            raise InvalidModelError(
                f"Plate '{name}' has subsample_size={subsample_size!r} and size {size}.",
                f"pass an integer subsample_size from 1 to {size}.",
                "subsample-size",
            )
        if name in self.plates and self.plates[name].size != size:
            raise InvalidModelError(
                f"Plate '{name}' has size {self.plates[name].size} in one place of the model and "
                f"{size} in another.",
                "give the two plates different names.",
                "plate-name",
            )
        self.plates[name] = Plate(name, size, subsample_size)
        return self.index_registry.register(name, jnp.arange(subsample_size))


def _describe_sample_site(
    site: Any, plate_frames: tuple[Any, ...], is_gibbs_site: bool
) -> SampleSite:
    """Describe a sample statement in subsampled plates, which ``gibbs_fn`` may sample."""
    fn, value = site["fn"], site["value"]
    described = SampleSite(
        name=site["name"],
        plate_frames=plate_frames,
        is_observed=site["is_observed"],
        shape=jnp.shape(value),
        batch_shape=fn.batch_shape,
        event_shape=fn.event_shape,
        full_plates=tuple(f.name for f in site["cond_indep_stack"] if f not in plate_frames),
        unplated_dims=_find_unplated_dims(site),
    )
    if described.is_observed:
        return described
    is_delta = isinstance(get_base_distribution(fn), dist.Delta)
    enumeration = site["infer"].get("enumerate")
    is_enumerable = (
        not is_gibbs_site
        and fn.support.is_discrete
        and fn.has_enumerate_support
        and fn.event_dim == 0
        and enumeration in (None, "parallel")
    )
    unconstrained_shape = None
    if not (is_gibbs_site or is_delta or fn.support.is_discrete):
        with suppress(NotImplementedError):  # there is no bijection to unconstrained space
            unconstrained_shape = jnp.shape(biject_to(fn.support).inv(value))
    return described._replace(
        dtype=jnp.result_type(value),
        support=fn.support,
        is_delta=is_delta,
        is_enumerable=is_enumerable,
        is_marked=enumeration is not None,
        unconstrained_shape=unconstrained_shape,
    )


def _find_unplated_dims(site: Any) -> tuple[int, ...]:
    """Return the batch dimensions without a plate, of a site that has plates at all."""
    plate_dims = {frame.dim for frame in site["cond_indep_stack"]}
    if not plate_dims:
        return ()
    fn, shape = site["fn"], jnp.shape(site["value"])
    batch_shapes = (tuple(fn.batch_shape), shape[: len(shape) - len(fn.event_shape)])
    # NumPyro's loops have their steps in the leftmost dimension, which needs no plate.
    loop_dim = -max(map(len, batch_shapes)) if site.get("_control_flow_done", False) else None
    batch_dims = {-k for s in batch_shapes for k in range(1, len(s) + 1) if s[-k] > 1}
    return tuple(sorted(batch_dims - plate_dims - {loop_dim}))


# --- Errors of a model's run --------------------------------------------------------------------

_MAX_SOURCE_LINE_CHARS = 60  # of the user's line in a message

# Errors of NumPy and pandas at a traced index, and all of traced values.
_INDEX_ERRORS = jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError
_CONCRETIZATION_ERRORS = (
    *_INDEX_ERRORS,
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
)
# Parts of JAX's messages of `x[i]`, `jnp.take` and `jnp.take_along_axis` where i are floats.
_FLOAT_INDEX_TEXTS = (
    "Indexer must have integer",
    "indices must have an integer type",
    "indices must be of integer type",
)


def translate_model_error(
    error: Exception, model: NumPyArgumentsModel, arguments: Arguments, plates: Sequence[Plate]
) -> Exception:
    """Return the error to raise for one that a model's run raised.

    :param error: what was raised; returned itself where it is clear enough.
    :param plates: the subsampled plates that the run had reached.
    """
    named_arguments = arguments.by_name(model)
    if isinstance(error, TypeError):
        try:
            inspect.signature(model).bind(*arguments.args, **arguments.kwargs)
        except ValueError:  # some built-in functions have no signature
            pass
        except TypeError as mismatch:
            return TypeError(
                format_message(
                    f"The model cannot be called with these arguments: {mismatch}.",
                    "pass the model's arguments to mcmc.run, after the random key.",
                    "model-signature",
                )
            )
    reason, line = summarise_error(error), find_user_source_line(error)
    if (array := _find_whole_array(error)) is not None:
        return InvalidModelError(
            f"The model fails{line}: {array!r} is used as a whole.",
            "index it by the indices of its plate, an integer array or a slice, or pass it through "
            "numpyro.subsample. Compute what depends on all of its rows before the run.",
            "host-array-index",
        )
    if str(error).startswith("Inside numpyro.plate"):
        return InvalidModelError(f"{reason}.", "make the array as long as the plate.", "data-shape")
    if isinstance(error, AssertionError):
        empty = [name for name, x in arguments.named_arrays(model) if 0 in np.shape(x)[:1]]
        if "size of plate" not in str(error) or not empty:
            return error
        return InvalidModelError(
            f"A plate has no rows: {' and '.join(empty)} is empty.",
            "pass data with at least one row.",
            "empty-plate",
        )
    is_concretization = isinstance(error, _CONCRETIZATION_ERRORS)
    traceback_frames = traceback.extract_tb(error.__traceback__)
    if is_concretization and any(
        f.name == "_subsample" and f.filename.endswith("primitives.py") for f in traceback_frames
    ):
        return InvalidModelError(
            f"The size or subsample_size of a plate is a traced array{line}.",
            "pass a Python integer.",
            "plate-size-traced",
        )
    is_of_pandas = type(error).__module__.startswith("pandas")
    if not (is_concretization or is_of_pandas or isinstance(error, (TypeError, ValueError))):
        return error
    if fixes := [fix for name, x in named_arguments.items() for fix in _find_non_arrays(name, x)]:
        return InvalidArgumentError(
            f"The model cannot use {fixes[0][0]}.",
            f"{'; '.join(fix for _, fix in fixes)}. "
            f"({type(error).__name__ if is_concretization else reason})",
            "unsupported-argument",
        )
    if is_concretization:
        names = model.describe_traced(arguments)
        large = (
            f". Compute what depends on {names} alone before the run: NumPy cannot use it in the "
            "model (rows on the host or over devices, or arrays of more than "
            f"{MAX_CONSTANT_BYTES / 2**20:.0f} MB together)"
        )
        is_index = isinstance(error, _INDEX_ERRORS)
        tables = (
            ". Index a table or list that is not an argument as `jnp.asarray(df.g.values)[i]`, or "
            "pass its columns as arguments by numpyro_sgmcmc.as_arrays(df)"
        )
        return InvalidModelError(
            f"The model turns a traced array into a Python or NumPy value{line}.",
            "use jax.numpy (jnp.where in place of `if`) for latent sites and plate indices"
            f"{large if names else ''}{tables if is_index else ''}. ({type(error).__name__})",
            "traced-value",
        )
    if _is_of_float_index(error):
        array_by_name = _find_float_indices(model, arguments)
        origin = f"from {' and '.join(array_by_name)}" if array_by_name else "of an array"
        examples = [f"{n.strip('`')}{'[i, 0]' * (x.ndim > 1)}" for n, x in array_by_name.items()]
        codes = examples[0] if examples else "group[i]"
        return InvalidModelError(
            f"The indices {origin} are floats{line}.",
            f"convert codes of groups to integers, for example by `{codes}.astype(int)`.",
            "float-index",
        )
    if _fail_on_full_data(model, arguments) is None:
        if not plates:
            return error
        names = ", ".join(f"'{p.name}' ({p.subsample_size} of {p.size} rows)" for p in plates)
        return InvalidModelError(
            f"The model cannot be run on a minibatch of the plate {names}.",
            "index every array of rows by the plate's indices, or pass it through "
            f"numpyro.subsample. ({reason})",
            "minibatch-indexing",
        )
    missing = " and ".join(f"`{name}`" for name, x in named_arguments.items() if x is None)
    if missing and "NoneType" in str(error):
        return InvalidModelError(
            f"The model fails{line}: {missing} is None.",
            f"pass data for {missing}. ({reason})",
            "model-fails",
        )
    # An error at the user's own line, or one that NumPyro raises, is clear enough.
    last = traceback_frames[-1].filename
    is_numpyros = "numpyro" in Path(last).parts and "shapes" not in str(error)
    if is_numpyros or not is_library_file(last):
        return error
    shapes = ", ".join(f"{n} {np.shape(x)}" for n, x in arguments.named_arrays(model))
    return InvalidModelError(
        f"The model fails{line}, even on all rows.",
        f"check the shapes of its arguments: {shapes or 'none of them is an array'}. ({reason})",
        "model-fails",
    )


def _find_whole_array(error: Exception) -> RowArray | None:
    """Return the array of rows that a model uses as a whole, as in ``x.max()``, or None."""
    array = error.array if isinstance(error, RowIndexError) else None
    if isinstance(error, AttributeError) and hasattr(np.ndarray, str(error.name)):
        array = error.obj
    return array if isinstance(array, RowArray) else None


def _fail_on_full_data(model: Callable, arguments: Arguments) -> Exception | None:
    """Return the error that the model raises on all rows, or None."""
    try:
        jax.eval_shape(lambda a: (trace_prior(FullDataModel(model), {}, a), None)[1], arguments)
    except Exception as error:
        return error
    return None


def _is_of_float_index(error: Exception | None) -> bool:
    """Return whether JAX raised an error because the indices of an array are floats."""
    return any(text in str(error) for text in _FLOAT_INDEX_TEXTS)


def _find_float_indices(model: NumPyArgumentsModel, arguments: Arguments) -> dict[str, Any]:
    """Return the arguments of floats that the model uses as indices, by name."""

    def fails_unless_cast(kept: Any) -> bool:
        others = arguments.map_arrays(lambda x: x if x is kept else jnp.asarray(x).astype(int))
        model_of_others = NumPyArgumentsModel(model.model, others)
        return _is_of_float_index(_fail_on_full_data(model_of_others, others))

    if fails_unless_cast(None):  # indices that come from elsewhere
        return {}
    named = arguments.named_arrays(model)
    return {name: x for name, x in named if x.dtype.kind == "f" and fails_unless_cast(x)}


def _find_non_arrays(name: str, x: Any) -> Iterable[tuple[str, str]]:
    """Yield name and type, and the fix, of each argument that is not an array but should be."""
    described = f"`{name}`, a {type(x).__name__}"
    if isinstance(x, dict):
        for key, value in x.items():
            yield from _find_non_arrays(f"{name}[{key!r}]", value)
    elif isinstance(x, (list, tuple)):
        if x and all(isinstance(leaf, (bool, int, float)) for leaf in jax.tree.leaves(x)):
            yield f"{described} of numbers", f"pass numpy.asarray({name})"
    elif isinstance(x, np.ndarray) and not is_array(x):
        yield (
            f"`{name}`, an array of type {x.dtype}",
            f"pass an array of numbers as {name} (for strings their codes, such as "
            f"numpy.unique({name}, return_inverse=True)[1])",
        )
    elif hasattr(x, "__arrow_c_stream__") and hasattr(x, "columns"):
        yield (
            described,
            f"pass numpyro_sgmcmc.as_arrays({name})[0], arrays of numbers and of codes of "
            f"categories, or {name}.to_numpy() if the model uses it as a matrix",
        )
    elif hasattr(x, "iloc"):
        yield described, f"pass {name}.to_numpy()"
    elif hasattr(x, "__array__") and not is_array(x) and not isinstance(x, (np.generic, RowArray)):
        yield described, f"pass numpy.asarray({name})"


def find_user_source_line(error: BaseException) -> str:
    """Return ``" at file:number, `code`"`` for the user's line that raised an error, or ``""``."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not (is_library_file(frame.filename) or frame.filename.startswith("<")):
            code = f", `{frame.line[:_MAX_SOURCE_LINE_CHARS]}`" if frame.line else ""
            return f" at {Path(frame.filename).name}:{frame.lineno}{code}"
    return ""
