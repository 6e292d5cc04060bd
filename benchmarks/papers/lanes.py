"""Runs at several step sizes (lanes) side by side, on the same noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def in_lanes(tree: Any, lanes: int) -> Any:
    """Repeat arrays for each lane, shape ``(lanes, ...)``."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (lanes, *x.shape)), tree)


def over_lanes(move: Callable) -> Callable:
    """``move(state, h, error, noise)`` of one run, for all.

    States are of shape ``(lanes, runs, ...)``, step sizes h ``(lanes,)``, what makes the gradient's
    error and the injected noise ``(runs, ...)``.
    """
    return jax.vmap(jax.vmap(move, (0, None, 0, 0)), (0, 0, None, None))
