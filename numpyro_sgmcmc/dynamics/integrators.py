r"""Integrators as data: a scheme is a sequence of flows, each run for a fraction of the step.

A dynamic gives named flows (drift, friction, kick, ...): exact or approximate solutions of one
part of its SDE. A :class:`Scheme` says in which order and for which fractions of the step size
they run; :func:`compose` makes the step. A new scheme is one line, and its order can be tested
without sampling, because a step is a pure function of state, step size, gradient function and
noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import Array

__all__ = ["SYMMETRIC", "Flow", "GradientFn", "Part", "Scheme", "Step", "clipped", "compose"]

GradientFn: TypeAlias = Callable[[Array], Array]
"""Gradient (or its unbiased estimate) of the potential at a position of shape ``(d,)``."""


class Flow(NamedTuple):
    """One part of an SDE, followed for a time.

    - **run** - ``(state, time, gradient, noise) -> state``, the identity for time zero.
      ``gradient`` maps a position of shape ``(d,)`` to the minibatch's gradient of U there, and
      ``noise`` has shape ``(draws, d)`` and standard normal entries.
    - **gradients** - gradient evaluations. Default 0.
    - **draws** - standard normal vectors. Default 0.
    """

    run: Callable[[Any, Any, GradientFn, Array], Any]
    gradients: int = 0
    draws: int = 0


class Part(NamedTuple):
    """Where a flow stands in a scheme.

    - **flow** - a flow's name.
    - **fraction** - fraction of the step for which it runs. Default 1.
    - **every** - it runs at every so many steps only, and for the time of that many. Default 1.
    """

    flow: str
    fraction: float = 1.0
    every: int = 1


class Scheme(NamedTuple):
    """An integrator: flows one after the other.

    - **parts** - the flows, one after the other.
    - **order** - weak order: expectations are wrong by O(step_size ** order).
    - **step_size** - the largest that suits a whitened Gaussian and an exact gradient, at the
      default settings of the SDE: its sds are within 5 % up to a curvature of 3.5.
    - **reads_end** - whether the step's first gradient is taken at the position where the step
      ends; otherwise it is at, or about, the one where it starts. Default False.
    """

    parts: tuple[Part, ...]
    order: int
    step_size: float
    reads_end: bool = False


SYMMETRIC = (
    Part("drift", 0.5),
    Part("friction", 0.5),
    Part("noisy_kick"),
    Part("friction", 0.5),
    Part("drift", 0.5),
)
"""The symmetric splitting of Chen, Ding and Carin (2015), of order two where each flow is."""


@dataclass(frozen=True)
class Step:
    """One step of a scheme, a pure function.

    :param tuple parts: the flows with the parts of the scheme they play.
    :param int order: weak order.
    :param bool reads_end: whether its first gradient is one at the position where it ends.
    """

    parts: tuple[tuple[Flow, Part], ...]
    order: int
    reads_end: bool = False

    @property
    def gradients(self) -> int:
        """Gradient evaluations a step, all on one minibatch."""
        return sum(flow.gradients for flow, _ in self.parts)

    @property
    def draws(self) -> int:
        """Standard normal vectors a step."""
        return sum(flow.draws for flow, _ in self.parts)

    def __call__(
        self, state: Any, step_size: Any, gradient: GradientFn, noise: Array, count: Any = 0
    ) -> Any:
        """The state after one step.

        :param state: a state of the dynamic.
        :param step_size: step size.
        :param gradient: the gradient's estimate on one minibatch.
        :param noise: standard normal entries, shape ``(draws, d)``; each flow gets rows of its own.
        :param count: steps before this one, for parts that do not run at every step.
        """
        used = 0
        for flow, part in self.parts:
            time = part.every * part.fraction * step_size
            if part.every > 1:
                time = jnp.where((count + 1) % part.every == 0, time, jnp.zeros_like(time))
            state = flow.run(state, time, gradient, noise[used : used + flow.draws])
            used += flow.draws
        return state


def clipped(gradient: GradientFn, largest: float | None) -> GradientFn:
    """The gradient, cut to a norm where it is longer.

    :param largest: the norm; None for the gradient as it is.
    """
    if largest is None:
        return gradient

    def cut(q: Array) -> Array:
        g = gradient(q)
        return g * jnp.minimum(1.0, largest / jnp.linalg.norm(g))

    return cut


def compose(flows: Mapping[str, Flow], scheme: Scheme) -> Step:
    """The step that runs the scheme's flows one after the other.

    :param flows: the dynamic's flows by name.
    :param scheme: their order and fractions.
    """
    parts = tuple((flows[part.flow], part) for part in scheme.parts)
    return Step(parts, scheme.order, scheme.reads_end)
