"""Exact full-data values from minibatch values, by chunks of rows.

A minibatch potential is the prior plus the likelihood of the chosen rows times (rows / chosen
rows). Anything linear in it (value, gradient, Hessian) is therefore, on all rows, the mean of
its values on chunks, weighted by the chunks' sizes: memory is that of one chunk, and no second
form of the model is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

__all__ = ["Indices", "Plate", "chunk_rows", "over_all_rows"]

Indices = Mapping[str, Array | np.ndarray]
"""Row indices by plate name."""

_CHUNK_ELEMENTS = 2**20


class Plate(NamedTuple):
    """
    - **name** - the plate's name.
    - **size** - number of rows.
    - **subsample_size** - rows in a minibatch.
    """

    name: str
    size: int
    subsample_size: int


def chunk_rows(row_width: int) -> int:
    """Rows a chunk, for rows of ``row_width`` numbers: about 2^20 numbers, at most 8192 rows."""
    return max(1, min(8192, _CHUNK_ELEMENTS // max(row_width, 1)))


def over_all_rows(
    fn: Callable[[Indices], Any],
    groups: Sequence[Sequence[Plate]],
    rows_a_chunk: int,
    subset: Indices | None = None,
) -> Any:
    """The value on all rows of ``fn``, a function linear in the minibatch potential.

    Plates of one group enclose a common site, so that all pairs of their chunks are visited;
    groups add up, so that each is visited with the others held at their first rows.

    :param fn: maps indices (of any number of rows a plate) to a pytree of arrays.
    :param groups: the subsampled plates, those that meet at a site together.
    :param rows_a_chunk: largest number of rows of one call, over the plates of a group.
    :param subset: rows that stand for all rows, by plate name; all rows where None.
    :return: the pytree of exact values.
    """
    rows = {p.name: p.size for group in groups for p in group}
    if subset is not None:
        rows = {name: subset[name].shape[0] for name in rows}

    def take(name: str, start: Any, num: int) -> Array:
        places = start + jnp.arange(num)
        return places if subset is None else jnp.asarray(subset[name])[places]

    first = {
        p.name: take(p.name, 0, min(p.subsample_size, rows[p.name])) for g in groups for p in g
    }
    if not groups:
        return fn({})

    def over(plates: Sequence[Plate], held: dict[str, Array], budget: int) -> Any:
        if not plates:
            return fn(held)
        name, size = plates[0].name, rows[plates[0].name]
        chunk = min(size, budget)
        num_chunks, rest = divmod(size, chunk)

        def inner(start: Any, num: int) -> Any:
            held_here = {**held, name: take(name, start, num)}
            value = over(plates[1:], held_here, max(1, budget // chunk))
            return jax.tree.map(lambda x: (num / size) * x, value)

        if num_chunks == 1:
            total = inner(0, chunk)
        else:
            shapes = jax.eval_shape(lambda: inner(0, chunk))
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            total, _ = lax.scan(
                lambda acc, k: (_add(acc, inner(k * chunk, chunk)), None),
                zeros,
                jnp.arange(num_chunks),
            )
        return _add(total, inner(num_chunks * chunk, rest)) if rest else total

    parts = [over(group, first, rows_a_chunk) for group in groups]
    total = parts[0]
    for part in parts[1:]:
        total = _add(total, part)
    if len(groups) > 1:
        shared = fn(first)
        total = jax.tree.map(lambda t, s: t - (len(groups) - 1) * s, total, shared)
    return total


def _add(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)
