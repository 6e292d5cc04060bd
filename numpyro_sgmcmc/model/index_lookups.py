"""Follow indices through a jaxpr, from the data to the arrays that they index.

:class:`LookupWalk` finds every :class:`Lookup` at indices that come from data, with bounds of the
indices. Given values for the inputs of the jaxpr, it evaluates the jaxpr as well, and can replace
what a lookup reads at indices out of bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from numpyro_sgmcmc.jaxpr import propagate

_ENTRY_PRESERVING_PRIMITIVES = {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "expand_dims",
    "reshape",
    "rev",
    "slice",
    "squeeze",
    "transpose",
}
_RANDOM_PRIMITIVES = "random_", "rng_", "threefry"  # beginnings of names

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
    """Bounds and origin of the entries of an array, or of one component of index vectors.

    - **compute_bounds** - returns the smallest and the largest entry, or numbers beyond them.
    - **sources** - names of the arrays of data that they depend on; None for a constant array.
    - **plates** - plates whose indices they depend on.
    - **holder** - the array of data that has these entries; None where they are computed.
    - **is_latent** - whether they depend on latent sites or random numbers.
    - **before_wrap** - the index before JAX added the array's size where it is negative.
    - **data_cases** - for a choice between data and numbers in the model's code, the data.
    """

    compute_bounds: Callable[[], Interval] = _unbounded
    sources: frozenset[str | None] = frozenset()
    plates: frozenset[str] = frozenset()
    holder: str | None = None
    is_latent: bool = False
    before_wrap: ArrayIndex | None = None
    data_cases: tuple[ArrayIndex, ...] = ()

    @cached_property
    def bounds(self) -> Interval:
        return self.compute_bounds()

    @property
    def is_data(self) -> bool:
        """True if the entries come from data alone."""
        return bool(self.sources) and not self.is_latent


def combine_indices(
    indices: Sequence[ArrayIndex], compute: Callable[..., Interval] = _unbounded
) -> ArrayIndex:
    """Return the index computed from others, by a function of their bounds."""
    return ArrayIndex(
        lambda: compute(*(x.bounds for x in indices)),
        frozenset[str | None]().union(*(x.sources for x in indices)),
        frozenset[str]().union(*(x.plates for x in indices)),
        is_latent=any(x.is_latent for x in indices),
    )


LATENT = ArrayIndex(is_latent=True)


@dataclass(frozen=True, eq=False)
class TracedArray:
    """An array of the jaxpr.

    - **columns** - one index, or one for each component of index vectors.
    - **value** - its value; None where only bounds are followed.
    - **value_before_wrap** - for indices to which JAX has added a size, the value before.
    - **negative_of**, **shifted** - x, where this is ``x < 0`` or x plus a constant.
    """

    columns: tuple[ArrayIndex, ...]
    value: Any = None
    value_before_wrap: Any = None
    negative_of: TracedArray | None = None
    shifted: TracedArray | None = None

    @cached_property
    def index(self) -> ArrayIndex:
        """All components as one."""
        return (
            self.columns[0]
            if len(self.columns) == 1
            else combine_indices(self.columns, union_bounds)
        )

    @property
    def unwrapped(self) -> Any:
        return self.value if self.value_before_wrap is None else self.value_before_wrap


class Lookup(NamedTuple):
    """A read or update of the entries of an array at indices that come from data.

    - **columns** - the index along each dimension, before JAX adds sizes to negative ones.
    - **last** - the last entry along each dimension.
    - **is_negative_wrong**, **is_beyond_wrong** - along each dimension, whether an index below 0,
      or beyond the last entry, reads another entry than it says.
    - **values** - the indices, shape ``(..., dimensions)``; None where only bounds are followed.
    """

    columns: tuple[ArrayIndex, ...]
    last: tuple[int, ...]
    is_negative_wrong: tuple[bool, ...]
    is_beyond_wrong: tuple[bool, ...]
    values: Any

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
        # Negative numbers in the model's code, and computed indices that are all negative, count
        # from the end, as in NumPy.
        lowest = min((x.bounds[0] for x in index.data_cases), default=low)
        counts_back = index.holder is None and high < 0 and low >= -1 - last
        is_negative = self.is_negative_wrong[k] and lowest < 0 and not counts_back
        return is_negative or (self.is_beyond_wrong[k] and high > last)


class LookupWalk:
    """Walk over a jaxpr that follows indices, with values where its inputs have values.

    - **lookups** - lookups at indices from data, in order.

    :param replaced: number of a lookup; what it reads out of bounds is replaced.
    :param replacement: 0 or 1, a number of any type.
    """

    def __init__(self, replaced: int | None = None, replacement: Any = None) -> None:
        self.replaced, self.replacement = replaced, replacement
        self.lookups: list[Lookup] = []
        self._constants: dict[Any, Any] = {}
        self._has_values = False

    def run(self, closed_jaxpr: ClosedJaxpr, inputs: Sequence[TracedArray]) -> list[TracedArray]:
        """Return the outputs of the jaxpr."""
        self._constants = dict(_iter_constants(closed_jaxpr))
        self._has_values = all(x.value is not None for x in inputs)
        return propagate(closed_jaxpr.jaxpr, inputs, self._transfer, self._read_constant)

    @cached_property
    def _read_constant(self) -> Callable[[Any], TracedArray]:
        @cache  # a constant that is used twice is one object
        def read_variable(variable: Any) -> TracedArray:
            if variable not in self._constants:
                return TracedArray((LATENT,))
            value = self._constants[variable]
            sources = frozenset[str | None]({None} if np.ndim(value) else ())
            return TracedArray((ArrayIndex(partial(find_bounds, value), sources),), value)

        def read(atom: Any) -> TracedArray:
            if not isinstance(atom, Literal):
                return read_variable(atom)
            return TracedArray((ArrayIndex(partial(find_bounds, atom.val)),), atom.val)

        return read

    def _transfer(self, eqn: JaxprEqn, inputs: list[TracedArray]) -> list[TracedArray]:
        name = eqn.primitive.name
        if name in ("gather", "dynamic_slice") or name.startswith("scatter"):
            return [self._look_up(eqn, inputs)]
        if name == "scan":
            return self._scan(eqn, inputs)
        values = self._evaluate(eqn, [x.value for x in inputs])
        if name == "select_n" and _is_wrap(inputs):
            index = combine_indices([x.index for x in inputs[1:]], union_bounds)
            index = replace(index, before_wrap=inputs[1].index)
            return [TracedArray((index,), values[0], inputs[1].value)]
        before_wrap: list[Any] = [None] * len(values)
        is_preserving = name in _ENTRY_PRESERVING_PRIMITIVES or name == "concatenate"
        if is_preserving and any(x.value_before_wrap is not None for x in inputs):
            before_wrap = self._evaluate(eqn, [x.unwrapped for x in inputs])
        negative_of = inputs[0] if name == "lt" and _is_zero(eqn.invars[1]) else None
        shifted = inputs[0] if name == "add" else None
        return [
            TracedArray(_derive_columns(eqn, inputs, k), value, old, negative_of, shifted)
            for k, (value, old) in enumerate(zip(values, before_wrap, strict=True))
        ]

    def _evaluate(self, eqn: JaxprEqn, values: list[Any]) -> list[Any]:
        """Return the outputs of an equation, None where only bounds are followed."""
        if not self._has_values:
            return [None] * len(eqn.outvars)
        output = eqn.primitive.bind(*values, **eqn.params)
        return list(output) if eqn.primitive.multiple_results else [output]

    def _look_up(self, eqn: JaxprEqn, inputs: list[TracedArray]) -> TracedArray:
        values, lookup = [x.value for x in inputs], _describe_lookup(eqn, inputs)
        index = combine_indices([x.index for x in inputs], lambda entries, *_: entries)
        index = replace(index, holder=inputs[0].index.holder)
        is_replaced = False
        if any(x.is_data for x in lookup.columns):
            is_replaced = len(self.lookups) == self.replaced
            self.lookups.append(lookup)
        if is_replaced and eqn.primitive.name.startswith("scatter"):
            window_dims = eqn.params["dimension_numbers"].update_window_dims
            values[2] = self._replace_entries(values[2], lookup, window_dims)
        (value,) = self._evaluate(eqn, values)
        if is_replaced and not eqn.primitive.name.startswith("scatter"):
            numbers = eqn.params.get("dimension_numbers")
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
        jaxpr, num_lookups = eqn.params["jaxpr"], len(self.lookups)
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)  # JAX 0.12 has no closed one here
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
            outputs[:] = propagate(jaxpr, traced, self._transfer, self._read_constant)
            results = [x.value for x in outputs]
            lookup_values = [x.values for x in self.lookups[num_lookups:]]
            return results[:num_carry], (results[num_carry:], lookup_values)

        init, options = values[num_consts : num_consts + num_carry], ("length", "reverse", "unroll")
        if self._has_values:
            carry, (ys, lookup_values) = lax.scan(
                step, init, xs, **{k: eqn.params[k] for k in options}
            )
        else:
            carry, (ys, lookup_values) = step(init, xs)
        for k, x in enumerate(lookup_values, num_lookups):
            self.lookups[k] = self.lookups[k]._replace(values=x)
        indices = [LATENT] * num_carry + [x.index for x in outputs[num_carry:]]
        return [TracedArray((index,), x) for index, x in zip(indices, [*carry, *ys], strict=True)]


def _iter_constants(closed_jaxpr: ClosedJaxpr) -> Iterator[tuple[Any, Any]]:
    """Yield the constants of a jaxpr and of those inside it, with their values."""
    yield from zip(closed_jaxpr.jaxpr.constvars, closed_jaxpr.consts, strict=True)
    for eqn in closed_jaxpr.jaxpr.eqns:
        for parameter in eqn.params.values():
            if isinstance(parameter, ClosedJaxpr):
                yield from _iter_constants(parameter)


def _is_zero(atom: Any) -> bool:
    return isinstance(atom, Literal) and np.ndim(atom.val) == 0 and atom.val == 0


def _is_wrap(inputs: Sequence[TracedArray]) -> bool:
    """Return whether ``select_n(is_negative, x, y)`` adds the size of an array to negative x."""
    if len(inputs) != 3 or inputs[2].shifted is not inputs[1]:
        return False
    # JAX compares constants with zero outside of the jaxpr.
    return inputs[0].negative_of is inputs[1] or None in inputs[1].index.sources


def _derive_columns(
    eqn: JaxprEqn, inputs: list[TracedArray], output: int
) -> tuple[ArrayIndex, ...]:
    """Return what is known of an output of a primitive that looks nothing up."""
    name, indices = eqn.primitive.name, [x.index for x in inputs]
    if name.startswith(_RANDOM_PRIMITIVES):
        return (LATENT,)
    if name in _ENTRY_PRESERVING_PRIMITIVES:
        return inputs[0].columns
    if name == "concatenate":
        axis = eqn.params["dimension"]
        if axis > 0 and all(_get_aval(x).shape[axis:] == (1,) for x in eqn.invars):  # index vectors
            return tuple(indices)
    if getattr(_get_aval(eqn.outvars[output]), "dtype", None) == jnp.bool_:
        return (combine_indices(indices, lambda *_: (0, 1)),)
    index = combine_indices(indices, _ARITHMETIC.get(name, _unbounded))
    if name == "select_n" and any(x.sources for x in indices[1:]):
        # A negative number in the model's code counts from the end, as in NumPy.
        index = replace(index, data_cases=tuple(x for x in indices[1:] if x.sources))
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
        before_wrap,
        tuple(shape[d] - sizes[d] for d in dims),
        tuple(
            # A negative index among constants is the user's.
            x.is_data and bool(x.plates or x.sources - {None}) and (wraps or not is_handled)
            for x, wraps in zip(before_wrap, is_wrapped, strict=True)
        ),
        tuple(x.is_data and not is_handled for x in before_wrap),
        values,
    )


def _has_same_ndim(a: Any, b: Any) -> bool:
    return len(a.aval.shape) == len(b.aval.shape)


def _get_aval(atom: Any) -> Any:
    return atom.aval


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
