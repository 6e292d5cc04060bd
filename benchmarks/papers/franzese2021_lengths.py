"""Figure 5 of Franzese et al. (2021): leapfrog steps between refreshments, all moments exact."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import output
from franzese2021_regression import BATCHES, FRICTION, FULL, Regression, errors_of
from linear_steps import Affine, epoch, fixed_point, linearized
from standard_errors import fit_slope

from numpyro_sgmcmc.dynamics import UnderdampedLangevin


def leapfrog_cycle(
    problem: Regression, h: float, num_leapfrog: int, batches: Any
) -> tuple[list[Affine], list[Affine]]:
    """Lie-Trotter steps on each minibatch: those without and those with a refreshment."""
    dynamics = UnderdampedLangevin(FRICTION, num_leapfrog)
    quadratics = [problem.quadratic(rows) for rows in batches]
    return tuple(  # type: ignore[return-value]
        [linearized(dynamics, "lie_trotter", h, *each, count) for each in quadratics]
        for count in (num_leapfrog, num_leapfrog - 1)
    )


def refreshed(problem: Regression, h: float, num_leapfrog: int, batches: Any) -> np.ndarray:
    """The stationary second moment after refreshments, which come at the ends of epochs."""
    plain, last = leapfrog_cycle(problem, h, num_leapfrog, batches)

    def cycle(moment: np.ndarray) -> np.ndarray:
        for _ in range(num_leapfrog // len(batches) - 1):
            moment = epoch(plain, moment)[-1]
        return epoch(plain, moment, last)[-1]

    return fixed_point(cycle, len(plain[0].matrix))


def slowest(problem: Regression, h: float, num_leapfrog: int) -> float:
    """Time in which the slowest mean shrinks by e, on the full batch."""
    plain, last = leapfrog_cycle(problem, h, num_leapfrog, FULL)
    n = len(plain[0].matrix) - 1
    before = np.linalg.matrix_power(plain[0].matrix[:n, :n], num_leapfrog - 1)
    radius = np.abs(np.linalg.eigvals(last[0].matrix[:n, :n] @ before)).max()
    return -num_leapfrog * h / math.log(radius)


def integration_lengths(
    problem: Regression, lengths: Sequence[int], fitted: np.ndarray, shown: Sequence[float]
) -> None:
    """Figure 5: Lie-Trotter with more and more leapfrog steps between refreshments."""
    rows = []
    for length in lengths:
        cells = []
        for batches in (FULL, BATCHES):
            if length % len(batches):
                cells += ["-"] * (1 + len(shown))
                continue
            errors = [
                errors_of(problem, refreshed(problem, h, length, batches)).predictive
                for h in (*fitted, *shown)
            ]
            cells.append(str(fit_slope(fitted, errors[: len(fitted)])))
            shown_errors = errors[len(fitted) :]
            cells += [f"{e:.1e}" if np.isfinite(e) else "unstable" for e in shown_errors]
        times = (f"{slowest(problem, h, length):.1f}" for h in shown)
        rows.append((length, *cells, *times))
    at = [f"h = {h:g}" for h in shown]
    output.print_table(
        "Figure 5, Lie-Trotter with N_l leapfrog steps between refreshments: order of the error "
        f"in the predictive second moments from h = {fitted[0]:.2g} to {fitted[-1]:.2g}, the error "
        "itself at larger steps, and the time in which the slowest mean shrinks by e; exact. The "
        "paper: order 2 for every N_l, larger errors at large h for N_l near 100.",
        (
            "N_l",
            "full batch: order",
            *at,
            "permuted: order",
            *at,
            "time, full batch: " + at[0],
            *at[1:],
        ),
        rows,
    )
