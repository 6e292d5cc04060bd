"""Latent sites with a value for each row of the subsampled plate."""

from numpyro_sgmcmc.posterior.locals.moves import LocalLatentsState, update_minibatch_locals
from numpyro_sgmcmc.posterior.locals.sites import LocalLatents, LocalValues, with_local_values

__all__ = [
    "LocalLatents",
    "LocalLatentsState",
    "LocalValues",
    "update_minibatch_locals",
    "with_local_values",
]
