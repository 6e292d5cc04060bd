"""The gradient's noise at typical positions: what decides whether the posterior is right."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
from jax import Array

from numpyro_sgmcmc.arguments import Arguments
from numpyro_sgmcmc.full_data import Indices
from numpyro_sgmcmc.gradients import Anchored, gradient_variance
from numpyro_sgmcmc.model import Target

__all__ = ["draw_blocks", "draw_rows", "measure_noise"]


def draw_rows(target: Target, rng: np.random.Generator, shape: tuple[int, ...]) -> Indices:
    """Minibatches of random rows, ``shape + (subsample_size,)`` for each plate."""
    return {
        p.name: rng.integers(0, p.size, (*shape, p.subsample_size), dtype=np.int32)
        for p in target.plates
    }


def draw_blocks(target: Target, rng: np.random.Generator, shape: tuple[int, ...]) -> Indices:
    """Minibatches of consecutive rows from random starts, ``shape + (subsample_size,)``."""
    return {
        p.name: (
            (rng.integers(0, p.size, (*shape, 1)) + np.arange(p.subsample_size)) % p.size
        ).astype(np.int32)
        for p in target.plates
    }


@partial(jax.jit, static_argnames=("target", "estimators"))
def measure_noise(
    target: Target,
    arguments: Arguments,
    anchored: Anchored,
    positions: Array,
    indices: Indices,
    estimators: tuple[str, ...],
) -> tuple[Array, ...]:
    """Variances of the whitened gradient's noise, shape ``(d,)`` for each estimator.

    :param positions: whitened positions, shape ``(k, d)``.
    :param indices: for each plate, rows of shape ``(k, m, subsample_size)``.
    :param estimators: names of the estimators.
    """
    return tuple(
        gradient_variance(e, target, arguments, anchored, positions, indices) for e in estimators
    )
