"""How far chains agree, and as how many independent draws theirs count."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin

__all__ = ["Dependence"]

_COORDINATES = 2**20  # numbers in the draws that are looked at in one go, about
_FEWEST = 8  # draws of a chain


class Dependence(NamedTuple):
    """
    - **r_hat** - split R-hat of each coordinate, shape ``(d,)``; NaN where there is none.
    - **ess** - effective sample size of each coordinate, shape ``(d,)``; NaN likewise.
    """

    r_hat: np.ndarray
    ess: np.ndarray

    @classmethod
    def unknown(cls, dim: int) -> Dependence:
        """Of draws that are not there."""
        return cls(np.full(dim, np.nan), np.full(dim, np.nan))

    @classmethod
    def of(cls, draws: np.ndarray) -> Dependence:
        """By NumPyro's diagnostics.

        :param draws: shape ``(chains, draws, d)``.
        """
        chains, num, dim = draws.shape
        if num < _FEWEST:
            return cls.unknown(dim)
        together = max(1, _COORDINATES // (chains * num))
        found = []
        for first in range(0, dim, together):
            some = draws[..., first : first + together]
            with np.errstate(divide="ignore", invalid="ignore"):
                found.append((split_gelman_rubin(some), effective_sample_size(some)))
        return cls(*(np.concatenate(x) for x in zip(*found, strict=True)))
