"""Checks of what a user may pass, each with one sentence that names it and the way out.

What the warm-up finds that makes a posterior wrong whatever the chains say: kept for the
report.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro

__all__ = [
    "InvalidArgumentError",
    "ModelWarning",
    "check_bool",
    "check_callable",
    "check_choice",
    "check_in_interval",
    "check_no_unknown_kwargs",
    "check_nonnegative",
    "check_positive",
    "check_positive_int",
    "check_rng_key",
    "check_rng_keys",
    "evaluate_user_function",
    "import_optional",
    "standard_normal_points",
    "summarise_error",
    "validate_real_array",
    "warn_user",
]


class InvalidArgumentError(ValueError):
    """What this library refuses of a model, its data or an option, in a sentence of its own.

    A type of its own, so that it is told from errors of the model, of NumPyro and of JAX.
    """


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuse a value that is not among the choices."""
    if not (isinstance(value, str) and value in choices):
        listed = ", ".join(repr(c) for c in choices)
        raise InvalidArgumentError(f"`{name}` is {value!r}, but must be one of {listed}.")


def check_callable(name: str, value: Any) -> None:
    """Refuse what cannot be called."""
    if not callable(value):
        raise InvalidArgumentError(f"`{name}` is {value!r}, but must be a function.")


def evaluate_user_function(name: str, fn: Callable, *args: Any) -> np.ndarray:
    """What a user's function of arrays returns, as an array; JAX must be able to trace it."""
    try:
        found = jax.eval_shape(lambda xs: jnp.asarray(fn(*xs)), args)
        if jnp.issubdtype(found.dtype, jnp.complexfloating):
            raise TypeError("it returns complex numbers")
        return np.asarray(jnp.asarray(fn(*args), float))
    except Exception as error:
        raise InvalidArgumentError(
            f"`{name}` must be a function that JAX can trace (no Python `if` on its values) and "
            f"that returns an array, but calling it failed: {summarise_error(error)}."
        ) from error


def standard_normal_points(like: jax.Array) -> jax.Array:
    """Whitened positions as the posterior may have them, at which to check users' functions."""
    return jax.random.normal(jax.random.key(0), (8, *like.shape), like.dtype)


_NUTS_EQUIVALENTS = {"target_accept_prob": "target_sd_bias"}  # what NUTS calls what has its place


def check_no_unknown_kwargs(kernel_class: type, unknown_kwargs: Mapping[str, Any]) -> None:
    """Refuse keywords that a kernel does not know, and name the one that may have been meant."""
    for name in unknown_kwargs:
        meant = difflib.get_close_matches(name, inspect.signature(kernel_class).parameters, 1)
        meant = [_NUTS_EQUIVALENTS[name]] if name in _NUTS_EQUIVALENTS else meant
        hint = f"; did you mean '{meant[0]}'?" if meant else ""
        raise TypeError(
            f"{kernel_class.__name__} got an unexpected keyword argument '{name}'{hint}"
        )


def import_optional(module: str, caller: str, extra: str) -> Any:
    """The module, imported now; an error that says what to install where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{caller} needs {module}: pip install 'numpyro-sgmcmc[{extra}]'."
        ) from error


def _float_or_none(value: Any) -> float | None:
    """A number as a float, None for anything else: texts and truth values are none."""
    if isinstance(value, (bool, str, bytes)) or getattr(value, "dtype", None) == np.bool_:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def check_positive(name: str, value: Any) -> None:
    """Refuse anything but a positive finite number."""
    number = _float_or_none(value)
    if number is None:
        raise InvalidArgumentError(f"`{name}` is {value!r}, but must be a positive number.")
    if not (number > 0 and np.isfinite(number)):
        raise InvalidArgumentError(f"`{name}` is {value!r}, but must be positive and finite.")


def check_in_interval(name: str, value: Any, low: float, high: float) -> None:
    """Refuse anything but a number from ``low`` to ``high``."""
    check_positive(name, value)
    if not low <= float(value) <= high:
        raise InvalidArgumentError(
            f"`{name}` is {value!r}, but must lie between {low:g} and {high:g}."
        )


def check_nonnegative(name: str, value: Any) -> None:
    """Refuse anything but zero and a positive finite number."""
    number = _float_or_none(value)
    if number is None or not 0 <= number < np.inf:
        raise InvalidArgumentError(f"`{name}` is {value!r}, but must be zero or a positive number.")


def check_bool(name: str, value: Any) -> None:
    """Refuse anything but True and False."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidArgumentError(f"`{name}` is {value!r}, but must be True or False.")


def check_positive_int(name: str, value: Any) -> None:
    """Refuse anything but a positive integer."""
    is_int = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not (is_int and value > 0):
        raise InvalidArgumentError(f"`{name}` is {value!r}, but must be a positive integer.")


def validate_real_array(name: str, value: Any) -> np.ndarray:
    """A user's array of real numbers; texts, objects and complex numbers are refused."""
    try:
        found = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"`{name}` must be an array, but: {summarise_error(error)}."
        ) from error
    if found.dtype.kind not in "biuf" and not jnp.issubdtype(found.dtype, jnp.floating):
        raise InvalidArgumentError(
            f"`{name}` has type {found.dtype}, but must be an array of real numbers."
        )
    return found


def check_rng_key(rng_key: Any) -> None:
    """Refuse what is not one random key."""
    if _key_batch_ndim(rng_key) != 0:
        raise InvalidArgumentError(
            f"`rng_key` is {_describe_rng_key(rng_key)}, but must be one random key such as "
            "jax.random.key(0)."
        )


def check_rng_keys(rng_key: Any) -> None:
    """Refuse what is no random key, nor one a chain."""
    if _key_batch_ndim(rng_key) not in (0, 1):
        raise InvalidArgumentError(
            f"`rng_key` is {_describe_rng_key(rng_key)}, but must be a random key such as "
            "jax.random.key(0), or an array of one for each chain."
        )


def _key_batch_ndim(rng_key: Any) -> int | None:
    """Axes of an array of typed or raw keys; None for what is none."""
    dtype, ndim = getattr(rng_key, "dtype", None), np.ndim(rng_key)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return ndim
    words = jax.eval_shape(jax.random.PRNGKey, 0).shape
    is_raw = dtype == np.uint32 and ndim > 0 and rng_key.shape[-1:] == words
    return ndim - 1 if is_raw else None


def _describe_rng_key(rng_key: Any) -> str:
    if (dtype := getattr(rng_key, "dtype", None)) is None:
        return repr(rng_key)[:60]
    return f"an array of shape {np.shape(rng_key)} and type {dtype}"


def summarise_error(error: BaseException) -> str:
    """What an error says, without the pages that JAX adds."""
    said = str(error).strip().split("\n")[0][:200].rstrip(". ")
    if isinstance(error, KeyError):  # which says no more than the key
        return f"there is no key {said}"
    return said or type(error).__name__


_LIBRARY_FOLDERS = tuple(str(Path(p).parent) for p in (__file__, numpyro.__file__, jax.__file__))


def warn_user(message: str) -> None:
    """Warn once (by Python's own rules) at the innermost line outside the libraries."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARY_FOLDERS):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)


class ModelWarning(NamedTuple):
    """
    - **sites** - names of the sites that are concerned; empty for all.
    - **kind** - ``"hidden"``: the potential changes unknown to its gradient; ``"modes"``: there are
      other modes of comparable mass; ``"visited"``: there are, and chains start in them, too;
      ``"no region"``: pilot chains agree nowhere; ``"coupled"``: rows do not add up.
    - **message** - what is wrong, and the way out.
    """

    sites: tuple[str, ...]
    kind: str
    message: str
