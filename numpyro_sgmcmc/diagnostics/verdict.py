"""A report in a few sentences: what is wrong, and what would cure it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from numpyro_sgmcmc.diagnostics.dependence import shown_r_hat
from numpyro_sgmcmc.diagnostics.site_bias import (
    FEWEST_DRAWS,
    MEAN_TOLERANCE,
    SD_TOLERANCE,
    SMALL_R_HAT,
    SiteBias,
)

if TYPE_CHECKING:
    from numpyro_sgmcmc.diagnostics.report import BiasReport

__all__ = ["FAR", "sentence", "verdict_of"]

FAR = 100.0
"""Sds: beyond, a number would say no more."""

_CHANCE = 3.0  # standard errors that the number of draws may explain
_MOST_SENTENCES = 3
_MANY_TIMES = 5.0  # by which noise is too large: nobody halves so often


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
        meaning = (
            "as they start in different modes: shifts and inflations are within each, and their "
            "means and sds together those of no posterior."
            if any(finding.kind == "visited" for finding in report.findings)
            else "and what the report says of them means little: run longer; chains that still "
            "disagree then are in different modes, or turn back before a neck, such as a scale "
            "near zero."
        )
        r_hat = shown_r_hat(worst.r_hat)
        said.append(f"Chains disagree on {_names(apart)} (R-hat up to {r_hat}), {meaning}")
    said += [finding.sentence for finding in report.findings]
    said += [_of_neck(report, site) for site in _sites_with_necks(report)]
    measured = [s for s in biased if sentence(s)]
    said += [sentence(s) for s in measured[:_MOST_SENTENCES]]
    if (more := len(measured) - _MOST_SENTENCES) > 0:
        said.append(f"{more} more site{'s are' if more > 1 else ' is'} biased.")
    if measured:
        said.append(_cure(report, measured))
    said += _of_unclear(report, unclear)
    if not said:
        said.append(_fine(report))
    return " ".join(said)


def _fine(report: BiasReport) -> str:
    """That all is right, and what that rests on."""
    rests_on = []
    if np.isfinite(report.r_hat).any():
        rests_on.append(f"R-hat is at most {shown_r_hat(np.nanmax(report.r_hat), 3)}")
    if np.isfinite(report.ess).any():
        rests_on.append(f"the smallest effective sample size is {np.nanmin(report.ess):.0f}")
    if num := report.evidence.num_looked_at:
        rests_on.append(f"gradients at {num} draws tell the same")
    told = ", and ".join([", ".join(rests_on[:-1])] * (len(rests_on) > 1) + rests_on[-1:])
    told = f": {told}" if told else ""
    return (
        f"Means and sds are right within the error bars{told}. A mode that no start has found "
        "would stay unseen."
    )


def _of_unclear(report: BiasReport, unclear: list[SiteBias]) -> list[str]:
    """Why of some sites one cannot tell."""
    said = []
    few = [s for s in unclear if s.ess < FEWEST_DRAWS]
    unsettled = [s for s in unclear if s.r_hat > SMALL_R_HAT and s not in few]
    if few:
        worst = min(few, key=lambda s: s.ess)
        said.append(
            f"The draws of {_names(few)} are as good as {worst.ess:.0f} independent ones, which "
            "is too few to tell: draw more."
        )
    if unsettled:
        worst = max(unsettled, key=lambda s: s.r_hat)
        said.append(
            f"Chains do not quite agree on {_names(unsettled)} (R-hat up to "
            f"{shown_r_hat(worst.r_hat)}): draw more."
        )
    narrow = _sites_with_necks(report)
    if rest := [s for s in unclear if s not in few + unsettled and s.site not in narrow]:
        widens = ""
        if report.noise_inflation > SD_TOLERANCE:
            widens = (
                f" Gradient noise is predicted to widen sds by up to "
                f"{100 * report.noise_inflation:.0f} %: a larger subsample_size or a shorter "
                "step_size would spare that."
            )
        told = f"The error bars of {_names(rest)} are too wide to tell: more draws would."
        said.append(told + widens)
    return said


def _sites_with_necks(report: BiasReport) -> list[str]:
    return list(dict.fromkeys(report.names[n.coordinate][0] for n in report.evidence.necks))


def _of_neck(report: BiasReport, site: str) -> str:
    """Where chains cannot enter, and what helps."""
    found = [n for n in report.evidence.necks if report.names[n.coordinate][0] == site]
    worst = max(found, key=lambda n: n.mass)
    name = report.names[worst.coordinate][1]
    if worst.is_everywhere:  # no neck need be there
        return (
            f"The step is too long for most of the posterior, and chains turn back at the "
            f"{worst.side} end of `{name}`: take a shorter step_size."
        )
    # A scale near zero pinches what it scales; a large one, what is drawn before it is scaled.
    form = "If it is a scale, write what it scales in "
    if worst.side == "low":
        form += "non-centred form (numpyro.infer.reparam.LocScaleReparam(0))"
    else:
        form += "centred form"
    turn = "chains turn back" if worst.is_clear else "chains may turn back"
    return (
        f"At the {worst.side} end of `{name}` the posterior is too narrow for the step: {turn} "
        f"where about {100 * worst.mass:.0f} % of its mass or more still lies. {form}, give it a "
        "prior that keeps it off that end, or take a shorter step_size."
    )


def sentence(s: SiteBias) -> str:
    """What is wrong with one site, by how much; empty where that is not in its moments."""
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
    told = " and ".join(found)
    return f"{told[0].upper()}{told[1:]}." if told else ""


def _cure(report: BiasReport, biased: list[SiteBias]) -> str:
    """What to change, and what it costs."""
    kinds = {finding.kind for finding in report.findings}
    if "hidden" in kinds:
        return "No step size and no minibatch mends what the gradient does not know."
    if "coupled" in kinds:
        return "No step size mends rows that do not add up."
    halve = f"halve the step size (to {report.step_size / 2:.2g}; twice the cost of a draw)"
    if np.isnan(report.step_size):  # of several blocks
        halve = "halve the step size of each block (twice the cost of a draw)"
    # Noise widens; what is too narrow, or off in the mean alone, is not its doing.
    excess = max(s.sd_inflation for s in biased)
    if excess > SD_TOLERANCE and report.noise_inflation > 0.5 * excess:
        return _cure_of_noise(excess, halve)
    if _is_moved_by_noise(report, biased):
        return (
            "Gradient noise explains it, which widens all that these have to do with, and no "
            f"gradient shows it: double the subsample_size, or {halve}; either about halves it."
        )
    if report.clip_gradient is not None and excess > SD_TOLERANCE:
        return (
            f"Gradients are cut to a norm of {report.clip_gradient:g}, which widens sds where it "
            "shortens them often: double `clip_gradient`, or leave it out."
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
    own = (
        " If it does not, the scheme, which is not one of the package's, is wrong: "
        "diagnostics.check_invariance tells without sampling."
    )
    return (
        f"Gradient noise does not explain it, so it is the step: {halve}, and the error "
        f"falls to about 1/{2**report.order}." + own * report.has_own_scheme
    )


def _cure_of_noise(excess: float, halve: str) -> str:
    """What to change where noise widens sds, which adds to the variance in proportion.

    :param excess: of the sds.
    """
    times = (np.square(1.0 + excess) - 1.0) / (np.square(1.0 + SD_TOLERANCE) - 1.0)
    if times < _MANY_TIMES:
        return (
            f"Gradient noise explains it: double the subsample_size, or {halve}; either about "
            "halves the excess."
        )
    few = float(f"{times:.1g}")
    return (
        "Gradient noise explains it: leave out `step_size` and `gradient` if they are yours, or "
        f"take a subsample_size some {few:,.0f} times as large or a step size as much smaller; "
        "the excess of the variance falls in proportion."
    )


def _is_moved_by_noise(report: BiasReport, biased: list[SiteBias]) -> bool:
    """Whether noise is predicted to have moved the means at least half as far as they are off."""
    moved = report.evidence.by_noise
    if not len(moved) or report.is_of_functions:
        return False
    off = [s for s in biased if abs(s.mean_shift) > MEAN_TOLERANCE]
    by_site = {s.site: 0.0 for s in off}
    for (site, _), by_noise in zip(report.names, np.abs(moved), strict=True):
        if site in by_site:
            by_site[site] = max(by_site[site], float(by_noise))
    return bool(off) and all(by_site[s.site] > 0.5 * abs(s.mean_shift) for s in off)


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
