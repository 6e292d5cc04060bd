"""A report as HTML, for notebooks.

The worst coordinate of one site, and what is said of it.

A report in a few sentences: what is wrong, and what would cure it.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from numpyro_sgmcmc.diagnostics.run_data import ConvergenceStats
from numpyro_sgmcmc.diagnostics.stein_estimates import BiasEstimate, Estimate

if TYPE_CHECKING:
    from numpyro_sgmcmc.diagnostics.bias_report import BiasReport

from numpyro_sgmcmc.errors import ModelWarningKind

__all__ = [
    "DIAGNOSES",
    "MAX_OK_R_HAT",
    "MAX_REPORTED_BIAS",
    "MEAN_BIAS_TOLERANCE",
    "MIN_OK_ESS",
    "SD_INFLATION_TOLERANCE",
    "SiteBias",
    "classify_bias",
    "describe_report",
    "describe_site_bias",
    "format_html_table",
    "format_r_hat",
]


def format_html_table(
    header: Sequence[str], table_rows: Iterable[Sequence[str]], notes: Iterable[str] = ()
) -> str:
    """A table with paragraphs below it; all text is escaped."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in table_rows
    )
    below = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"


_MAX_SHOWN_R_HAT = 100.0  # an R-hat at which chains are lost


def format_r_hat(r_hat: float, digits: int = 2) -> str:
    """As a number where it is one that tells something."""
    if np.isnan(r_hat):
        return "-"
    return f"{r_hat:.{digits}f}" if r_hat < _MAX_SHOWN_R_HAT else f">{_MAX_SHOWN_R_HAT:.0f}"


MEAN_BIAS_TOLERANCE = 0.1
"""Shift of a mean, in posterior sds, that the report lets pass."""


SD_INFLATION_TOLERANCE = 0.05
"""Relative error of an sd that the report lets pass."""


_MEAN_BIAS_LIMITS = (
    MEAN_BIAS_TOLERANCE,
    0.2,
)  # and what error bars must exclude for a site to be fine


_SD_INFLATION_LIMITS = SD_INFLATION_TOLERANCE, 0.15


DIAGNOSES = ("not converged", "biased", "multimodal", "inconclusive", "ok")
"""The worst first."""


MAX_OK_R_HAT = 1.05
"""Above, nothing is fine."""


_MAX_CONVERGED_R_HAT = 1.1  # above, chains are apart


MIN_OK_ESS = 100
"""Effective ones: with fewer nothing is fine."""


class SiteBias(NamedTuple):
    """The worst coordinate of one site, in unconstrained space.

    - **site** - name.
    - **size** - number of coordinates.
    - **mean_bias** - chain's mean minus the posterior's, in posterior sds.
    - **mean_bias_error** - its standard error.
    - **sd_inflation** - chain's sd over the posterior's, minus one.
    - **sd_inflation_error** - its standard error.
    - **r_hat** - how far the chains disagree, 1 where they agree; NaN for a single chain.
    - **ess** - smallest effective sample size; NaN where the draws are not there.
    - **diagnosis** - ``"ok"``, ``"biased"``, ``"inconclusive"`` (error bars are too wide, R-hat is above
      1.05 or there are less than 100 effective draws), ``"multimodal"`` (the warm-up has found
      others), or ``"not converged"``: R-hat is above 1.1.
    """

    site: str
    size: int
    mean_bias: float
    mean_bias_error: float
    sd_inflation: float
    sd_inflation_error: float
    r_hat: float
    ess: float
    diagnosis: str

    @classmethod
    def from_coordinates(
        cls,
        site: str,
        indices: np.ndarray,
        bias_estimates: Sequence[BiasEstimate],
        convergence: ConvergenceStats,
        reported_diagnosis: str | None = None,
    ) -> SiteBias:
        """That of the coordinates ``indices``.

        :param bias_estimates: of all coordinates. The first must be sure for a site to be fine, the
            others are heard where they are sure that it is not.
        :param convergence: of all coordinates.
        :param reported_diagnosis: the verdict where something else has told one.
        """
        # Two-sided at 95 % for the worst of so many (Bonferroni).
        z = NormalDist().inv_cdf(1.0 - 0.025 / len(indices))
        shift, of_shift = _combine_estimates(
            [w.mean_bias for w in bias_estimates], indices, z, _MEAN_BIAS_LIMITS
        )
        inflation, of_inflation = _combine_estimates(
            [w.sd_inflation for w in bias_estimates], indices, z, _SD_INFLATION_LIMITS
        )
        verdicts = {of_shift, of_inflation}
        r_hat, ess = (
            float(np.fmax.reduce(convergence.r_hat[indices])),
            float(np.fmin.reduce(convergence.ess[indices])),
        )
        if reported_diagnosis is not None:
            verdicts.add(reported_diagnosis)
        if r_hat > MAX_OK_R_HAT:
            verdicts.add("not converged" if r_hat > _MAX_CONVERGED_R_HAT else "inconclusive")
        if ess < MIN_OK_ESS:
            verdicts.add("inconclusive")
        verdict = next(v for v in DIAGNOSES if v in verdicts)
        return cls(site, len(indices), *shift, *inflation, r_hat, ess, verdict)


