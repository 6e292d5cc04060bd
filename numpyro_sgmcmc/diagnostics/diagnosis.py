"""Diagnoses of a bias report, and its text.

:func:`diagnose_sites` finds the worst coordinates of each site and gives the site one of the
diagnoses of :class:`Diagnosis`; :func:`describe` writes what is wrong and how to fix it;
:func:`make_table` prints the whole report, and :func:`summarize_in_one_line` one line.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Container, Iterable, Sequence
from enum import StrEnum
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from numpyro_sgmcmc.adaptation.settings import MAX_CONVERGED_R_HAT
from numpyro_sgmcmc.adaptation.step_size import MAX_NUM_STEPS
from numpyro_sgmcmc.diagnostics.geometry import FunnelNeck
from numpyro_sgmcmc.diagnostics.run_data import ConvergenceStats
from numpyro_sgmcmc.diagnostics.stein_estimates import BiasEstimate, Estimate
from numpyro_sgmcmc.errors import ModelWarningKind

if TYPE_CHECKING:
    from numpyro_sgmcmc.diagnostics.bias_report import BiasReport

MEAN_BIAS_TOLERANCE = 0.1
"""Bias of a mean, in posterior SDs, beyond which a site is biased. It lowers the coverage of a
central 90% interval to 89.8%."""

SD_INFLATION_TOLERANCE = 0.05
"""Relative error of an SD beyond which a site is biased: about that of 200 independent draws."""

# The tolerance, and the bias that the limits must exclude for a site to be ok.
_MEAN_BIAS_LIMITS = MEAN_BIAS_TOLERANCE, 0.2
_SD_INFLATION_LIMITS = SD_INFLATION_TOLERANCE, 0.15
# Joint level of the limits of all coordinates of a site, two-sided (Bonferroni).
_SIMULTANEOUS_LEVEL = 0.95

MAX_OK_R_HAT = 1.05
"""R-hat above which a site is not ok. Vehtari et al. (2021) recommend 1.01 for all parameters of a
long run; the largest of many R-hats of short chains that have converged exceeds that."""

MIN_OK_ESS = 100
"""ESS below which a site is not ok (Vehtari et al. 2021: 100 per chain)."""

# Posterior SDs, or times the SD: beyond, a number has no further meaning.
_MAX_PRINTED_BIAS = 100.0
# Posterior SDs: a smaller predicted bias by noise is not printed.
_MIN_PRINTED_MEAN_BIAS = 0.005
# R-hat beyond which chains are stuck and its value has no further meaning.
_MAX_PRINTED_R_HAT = 100.0
# Monte Carlo standard errors within which the number of draws may explain a bias.
_MAX_MONTE_CARLO_Z = 3.0
# Sites that a text names one by one.
_MAX_DESCRIBED_SITES = 3
# Characters of a line of a printed report.
_LINE_LENGTH = 100
# Ratio of variance inflation to the tolerated one, beyond which halving the step does not help.
_MIN_LARGE_NOISE_RATIO = 5.0
# Share of the bias that a predicted one must have to be named as its cause, or as a part of it.
_MAIN_CAUSE, _PARTIAL_CAUSE = 0.5, 0.2


class Diagnosis(StrEnum):
    """Diagnosis of a site, the worst first.

    - **NOT_CONVERGED** - R-hat is above 1.1, or chains were initialised in different modes.
    - **BIASED** - simultaneous 95% limits are beyond the tolerance (0.1 posterior SD for means, 5%
      for SDs), a model warning reports bias, chains do not reach a part of the posterior, or some
      draws are far outside of it.
    - **MULTIMODAL** - the warm-up has detected other modes.
    - **INCONCLUSIVE** - the limits do not exclude a bias of 0.2 SD for means or 15% for SDs, R-hat
      is above 1.05, the ESS is below 100, or the checks of pilot chains or funnels are unclear.
    - **OK** - none of these.
    """

    NOT_CONVERGED = "not converged"
    BIASED = "biased"
    MULTIMODAL = "multimodal"
    INCONCLUSIVE = "inconclusive"
    OK = "ok"


_BY_SEVERITY = tuple(Diagnosis)

# Diagnosis that a model warning implies for its sites; biased for all other kinds.
_DIAGNOSIS_BY_WARNING = {
    ModelWarningKind.MULTIMODAL: Diagnosis.MULTIMODAL,
    ModelWarningKind.MODES_VISITED: Diagnosis.NOT_CONVERGED,
    ModelWarningKind.NON_IDENTIFIED: Diagnosis.OK,
    ModelWarningKind.NOT_CONVERGED: Diagnosis.INCONCLUSIVE,
}
# Model warnings with which estimates from minibatch gradients are not valid.
_REASON_OF_INVALIDITY = {
    ModelWarningKind.INCONSISTENT_GRADIENT: "the gradient misses a part of the log density",
    ModelWarningKind.NON_ADDITIVE: "the log likelihood is not additive",
}


class SiteBias(NamedTuple):
    """The worst coordinates of one site, in unconstrained space.

    - **site** - name of the site.
    - **size** - number of coordinates.
    - **mean_bias** - chains' mean minus the posterior's, in posterior SDs.
    - **mean_bias_error** - standard error of ``mean_bias``.
    - **sd_inflation** - chains' SD divided by the posterior's, minus one.
    - **sd_inflation_error** - standard error of ``sd_inflation``.
    - **r_hat** - largest R-hat; NaN for a single chain.
    - **ess** - smallest effective sample size; NaN for a schedule of step sizes.
    - **diagnosis** - a :class:`Diagnosis`, which equals its string, such as ``"ok"``.
    """

    site: str
    size: int
    mean_bias: float
    mean_bias_error: float
    sd_inflation: float
    sd_inflation_error: float
    r_hat: float
    ess: float
    diagnosis: Diagnosis


# --- Diagnoses ----------------------------------------------------------------------------------


def diagnose_sites(report: BiasReport) -> list[SiteBias]:
    """Return the worst coordinates and the diagnosis of each site."""
    indices_by_site = _group_coordinates_by_site(report)
    reported = dict.fromkeys(indices_by_site, Diagnosis.OK)
    for warning in report.model_warnings:
        diagnosis = _DIAGNOSIS_BY_WARNING.get(warning.kind, Diagnosis.BIASED)
        is_for_all = report.is_for_functions or not warning.sites
        for site in reported if is_for_all else warning.sites:
            reported[site] = _worse(reported.get(site, Diagnosis.OK), diagnosis)
    for funnel_neck in report.funnel_necks:
        site = report.coordinate_names[funnel_neck.coordinate][0]
        diagnosis = Diagnosis.BIASED if funnel_neck.is_significant else Diagnosis.INCONCLUSIVE
        reported[site] = _worse(reported[site], diagnosis)
    for excursion in report.excursions:
        site = report.coordinate_names[excursion.coordinate][0]
        reported[site] = _worse(reported[site], Diagnosis.BIASED)
    return [
        diagnose_site(
            site, np.array(indices), report.bias_estimates, report.convergence, reported[site]
        )
        for site, indices in indices_by_site.items()
    ]


def _group_coordinates_by_site(report: BiasReport) -> dict[str, list[int]]:
    indices_by_site: dict[str, list[int]] = {}
    for k, (site, _) in enumerate(report.coordinate_names):
        indices_by_site.setdefault(site, []).append(k)
    return indices_by_site


def _worse(*diagnoses: Diagnosis) -> Diagnosis:
    return min(diagnoses, key=_BY_SEVERITY.index)


def diagnose_site(
    site: str,
    indices: np.ndarray,
    bias_estimates: Sequence[BiasEstimate],
    convergence: ConvergenceStats,
    reported: Diagnosis = Diagnosis.OK,
) -> SiteBias:
    r"""Return the worst coordinates of one site and its diagnosis.

    Limits are simultaneous ones at 95% for all coordinates of the site (Bonferroni within a site;
    not over sites): with d coordinates a bias is clear beyond
    :math:`\Phi^{-1}(1 - 0.025/d)` standard errors.

    :param indices: coordinates of the site.
    :param bias_estimates: estimates for all coordinates. For a site to be ok the first must
        exclude a bias; the others count if they clearly show one.
    :param reported: a diagnosis by other means; the worse one counts.
    """
    z = compute_simultaneous_z(len(indices))
    mean_bias, mean_diagnosis = _combine_estimates(
        [b.mean_bias.at(indices) for b in bias_estimates], z, *_MEAN_BIAS_LIMITS
    )
    sd_inflation, sd_diagnosis = _combine_estimates(
        [b.sd_inflation.at(indices) for b in bias_estimates], z, *_SD_INFLATION_LIMITS
    )
    diagnosis = _worse(reported, mean_diagnosis, sd_diagnosis)
    r_hat = float(np.fmax.reduce(convergence.r_hat[indices]))
    ess = float(np.fmin.reduce(convergence.ess[indices]))
    if r_hat > MAX_OK_R_HAT or ess < MIN_OK_ESS:
        diagnosis = _worse(diagnosis, Diagnosis.INCONCLUSIVE)
    if r_hat > MAX_CONVERGED_R_HAT:
        diagnosis = Diagnosis.NOT_CONVERGED
    return SiteBias(site, len(indices), *mean_bias, *sd_inflation, r_hat, ess, diagnosis)


def compute_simultaneous_z(num_coordinates: int) -> float:
    """Return the standard errors of simultaneous 95% limits (Bonferroni)."""
    return NormalDist().inv_cdf(1.0 - (1.0 - _SIMULTANEOUS_LEVEL) / 2.0 / num_coordinates)


def classify_bias(bias: Estimate, z: float, tolerance: float, detection_limit: float) -> Diagnosis:
    """Return biased, inconclusive or ok, for the coordinates of a site.

    :param z: standard errors of the limits.
    :param tolerance: bias that must be clearly exceeded by a coordinate for a site to be biased.
    :param detection_limit: bias that must be excluded for all coordinates for a site to be ok.
    """
    size, margin = np.abs(bias.value), z * bias.error
    if (size - margin > tolerance).any():
        return Diagnosis.BIASED
    is_ok = (size + margin < detection_limit).all()
    return Diagnosis.OK if is_ok else Diagnosis.INCONCLUSIVE


def _combine_estimates(
    estimates: list[Estimate], z: float, tolerance: float, detection_limit: float
) -> tuple[tuple[float, float], Diagnosis]:
    """Return the worst value, its error and the diagnosis of the first estimate of a site.

    They are those of another estimate if that one shows a bias. Parameters are those of
    :func:`classify_bias`.
    """
    diagnoses = [classify_bias(e, z, tolerance, detection_limit) for e in estimates]
    chosen = diagnoses.index(Diagnosis.BIASED) if Diagnosis.BIASED in diagnoses else 0
    value, error = estimates[chosen]
    # The one whose inner limit is furthest from zero; if the site is inconclusive, the outer one,
    # which is why. NaN first.
    margin = z * np.where(np.isfinite(error), error, 0.0)
    sign = 1.0 if diagnoses[chosen] is Diagnosis.INCONCLUSIVE else -1.0
    k = np.argmax(np.where(np.isfinite(value), np.abs(value) + sign * margin, np.inf))
    return (float(value[k]), float(error[k])), diagnoses[chosen]


# --- Description --------------------------------------------------------------------------------


def describe(report: BiasReport) -> str:
    """Describe in a few sentences what is wrong with a run, and how to fix it."""
    by_diagnosis: dict[Diagnosis, list[SiteBias]] = {d: [] for d in Diagnosis}
    for site in report.sites:
        by_diagnosis[site.diagnosis].append(site)
    # All else that is wrong may follow from a step that is far too long: it has one fix.
    is_step_too_large = any(n.is_step_too_large_in_bulk for n in report.funnel_necks)
    sentences = []
    if report.has_many_divergences:
        sentences.append(
            f"{report.num_divergences} of {report.num_draws} iterations diverged. Fix: a smaller "
            "step_size."
        )
    if not_converged := by_diagnosis[Diagnosis.NOT_CONVERGED]:
        r_hat = format_r_hat(float(np.fmax.reduce([s.r_hat for s in not_converged])))
        problem = f"The chains disagree on {_list_sites(not_converged)} (R-hat up to {r_hat})"
        if any(w.kind == ModelWarningKind.MODES_VISITED for w in report.model_warnings):
            problem += (
                " because they were initialised in different modes: bias is reported within each "
                "mode, and the pooled means and SDs are those of no posterior."
            )
        else:
            problem += ", so that their bias is not meaningful."
            if not (is_step_too_large or report.has_many_divergences):
                problem += (
                    " Fix: a longer run. Chains that still disagree are in different modes, or do "
                    "not reach a funnel neck, such as a scale near zero."
                )
        sentences.append(problem)
    sentences += [warning.message for warning in report.model_warnings]
    if report.excursions and not is_step_too_large:
        sentences.append(_describe_excursions(report))
    by_site: dict[str, list[FunnelNeck]] = {}
    for funnel_neck in report.funnel_necks:
        site_name = report.coordinate_names[funnel_neck.coordinate][0]
        by_site.setdefault(site_name, []).append(funnel_neck)
    worst = [max(group, key=lambda n: n.missed_mass) for group in by_site.values()]
    if not is_step_too_large:
        sentences += [_describe_funnel_neck(report, funnel_neck) for funnel_neck in worst]
    # The bias of sites with excursions has one fix, and its estimate is not reliable.
    explained = {report.coordinate_names[x.coordinate][0] for x in report.excursions}
    if any(w.kind in _REASON_OF_INVALIDITY for w in report.model_warnings):
        explained = set()
    biased = [s for s in by_diagnosis[Diagnosis.BIASED] if s.site not in explained]
    measured = [s for s in biased if describe_site_bias(s)]
    sentences += [describe_site_bias(s) for s in measured[:_MAX_DESCRIBED_SITES]]
    if (num_others := len(measured) - _MAX_DESCRIBED_SITES) > 0:
        sentences.append(f"{num_others} more site{'s are' if num_others > 1 else ' is'} biased.")
    if is_step_too_large:
        regions = _list_first([_name_region(report, funnel_neck) for funnel_neck in worst])
        sentences.append(
            "The step_size is too large for most of the posterior: the chains do not reach "
            f"{regions}. Fix: a smaller step_size."
        )
        return " ".join(sentences)
    if measured:
        sentences.append(_recommend_remedy(report, measured))
    sentences += _describe_inconclusive(report, by_diagnosis[Diagnosis.INCONCLUSIVE], by_site)
    return " ".join(sentences) or _describe_ok(report)


def _describe_ok(report: BiasReport) -> str:
    support = []
    if np.isfinite(report.r_hat).any():
        support.append(f"R-hat is at most {format_r_hat(float(np.nanmax(report.r_hat)), 3)}")
    if np.isfinite(report.ess).any():
        support.append(f"the smallest ESS is {np.nanmin(report.ess):.0f}")
    if report.num_gradient_draws:
        support.append(f"gradients at {report.num_gradient_draws} draws agree")
    if len(support) > 1:
        support[-1] = f"and {support[-1]}"
    details = f": {', '.join(support)}" if support else ""
    return (
        f"Means and SDs are right within the 95% limits{details}. A mode in which no chain was "
        "initialised would stay undetected."
    )


def _describe_inconclusive(
    report: BiasReport, sites: list[SiteBias], described: Container[str]
) -> list[str]:
    """Return a sentence for each reason why sites are inconclusive.

    :param described: names of sites whose funnel necks are the reason.
    """
    sentences = []
    low_ess = [s for s in sites if s.ess < MIN_OK_ESS]
    high_r_hat = [s for s in sites if s.r_hat > MAX_OK_R_HAT and s not in low_ess]
    others = [s for s in sites if s not in low_ess + high_r_hat and s.site not in described]
    if low_ess:
        sentences.append(
            f"The ESS of {_list_sites(low_ess)} is {min(s.ess for s in low_ess):.0f}, too small "
            "for a diagnosis. Fix: more draws."
        )
    if high_r_hat:
        r_hat = format_r_hat(max(s.r_hat for s in high_r_hat))
        sentences.append(
            f"The chains do not fully agree on {_list_sites(high_r_hat)} (R-hat up to {r_hat}). "
            "Fix: more draws."
        )
    if others:
        sentence = f"The 95% limits of {_list_sites(others)} are too wide for a diagnosis. "
        more = "more draws"
        if report.full_data:
            more = "a larger num_draws of bias_report, or more draws"
        if report.noise_sd_inflation > SD_INFLATION_TOLERANCE:
            sentence += (
                "Gradient noise is predicted to inflate SDs by up to "
                f"{100 * report.noise_sd_inflation:.0f}%. Fix: {more}, and a larger "
                "subsample_size or a smaller step_size."
            )
        else:
            sentence += f"Fix: {more}."
        sentences.append(sentence)
    return sentences


def _name_region(report: BiasReport, funnel_neck: FunnelNeck) -> str:
    """Return the values of a coordinate that the chains do not reach, for a sentence."""
    size = "small" if funnel_neck.side == "low" else "large"
    return f"{size} values of `{report.coordinate_names[funnel_neck.coordinate][1]}`"


def _describe_funnel_neck(report: BiasReport, funnel_neck: FunnelNeck) -> str:
    """Describe a region that the chains do not reach, and how to fix it."""
    # A scale near zero narrows the variables that it scales; a large one narrows the standardised
    # variables of a non-centred parametrisation.
    parametrisation = "centred parametrisation"
    if funnel_neck.side == "low":
        parametrisation = "non-centred parametrisation (numpyro.infer.reparam.LocScaleReparam(0))"
    verb = "do not reach" if funnel_neck.is_significant else "may not reach"
    return (
        f"The chains {verb} {_name_region(report, funnel_neck)} (about "
        f"{100 * funnel_neck.missed_mass:.0f}% of the posterior mass is missed). Fix: "
        f"{parametrisation} of the variables that it scales, a prior that excludes such values, or "
        "a smaller step_size."
    )


def _describe_excursions(report: BiasReport) -> str:
    """Describe the coordinates that have draws outside of the posterior, and how to avoid these."""
    coordinates = [x.coordinate for x in report.excursions]
    names = [f"`{report.coordinate_names[k][1]}`" for k in coordinates]
    increase, first = report.excursions[0].potential_increase, names[0]
    ratio = "zero"
    if np.isfinite(increase):
        ratio = f"e^-{increase:.0f} times that of the same draw with {first} at its median"
    problem = (
        f"Some draws of {_list_first(names)} are far outside of the posterior: the density of the "
        f"farthest draw of {first} is {ratio}."
    )
    r_hat = np.fmax.reduce(report.r_hat[coordinates])
    if report.has_many_divergences or r_hat > MAX_CONVERGED_R_HAT:
        return problem  # which has another fix
    remedies = "a smaller step_size"
    if report.gradient_noise_variance != 0.0:
        remedies = f"a larger subsample_size, or {remedies}"
    return f"{problem} Fix: {remedies}."


def describe_site_bias(site_bias: SiteBias) -> str:
    """Describe the bias of one site; empty if the limits are within the tolerances."""
    site, clauses, z = site_bias.site, [], compute_simultaneous_z(site_bias.size)
    value, error = site_bias.sd_inflation, site_bias.sd_inflation_error
    if not abs(value) < _MAX_PRINTED_BIAS:
        clauses.append(f"SDs of `{site}` are too far off to be measured")
    elif abs(value) - z * error > SD_INFLATION_TOLERANCE:
        size = f"{100 * abs(value):.0f}% ± {100 * error:.0f}%"
        direction = "wide" if value > 0 else "narrow"
        clauses.append(f"SDs of `{site}` are up to {size} too {direction}")
    value, error = site_bias.mean_bias, site_bias.mean_bias_error
    if not abs(value) < _MAX_PRINTED_BIAS:
        clauses.append(f"means of `{site}` are more than {_MAX_PRINTED_BIAS:.0f} SDs off")
    elif abs(value) - z * error > MEAN_BIAS_TOLERANCE:
        size = f"{abs(value):.2f} ± {error:.2f} SD"
        direction = "high" if value > 0 else "low"
        clauses.append(f"means of `{site}` are up to {size} too {direction}")
    if not clauses:
        return ""
    text = " and ".join(clauses)
    if site_bias.size > 1:
        text += (
            f" (± one standard error; worst of {site_bias.size} coordinates by simultaneous 95% "
            "limits)"
        )
    return f"{text[0].upper()}{text[1:]}."


def _recommend_remedy(report: BiasReport, biased_sites: list[SiteBias]) -> str:
    """Name the cause of a bias and the change that removes it; the first cause that applies."""
    kinds = {warning.kind for warning in report.model_warnings}
    if ModelWarningKind.INCONSISTENT_GRADIENT in kinds:
        return (
            "No step_size and no subsample_size removes this bias: the gradient misses a part of "
            "the log density."
        )
    if ModelWarningKind.NON_ADDITIVE in kinds:
        return "No step_size removes the bias of a log likelihood that is not additive."
    halve = f"halve step_size (to {report.step_size / 2:.2g}; twice the cost per draw)"
    if np.isnan(report.step_size):
        halve = "halve step_size of each block (twice the cost per draw)"
    # Noise inflates SDs: if they are too small, or only means are off, it is not the cause.
    sd_inflation = max(_nan_as_inf(s.sd_inflation) for s in biased_sites)
    is_inflated = sd_inflation > SD_INFLATION_TOLERANCE
    if is_inflated and report.noise_sd_inflation > _MAIN_CAUSE * sd_inflation:
        # Its variance inflation falls in proportion to the noise.
        ratio = (np.square(1.0 + sd_inflation) - 1.0) / (
            np.square(1.0 + SD_INFLATION_TOLERANCE) - 1.0
        )
        if ratio < _MIN_LARGE_NOISE_RATIO:
            return (
                f"Gradient noise explains it. Fix: double subsample_size, or {halve}; either about "
                "halves the bias."
            )
        fold = f"{float(f'{ratio:.1g}'):,.0f}-fold"
        otherwise = f"if that is all rows, use NUTS; or reduce step_size {fold}"
        if ratio * report.num_steps > MAX_NUM_STEPS:
            otherwise = "or use NUTS"  # draws would take too many steps
        return (
            "Gradient noise explains it. Fix: leave out `step_size` and `gradient_estimator` if "
            f"you set them; else increase subsample_size {fold}; {otherwise}."
        )
    if _is_mean_bias_from_noise(report, biased_sites):
        return (
            "Gradient noise explains it: it widens all that these sites depend on. Fix: double "
            f"subsample_size, or {halve}; either about halves the bias."
        )
    if report.max_grad_norm is not None and is_inflated:
        return (
            f"Gradients are clipped to a norm of {report.max_grad_norm:g}, which inflates SDs if "
            "it happens often. Fix: double `max_grad_norm`, or leave it out."
        )
    if _is_monte_carlo_error(report, biased_sites):
        return (
            "Monte Carlo error may explain it: the ESS of the run is at most "
            f"{report.max_ess:.0f}. Fix: more draws."
        )
    if is_inflated and report.noise_sd_inflation > _PARTIAL_CAUSE * sd_inflation:
        return f"Gradient noise explains a part. Fix: {halve}, or double subsample_size."
    if np.isnan(report.noise_sd_inflation):
        return (
            "The cause is either discretisation error or gradient noise, which was not measured. "
            f"Fix: {halve}, or double subsample_size."
        )
    text = (
        f"Gradient noise does not explain it; discretisation error does. Fix: {halve}; the error "
        f"falls to about 1/{2**report.weak_order}."
    )
    if report.has_custom_dynamics:
        text += (
            " If it does not, your integrator does not leave the posterior invariant: check it "
            "with diagnostics.check_invariance."
        )
    return text


def _nan_as_inf(value: float) -> float:
    """Return a bias whose size can be compared: that of a site that cannot be measured is inf."""
    return float("inf") if np.isnan(value) else value


def _is_mean_bias_from_noise(report: BiasReport, biased_sites: list[SiteBias]) -> bool:
    """Return whether at least half of each mean's bias is predicted from gradient noise."""
    sites = [s for s in biased_sites if abs(s.mean_bias) > MEAN_BIAS_TOLERANCE]
    if not sites or not len(report.noise_mean_bias) or report.is_for_functions:
        return False
    noise = np.abs(np.nan_to_num(report.noise_mean_bias))
    indices = _group_coordinates_by_site(report)
    return all(noise[indices[s.site]].max() > _MAIN_CAUSE * abs(s.mean_bias) for s in sites)


