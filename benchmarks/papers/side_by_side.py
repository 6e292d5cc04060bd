"""Chains side by side that differ in their step size alone, in one program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["side_by_side"]


def side_by_side(
    kernel: Any,
    step_sizes: Sequence[float],
    first: Mapping[str, np.ndarray] | Sequence[Mapping[str, np.ndarray]],
    arguments: tuple[Any, ...],
    draws: int,
    seed: int,
    decay: float = 1.0,
) -> Iterator[Any]:
    """The state of all chains after each iteration.

    :param kernel: with all settings given, so that the warm-up adapts nothing.
    :param first: where all of them start, by site; or where each does.
    :param arguments: the model's.
    :param decay: by what step sizes are divided after each iteration.
    """
    num = len(step_sizes)
    each = [first] * num if isinstance(first, Mapping) else first
    starts = {name: np.stack([own[name] for own in each]) for name in each[0]}
    state = kernel.init(jax.random.split(jax.random.key(seed), num), 0, starts, arguments, {})
    # What chains of one run share is all but this.
    own_steps = jnp.asarray(step_sizes, state.adapt_state.step_size.dtype)
    advance = jax.jit(lambda state: kernel.sample(state, arguments, {}))
    for k in range(draws):
        adapt_state = state.adapt_state._replace(step_size=own_steps / decay**k)
        state = advance(state._replace(adapt_state=adapt_state))
        yield state
