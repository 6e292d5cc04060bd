"""The worst coordinate of one site, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from numpyro_sgmcmc.diagnostics.dependence import ConvergenceStats
from numpyro_sgmcmc.diagnostics.estimates import BiasEstimate, Estimate

__all__ = [
    "DIAGNOSES",
    "MAX_OK_R_HAT",
    "MEAN_BIAS_TOLERANCE",
    "MIN_OK_ESS",
    "SD_INFLATION_TOLERANCE",
    "SiteBias",
    "classify_bias",
]

MEAN_BIAS_TOLERANCE = 0.1
"""Shift of a mean, in posterior sds, that the report lets pass."""

SD_INFLATION_TOLERANCE = 0.05
"""Relative error of an sd that the report lets pass."""

_MEAN_BIAS_LIMITS = (
    MEAN_BIAS_TOLERANCE,
    0.2,
)  # and what error bars must exclude for a site to be fine
_SD_INFLATION_LIMITS = SD_INFLATION_TOLERANCE, 0.15
DIAGNOSES = ("apart", "biased", "one mode", "unclear", "fine")
"""The worst first."""

MAX_OK_R_HAT = 1.05
"""Above, nothing is fine."""

_MAX_CONVERGED_R_HAT = 1.1  # above, chains are apart

MIN_OK_ESS = 100
"""Effective ones: with fewer nothing is fine."""


class SiteBias(NamedTuple):
    """The worst coordinate of one site, in unconstrained space.

    - **site** - name.
    - **size** - number of coordinates.
    - **mean_bias** - chain's mean minus the posterior's, in posterior sds.
    - **mean_bias_error** - its standard error.
    - **sd_inflation** - chain's sd over the posterior's, minus one.
    - **sd_inflation_error** - its standard error.
    - **r_hat** - how far the chains disagree, 1 where they agree; NaN for a single chain.
    - **ess** - smallest effective sample size; NaN where the draws are not there.
    - **diagnosis** - ``"fine"``, ``"biased"``, ``"unclear"`` (error bars are too wide, R-hat is above
      1.05 or there are less than 100 effective draws), ``"one mode"`` (the warm-up has found
      others), or ``"apart"``: R-hat is above 1.1.
    """

    site: str
    size: int
    mean_bias: float
    mean_bias_error: float
    sd_inflation: float
    sd_inflation_error: float
    r_hat: float
    ess: float
    diagnosis: str

    @classmethod
    def from_coordinates(
        cls,
        site: str,
        indices: np.ndarray,
        bias_estimates: Sequence[BiasEstimate],
        convergence: ConvergenceStats,
        reported_diagnosis: str | None = None,
    ) -> SiteBias:
        """That of the coordinates ``indices``.

        :param bias_estimates: of all coordinates. The first must be sure for a site to be fine, the
            others are heard where they are sure that it is not.
        :param convergence: of all coordinates.
        :param reported_diagnosis: the verdict where something else has told one.
        """
        # Two-sided at 95 % for the worst of so many (Bonferroni).
        z = NormalDist().inv_cdf(1.0 - 0.025 / len(indices))
        shift, of_shift = _combine_estimates(
            [w.mean_bias for w in bias_estimates], indices, z, _MEAN_BIAS_LIMITS
        )
        inflation, of_inflation = _combine_estimates(
            [w.sd_inflation for w in bias_estimates], indices, z, _SD_INFLATION_LIMITS
        )
        verdicts = {of_shift, of_inflation}
        r_hat, ess = (
            float(np.fmax.reduce(convergence.r_hat[indices])),
            float(np.fmin.reduce(convergence.ess[indices])),
        )
        if reported_diagnosis is not None:
            verdicts.add(reported_diagnosis)
        if r_hat > MAX_OK_R_HAT:
            verdicts.add("apart" if r_hat > _MAX_CONVERGED_R_HAT else "unclear")
        if ess < MIN_OK_ESS:
            verdicts.add("unclear")
        verdict = next(v for v in DIAGNOSES if v in verdicts)
        return cls(site, len(indices), *shift, *inflation, r_hat, ess, verdict)


def _combine_estimates(
    candidates: Sequence[Estimate], indices: np.ndarray, z: float, limits: tuple[float, float]
) -> tuple[tuple[float, float], str]:
    """The worst of the first witness, or of one that is sure of a bias; and the verdict."""
    verdicts = [classify_bias(f, indices, z, *limits) for f in candidates]
    first = verdicts.index("biased") if "biased" in verdicts else 0
    return _find_worst_coordinate(candidates[first], indices), verdicts[first]


def _find_worst_coordinate(bias: Estimate, indices: np.ndarray) -> tuple[float, float]:
    """The estimate that is furthest from zero beyond twice its error."""
    value, error = bias.value[indices], bias.error[indices]
    clear = np.abs(value) - 2.0 * np.where(np.isfinite(error), error, 0.0)
    k = np.argmax(np.where(np.isfinite(value), clear, np.inf))
    return float(value[k]), float(error[k])


def classify_bias(
    bias: Estimate, indices: np.ndarray, z: float, tolerance: float, detection_limit: float
) -> str:
    """Whether any coordinate is clearly beyond the tolerance, or may be far beyond it."""
    size, slack = np.abs(bias.value[indices]), z * bias.error[indices]
    if (size - slack > tolerance).any():
        return "biased"
    return "fine" if (size + slack < detection_limit).all() else "unclear"
