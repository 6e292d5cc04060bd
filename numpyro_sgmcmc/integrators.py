r"""Integrators as data: a scheme is a sequence of flows, each run for a fraction of the step.

A dynamic gives named flows (drift, friction, kick, ...): exact or approximate solutions of one
part of its SDE. A :class:`Scheme` says in which order and for which fractions of the step size
they run; :func:`compose` makes the step. A new scheme is one line, and its order can be tested
without sampling, because a step is a pure function of state, step size, gradient function and
noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from jax import Array

__all__ = ["Flow", "GradientFn", "Scheme", "Step", "compose"]

GradientFn: TypeAlias = Callable[[Array], Array]
"""Gradient (or its unbiased estimate) of the potential at a position of shape ``(d,)``."""

Flow: TypeAlias = Callable[[Any, Any, GradientFn, Array], Any]
"""``(state, time, gradient, noise) -> state``."""

Step: TypeAlias = Callable[[Any, Any, GradientFn, Array], Any]
"""``(state, step_size, gradient, noise) -> state``."""


class Scheme(NamedTuple):
    """
    - **flows** - pairs of a flow's name and the fraction of the step for which it runs.
    - **order** - weak order: expectations are wrong by O(step_size ** order).
    - **gradients** - gradient evaluations a step.
    - **draws** - standard normal vectors a step.
    """

    flows: tuple[tuple[str, float], ...]
    order: int
    gradients: int = 1
    draws: int = 1


def compose(flows: Mapping[str, Flow], scheme: Scheme) -> Step:
    """The step that runs the scheme's flows one after the other.

    :param flows: the dynamic's flows by name.
    :param scheme: their order and fractions.
    :return: a pure function ``(state, step_size, gradient, noise) -> state``; ``noise`` has shape
        ``(scheme.draws, d)`` and standard normal entries.
    """
    sequence = [(flows[name], fraction) for name, fraction in scheme.flows]

    def step(state: Any, step_size: Any, gradient: GradientFn, noise: Array) -> Any:
        for flow, fraction in sequence:
            state = flow(state, fraction * step_size, gradient, noise)
        return state

    return step
