"""Latent sites with a value for each row of the subsampled plate."""

from numpyro_sgmcmc.posterior.locals.moves import LocalState, renew_minibatch
from numpyro_sgmcmc.posterior.locals.sites import AllRows, LocalSites, with_locals

__all__ = ["AllRows", "LocalSites", "LocalState", "renew_minibatch", "with_locals"]
