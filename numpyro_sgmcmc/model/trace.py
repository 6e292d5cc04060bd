"""What one run of a model tells of it: nothing here is traced, and nothing has been refused yet.

What a failed run of a model means, in a sentence with the way out.

What NumPyro, JAX and Python raise is known by its type and its text: here and nowhere else.

From a NumPyro model to what can be known of it: :class:`~.facts.Facts`.
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
from jax import Array, random
from numpyro import validation_enabled
from numpyro.distributions import biject_to
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import init_to_sample

from numpyro_sgmcmc.data.arguments import Arguments, is_array
from numpyro_sgmcmc.data.host_array import HostArray, RowArray, RowIndexError
from numpyro_sgmcmc.data.row_proxies import IndexingRecorder, PlateIndexRegistry, RowLookup
from numpyro_sgmcmc.data.sharded_array import Shards
from numpyro_sgmcmc.data.subsampling import Plate
from numpyro_sgmcmc.errors import InvalidArgumentError, summarise_error
from numpyro_sgmcmc.model.handlers import FullDataModel, set_subsample_indices

__all__ = [
    "GibbsConfig",
    "ModelTrace",
    "NO_GIBBS",
    "SampleSite",
    "TracedSite",
    "find_user_source_line",
    "trace_model",
    "translate_model_error",
]


class TracedSite(NamedTuple):
    """
    - **site_type** - NumPyro's type of it: ``"sample"``, ``"deterministic"``, ``"param"``, ...
    - **plates** - names of the subsampled plates that enclose it.
    """

    site_type: str
    plates: tuple[str, ...]


class SampleSite(NamedTuple):
    """
    - **name** - name of a sample statement.
    - **plate_frames** - NumPyro's frames (name, dim, rows) of the subsampled plates that enclose it.
    - **is_observed** - whether it has data.
    - **shape** - shape of its value.
    - **batch_shape** - of its distribution.
    - **event_shape** - of its distribution.
    - **unplated_dims** - batch dimensions, counted from the right, for which no plate stands although
      one does for others.
    - **dtype** - type of a latent value.
    - **support** - a latent distribution's support.
    - **is_delta** - whether a latent distribution has all its mass at one point.
    - **unconstrained_shape** - shape of a latent value in unconstrained space; None where it has none.
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
    def has_fixed_support(self) -> bool:
        """Whether the support is the same whatever the data and the other sites."""
        # An array among its bounds may be another site's value or come from the data.
        return all(isinstance(x, (int, float)) for x in jax.tree.leaves(self.support))


class GibbsConfig(NamedTuple):
    """Local sites that the user draws.

    - **gibbs_fn** - the user's function, or None.
    - **site_names** - names of the sites.
    - **num_sweeps** - how often it is called for values that start from their prior at each minibatch,
      and are dropped; None for values that stay from one visit of a row to the next.
    """

    gibbs_fn: Callable | None = None
    site_names: tuple[str, ...] = ()
    num_sweeps: int | None = None


NO_GIBBS = GibbsConfig()


