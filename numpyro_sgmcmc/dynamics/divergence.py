"""The divergence of a matrix function, which keeps SDEs with a varying D, Q or metric unbiased.

For a diagonal whose entries each depend on their own coordinate alone, the Jacobian is diagonal and
one directional derivative along ones is all of it: O(d) in place of the O(d^2) of ``jax.jacfwd``.
That is read off the jaxpr, which holds wherever the function is evaluated; a look at numbers would
hold where one has looked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Jaxpr, Literal

__all__ = ["divergence", "is_elementwise"]

_OF_NONE, _OF_MANY = -1, -2  # in place of the one entry of the argument that a number comes from

# fmt: off
_ENTRY_BY_ENTRY = {
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "cbrt", "ceil", "clamp", "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma",
    "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt",
    "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min",
    "mul", "ne", "neg", "not", "or", "pow", "rem", "round", "rsqrt", "select_n", "sign", "sin",
    "sinh", "sqrt", "square", "sub", "tan", "tanh", "xor",
}
# They compute nothing, so that they may be applied to where entries come from.
_MOVES = {
    "broadcast_in_dim", "concatenate", "expand_dims", "reshape", "rev", "slice", "split", "squeeze",
    "transpose",
}
# fmt: on
_CALLS = {
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "jit": "jaxpr",
    "pjit": "jaxpr",
}


def divergence(matrix: Callable[[Array], Array], q: Array) -> Array:
    r""":math:`\sum_j \partial_j M_{ji}` of a scalar, diagonal or dense matrix function.

    O(d) for a scalar, and for a diagonal of which each entry depends on its own coordinate alone.
    """
    kind = jax.eval_shape(matrix, q).ndim
    if kind == 0:
        return jax.grad(matrix)(q)
    if kind == 1 and is_elementwise(matrix, q):
        return jax.jvp(matrix, (q,), (jnp.ones_like(q),))[1]
    slope = jax.jacfwd(matrix)(q)
    return jnp.diagonal(slope) if kind == 1 else jnp.einsum("jij->i", slope)


def is_elementwise(fn: Callable[[Array], Array], x: Array) -> bool:
    """Whether entry i of ``fn(x)`` depends on entry i of ``x`` alone, for every ``x``.

    :param fn: maps shape ``(d,)`` to ``(d,)``.
    :param x: any argument, of which only shape and type count.
    :return: False also where that cannot be seen.
    """
    closed = jax.make_jaxpr(fn)(jax.ShapeDtypeStruct(x.shape, x.dtype))
    (found,) = _sources(closed.jaxpr, [np.arange(x.size)])
    is_own = (found == _OF_NONE) | (found == np.arange(x.size))
    return bool(is_own.all())


def _sources(jaxpr: Jaxpr, given: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Which entry of the argument each entry of the outputs comes from, given the inputs' ones."""
    known = dict(zip(jaxpr.invars, given, strict=True))

    def of(atom: Any) -> np.ndarray:
        if isinstance(atom, Literal) or atom not in known:
            return np.full(atom.aval.shape, _OF_NONE)
        return known[atom]

    for eqn in jaxpr.eqns:
        inputs = [of(a) for a in eqn.invars]
        known.update(zip(eqn.outvars, _of_outputs(eqn, inputs), strict=True))
    return [of(v) for v in jaxpr.outvars]


def _of_outputs(eqn: Any, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """The same for one equation."""
    name = eqn.primitive.name
    if name in _CALLS:
        inner = eqn.params[_CALLS[name]]
        return _sources(inner.jaxpr, inputs)
    if name in _MOVES:
        with jax.ensure_compile_time_eval():
            moved = eqn.primitive.bind(*(i.astype(np.int32) for i in inputs), **eqn.params)
        return [np.asarray(m) for m in (moved if eqn.primitive.multiple_results else [moved])]
    shapes = [v.aval.shape for v in eqn.outvars]
    if name in _ENTRY_BY_ENTRY and len(shapes) == 1:
        return [_merged([np.broadcast_to(i, shapes[0]) for i in inputs])]
    is_free = all((i == _OF_NONE).all() for i in inputs)
    return [np.full(shape, _OF_NONE if is_free else _OF_MANY) for shape in shapes]


def _merged(inputs: list[np.ndarray]) -> np.ndarray:
    """Where entries come from that are computed of several, each of these at the same place."""
    found = inputs[0]
    for other in inputs[1:]:
        both = np.where(found == other, found, _OF_MANY)
        found = np.where(other == _OF_NONE, found, np.where(found == _OF_NONE, other, both))
    return found
