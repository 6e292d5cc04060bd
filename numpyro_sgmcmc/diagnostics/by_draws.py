"""Bias told by a run's draws and gradients at some of them, where the moments that the chains have
kept are those of another posterior: that of some sites given the others.

Stein's identity does not ask how draws have come about.
"""

from __future__ import annotations

import numpy as np

from numpyro_sgmcmc.diagnostics.at_draws import GradientsAtDraws
from numpyro_sgmcmc.diagnostics.estimates import SteinEstimates, estimate_bias_from_sums
from numpyro_sgmcmc.diagnostics.evidence import BiasDiagnostics, compute_sums_at_draws
from numpyro_sgmcmc.posterior.whitening import Preconditioner

__all__ = ["estimate_bias_from_draws"]

_MIN_DRAWS_PER_COORDINATE = 10  # that a covariance, or a regression, is worth something


def estimate_bias_from_draws(
    draws: np.ndarray, gradient_slice: slice, gradients: np.ndarray
) -> tuple[SteinEstimates, BiasDiagnostics]:
    """Bias of the draws.

    :param draws: all of them as flat positions, shape ``(chains, draws, d)``.
    :param gradient_slice: those of each chain at which gradients are known.
    :param gradients: of the potential there, unbiased; as many numbers.
    """
    known = GradientsAtDraws.from_arrays(draws[:, gradient_slice], gradients)
    everywhere = GradientsAtDraws.from_arrays(
        draws, _extrapolate_gradients(draws, gradient_slice, known)
    )
    estimates = estimate_bias_from_sums(
        *compute_sums_at_draws(everywhere, _fit_preconditioner(draws))
    )
    return estimates, BiasDiagnostics.from_draws(draws, estimates.bias_estimate, known)


def _extrapolate_gradients(
    draws: np.ndarray, gradient_slice: slice, gradients_at_draws: GradientsAtDraws
) -> np.ndarray:
    """Gradients at all draws, whose sums are unbiased: by a regression on the position, and where
    they are known what that misses, as often as there are draws for each of these.

    So the chains' means and sds are those of all draws. Where too few are known for a regression
    what it misses is everything.
    """
    dim = draws.shape[-1]
    q, g = (
        gradients_at_draws.positions.reshape(-1, dim),
        gradients_at_draws.gradients.reshape(-1, dim),
    )
    found = np.zeros_like(draws)
    if len(q) >= _MIN_DRAWS_PER_COORDINATE * dim:
        centre = q.mean(0)
        scale = np.where(q.std(0) > 0.0, q.std(0), 1.0)
        slope = np.linalg.lstsq((q - centre) / scale, g - g.mean(0), rcond=None)[0]
        found = (draws - centre) / scale @ slope + g.mean(0)
    times = draws.shape[1] / gradients_at_draws.positions.shape[1]
    found[:, gradient_slice] += times * (gradients_at_draws.gradients - found[:, gradient_slice])
    return found


def _fit_preconditioner(draws: np.ndarray) -> Preconditioner:
    """Coordinates that are white for the draws, as long as these tell a covariance."""
    flat = draws.reshape(-1, draws.shape[-1])
    anchor, sds = flat.mean(0), flat.std(0)
    factor = np.where(sds > 0.0, sds, 1.0)
    if len(flat) < _MIN_DRAWS_PER_COORDINATE * flat.shape[1]:
        return Preconditioner(anchor, factor)
    correlation = np.atleast_2d(np.cov((flat - anchor) / factor, rowvar=False))
    try:
        return Preconditioner(anchor, factor[:, None] * np.linalg.cholesky(correlation))
    except np.linalg.LinAlgError:  # chains that are stuck
        return Preconditioner(anchor, factor)
