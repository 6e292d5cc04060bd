"""Stochastic-gradient MCMC for NumPyro: swap ``NUTS(model)`` for ``SGHMCSplit(model)``."""

from numpyro_sgmcmc.samplers import SGHMC, SGLD, SGHMCSplit

__all__ = ["SGHMC", "SGLD", "SGHMCSplit"]
__version__ = "0.1.0"
