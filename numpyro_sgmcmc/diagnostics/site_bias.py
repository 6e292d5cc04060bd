"""The worst coordinate of one site, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from numpyro_sgmcmc.diagnostics.dependence import Dependence
from numpyro_sgmcmc.diagnostics.estimates import Estimate, Witness

__all__ = [
    "FEWEST_DRAWS",
    "MEAN_TOLERANCE",
    "SD_TOLERANCE",
    "SMALL_R_HAT",
    "VERDICTS",
    "SiteBias",
    "judge",
]

MEAN_TOLERANCE = 0.1
"""Shift of a mean, in posterior sds, that the report lets pass."""

SD_TOLERANCE = 0.05
"""Relative error of an sd that the report lets pass."""

_MEAN_LIMITS = MEAN_TOLERANCE, 0.2  # and what error bars must exclude for a site to be fine
_SD_LIMITS = SD_TOLERANCE, 0.15
VERDICTS = ("apart", "biased", "one mode", "unclear", "fine")
"""The worst first."""

SMALL_R_HAT = 1.05
"""Above, nothing is fine."""

_R_HAT = 1.1  # above, chains are apart

FEWEST_DRAWS = 100
"""Effective ones: with fewer nothing is fine."""


class SiteBias(NamedTuple):
    """The worst coordinate of one site, in unconstrained space.

    - **site** - name.
    - **size** - number of coordinates.
    - **mean_shift** - chain's mean minus the posterior's, in posterior sds.
    - **mean_shift_error** - its standard error.
    - **sd_inflation** - chain's sd over the posterior's, minus one.
    - **sd_inflation_error** - its standard error.
    - **r_hat** - how far the chains disagree, 1 where they agree; NaN for a single chain.
    - **ess** - smallest effective sample size; NaN where the draws are not there.
    - **verdict** - ``"fine"``, ``"biased"``, ``"unclear"`` (error bars are too wide, R-hat is above
      1.05 or there are less than 100 effective draws), ``"one mode"`` (the warm-up has found
      others), or ``"apart"``: R-hat is above 1.1.
    """

    site: str
    size: int
    mean_shift: float
    mean_shift_error: float
    sd_inflation: float
    sd_inflation_error: float
    r_hat: float
    ess: float
    verdict: str

    @classmethod
    def of(
        cls,
        site: str,
        where: np.ndarray,
        witnesses: Sequence[Witness],
        dependence: Dependence,
        known: str | None = None,
    ) -> SiteBias:
        """That of the coordinates ``where``.

        :param witnesses: of all coordinates. The first must be sure for a site to be fine, the
            others are heard where they are sure that it is not.
        :param dependence: of all coordinates.
        :param known: the verdict where something else has told one.
        """
        # Two-sided at 95 % for the worst of so many (Bonferroni).
        z = NormalDist().inv_cdf(1.0 - 0.025 / len(where))
        shift, of_shift = _heard([w.shift for w in witnesses], where, z, _MEAN_LIMITS)
        inflation, of_inflation = _heard([w.inflation for w in witnesses], where, z, _SD_LIMITS)
        verdicts = {of_shift, of_inflation}
        r_hat, ess = (
            float(np.fmax.reduce(dependence.r_hat[where])),
            float(np.fmin.reduce(dependence.ess[where])),
        )
        if known is not None:
            verdicts.add(known)
        if r_hat > SMALL_R_HAT:
            verdicts.add("apart" if r_hat > _R_HAT else "unclear")
        if ess < FEWEST_DRAWS:
            verdicts.add("unclear")
        verdict = next(v for v in VERDICTS if v in verdicts)
        return cls(site, len(where), *shift, *inflation, r_hat, ess, verdict)


def _heard(
    found: Sequence[Estimate], where: np.ndarray, z: float, limits: tuple[float, float]
) -> tuple[tuple[float, float], str]:
    """The worst of the first witness, or of one that is sure of a bias; and the verdict."""
    verdicts = [judge(f, where, z, *limits) for f in found]
    first = verdicts.index("biased") if "biased" in verdicts else 0
    return _worst(found[first], where), verdicts[first]


def _worst(found: Estimate, where: np.ndarray) -> tuple[float, float]:
    """The estimate that is furthest from zero beyond twice its error."""
    value, error = found.value[where], found.error[where]
    clear = np.abs(value) - 2.0 * np.where(np.isfinite(error), error, 0.0)
    k = np.argmax(np.where(np.isfinite(value), clear, np.inf))
    return float(value[k]), float(error[k])


def judge(found: Estimate, where: np.ndarray, z: float, tolerance: float, unclear: float) -> str:
    """Whether any coordinate is clearly beyond the tolerance, or may be far beyond it."""
    size, slack = np.abs(found.value[where]), z * found.error[where]
    if (size - slack > tolerance).any():
        return "biased"
    return "fine" if (size + slack < unclear).all() else "unclear"