def _is_monte_carlo_error(report: BiasReport, biased_sites: list[SiteBias]) -> bool:
    """Return whether the number of draws explains all biases."""
    min_error = np.sqrt([1.0, 0.5]) / np.sqrt(report.max_ess)  # of mean and SD, in SDs
    indices = _group_coordinates_by_site(report)
    errors = [np.fmax(report.mcse[:, indices[s.site]].max(1), min_error) for s in biased_sites]
    biases = np.abs([(s.mean_bias, s.sd_inflation) for s in biased_sites])
    return bool((biases < _MAX_MONTE_CARLO_Z * np.array(errors)).all())


def _list_first(names: Sequence[str]) -> str:
    """Return the first names, and whether there are more."""
    return ", ".join(names[:_MAX_DESCRIBED_SITES]) + ", ..." * (len(names) > _MAX_DESCRIBED_SITES)


def _list_sites(sites: list[SiteBias]) -> str:
    return _list_first([f"`{s.site}`" for s in sites])


# --- The printed report -------------------------------------------------------------------------


class Table(NamedTuple):
    """A table that prints as text, and as HTML in notebooks."""

    table_rows: Sequence[Sequence[str]]  # rows of cells, the header first
    notes: Sequence[str]  # paragraphs below the table
    # columns that are aligned left; the others are aligned right
    left_aligned: tuple[int, ...] = (0,)

    def to_text(self) -> str:
        """Return lines of text, columns separated by two spaces."""
        widths = [max(map(len, column)) for column in zip(*self.table_rows, strict=True)]
        alignments = ["<" if k in self.left_aligned else ">" for k in range(len(widths))]
        lines = [
            "  ".join(
                f"{cell:{alignment}{width}}"
                for cell, alignment, width in zip(row, alignments, widths, strict=True)
            ).rstrip()
            for row in self.table_rows
        ]
        return "\n".join([*lines, "", *map(wrap_lines, self.notes)])

    def to_html(self) -> str:
        """Return HTML; all text is escaped."""

        def format_row(row: Sequence[str], tag: str) -> str:
            cells = (f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
            return f"<tr>{''.join(cells)}</tr>"

        header, *rows = self.table_rows
        body = "".join(format_row(row, "td") for row in rows)
        below = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes if note)
        return (
            f"<table><thead>{format_row(header, 'th')}</thead><tbody>{body}</tbody></table>{below}"
        )


