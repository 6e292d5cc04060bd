"""What is known of a run's bias: a table, a verdict, and what ArviZ and pandas make of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from numpyro_sgmcmc import checks
from numpyro_sgmcmc.checks import InvalidArgumentError
from numpyro_sgmcmc.diagnostics.dependence import format_r_hat
from numpyro_sgmcmc.diagnostics.estimates import SteinEstimates
from numpyro_sgmcmc.diagnostics.evidence import BiasDiagnostics
from numpyro_sgmcmc.diagnostics.site_bias import DIAGNOSES, SiteBias
from numpyro_sgmcmc.diagnostics.tables import format_html_table
from numpyro_sgmcmc.diagnostics.verdict import MAX_REPORTED_BIAS, describe_report
from numpyro_sgmcmc.warmup.findings import ModelWarning

__all__ = ["BiasReport"]


_DIAGNOSIS_BY_WARNING = {
    "modes": "one mode",
    "visited": "apart",
    "no region": "fine",
    "unsettled": "unclear",
}
"""Verdicts by kind of the warm-up's findings; of all others, biased."""


@dataclass(frozen=True, repr=False)
class BiasReport:
    """What :func:`~numpyro_sgmcmc.bias_report` found; prints as a table, in a notebook as HTML.

    :param names: site and name of each coordinate.
    :param stein_estimates: shift, inflation and temperatures.
    :param bias_diagnostics: what the draws tell besides.
    :param model_warnings: what the warm-up found to be wrong whatever the chains say.
    :param step_size: the run's last step size, the longest of the chains'.
    :param weak_order: weak order of the scheme.
    :param gradient_noise_variance: variance of the whitened gradient's noise, measured in warm-up; NaN where
        it had nothing to look for.
    :param noise_sd_inflation: by how much that noise is predicted to widen sds, at most.
    :param num_divergences: diverging iterations.
    :param num_draws: iterations they are out of.
    :param max_ess: as how many independent draws they count at most: their time over that
        in which a Gaussian is forgotten.
    :param full_data: whether the gradients were those on all rows.
    :param is_for_functions: whether it is on values of functions of the draws, each as a site, in
        place of the parameters.
    :param has_custom_dynamics: whether SDE or scheme are the user's and not the package's.
    :param max_grad_norm: to which norm the run has cut its gradients, or None.
    :param notes: what else there is to know of how it was told.
    """

    names: list[tuple[str, str]]
    stein_estimates: SteinEstimates
    bias_diagnostics: BiasDiagnostics
    model_warnings: tuple[ModelWarning, ...]
    step_size: float
    weak_order: int
    gradient_noise_variance: float
    noise_sd_inflation: float
    num_divergences: int
    num_draws: int
    max_ess: float
    full_data: bool
    is_for_functions: bool = False
    has_custom_dynamics: bool = False
    max_grad_norm: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def sites(self) -> list[SiteBias]:
        """One row a site: its worst coordinates, and the verdict."""
        by_site: dict[str, list[int]] = {}
        for k, (site, _) in enumerate(self.names):
            by_site.setdefault(site, []).append(k)
        told, known = self.bias_diagnostics, self._diagnoses_by_site
        return [
            SiteBias.from_coordinates(
                site, np.array(where), told.bias_estimates, told.convergence, known.get(site)
            )
            for site, where in by_site.items()
        ]

    @property
    def _diagnoses_by_site(self) -> dict[str, str]:
        """Sites of which a neck or the warm-up tells that they are wrong, and the verdict."""
        everywhere = {site for site, _ in self.names}
        found = dict.fromkeys(sorted(everywhere), "fine")
        for finding in self.model_warnings:
            told = _DIAGNOSIS_BY_WARNING.get(finding.kind, "biased")
            for site in everywhere if self.is_for_functions else finding.sites or everywhere:
                found[site] = min(found[site], told, key=DIAGNOSES.index)
        for neck in self.bias_diagnostics.funnel_necks:
            site, told = (
                self.names[neck.coordinate][0],
                "biased" if neck.is_significant else "unclear",
            )
            found[site] = min(found[site], told, key=DIAGNOSES.index)
        return found

    @property
    def r_hat(self) -> np.ndarray:
        """How far the chains disagree, shape ``(d,)``; NaN for a single short chain."""
        return self.bias_diagnostics.convergence.r_hat

    @property
    def ess(self) -> np.ndarray:
        """Effective sample sizes, shape ``(d,)``; NaN where the draws are not there."""
        return self.bias_diagnostics.convergence.ess

    @property
    def is_flagged(self) -> bool:
        """Whether any site is clearly biased, chains disagree, or iterations diverged often."""
        return self.has_many_divergences or any(
            s.diagnosis in ("apart", "biased", "one mode") for s in self.sites
        )

    @property
    def is_ok(self) -> bool:
        """Whether every site is right within error bars that are short enough to tell."""
        return not self.has_many_divergences and all(s.diagnosis == "fine" for s in self.sites)

    @property
    def has_many_divergences(self) -> bool:
        """Whether more than one iteration in a hundred diverged."""
        return self.num_divergences > 0.01 * self.num_draws

    @property
    def diagnosis(self) -> str:
        """The report in a few sentences: what is wrong, and what would cure it."""
        return describe_report(self)

    @property
    def summary_line(self) -> str:
        """The report in one line."""
        sites = self.sites
        shift = max(sites, key=lambda s: abs(s.mean_bias))
        inflation = max(sites, key=lambda s: abs(s.sd_inflation))
        return (
            f"Bias: means off by at most {abs(shift.mean_bias):.2f} ± {shift.mean_bias_error:.2f}"
            f" posterior sds, sds by {100 * inflation.sd_inflation:+.1f} % ± "
            f"{100 * inflation.sd_inflation_error:.1f} %"
        )

    def __str__(self) -> str:
        header = ("site", "size", "mean shift", "sd inflation", "R-hat", "ESS", "verdict")
        rows = [header, *self._make_table_cells()]
        widths = [max(len(row[k]) for row in rows) for k in range(len(header))]
        lines = [
            "  ".join(
                cell.ljust(w) if k in (0, 6) else cell.rjust(w)
                for k, (cell, w) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, "", *self._make_notes(), "", self.diagnosis])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        header = (
            "site",
            "size",
            "mean shift (posterior sds)",
            "sd inflation",
            "R-hat",
            "ESS",
            "verdict",
        )
        return format_html_table(
            header, self._make_table_cells(), [*self._make_notes(), self.diagnosis]
        )

    def _make_table_cells(self) -> list[tuple[str, ...]]:
        return [
            (
                s.site,
                str(s.size),
                _format_bias(s.mean_bias, s.mean_bias_error, MAX_REPORTED_BIAS, "{:+.3f} ± {:.3f}"),
                _format_bias(
                    100 * s.sd_inflation,
                    100 * s.sd_inflation_error,
                    100 * MAX_REPORTED_BIAS,
                    "{:+.1f} % ± {:.1f} %",
                ),
                format_r_hat(s.r_hat),
                f"{s.ess:.0f}" if np.isfinite(s.ess) else "-",
                s.diagnosis,
            )
            for s in self.sites
        ]

    def _make_notes(self) -> list[str]:
        configurational, kinetic = (
            self.stein_estimates.configurational_temperature,
            self.stein_estimates.kinetic_temperature,
        )
        heat = f"configurational {configurational.value:.3f} ± {configurational.error:.3f}"
        if np.isfinite(kinetic.value):
            heat += f", kinetic {kinetic.value:.3f} ± {kinetic.error:.3f}"
        widens = f"at most {100 * self.noise_sd_inflation:.1f} %"
        if self.noise_sd_inflation > MAX_REPORTED_BIAS:
            widens = f"more than {100 * MAX_REPORTED_BIAS:,.0f} %"
        noise = (
            f"Gradient noise: variance {self.gradient_noise_variance:.3g} in the noisiest whitened "
            f"coordinate, which widens sds by {widens}"
        )
        moved = float(np.abs(self.bias_diagnostics.noise_mean_bias).max(initial=0.0))
        noise += f" and moves means by at most {moved:.2f} sds." if moved >= 0.005 else "."
        if np.isnan(self.gradient_noise_variance):
            reason = ", because the warm-up had nothing to look for" * (not self.notes)
            noise = f"Gradient noise: not measured{reason}."
        gradients = "gradients on all rows" if self.full_data else "the run's own gradients"
        if num := self.bias_diagnostics.num_gradient_draws:
            gradients += f", and from gradients at {num} draws"
        heavy = [
            name
            for _, name in (self.names[k] for k in self.bias_diagnostics.heavy_tailed_coordinates)
        ]
        of_tails = (
            f"Heavy tails, whose sds mean nothing: {', '.join(heavy[:3])}"
            f"{', ...' * (len(heavy) > 3)}. Told by quantiles, on a scale that bends the tails."
        )
        worst = "Worst coordinates, in unconstrained space"
        if self.is_for_functions:
            worst, gradients = "Worst values of each function", f"gradients at {num} draws"
        return [
            f"{worst}; mean shift in posterior sds; from {gradients}.",
            f"Temperature (1 where exact): {heat}.",
            noise,
            *[of_tails] * bool(heavy),
            *self.notes,
        ]

    def to_dataset(self) -> Any:
        """The report as an :class:`xarray.Dataset`, one entry a coordinate."""
        xarray = checks.import_optional("xarray", "BiasReport.to_dataset", "arviz")
        shift, inflation = self.bias_diagnostics.bias_estimates[0]
        columns = {
            "mean_shift": shift.value,
            "mean_shift_error": shift.error,
            "sd_inflation": inflation.value,
            "sd_inflation_error": inflation.error,
            "r_hat": self.r_hat,
            "ess": self.ess,
        }
        return xarray.Dataset(
            {name: ("coordinate", values) for name, values in columns.items()},
            coords={
                "coordinate": [name for _, name in self.names],
                "site": ("coordinate", [site for site, _ in self.names]),
            },
            attrs={
                "verdict": self.diagnosis,
                "kinetic_temperature": float(self.stein_estimates.kinetic_temperature.value),
                "configurational_temperature": float(
                    self.stein_estimates.configurational_temperature.value
                ),
                "gradient_noise_variance": self.gradient_noise_variance,
                "step_size": self.step_size,
                "full_data": int(self.full_data),
            },
        )

    def to_dataframe(self, coordinates: bool = False) -> Any:
        """The report as a :class:`pandas.DataFrame`.

        :param coordinates: one row a coordinate; default one row a site, with the verdicts.
        """
        pandas = checks.import_optional("pandas", "BiasReport.to_dataframe", "arviz")
        if coordinates:
            return self.to_dataset().to_dataframe()
        return pandas.DataFrame(self.sites).set_index("site")

    def add_to(self, data: Any) -> None:
        """Put the report into an ArviZ object as its group ``bias_report``.

        :param data: an ``InferenceData`` (ArviZ 0.23) or a ``DataTree`` (ArviZ 1.x).
        """
        dataset = self.to_dataset()
        if not hasattr(data, "groups"):
            raise InvalidArgumentError(
                f"`data` is a {type(data).__name__}, but must be an ArviZ object."
            )
        if hasattr(data, "add_groups"):
            data.add_groups({"bias_report": dataset})
        else:
            data["bias_report"] = type(data)(dataset)


def _format_bias(value: float, error: float, max_value: float, template: str) -> str:
    return template.format(value, error) if abs(value) < max_value else "lost"
