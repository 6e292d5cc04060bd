r"""Heavy tails: coordinates whose sd says nothing of them, judged by their quantiles.

A Cauchy variable has no sd, and that of its draws means nothing. Bent by
:math:`x = c + s \sinh y` it has one: tails that fall off as a power become exponential. A
monotone map keeps all quantiles, and the gradient with respect to y is known, so that the moments
which tell the bias are taken of y in place of x.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

__all__ = ["TailTransform"]

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
