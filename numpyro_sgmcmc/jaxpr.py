"""Propagate properties of the inputs of a jaxpr to its outputs.

The analyses of a traced function follow what its inputs reach: whether a matrix function is
elementwise, which plates a site depends on, which arrays a plate's indices look up, and whether
indices from the data exist. They share :func:`propagate`, and with it the set of primitives that
only call another jaxpr.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

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
