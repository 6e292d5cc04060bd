"""What all chains share, found once before any of them starts."""

from numpyro_sgmcmc.adaptation.setup import Adaptation, Settings, adapt

__all__ = ["Adaptation", "Settings", "adapt"]
