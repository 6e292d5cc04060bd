"""Pytrees as JSON and a list of NumPy arrays, and back: to the same types and the same bits.

No pickle: a checkpoint is data, and reading one runs no code of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

__all__ = ["decode", "encode"]


def _is_prng_key(x: Any) -> bool:
    return isinstance(x, Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def encode(tree: Any, arrays: list[np.ndarray]) -> Any:
    """The structure of ``tree`` as JSON; its arrays are appended to ``arrays``.

    :param tree: named tuples, dataclasses, dicts with strings or tuples of them as keys, lists,
        tuples, arrays, random keys, numbers, strings, bools and None.
    :raises TypeError: for anything else.
    """
    if tree is None or isinstance(tree, (bool, str)) or type(tree) in (int, float):
        return tree
    if _is_prng_key(tree):
        arrays.append(np.asarray(random.key_data(tree)))
        return {"key": len(arrays) - 1, "impl": str(random.key_impl(tree))}
    if isinstance(tree, Array):
        arrays.append(np.asarray(tree))
        return {"jax": len(arrays) - 1}
    if isinstance(tree, (np.ndarray, np.generic)):
        arrays.append(np.asarray(tree))
        return {"scalar" if isinstance(tree, np.generic) else "numpy": len(arrays) - 1}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        kind = f"{type(tree).__module__}:{type(tree).__qualname__}"
        parts = zip(tree._fields, tree, strict=True)
        return {"type": kind, "fields": {n: encode(x, arrays) for n, x in parts}}
    if is_dataclass(tree) and not isinstance(tree, type):
        kind = f"{type(tree).__module__}:{type(tree).__qualname__}"
        values = {f.name: encode(getattr(tree, f.name), arrays) for f in fields(tree)}
        return {"object": kind, **({"values": values} if values else {})}
    if isinstance(tree, (list, tuple)):
        return {type(tree).__name__: [encode(x, arrays) for x in tree]}
    if isinstance(tree, dict) and all(isinstance(k, str) for k in tree):
        return {"dict": {k: encode(x, arrays) for k, x in tree.items()}}
    if isinstance(tree, dict) and all(isinstance(k, tuple) for k in tree):
        return {"by tuples": [[list(k), encode(x, arrays)] for k, x in tree.items()]}
    raise TypeError(f"A {type(tree).__name__} cannot be kept in a checkpoint.")


def _resolve_type(qualified_name: str) -> type:
    """A type of a module that is loaded already: reading a checkpoint imports nothing."""
    module, name = qualified_name.split(":")
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    if not isinstance(found, type):
        raise ValueError(f"{qualified_name} is no type.")
    return found


def _resolve_named_tuple(qualified_name: str) -> type:
    found = _resolve_type(qualified_name)
    if not (issubclass(found, tuple) and hasattr(found, "_fields")):
        raise ValueError(f"{qualified_name} is no named tuple.")
    return found


def _resolve_dataclass(qualified_name: str) -> type:
    """An estimator's, a minibatch scheme's, that of the mass matrix's blocks."""
    found = _resolve_type(qualified_name)
    if not is_dataclass(found):
        raise ValueError(f"{qualified_name} is no dataclass.")
    return found


def decode(structure: Any, arrays: Sequence[np.ndarray] | Mapping[int, np.ndarray]) -> Any:
    """The tree of :func:`encode`; JAX arrays are on the default device."""
    if not isinstance(structure, dict):
        return structure
    match structure:
        case {"key": place, "impl": impl}:
            return random.wrap_key_data(jnp.array(arrays[place]), impl=impl)
        case {"jax": place}:
            return jnp.array(arrays[place])
        case {"numpy": place}:
            return arrays[place]
        case {"scalar": place}:
            return arrays[place][()]
        case {"type": kind, "fields": parts}:
            return _resolve_named_tuple(kind)(**{n: decode(x, arrays) for n, x in parts.items()})
        case {"object": kind}:
            values = structure.get("values", {})
            return _resolve_dataclass(kind)(**{n: decode(x, arrays) for n, x in values.items()})
        case {"list": items}:
            return [decode(x, arrays) for x in items]
        case {"tuple": items}:
            return tuple(decode(x, arrays) for x in items)
        case {"dict": items}:
            return {k: decode(x, arrays) for k, x in items.items()}
        case {"by tuples": items}:
            return {tuple(k): decode(x, arrays) for k, x in items}
    raise ValueError(f"A checkpoint holds no {structure!r}.")
