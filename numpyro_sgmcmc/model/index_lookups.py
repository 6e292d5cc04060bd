"""Follow indices through a jaxpr, from the data to the arrays that they index.

:class:`LookupWalk` finds every :class:`Lookup` at indices that come from data, with bounds of the
indices. Given values for the inputs of the jaxpr, it evaluates the jaxpr as well, and can replace
what a lookup reads at indices out of bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from numpyro_sgmcmc.jaxpr import MOVING_PRIMITIVES, open_jaxpr, propagate

_RANDOM_PRIMITIVES = "random_", "rng_", "threefry"  # beginnings of names
_MAX_CHUNK_ENTRIES = 2**20  # a bound on memory

Interval = tuple[float, float]
UNBOUNDED: Interval = -math.inf, math.inf


def _unbounded(*_: Interval) -> Interval:
    return UNBOUNDED


def union_bounds(*bounds: Interval) -> Interval:
    """Return the smallest interval that contains all of these."""
    return min(low for low, _ in bounds), max(high for _, high in bounds)


def _multiply(a: Interval, b: Interval) -> Interval:
    if not np.isfinite([*a, *b]).all():
        return UNBOUNDED
    products = [x * y for x in a for y in b]
    return min(products), max(products)


_ARITHMETIC: dict[str, Callable[..., Interval]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": _multiply,
    "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "clamp": lambda low, x, high: (
        min(max(x[0], low[0]), high[0]),
        min(max(x[1], low[1]), high[1]),
    ),
    "select_n": lambda _, *cases: union_bounds(*cases),
    "concatenate": union_bounds,
}


@dataclass(frozen=True, eq=False)
class ArrayIndex:
    """Bounds and origin of the entries of an array, or of one component of index vectors."""

    # returns the smallest and the largest entry, or numbers beyond them
    compute_bounds: Callable[[], Interval] = _unbounded
    # names of the arrays of data that the entries depend on; None for a constant array
    sources: frozenset[str | None] = frozenset()
    plates: frozenset[str] = frozenset()  # plates whose indices they depend on
    holder: str | None = None  # the array of data that has these entries, or None
    # yields the entries in chunks of shape ``(n,)``, or more; None where they are computed
    iter_entries: Callable[[], Iterator[np.ndarray]] | None = None
    is_latent: bool = False  # whether they depend on latent sites or random numbers
    before_wrap: ArrayIndex | None = None  # before JAX added the array's size to a negative index
    # where data choose among entries and numbers in the model's code: these entries; else None
    chosen_entries: tuple[ArrayIndex, ...] | None = None

    @cached_property
    def bounds(self) -> Interval:
        return self.compute_bounds()

    @property
    def is_data(self) -> bool:
        """True if the entries come from data alone."""
        return bool(self.sources) and not self.is_latent

    @property
    def data_entries(self) -> tuple[ArrayIndex, ...]:
        """The entries that are, or are computed from, numbers of the data."""
        return (self,) * bool(self.sources) if self.chosen_entries is None else self.chosen_entries


def combine_indices(
    indices: Sequence[ArrayIndex], compute: Callable[..., Interval] = _unbounded
) -> ArrayIndex:
    """Return the index computed from others, by a function of their bounds."""
    return ArrayIndex(
        lambda: compute(*(x.bounds for x in indices)),
        frozenset[str | None]().union(*(x.sources for x in indices)),
        frozenset[str]().union(*(x.plates for x in indices)),
        is_latent=any(x.is_latent for x in indices),
        chosen_entries=None if any(x.data_entries for x in indices) else (),
    )


LATENT = ArrayIndex(is_latent=True)


@dataclass(frozen=True, eq=False)
class TracedArray:
    """An array of the jaxpr."""

    columns: tuple[ArrayIndex, ...]  # one index, or one for each component of index vectors
    value: Any = None  # None where only bounds are followed
    value_before_wrap: Any = None  # of indices to which JAX has added a size
    source: TracedArray | None = None  # x, where this is `x < 0` or x plus a number

    @cached_property
    def index(self) -> ArrayIndex:
        """All components as one."""
        columns = self.columns
        return columns[0] if len(columns) == 1 else combine_indices(columns, union_bounds)

    @property
    def unwrapped(self) -> Any:
        return self.value if self.value_before_wrap is None else self.value_before_wrap


class Lookup(NamedTuple):
    """A read or update of the entries of an array; tuples have a value for each dimension."""

    array: TracedArray
    columns: tuple[ArrayIndex, ...]  # the index, before JAX adds sizes to negative ones
    dims: tuple[int, ...]  # the dimension of the array
    last: tuple[int, ...]  # the last entry
    reads_entries: tuple[bool, ...]  # whether single entries are read
    is_negative_wrong: tuple[bool, ...]  # whether an index below 0 means another entry
    is_beyond_wrong: tuple[bool, ...]  # whether an index beyond the last means another entry
    values: Any  # the indices, shape `(..., dimensions)`; None where only bounds are followed

    def find_out_of_bounds(self, values: Any) -> Any:
        """Return which indices of shape ``(..., dimensions)`` are out of bounds."""
        is_negative = (values < 0) & np.array(self.is_negative_wrong)
        return is_negative | ((values > np.array(self.last)) & np.array(self.is_beyond_wrong))

    @property
    def is_doubtful(self) -> bool:
        """True unless the bounds of the indices show that none is out of bounds."""
        return any(map(self._is_column_doubtful, range(len(self.columns))))

    def _is_column_doubtful(self, k: int) -> bool:
        if not (self.is_negative_wrong[k] or self.is_beyond_wrong[k]):
            return False
        index, last = self.columns[k], self.last[k]
        low, high = index.bounds
        # Negative numbers in the model's code, among which data choose, and computed indices that
        # are all negative count from the end, as in NumPy.
        lowest = min((x.bounds[0] for x in index.data_entries), default=0)
        counts_back = (index.holder is None and high < 0) or lowest >= 0
        is_negative = self.is_negative_wrong[k] and not (counts_back and low >= -1 - last)
        return is_negative or (self.is_beyond_wrong[k] and high > last)


class LookupWalk:
    """Walk over a jaxpr that follows indices, with values where its inputs have values.

    - **lookups** - lookups at indices that depend on data or plates alone, in order.

    :param replaced: number of a lookup; what it reads out of bounds is replaced.
    :param replacement: 0 or 1, a number of any type.
    :param enters_while: whether lookups in ``while`` loops count, which have no values.
    """

    def __init__(
        self, replaced: int | None = None, replacement: Any = None, enters_while: bool = False
    ) -> None:
        self.replaced, self.replacement, self.enters_while = replaced, replacement, enters_while
        self.lookups: list[Lookup] = []
        self._constants: dict[Any, TracedArray] = {}
        self._has_values = False

    def run(self, jaxpr: Jaxpr | ClosedJaxpr, inputs: Sequence[TracedArray]) -> list[TracedArray]:
        """Return the outputs of the jaxpr."""
        self._constants = {v: _describe_constant(x) for v, x in _iter_constants(jaxpr)}
        self._has_values = all(x.value is not None for x in inputs)
        return self._walk(jaxpr, inputs)

    def _walk(self, jaxpr: Jaxpr | ClosedJaxpr, inputs: Sequence[TracedArray]) -> list[TracedArray]:
        return propagate(jaxpr, inputs, self._transfer, self._read_constant)

    def _read_constant(self, atom: Any) -> TracedArray:
        if isinstance(atom, Literal):
            return _describe_constant(atom.val)
        return self._constants.get(atom, TracedArray((LATENT,)))

    def _transfer(self, eqn: JaxprEqn, inputs: list[TracedArray]) -> list[TracedArray]:
        name = eqn.primitive.name
        if name in ("gather", "dynamic_slice") or _is_update(eqn):
            return [self._look_up(eqn, inputs)]
        if name == "scan":
            return self._scan(eqn, inputs)
        if name == "while" and self.enters_while:
            self._walk(eqn.params["body_jaxpr"], inputs[eqn.params["cond_nconsts"] :])
        values = self._evaluate(eqn, [x.value for x in inputs])
        if name == "select_n" and _is_wrap(inputs):
            index = combine_indices([x.index for x in inputs[1:]], union_bounds)
            index = replace(index, before_wrap=inputs[1].index)
            return [TracedArray((index,), values[0], inputs[1].value)]
        before_wrap: list[Any] = [None] * len(values)
        is_moved = name in MOVING_PRIMITIVES or name == "concatenate"
        if is_moved and any(x.value_before_wrap is not None for x in inputs):
            before_wrap = self._evaluate(eqn, [x.unwrapped for x in inputs])
        is_source_known = name == "add" or (name == "lt" and _is_zero(eqn.invars[1]))
        source = inputs[0] if is_source_known else None
        columns = [_derive_columns(eqn, inputs, k) for k in range(len(values))]
        return [TracedArray(*x, source) for x in zip(columns, values, before_wrap, strict=True)]

    def _evaluate(self, eqn: JaxprEqn, values: list[Any]) -> list[Any]:
        """Return the outputs of an equation, None where only bounds are followed."""
        if not self._has_values:
            return [None] * len(eqn.outvars)
        output = eqn.primitive.bind(*values, **eqn.params)
        return list(output) if eqn.primitive.multiple_results else [output]

    def _look_up(self, eqn: JaxprEqn, inputs: list[TracedArray]) -> TracedArray:
        values, lookup = [x.value for x in inputs], _describe_lookup(eqn, inputs)
        numbers: Any = eqn.params.get("dimension_numbers")
        index = combine_indices([x.index for x in inputs], lambda entries, *_: entries)
        array = inputs[0].index
        index = replace(index, holder=array.holder, iter_entries=array.iter_entries)
        if not _is_update(eqn):
            # Data choose among the numbers of a constant array, unless its rows are data.
            is_table = array.sources == {None} and any(x.sources - {None} for x in lookup.columns)
            index = replace(index, chosen_entries=() if is_table else array.chosen_entries)
        is_replaced = False
        if any(x.is_data or x.plates for x in lookup.columns):
            is_replaced = len(self.lookups) == self.replaced
            self.lookups.append(lookup)
        if is_replaced and _is_update(eqn):
            values[2] = self._replace_entries(values[2], lookup, numbers.update_window_dims)
        (value,) = self._evaluate(eqn, values)
        if is_replaced and not _is_update(eqn):
            window_dims = range(value.ndim) if numbers is None else numbers.offset_dims
            value = self._replace_entries(value, lookup, window_dims)
        return TracedArray((index,), value)

    def _replace_entries(self, x: Array, lookup: Lookup, window_dims: Sequence[int]) -> Array:
        """Return ``x`` with the replacement where an index is out of bounds."""
        is_wrong = lookup.find_out_of_bounds(lookup.values).any(-1)
        batch_dims = [d for d in range(x.ndim) if d not in window_dims]
        # Numbers are replaced by 1 or 2, because a parameter may have no density at 0.
        replacement = self.replacement + jnp.issubdtype(x.dtype, jnp.inexact)
        is_replaced = lax.broadcast_in_dim(is_wrong, x.shape, batch_dims)
        return jnp.where(is_replaced, replacement.astype(x.dtype), x)

    def _scan(self, eqn: JaxprEqn, inputs: list[TracedArray]) -> list[TracedArray]:
        """Follow the indices of a loop's constants and sequences; what it carries is unknown."""
        # JAX 0.12 has no closed one here.
        jaxpr, num_lookups = open_jaxpr(eqn.params["jaxpr"]), len(self.lookups)
        # Only sequences have an axis more outside of the loop.
        num_carry = sum(map(_has_same_ndim, eqn.outvars, jaxpr.outvars))
        num_consts = sum(map(_has_same_ndim, eqn.invars, jaxpr.invars)) - num_carry
        columns = [x.columns for x in inputs]
        columns[num_consts : num_consts + num_carry] = [(LATENT,)] * num_carry
        values = [x.value for x in inputs]
        consts, xs = values[:num_consts], values[num_consts + num_carry :]
        outputs: list[TracedArray] = []

        def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], tuple[list[Any], list[Any]]]:
            del self.lookups[num_lookups:]  # of an earlier trace of this function
            traced = list(map(TracedArray, columns, [*consts, *carry, *x]))
            outputs[:] = self._walk(jaxpr, traced)
            results = [x.value for x in outputs]
            lookup_values = [x.values for x in self.lookups[num_lookups:]]
            return results[:num_carry], (results[num_carry:], lookup_values)

        init, options = values[num_consts : num_consts + num_carry], ("length", "reverse", "unroll")
        scan = partial(lax.scan, **{k: eqn.params[k] for k in options})
        run = partial(scan, step) if self._has_values else step
        carry, (ys, lookup_values) = run(init, xs)
        for k, x in enumerate(lookup_values, num_lookups):
            self.lookups[k] = self.lookups[k]._replace(values=x)
        indices = [LATENT] * num_carry + [x.index for x in outputs[num_carry:]]
        return [TracedArray((index,), x) for index, x in zip(indices, [*carry, *ys], strict=True)]


