"""Errors and warnings of this package, and the checks of arguments that every layer uses.

Every message states the problem in at most 120 characters, then ``Fix:`` and what to do, then the
section of the troubleshooting page that explains it, if there is one.
"""

from __future__ import annotations

import importlib
import sys
import sysconfig
import warnings
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro

from numpyro_sgmcmc.troubleshooting import get_section

__all__ = [
    "CheckpointError",
    "CheckpointWarning",
    "ConvergenceWarning",
    "DataOrderWarning",
    "DataReadError",
    "DiscretisationWarning",
    "DroppedSiteWarning",
    "EnumerationWarning",
    "ExplainedError",
    "GradientNoiseWarning",
    "GroupCodesWarning",
    "InconsistentGradientWarning",
    "InitializationError",
    "InvalidArgumentError",
    "InvalidModelError",
    "LocalLatentsWarning",
    "ModelWarning",
    "ModelWarningKind",
    "MultimodalPosteriorWarning",
    "NonAdditiveLikelihoodWarning",
    "NonIdentifiedPosteriorWarning",
    "PlateWarning",
    "SGMCMCWarning",
    "ShardingWarning",
    "StepSizeWarning",
    "SubsampleSizeWarning",
]

# Characters of a value's repr in a message; a problem has at most 120.
_MAX_VALUE_LENGTH = 60


def format_message(problem: str, fix: str, entry: str) -> str:
    """Return a message that ends with the section of the documentation on it, if there is one."""
    section = get_section(entry)
    see = "" if section is None else f' See "{section}" in the documentation (Troubleshooting).'
    return f"{problem} Fix: {fix}{see}"


class ExplainedError(Exception):
    """Base of errors that have a fix and an entry of the troubleshooting page.

    Errors that the model, NumPyro or JAX raise have other types.

    :param problem: what is wrong.
    :param fix: what to do.
    :param entry: label of the entry on the troubleshooting page.
    """

    def __init__(self, problem: str, fix: str, entry: str) -> None:
        self.problem, self.fix, self.entry = problem, fix, entry
        super().__init__(format_message(problem, fix, entry))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problem, self.fix, self.entry)


class InvalidArgumentError(ExplainedError, ValueError):
    """Raised for an argument, an option or data that cannot be used."""


class InvalidModelError(ExplainedError, ValueError):
    """Raised for a model that cannot be sampled with minibatches."""


class InitializationError(ExplainedError, ValueError):
    """Raised if no initial position is valid, pilot chains diverge, or ``init`` was not called."""


class DataReadError(ExplainedError, RuntimeError):
    """Raised if rows on the host cannot be read, or have values that cannot be used."""


class CheckpointError(ExplainedError, RuntimeError):
    """Raised if a checkpointed run cannot be written or read, or is in use."""


class SGMCMCWarning(UserWarning):
    """Base of all warnings of this package."""


class GradientNoiseWarning(SGMCMCWarning):
    """Gradient noise is predicted to bias means or SDs."""


class SubsampleSizeWarning(SGMCMCWarning):
    """Adaptation or draws are predicted to take a long time with this batch size."""


class DiscretisationWarning(SGMCMCWarning):
    """The integrator's discretisation error is predicted to bias means, or limits the step size."""


class StepSizeWarning(SGMCMCWarning):
    """The user's step size is predicted to bias means or SDs, or to make chains diverge or stop."""


class DataOrderWarning(SGMCMCWarning):
    """The data appear to be sorted, so that contiguous minibatches are not representative."""


class NonAdditiveLikelihoodWarning(SGMCMCWarning):
    """The log likelihood is not additive over observations."""


class InconsistentGradientWarning(SGMCMCWarning):
    """The log density changes in a way that its gradient does not show."""


class MultimodalPosteriorWarning(SGMCMCWarning):
    """The posterior has several modes of comparable mass."""


class NonIdentifiedPosteriorWarning(SGMCMCWarning):
    """No dominant posterior mode was found, as for the weights of neural networks."""


class ConvergenceWarning(SGMCMCWarning):
    """The pilot chains of the warm-up had not converged."""


class LocalLatentsWarning(SGMCMCWarning):
    """Local latent variables are updated more often than a draw needs, or affect no other site."""


class EnumerationWarning(SGMCMCWarning):
    """A discrete site is summed out, although the model does not mark it for enumeration."""


class PlateWarning(SGMCMCWarning):
    """A batch dimension of a site has no plate, or the model has no subsampled plate."""


class GroupCodesWarning(SGMCMCWarning):
    """Codes of groups appear to begin with 1, not with 0."""


class DroppedSiteWarning(SGMCMCWarning):
    """A deterministic site is left out of the draws."""


class ShardingWarning(SGMCMCWarning):
    """The size of a minibatch is not a multiple of the number of devices."""


