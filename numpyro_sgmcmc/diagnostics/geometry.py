r"""Heavy tails: coordinates whose sd says nothing of them, judged by their quantiles.

A Cauchy variable has no sd, and that of its draws means nothing. Bent by
:math:`x = c + s \sinh y` it has one: tails that fall off as a power become exponential. A
monotone map keeps all quantiles, and the gradient with respect to y is known, so that the moments
which tell the bias are taken of y in place of x.

Necks: ends of a coordinate where the posterior becomes too narrow for the step.

A funnel narrows as a scale goes to zero. Where its largest curvature times the square of the step
nears the stability bound, chains turn back, and the posterior's mass beyond stays unseen: neither
R-hat nor a moment of what was visited shows it.

Both can be extrapolated from what was visited: the curvature :math:`\lambda` from its trend along
the coordinate, the posterior's tail from the mean force on it there. A tail whose force is constant
falls off by that power, so that the mass beyond the place where :math:`h^2\lambda` is too large is
known without having been there; where it clearly grows, less is left.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

__all__ = [
    "FunnelNeck",
    "TailTransform",
    "find_funnel_necks",
]

_MIN_HEAVY_TAIL_SD_RATIO = 1.3  # sd over that of a normal with the same quantiles at 5 and 95 %


_NORMAL_90_PERCENT_WIDTH_SD = 3.29  # between these, in its sds


_NORMAL_INTERQUARTILE_RANGE_SD = 1.349


class TailTransform(NamedTuple):
    """
    - **coordinates** - the coordinates with heavy tails, shape ``(k,)``.
    - **center** - c: their medians.
    - **scale** - s: sds of normals with their quartiles.
    """

    coordinates: np.ndarray
    center: np.ndarray
    scale: np.ndarray

    @classmethod
    def fit(cls, draws: np.ndarray) -> TailTransform:
        """That of the coordinates with heavy tails.

        :param draws: shape ``(n, d)``.
        """
        low, first, middle, third, high = np.quantile(draws, [0.05, 0.25, 0.5, 0.75, 0.95], axis=0)
        heavy = draws.std(0) > _MIN_HEAVY_TAIL_SD_RATIO * (high - low) / _NORMAL_90_PERCENT_WIDTH_SD
        where = np.flatnonzero(heavy & (third > first))  # stuck chains have none
        scale = (third - first) / _NORMAL_INTERQUARTILE_RANGE_SD
        return cls(where, middle[where], scale[where])

    def transform(self, positions: np.ndarray) -> np.ndarray:
        """The coordinates with heavy tails as y.

        :param positions: positions, shape ``(..., d)``.
        :return: shape ``(..., k)``.
        """
        return np.arcsinh((positions[..., self.coordinates] - self.center) / self.scale)

    def transform_gradient(self, positions: np.ndarray, gradients: np.ndarray) -> np.ndarray:
        r"""The potential's gradient by y: that by x times :math:`dx/dy`, less that of its
        logarithm.

        :param positions: positions, shape ``(..., d)``.
        :param gradients: gradients by them.
        :return: shape ``(..., k)``.
        """
        sine = (positions[..., self.coordinates] - self.center) / self.scale
        cosine = np.sqrt(1.0 + np.square(sine))
        return gradients[..., self.coordinates] * self.scale * cosine - sine / cosine


_MAX_REACHED_SCALED_CURVATURE = (
    2.0  # h^2 lambda at which chains turn back; a step is unstable at four
)


_MIN_REPORTED_MASS, _MIN_SIGNIFICANT_MASS = (
    0.012,
    0.03,
)  # mass beyond that may move a mean; that does


_MIN_CURVATURE_CORRELATION = 0.5  # correlation of the curvature's logarithm with the coordinate


_MAX_NECK_CANDIDATES = 32


_MAX_EXTRAPOLATION_SD = 4.0  # sds from there


_FORCE_QUANTILE, _TAIL_QUANTILE = (
    0.7,
    0.8,
)  # quantiles: the force is that beyond the one, mass is beyond the other


class FunnelNeck(NamedTuple):
    """
    - **coordinate** - its place in the flat position.
    - **side** - ``"low"`` or ``"high"``: the end that is narrow.
    - **missed_mass** - about the posterior's mass beyond what a chain can enter, from 0 to 1.
    - **is_step_too_large_in_bulk** - whether the step is too long in the posterior's midst as well.
    """

    coordinate: int
    side: str
    missed_mass: float
    is_step_too_large_in_bulk: bool = False

    @property
    def is_significant(self) -> bool:
        """Whether so much is missed that means and sds must be off."""
        return self.missed_mass > _MIN_SIGNIFICANT_MASS


def find_funnel_necks(
    positions: np.ndarray,
    gradients: np.ndarray,
    curvature_indices: np.ndarray,
    scaled_curvature: np.ndarray,
) -> list[FunnelNeck]:
    """Those that hold more mass than can be let pass.

    :param positions: draws, shape ``(n, d)``, in any units of each coordinate.
    :param gradients: gradients there, in these units.
    :param curvature_indices: the draws at which the curvature is known, shape ``(k,)``.
    :param scaled_curvature: there, the largest one times the squared step size.
    """
    fine = np.isfinite(scaled_curvature) & (scaled_curvature > 0.0)
    curvature_indices, narrowness = curvature_indices[fine], np.log(scaled_curvature[fine])
    if len(curvature_indices) < 2 or narrowness.std() == 0.0:
        return []
    sd = positions.std(0)
    moving = np.flatnonzero(sd > 0.0)
    x = (positions[:, moving] - positions[:, moving].mean(0)) / sd[moving]
    g = gradients[:, moving] * sd[moving]
    trend = _correlate_columns(x[curvature_indices], narrowness)
    is_everywhere = bool(np.median(narrowness) > np.log(_MAX_REACHED_SCALED_CURVATURE))
    found = []
    for k in np.argsort(-np.abs(trend))[:_MAX_NECK_CANDIDATES]:
        sign = 1.0 if trend[k] > 0.0 else -1.0
        mass = _estimate_missed_mass(sign * x[:, k], sign * g[:, k], curvature_indices, narrowness)
        if mass > _MIN_REPORTED_MASS:
            side = "high" if sign > 0.0 else "low"
            found.append(FunnelNeck(int(moving[k]), side, mass, is_everywhere))
    return found


def _estimate_missed_mass(
    x: np.ndarray,
    force: np.ndarray,
    curvature_indices: np.ndarray,
    log_scaled_curvature: np.ndarray,
) -> float:
    """About the mass where the step is too long, at the coordinate's upper end.

    :param x: the coordinate in units of its sd, shape ``(n,)``.
    :param force: the potential's derivative by it.
    :param curvature_indices: where the curvature is known, shape ``(k,)``.
    :param log_scaled_curvature: logarithm of the curvature there, times the squared step size.
    """
    upper = x[curvature_indices] > np.median(x)
    at, of = x[curvature_indices][upper], log_scaled_curvature[upper]
    if len(at) < 8 or np.std(at) == 0.0 or np.std(of) == 0.0:
        return 0.0
    if np.corrcoef(at, of)[0, 1] < _MIN_CURVATURE_CORRELATION:
        return 0.0
    slope, level = np.polyfit(at, of, 1)
    end = (np.log(_MAX_REACHED_SCALED_CURVATURE) - level) / slope
    tail = np.quantile(x, _TAIL_QUANTILE)
    if end <= tail:
        return 1.0 - _TAIL_QUANTILE
    if end > tail + _MAX_EXTRAPOLATION_SD:
        return 0.0  # neither trend nor force can be trusted so far away
    against, growth = _fit_tail_force(x, force, tail)
    length = end - tail
    return float((1.0 - _TAIL_QUANTILE) * np.exp(-(against + growth * length / 2.0) * length))


def _fit_tail_force(x: np.ndarray, force: np.ndarray, location: float) -> tuple[float, float]:
    """The mean force at a place of the upper end, and its growth there as far as that is clear."""
    upper = x >= np.quantile(x, _FORCE_QUANTILE)
    x, force = x[upper] - location, force[upper]
    spread = np.square(x - x.mean()).sum()
    if spread == 0.0:
        return max(0.0, force.mean()), 0.0
    growth = ((x - x.mean()) * force).sum() / spread
    rest = force - force.mean() - growth * (x - x.mean())
    growth = max(0.0, growth - 2.0 * np.sqrt(rest.var() / spread))
    return max(0.0, force.mean() - growth * x.mean()), growth


def _correlate_columns(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of each column of x with y."""
    x, y = x - x.mean(0), y - y.mean()
    scale = np.sqrt(np.square(x).sum(0) * np.square(y).sum())
    return (x * y[:, None]).sum(0) / np.maximum(scale, np.finfo(float).tiny)
