"""Propagate properties of the inputs of a jaxpr to its outputs, and count its operations.

The analyses of a traced function follow what its inputs reach: whether a matrix function is
elementwise, which plates a site depends on, which arrays a plate's indices look up, and whether
indices from the data exist. They share :func:`propagate`, and with it the set of primitives that
only call another jaxpr.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

# fmt: off
# Primitives that evaluate one jaxpr on their own inputs, and the parameter that holds it.
CALL_PRIMITIVES = {
    "checkpoint": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr", "jit": "jaxpr", "pjit": "jaxpr", "remat2": "jaxpr",
}
# Primitives whose output has the entries of their input, in another order, shape or type.
MOVING_PRIMITIVES = {
    "broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "reshape", "rev", "slice",
    "squeeze", "transpose",
}
# fmt: on

T = TypeVar("T")

# Primitives that only arrange values, which XLA merges with others.
_FREE_PRIMITIVES = {
    *("broadcast_in_dim", "reshape", "convert_element_type", "squeeze", "stop_gradient", "copy")
}
# Time of a value on a CPU, relative to an addition of numbers; rough. A scatter adds one after
# another.
_VALUE_COSTS = {"pow": 80, "scatter": 20} | dict.fromkeys(
    (
        *("exp", "exp2", "log", "log1p", "expm1", "logistic", "tanh", "sqrt", "rsqrt", "sin"),
        *("cos", "erf", "erfc", "erf_inv", "lgamma", "digamma"),
    ),
    5,
)


def propagate(
    jaxpr: Jaxpr | ClosedJaxpr,
    inputs: Sequence[T],
    transfer: Callable[[JaxprEqn, list[T]], Sequence[T]],
    constant: Callable[[Any], T],
) -> list[T]:
    """Return a property of each output of a jaxpr, given that of each input.

    :param transfer: ``(equation, properties of its inputs) -> properties of its outputs``; calls of
        other jaxprs are followed and need no rule.
    :param constant: the property of a literal or a constant, given its atom.
    """
    jaxpr = open_jaxpr(jaxpr)
    properties = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> T:
        if isinstance(atom, Literal) or atom not in properties:
            return constant(atom)
        return properties[atom]

    for eqn in jaxpr.eqns:
        eqn_inputs = [read(atom) for atom in eqn.invars]
        if (parameter := CALL_PRIMITIVES.get(eqn.primitive.name)) is None:
            outputs = transfer(eqn, eqn_inputs)
        else:
            outputs = propagate(eqn.params[parameter], eqn_inputs, transfer, constant)
        properties.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def open_jaxpr(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    """Return a jaxpr without its constants."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def propagate_labels(jaxpr: ClosedJaxpr, input_labels: Sequence[frozenset]) -> list[frozenset]:
    """Return for each output the union of the labels of the inputs that it depends on.

    :param input_labels: labels of the first inputs; the others have none.
    """
    nothing: frozenset = frozenset()
    num_others = len(jaxpr.jaxpr.invars) - len(input_labels)
    return propagate(
        jaxpr,
        [*input_labels, *[nothing] * num_others],
        lambda eqn, labels: [nothing.union(*labels)] * len(eqn.outvars),
        lambda atom: nothing,
    )


def find_dependent_outputs(jaxpr: ClosedJaxpr, num_inputs: int) -> list[bool]:
    """Return for each output whether it depends on any of the first ``num_inputs`` inputs."""
    return [bool(found) for found in propagate_labels(jaxpr, [frozenset({True})] * num_inputs)]


class Work(NamedTuple):
    """Work of a traced function: its operations, and the numbers that they compute.

    Numbers of expensive operations count several times.
    """

    num_operations: int
    num_values: int


def count_work(jaxpr: Jaxpr) -> Work:
    """Count the work of a jaxpr, with all iterations of its scans and one of its other loops."""
    num_operations = num_values = 0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        is_scatter = name.startswith("scatter")  # its jaxpr adds two numbers
        if not is_scatter and (inner := list(_iter_inner_jaxprs(eqn))):
            length = eqn.params.get("length", 1) if name == "scan" else 1
            for work in map(count_work, inner):
                num_operations += length * work.num_operations
                num_values += length * work.num_values
        elif name not in _FREE_PRIMITIVES:
            # Reductions read more values than they return, and scatters as many as they add.
            is_reduction = name.startswith(("reduce", "cum"))
            atoms = eqn.invars if is_reduction else eqn.outvars
            atoms = eqn.invars[2:] if is_scatter else atoms
            size = sum(math.prod(getattr(x.aval, "shape", ())) for x in atoms)
            if name == "dot_general":
                shape: Any = getattr(eqn.invars[0].aval, "shape", ())
                size *= math.prod(shape[k] for k in eqn.params["dimension_numbers"][0][0])
            num_operations += 1
            num_values += size * _VALUE_COSTS.get("scatter" if is_scatter else name, 1)
    return Work(num_operations, num_values)


def _iter_inner_jaxprs(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    for parameter in eqn.params.values():
        for x in parameter if isinstance(parameter, (tuple, list)) else (parameter,):
            if isinstance(x, (Jaxpr, ClosedJaxpr)):
                yield open_jaxpr(x)