def _combine_estimates(
    candidates: Sequence[Estimate], indices: np.ndarray, z: float, limits: tuple[float, float]
) -> tuple[tuple[float, float], str]:
    """The worst of the first witness, or of one that is sure of a bias; and the verdict."""
    verdicts = [classify_bias(f, indices, z, *limits) for f in candidates]
    first = verdicts.index("biased") if "biased" in verdicts else 0
    return _find_worst_coordinate(candidates[first], indices), verdicts[first]


def _find_worst_coordinate(bias: Estimate, indices: np.ndarray) -> tuple[float, float]:
    """The estimate that is furthest from zero beyond twice its error."""
    value, error = bias.value[indices], bias.error[indices]
    clear = np.abs(value) - 2.0 * np.where(np.isfinite(error), error, 0.0)
    k = np.argmax(np.where(np.isfinite(value), clear, np.inf))
    return float(value[k]), float(error[k])


def classify_bias(
    bias: Estimate, indices: np.ndarray, z: float, tolerance: float, detection_limit: float
) -> str:
    """Whether any coordinate is clearly beyond the tolerance, or may be far beyond it."""
    size, slack = np.abs(bias.value[indices]), z * bias.error[indices]
    if (size - slack > tolerance).any():
        return "biased"
    return "ok" if (size + slack < detection_limit).all() else "inconclusive"


MAX_REPORTED_BIAS = 100.0
"""Sds: beyond, a number would say no more."""


_MAX_MONTE_CARLO_Z = 3.0  # standard errors that the number of draws may explain


_MAX_DESCRIBED_SITES = 3


_MIN_LARGE_NOISE_RATIO = 5.0  # by which noise is too large: nobody halves so often


def describe_report(report: BiasReport) -> str:
    """What is wrong, and what would cure it."""
    sites = report.sites
    biased = [s for s in sites if s.diagnosis == "biased"]
    unclear = [s for s in sites if s.diagnosis == "inconclusive"]
    apart = [s for s in sites if s.diagnosis == "not converged"]
    said = []
    if report.has_many_divergences:
        said.append(
            f"{report.num_divergences} of {report.num_draws} iterations diverged: take a smaller "
            "step_size."
        )
    if apart:
        worst = max(apart, key=lambda s: s.r_hat)
        meaning = (
            "as they start in different modes: shifts and inflations are within each, and their "
            "means and sds together those of no posterior."
            if any(
                finding.kind == ModelWarningKind.MODES_VISITED for finding in report.model_warnings
            )
            else "and what the report says of them means little: run longer; chains that still "
            "disagree then are in different modes, or turn back before a neck, such as a scale "
            "near zero."
        )
        r_hat = format_r_hat(worst.r_hat)
        said.append(
            f"Chains disagree on {_list_site_names(apart)} (R-hat up to {r_hat}), {meaning}"
        )
    said += [finding.message for finding in report.model_warnings]
    said += [_describe_funnel_neck(report, site) for site in _get_sites_with_necks(report)]
    measured = [s for s in biased if describe_site_bias(s)]
    said += [describe_site_bias(s) for s in measured[:_MAX_DESCRIBED_SITES]]
    if (more := len(measured) - _MAX_DESCRIBED_SITES) > 0:
        said.append(f"{more} more site{'s are' if more > 1 else ' is'} biased.")
    if measured:
        said.append(_recommend_remedy(report, measured))
    said += _describe_inconclusive(report, unclear)
    if not said:
        said.append(_describe_ok(report))
    return " ".join(said)


