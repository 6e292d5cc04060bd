r"""Bias of coordinates along which the curvature in other directions changes: shared scales.

In directions in which the posterior is narrow, of curvature :math:`\lambda_i`, a chain is in
equilibrium at once. A step of size h widens them, by discretisation and by gradient noise of
variance :math:`V_i`. Their mean force on a coordinate x is therefore that of the posterior with the
further potential E,

.. math::

    \partial_x E = \sum_i \tfrac12 \left(\kappa \lambda_i + c V_i\right) \partial_x \log \lambda_i

where the variance inflation is :math:`\kappa` per curvature at the positions of gradients
(:math:`h^2/4` for the symmetric splitting) and c per noise variance. Chains have the density
:math:`\pi e^{-E}` and seldom reach positions of large curvature and noise.

The first term is that of :math:`\kappa \sum_i \lambda_i / 2`. Squared gradients in the directions
orthogonal to x have the mean of :math:`\sum_i \lambda_i` given x (integration by parts). A noise
that is proportional to the squared curvature makes the second that of :math:`c \sum_i V_i / 4`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from numpyro_sgmcmc.model.preconditioner import Preconditioner

# Trend of the log curvature per SD of a coordinate, its standard errors, and SD of the draws over
# that of the preconditioner, from which a coordinate counts as coupled. The last is 1 for a
# Gaussian, up to 1.2 in regressions and centred hierarchies, 1.3 to 4 in non-centred ones.
_MIN_TREND, _MIN_TREND_Z, _MIN_SD_RATIO = 0.1, 3.0, 1.25
_MAX_ABS_X = 3.0  # SDs: single draws further out do not determine a step size
# True over predicted bias: pilot chains of finite length miss a part of the tail, where the bias is
# largest (1.1 at exact draws, 1.5 to 2 at those of pilot chains: runs of `groups` in
# `benchmarks/calibration.py`).
_MISSED_TAIL_FACTOR = 2.0


class Coupling(NamedTuple):
    """Coordinates along which the curvature in other directions changes, at draws.

    - **q** - draws in preconditioned coordinates, shape ``(n, d)``, until their noise is known.
    - **coordinates** - coupled coordinates of the draws, standardised, shape ``(n, k)``.
    - **squared_gradients** - squared norms of the gradient in the directions orthogonal to each of
      them, shape ``(n, k)``.
    - **noise_variances** - variance of the gradient noise, summed over coordinates, shape
      ``(n, 1)``.
    - **relaxation_factor** - relaxation time of the widest of them relative to a standard normal's.
    - **indices** - their positions among all coordinates, shape ``(k,)``.
    """

    q: np.ndarray = np.zeros((1, 0))
    coordinates: np.ndarray = np.zeros((1, 0))
    squared_gradients: np.ndarray = np.zeros((1, 0))
    noise_variances: np.ndarray = np.zeros((1, 1))
    relaxation_factor: float = 1.0
    indices: np.ndarray = np.zeros(0, int)

    def compute_biases(
        self, inflation_per_curvature: float, inflation_per_noise_variance: float
    ) -> np.ndarray:
        """Return the larger of the biases of mean and SD, in SDs, shape ``(k,)``."""
        potential = (
            inflation_per_curvature / 2.0 * self.squared_gradients
            + inflation_per_noise_variance / 4.0 * self.noise_variances
        )
        weights = np.exp(potential.min(0) - potential)
        weights /= weights.sum(0)
        mean = (weights * self.coordinates).sum(0)
        sd = np.sqrt((weights * np.square(self.coordinates - mean)).sum(0))
        return np.asarray(_MISSED_TAIL_FACTOR * np.maximum(np.abs(mean), np.abs(sd - 1.0)))


NO_COUPLING = Coupling()


def find_coupling(
    positions: np.ndarray, gradients: np.ndarray, preconditioner: Preconditioner
) -> Coupling:
    """Find the coordinates along which the curvature in other directions clearly changes.

    A coordinate that changes its own curvature alone, such as a heavy-tailed one, is none.

    :param positions: draws in model coordinates, shape ``(n, d)``.
    :param gradients: full-data gradients there, shape ``(n, d)``.
    """
    sds, sd = preconditioner.sds, positions.std(0)
    preconditioned = preconditioner.apply_transpose(gradients)
    along = preconditioner.apply(preconditioned) / sds
    squared = np.square(preconditioned).sum(1, keepdims=True) - np.square(along)
    x = _standardize(np.clip(_standardize(positions), -_MAX_ABS_X, _MAX_ABS_X))
    y = np.log(np.maximum(squared, np.finfo(float).tiny))
    y -= y.mean(0)
    trend = (x * y).mean(0)
    errors = (y - trend * x).std(0) / np.sqrt(len(x))
    is_resolved = np.abs(trend) > np.maximum(_MIN_TREND, _MIN_TREND_Z * errors)
    k = np.flatnonzero(is_resolved & (sd > _MIN_SD_RATIO * sds))
    if not len(k):
        return NO_COUPLING
    return Coupling(
        preconditioner.solve(positions - preconditioner.center),
        x[:, k],
        squared[:, k],
        relaxation_factor=float((sd[k] / sds[k]).max()),
        indices=k,
    )


def _standardize(x: np.ndarray) -> np.ndarray:
    """Return columns of mean zero and SD one."""
    return np.asarray((x - x.mean(0)) / np.maximum(x.std(0), np.finfo(float).tiny))
