"""Find outputs of a traced function that may depend on the number of rows, not on the rows alone.

The function is traced on B and on B + 1 rows, and the two programs are compared equation by
equation. A number that differs (``1 / len(i)``), another sequence of operations, and an operation
along the axis of the rows (a sum, a sort, a scan) may change the value that belongs to a row.
Without any of these it is the same for every number of rows. The comparison computes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from numpyro_sgmcmc.jaxpr import CALL_PRIMITIVES, MOVING_PRIMITIVES, open_jaxpr

Ratio = float | None
"""Factor by which all entries of an array change with one more row; None for another change."""

_ROUNDING = 1e-6  # of a ratio of float32 numbers

# fmt: off
# Parameters of equations that hold sizes of arrays and nothing else.
_SIZE_PARAMETERS = {
    "limit_indices", "new_sizes", "padding_config", "result_avals", "shape", "sharding", "sizes",
    "slice_sizes",
}
# Primitives of one array, whose output changes by the factor of that array.
_LINEAR_PRIMITIVES = {*MOVING_PRIMITIVES, "neg"} - {"rev"}
# Primitives that move entries, or whose inner jaxprs are compared.
_ROWWISE_PRIMITIVES = _LINEAR_PRIMITIVES | {
    "concatenate", "cond", "dynamic_slice", "dynamic_update_slice", "gather", "iota",
    "optimization_barrier", "pad", "pure_callback", "random_bits", "random_split", "random_unwrap",
    "random_wrap", "scan", "split", "stack", "while",
}
# Primitives that combine the entries of the last two axes.
_MATRIX_PRIMITIVES = {"cholesky", "eig", "eigh", "lu", "qr", "svd", "triangular_solve"}
# fmt: on


def compare_row_counts(smaller: ClosedJaxpr, larger: ClosedJaxpr) -> list[Ratio]:
    """Return how each output of a function changes with one more row.

    :return: 1.0 for an output whose entries depend on their rows alone.
    """
    return _compare_jaxprs(smaller, larger, [1.0] * len(smaller.jaxpr.invars))


def _compare_jaxprs(
    smaller: ClosedJaxpr | Jaxpr, larger: ClosedJaxpr | Jaxpr, inputs: Sequence[Ratio]
) -> list[Ratio]:
    """Return the ratio of each output, given those of the inputs."""
    a, b = open_jaxpr(smaller), open_jaxpr(larger)
    differing: list[Ratio] = [None] * len(a.outvars)
    counts = [(len(j.invars), len(j.constvars), len(j.eqns), len(j.outvars)) for j in (a, b)]
    if counts[0] != counts[1]:
        return differing
    constants = map(_compare_values, getattr(smaller, "consts", ()), getattr(larger, "consts", ()))
    counterparts = dict(zip((*a.constvars, *a.invars), (*b.constvars, *b.invars), strict=True))
    ratios: dict[Var, Ratio] = dict(zip(a.constvars, constants, strict=False))
    ratios.update(zip(a.invars, inputs, strict=True))

    def read(x: Any, y: Any) -> Ratio:
        if isinstance(x, Literal) or isinstance(y, Literal):
            is_literal = isinstance(x, Literal) and isinstance(y, Literal)
            return _compare_values(x.val, y.val) if is_literal else None
        return ratios.get(x) if counterparts[x] is y else None

    for x, y in zip(a.eqns, b.eqns, strict=True):
        if x.primitive is not y.primitive or len(x.invars) != len(y.invars):
            return differing
        eqn_inputs = list(map(read, x.invars, y.invars))
        counterparts.update(zip(x.outvars, y.outvars, strict=True))
        ratios.update(zip(x.outvars, _compare_equations(x, y, eqn_inputs), strict=True))
    return list(map(read, a.outvars, b.outvars))


def _compare_equations(x: JaxprEqn, y: JaxprEqn, inputs: list[Ratio]) -> list[Ratio]:
    """Return the ratio of each output of an equation, given those of its inputs."""
    name, num = x.primitive.name, len(x.outvars)
    if (parameter := CALL_PRIMITIVES.get(name)) is not None:
        return _compare_jaxprs(x.params[parameter], y.params[parameter], inputs)
    known = [ratio for ratio in inputs if ratio is not None]
    if len(known) < len(inputs):
        return [None] * num
    has_equal_params = all(
        key in _SIZE_PARAMETERS or _is_equal_parameter(value, y.params.get(key))
        for key, value in x.params.items()
    )
    if not has_equal_params or _combines_rows(x, list(map(_larger_axes, x.invars, y.invars))):
        return [None] * num
    if all(ratio == 1.0 for ratio in known):
        return [1.0] * num
    if name == "mul":
        return [_round(known[0] * known[1])]
    if name == "div":
        return [_round(known[0] / known[1])]
    return [known[0] if name in _LINEAR_PRIMITIVES else None] * num


def _round(ratio: float) -> float:
    return 1.0 if abs(ratio - 1.0) < _ROUNDING else ratio


def _compare_values(x: Any, y: Any) -> Ratio:
    """Return the ratio of two constants, of arrays up to their common size."""
    if x is y:
        return 1.0
    a, b = np.asarray(x), np.asarray(y)
    if a.shape == b.shape and a.ctypes.data == b.ctypes.data:  # data that the model closes over
        return 1.0
    if a.ndim != b.ndim:
        return None
    common = tuple(slice(min(sizes)) for sizes in zip(a.shape, b.shape, strict=True))
    a, b = a[common], b[common]
    if bool(((a == b) | ((a != a) & (b != b))).all()):  # NaN is equal to NaN
        return 1.0
    is_factor = a.ndim == 0 and a != 0 and b != 0 and np.isrealobj(a)
    return float(b) / float(a) if is_factor else None


def _is_equal_parameter(x: Any, y: Any) -> bool:
    """Return whether a parameter of an equation is the same; functions are not compared."""
    if isinstance(x, (Jaxpr, ClosedJaxpr)):
        ratios = _compare_jaxprs(x, y, [1.0] * len(open_jaxpr(x).invars))
        return all(ratio == 1.0 for ratio in ratios)
    if isinstance(x, tuple):
        return len(x) == len(y) and all(map(_is_equal_parameter, x, y))
    is_nan = isinstance(x, float) and x != x
    return x == y if isinstance(x, (bool, int, float, str)) and not is_nan else True


def _larger_axes(x: Any, y: Any) -> set[int]:
    """Return the axes along which the second array is larger."""
    sizes = zip(_shape(x), _shape(y), strict=False)
    return {axis for axis, (size, larger_size) in enumerate(sizes) if size != larger_size}


def _shape(atom: Any) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())


def _combines_rows(eqn: JaxprEqn, row_axes: list[set[int]]) -> bool:
    """Return whether an equation may combine several rows, given the inputs' axes of rows."""
    name, params = eqn.primitive.name, eqn.params
    if not any(row_axes) or name in _ROWWISE_PRIMITIVES:
        return False
    if "axes" in params:  # of reductions
        return bool(row_axes[0] & set(params["axes"]))
    if name.startswith("cum") or name == "sort":
        return params["axis" if "axis" in params else "dimension"] in set().union(*row_axes)
    if name == "dot_general":
        contracted, _ = params["dimension_numbers"]
        return any(axes & set(dims) for axes, dims in zip(row_axes, contracted, strict=True))
    if name in _MATRIX_PRIMITIVES:
        ndim = len(_shape(eqn.invars[0]))
        matrix_axes = {ndim - 2, ndim - 1}
        if name != "triangular_solve":
            return bool(row_axes[0] & matrix_axes)
        return bool(row_axes[0] & matrix_axes or ndim - 1 - params["left_side"] in row_axes[1])
    if name.startswith("scatter"):
        dims = params["dimension_numbers"]
        update_axes = range(len(_shape(eqn.invars[2])))
        scatter_axes = [k for k in update_axes if k not in dims.update_window_dims]
        combined = {
            axis
            for k, axis in enumerate(scatter_axes)
            if k not in dims.scatter_indices_batching_dims
        }
        return bool(row_axes[2] & combined)
    if name == "conv_general_dilated":
        batch_axis = params["dimension_numbers"].lhs_spec[0]
        return bool(row_axes[0] - {batch_axis} or row_axes[1])
    # Other primitives are functions of single entries where the shapes of inputs are broadcast.
    return not all(_is_broadcast(_shape(v), _shape(out)) for v in eqn.invars for out in eqn.outvars)


def _is_broadcast(shape: tuple[int, ...], output_shape: tuple[int, ...]) -> bool:
    if not shape:
        return True
    is_same_ndim = len(shape) == len(output_shape)
    return is_same_ndim and all(n in (1, m) for n, m in zip(shape, output_shape, strict=True))
