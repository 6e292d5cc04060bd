"""A report in a few sentences: what is wrong, and what would cure it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from numpyro_sgmcmc.diagnostics.site_bias import MEAN_TOLERANCE, SD_TOLERANCE, SiteBias

if TYPE_CHECKING:
    from numpyro_sgmcmc.diagnostics.report import BiasReport

__all__ = ["FAR", "sentence", "verdict_of"]

FAR = 100.0
"""Sds: beyond, a number would say no more."""

_CHANCE = 3.0  # standard errors that the number of draws may explain
_MOST_SENTENCES = 3


def verdict_of(report: BiasReport) -> str:
    """What is wrong, and what would cure it."""
    sites = report.sites
    biased = [s for s in sites if s.verdict == "biased"]
    unclear = [s for s in sites if s.verdict == "unclear"]
    apart = [s for s in sites if s.verdict == "apart"]
    said = []
    if report.diverges_often:
        said.append(
            f"{report.divergences} of {report.num_draws} iterations diverged: take a smaller "
            "step_size."
        )
    if apart:
        worst = max(apart, key=lambda s: s.r_hat)
        said.append(
            f"Chains disagree on {_names(apart)} (R-hat up to {worst.r_hat:.2f}), and what the "
            "report says of them means little: run longer; chains that still disagree then "
            "are in different modes."
        )
    said += [sentence(s) for s in biased[:_MOST_SENTENCES]]
    if (more := len(biased) - _MOST_SENTENCES) > 0:
        said.append(f"{more} more site{'s are' if more > 1 else ' is'} biased.")
    if biased:
        said.append(_cure(report, biased))
    if unclear:
        means = "more draws" if report.full_data else "more draws, or full_data=True,"
        said.append(f"The error bars of {_names(unclear)} are too wide to tell: {means} would.")
    if not said:
        said.append("Means and sds are right within the error bars.")
    return " ".join(said)


def sentence(s: SiteBias) -> str:
    """What is wrong with one site, by how much."""
    found = []
    if not abs(s.sd_inflation) < FAR:
        found.append(f"sds of `{s.site}` are too far off to be measured")
    elif abs(s.sd_inflation) > max(SD_TOLERANCE, 2.0 * s.sd_inflation_error):
        side = "wide" if s.sd_inflation > 0 else "narrow"
        found.append(
            f"sds of `{s.site}` are up to {100 * abs(s.sd_inflation):.0f} % ± "
            f"{100 * s.sd_inflation_error:.0f} % too {side}"
        )
    if not abs(s.mean_shift) < FAR:
        found.append(f"means of `{s.site}` are more than {FAR:.0f} sds off")
    elif abs(s.mean_shift) > max(MEAN_TOLERANCE, 2.0 * s.mean_shift_error):
        side = "high" if s.mean_shift > 0 else "low"
        found.append(
            f"means of `{s.site}` are up to {abs(s.mean_shift):.2f} ± "
            f"{s.mean_shift_error:.2f} sds too {side}"
        )
    return " and ".join(found)[:1].upper() + " and ".join(found)[1:] + "."


def _cure(report: BiasReport, biased: list[SiteBias]) -> str:
    """What to change, and what it costs."""
    halve = f"halve the step size (to {report.step_size / 2:.2g}; twice the cost of a draw)"
    # Noise widens; what is too narrow, or off in the mean alone, is not its doing.
    excess = max(s.sd_inflation for s in biased)
    if excess > SD_TOLERANCE and report.noise_inflation > 0.5 * excess:
        return (
            f"Gradient noise explains it: double the subsample_size, or {halve}; either about "
            "halves the excess."
        )
    if _is_chance(report, biased):
        return (
            f"So few draws (as good as {report.num_independent:.0f} independent ones at most) "
            "may explain it: draw more."
        )
    if excess > SD_TOLERANCE and report.noise_inflation > 0.2 * excess:
        return f"Gradient noise explains a part: {halve}, or double the subsample_size."
    if np.isnan(report.noise_inflation):
        return (
            f"Either the step or the gradient's noise, which was not measured: {halve}, or double "
            "the subsample_size."
        )
    return (
        f"Gradient noise does not explain it, so it is the step: {halve}, and the error "
        f"falls to about 1/{2**report.order}."
    )


def _is_chance(report: BiasReport, biased: list[SiteBias]) -> bool:
    """Whether the number of draws explains all of it."""
    least = np.sqrt([1.0, 0.5]) / np.sqrt(report.num_independent)
    for s in biased:
        where = np.array([site == s.site for site, _ in report.names])
        errors = np.fmax(report.estimates.chance[:, where].max(1), least)
        if not (np.abs([s.mean_shift, s.sd_inflation]) < _CHANCE * errors).all():
            return False
    return True


def _names(sites: list[SiteBias]) -> str:
    return ", ".join(f"`{s.site}`" for s in sites[:3]) + ", ..." * (len(sites) > 3)
