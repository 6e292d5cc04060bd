"""Run models that compute with NumPy on their data (``np.unique(group)``, ``int(x.max())``).

A model is traced with abstract arguments, which have no value in Python.
:class:`NumPyArgumentsModel` calls it with NumPy arrays in their place, as ``MCMC.run`` calls the
model of NUTS, and with NumPy arrays that a traced index can index (:class:`IndexableArray`) in
place of those that the model closes over. Rows that a minibatch looks up still come from the traced
arguments. What the model computes with NumPy becomes a constant of the compiled programs, so that
the size of such arguments is bounded, and that a potential is valid for their values only.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import cached_property, partial
from types import CellType, CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.primitives import Messenger

from numpyro_sgmcmc.data.arguments import MAX_CONSTANT_BYTES, Arguments, is_array
from numpyro_sgmcmc.errors import is_library_file


class IndexableArray(np.ndarray):
    """A NumPy array that a traced index can index."""

    traced: Any = None  # the argument of the same values that such an index reads, or None

    @classmethod
    def from_array(cls, values: np.ndarray, traced: Any = None) -> IndexableArray:
        """Return a view of an array; read-only where there is a traced argument."""
        view = values.view(cls)
        if traced is not None:
            view.traced = traced
            view.flags.writeable = False
        return view

    @property
    def at(self) -> Any:
        """JAX's functional updates."""
        return self._as_jax().at

    def _as_jax(self) -> Any:
        return jnp.asarray(np.asarray(self)) if self.traced is None else self.traced

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, jax.core.Tracer) for part in parts):
            return self._as_jax()[index]
        return super().__getitem__(index)

    def __array_wrap__(
        self, array: np.ndarray, context: Any = None, return_scalar: bool = False
    ) -> Any:
        return array[()] if array.ndim == 0 else array.view(type(self))

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _as_indexable(super().__array_function__(func, types, args, kwargs))


def _as_indexable(result: Any) -> Any:
    """Return the result of a NumPy function with indexable arrays, also in tuples and lists."""
    if type(result) is np.ndarray and result.ndim:
        return IndexableArray.from_array(result)
    if isinstance(result, (tuple, list)):
        return _rebuild_sequence(result, [_as_indexable(x) for x in result])
    return result


def _rebuild_sequence(original: Any, items: list[Any]) -> Any:
    """Return a list, tuple or named tuple like the original with other items."""
    return type(original)(*items) if hasattr(original, "_fields") else type(original)(items)


class NumPyArgumentsModel:
    """A model that gets its arguments, and the arrays that it closes over, as NumPy arrays.

    :param arguments: arguments whose values stand for traced ones, the smallest first; arrays that
        are on the host, on several devices or too large remain traced. An argument that is not
        traced has its own.
    :param max_bytes: bytes of these arguments together.
    """

    def __init__(
        self, model: Callable, arguments: Arguments, max_bytes: int = MAX_CONSTANT_BYTES
    ) -> None:
        self.model = model
        self._indexable_model = _replace_arrays(model, {})
        self._values: dict[str, np.ndarray] = {}
        num_bytes = 0
        for path, x in sorted(_iterate_arrays(arguments), key=lambda item: item[1].nbytes):
            num_bytes += x.nbytes
            if num_bytes > max_bytes:
                break
            if _has_value(x):
                self._values[path] = np.array(x)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def convert(path: Any, x: Any) -> Any:
            if not is_array(x):
                return _replace_arrays(x, {})
            values = self._values.get(jax.tree_util.keystr(path))
            if values is None and _has_value(x):
                values = np.asarray(x)
            return x if values is None else IndexableArray.from_array(values, jnp.asarray(x))

        args, kwargs = jax.tree_util.tree_map_with_path(convert, (args, kwargs))
        return self._indexable_model(*args, **kwargs)

    @cached_property
    def without_values(self) -> NumPyArgumentsModel:
        """The model for any arguments that are not traced."""
        return NumPyArgumentsModel(self.model, Arguments())

    @cached_property
    def digest(self) -> bytes:
        """Digest of the values."""
        digest = hashlib.sha256()
        for path, values in self._values.items():
            digest.update(f"{path} {values.dtype} {values.shape}".encode())
            digest.update(np.ascontiguousarray(values).tobytes())
        return digest.digest()

    def has_values_of(self, arguments: Arguments) -> bool:
        """Return whether arguments have the values that stand for traced ones."""
        arrays = dict(_iterate_arrays(arguments))
        return all(
            path in arrays
            and _has_value(arrays[path])
            and np.array_equal(values, arrays[path], equal_nan=values.dtype.kind in "fc")
            for path, values in self._values.items()
        )

    def describe_traced(self, arguments: Arguments) -> str:
        """Return the names of the arrays among the arguments that remain traced."""
        arguments = arguments.without_kwarg(GIBBS_SITES_KWARG)
        names = [name for name, _ in arguments.named_arrays(self.model)]
        paths = [path for path, _ in _iterate_arrays(arguments)]
        traced = [n for n, path in zip(names, paths, strict=True) if path not in self._values]
        traced += [name for name, _ in arguments.named_host_arrays(self.model)]
        return ", ".join(traced)


