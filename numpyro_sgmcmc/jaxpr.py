"""Propagate properties of the inputs of a jaxpr to its outputs.

Four analyses of a traced function follow what its inputs reach: whether a matrix function is
elementwise, which plates a site depends on, which arrays a plate's indices look up, and whether
indices from the data exist. They share :func:`propagate`, and with it the set of primitives that
only call another jaxpr.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

# Primitives that evaluate one jaxpr on their own inputs, and the parameter that holds it.
CALL_PRIMITIVES = {
    "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "remat2": "jaxpr",
}

T = TypeVar("T")


def propagate(
    jaxpr: Jaxpr,
    inputs: Sequence[T],
    transfer: Callable[[JaxprEqn, list[T]], Sequence[T]],
    constant: Callable[[Any], T],
) -> list[T]:
    """Return a property of each output of a jaxpr, given that of each input.

    :param inputs: the property of each input.
    :param transfer: ``(equation, properties of its inputs) -> properties of its outputs``; calls of
        other jaxprs are followed and need no rule.
    :param constant: the property of a literal or a constant, given its atom.
    """
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
            outputs = propagate(open_jaxpr(eqn.params[parameter]), eqn_inputs, transfer, constant)
        properties.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def sub_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """Return the jaxprs of an equation, as of a loop, whose inputs are its own, one to one."""
    jaxprs = [open_jaxpr(p) for p in eqn.params.values() if isinstance(p, (Jaxpr, ClosedJaxpr))]
    return [jaxpr for jaxpr in jaxprs if len(jaxpr.invars) == len(eqn.invars)]


def open_jaxpr(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    """Return a jaxpr without its constants."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def propagate_labels(jaxpr: Jaxpr, input_labels: Sequence[frozenset]) -> list[frozenset]:
    """Return for each output the union of the labels of the inputs that it depends on."""
    nothing: frozenset = frozenset()
    return propagate(
        jaxpr,
        input_labels,
        lambda eqn, labels: [nothing.union(*labels)] * len(eqn.outvars),
        lambda atom: nothing,
    )


def find_dependent_outputs(closed_jaxpr: ClosedJaxpr, num_inputs: int) -> list[bool]:
    """Return for each output whether it depends on any of the first ``num_inputs`` inputs."""
    num_others = len(closed_jaxpr.jaxpr.invars) - num_inputs
    labels = [frozenset({True})] * num_inputs + [frozenset()] * num_others
    return [bool(found) for found in propagate_labels(closed_jaxpr.jaxpr, labels)]
