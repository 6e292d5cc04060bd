"""What a model does with its row indices, read off its jaxpr.

JAX clamps an index that is out of range, so an array shorter than its plate would be read
wrongly without a word, and a longer one in part. The jaxpr shows which arrays the plate's own
indices reach, and how long these are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

__all__ = ["Lookup", "depends_on", "row_lookups"]

_INDEX_PRESERVING = {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "expand_dims",
    "reshape",
    "select_n",
    "squeeze",
}


class Lookup(NamedTuple):
    """
    - **plate** - name of the plate whose indices are used.
    - **length** - length of the dimension that they index.
    - **array** - name of the array, or None where it cannot be traced to an argument.
    """

    plate: str
    length: int
    array: str | None


def _sub_jaxprs(eqn: Any) -> list[Any]:
    """Jaxprs called by an equation whose inputs are the equation's own, one to one."""
    closed = [v for v in eqn.params.values() if hasattr(v, "jaxpr") and hasattr(v, "consts")]
    return [c for c in closed if len(c.jaxpr.invars) == len(eqn.invars)]


def row_lookups(jaxpr: Jaxpr, plates: Mapping[Any, str], arrays: Mapping[Any, str]) -> list[Lookup]:
    """The gathers in which a plate's indices, unchanged, are the rows looked up.

    Arithmetic on an index (``i // 10``, ``i - 1``) makes it the user's own, and is not followed.

    :param jaxpr: the model's jaxpr.
    :param plates: plate names by the variables that hold their indices.
    :param arrays: array names by the variables that hold them.
    :return: one entry a gather.
    """
    index_of, name_of, found = dict(plates), dict(arrays), []

    def known(table: Mapping[Any, str], atom: Any) -> str | None:
        return None if isinstance(atom, Literal) else table.get(atom)

    for eqn in jaxpr.eqns:
        primitive = eqn.primitive.name
        if primitive == "gather":
            plate = known(index_of, eqn.invars[1])
            dims = eqn.params["dimension_numbers"].start_index_map
            if plate is not None and len(dims) == 1:
                length = getattr(eqn.invars[0].aval, "shape", ())[dims[0]]
                found.append(Lookup(plate, length, known(name_of, eqn.invars[0])))
            continue
        for closed in _sub_jaxprs(eqn):
            inner = closed.jaxpr
            pairs = list(zip(inner.invars, eqn.invars, strict=True))
            inner_plates = {v: p for v, a in pairs if (p := known(index_of, a)) is not None}
            inner_arrays = {v: n for v, a in pairs if (n := known(name_of, a)) is not None}
            found += row_lookups(inner, inner_plates, inner_arrays)
            if primitive in ("jit", "pjit") and eqn.params.get("name") == "_where":
                inner_index = [p for a in eqn.invars if (p := known(index_of, a)) is not None]
                if inner_index:
                    index_of[eqn.outvars[0]] = inner_index[0]
        if primitive in _INDEX_PRESERVING:
            for atom in eqn.invars:
                if (plate := known(index_of, atom)) is not None:
                    index_of[eqn.outvars[0]] = plate
        if len(eqn.outvars) == 1:
            names = {n for a in eqn.invars if (n := known(name_of, a)) is not None}
            if len(names) == 1:
                name_of[eqn.outvars[0]] = names.pop()
    return found


def depends_on(closed: ClosedJaxpr, num_inputs: int) -> list[bool]:
    """For each output, whether it depends on any of the first ``num_inputs`` inputs."""
    tainted = set(closed.jaxpr.invars[:num_inputs])
    for eqn in closed.jaxpr.eqns:
        if any(not isinstance(a, Literal) and a in tainted for a in eqn.invars):
            tainted.update(eqn.outvars)
    return [not isinstance(v, Literal) and v in tainted for v in closed.jaxpr.outvars]