def _replace_arrays(x: Any, replacements: dict[int, tuple[Any, Any]]) -> Any:
    """Return an object with indexable arrays in place of the NumPy arrays that it refers to.

    Functions, containers and instances of the user's classes are copied where they refer to any.

    :param replacements: objects and what replaces them, by identity; new ones are added.
    """
    if id(x) not in replacements:
        replacements[id(x)] = x, x  # for an object that refers to itself
        replacement = x
        if type(x) is np.ndarray:
            if is_array(x) and x.ndim:
                replacement = IndexableArray.from_array(x)
        elif (taken_apart := _take_apart(x)) is not None:
            parts, rebuild = taken_apart
            new_parts = [_replace_arrays(part, replacements) for part in parts]
            if any(new is not old for new, old in zip(new_parts, parts, strict=True)):
                replacement = rebuild(new_parts)
        replacements[id(x)] = x, replacement
    return replacements[id(x)][1]


def _take_apart(x: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """Return what an object refers to, and a function that copies it with other such parts.

    None for objects of other types than those that may hold a user's arrays.
    """
    if type(x) in (list, tuple) or (isinstance(x, tuple) and hasattr(x, "_fields")):
        return list(x), partial(_rebuild_sequence, x)
    if type(x) is dict:
        return list(x.values()), lambda values: dict(zip(x, values, strict=True))
    if isinstance(x, partial):
        return [x.func, x.args, x.keywords], lambda parts: partial(parts[0], *parts[1], **parts[2])
    if isinstance(x, MethodType):
        return [x.__func__, x.__self__], lambda parts: MethodType(*parts)
    if isinstance(x, CellType):
        return None if x == CellType() else ([x.cell_contents], lambda parts: CellType(*parts))
    if isinstance(x, FunctionType) and not is_library_file(x.__code__.co_filename):
        names = _find_global_names(x.__code__) & x.__globals__.keys()
        used = {name: x.__globals__[name] for name in names}
        return [used, x.__closure__, x.__defaults__, x.__kwdefaults__], partial(_copy_function, x)
    if _is_copied_instance(x):
        attributes = [*getattr(x, "__dict__", ())]
        attributes += [f.name for f in (fields(x) if is_dataclass(x) else ())]
        return [getattr(x, name) for name in attributes], partial(_copy_instance, x, attributes)
    return None


def _copy_function(fn: FunctionType, parts: list[Any]) -> FunctionType:
    used, closure, defaults, kwdefaults = parts
    copied = FunctionType(fn.__code__, {**fn.__globals__, **used}, fn.__name__, defaults, closure)
    copied.__kwdefaults__ = kwdefaults
    copied.__dict__.update(fn.__dict__)
    return copied


def _copy_instance(x: Any, names: list[str], values: list[Any]) -> Any:
    instance = copy.copy(x)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(instance, name, value)  # also of a frozen dataclass
    return instance


def _is_copied_instance(x: Any) -> bool:
    """Return whether an object is one of NumPyro's handlers or of a class of the user's."""
    if isinstance(x, (Messenger, SimpleNamespace)):
        return True
    if isinstance(x, type) or not (hasattr(x, "__dict__") or is_dataclass(x)):
        return False
    file = getattr(sys.modules.get(type(x).__module__), "__file__", None)
    return type(x).__module__ != "builtins" and not is_library_file(file or "")


def _find_global_names(code: CodeType) -> set[str]:
    """Return the names that code, and the functions in it, may look up among its globals."""
    inner = (_find_global_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*inner)


def _iterate_arrays(arguments: Arguments) -> Iterator[tuple[str, Any]]:
    """Yield the arrays of the arguments with their paths, in pytree order.

    Values of other Gibbs blocks, which change in a run, are left out.
    """
    arguments = arguments.without_kwarg(GIBBS_SITES_KWARG)
    tree = arguments.args, arguments.kwargs
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if is_array(x):
            yield jax.tree_util.keystr(path), x


def _has_value(x: Any) -> bool:
    """Return whether an array has a value that this process can read at once."""
    if isinstance(x, np.ndarray):
        return True
    if isinstance(x, jax.core.Tracer) or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return False
    return len(x.sharding.device_set) == 1
