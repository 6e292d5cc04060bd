"""The worst coordinate of one site, and what is said of it."""

from __future__ import annotations

from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from numpyro_sgmcmc.diagnostics.estimates import Estimate, Estimates

__all__ = ["MEAN_TOLERANCE", "SD_TOLERANCE", "SiteBias", "judge"]

MEAN_TOLERANCE = 0.1
"""Shift of a mean, in posterior sds, that the report lets pass."""

SD_TOLERANCE = 0.05
"""Relative error of an sd that the report lets pass."""

_MEAN_UNCLEAR, _SD_UNCLEAR = 0.2, 0.15  # what error bars must exclude for a site to be fine
_R_HAT = 1.1


class SiteBias(NamedTuple):
    """The worst coordinate of one site, in unconstrained space.

    - **site** - name.
    - **size** - number of coordinates.
    - **mean_shift** - chain's mean minus the posterior's, in posterior sds.
    - **mean_shift_error** - its standard error.
    - **sd_inflation** - chain's sd over the posterior's, minus one.
    - **sd_inflation_error** - its standard error.
    - **r_hat** - how far the chains disagree, 1 where they agree; NaN for a single chain.
    - **verdict** - ``"fine"``, ``"biased"``, ``"unclear"``, or ``"apart"``: R-hat is above 1.1.
    """

    site: str
    size: int
    mean_shift: float
    mean_shift_error: float
    sd_inflation: float
    sd_inflation_error: float
    r_hat: float
    verdict: str

    @classmethod
    def of(cls, site: str, where: np.ndarray, estimates: Estimates, r_hat: np.ndarray) -> SiteBias:
        """That of the coordinates ``where``.

        :param estimates: of all coordinates.
        :param r_hat: of all coordinates.
        """
        shift, shift_error = _worst(estimates.shift, where)
        inflation, inflation_error = _worst(estimates.inflation, where)
        # Two-sided at 95 % for the worst of so many (Bonferroni).
        z = NormalDist().inv_cdf(1.0 - 0.025 / len(where))
        verdicts = {
            judge(estimates.shift, where, z, MEAN_TOLERANCE, _MEAN_UNCLEAR),
            judge(estimates.inflation, where, z, SD_TOLERANCE, _SD_UNCLEAR),
        }
        worst = float(r_hat[where].max())
        if worst > _R_HAT:
            verdicts.add("apart")
        verdict = next(v for v in ("apart", "biased", "unclear", "fine") if v in verdicts)
        return cls(site, len(where), shift, shift_error, inflation, inflation_error, worst, verdict)


def _worst(found: Estimate, where: np.ndarray) -> tuple[float, float]:
    """The estimate that is furthest from zero beyond twice its error."""
    value, error = found.value[where], found.error[where]
    k = np.argmax(np.where(np.isfinite(value), np.abs(value) - 2.0 * np.nan_to_num(error), np.inf))
    return float(value[k]), float(error[k])


def judge(found: Estimate, where: np.ndarray, z: float, tolerance: float, unclear: float) -> str:
    """Whether any coordinate is clearly beyond the tolerance, or may be far beyond it."""
    size, slack = np.abs(found.value[where]), z * found.error[where]
    if (size - slack > tolerance).any():
        return "biased"
    return "fine" if (size + slack < unclear).all() else "unclear"