@dataclass(frozen=True, eq=False)
class ModelTrace:
    """A model as one run on the first rows of its plates shows it.

    - **model** - the model as the user gave it.
    - **model_with_params** - the same, with the first values of its ``param`` and ``mutable`` sites.
    - **arguments** - its arguments.
    - **init_strategy** - NumPyro's initialisation strategy.
    - **gibbs** - the user's draws of local sites.
    - **unsharded_plates** - the subsampled plates by name, as the model states them.
    - **traced_sites** - all statements with a name.
    - **sample_sites** - the sample statements, in the model's order.
    - **row_lookups** - the arrays on the host or spread over devices that plates' rows index.
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
    def shards(self) -> Shards | None:
        """Which device holds which rows, if rows are spread over devices."""
        spread = self.arguments.sharded_arrays
        return spread[0].shards if spread else None

    @cached_property
    def plates(self) -> dict[str, Plate]:
        """The subsampled plates by name; of those spread over devices each gives as many rows."""
        shards, plates = self.shards, dict(self.unsharded_plates)
        if shards is not None:
            for name in {x.plate for x in self.row_lookups}:
                plates[name] = plates[name].with_shards(shards)
        return plates

    @property
    def plate_groups(self) -> tuple[tuple[Plate, ...], ...]:
        """The plates, those that enclose a common site together."""
        groups = [{name} for name in self.plates]
        for _, enclosing in self.traced_sites.values():
            joined = [g for g in groups if g & set(enclosing)]
            if len(joined) > 1:
                groups = [g for g in groups if g not in joined] + [set().union(*joined)]
        return tuple(tuple(self.plates[n] for n in self.plates if n in g) for g in groups)


_LIBRARY_PATHS = str(Path(__file__).parents[1]), sysconfig.get_path("stdlib")


_CONCRETIZATION_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


def translate_model_error(
    error: Exception, model: Callable, arguments: Arguments, plates: Sequence[Plate]
) -> Exception:
    """The error to raise for one with which a model's run ended; the same, where it says it best.

    :param error: what was raised.
    :param model: the model.
    :param arguments: its arguments.
    :param plates: the subsampled plates that the run has met.
    """
    if isinstance(error, TypeError) and (misfit := _describe_signature_mismatch(model, arguments)):
        return TypeError(f"The model cannot be called with these arguments: {misfit}.")
    if str(error).startswith("Inside numpyro.plate"):
        return InvalidArgumentError(
            f"{summarise_error(error)}. Make the array as long as the plate."
        )
    if isinstance(error, AssertionError):
        empty = [n for n, x in arguments.named_arrays(model) if 0 in np.shape(x)[:1]]
        if "size of plate" not in str(error) or not empty:
            return error
        return InvalidArgumentError(f"A plate has no rows: {' and '.join(empty)} has none.")
    unusual = list(_describe_unsupported_arguments(model, arguments))
    if isinstance(error, _CONCRETIZATION_ERRORS):
        return _translate_concretization_error(error, unusual)
    if not isinstance(error, (TypeError, ValueError)):
        return error
    if isinstance(error, RowIndexError):
        is_host = isinstance(error.array, HostArray)
        return (
            InvalidArgumentError(f"The model fails{find_user_source_line(error)}: {error}")
            if is_host
            else error
        )
    if unusual:
        return InvalidArgumentError(
            f"The model cannot use {' and '.join(unusual)}. ({summarise_error(error)})"
        )
    if _fails_on_full_data(model, arguments):
        return _translate_full_data_error(error, model, arguments)
    if not plates:
        return error
    names = ", ".join(f"'{p.name}' ({p.subsample_size} of {p.size} rows)" for p in plates)
    return InvalidArgumentError(
        f"The model cannot be run on a minibatch of the plate {names}: index every array of "
        "rows by the plate's indices, or pass it through numpyro.subsample. "
        f"({summarise_error(error)})"
    )


def _translate_concretization_error(
    error: Exception, unsupported_arguments: Sequence[str]
) -> Exception:
    """For a model that uses what JAX traces as if it had a value."""
    if _is_raised_in_plate(error):
        return InvalidArgumentError(
            f"The size or subsample_size of a plate is an array{find_user_source_line(error)}, which JAX "
            "traces: pass a Python integer."
        )
    if unsupported_arguments:
        return InvalidArgumentError(f"The model cannot use {' and '.join(unsupported_arguments)}.")
    return InvalidArgumentError(
        f"The model turns what JAX traces into a Python or NumPy value{find_user_source_line(error)}: latent "
        "sites, arrays among the arguments and a plate's indices have no value there. Use "
        "jax.numpy (jnp.where in place of `if`), and compute what is needed of the data before "
        f"the run. ({type(error).__name__})"
    )


def _translate_full_data_error(
    error: Exception, model: Callable, arguments: Arguments
) -> Exception:
    """For a model that fails on all rows as well."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    none = [f"`{n}` is None" for n, x in _name_arguments(model, arguments) if x is None]
    if none and "NoneType" in str(error):
        return InvalidArgumentError(
            f"The model fails{find_user_source_line(error)}: {' and '.join(none)}. ({summarise_error(error)})"
        )
    # The user's own line, or a sentence of NumPyro's, says it best.
    is_numpyros = "numpyro" in Path(last).parts and "shapes" not in str(error)
    if is_numpyros or not _is_library_file(last):
        return error
    shapes = ", ".join(f"{n} {np.shape(x)}" for n, x in arguments.named_arrays(model))
    return InvalidArgumentError(
        f"The model fails{find_user_source_line(error)}, on all rows as well: look at the shapes of its "
        f"arguments, {shapes or 'none of them an array'}. ({summarise_error(error)})"
    )


