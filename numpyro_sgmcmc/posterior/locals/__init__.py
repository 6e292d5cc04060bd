"""Latent sites with a value for each row of the subsampled plate."""

from numpyro_sgmcmc.posterior.locals.moves import LocalState, visit
from numpyro_sgmcmc.posterior.locals.sites import AllRows, LocalSites, with_locals

__all__ = ["AllRows", "LocalSites", "LocalState", "visit", "with_locals"]
