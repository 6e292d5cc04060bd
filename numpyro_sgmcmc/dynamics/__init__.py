"""The SDEs of the kernels, as pure functions on flat arrays in preconditioned coordinates."""

from numpyro_sgmcmc.dynamics.base import Dynamics
from numpyro_sgmcmc.dynamics.general import Recipe
from numpyro_sgmcmc.dynamics.integrators import Flow, Integrator, Part
from numpyro_sgmcmc.dynamics.langevin import (
    Kinetics,
    MonomialGammaLangevin,
    OverdampedLangevin,
    UnderdampedLangevin,
)
from numpyro_sgmcmc.dynamics.riemannian import (
    RiemannianOverdampedLangevin,
    RiemannianUnderdampedLangevin,
    potential_metric,
)
from numpyro_sgmcmc.dynamics.thermostats import MonomialGammaThermostat, NoseHooverThermostat

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
