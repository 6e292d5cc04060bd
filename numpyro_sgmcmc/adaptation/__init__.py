"""What all chains share, found once before any of them starts."""

from numpyro_sgmcmc.adaptation.setup import Adaptation, Settings, adapt
from numpyro_sgmcmc.adaptation.surface import Surface

__all__ = ["Adaptation", "Settings", "Surface", "adapt"]
