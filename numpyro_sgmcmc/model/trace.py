"""Trace a NumPyro model once and describe its sites and plates.

:func:`trace_model` runs the model on the first rows of its plates, without computing on data, and
returns a :class:`ModelTrace`: plain descriptions of all sites and plates, from which the checks of
:mod:`~numpyro_sgmcmc.model.validation` and the potential are built. A run that fails raises an
error with a fix; :func:`translate_model_error` is the only place that recognises errors of NumPyro,
JAX and Python by their type and text.
"""

from __future__ import annotations

import inspect
import sysconfig
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

from numpyro_sgmcmc.data.arguments import Arguments, is_array
from numpyro_sgmcmc.data.host_array import HostArray, RowArray, RowIndexError
from numpyro_sgmcmc.data.row_proxies import IndexingRecorder, PlateIndexRegistry, RowLookup
from numpyro_sgmcmc.data.sharded_array import Shards
from numpyro_sgmcmc.data.subsampling import Plate
from numpyro_sgmcmc.errors import (
    InvalidArgumentError,
    InvalidModelError,
    format_message,
    summarise_error,
)
from numpyro_sgmcmc.model.handlers import FullDataModel, trace_prior


class TracedSite(NamedTuple):
    """A named statement of the model.

    - **site_type** - NumPyro's type: ``"sample"``, ``"deterministic"``, ``"param"``, ...
    - **plates** - names of the subsampled plates that enclose it.
    """

    site_type: str
    plates: tuple[str, ...]


class SampleSite(NamedTuple):
    """A sample statement of the model.

    - **name** - the site's name.
    - **plate_frames** - NumPyro's frames (name, dim, size) of the subsampled plates around it.
    - **is_observed** - whether it has data.
    - **shape** - shape of its value.
    - **batch_shape** - batch shape of its distribution.
    - **event_shape** - event shape of its distribution.
    - **unplated_dims** - batch dimensions, counted from the right, without a plate, although other
      dimensions have one.
    - **dtype** - type of a latent value.
    - **support** - support of a latent site's distribution.
    - **is_delta** - whether a latent site's distribution is a point mass.
    - **unconstrained_shape** - shape of a latent value in unconstrained space; None where there is
      no bijection to it.
    """

    name: str
    plate_frames: tuple[Any, ...]
    is_observed: bool
    shape: tuple[int, ...]
    batch_shape: tuple[int, ...]
    event_shape: tuple[int, ...]
    unplated_dims: tuple[int, ...] = ()
    dtype: Any = None
    support: Any = None
    is_delta: bool = False
    unconstrained_shape: tuple[int, ...] | None = None

    @property
    def is_local(self) -> bool:
        """True if it is a latent site inside a subsampled plate."""
        return bool(self.plate_frames) and not self.is_observed

    @property
    def is_global(self) -> bool:
        """True if it is a latent site outside of all subsampled plates."""
        return not self.plate_frames and not self.is_observed

    @property
    def has_fixed_support(self) -> bool:
        """True if the support is the same whatever the data and the other sites."""
        return is_fixed_support(self.support)


class GibbsConfig(NamedTuple):
    """Settings for local sites that the user samples from their conditionals.

    - **gibbs_fn** - the user's function, or None.
    - **site_names** - names of the sites that it samples.
    - **num_sweeps** - how often it is called for values that start from their prior at each
      minibatch and are dropped after the step; None for values that are kept.
    """

    gibbs_fn: Callable | None = None
    site_names: tuple[str, ...] = ()
    num_sweeps: int | None = None


NO_GIBBS = GibbsConfig()


@dataclass(frozen=True, eq=False)
class ModelTrace:
    """Description of a model from one run on the first rows of its plates.

    - **model** - the model as the user gave it.
    - **model_with_params** - the model with the first values of ``param`` and ``mutable`` sites.
    - **arguments** - its arguments.
    - **init_strategy** - NumPyro's initialisation strategy.
    - **gibbs** - how the user samples local sites.
    - **unsharded_plates** - the subsampled plates by name, as the model states them.
    - **traced_sites** - all named statements.
    - **sample_sites** - the sample statements, in the model's order.
    - **row_lookups** - the host and sharded arrays that a plate's rows index.
    """

    model: Callable
    model_with_params: Callable
    arguments: Arguments
    init_strategy: Callable
    gibbs: GibbsConfig
    unsharded_plates: Mapping[str, Plate]
    traced_sites: Mapping[str, TracedSite]
    sample_sites: tuple[SampleSite, ...]
    row_lookups: tuple[RowLookup, ...]

    @property
    def local_sites(self) -> list[SampleSite]:
        """Latent sites inside a subsampled plate."""
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
    model: Callable,
    arguments: Arguments,
    init_strategy: Callable,
    gibbs: GibbsConfig = NO_GIBBS,
) -> ModelTrace:
    """Run a model once on the first rows of its plates and describe its statements.

    :param model: a NumPyro model.
    :param arguments: its arguments; only shapes and static values count, except where the model
        has ``param`` or ``mutable`` sites (neural networks), whose first values are kept.
    :param init_strategy: NumPyro initialisation strategy.
    :param gibbs: how the user samples local sites.
    :raises ValueError: where the model cannot be run.
    """
    run = _TracingRun(arguments)
    traced_sites: dict[str, TracedSite] = {}
    sample_sites: list[SampleSite] = []

    def describe(arguments: Arguments) -> None:
        # Values exist only while they are traced, so that they are described at once.
        for name, site in run.trace(model, arguments).items():
            frames = tuple(f for f in site.get("cond_indep_stack", ()) if f.name in run.plates)
            traced_sites[name] = TracedSite(site["type"], tuple(f.name for f in frames))
            if site["type"] == "sample":
                sample_sites.append(_describe_sample_site(site, frames, name in gibbs.site_names))

    try:
        jax.eval_shape(describe, arguments)
    except (InvalidArgumentError, InvalidModelError):
        raise
    except Exception as error:
        translated = translate_model_error(error, model, arguments, tuple(run.plates.values()))
        if translated is error:
            raise
        raise translated from error
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
    )