def wrap_lines(text: str) -> str:
    """Return a paragraph in lines of at most 100 characters."""
    return textwrap.fill(text, _LINE_LENGTH, break_long_words=False, break_on_hyphens=False)


def make_table(report: BiasReport) -> Table:
    """Return a report as a table of its sites, with notes and its description."""
    header = ("site", "size", "mean bias (SD)", "SD bias (%)", "R-hat", "ESS", "diagnosis")
    cells = [
        (
            s.site,
            str(s.size),
            _format_bias(s.mean_bias, s.mean_bias_error, 1, 3),
            _format_bias(s.sd_inflation, s.sd_inflation_error, 100, 1),
            format_r_hat(s.r_hat),
            f"{s.ess:.0f}" if np.isfinite(s.ess) else "-",
            str(s.diagnosis),
        )
        for s in report.sites
    ]
    return Table([header, *cells], [*_format_notes(report), "", describe(report)], (0, 6))


def summarize_in_one_line(report: BiasReport) -> str:
    """Return the largest biases of a report in one line, and whether they are valid."""

    def find_largest(biases: Iterable[tuple[float, float]]) -> tuple[float, float]:
        return max(biases, key=lambda bias: _nan_as_inf(abs(bias[0])))

    mean_bias, mean_error = find_largest((s.mean_bias, s.mean_bias_error) for s in report.sites)
    sd_bias, sd_error = find_largest((s.sd_inflation, s.sd_inflation_error) for s in report.sites)
    kinds = {warning.kind for warning in report.model_warnings}
    reasons = [reason for kind, reason in _REASON_OF_INVALIDITY.items() if kind in kinds]
    subject = f"Bias (invalid estimate: {' and '.join(reasons)})" if reasons else "Bias"
    num_coordinates = sum(s.size for s in report.sites)
    return (
        f"{subject}: means off by at most {abs(mean_bias):.2f} ± {mean_error:.2f} posterior SDs, "
        f"SDs by {100 * sd_bias:+.1f}% ± {100 * sd_error:.1f}%"
        f"{f' (worst of {num_coordinates:,})' if num_coordinates > 1 else ''}"
    )


