"""What a model does with its row indices, read off its jaxpr.

JAX clamps an index that is out of range, so an array shorter than its plate would be read
wrongly without a word, and a longer one in part. The jaxpr shows which arrays the plate's own
indices reach, and how long these are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

__all__ = ["RowGather", "find_dependent_outputs", "find_row_gathers", "propagate_labels"]

_INDEX_PRESERVING_PRIMITIVES = {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "expand_dims",
    "reshape",
    "rev",
    "select_n",
    "sort",
    "squeeze",
    "transpose",
}
# Their one jaxpr takes the equation's inputs and gives its outputs.
_CALL_PRIMITIVES = {"closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit"}


class RowGather(NamedTuple):
    """A lookup by the rows of a plate.

    - **plate** - name of the plate whose indices are used.
    - **num_rows** - length of the dimension that they index.
    - **array_name** - name of the array, or None where it cannot be traced to an argument.
    """

    plate: str
    num_rows: int
    array_name: str | None


def _sub_jaxprs(eqn: Any) -> list[Any]:
    """Jaxprs called by an equation whose inputs are the equation's own, one to one."""
    closed = [v for v in eqn.params.values() if hasattr(v, "jaxpr") and hasattr(v, "consts")]
    return [c for c in closed if len(c.jaxpr.invars) == len(eqn.invars)]


def find_row_gathers(
    jaxpr: Jaxpr, plate_names: Mapping[Any, str], array_names: Mapping[Any, str]
) -> list[RowGather]:
    """The gathers in which a plate's indices, unchanged, are the rows looked up.

    Arithmetic on an index (``i // 10``, ``i - 1``) makes it the user's own, and is not followed.

    :param jaxpr: the model's jaxpr.
    :param plate_names: plate names by the variables that hold their indices.
    :param array_names: array names by the variables that hold them.
    :return: one entry a gather.
    """
    return _follow_indices(jaxpr, {v: (p,) for v, p in plate_names.items()}, array_names)[0]


def _follow_indices(
    jaxpr: Jaxpr,
    index_columns: Mapping[Any, tuple[str | None, ...]],
    array_names: Mapping[Any, str],
) -> tuple[list[RowGather], list[tuple[str | None, ...] | None]]:
    """The gathers, and the columns of the outputs.

    :param index_columns: for index arrays, the plate whose indices each column holds, if any.
    """
    columns_of, name_of, found = dict(index_columns), dict(array_names), []

    def known(table: Mapping[Any, Any], atom: Any) -> Any:
        return None if isinstance(atom, Literal) else table.get(atom)

    for eqn in jaxpr.eqns:
        primitive = eqn.primitive.name
        indices = [c for a in eqn.invars if (c := known(columns_of, a)) is not None]
        if primitive == "gather":
            dims = eqn.params["dimension_numbers"].start_index_map
            looked_up = known(columns_of, eqn.invars[1]) or ()
            shape = getattr(eqn.invars[0].aval, "shape", ())
            if len(looked_up) == len(dims):
                for plate, dim in zip(looked_up, dims, strict=True):
                    if plate is not None:
                        found.append(RowGather(plate, shape[dim], known(name_of, eqn.invars[0])))
            continue
        if primitive == "dynamic_slice":  # of a scalar index, as in a loop over rows
            shape = getattr(eqn.invars[0].aval, "shape", ())
            sizes = zip(shape, eqn.params["slice_sizes"], strict=True)
            for (length, size), atom in zip(sizes, eqn.invars[1:], strict=False):
                on = (p for p in known(columns_of, atom) or () if p is not None and size == 1)
                found += [RowGather(p, length, known(name_of, eqn.invars[0])) for p in on]
            continue
        for closed in _sub_jaxprs(eqn):
            inner = closed.jaxpr
            pairs = list(zip(inner.invars, eqn.invars, strict=True))
            inner_columns = {v: c for v, a in pairs if (c := known(columns_of, a)) is not None}
            inner_arrays = {v: n for v, a in pairs if (n := known(name_of, a)) is not None}
            more, outputs = _follow_indices(inner, inner_columns, inner_arrays)
            found += more
            if primitive in _CALL_PRIMITIVES:
                known_outputs = zip(eqn.outvars, outputs, strict=True)
                columns_of.update({v: c for v, c in known_outputs if c is not None})
        if primitive in _INDEX_PRESERVING_PRIMITIVES and indices:
            columns_of[eqn.outvars[0]] = indices[-1]
        if primitive == "concatenate" and indices and eqn.params["dimension"] > 0:
            # X[i, 0] looks up pairs of indices: a column of the plate's beside one of zeros.
            parts = [known(columns_of, a) or (None,) for a in eqn.invars]
            columns_of[eqn.outvars[0]] = tuple(c for part in parts for c in part)
        if len(eqn.outvars) == 1:
            names = {n for a in eqn.invars if (n := known(name_of, a)) is not None}
            if len(names) == 1:
                name_of[eqn.outvars[0]] = names.pop()
    return found, [known(columns_of, v) for v in jaxpr.outvars]


def propagate_labels(jaxpr: Jaxpr, input_labels: Sequence[frozenset]) -> list[frozenset]:
    """For each output, the union of what is given for the inputs that it depends on."""
    known = dict(zip(jaxpr.invars, input_labels, strict=True))
    nothing: frozenset = frozenset()

    def of(atom: Any) -> frozenset:
        return nothing if isinstance(atom, Literal) else known.get(atom, nothing)

    for eqn in jaxpr.eqns:
        inputs = [of(a) for a in eqn.invars]
        inner = _sub_jaxprs(eqn) if eqn.primitive.name in _CALL_PRIMITIVES else []
        if len(inner) == 1 and len(inner[0].jaxpr.outvars) == len(eqn.outvars):
            outputs = propagate_labels(inner[0].jaxpr, inputs)
        else:
            outputs = [nothing.union(*inputs)] * len(eqn.outvars)
        known.update(zip(eqn.outvars, outputs, strict=True))
    return [of(v) for v in jaxpr.outvars]


def find_dependent_outputs(closed_jaxpr: ClosedJaxpr, num_inputs: int) -> list[bool]:
    """For each output, whether it depends on any of the first ``num_inputs`` inputs."""
    others = len(closed_jaxpr.jaxpr.invars) - num_inputs
    given = [frozenset({True})] * num_inputs + [frozenset()] * others
    return [bool(found) for found in propagate_labels(closed_jaxpr.jaxpr, given)]