class _TracingRun:
    """One run of a model on the first rows of its plates; its records remain where it fails.

    :param arguments: the arguments as the user gave them.
    """

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

    def _register_plate(self, name: str, size: int, subsample_size: int) -> Array:
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
    """Describe a sample statement.

    :param plate_frames: frames of the subsampled plates around it.
    :param is_gibbs_site: whether ``gibbs_fn`` samples it.
    """
    fn, value = site["fn"], site["value"]
    described = SampleSite(
        name=site["name"],
        plate_frames=plate_frames,
        is_observed=site["is_observed"],
        shape=jnp.shape(value),
        batch_shape=fn.batch_shape,
        event_shape=fn.event_shape,
        unplated_dims=_find_unplated_dims(site),
    )
    if described.is_observed:
        return described
    is_delta = isinstance(get_base_distribution(fn), dist.Delta)
    described = described._replace(
        dtype=jnp.result_type(value), support=fn.support, is_delta=is_delta
    )
    if is_gibbs_site or is_delta or fn.support.is_discrete:
        return described
    with suppress(NotImplementedError):  # there is no bijection to unconstrained space
        unconstrained = biject_to(fn.support).inv(value)
        described = described._replace(unconstrained_shape=jnp.shape(unconstrained))
    return described


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

_LIBRARY_PATHS = str(Path(__file__).parents[1]), sysconfig.get_path("stdlib")
_MAX_SOURCE_LINE_CHARS = 60  # of the user's line in a message

_CONCRETIZATION_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


def translate_model_error(
    error: Exception, model: Callable, arguments: Arguments, plates: Sequence[Plate]
) -> Exception:
    """Return the error to raise for one that a model's run raised.

    :param error: what was raised; returned itself where it is clear enough.
    :param model: the model.
    :param arguments: its arguments.
    :param plates: the subsampled plates that the run had reached.
    """
    if isinstance(error, TypeError) and (
        mismatch := _describe_signature_mismatch(model, arguments)
    ):
        return TypeError(
            format_message(
                f"The model cannot be called with these arguments: {mismatch}.",
                "pass the model's arguments to mcmc.run, after the random key.",
                "model-signature",
            )
        )
    if str(error).startswith("Inside numpyro.plate"):
        return InvalidModelError(
            f"{summarise_error(error)}.", "make the array as long as the plate.", "data-shape"
        )
    if isinstance(error, AssertionError):
        empty = [name for name, x in arguments.named_arrays(model) if 0 in np.shape(x)[:1]]
        if "size of plate" not in str(error) or not empty:
            return error
        return InvalidModelError(
            f"A plate has no rows: {' and '.join(empty)} is empty.",
            "pass data with at least one row.",
            "empty-plate",
        )
    unsupported = list(_describe_unsupported_arguments(model, arguments))
    if isinstance(error, _CONCRETIZATION_ERRORS):
        return _translate_concretization_error(error, unsupported)
    if not isinstance(error, (TypeError, ValueError)):
        return error
    if isinstance(error, RowIndexError):
        if not isinstance(error.array, HostArray):
            return error
        return InvalidModelError(
            f"The model fails{find_user_source_line(error)}: {error.array!r} is used as a whole.",
            "index it by the indices of its plate, an integer array or a slice, or pass it through "
            "numpyro.subsample.",
            "host-array-index",
        )
    reason = summarise_error(error)
    if unsupported:
        return _unsupported_argument_error(unsupported, reason)
    if _fails_on_full_data(model, arguments):
        return _translate_full_data_error(error, model, arguments)
    if not plates:
        return error
    names = ", ".join(f"'{p.name}' ({p.subsample_size} of {p.size} rows)" for p in plates)
    return InvalidModelError(
        f"The model cannot be run on a minibatch of the plate {names}.",
        "index every array of rows by the plate's indices, or pass it through numpyro.subsample. "
        f"({reason})",
        "minibatch-indexing",
    )


