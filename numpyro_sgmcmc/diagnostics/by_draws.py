"""Bias told by a run's draws and gradients at some of them, where the moments that the chains have
kept are those of another posterior: that of some sites given the others.

Stein's identity does not ask how draws have come about.
"""

from __future__ import annotations

import numpy as np

from numpyro_sgmcmc.diagnostics.at_draws import LookedAt
from numpyro_sgmcmc.diagnostics.estimates import Estimates, estimate
from numpyro_sgmcmc.diagnostics.evidence import Evidence, sums_of
from numpyro_sgmcmc.posterior.whitening import Whitening

__all__ = ["told_by_draws"]

_DRAWS_A_COORDINATE = 10  # that a covariance, or a regression, is worth something


def told_by_draws(
    draws: np.ndarray, some: slice, gradients: np.ndarray
) -> tuple[Estimates, Evidence]:
    """Bias of the draws.

    :param draws: all of them as flat positions, shape ``(chains, draws, d)``.
    :param some: those of each chain at which gradients are known.
    :param gradients: of the potential there, unbiased; as many numbers.
    """
    known = LookedAt.of(draws[:, some], gradients)
    everywhere = LookedAt.of(draws, _at_all(draws, some, known))
    estimates = estimate(*sums_of(everywhere, _white_for(draws)))
    return estimates, Evidence.of_draws(draws, estimates.witness, known)


def _at_all(draws: np.ndarray, some: slice, known: LookedAt) -> np.ndarray:
    """Gradients at all draws, whose sums are unbiased: by a regression on the position, and where
    they are known what that misses, as often as there are draws for each of these.

    So the chains' means and sds are those of all draws. Where too few are known for a regression
    what it misses is everything.
    """
    dim = draws.shape[-1]
    q, g = known.positions.reshape(-1, dim), known.gradients.reshape(-1, dim)
    found = np.zeros_like(draws)
    if len(q) >= _DRAWS_A_COORDINATE * dim:
        centre = q.mean(0)
        scale = np.where(q.std(0) > 0.0, q.std(0), 1.0)
        slope = np.linalg.lstsq((q - centre) / scale, g - g.mean(0), rcond=None)[0]
        found = (draws - centre) / scale @ slope + g.mean(0)
    times = draws.shape[1] / known.positions.shape[1]
    found[:, some] += times * (known.gradients - found[:, some])
    return found


def _white_for(draws: np.ndarray) -> Whitening:
    """Coordinates that are white for the draws, as long as these tell a covariance."""
    flat = draws.reshape(-1, draws.shape[-1])
    anchor, sds = flat.mean(0), flat.std(0)
    factor = np.where(sds > 0.0, sds, 1.0)
    if len(flat) < _DRAWS_A_COORDINATE * flat.shape[1]:
        return Whitening(anchor, factor)
    correlation = np.atleast_2d(np.cov((flat - anchor) / factor, rowvar=False))
    try:
        return Whitening(anchor, factor[:, None] * np.linalg.cholesky(correlation))
    except np.linalg.LinAlgError:  # chains that are stuck
        return Whitening(anchor, factor)
