"""Check that indices which come from the data exist in the arrays that they index.

JAX does not check indices: -1 reads the last entry, and an index beyond the end the last entry or
NaN. Groups coded from 1, or as -1 where they are missing, then give wrong effects without an error.

For nearly all models, bounds of the data show that every index exists, and nothing is compiled.
Otherwise the indices are evaluated on all rows. An index out of bounds is an error only if what it
reads changes the potential: ``jnp.where(group >= 0, effect[group], 0.0)`` is right.

Codes from 1 are in bounds where the array has an entry more, as for a last level without rows. If
the smallest index is 1 and the largest the last entry, the levels in use are counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_sgmcmc.compilation import jit_low_optimization
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.row_proxies import RowLookup, with_prefetched_rows
from numpyro_sgmcmc.data.sharded_array import ShardedArray
from numpyro_sgmcmc.data.subsampling import Indices
from numpyro_sgmcmc.errors import GroupCodesWarning, InvalidModelError, warn_user
from numpyro_sgmcmc.model.index_lookups import (
    LATENT,
    UNBOUNDED,
    ArrayIndex,
    Interval,
    Lookup,
    LookupWalk,
    TracedArray,
    combine_indices,
    find_bounds,
    iter_entries,
    union_bounds,
)
from numpyro_sgmcmc.model.potential import Potential, compute_chunk_size

_MAX_ROWS_PER_READ = 2**20  # of an array on the host: a bound on memory
_POSITION_SD = 0.5  # of the unconstrained position at which potentials are compared


def _row_array_bounds(array: Any) -> Interval:
    """Return the smallest and the largest entry of integers on the host or over devices."""
    if not jnp.issubdtype(array.dtype, jnp.integer):
        return UNBOUNDED
    if not array.is_on_host:
        return float(array.array.min()), float(array.array.max())
    num_rows = compute_chunk_size(array.row_size, _MAX_ROWS_PER_READ)
    starts = range(0, len(array), num_rows)
    chunks = (np.arange(k, min(k + num_rows, len(array))) for k in starts)
    return union_bounds(*(find_bounds(array[chunk]) for chunk in chunks))


def _iter_row_array_entries(array: Any) -> Iterator[np.ndarray]:
    """Yield entries of this process: those over its devices, or a first chunk on the host."""
    if not array.is_on_host:
        for shard in array.array.addressable_shards:
            yield from iter_entries(shard.data)
        return
    # Without the other processes, which may not need the rows.
    host_array = array.array if isinstance(array, ShardedArray) else array
    num_rows = compute_chunk_size(array.row_size, _MAX_ROWS_PER_READ)
    yield np.ravel(host_array[np.arange(min(num_rows, len(host_array)))])


@dataclass(frozen=True, eq=False)
class _LookupEvaluation:
    """A minibatch potential as a function of its data."""

    potential: Potential  # the potential, with the rows of all devices
    arguments: Arguments
    named_arrays: list[tuple[str, Any]]  # arguments in memory, with their names
    # arrays on the host or over devices that a plate indexes, with their names
    named_lookups: list[tuple[str, RowLookup]]

    @classmethod
    def create(
        cls, potential: Potential, arguments: Arguments, model: Callable
    ) -> _LookupEvaluation:
        lookups = list(potential.host_lookups)
        for plate in [p for p in potential.plates if p.shards is not None]:
            arrays = [x for x in arguments.sharded_arrays if not x.is_on_host]
            lookups += [RowLookup(array, plate.name) for array in arrays]
        sharded = {id(x.array) for x in arguments.sharded_arrays}
        named = arguments.named_arrays(model)
        names = {id(x): name for name, x in [*named, *arguments.named_host_arrays(model)]}
        sources = [x.array.array if isinstance(x.array, ShardedArray) else x.array for x in lookups]
        return cls(
            potential.without_shards(),
            arguments,
            [(name, x) for name, x in named if id(x) not in sharded],
            [(names[id(x)], lookup) for x, lookup in zip(sources, lookups, strict=True)],
        )

    @property
    def arrays(self) -> list[Any]:
        """The arguments in memory."""
        return [x for _, x in self.named_arrays]

    @property
    def rng_key(self) -> Array | None:
        return random.key(0) if self.potential.is_stochastic else None

    @cached_property
    def input_indices(self) -> list[ArrayIndex]:
        """Bounds and origins of position, plate indices, arrays, rows and random key."""
        indices = [LATENT]
        for p in sorted(self.potential.plates):
            bounds = 0, p.size - 1
            indices.append(ArrayIndex(partial(union_bounds, bounds), plates=frozenset({p.name})))
        for name, x in self.named_arrays:
            compute_bounds, entries = partial(find_bounds, x), partial(iter_entries, x)
            sources = frozenset({name})
            indices.append(ArrayIndex(compute_bounds, sources, frozenset(), name, entries))
        for name, x in self.named_lookups:
            compute_bounds, plates = partial(_row_array_bounds, x.array), frozenset({x.plate})
            entries = partial(_iter_row_array_entries, x.array)
            indices.append(ArrayIndex(compute_bounds, frozenset({name}), plates, name, entries))
        return indices + [LATENT] * self.potential.is_stochastic

    def value(
        self, position: Array, indices: Indices, arrays: list[Any], rows: list[Any], rng_key: Any
    ) -> Array:
        """Return the minibatch potential, given the arguments in memory and rows of the others."""
        potential, remaining = self.potential, iter(arrays)
        if not self.named_lookups:
            arguments = self.arguments.map_arrays(lambda _: next(remaining))
            return potential.value(position, indices, arguments, rng_key)
        lookups = tuple(lookup for _, lookup in self.named_lookups)
        plate_indices = {name: jnp.asarray(x) for name, x in indices.items()}
        arguments = with_prefetched_rows(self.arguments, lookups, plate_indices, tuple(rows))
        arguments = arguments.map_arrays(lambda _: next(remaining))
        # Not compiled by itself: rows are recognised by the identity of the indices.
        z = potential.unravel(position)
        return potential.minibatch_potential(z, plate_indices, arguments, rng_key)

    def find_lookups(self) -> list[Lookup]:
        """Return the lookups, with bounds of their indices."""
        potential, struct = self.potential, jax.ShapeDtypeStruct
        sizes = {p.name: p.subsample_size for p in potential.plates}
        arrays = [(sizes[x.plate], x.array) for _, x in self.named_lookups]
        # These types are those of the warm-up, for which JAX keeps the traced potential.
        jaxpr = jax.make_jaxpr(self.value)(
            struct((potential.dim,), potential.dtype),
            {name: struct((n,), jnp.int32) for name, n in sizes.items()},
            self.arrays,
            [struct((n, *x.shape[1:]), x.dtype) for n, x in arrays],
            self.rng_key,
        )
        walk = LookupWalk()
        walk.run(jaxpr, [TracedArray((x,)) for x in self.input_indices])
        return walk.lookups

    def run_walk(
        self, walk: LookupWalk, indices: Indices, arrays: list[Any], rows: list[Any]
    ) -> Any:
        """Return the potential by a walk over its jaxpr."""
        normals = np.random.default_rng(0).standard_normal(self.potential.dim)
        position = jnp.asarray(_POSITION_SD * normals, self.potential.dtype)
        inputs = position, indices, arrays, rows, self.rng_key
        traced = [
            TracedArray((index,), x)
            for index, x in zip(self.input_indices, jax.tree.leaves(inputs), strict=True)
        ]
        return walk.run(jax.make_jaxpr(self.value)(*inputs), traced)[0].value

    def iter_chunks(self) -> Iterator[tuple[str | None, Indices]]:
        """Yield chunks of all rows of each plate, with the plate's name."""
        first = {p.name: np.arange(p.subsample_size, dtype=np.int32) for p in self.potential.plates}
        if not first:
            yield None, {}
        row_size = sum(x.size // len(x) for x in self.arrays if np.ndim(x) and len(x))
        row_size += sum(x.array.row_size for _, x in self.named_lookups)
        chunk_size = compute_chunk_size(row_size)
        for p in self.potential.plates:
            for start in range(0, p.size, chunk_size):
                rows = np.arange(start, min(start + chunk_size, p.size), dtype=np.int32)
                yield p.name, {**first, p.name: rows}

    def read_rows(
        self, indices: Indices, sources: frozenset[str | None] | None = None
    ) -> list[Any]:
        """Return rows of the arrays that are not in memory; zeros of those not in ``sources``."""
        return [
            x.array[indices[x.plate]]
            if sources is None or name in sources
            else np.zeros((len(indices[x.plate]), *x.array.shape[1:]), x.array.dtype)
            for name, x in self.named_lookups
        ]


def check_index_bounds(potential: Potential, arguments: Arguments, model: Callable) -> None:
    """Check that indices which come from the data exist in the arrays that they index.

    It warns of codes that appear to begin with 1.
    """
    evaluation = _LookupEvaluation.create(potential, arguments, model)
    lookups = evaluation.find_lookups()
    doubtful = {k: x for k, x in enumerate(lookups) if x.is_doubtful}
    values, chunks = _evaluate_indices(evaluation, doubtful)
    for number, wrong_chunks in chunks.items():
        if wrong_chunks and _is_potential_changed(evaluation, number, wrong_chunks):
            raise _make_error(doubtful[number], values[number])
    _warn_codes_from_one(lookups, values)


def _evaluate_indices(
    evaluation: _LookupEvaluation, lookups: Mapping[int, Lookup]
) -> tuple[dict[int, np.ndarray], dict[int, list[Indices]]]:
    """Return each lookup's indices, shape ``(n, dimensions)``, and rows that have wrong ones."""
    if not lookups:
        return {}, {}
    indices_of_lookups = {number: combine_indices(x.columns) for number, x in lookups.items()}
    sources = combine_indices(list(indices_of_lookups.values())).sources

    @jit_low_optimization
    def evaluate(indices: Indices, arrays: list[Any], rows: list[Any]) -> list[Array]:
        walk = LookupWalk()
        evaluation.run_walk(walk, indices, arrays, rows)
        return [walk.lookups[number].values for number in lookups]

    values: dict[int, list[np.ndarray]] = {number: [] for number in lookups}
    chunks: dict[int, list[Indices]] = {number: [] for number in lookups}
    for k, (plate, indices) in enumerate(evaluation.iter_chunks()):
        rows = evaluation.read_rows(indices, sources)
        all_values = evaluate(indices, evaluation.arrays, rows)
        for (number, lookup), x in zip(lookups.items(), all_values, strict=True):
            plates = indices_of_lookups[number].plates
            if plate in plates or (k == 0 and not plates):
                values[number].append(np.asarray(x).reshape(-1, len(lookup.columns)))
                if lookup.find_out_of_bounds(values[number][-1]).any():
                    chunks[number].append(indices)
    return {number: np.concatenate(x) for number, x in values.items()}, chunks


def _describe_index(index: ArrayIndex) -> str:
    """Return where an index comes from."""
    names = " and ".join(sorted(x for x in index.sources if x is not None))
    computed = f"computed from {names}" if names else "in an array that the model closes over"
    return index.holder or computed


def _make_error(lookup: Lookup, values: np.ndarray) -> InvalidModelError:
    """Return the error for a lookup with indices out of bounds, shape ``(n, dimensions)``."""
    is_wrong = lookup.find_out_of_bounds(values)
    dim = int(is_wrong.any(0).argmax())
    index, last, wrong = lookup.columns[dim], lookup.last[dim], values[is_wrong[:, dim], dim]
    value = wrong.min() if wrong.min() < 0 else wrong.max()
    return InvalidModelError(
        f"The index {_describe_index(index)} is {value} in {len(wrong)} of {len(values)} places, "
        f"but the array that it indexes has size {last + 1}.",
        f"code groups from 0 to {last}. Subtract 1 from codes that begin with 1. Leave out rows "
        "with code -1 (a missing level in pandas.factorize), or give them a separate group. For an "
        "index that is out of range, JAX reads another entry without an error.",
        "index-bounds",
    )


def _is_potential_changed(
    evaluation: _LookupEvaluation, number: int, chunks: list[Indices]
) -> bool:
    """Return whether the potential depends on what a lookup reads at indices out of bounds."""

    @jit_low_optimization
    def evaluate(indices: Indices, arrays: list[Any], rows: list[Any], replacement: Any) -> Array:
        return evaluation.run_walk(LookupWalk(number, replacement), indices, arrays, rows)

    for indices in chunks:
        batch = indices, evaluation.arrays, evaluation.read_rows(indices)
        first, second = (np.asarray(evaluate(*batch, replacement)) for replacement in (0, 1))
        if not np.array_equal(first, second, equal_nan=True):
            return True
    return False


def _warn_codes_from_one(lookups: list[Lookup], values: Mapping[int, np.ndarray]) -> None:
    """Warn where the first entry is the only one of latent values that data do not index.

    :param values: the indices of lookups that were evaluated, by number.
    """
    # All lookups of an array count: in comparisons of pairs, one of the two may never be 0.
    indices_by_axis: dict[tuple[int, int], list[ArrayIndex | None]] = defaultdict(list)
    last_by_axis: dict[tuple[int, int], int] = {}
    for number, lookup in enumerate(lookups):
        for k, dim in enumerate(lookup.dims):
            column = values[number][:, k] if number in values else None
            axis = id(lookup.array), dim
            indices_by_axis[axis].append(_get_known_index(lookup, k, column))
            last_by_axis[axis] = lookup.last[k]
    warned = set()
    for axis, indices_or_none in indices_by_axis.items():
        indices, last = [x for x in indices_or_none if x is not None], last_by_axis[axis]
        if len(indices) < len(indices_or_none) or not _are_codes_from_one(indices, last):
            continue
        names = " and ".join(dict.fromkeys(map(_describe_index, indices)))
        if names in warned:  # of another site with the same groups
            continue
        warned.add(names)
        warn_user(
            f"The index {names} takes each value from 1 to {last} but never 0, and the array that "
            f"it indexes has size {last + 1}.",
            GroupCodesWarning,
            "if the codes begin with 1, subtract 1, because entry 0 now has no data, and entry k "
            "belongs to code k. If level 0 exists but has no rows, ignore this warning.",
            "codes-from-one",
        )


def _get_known_index(lookup: Lookup, k: int, values: np.ndarray | None) -> ArrayIndex | None:
    """Return the index in a dimension of latent values, or None if its entries are not known.

    :param values: its entries where they were evaluated.
    """
    index = lookup.columns[k]
    is_of_latent = lookup.array.index.is_latent and lookup.reads_entries[k]
    is_from_data = lookup.is_beyond_wrong[k] and bool(index.plates or index.sources - {None})
    if not (is_of_latent and is_from_data):
        return None
    if values is not None:
        entries = partial(iter_entries, values)
        return replace(index, compute_bounds=partial(find_bounds, values), iter_entries=entries)
    return None if index.iter_entries is None else index


def _are_codes_from_one(indices: list[ArrayIndex], last: int) -> bool:
    """Return whether indices take each value from 1 to ``last`` and no other."""
    # With one other value, as of an indicator, nothing suggests codes.
    if last < 2 or union_bounds(*(x.bounds for x in indices)) != (1, last):
        return False
    is_used = np.zeros(last + 1, bool)
    for index in indices:
        assert index.iter_entries is not None
        for entries in index.iter_entries():
            is_used[entries.astype(np.int64)] = True
            if is_used[1:].all():
                return True
    return False