def _fails_on_full_data(model: Callable, arguments: Arguments) -> bool:
    """Whether the model fails without a minibatch as well."""

    def run(arguments: Arguments) -> None:
        seeded = substitute(seed(model, random.key(0)), substitute_fn=init_to_sample)
        arguments = arguments.map_arrays(jnp.asarray)
        FullDataModel(seeded)(*arguments.args, **arguments.kwargs)

    try:
        jax.eval_shape(run, arguments)
    except Exception:
        return True
    return False


def _describe_signature_mismatch(model: Callable, arguments: Arguments) -> str:
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


def _name_arguments(model: Callable, arguments: Arguments) -> Iterable[tuple[str, Any]]:
    """The arguments with the names that they have in the model's signature."""
    try:
        names = list(inspect.signature(model).parameters)
    except (TypeError, ValueError):
        names = []
    named = {
        (names[k] if k < len(names) else f"argument {k}"): x for k, x in enumerate(arguments.args)
    }
    return {**named, **arguments.kwargs}.items()


def _describe_unsupported_arguments(model: Callable, arguments: Arguments) -> Iterable[str]:
    """What is passed in place of arrays, each with its name and what to do."""
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
        yield f"`{name}`, an array of type {x.dtype}: pass numbers"
    elif hasattr(x, "iloc"):
        yield f"`{name}`, a {type(x).__name__}: pass {name}.to_numpy()"
    elif hasattr(x, "__array__") and not is_array(x) and not isinstance(x, (np.generic, RowArray)):
        yield f"`{name}`, a {type(x).__name__}: pass numpy.asarray({name})"