class CheckpointWarning(SGMCMCWarning):
    """A checkpointed run was interrupted, or its last checkpoint is damaged."""


class ModelWarningKind(Enum):
    """Properties of a posterior that bias the draws but need not show in the chains."""

    INCONSISTENT_GRADIENT = "inconsistent gradient"
    MULTIMODAL = "multimodal"
    MODES_VISITED = "modes visited"
    NON_IDENTIFIED = "non-identified"
    NON_ADDITIVE = "non-additive"
    NOT_CONVERGED = "not converged"


_CATEGORY_OF_KIND = {
    ModelWarningKind.INCONSISTENT_GRADIENT: InconsistentGradientWarning,
    ModelWarningKind.MULTIMODAL: MultimodalPosteriorWarning,
    ModelWarningKind.MODES_VISITED: MultimodalPosteriorWarning,
    ModelWarningKind.NON_IDENTIFIED: NonIdentifiedPosteriorWarning,
    ModelWarningKind.NON_ADDITIVE: NonAdditiveLikelihoodWarning,
    ModelWarningKind.NOT_CONVERGED: ConvergenceWarning,
}


class ModelWarning(NamedTuple):
    """A property of the posterior that the warm-up has detected, stored for the bias report.

    - **sites** - names of the affected sites; empty if all are affected.
    - **kind** - what was detected.
    - **message** - what is wrong, and the fix.
    """

    sites: tuple[str, ...]
    kind: ModelWarningKind
    message: str

    @property
    def category(self) -> type[SGMCMCWarning]:
        """Return the warning category of this kind."""
        return _CATEGORY_OF_KIND[self.kind]


# Frames of these folders are skipped when a warning looks for the user's line.
_LIBRARY_FOLDERS = tuple(
    str(Path(p).parent) for p in (__file__, np.__file__, numpyro.__file__, jax.__file__)
)


_PACKAGE_AND_STDLIB = str(Path(__file__).parent), sysconfig.get_path("stdlib")


def is_library_file(file: str) -> bool:
    """Return whether a source file is of this package, of an installed one or of Python's own."""
    return (
        "site-packages" in file or "dist-packages" in file or file.startswith(_PACKAGE_AND_STDLIB)
    )


def warn_user(
    message: str, category: type[SGMCMCWarning] = SGMCMCWarning, fix: str = "", entry: str = ""
) -> None:
    """Warn at the innermost line outside this package, NumPyro and JAX."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARY_FOLDERS):
        frame, level = frame.f_back, level + 1
    text = format_message(message, fix, entry) if fix else message
    warnings.warn(text, category, stacklevel=level)


def summarise_error(error: BaseException) -> str:
    """Return the first line of an error's message, without the pages that JAX adds."""
    if isinstance(error, ExplainedError):
        return error.problem.rstrip(".")
    first_line = str(error).strip().split("\n")[0][:200].rstrip(". ")
    if isinstance(error, KeyError):  # its message is the key alone
        return f"there is no key {first_line}"
    return first_line or type(error).__name__


def describe_value(value: Any) -> str:
    """Return a value for a message: its repr, or the kind of a value whose repr is long."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None and shape != ():
        return f"an array of shape {tuple(shape)} and type {dtype}"
    text = repr(value)
    if len(text) <= _MAX_VALUE_LENGTH and "\n" not in text:
        return text
    return f"of type {type(value).__name__}"


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Check that a value is one of the choices."""
    if not (isinstance(value, str) and value in choices):
        listed = ", ".join(repr(c) for c in choices)
        raise InvalidArgumentError(
            f"`{name}` is {describe_value(value)}, which is not a valid choice.",
            f"use one of {listed}." if len(choices) > 1 else f"use {listed}, the only choice.",
            "choice",
        )


def check_callable(name: str, value: Any) -> None:
    """Check that a value can be called."""
    if not callable(value):
        raise InvalidArgumentError(
            f"`{name}` is {describe_value(value)}, which is not a function.",
            "pass a function.",
            "callable",
        )


def evaluate_user_function(name: str, fn: Callable, *args: Any) -> np.ndarray:
    """Return the value of a user's function of arrays as a NumPy array."""
    try:
        traced = jax.eval_shape(lambda xs: jnp.asarray(fn(*xs)), args)
        if jnp.issubdtype(traced.dtype, jnp.complexfloating):
            raise TypeError("it returns complex numbers")
        return np.asarray(jnp.asarray(fn(*args), float))
    except InvalidArgumentError:
        raise
    except Exception as error:
        raise InvalidArgumentError(
            f"Calling `{name}` failed: {summarise_error(error)}.",
            "pass a function that JAX can trace (no Python `if` on its values) and that returns "
            "an array of real numbers.",
            "user-function",
        ) from error


def standard_normal_points(like: jax.Array) -> jax.Array:
    """Return 8 standard normal positions in preconditioned coordinates, to check user functions."""
    return jax.random.normal(jax.random.key(0), (8, *like.shape), like.dtype)


