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

__all__ = [
    "SYMMETRIC_SPLITTING",
    "Flow",
    "GradientFn",
    "Integrator",
    "Part",
    "Step",
    "clip_grad_norm",
    "compose",
]

GradientFn: TypeAlias = Callable[[Array], Array]
"""Gradient (or its unbiased estimate) of the potential at a position of shape ``(d,)``."""


class Flow(NamedTuple):
    """One part of an SDE, followed for a time.

    - **apply** - ``(state, time, gradient, noise) -> state``, the identity for time zero.
      ``gradient`` maps a position of shape ``(d,)`` to the minibatch's gradient of U there, and
      ``noise`` has shape ``(draws, d)`` and standard normal entries.
    - **num_gradients** - gradient evaluations. Default 0.
    - **num_noise** - standard normal vectors. Default 0.
    """

    apply: Callable[[Any, Any, GradientFn, Array], Any]
    num_gradients: int = 0
    num_noise: int = 0


class Part(NamedTuple):
    """Where a flow stands in a scheme.

    - **flow_name** - a flow's name.
    - **fraction** - fraction of the step for which it runs. Default 1.
    - **every_n_steps** - it runs at every so many steps only, and for the time of that many. Default 1.
    """

    flow_name: str
    fraction: float = 1.0
    every_n_steps: int = 1


class Integrator(NamedTuple):
    """An integrator: flows one after the other.

    - **parts** - the flows, one after the other.
    - **order** - weak order: expectations are wrong by O(step_size ** order).
    - **step_size** - the largest that suits a whitened Gaussian and an exact gradient, at the
      default settings of the SDE: its sds are within 5 % up to a curvature of 3.5.
    - **gradient_at_end** - whether the step's first gradient is taken at the position where the step
      ends; otherwise it is at, or about, the one where it starts. Default False.
    """

    parts: tuple[Part, ...]
    order: int
    step_size: float
    gradient_at_end: bool = False


SYMMETRIC_SPLITTING = (
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
    gradient_at_end: bool = False

    @property
    def num_gradients(self) -> int:
        """Gradient evaluations a step, all on one minibatch."""
        return sum(flow.num_gradients for flow, _ in self.parts)

    @property
    def num_noise(self) -> int:
        """Standard normal vectors a step."""
        return sum(flow.num_noise for flow, _ in self.parts)

    def __call__(
        self,
        state: Any,
        step_size: Any,
        gradient_fn: GradientFn,
        normals: Array,
        step_index: Any = 0,
    ) -> Any:
        """The state after one step.

        :param state: a state of the dynamic.
        :param step_size: step size.
        :param gradient_fn: the gradient's estimate on one minibatch.
        :param normals: standard normal entries, shape ``(draws, d)``; each flow gets rows of its own.
        :param step_index: steps before this one, for parts that do not run at every step.
        """
        used = 0
        for flow, part in self.parts:
            time = part.every_n_steps * part.fraction * step_size
            if part.every_n_steps > 1:
                time = jnp.where(
                    (step_index + 1) % part.every_n_steps == 0, time, jnp.zeros_like(time)
                )
            state = flow.apply(state, time, gradient_fn, normals[used : used + flow.num_noise])
            used += flow.num_noise
        return state


def clip_grad_norm(gradient_fn: GradientFn, max_norm: float | None) -> GradientFn:
    """The gradient, cut to a norm where it is longer.

    :param max_norm: the norm; None for the gradient as it is.
    """
    if max_norm is None:
        return gradient_fn

    def cut(q: Array) -> Array:
        g = gradient_fn(q)
        return g * jnp.minimum(1.0, max_norm / jnp.linalg.norm(g))

    return cut


def compose(flows: Mapping[str, Flow], integrator: Integrator) -> Step:
    """The step that runs the scheme's flows one after the other.

    :param flows: the dynamic's flows by name.
    :param integrator: their order and fractions.
    """
    parts = tuple((flows[part.flow_name], part) for part in integrator.parts)
    return Step(parts, integrator.order, integrator.gradient_at_end)
