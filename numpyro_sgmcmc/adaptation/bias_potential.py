r"""Bias of coordinates along which curvature and gradient noise change, such as a shared scale.

In directions in which the posterior is narrow, of curvature :math:`\lambda_i`, a chain is in
equilibrium at once. A step of size h widens them, by discretisation and by gradient noise of
variance :math:`V_i`. Their mean force on the other coordinates is therefore that of the posterior
with the bias potential E,

.. math::

    \partial_x E = \sum_i \tfrac12 \left(\kappa \lambda_i + c V_i\right) \partial_x \log \lambda_i

where the variance inflation is :math:`\kappa` per curvature at the positions of gradients
(:math:`h^2/4` for the symmetric splitting) and c per noise variance. Chains have the density
:math:`\pi e^{-E}` and seldom reach positions of large curvature and noise.

The first term is that of :math:`\kappa \operatorname{tr} H / 2`. At draws of the posterior,
:math:`\|\nabla U\|^2` has the mean of tr H and its covariance with each coordinate (Stein's
identity), so that gradients of pilot chains suffice. The second is integrated along each
coordinate, with the trend of :math:`\log \|\nabla U\|^2` for that of :math:`\log \lambda_i`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from numpyro_sgmcmc.adaptation.batched_gradients import BulkPositions, sample_minibatch_indices
from numpyro_sgmcmc.adaptation.gradient_noise import evaluate_estimates
from numpyro_sgmcmc.data.subsampling import Subsampling
from numpyro_sgmcmc.model.gradient_estimators import GradientEstimator
from numpyro_sgmcmc.model.preconditioner import Preconditioner

# SD of draws over that of the preconditioner, which balances draws and gradients: 1 for a Gaussian,
# up to 1.2 in regressions and centred hierarchies, 1.25 to 4 in non-centred ones and funnels.
_MIN_SD_RATIO = 1.25
# True over predicted bias: pilot chains of finite length miss a part of the tail, where the bias
# potential is largest (2 to 4 in the long runs of `benchmarks/calibration.py --exact`).
_MISSED_TAIL_FACTOR = 4.0
_NUM_STANDARD_ERRORS_OF_TREND = 2.0  # by which the trend of the curvature is shrunk
# Minibatches per draw, and row gradients in all, from which the noise at draws is estimated.
_NUM_MINIBATCHES, _MAX_ROW_GRADIENTS = 4, 2**21


class BiasPotential(NamedTuple):
    """Bias potential at draws, along each coordinate.

    - **coordinates** - coordinates of the draws, standardised, shape ``(n, k)``.
    - **by_discretisation** - bias potential at a reference step size, shape ``(n, 1)``.
    - **by_noise** - bias potential per step size, shape ``(n, k)``.
    - **max_sd_ratio** - SD of the draws over that of the preconditioner in the widest coordinate,
      which relaxes so many times as slowly.
    """

    coordinates: np.ndarray = np.zeros((1, 0))
    by_discretisation: np.ndarray = np.zeros((1, 1))
    by_noise: np.ndarray = np.zeros((1, 0))
    max_sd_ratio: float = 1.0

    def compute_max_bias(self, discretisation_ratio: float, step_size: float) -> float:
        """Return the largest bias of a mean or an SD, in SDs.

        :param discretisation_ratio: discretisation error relative to the reference step size.
        """
        total = discretisation_ratio * self.by_discretisation + step_size * self.by_noise
        weights = np.exp(total.min(0) - total)
        weights /= weights.sum(0)
        mean = (weights * self.coordinates).sum(0)
        sd = np.sqrt((weights * np.square(self.coordinates - mean)).sum(0))
        bias = np.maximum(np.abs(mean), np.abs(sd - 1.0)).max(initial=0.0)
        return float(_MISSED_TAIL_FACTOR * bias)


def has_wide_coordinate(positions: np.ndarray, preconditioner: Preconditioner) -> bool:
    """Return whether draws, shape ``(n, d)``, are wider than the preconditioner in a coordinate.

    There the posterior is far from Gaussian.
    """
    return bool((positions.std(0) > _MIN_SD_RATIO * preconditioner.sds).any())


def measure_bias_potential(
    bulk: BulkPositions,
    estimator: GradientEstimator,
    subsampling: Subsampling,
    inflation_per_curvature: float,
    inflation_per_noise_variance: float,
    rng: np.random.Generator,
) -> BiasPotential:
    """Measure the bias potential at the draws of pilot chains, zero without such draws.

    :param inflation_per_curvature: variance inflation by discretisation at the reference step size.
    :param inflation_per_noise_variance: variance inflation by gradient noise over the step size.
    """
    if bulk.draws is None:
        return BiasPotential()
    preconditioner, potential = bulk.preconditioner, bulk.batched_gradients.step_potential
    batch_size = sum(p.subsample_size for p in potential.plates)
    stride = 1 + bulk.draws.shape[1] * _NUM_MINIBATCHES * batch_size // _MAX_ROW_GRADIENTS
    positions, gradients = bulk.draws[:, ::stride]
    noise_variances = np.zeros(len(positions))
    if batch_size and inflation_per_noise_variance > 0.0:
        minibatches = sample_minibatch_indices(potential, rng, (_NUM_MINIBATCHES,), subsampling)
        at_draws = replace(bulk, q=preconditioner.solve(positions - preconditioner.center))
        estimates = evaluate_estimates(at_draws, (estimator,), minibatches)[estimator]
        noise_variances = estimates.var(1, ddof=1).sum(1)
    sd = positions.std(0)
    x = (positions - positions.mean(0)) / sd
    squared_gradients = np.square(preconditioner.apply_transpose(gradients)).sum(1)
    return BiasPotential(
        x,
        inflation_per_curvature / 2.0 * squared_gradients[:, None],
        inflation_per_noise_variance / 2.0 * integrate_noise(x, squared_gradients, noise_variances),
        max(1.0, float((sd / preconditioner.sds).max())),
    )


def integrate_noise(
    x: np.ndarray, squared_gradients: np.ndarray, noise_variances: np.ndarray
) -> np.ndarray:
    """Return the integral of noise variance times trend of the log curvature along each column.

    :param x: standardised coordinates, shape ``(n, k)``.
    :param squared_gradients: squared norms of the gradient, shape ``(n,)``.
    :param noise_variances: shape ``(n,)``.
    :return: shape ``(n, k)``, zero at the smallest coordinate.
    """
    log_curvature = np.log(np.maximum(squared_gradients, np.finfo(float).tiny))
    log_curvature = log_curvature - log_curvature.mean()
    trend = (x * log_curvature[:, None]).mean(0)
    errors = (log_curvature[:, None] - trend * x).std(0) / np.sqrt(len(x))
    trend = np.sign(trend) * np.maximum(np.abs(trend) - _NUM_STANDARD_ERRORS_OF_TREND * errors, 0.0)
    order = np.argsort(x, axis=0)
    sorted_x, sorted_variances = np.take_along_axis(x, order, 0), noise_variances[order]
    midpoints = (sorted_variances[1:] + sorted_variances[:-1]) / 2.0
    integral = np.zeros_like(x)
    integral[1:] = np.cumsum(midpoints * np.diff(sorted_x, axis=0), 0)
    unsorted = np.empty_like(x)
    np.put_along_axis(unsorted, order, integral, 0)
    return trend * unsorted
