"""Calls of compiled functions to the host, for rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["call_host", "read_and_prefetch"]

_MAX_CALLBACK_OPERAND_SIZE = 4096


def call_host(fn: Callable[[Any], Any], result_shape_dtypes: Any, operands: Any) -> Any:
    """``jax.pure_callback`` of one device among several, batched under ``vmap``.

    JAX hands large operands over by a thread of the pool in which devices that are threads of one
    CPU wait: where all of them wait for this call, it never comes. Small ones it hands over at
    once, so that operands go in pieces.

    :param fn: a function of NumPy arrays.
    :param result_shape_dtypes: shapes and types of what it returns.
    :param operands: a pytree of arrays.
    """
    leaves, structure = jax.tree.flatten(operands)
    shapes = [x.shape for x in leaves]
    flat = [x.reshape(-1) for x in leaves]
    pieces = [
        [
            x[k : k + _MAX_CALLBACK_OPERAND_SIZE]
            for k in range(0, x.size, _MAX_CALLBACK_OPERAND_SIZE)
        ]
        for x in flat
    ]

    def joined(pieces: list[list[Any]]) -> Any:
        whole = [np.concatenate([np.asarray(x) for x in some], -1) for some in pieces]
        shaped = [x.reshape(*x.shape[:-1], *s) for x, s in zip(whole, shapes, strict=True)]
        return fn(jax.tree.unflatten(structure, shaped))

    return jax.pure_callback(joined, result_shape_dtypes, pieces, vmap_method="broadcast_all")


def read_and_prefetch(
    lookups: Sequence[tuple[Any, str]],
    indices: Mapping[str, jax.Array],
    next_indices: Mapping[str, jax.Array],
    defer_errors: bool = False,
) -> tuple[jax.Array, ...]:
    """Rows of each array inside a compiled function, and a start on those wanted after them.

    :param lookups: the arrays, each with the name of what gives its rows.
    :param indices: integer indices by that name, of three axes.
    :param next_indices: the indices that the next call will ask for, of the same shapes.
    :param defer_errors: whether not to raise what goes wrong, but to give zeros.
    :return: for each array its rows, shape ``(*rows.shape, *array.shape[1:])``; where quiet, also
        whether something has gone wrong.
    """
    forms = tuple(
        jax.ShapeDtypeStruct((*indices[n].shape, *a.shape[1:]), a.dtype) for a, n in lookups
    )

    def fetch(both: Mapping[str, Any]) -> tuple[np.ndarray, ...]:
        arrays = {name: np.asarray(x) for name, x in both.items()}
        found = tuple(a.read_prefetched(arrays[n][..., 0, :, :, :]) for a, n in lookups)
        for array, name in lookups:
            array.prefetch(arrays[name][..., 1, :, :, :])
        return found

    def fetch_quietly(both: Mapping[str, Any]) -> tuple[np.ndarray, ...]:
        try:
            return (*fetch(both), np.array(False))
        except RuntimeError:  # which the array has noted
            return (*(np.zeros(x.shape, x.dtype) for x in forms), np.array(True))

    # As one array: each one that a callback takes costs it some 50 microseconds.
    both = {name: jnp.stack([indices[name], next_indices[name]], -4) for _, name in lookups}
    if defer_errors:
        return call_host(fetch_quietly, (*forms, jax.ShapeDtypeStruct((), bool)), both)
    return jax.pure_callback(fetch, forms, both, vmap_method="broadcast_all")
