"""What all chains share, found once before any of them starts."""

from numpyro_sgmcmc.adaptation.local_setup import adapt_with_locals
from numpyro_sgmcmc.adaptation.noise import NO_NOISE, Noise
from numpyro_sgmcmc.adaptation.settings import Adaptation, Settings
from numpyro_sgmcmc.adaptation.setup import adapt
from numpyro_sgmcmc.adaptation.surface import Surface

__all__ = ["NO_NOISE", "Adaptation", "Noise", "Settings", "Surface", "adapt", "adapt_with_locals"]
