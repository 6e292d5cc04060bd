"""Where the local values of the chains start."""

from __future__ import annotations

from typing import NamedTuple

from jax import Array

from numpyro_sgmcmc.posterior.locals.sites import LocalValues

__all__ = ["LocalLatentsInit"]


class LocalLatentsInit(NamedTuple):
    """
    - **values** - local values of all rows from several pilot chains, which the leading axis
      numbers.
    - **scale** - length scales of the local moves, shape ``(N, k)``.
    - **covariance_factor** - R with ``R R^T`` the covariance of the globals' posterior in whitened
      coordinates, shape ``(d, d)`` or ``(d,)``.
    """

    values: LocalValues
    scale: Array
    covariance_factor: Array
