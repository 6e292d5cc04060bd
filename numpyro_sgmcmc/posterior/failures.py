"""What a failed run of a model means, in a sentence with the way out.

What NumPyro, JAX and Python raise is known by its type and its text: here and nowhere else.
"""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from numpyro.handlers import seed, substitute
from numpyro.infer import init_to_sample

from numpyro_sgmcmc.checks import InvalidArgumentError, summarise_error
from numpyro_sgmcmc.data.arguments import Arguments, is_array
from numpyro_sgmcmc.data.host import HostArray
from numpyro_sgmcmc.data.plates import Plate
from numpyro_sgmcmc.data.rows import RowArray, RowIndexError
from numpyro_sgmcmc.posterior.handlers import FullDataModel

__all__ = ["find_user_source_line", "translate_model_error"]

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
