r"""Draws that need a separate diagnosis: heavy tails, outlying draws and funnels. NumPy only.

**Heavy tails.** A Cauchy variable has no SD, and the SD of its draws means nothing. The transform
:math:`x = c + s \sinh y` gives it one: tails that fall off as a power become exponential.
:class:`TailTransform` fits it and transforms gradients with it, so that Stein's identity can be
applied to y in place of x. A monotone map keeps all quantiles.

**Funnel necks.** A funnel narrows as a scale goes to zero. Where its largest curvature
:math:`\lambda` times the squared step size h nears the stability bound, chains turn back, and the
posterior mass beyond stays unseen; neither R-hat nor a moment of the draws shows it.
:func:`find_funnel_necks` extrapolates the curvature by its trend along the coordinate, and the
posterior's tail by the mean force there. A tail under constant force is exponential, so that the
mass beyond the point where :math:`h^2\lambda` is too large can be computed without a draw from it;
if the force clearly grows, the mass is smaller.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# SDs, from quartiles, beyond which a draw is outlying: one of 4e11 normal draws is.
_MIN_OUTLYING_DISTANCE = 7.0
# SDs from the mean of the farthest draw of a coordinate whose quartiles are computed: saves time.
_MIN_CANDIDATE_DISTANCE = 4.0
# SD over that of a normal with the same 5% and 95% quantiles, beyond which tails are heavy. That of
# a Laplace variable is 1.01, of a Student t with 4 and 3 degrees of freedom 1.09 and 1.21.
_MIN_HEAVY_TAIL_SD_RATIO = 1.3
# Distance between the 5% and 95% quantiles of a normal, in SDs: 2 x 1.645.
_NORMAL_90_PERCENT_WIDTH = 3.29
# Distance between the quartiles of a normal, in SDs: 2 x 0.6745.
_NORMAL_INTERQUARTILE_RANGE = 1.349
# :math:`h^2\lambda` at which chains turn back; an integrator is unstable at 4.
_MAX_REACHED_SCALED_CURVATURE = 2.0
# Missed posterior mass that is reported, and that biases the site: 3% beyond one end of a normal
# moves its mean by 0.07 SD.
_MIN_REPORTED_MASS, _MIN_SIGNIFICANT_MASS = 0.012, 0.03
# Correlation of the logarithm of the curvature with the coordinate for a trend to be used.
_MIN_CURVATURE_CORRELATION = 0.5
# Draws in the upper half of the coordinate for a trend to be fitted.
_MIN_TREND_DRAWS = 8
# Coordinates with the clearest trend that are examined: a bound on time.
_MAX_FUNNEL_NECK_CANDIDATES = 32
# SDs beyond the tail quantile; neither trend nor force can be extrapolated further.
_MAX_EXTRAPOLATION = 4.0
# The force is fitted beyond the first, and missed mass is sought beyond the second.
_FORCE_QUANTILE, _TAIL_QUANTILE = 0.7, 0.8


class TailTransform(NamedTuple):
    r"""The transform :math:`y = \operatorname{arsinh}((x - c)/s)` of heavy-tailed coordinates."""

    coordinates: np.ndarray  # coordinates with heavy tails, shape `(k,)`
    center: np.ndarray  # c: their medians
    scale: np.ndarray  # s: SDs of normals with their quartiles

    @classmethod
    def fit(cls, draws: np.ndarray) -> TailTransform:
        """Detect the coordinates with heavy tails and fit their transform."""
        q05, q25, median, q75, q95 = np.quantile(draws, [0.05, 0.25, 0.5, 0.75, 0.95], axis=0)
        normal_sd = (q95 - q05) / _NORMAL_90_PERCENT_WIDTH
        is_heavy = draws.std(0) > _MIN_HEAVY_TAIL_SD_RATIO * normal_sd
        coordinates = np.flatnonzero(is_heavy & (q75 > q25))  # stuck chains have equal quartiles
        scale = (q75 - q25) / _NORMAL_INTERQUARTILE_RANGE
        return cls(coordinates, median[coordinates], scale[coordinates])

    def transform(self, positions: np.ndarray) -> np.ndarray:
        """Return y of the heavy-tailed coordinates of positions, shape ``(..., k)``."""
        return np.arcsinh((positions[..., self.coordinates] - self.center) / self.scale)

    def transform_gradient(self, positions: np.ndarray, gradients: np.ndarray) -> np.ndarray:
        r"""Return the gradient with respect to y of y's potential, shape ``(..., k)``.

        :math:`\partial_y U - \partial_y \log(dx/dy) = s\cosh y\,\partial_x U - \tanh y`.
        """
        sinh = (positions[..., self.coordinates] - self.center) / self.scale
        cosh = np.sqrt(1.0 + np.square(sinh))
        return gradients[..., self.coordinates] * self.scale * cosh - sinh / cosh


class OutlyingDraw(NamedTuple):
    """The draw of a coordinate that is farthest from the median on one side."""

    coordinate: int  # index of the coordinate in the flat position
    draw: int
    median: float


def find_outlying_draws(draws: np.ndarray, max_draws: int) -> list[OutlyingDraw]:
    """Return the farthest draw on each side of each coordinate, of those that are outlying.

    :param draws: shape ``(n, d)``.
    :param max_draws: of the list, which begins with the farthest in SDs.
    """
    mean, sd, low, high = draws.mean(0), draws.std(0), draws.min(0), draws.max(0)
    ranges = np.maximum(high - mean, mean - low)
    coordinates = np.flatnonzero(ranges > _MIN_CANDIDATE_DISTANCE * sd)
    q25, medians, q75 = np.quantile(draws[:, coordinates], [0.25, 0.5, 0.75], axis=0)
    scale = (q75 - q25) / _NORMAL_INTERQUARTILE_RANGE
    sides = np.concatenate([high[coordinates] - medians, medians - low[coordinates]])
    distances = sides / np.tile(np.where(scale > 0.0, scale, np.inf), 2)
    found = []
    for k in np.argsort(-distances, kind="stable")[:max_draws]:
        if distances[k] > _MIN_OUTLYING_DISTANCE:
            is_low, j = divmod(int(k), len(coordinates))
            column = draws[:, coordinates[j]]
            draw = int(column.argmin() if is_low else column.argmax())
            found.append(OutlyingDraw(int(coordinates[j]), draw, float(medians[j])))
    return found


class Excursion(NamedTuple):
    """A coordinate with draws far outside of the posterior."""

    coordinate: int  # index of the coordinate in the flat position
    # potential of the farthest draw minus that of this draw with the coordinate at its median
    potential_increase: float


class FunnelNeck(NamedTuple):
    """A high-curvature end of a coordinate that the chains do not reach."""

    coordinate: int  # index of the coordinate in the flat position
    side: str  # `"low"` or `"high"`: the end with high curvature
    missed_mass: float  # approximate posterior mass that the chains do not reach, from 0 to 1
    # whether the step size is too large for the bulk of the posterior as well
    is_step_too_large_in_bulk: bool = False

    @property
    def is_significant(self) -> bool:
        """True if the missed mass must bias means and SDs."""
        return self.missed_mass > _MIN_SIGNIFICANT_MASS


def find_funnel_necks(
    positions: np.ndarray,
    gradients: np.ndarray,
    curvature_indices: np.ndarray,
    scaled_curvature: np.ndarray,
) -> tuple[FunnelNeck, ...]:
    """Find the ends of coordinates beyond which the chains miss posterior mass.

    :param curvature_indices: draws at which the curvature is known, shape ``(k,)``.
    :param scaled_curvature: the largest curvature there times the squared step size.
    """
    is_valid = np.isfinite(scaled_curvature) & (scaled_curvature > 0.0)
    curvature_indices = curvature_indices[is_valid]
    log_curvature = np.log(scaled_curvature[is_valid])
    if len(curvature_indices) < 2 or log_curvature.std() == 0.0:
        return ()
    sd = positions.std(0)
    coordinates = np.flatnonzero(sd > 0.0)
    x = (positions[:, coordinates] - positions[:, coordinates].mean(0)) / sd[coordinates]
    g = gradients[:, coordinates] * sd[coordinates]
    correlation = _correlate_columns(x[curvature_indices], log_curvature)
    is_everywhere = bool(np.median(log_curvature) > np.log(_MAX_REACHED_SCALED_CURVATURE))
    funnel_necks = []
    for k in np.argsort(-np.abs(correlation))[:_MAX_FUNNEL_NECK_CANDIDATES]:
        sign = 1.0 if correlation[k] > 0.0 else -1.0
        mass = _estimate_missed_mass(
            sign * x[:, k], sign * g[:, k], curvature_indices, log_curvature
        )
        if mass > _MIN_REPORTED_MASS:
            side = "high" if sign > 0.0 else "low"
            funnel_necks.append(FunnelNeck(int(coordinates[k]), side, mass, is_everywhere))
    return tuple(funnel_necks)


def _estimate_missed_mass(
    x: np.ndarray, force: np.ndarray, curvature_indices: np.ndarray, log_curvature: np.ndarray
) -> float:
    """Return the approximate mass where the step is too large, at the coordinate's upper end."""
    at = x[curvature_indices]
    is_upper = at > np.median(x)
    at, log_curvature = at[is_upper], log_curvature[is_upper]
    if len(at) < _MIN_TREND_DRAWS or np.std(at) == 0.0 or np.std(log_curvature) == 0.0:
        return 0.0
    if np.corrcoef(at, log_curvature)[0, 1] < _MIN_CURVATURE_CORRELATION:
        return 0.0
    slope, intercept = np.polyfit(at, log_curvature, 1)
    end = (np.log(_MAX_REACHED_SCALED_CURVATURE) - intercept) / slope
    tail = np.quantile(x, _TAIL_QUANTILE)
    if end <= tail:
        return 1.0 - _TAIL_QUANTILE
    if end > tail + _MAX_EXTRAPOLATION:
        return 0.0
    tail_force, growth = _fit_tail_force(x, force, tail)
    length = end - tail
    return float((1.0 - _TAIL_QUANTILE) * np.exp(-(tail_force + growth * length / 2.0) * length))


def _fit_tail_force(x: np.ndarray, force: np.ndarray, location: float) -> tuple[float, float]:
    """Return the mean force at a location of the upper end and its growth, two errors below."""
    is_upper = x >= np.quantile(x, _FORCE_QUANTILE)
    x, force = x[is_upper] - location, force[is_upper]
    sum_of_squares = np.square(x - x.mean()).sum()
    if sum_of_squares == 0.0:
        return max(0.0, force.mean()), 0.0
    growth = ((x - x.mean()) * force).sum() / sum_of_squares
    residual = force - force.mean() - growth * (x - x.mean())
    growth = max(0.0, growth - 2.0 * np.sqrt(residual.var() / sum_of_squares))
    return max(0.0, force.mean() - growth * x.mean()), growth


def _correlate_columns(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the correlation of each column of x with y."""
    x, y = x - x.mean(0), y - y.mean()
    scale = np.sqrt(np.square(x).sum(0) * np.square(y).sum())
    return (x * y[:, None]).sum(0) / np.maximum(scale, np.finfo(float).tiny)