def _unsupported_argument_error(unsupported: Sequence[str], reason: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"The model cannot use {unsupported[0].split(': ')[0]}.",
        f"{'; '.join(text.split(': ')[1] for text in unsupported)}. ({reason})",
        "unsupported-argument",
    )


def _translate_concretization_error(error: Exception, unsupported: Sequence[str]) -> Exception:
    """Return the error for a model that uses the value of a traced array."""
    line = find_user_source_line(error)
    frames = traceback.extract_tb(error.__traceback__)
    if any(f.name == "_subsample" and f.filename.endswith("primitives.py") for f in frames):
        return InvalidModelError(
            f"The size or subsample_size of a plate is a traced array{line}.",
            "pass a Python integer.",
            "plate-size-traced",
        )
    if unsupported:
        return _unsupported_argument_error(unsupported, type(error).__name__)
    return InvalidModelError(
        f"The model turns a traced array into a Python or NumPy value{line}.",
        "use jax.numpy (jnp.where in place of `if`) for latent sites, arrays among the arguments "
        "and plate indices, and compute what depends on the data alone before the run. "
        f"({type(error).__name__})",
        "traced-value",
    )


def _translate_full_data_error(
    error: Exception, model: Callable, arguments: Arguments
) -> Exception:
    """Return the error for a model that fails without a minibatch as well."""
    line, reason = find_user_source_line(error), summarise_error(error)
    missing = [f"`{n}`" for n, x in _name_arguments(model, arguments) if x is None]
    if missing and "NoneType" in str(error):
        return InvalidModelError(
            f"The model fails{line}: {' and '.join(missing)} is None.",
            f"pass data for {' and '.join(missing)}. ({reason})",
            "model-fails",
        )
    # An error at the user's own line, or one that NumPyro raises, is clear enough.
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    is_numpyros = "numpyro" in Path(last).parts and "shapes" not in str(error)
    if is_numpyros or not _is_library_file(last):
        return error
    shapes = ", ".join(f"{n} {np.shape(x)}" for n, x in arguments.named_arrays(model))
    return InvalidModelError(
        f"The model fails{line}, on all rows as well.",
        f"check the shapes of its arguments: {shapes or 'none of them is an array'}. ({reason})",
        "model-fails",
    )


def _fails_on_full_data(model: Callable, arguments: Arguments) -> bool:
    """Return whether the model fails without a minibatch as well."""
    try:
        jax.eval_shape(lambda a: (trace_prior(FullDataModel(model), {}, a), None)[1], arguments)
    except Exception:
        return True
    return False


def _describe_signature_mismatch(model: Callable, arguments: Arguments) -> str:
    """Return why the arguments do not fit the model's signature; empty where they do."""
    try:
        signature = inspect.signature(model)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*arguments.args, **arguments.kwargs)
    except TypeError as error:
        return str(error)
    return ""


def _name_arguments(model: Callable, arguments: Arguments) -> Iterable[tuple[str, Any]]:
    """Return the arguments with their names in the model's signature."""
    try:
        names = list(inspect.signature(model).parameters)
    except (TypeError, ValueError):
        names = []
    named = {
        (names[k] if k < len(names) else f"argument {k}"): x for k, x in enumerate(arguments.args)
    }
    return {**named, **arguments.kwargs}.items()


def _describe_unsupported_arguments(model: Callable, arguments: Arguments) -> Iterable[str]:
    """Yield a text ``"name, type: fix"`` for each argument that is not an array but should be."""
    for name, x in _name_arguments(model, arguments):
        yield from _describe_non_arrays(name, x)


def _describe_non_arrays(name: str, x: Any) -> Iterable[str]:
    if isinstance(x, dict):
        for key, value in x.items():
            yield from _describe_non_arrays(f"{name}[{key!r}]", value)
    elif isinstance(x, (list, tuple)):
        if x and all(isinstance(leaf, (bool, int, float)) for leaf in jax.tree.leaves(x)):
            yield f"`{name}`, a {type(x).__name__} of numbers: pass numpy.asarray({name})"
    elif isinstance(x, np.ndarray) and not is_array(x):
        yield f"`{name}`, an array of type {x.dtype}: pass an array of numbers as {name}"
    elif hasattr(x, "iloc"):
        yield f"`{name}`, a {type(x).__name__}: pass {name}.to_numpy()"
    elif hasattr(x, "__array__") and not is_array(x) and not isinstance(x, (np.generic, RowArray)):
        yield f"`{name}`, a {type(x).__name__}: pass numpy.asarray({name})"


def _is_library_file(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file or file.startswith(_LIBRARY_PATHS)


def find_user_source_line(error: BaseException) -> str:
    """Return ``" at file:number, `code`"`` for the user's line that raised an error, or ``""``."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not (_is_library_file(frame.filename) or frame.filename.startswith("<")):
            code = f", `{frame.line[:_MAX_SOURCE_LINE_CHARS]}`" if frame.line else ""
            return f" at {Path(frame.filename).name}:{frame.lineno}{code}"
    return ""