def _iter_constants(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[tuple[Any, Any]]:
    """Yield the constants of a jaxpr and of those inside it, with their values."""
    yield from zip(open_jaxpr(jaxpr).constvars, getattr(jaxpr, "consts", ()), strict=False)
    for eqn in jaxpr.eqns:
        for parameter in eqn.params.values():
            if isinstance(parameter, ClosedJaxpr):
                yield from _iter_constants(parameter)


def _describe_constant(value: Any) -> TracedArray:
    sources = frozenset[str | None]({None} if np.ndim(value) else ())
    index = ArrayIndex(
        partial(find_bounds, value), sources, iter_entries=partial(iter_entries, value)
    )
    return TracedArray((index,), value)


def _is_update(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name.startswith("scatter")


def _is_zero(atom: Any) -> bool:
    return isinstance(atom, Literal) and np.ndim(atom.val) == 0 and atom.val == 0


def _is_wrap(inputs: Sequence[TracedArray]) -> bool:
    """Return whether ``select_n(is_negative, x, y)`` adds the size of an array to negative x."""
    if len(inputs) != 3 or inputs[2].source is not inputs[1]:
        return False
    # JAX compares constants with zero outside of the jaxpr.
    return inputs[0].source is inputs[1] or None in inputs[1].index.sources


def _derive_columns(
    eqn: JaxprEqn, inputs: list[TracedArray], output: int
) -> tuple[ArrayIndex, ...]:
    """Return what is known of an output of a primitive that looks nothing up."""
    name, indices = eqn.primitive.name, [x.index for x in inputs]
    if name.startswith(_RANDOM_PRIMITIVES):
        return (LATENT,)
    if name in MOVING_PRIMITIVES:
        return inputs[0].columns
    if name == "sort":
        return inputs[output].columns
    if name == "concatenate":
        axis = eqn.params["dimension"]
        if axis > 0 and all(_get_aval(x).shape[axis:] == (1,) for x in eqn.invars):  # index vectors
            return tuple(indices)
    if getattr(_get_aval(eqn.outvars[output]), "dtype", None) == jnp.bool_:
        return (replace(combine_indices(indices, lambda *_: (0, 1)), chosen_entries=()),)
    index = combine_indices(indices, _ARITHMETIC.get(name, _unbounded))
    if name == "select_n":
        index = replace(index, chosen_entries=sum((x.data_entries for x in indices[1:]), ()))
    return (index,)


def _describe_lookup(eqn: JaxprEqn, inputs: list[TracedArray]) -> Lookup:
    name, aval = eqn.primitive.name, _get_aval(eqn.invars[0])
    shape, values = aval.shape, inputs[1].unwrapped
    is_handled = False  # whether the user chose what an index out of bounds does
    if name == "dynamic_slice":
        dims, sizes = range(len(shape)), eqn.params["slice_sizes"]
        columns = tuple(x.index for x in inputs[1:])
        values = None if values is None else jnp.stack([x.unwrapped for x in inputs[1:]])
    else:
        numbers, columns = eqn.params["dimension_numbers"], inputs[1].columns
        if name == "gather":
            dims, sizes = numbers.start_index_map, eqn.params["slice_sizes"]
            is_handled = _is_mode_given(eqn, aval.dtype)
        else:  # drops updates beyond the end
            dims, is_handled = numbers.scatter_dims_to_operand_dims, True
            sizes = [1 if d in numbers.inserted_window_dims else n for d, n in enumerate(shape)]
        columns = columns if len(columns) == len(dims) else (inputs[1].index,) * len(dims)
    before_wrap = tuple(x.before_wrap or x for x in columns)
    is_wrapped = [x.before_wrap is not None for x in columns]
    return Lookup(
        inputs[0],
        before_wrap,
        tuple(dims),
        tuple(shape[d] - sizes[d] for d in dims),
        tuple(sizes[d] == 1 and not _is_update(eqn) for d in dims),
        tuple(
            # A negative index among constants is the user's.
            x.is_data and bool(x.plates or x.sources - {None}) and (wraps or not is_handled)
            for x, wraps in zip(before_wrap, is_wrapped, strict=True)
        ),
        tuple(x.is_data and not is_handled for x in before_wrap),
        values,
    )


def _get_aval(atom: Any) -> Any:
    return atom.aval


def _has_same_ndim(a: Any, b: Any) -> bool:
    return len(a.aval.shape) == len(b.aval.shape)


def _is_mode_given(eqn: JaxprEqn, dtype: Any) -> bool:
    """Return whether the user chose what an index out of bounds reads: the nearest, or a value."""
    numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    if mode == lax.GatherScatterMode.CLIP:
        # `vmap` of a lookup at a scalar index clips as well, and keeps the dimension.
        return all(d in numbers.collapsed_slice_dims for d in numbers.start_index_map)
    fill_value = eqn.params["fill_value"]
    if mode != lax.GatherScatterMode.FILL_OR_DROP or fill_value is None:
        return False
    # JAX's own values are NaN, the smallest integer, and the largest without a sign.
    if jnp.issubdtype(dtype, jnp.inexact):
        return not np.isnan(fill_value)
    if dtype == jnp.bool_:
        return not fill_value
    limits = jnp.iinfo(dtype)
    return fill_value != (limits.min or limits.max)


def find_bounds(x: Any) -> Interval:
    """Return the smallest and the largest entry of integers, or of one column of numbers."""
    x = np.asarray(x)
    is_column = x.dtype.kind == "f" and x.ndim <= 1
    if not x.size or not (x.dtype.kind in "biu" or is_column):
        return UNBOUNDED
    bounds = float(x.min()), float(x.max())
    return UNBOUNDED if math.isnan(bounds[0]) else bounds


def iter_entries(x: Any) -> Iterator[np.ndarray]:
    """Yield the entries of an array in memory, in chunks."""
    entries = np.ravel(np.asarray(x))
    for start in range(0, entries.size, _MAX_CHUNK_ENTRIES):
        yield entries[start : start + _MAX_CHUNK_ENTRIES]
