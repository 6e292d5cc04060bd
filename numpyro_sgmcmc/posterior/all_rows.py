"""Exact full-data values from minibatch values, by chunks of rows.

A minibatch potential is the prior plus the likelihood of the chosen rows times (rows / chosen
rows). Anything linear in it (value, gradient, Hessian) is therefore, on all rows, the mean of
its values on chunks, weighted by the chunks' sizes: memory is that of one chunk, and no second
form of the model is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_sgmcmc.data.plates import Indices, Plate

__all__ = ["compute_chunk_size", "mean_over_chunks"]


_MAX_CHUNK_ELEMENTS = 2**20


def compute_chunk_size(row_size: int) -> int:
    """Rows a chunk, for rows of ``row_size`` numbers: about 2^20 numbers, at most 8192 rows."""
    return max(1, min(8192, _MAX_CHUNK_ELEMENTS // max(row_size, 1)))


def mean_over_chunks(
    fn: Callable[[Indices], Any],
    plate_groups: Sequence[Sequence[Plate]],
    max_rows_per_chunk: int,
    subset: Indices | None = None,
) -> Any:
    """The value on all rows of ``fn``, a function linear in the minibatch potential.

    Plates of one group enclose a common site, so that all pairs of their chunks are visited;
    groups add up, so that each is visited with the others held at their first rows.

    :param fn: maps indices (of any number of rows a plate) to a pytree of arrays.
    :param plate_groups: the subsampled plates, those that meet at a site together.
    :param max_rows_per_chunk: largest number of rows of one call, over the plates of a group.
    :param subset: rows that stand for all rows, by plate name; all rows where None.
    :return: the pytree of exact values.
    """
    plates_by_name = {p.name: p for group in plate_groups for p in group}
    rows = {name: p.size for name, p in plates_by_name.items()}
    if subset is not None:
        rows = {name: subset[name].shape[0] for name in rows}

    def take(name: str, start: Any, num: int) -> Array:
        places = start + jnp.arange(num)
        if subset is not None:
            return jnp.asarray(subset[name])[places]
        return plates_by_name[name].row_offset + places

    first = {
        p.name: take(p.name, 0, min(p.subsample_size, rows[p.name]))
        if isinstance(rows[p.name], int)
        else take(p.name, 0, p.subsample_size)
        for g in plate_groups
        for p in g
    }
    if not plate_groups:
        return fn({})

    def over(plates: Sequence[Plate], held: dict[str, Array], budget: int) -> Any:
        if not plates:
            return fn(held)
        name, size = plates[0].name, rows[plates[0].name]
        is_known = isinstance(size, int)
        bound = size if is_known else plates[0].max_size
        chunk = min(bound, budget)

        def inner(start: Any, num: int) -> Any:
            held_here = {**held, name: take(name, start, num)}
            value = over(plates[1:], held_here, max(1, budget // chunk))
            return jax.tree.map(lambda x: jnp.asarray(num / size, x.dtype) * x, value)

        if not is_known:
            return _sum_unknown_num_rows(inner, size, bound, chunk)
        num_chunks, rest = divmod(size, chunk)
        if num_chunks == 1:
            total = inner(0, chunk)
        else:
            shapes = jax.eval_shape(lambda: inner(0, chunk))
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            total, _ = lax.scan(
                lambda acc, k: (_tree_add(acc, inner(k * chunk, chunk)), None),
                zeros,
                jnp.arange(num_chunks),
            )
        return _tree_add(total, inner(num_chunks * chunk, rest)) if rest else total

    parts = [over(group, first, max_rows_per_chunk) for group in plate_groups]
    total = parts[0]
    for part in parts[1:]:
        total = _tree_add(total, part)
    if len(plate_groups) > 1:
        shared = fn(first)
        total = jax.tree.map(lambda t, s: t - (len(plate_groups) - 1) * s, total, shared)
    return total


def _sum_unknown_num_rows(
    chunk_term: Callable[[Any, int], Any], num_rows: Any, max_num_rows: int, chunk_size: int
) -> Any:
    """The sum over rows whose number is known only when it runs: chunks, small chunks, single rows.

    What lies beyond the last row is computed and left out, so that it can be differentiated.

    :param chunk_term: ``(start, number of rows) -> their part of the sum``.
    :param max_num_rows: the most rows that there may be.
    """
    shapes = jax.eval_shape(lambda: chunk_term(0, chunk_size))
    total = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    start: Any = 0
    for num in sorted({chunk_size, math.isqrt(chunk_size), 1}, reverse=True):
        count = (num_rows - start) // num

        def add(total: Any, k: Any, num: int = num, start: Any = start, count: Any = count) -> Any:
            value = chunk_term(start + k * num, num)
            return jax.tree.map(lambda t, v: t + jnp.where(k < count, v, 0), total, value), None

        total, _ = lax.scan(add, total, jnp.arange(max_num_rows // num))
        start, max_num_rows = start + count * num, num - 1
    return total


def _tree_add(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)