def _describe_ok(report: BiasReport) -> str:
    """That all is right, and what that rests on."""
    rests_on = []
    if np.isfinite(report.r_hat).any():
        rests_on.append(f"R-hat is at most {format_r_hat(np.nanmax(report.r_hat), 3)}")
    if np.isfinite(report.ess).any():
        rests_on.append(f"the smallest effective sample size is {np.nanmin(report.ess):.0f}")
    if num := report.bias_diagnostics.num_gradient_draws:
        rests_on.append(f"gradients at {num} draws tell the same")
    told = ", and ".join([", ".join(rests_on[:-1])] * (len(rests_on) > 1) + rests_on[-1:])
    told = f": {told}" if told else ""
    return (
        f"Means and sds are right within the error bars{told}. A mode that no start has found "
        "would stay unseen."
    )


def _describe_inconclusive(report: BiasReport, inconclusive_sites: list[SiteBias]) -> list[str]:
    """Why of some sites one cannot tell."""
    said = []
    few = [s for s in inconclusive_sites if s.ess < MIN_OK_ESS]
    unsettled = [s for s in inconclusive_sites if s.r_hat > MAX_OK_R_HAT and s not in few]
    if few:
        worst = min(few, key=lambda s: s.ess)
        said.append(
            f"The draws of {_list_site_names(few)} are as good as {worst.ess:.0f} independent ones, which "
            "is too few to tell: draw more."
        )
    if unsettled:
        worst = max(unsettled, key=lambda s: s.r_hat)
        said.append(
            f"Chains do not quite agree on {_list_site_names(unsettled)} (R-hat up to "
            f"{format_r_hat(worst.r_hat)}): draw more."
        )
    narrow = _get_sites_with_necks(report)
    if rest := [s for s in inconclusive_sites if s not in few + unsettled and s.site not in narrow]:
        widens = ""
        if report.noise_sd_inflation > SD_INFLATION_TOLERANCE:
            widens = (
                f" Gradient noise is predicted to widen sds by up to "
                f"{100 * report.noise_sd_inflation:.0f} %: a larger subsample_size or a shorter "
                "step_size would spare that."
            )
        told = f"The error bars of {_list_site_names(rest)} are too wide to tell: more draws would."
        said.append(told + widens)
    return said


def _get_sites_with_necks(report: BiasReport) -> list[str]:
    return list(
        dict.fromkeys(report.names[n.coordinate][0] for n in report.bias_diagnostics.funnel_necks)
    )


def _describe_funnel_neck(report: BiasReport, site: str) -> str:
    """Where chains cannot enter, and what helps."""
    found = [
        n for n in report.bias_diagnostics.funnel_necks if report.names[n.coordinate][0] == site
    ]
    worst = max(found, key=lambda n: n.missed_mass)
    name = report.names[worst.coordinate][1]
    if worst.is_step_too_large_in_bulk:  # no neck need be there
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
    turn = "chains turn back" if worst.is_significant else "chains may turn back"
    return (
        f"At the {worst.side} end of `{name}` the posterior is too narrow for the step: {turn} "
        f"where about {100 * worst.missed_mass:.0f} % of its mass or more still lies. {form}, give it a "
        "prior that keeps it off that end, or take a shorter step_size."
    )


def describe_site_bias(site_bias: SiteBias) -> str:
    """What is wrong with one site, by how much; empty where that is not in its moments."""
    found = []
    if not abs(site_bias.sd_inflation) < MAX_REPORTED_BIAS:
        found.append(f"sds of `{site_bias.site}` are too far off to be measured")
    elif abs(site_bias.sd_inflation) > max(
        SD_INFLATION_TOLERANCE, 2.0 * site_bias.sd_inflation_error
    ):
        side = "wide" if site_bias.sd_inflation > 0 else "narrow"
        found.append(
            f"sds of `{site_bias.site}` are up to {100 * abs(site_bias.sd_inflation):.0f} % ± "
            f"{100 * site_bias.sd_inflation_error:.0f} % too {side}"
        )
    if not abs(site_bias.mean_bias) < MAX_REPORTED_BIAS:
        found.append(f"means of `{site_bias.site}` are more than {MAX_REPORTED_BIAS:.0f} sds off")
    elif abs(site_bias.mean_bias) > max(MEAN_BIAS_TOLERANCE, 2.0 * site_bias.mean_bias_error):
        side = "high" if site_bias.mean_bias > 0 else "low"
        found.append(
            f"means of `{site_bias.site}` are up to {abs(site_bias.mean_bias):.2f} ± "
            f"{site_bias.mean_bias_error:.2f} sds too {side}"
        )
    told = " and ".join(found)
    return f"{told[0].upper()}{told[1:]}." if told else ""


