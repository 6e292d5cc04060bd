"""The SDEs, each written once, as pure functions on flat whitened arrays."""

from numpyro_sgmcmc.dynamics.base import Dynamics
from numpyro_sgmcmc.dynamics.integrators import Flow, Integrator, Part
from numpyro_sgmcmc.dynamics.kinetics import Kinetics
from numpyro_sgmcmc.dynamics.monomial_gamma import MonomialGammaLangevin, MonomialGammaThermostat
from numpyro_sgmcmc.dynamics.nose_hoover import NoseHooverThermostat
from numpyro_sgmcmc.dynamics.overdamped import OverdampedLangevin
from numpyro_sgmcmc.dynamics.recipe import Recipe
from numpyro_sgmcmc.dynamics.riemannian import (
    RiemannianOverdampedLangevin,
    RiemannianUnderdampedLangevin,
    potential_metric,
)
from numpyro_sgmcmc.dynamics.underdamped import UnderdampedLangevin

__all__ = [
    "Dynamics",
    "Flow",
    "Integrator",
    "Kinetics",
    "MonomialGammaLangevin",
    "MonomialGammaThermostat",
    "NoseHooverThermostat",
    "OverdampedLangevin",
    "Part",
    "Recipe",
    "RiemannianOverdampedLangevin",
    "RiemannianUnderdampedLangevin",
    "UnderdampedLangevin",
    "potential_metric",
]