def _is_library_file(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file or file.startswith(_LIBRARY_PATHS)


def find_user_source_line(error: BaseException) -> str:
    """The user's line that an error comes from, as a part of a sentence."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not (_is_library_file(frame.filename) or frame.filename.startswith("<")):
            line = f", `{frame.line}`" if frame.line else ""
            return f" at {Path(frame.filename).name}:{frame.lineno}{line}"
    return ""


def _is_raised_in_plate(error: BaseException) -> bool:
    return any(
        f.name == "_subsample" and f.filename.endswith("primitives.py")
        for f in traceback.extract_tb(error.__traceback__)
    )


def trace_model(
    model: Callable,
    arguments: Arguments,
    init_strategy: Callable,
    gibbs: GibbsConfig = NO_GIBBS,
) -> ModelTrace:
    """Run a model once on the first rows of its plates, without data, and note what it states.

    :param model: a NumPyro model.
    :param arguments: its arguments; only shapes and static values count, except where the model
        has ``param`` or ``mutable`` sites (neural networks), whose first values are kept.
    :param init_strategy: NumPyro initialisation strategy.
    :param gibbs: the user's draws of local sites.
    :raises ValueError: where the model cannot be run.
    """
    run = _TracingRun(arguments)
    statements: dict[str, TracedSite] = {}
    samples: list[SampleSite] = []

    def note(arguments: Arguments) -> None:
        """What is known of a traced value is noted while it is being traced: no value is kept."""
        for name, site in run.run_and_trace(model, arguments).items():
            stack = [f for f in site.get("cond_indep_stack", ()) if f.name in run.plates]
            statements[name] = TracedSite(site["type"], tuple(f.name for f in stack))
            if site["type"] == "sample":
                samples.append(_describe_sample_site(site, tuple(stack), name in gibbs.site_names))

    try:
        jax.eval_shape(note, arguments)
    except InvalidArgumentError:
        raise
    except Exception as error:
        plain = translate_model_error(error, model, arguments, tuple(run.plates.values()))
        if plain is error:
            raise
        raise plain from error
    return ModelTrace(
        model=model,
        model_with_params=_substitute_params(model, arguments, statements),
        arguments=arguments,
        init_strategy=init_strategy,
        gibbs=gibbs,
        unsharded_plates=run.plates,
        traced_sites=statements,
        sample_sites=tuple(samples),
        row_lookups=tuple(run.row_lookups),
    )


class _TracingRun:
    """One run of a model on the first rows of its plates, with notes also where it fails.

    :param arguments: the arguments as the user gave them.
    """

    def __init__(self, arguments: Arguments) -> None:
        self.sharded_arrays = arguments.sharded_arrays
        self.plates: dict[str, Plate] = {}
        self.index_registry = PlateIndexRegistry()
        self.row_lookups: dict[RowLookup, None] = {}

    def run_and_trace(self, model: Callable, arguments: Arguments) -> dict[str, Any]:
        """The model's trace, its latent sites drawn from the prior."""
        given = iter(self.sharded_arrays)
        arguments = arguments.map_arrays(jnp.asarray)
        arguments = arguments.map_host_arrays(
            lambda a: IndexingRecorder(a, self.index_registry, self.row_lookups)
        )
        arguments = arguments.map_sharded_arrays(
            lambda a: IndexingRecorder(a, self.index_registry, self.row_lookups, next(given))
        )
        seeded = substitute(seed(model, random.key(0)), substitute_fn=init_to_sample)
        chosen = set_subsample_indices(seeded, self._register_plate)
        return trace(chosen).get_trace(*arguments.args, **arguments.kwargs)

    def _register_plate(self, name: str, size: int, subsample_size: int) -> Array:
        is_int = isinstance(subsample_size, (int, np.integer))
        is_int = is_int and not isinstance(subsample_size, bool)
        if not (is_int and 0 < subsample_size <= size):
            raise InvalidArgumentError(
                f"Plate '{name}' has subsample_size={subsample_size!r}, but it must be an integer "
                f"between 1 and the plate's size, {size}."
            )
        if name in self.plates and self.plates[name].size != size:
            raise InvalidArgumentError(
                f"Plate '{name}' has size {self.plates[name].size} in one place of the model and "
                f"{size} in another: give the two different names."
            )
        self.plates[name] = Plate(name, size, subsample_size)
        return self.index_registry.register(name, jnp.arange(subsample_size))


def _describe_sample_site(
    site: Any, plate_frames: tuple[Any, ...], is_gibbs_site: bool
) -> SampleSite:
    """What is known of a sample statement; ``is_gibbs_site`` where ``gibbs_fn`` draws it."""
    fn, value = site["fn"], site["value"]
    known = SampleSite(
        name=site["name"],
        plate_frames=plate_frames,
        is_observed=site["is_observed"],
        shape=jnp.shape(value),
        batch_shape=fn.batch_shape,
        event_shape=fn.event_shape,
        unplated_dims=_find_unplated_dims(site),
    )
    if known.is_observed:
        return known
    known = known._replace(dtype=jnp.result_type(value), support=fn.support, is_delta=_is_delta(fn))
    if is_gibbs_site or known.is_delta or fn.support.is_discrete:
        return known
    with suppress(NotImplementedError):  # there is no map to unconstrained space
        known = known._replace(unconstrained_shape=jnp.shape(biject_to(fn.support).inv(value)))
    return known


def _find_unplated_dims(site: Any) -> tuple[int, ...]:
    """Batch dimensions without a plate, where a site has plates at all."""
    stated = {frame.dim for frame in site["cond_indep_stack"]}
    if not stated:
        return ()
    fn, shape = site["fn"], jnp.shape(site["value"])
    shapes = (tuple(fn.batch_shape), shape[: len(shape) - len(fn.event_shape)])
    # A loop of NumPyro's has its steps on the left, which need no plate.
    looped = -max(map(len, shapes)) if site.get("_control_flow_done", False) else None
    has_many = {-k for one in shapes for k in range(1, len(one) + 1) if one[-k] > 1}
    return tuple(sorted(has_many - stated - {looped}))


def _is_delta(fn: Any) -> bool:
    """Whether a distribution, whatever it is wrapped in, has all its mass at one point."""
    while not isinstance(fn, dist.Delta) and hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return isinstance(fn, dist.Delta)


def _substitute_params(
    model: Callable, arguments: Arguments, traced_sites: dict[str, TracedSite]
) -> Callable:
    """The model with the first values of its ``param`` and ``mutable`` sites, if it has any."""
    names = [n for n, s in traced_sites.items() if s.site_type in ("param", "mutable")]
    with validation_enabled(False):  # a draw from the prior may be one that no chain comes to
        values = _TracingRun(arguments).run_and_trace(model, arguments) if names else {}
    return substitute(model, data={n: values[n]["value"] for n in names})