def import_optional(module: str, caller: str, extra: str) -> Any:
    """Import and return a module that ``extra`` of this package installs, for ``caller``."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        fix = f"run pip install 'numpyro-sgmcmc[{extra}]'."
        problem = f"{caller} needs {module}, which is not installed."
        raise ImportError(format_message(problem, fix, "missing-extra")) from error


def _float_or_none(value: Any) -> float | None:
    """Return a number as a float, or None for anything else; strings and bools are no numbers."""
    if isinstance(value, (bool, str, bytes)) or getattr(value, "dtype", None) == np.bool_:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def check_positive(name: str, value: Any) -> float:
    """Check that a value is a positive finite number, and return it as a float."""
    number = _float_or_none(value)
    if number is None or not (number > 0 and np.isfinite(number)):
        raise InvalidArgumentError(
            f"`{name}` is {describe_value(value)}, which is not a positive finite number.",
            "pass a positive number.",
            "number-range",
        )
    return number


def check_in_interval(name: str, value: Any, low: float, high: float) -> float:
    """Check that a value is a positive number from ``low`` to ``high``; return it as a float."""
    number = check_positive(name, value)
    if not low <= number <= high:
        raise InvalidArgumentError(
            f"`{name}` is {describe_value(value)}, which is not between {low:g} and {high:g}.",
            f"pass a number from {low:g} to {high:g}.",
            "number-range",
        )
    return number


def check_fraction(name: str, value: Any, interval: str) -> float:
    """Check that a value is a number from 0 to 1, and return it as a float.

    :param interval: ``"[0, 1]"``, or with a round bracket for an end that is not valid.
    """
    number = _float_or_none(value)
    if (
        number is None
        or not 0 <= number <= 1
        or (number == 0 and interval.startswith("("))
        or (number == 1 and interval.endswith(")"))
    ):
        raise InvalidArgumentError(
            f"`{name}` is {describe_value(value)}, which is not in {interval}.",
            f"pass a number in {interval}.",
            "number-range",
        )
    return number


def check_nonnegative(name: str, value: Any) -> float:
    """Check that a value is zero or a positive finite number, and return it as a float."""
    number = _float_or_none(value)
    if number is None or not 0 <= number < np.inf:
        raise InvalidArgumentError(
            f"`{name}` is {describe_value(value)}, "
            "which is neither zero nor a positive finite number.",
            "pass zero or a positive number.",
            "number-range",
        )
    return number


def check_bool(name: str, value: Any) -> bool:
    """Check that a value is True or False, and return it as a bool of Python."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidArgumentError(
            f"`{name}` is {describe_value(value)}, which is not a bool.",
            "pass True or False.",
            "bool",
        )
    return bool(value)


def check_positive_int(name: str, value: Any) -> None:
    """Check that a value is a positive integer."""
    is_int = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not (is_int and value > 0):
        raise InvalidArgumentError(
            f"`{name}` is {describe_value(value)}, which is not a positive integer.",
            "pass a positive integer.",
            "number-range",
        )


def validate_real_array(name: str, value: Any) -> np.ndarray:
    """Return a user's array of real numbers."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"`{name}` is not an array: {summarise_error(error)}.",
            "pass an array of real numbers.",
            "real-array",
        ) from error
    if array.dtype.kind not in "biuf" and not jnp.issubdtype(array.dtype, jnp.floating):
        raise InvalidArgumentError(
            f"`{name}` has type {array.dtype}, which is not a type of real numbers.",
            "pass an array of real numbers.",
            "real-array",
        )
    return array


def check_rng_key(rng_key: Any) -> None:
    """Check that a value is one random key."""
    if _key_batch_ndim(rng_key) != 0:
        raise InvalidArgumentError(
            f"`rng_key` is {describe_value(rng_key)}, which is not one random key.",
            "pass a key such as jax.random.key(0).",
            "rng-key",
        )


def check_rng_keys(rng_key: Any) -> None:
    """Check that a value is a random key, or one key per chain."""
    if _key_batch_ndim(rng_key) not in (0, 1):
        raise InvalidArgumentError(
            f"`rng_key` is {describe_value(rng_key)}, which is not a random key.",
            "pass a key such as jax.random.key(0), or an array of one key per chain.",
            "rng-key",
        )


def _key_batch_ndim(rng_key: Any) -> int | None:
    """Return the number of batch axes of typed or raw keys, or None for anything else."""
    dtype, ndim = getattr(rng_key, "dtype", None), np.ndim(rng_key)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return ndim
    words = jax.eval_shape(jax.random.PRNGKey, 0).shape
    is_raw = dtype == np.uint32 and ndim > 0 and rng_key.shape[-1:] == words
    return ndim - 1 if is_raw else None
