"""How far chains agree, and as how many independent draws theirs count."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin

__all__ = ["ConvergenceStats", "format_r_hat"]

_MAX_SHOWN_R_HAT = 100.0  # an R-hat at which chains are lost
_MAX_CHUNK_ENTRIES = 2**20  # numbers in the draws that are looked at in one go, about
_MIN_DRAWS_FOR_ESS, _MIN_DRAWS_FOR_R_HAT = (
    8,
    50,
)  # draws of a chain for ESS; for R-hat of its halves


def format_r_hat(r_hat: float, digits: int = 2) -> str:
    """As a number where it is one that tells something."""
    if np.isnan(r_hat):
        return "-"
    return f"{r_hat:.{digits}f}" if r_hat < _MAX_SHOWN_R_HAT else f">{_MAX_SHOWN_R_HAT:.0f}"


class ConvergenceStats(NamedTuple):
    """
    - **r_hat** - split R-hat of each coordinate, shape ``(d,)``; NaN for few draws.
    - **ess** - effective sample size of each coordinate, shape ``(d,)``: no more than the draws
      where these are few; NaN where the draws are not independent of a schedule.
    """

    r_hat: np.ndarray
    ess: np.ndarray

    @classmethod
    def from_draws(cls, draws: np.ndarray) -> ConvergenceStats:
        """By NumPyro's diagnostics.

        :param draws: shape ``(chains, draws, d)``.
        """
        chains, num, dim = draws.shape
        if num < _MIN_DRAWS_FOR_ESS:
            return cls(np.full(dim, np.nan), np.full(dim, float(chains * num)))
        together = max(1, _MAX_CHUNK_ENTRIES // (chains * num))
        found = []
        for first in range(0, dim, together):
            some = draws[..., first : first + together]
            with np.errstate(divide="ignore", invalid="ignore"):
                found.append((split_gelman_rubin(some), effective_sample_size(some)))
        r_hat, ess = (np.concatenate(x) for x in zip(*found, strict=True))
        ess = np.where(ess < 1.0, 1.0, ess)  # what NumPyro's rounds to below zero, of lost chains
        return cls(r_hat if num >= _MIN_DRAWS_FOR_R_HAT else np.full(dim, np.nan), ess)
