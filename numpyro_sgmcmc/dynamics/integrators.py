r"""Integrators as data: an :class:`Integrator` is a sequence of flows and fractions of the step.

An SDE provides named flows (drift, friction, kick, ...), each the exact or approximate solution of
one part of the SDE. An :class:`Integrator` lists the flows in their order with the fraction of the
step size for which each runs; :class:`Step` runs them. A step is a pure function of state, step
size, gradient function and normals, so that its order can be tested without sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import Array

GradientFn: TypeAlias = Callable[[Array], Array]
"""Gradient (or its unbiased estimate) of the potential at a position of shape ``(d,)``."""


class Flow(NamedTuple):
    """The solution of one part of an SDE over a time.

    - **apply** - ``(state, time, gradient_fn, normals) -> state``, the identity for time zero.
      ``gradient_fn`` maps a position of shape ``(d,)`` to the minibatch gradient of U there.
      ``normals`` has shape ``(num_noise, d)`` and standard normal entries.
    - **num_gradients** - number of gradient evaluations. Default 0.
    - **num_noise** - number of standard normal vectors. Default 0.
    """

    apply: Callable[[Any, Any, GradientFn, Array], Any]
    num_gradients: int = 0
    num_noise: int = 0


class Part(NamedTuple):
    """The place of a flow in an integrator.

    - **flow_name** - name of the flow.
    - **fraction** - fraction of the step size for which the flow runs. Default 1.
    - **every_n_steps** - number of steps in a period. The flow runs in the last step of each
      period, for the time of the whole period. Default 1.
    """

    flow_name: str
    fraction: float = 1.0
    every_n_steps: int = 1


class Integrator(NamedTuple):
    """An integrator: flows that run one after the other.

    - **parts** - the flows in their order.
    - **order** - weak order: the error of expectations is O(step_size ** order).
    - **step_size** - largest step size, in preconditioned units, at the SDE's default settings and
      with an exact gradient. With it, the SDs of Gaussians with curvatures up to 3.5 are within 5%:
      see ``test_default_step_size_*`` in tests/dynamics/test_orders.py and
      tests/sampling/test_kernels.py.
    - **gradient_at_end** - whether the step's first gradient is taken at the position where the
      step ends. If False (default), it is taken at, or near, the position where the step starts.
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
"""The symmetric splitting of Chen, Ding and Carin (2015): order two if each flow has order two."""


@dataclass(frozen=True)
class Step:
    """One step of an integrator, a pure function."""

    parts: tuple[tuple[Flow, Part], ...]
    gradient_at_end: bool = False

    @classmethod
    def from_flows(cls, flows: Mapping[str, Flow], integrator: Integrator) -> Step:
        """Return the step that runs the SDE's flows in the integrator's order."""
        parts = tuple((flows[part.flow_name], part) for part in integrator.parts)
        return cls(parts, integrator.gradient_at_end)

    @property
    def num_gradients(self) -> int:
        """Gradient evaluations per step, all on one minibatch."""
        return sum(flow.num_gradients for flow, _ in self.parts)

    @property
    def num_noise(self) -> int:
        """Standard normal vectors per step."""
        return sum(flow.num_noise for flow, _ in self.parts)

    def __call__(
        self,
        state: Any,
        step_size: Any,
        gradient_fn: GradientFn,
        normals: Array,
        step_index: Any = 0,
    ) -> Any:
        """Return the state after one step.

        :param normals: standard normal entries, shape ``(num_noise, d)``; each flow uses separate
            vectors.
        :param step_index: number of steps before this one, for parts that do not run in every step.
        """
        used = 0
        for flow, part in self.parts:
            time = part.every_n_steps * part.fraction * step_size
            if part.every_n_steps > 1:
                is_last = (step_index + 1) % part.every_n_steps == 0
                time = jnp.where(is_last, time, jnp.zeros_like(time))
            state = flow.apply(state, time, gradient_fn, normals[used : used + flow.num_noise])
            used += flow.num_noise
        return state
