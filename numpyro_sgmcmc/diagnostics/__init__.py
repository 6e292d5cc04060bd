"""What can be known of a sampler's bias."""

from numpyro_sgmcmc.diagnostics.bias import bias_report
from numpyro_sgmcmc.diagnostics.calibration import bias_corrected_samples
from numpyro_sgmcmc.diagnostics.distances import kolmogorov_distance, stein_discrepancy
from numpyro_sgmcmc.diagnostics.efficiency import ess_per_gradient
from numpyro_sgmcmc.diagnostics.explain import WarmupReport, warmup_report
from numpyro_sgmcmc.diagnostics.invariance import check_invariance
from numpyro_sgmcmc.diagnostics.likelihood import log_likelihood
from numpyro_sgmcmc.diagnostics.plots import plot_bias
from numpyro_sgmcmc.diagnostics.predictive import (
    FunctionSummary,
    PredictiveSummary,
    predictive_summary,
)
from numpyro_sgmcmc.diagnostics.refinement import Refinement, compare_with_finer
from numpyro_sgmcmc.diagnostics.replicates import posterior_predictive
from numpyro_sgmcmc.diagnostics.report import BiasReport
from numpyro_sgmcmc.diagnostics.site_bias import SiteBias
from numpyro_sgmcmc.diagnostics.speed_plot import plot_speed
from numpyro_sgmcmc.diagnostics.summary import print_summary
from numpyro_sgmcmc.diagnostics.to_arviz import LooDifference, LooEstimate, loo, to_arviz
from numpyro_sgmcmc.diagnostics.warmup_plot import plot_warmup

__all__ = [
    "BiasReport",
    "FunctionSummary",
    "LooDifference",
    "LooEstimate",
    "PredictiveSummary",
    "Refinement",
    "SiteBias",
    "WarmupReport",
    "bias_corrected_samples",
    "bias_report",
    "check_invariance",
    "compare_with_finer",
    "ess_per_gradient",
    "kolmogorov_distance",
    "log_likelihood",
    "loo",
    "plot_bias",
    "plot_speed",
    "plot_warmup",
    "posterior_predictive",
    "predictive_summary",
    "print_summary",
    "stein_discrepancy",
    "to_arviz",
    "warmup_report",
]
