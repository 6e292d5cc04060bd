"""Diagnostics of finished runs: bias, the warm-up's choices, predictions, distances and plots."""

from numpyro_sgmcmc.diagnostics.arviz import LooDifference, LooEstimate, loo, to_arviz
from numpyro_sgmcmc.diagnostics.bias_report import (
    BiasReport,
    bias_corrected_samples,
    bias_report,
    print_summary,
)
from numpyro_sgmcmc.diagnostics.diagnosis import Diagnosis, SiteBias
from numpyro_sgmcmc.diagnostics.distances import kolmogorov_distance, stein_discrepancy
from numpyro_sgmcmc.diagnostics.invariance import check_invariance
from numpyro_sgmcmc.diagnostics.plots import plot_bias, plot_warmup
from numpyro_sgmcmc.diagnostics.predictive import (
    FunctionSummary,
    PredictiveSummary,
    log_likelihood,
    posterior_predictive,
    predictive_summary,
)
from numpyro_sgmcmc.diagnostics.run_data import ess_per_gradient
from numpyro_sgmcmc.diagnostics.running_moments import RunningMoments, running_moments
from numpyro_sgmcmc.diagnostics.special_runs import Refinement, compare_with_finer
from numpyro_sgmcmc.diagnostics.subsample_size import (
    SubsampleSizeSuggestion,
    suggest_subsample_size,
)
from numpyro_sgmcmc.diagnostics.warmup_report import WarmupReport, warmup_report

__all__ = [
    "BiasReport",
    "Diagnosis",
    "FunctionSummary",
    "LooDifference",
    "LooEstimate",
    "PredictiveSummary",
    "Refinement",
    "RunningMoments",
    "SiteBias",
    "SubsampleSizeSuggestion",
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
    "plot_warmup",
    "posterior_predictive",
    "predictive_summary",
    "print_summary",
    "running_moments",
    "stein_discrepancy",
    "suggest_subsample_size",
    "to_arviz",
    "warmup_report",
]