def _recommend_remedy(report: BiasReport, biased_sites: list[SiteBias]) -> str:
    """What to change, and what it costs."""
    kinds = {finding.kind for finding in report.model_warnings}
    if ModelWarningKind.INCONSISTENT_GRADIENT in kinds:
        return "No step size and no minibatch mends what the gradient does not know."
    if ModelWarningKind.NON_ADDITIVE in kinds:
        return "No step size mends rows that do not add up."
    halve = f"halve the step size (to {report.step_size / 2:.2g}; twice the cost of a draw)"
    if np.isnan(report.step_size):  # of several blocks
        halve = "halve the step size of each block (twice the cost of a draw)"
    # Noise widens; what is too narrow, or off in the mean alone, is not its doing.
    excess = max(s.sd_inflation for s in biased_sites)
    if excess > SD_INFLATION_TOLERANCE and report.noise_sd_inflation > 0.5 * excess:
        return _recommend_noise_remedy(excess, halve)
    if _is_mean_bias_from_noise(report, biased_sites):
        return (
            "Gradient noise explains it, which widens all that these have to do with, and no "
            f"gradient shows it: double the subsample_size, or {halve}; either about halves it."
        )
    if report.max_grad_norm is not None and excess > SD_INFLATION_TOLERANCE:
        return (
            f"Gradients are cut to a norm of {report.max_grad_norm:g}, which widens sds where it "
            "shortens them often: double `max_grad_norm`, or leave it out."
        )
    if _is_monte_carlo_error(report, biased_sites):
        return (
            f"So few draws (as good as {report.max_ess:.0f} independent ones at most) "
            "may explain it: draw more."
        )
    if excess > SD_INFLATION_TOLERANCE and report.noise_sd_inflation > 0.2 * excess:
        return f"Gradient noise explains a part: {halve}, or double the subsample_size."
    if np.isnan(report.noise_sd_inflation):
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
        f"falls to about 1/{2**report.weak_order}." + own * report.has_custom_dynamics
    )


def _recommend_noise_remedy(sd_inflation: float, halve_step_text: str) -> str:
    """What to change where noise widens sds, which adds to the variance in proportion.

    :param sd_inflation: of the sds.
    """
    times = (np.square(1.0 + sd_inflation) - 1.0) / (np.square(1.0 + SD_INFLATION_TOLERANCE) - 1.0)
    if times < _MIN_LARGE_NOISE_RATIO:
        return (
            f"Gradient noise explains it: double the subsample_size, or {halve_step_text}; either about "
            "halves the excess."
        )
    few = float(f"{times:.1g}")
    return (
        "Gradient noise explains it: leave out `step_size` and `gradient` if they are yours, or "
        f"take a subsample_size some {few:,.0f} times as large or a step size as much smaller; "
        "the excess of the variance falls in proportion."
    )


def _is_mean_bias_from_noise(report: BiasReport, biased_sites: list[SiteBias]) -> bool:
    """Whether noise is predicted to have moved the means at least half as far as they are off."""
    moved = report.bias_diagnostics.noise_mean_bias
    if not len(moved) or report.is_for_functions:
        return False
    off = [s for s in biased_sites if abs(s.mean_bias) > MEAN_BIAS_TOLERANCE]
    by_site = {s.site: 0.0 for s in off}
    for (site, _), by_noise in zip(report.names, np.abs(moved), strict=True):
        if site in by_site:
            by_site[site] = max(by_site[site], float(by_noise))
    return bool(off) and all(by_site[s.site] > 0.5 * abs(s.mean_bias) for s in off)


def _is_monte_carlo_error(report: BiasReport, biased_sites: list[SiteBias]) -> bool:
    """Whether the number of draws explains all of it."""
    least = np.sqrt([1.0, 0.5]) / np.sqrt(report.max_ess)
    for s in biased_sites:
        where = np.array([site == s.site for site, _ in report.names])
        errors = np.fmax(report.stein_estimates.mcse[:, where].max(1), least)
        if not (np.abs([s.mean_bias, s.sd_inflation]) < _MAX_MONTE_CARLO_Z * errors).all():
            return False
    return True


def _list_site_names(sites: list[SiteBias]) -> str:
    return ", ".join(f"`{s.site}`" for s in sites[:3]) + ", ..." * (len(sites) > 3)
