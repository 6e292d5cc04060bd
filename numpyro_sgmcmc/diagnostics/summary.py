"""NumPyro's summary, and what the run says of its bias below it."""

from __future__ import annotations

from numpyro.infer import MCMC

from numpyro_sgmcmc import checks
from numpyro_sgmcmc.diagnostics.bias import bias_report

__all__ = ["print_summary"]


def print_summary(mcmc: MCMC, prob: float = 0.9, exclude_deterministic: bool = True) -> None:
    """``mcmc.print_summary()`` and one line on bias; the verdict as well where there is something.

    :param mcmc: a run of one of this package's kernels.
    :param prob: probability mass of the intervals, from 0 to 1. Default 0.9.
    :param exclude_deterministic: whether to leave deterministic sites out. Default True.
    :raises ValueError: for a run of another kernel, or before a run.
    """
    report = bias_report(mcmc)
    checks.between("prob", prob, 0.0, 1.0)
    mcmc.print_summary(prob, exclude_deterministic)
    print(report.line)
    if not report.is_fine:
        print(report.verdict)
