"""The SDEs, each written once, as pure functions on flat whitened arrays."""

from numpyro_sgmcmc.dynamics.base import Dynamics
from numpyro_sgmcmc.dynamics.overdamped import Overdamped
from numpyro_sgmcmc.dynamics.underdamped import Underdamped

__all__ = ["Dynamics", "Overdamped", "Underdamped"]
