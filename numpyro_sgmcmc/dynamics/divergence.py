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

_CONSTANT_SOURCE, _MIXED_SOURCE = (
    -1,
    -2,
)  # in place of the one entry of the argument that a number comes from

# fmt: off
_ELEMENTWISE_PRIMITIVES = {
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "cbrt", "ceil", "clamp", "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma",
    "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt",
    "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min",
    "mul", "ne", "neg", "not", "or", "pow", "rem", "round", "rsqrt", "select_n", "sign", "sin",
    "sinh", "sqrt", "square", "sub", "tan", "tanh", "xor",
}
# They compute nothing, so that they may be applied to where entries come from.
_RESHAPING_PRIMITIVES = {
    "broadcast_in_dim", "concatenate", "expand_dims", "reshape", "rev", "slice", "split", "squeeze",
    "transpose",
}
# fmt: on
_CALL_PRIMITIVE_JAXPRS = {
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "jit": "jaxpr",
    "pjit": "jaxpr",
}


def divergence(matrix_fn: Callable[[Array], Array], q: Array) -> Array:
    r""":math:`\sum_j \partial_j M_{ji}` of a scalar, diagonal or dense matrix function.

    O(d) for a scalar, and for a diagonal of which each entry depends on its own coordinate alone.
    """
    kind = jax.eval_shape(matrix_fn, q).ndim
    if kind == 0:
        return jax.grad(matrix_fn)(q)
    if kind == 1 and is_elementwise(matrix_fn, q):
        return jax.jvp(matrix_fn, (q,), (jnp.ones_like(q),))[1]
    slope = jax.jacfwd(matrix_fn)(q)
    return jnp.diagonal(slope) if kind == 1 else jnp.einsum("jij->i", slope)


def is_elementwise(fn: Callable[[Array], Array], x: Array) -> bool:
    """Whether entry i of ``fn(x)`` depends on entry i of ``x`` alone, for every ``x``.

    :param fn: maps shape ``(d,)`` to ``(d,)``.
    :param x: any argument, of which only shape and type count.
    :return: False also where that cannot be seen.
    """
    closed = jax.make_jaxpr(fn)(jax.ShapeDtypeStruct(x.shape, x.dtype))
    (found,) = _propagate_sources(closed.jaxpr, [np.arange(x.size)])
    is_own = (found == _CONSTANT_SOURCE) | (found == np.arange(x.size))
    return bool(is_own.all())


def _propagate_sources(jaxpr: Jaxpr, input_sources: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Which entry of the argument each entry of the outputs comes from, given the inputs' ones."""
    known = dict(zip(jaxpr.invars, input_sources, strict=True))

    def of(atom: Any) -> np.ndarray:
        if isinstance(atom, Literal) or atom not in known:
            return np.full(atom.aval.shape, _CONSTANT_SOURCE)
        return known[atom]

    for eqn in jaxpr.eqns:
        inputs = [of(a) for a in eqn.invars]
        known.update(zip(eqn.outvars, _equation_sources(eqn, inputs), strict=True))
    return [of(v) for v in jaxpr.outvars]


def _equation_sources(eqn: Any, input_sources: list[np.ndarray]) -> list[np.ndarray]:
    """The same for one equation."""
    name = eqn.primitive.name
    if name in _CALL_PRIMITIVE_JAXPRS:
        inner = eqn.params[_CALL_PRIMITIVE_JAXPRS[name]]
        return _propagate_sources(inner.jaxpr, input_sources)
    if name in _RESHAPING_PRIMITIVES:
        with jax.ensure_compile_time_eval():
            moved = eqn.primitive.bind(*(i.astype(np.int32) for i in input_sources), **eqn.params)
        return [np.asarray(m) for m in (moved if eqn.primitive.multiple_results else [moved])]
    shapes = [v.aval.shape for v in eqn.outvars]
    if name in _ELEMENTWISE_PRIMITIVES and len(shapes) == 1:
        return [_merge_sources([np.broadcast_to(i, shapes[0]) for i in input_sources])]
    is_free = all((i == _CONSTANT_SOURCE).all() for i in input_sources)
    return [np.full(shape, _CONSTANT_SOURCE if is_free else _MIXED_SOURCE) for shape in shapes]


def _merge_sources(input_sources: list[np.ndarray]) -> np.ndarray:
    """Where entries come from that are computed of several, each of these at the same place."""
    found = input_sources[0]
    for other in input_sources[1:]:
        both = np.where(found == other, found, _MIXED_SOURCE)
        found = np.where(
            other == _CONSTANT_SOURCE, found, np.where(found == _CONSTANT_SOURCE, other, both)
        )
    return found
