"""The densities of Ma, Chen and Fox (2015), in bins of equal mass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.stats import norm


def divergence(counts: Any) -> float:
    """KL of the counts' frequencies from equal ones."""
    share = np.asarray(counts, float) / np.sum(counts)
    kept = share[share > 0]
    return float(np.sum(kept * np.log(kept * share.size)))


class Target(NamedTuple):
    """
    - **name** - the potential as printed.
    - **potential** - U, of a position of shape ``(d,)``.
    - **bin_of** - the index of a position's bin; all bins have the same mass.
    - **num_bins** - their number.
    - **start** - where runs that measure speed begin.
    """

    name: str
    potential: Callable[[Array], Array]
    bin_of: Callable[[Array], Array]
    num_bins: int
    start: tuple[float, ...]


# --- Densities on the line ----------------------------------------------------------------------

GRID = np.linspace(-8.0, 8.0, 160_001)


def on_grid(potential: Callable) -> np.ndarray:
    """``exp(-U)`` on the grid, normalized."""
    density = np.exp(-np.asarray(jax.vmap(lambda x: potential(x[None]))(jnp.asarray(GRID))))
    return density / np.trapezoid(density, GRID)


def quantile_edges(density: np.ndarray, num_bins: int) -> np.ndarray:
    """The inner edges of bins of equal mass."""
    cumulative = np.cumsum(density)
    return np.interp(np.arange(1, num_bins) / num_bins, cumulative / cumulative[-1], GRID)


def binned_divergence(density: np.ndarray, edges: np.ndarray) -> float:
    """KL over the bins of a density on the grid, not necessarily normalized."""
    mass = np.bincount(np.searchsorted(edges, GRID), weights=density, minlength=len(edges) + 1)
    return divergence(mass)


def normal_potential(q: Array) -> Array:
    return q[0] ** 2 / 2


def double_well(q: Array) -> Array:
    return q[0] ** 4 - 2 * q[0] ** 2


def lifted_double_well(q: Array) -> Array:
    """Return the double well shifted to a minimum of zero, so that U + C has no roots."""
    return double_well(q) + 1.0


def line(name: str, potential: Callable, start: float, num_bins: int = 40) -> Target:
    edges = jnp.asarray(quantile_edges(on_grid(potential), num_bins))
    return Target(name, potential, lambda q: jnp.sum(edges < q[0]), num_bins, (start,))


# --- The banana ---------------------------------------------------------------------------------


def banana_potential(q: Array) -> Array:
    return q[0] ** 4 / 10 + (4 * (q[1] + 1.2) - q[0] ** 2) ** 2 / 2


def banana(num_along: int = 16, num_across: int = 8) -> Target:
    """The coordinate along is independent of the offset across, which is standard normal."""
    along = jnp.asarray(quantile_edges(on_grid(lambda q: q[0] ** 4 / 10), num_along))
    across = jnp.asarray(norm.ppf(np.arange(1, num_across) / num_across))

    def bin_of(q: Array) -> Array:
        offset = 4 * (q[1] + 1.2) - q[0] ** 2
        return num_across * jnp.sum(along < q[0]) + jnp.sum(across < offset)

    return Target("banana", banana_potential, bin_of, num_along * num_across, (0.0, -1.2))
