"""What is known of a run's bias: a table, a verdict, and what ArviZ and pandas make of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from numpyro_sgmcmc import checks
from numpyro_sgmcmc.checks import Refusal
from numpyro_sgmcmc.diagnostics.dependence import shown_r_hat
from numpyro_sgmcmc.diagnostics.estimates import Estimates
from numpyro_sgmcmc.diagnostics.evidence import Evidence
from numpyro_sgmcmc.diagnostics.site_bias import VERDICTS, SiteBias
from numpyro_sgmcmc.diagnostics.tables import html_table
from numpyro_sgmcmc.diagnostics.verdict import FAR, verdict_of
from numpyro_sgmcmc.warmup.findings import Finding

__all__ = ["BiasReport"]


_TOLD = {"modes": "one mode", "visited": "apart", "no region": "fine", "unsettled": "unclear"}
"""Verdicts by kind of the warm-up's findings; of all others, biased."""


@dataclass(frozen=True, repr=False)
class BiasReport:
    """What :func:`~numpyro_sgmcmc.bias_report` found; prints as a table, in a notebook as HTML.

    :param names: site and name of each coordinate.
    :param estimates: shift, inflation and temperatures.
    :param evidence: what the draws tell besides.
    :param findings: what the warm-up found to be wrong whatever the chains say.
    :param step_size: the run's last step size, the longest of the chains'.
    :param order: weak order of the scheme.
    :param noise_variance: variance of the whitened gradient's noise, measured in warm-up; NaN where
        it had nothing to look for.
    :param noise_inflation: by how much that noise is predicted to widen sds, at most.
    :param divergences: diverging iterations.
    :param num_draws: iterations they are out of.
    :param num_independent: as how many independent draws they count at most: their time over that
        in which a Gaussian is forgotten.
    :param full_data: whether the gradients were those on all rows.
    :param is_of_functions: whether it is on values of functions of the draws, each as a site, in
        place of the parameters.
    :param has_own_scheme: whether SDE or scheme are the user's and not the package's.
    :param clip_gradient: to which norm the run has cut its gradients, or None.
    :param notes: what else there is to know of how it was told.
    """

    names: list[tuple[str, str]]
    estimates: Estimates
    evidence: Evidence
    findings: tuple[Finding, ...]
    step_size: float
    order: int
    noise_variance: float
    noise_inflation: float
    divergences: int
    num_draws: int
    num_independent: float
    full_data: bool
    is_of_functions: bool = False
    has_own_scheme: bool = False
    clip_gradient: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def sites(self) -> list[SiteBias]:
        """One row a site: its worst coordinates, and the verdict."""
        by_site: dict[str, list[int]] = {}
        for k, (site, _) in enumerate(self.names):
            by_site.setdefault(site, []).append(k)
        told, known = self.evidence, self._known
        return [
            SiteBias.of(site, np.array(where), told.witnesses, told.dependence, known.get(site))
            for site, where in by_site.items()
        ]

    @property
    def _known(self) -> dict[str, str]:
        """Sites of which a neck or the warm-up tells that they are wrong, and the verdict."""
        everywhere = {site for site, _ in self.names}
        found = dict.fromkeys(sorted(everywhere), "fine")
        for finding in self.findings:
            told = _TOLD.get(finding.kind, "biased")
            for site in everywhere if self.is_of_functions else finding.sites or everywhere:
                found[site] = min(found[site], told, key=VERDICTS.index)
        for neck in self.evidence.necks:
            site, told = self.names[neck.coordinate][0], "biased" if neck.is_clear else "unclear"
            found[site] = min(found[site], told, key=VERDICTS.index)
        return found

    @property
    def r_hat(self) -> np.ndarray:
        """How far the chains disagree, shape ``(d,)``; NaN for a single short chain."""
        return self.evidence.dependence.r_hat

    @property
    def ess(self) -> np.ndarray:
        """Effective sample sizes, shape ``(d,)``; NaN where the draws are not there."""
        return self.evidence.dependence.ess

    @property
    def is_flagged(self) -> bool:
        """Whether any site is clearly biased, chains disagree, or iterations diverged often."""
        return self.diverges_often or any(
            s.verdict in ("apart", "biased", "one mode") for s in self.sites
        )

    @property
    def is_fine(self) -> bool:
        """Whether every site is right within error bars that are short enough to tell."""
        return not self.diverges_often and all(s.verdict == "fine" for s in self.sites)

    @property
    def diverges_often(self) -> bool:
        """Whether more than one iteration in a hundred diverged."""
        return self.divergences > 0.01 * self.num_draws

    @property
    def verdict(self) -> str:
        """The report in a few sentences: what is wrong, and what would cure it."""
        return verdict_of(self)

    @property
    def line(self) -> str:
        """The report in one line."""
        sites = self.sites
        shift = max(sites, key=lambda s: abs(s.mean_shift))
        inflation = max(sites, key=lambda s: abs(s.sd_inflation))
        return (
            f"Bias: means off by at most {abs(shift.mean_shift):.2f} ± {shift.mean_shift_error:.2f}"
            f" posterior sds, sds by {100 * inflation.sd_inflation:+.1f} % ± "
            f"{100 * inflation.sd_inflation_error:.1f} %"
        )

    def __str__(self) -> str:
        header = ("site", "size", "mean shift", "sd inflation", "R-hat", "ESS", "verdict")
        rows = [header, *self._cells()]
        widths = [max(len(row[k]) for row in rows) for k in range(len(header))]
        lines = [
            "  ".join(
                cell.ljust(w) if k in (0, 6) else cell.rjust(w)
                for k, (cell, w) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, "", *self._notes(), "", self.verdict])

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
        return html_table(header, self._cells(), [*self._notes(), self.verdict])

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (
                s.site,
                str(s.size),
                _cell(s.mean_shift, s.mean_shift_error, FAR, "{:+.3f} ± {:.3f}"),
                _cell(
                    100 * s.sd_inflation,
                    100 * s.sd_inflation_error,
                    100 * FAR,
                    "{:+.1f} % ± {:.1f} %",
                ),
                shown_r_hat(s.r_hat),
                f"{s.ess:.0f}" if np.isfinite(s.ess) else "-",
                s.verdict,
            )
            for s in self.sites
        ]

    def _notes(self) -> list[str]:
        configurational, kinetic = self.estimates.configurational, self.estimates.kinetic
        heat = f"configurational {configurational.value:.3f} ± {configurational.error:.3f}"
        if np.isfinite(kinetic.value):
            heat += f", kinetic {kinetic.value:.3f} ± {kinetic.error:.3f}"
        widens = f"at most {100 * self.noise_inflation:.1f} %"
        if self.noise_inflation > FAR:
            widens = f"more than {100 * FAR:,.0f} %"
        noise = (
            f"Gradient noise: variance {self.noise_variance:.3g} in the noisiest whitened "
            f"coordinate, which widens sds by {widens}"
        )
        moved = float(np.abs(self.evidence.by_noise).max(initial=0.0))
        noise += f" and moves means by at most {moved:.2f} sds." if moved >= 0.005 else "."
        if np.isnan(self.noise_variance):
            reason = ", because the warm-up had nothing to look for" * (not self.notes)
            noise = f"Gradient noise: not measured{reason}."
        gradients = "gradients on all rows" if self.full_data else "the run's own gradients"
        if num := self.evidence.num_looked_at:
            gradients += f", and from gradients at {num} draws"
        heavy = [name for _, name in (self.names[k] for k in self.evidence.heavy)]
        of_tails = (
            f"Heavy tails, whose sds mean nothing: {', '.join(heavy[:3])}"
            f"{', ...' * (len(heavy) > 3)}. Told by quantiles, on a scale that bends the tails."
        )
        worst = "Worst coordinates, in unconstrained space"
        if self.is_of_functions:
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
        xarray = checks.needs("xarray", "BiasReport.to_dataset", "arviz")
        shift, inflation = self.evidence.witnesses[0]
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
                "verdict": self.verdict,
                "kinetic_temperature": float(self.estimates.kinetic.value),
                "configurational_temperature": float(self.estimates.configurational.value),
                "gradient_noise_variance": self.noise_variance,
                "step_size": self.step_size,
                "full_data": int(self.full_data),
            },
        )

    def to_dataframe(self, coordinates: bool = False) -> Any:
        """The report as a :class:`pandas.DataFrame`.

        :param coordinates: one row a coordinate; default one row a site, with the verdicts.
        """
        pandas = checks.needs("pandas", "BiasReport.to_dataframe", "arviz")
        if coordinates:
            return self.to_dataset().to_dataframe()
        return pandas.DataFrame(self.sites).set_index("site")

    def add_to(self, data: Any) -> None:
        """Put the report into an ArviZ object as its group ``bias_report``.

        :param data: an ``InferenceData`` (ArviZ 0.23) or a ``DataTree`` (ArviZ 1.x).
        """
        dataset = self.to_dataset()
        if not hasattr(data, "groups"):
            raise Refusal(f"`data` is a {type(data).__name__}, but must be an ArviZ object.")
        if hasattr(data, "add_groups"):
            data.add_groups({"bias_report": dataset})
        else:
            data["bias_report"] = type(data)(dataset)


def _cell(value: float, error: float, far: float, form: str) -> str:
    return form.format(value, error) if abs(value) < far else "lost"