def _format_bias(value: float, error: float, unit: int, digits: int) -> str:
    """Return a bias with its error, both times ``unit``."""
    if np.isnan(value):
        return "unknown"
    if abs(value) >= _MAX_PRINTED_BIAS:
        return f"{'>' if value > 0 else '<-'}{unit * _MAX_PRINTED_BIAS:,.0f}"
    return f"{unit * value:+.{digits}f} ± {unit * error:.{digits}f}"


def format_r_hat(r_hat: float, digits: int = 2) -> str:
    """Return R-hat as text; a dash for NaN, and an upper bound for chains that are stuck."""
    if np.isnan(r_hat):
        return "-"
    return f"{r_hat:.{digits}f}" if r_hat < _MAX_PRINTED_R_HAT else f">{_MAX_PRINTED_R_HAT:.0f}"


def _format_notes(report: BiasReport) -> list[str]:
    unit, owner = ("value", "function") if report.is_for_functions else ("coordinate", "site")
    largest = max(s.size for s in report.sites)
    subject = f"Each row is the {unit} of a {owner}"
    limits = ""
    if largest > 1:
        subject = f"Each row is the worst of up to {largest} {unit}s of a {owner}"
        limits = ", diagnosed by simultaneous 95% limits"
    space = "" if report.is_for_functions else ", in unconstrained space"
    has_noise = report.gradient_noise_variance != 0.0  # else every step takes all rows
    source = "the run's minibatch gradients" if has_noise else "the run's gradients"
    sources = ["gradients on all rows" if report.full_data else source]
    if report.num_gradient_draws or report.is_for_functions:
        sources.append(f"gradients at {report.num_gradient_draws} draws")
    source = sources[-1] if report.is_for_functions else " and ".join(sources)
    temperature, kinetic = report.configurational_temperature, report.kinetic_temperature
    temperatures = f"configurational {temperature.value:.3f} ± {temperature.error:.3f}"
    if np.isfinite(kinetic.value):
        temperatures += f", kinetic {kinetic.value:.3f} ± {kinetic.error:.3f}"
    notes = [
        f"{subject}{space}; bias ± one standard error{limits}. Estimated from {source}.",
        f"Temperature (1 if exact): {temperatures}.",
        _format_noise_note(report),
    ]
    outside = {x.coordinate for x in report.excursions}
    heavy_tailed = [k for k in report.heavy_tailed_coordinates if k not in outside]
    if heavy := [report.coordinate_names[k][1] for k in heavy_tailed]:
        notes.append(
            f"Heavy tails, for which SDs are not meaningful: {_list_first(heavy)}. Their bias is "
            "that of a transform with lighter tails (arsinh)."
        )
    return [*notes, *report.notes]


