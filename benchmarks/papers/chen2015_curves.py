"""Bias and error of simulated averages, beside the exact ones, as curves with their slopes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from chen2015_averages import MEAN, Averages
from standard_errors import Slope, fit_slope

from numpyro_sgmcmc.diagnostics.stein_estimates import jackknife

GROUPS = 20
"""Groups of runs, left out one at a time for standard errors."""


def bias_of(averages: Averages) -> np.ndarray:
    """The bias over runs (the last axis), by the part of phi whose mean is not zero anyway."""
    return averages.squares.mean(-1)


def mse_of(averages: Averages) -> np.ndarray:
    return np.square(averages.squares + 2.0 * MEAN * averages.offsets).mean(-1)


class Jackknifed(NamedTuple):
    """A statistic over runs and its values where one group is left out (first axis)."""

    value: np.ndarray
    left_out: np.ndarray

    @property
    def error(self) -> np.ndarray:
        return jackknife(self.value, self.left_out).error


def estimate(averages: Averages, statistic: Callable[[Averages], np.ndarray]) -> Jackknifed:
    group = np.arange(averages.squares.shape[-1]) % GROUPS
    kept = [Averages(*(a[..., group != g] for a in averages)) for g in range(GROUPS)]
    return Jackknifed(statistic(averages), np.stack([statistic(k) for k in kept]))


def slope_of(x: np.ndarray, found: Jackknifed) -> Slope:
    """Slope over the first axis, by weighted least squares.

    Points that share their noise are not independent: the standard error is the jackknife's.
    """

    def slope(y: np.ndarray) -> float:
        return fit_slope(x, np.abs(y), found.error).value

    value = slope(found.value)
    error = jackknife(value, [slope(y) for y in found.left_out]).error
    return Slope(value, float(error))


def pick(found: Jackknifed, part: Callable[[np.ndarray], np.ndarray]) -> Jackknifed:
    return Jackknifed(part(found.value), np.stack([part(y) for y in found.left_out]))


class Curve(NamedTuple):
    """
    - **x** - step sizes or numbers of steps, shape ``(n,)``.
    - **simulated** - values with their standard errors, at each x.
    - **exact** - values without Monte Carlo error, at each x.
    """

    x: np.ndarray
    simulated: Jackknifed
    exact: np.ndarray

    @property
    def slope(self) -> Slope:
        return slope_of(self.x, self.simulated)

    @property
    def exact_slope(self) -> float:
        """Over the simulated range, with the same weights."""
        return fit_slope(self.x, np.abs(self.exact), self.simulated.error).value

    @property
    def within(self) -> tuple[int, int]:
        """Count simulated values within two standard errors of the exact ones, and all values."""
        close = np.abs(self.simulated.value - self.exact) < 2.0 * self.simulated.error
        return int(close.sum()), close.size


def end_slope(x: Sequence[float], y: np.ndarray) -> float:
    """Slope between the last two points."""
    return float(np.log(np.abs(y[-1] / y[-2])) / np.log(x[-1] / x[-2]))
