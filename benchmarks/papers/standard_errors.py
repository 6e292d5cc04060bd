"""Means and slopes with their standard errors."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Mean(NamedTuple):
    """Means over independent runs and their standard errors, of one shape.

    A format, such as ``.2f``, is that of both numbers.
    """

    value: Any
    error: Any

    def __str__(self) -> str:
        return f"{self.value:.3g} ± {self.error:.1g}"

    def __format__(self, spec: str) -> str:
        return f"{self.value:{spec}} ± {self.error:{spec}}" if spec else str(self)

    def __getitem__(self, index: Any) -> Any:
        return Mean(self.value[index], self.error[index])

    def __sub__(self, other: Mean) -> Mean:
        return Mean(self.value - other.value, np.hypot(self.error, other.error))


def mean(x: Any) -> Mean:
    """The mean over runs, which are the last axis."""
    x = np.asarray(x, float)
    return Mean(x.mean(-1), x.std(-1, ddof=1) / np.sqrt(x.shape[-1]))


class Slope(NamedTuple):
    """A fitted slope and its standard error."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ± {self.error:.2f}"


def fit_slope(x: Any, y: Any, y_error: Any = None) -> Slope:
    """Slope of log ``y`` over log ``x`` by weighted least squares.

    :param x: positive, shape ``(n,)``.
    :param y: positive, shape ``(n,)``.
    :param y_error: standard errors of ``y``. Default None: equal relative errors, their size from
        the fit's residuals.
    """
    x, y = np.log(np.asarray(x, float)), np.asarray(y, float)
    relative = np.ones_like(y) if y_error is None else np.asarray(y_error, float) / y
    design = np.column_stack([np.ones_like(x), x]) / relative[:, None]
    target = np.log(y) / relative
    covariance = np.linalg.inv(design.T @ design)
    solution = covariance @ design.T @ target
    if y_error is None:
        residual = target - design @ solution
        covariance *= residual @ residual / max(1, len(x) - 2)
    return Slope(float(solution[1]), float(np.sqrt(covariance[1, 1])))