def _format_noise_note(report: BiasReport) -> str:
    if np.isnan(report.gradient_noise_variance):
        reason = "" if report.notes else ", because all settings that depend on it were given"
        return f"Gradient noise: not measured{reason}."
    if report.gradient_noise_variance == 0.0:
        return "Gradient noise: none, because every step takes all rows."
    sd_inflation = f"at most {100 * report.noise_sd_inflation:.1f}%"
    if report.noise_sd_inflation > _MAX_PRINTED_BIAS:
        sd_inflation = f"more than {100 * _MAX_PRINTED_BIAS:,.0f}%"
    note = (
        f"Gradient noise: variance {report.gradient_noise_variance:.3g} in the noisiest "
        f"preconditioned coordinate; predicted to inflate SDs by {sd_inflation}"
    )
    is_unknown = np.isnan(report.noise_mean_bias)
    mean_bias = float(np.abs(report.noise_mean_bias[~is_unknown]).max(initial=0.0))
    if mean_bias >= _MIN_PRINTED_MEAN_BIAS:
        note += f" and to bias means by at most {mean_bias:.2f} SD"
    if is_unknown.any():
        sites = dict.fromkeys(report.coordinate_names[k][0] for k in np.flatnonzero(is_unknown))
        note += (
            f". The bias of means of {_list_first([*sites])} by noise is not predicted: third "
            "derivatives at draws differ too much"
        )
    return f"{note}."
