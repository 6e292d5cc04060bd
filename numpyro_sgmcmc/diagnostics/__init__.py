"""What can be known of a sampler's bias."""

from numpyro_sgmcmc.diagnostics.invariance import check_invariance

__all__ = ["check_invariance"]
