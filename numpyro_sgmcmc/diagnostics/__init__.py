"""What can be known of a sampler's bias."""

from numpyro_sgmcmc.diagnostics.bias import BiasReport, bias_report
from numpyro_sgmcmc.diagnostics.invariance import check_invariance

__all__ = ["BiasReport", "bias_report", "check_invariance"]
