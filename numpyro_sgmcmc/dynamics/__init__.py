"""The SDEs, each written once, as pure functions on flat whitened arrays."""

from numpyro_sgmcmc.dynamics.base import Dynamics
from numpyro_sgmcmc.dynamics.integrators import Flow, Part, Scheme
from numpyro_sgmcmc.dynamics.kinetics import Kinetics
from numpyro_sgmcmc.dynamics.monomial_gamma import MonomialGamma, MonomialGammaLangevin
from numpyro_sgmcmc.dynamics.nose_hoover import NoseHoover
from numpyro_sgmcmc.dynamics.overdamped import Overdamped
from numpyro_sgmcmc.dynamics.recipe import Recipe
from numpyro_sgmcmc.dynamics.riemannian import Riemannian, RiemannianLangevin, potential_metric
from numpyro_sgmcmc.dynamics.underdamped import Underdamped

__all__ = [
    "Dynamics",
    "Flow",
    "Kinetics",
    "MonomialGamma",
    "MonomialGammaLangevin",
    "NoseHoover",
    "Overdamped",
    "Part",
    "Recipe",
    "Riemannian",
    "RiemannianLangevin",
    "Scheme",
    "Underdamped",
    "potential_metric",
]
