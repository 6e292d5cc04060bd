"""Runs of the samplers of Ma, Chen and Fox (2015): how far off after long, and how fast near."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from ma2015_samplers import Make
from ma2015_targets import GRID, Target, divergence, on_grid
from standard_errors import Mean, mean

from numpyro_sgmcmc.diagnostics.stein_estimates import Estimate, jackknife

NUM_GROUPS = 16


@partial(jax.jit, static_argnums=(0, 1, 5))
def simulate(
    target: Target, make: Make, key: Array, starts: Array, settings: Array, num_steps: int
) -> tuple[Array, Array]:
    """Bins visited, shape ``(steps, settings, runs)``, and which runs ended in a number.

    :param starts: shape ``(runs, d)``.
    :param settings: step sizes and frictions, shape ``(settings, 2)``.
    """
    shape = (len(settings), len(starts))
    num_noise = make(target.potential, 1.0)(key)[1].num_noise

    def init(key: Array, start: Array, setting: Array) -> Any:
        return make(target.potential, setting[1])(key)[0].init(start, key)

    def advance(state: Any, noise: Array, key: Array, setting: Array) -> tuple[Any, Array]:
        _, step, gradient = make(target.potential, setting[1])(key)
        state = step(state, setting[0], gradient, noise)
        return state, target.bin_of(state.position).astype(jnp.uint8)

    def over_all(fn: Callable, *per_run: int | None) -> Callable:
        return jax.vmap(jax.vmap(fn, (*per_run, None)), (0,) * len(per_run) + (0,))

    def body(state: Any, key: Array) -> tuple[Any, Array]:
        noise_key, row_key = random.split(key)
        noise = random.normal(noise_key, (*shape, num_noise, starts.shape[1]))
        return over_all(advance, 0, 0, 0)(state, noise, random.split(row_key, shape), settings)

    init_key, key = random.split(key)
    repeated = jnp.broadcast_to(starts, (shape[0], *starts.shape))
    state = over_all(init, 0, 0)(random.split(init_key, shape), repeated, settings)
    state, bins = lax.scan(body, state, random.split(key, num_steps))
    return bins, jnp.isfinite(state.position).all(-1)


def divergence_of_groups(counts: np.ndarray) -> Estimate:
    """KL without its bias of order 1/n, and its standard error.

    :param counts: of independent groups, shape ``(groups, bins)``.
    """
    n, total = len(counts), counts.sum(0)
    left_out = [divergence(total - c) for c in counts]
    found = jackknife(divergence(total), left_out)
    return found._replace(value=n * found.value - (n - 1) * np.mean(left_out))


class LongRun(NamedTuple):
    """
    - **value**, **error** - KL and its standard error; NaN where a chain diverged.
    - **diverged** - share of the chains that ended in no number.
    - **share** - of the draws in each bin.
    """

    value: float
    error: float
    diverged: float
    share: np.ndarray


def long_runs(
    target: Target,
    make: Make,
    step_sizes: Sequence[float],
    num_chains: int,
    num_steps: int,
    seed: int = 0,
) -> list[LongRun]:
    """Chains from exact draws; friction 1, as in the paper's metric; the first quarter left out."""
    start_key, key = random.split(random.key(seed))
    cumulative = np.cumsum(on_grid(target.potential))
    levels = random.uniform(start_key, (num_chains,))
    starts = jnp.interp(levels, cumulative / cumulative[-1], GRID)[:, None]
    settings = jnp.stack([jnp.asarray(step_sizes), jnp.ones(len(step_sizes))], 1)
    bins, finite = simulate(target, make, key, starts, settings, num_steps)
    bins, found = np.asarray(bins[num_steps // 4 :]), []
    for i, ok in enumerate(np.asarray(finite)):
        groups = bins[:, i].reshape(len(bins), NUM_GROUPS, -1)
        counts = np.stack(
            [
                np.bincount(groups[:, g].ravel(), minlength=target.num_bins)
                for g in range(NUM_GROUPS)
            ]
        )
        value, error = divergence_of_groups(counts) if ok.all() else (np.nan, np.nan)
        found.append(LongRun(value, error, 1.0 - ok.mean(), counts.sum(0) / counts.sum()))
    return found


class Speed(NamedTuple):
    """
    - **best** - mean KL of one run's histogram after each number of steps, at the best settings.
    - **step_size**, **friction** - the best of the grid, for each number of steps.
    - **shared** - mean KL at the settings that all samplers share.
    """

    best: Mean
    step_size: np.ndarray
    friction: np.ndarray
    shared: Mean


def speed(
    target: Target,
    make: Make,
    settings: np.ndarray,
    lengths: Sequence[int],
    num_runs: int,
    seed: int = 1,
) -> Speed:
    """Settings chosen on one half of the runs and measured on the other: choosing flatters none.

    :param settings: step sizes and frictions, those that all samplers share first.
    """
    starts = jnp.tile(jnp.asarray(target.start), (num_runs, 1))
    bins, finite = simulate(
        target, make, random.key(seed), starts, jnp.asarray(settings), lengths[-1]
    )
    bins = np.asarray(bins).reshape(lengths[-1], -1)
    offsets = np.arange(bins.shape[1]) * target.num_bins
    counts = np.zeros((bins.shape[1], target.num_bins))
    values = []
    for first, last in zip((0, *lengths[:-1]), lengths, strict=True):
        visited = (bins[first:last] + offsets).ravel()
        counts += np.bincount(visited, minlength=counts.size).reshape(counts.shape)
        share = counts / last
        logs = np.log(np.where(share > 0, share, 1.0) * target.num_bins)
        values.append((share * logs).sum(-1))
    # A run that diverged has explored nothing: it gets the largest divergence that there is.
    values = np.stack(values).reshape(len(lengths), len(settings), num_runs)
    values = np.where(np.asarray(finite), values, np.log(target.num_bins))
    half = num_runs // 2
    best = values[..., :half].mean(-1).argmin(1)
    tested = np.take_along_axis(values[..., half:], best[:, None, None], 1)[:, 0]
    return Speed(mean(tested), *settings[best].T, mean(values[:, 0]))
