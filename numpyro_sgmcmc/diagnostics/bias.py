"""How far a run's means and standard deviations are from the posterior's, measured in the run."""

from __future__ import annotations

import html
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC

from numpyro_sgmcmc import checks
from numpyro_sgmcmc.chain.moments import Sums
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.diagnostics.estimates import Estimate, Estimates, disagreement, estimate
from numpyro_sgmcmc.diagnostics.runs import coordinate_names, finished_run, unconstrained_draws
from numpyro_sgmcmc.samplers.base import SGMCMCKernel

__all__ = ["BiasReport", "SiteBias", "bias_report"]

_MEAN, _SD = 0.1, 0.05
_MEAN_UNCLEAR, _SD_UNCLEAR = 0.2, 0.15
_R_HAT = 1.1
_FAR = 100.0  # sds: beyond, a number would say no more
_CHANCE = 3.0  # standard errors that the number of draws may explain
_NUM_BATCHES = 16


class SiteBias(NamedTuple):
    """The worst coordinate of one site, in unconstrained space.

    - **site** - name.
    - **size** - number of coordinates.
    - **mean_shift** - chain's mean minus the posterior's, in posterior sds.
    - **mean_shift_error** - its standard error.
    - **sd_inflation** - chain's sd over the posterior's, minus one.
    - **sd_inflation_error** - its standard error.
    - **r_hat** - how far the chains disagree, 1 where they agree; NaN for a single chain.
    - **verdict** - ``"fine"``, ``"biased"``, ``"unclear"``, or ``"apart"``: R-hat is above 1.1.
    """

    site: str
    size: int
    mean_shift: float
    mean_shift_error: float
    sd_inflation: float
    sd_inflation_error: float
    r_hat: float
    verdict: str


def bias_report(mcmc: MCMC, *, full_data: bool = False, num_draws: int = 400) -> BiasReport:
    """What a finished run says of its own bias.

    The moments come from gradients that the run took, at next to no cost. They say how
    far the chain's means and sds are from the posterior's, coordinate by coordinate, whatever the
    reason: step size, gradient noise, or too few draws. They cannot see a mode that no chain found;
    where chains are in different ones, R-hat does.

    :param mcmc: a run of one of this package's kernels.
    :param full_data: whether to take gradients on all rows at some of the draws in place of the
        run's minibatch gradients. Sharper where those are noisy; costs ``num_draws`` passes over
        the data.
    :param num_draws: number of draws for ``full_data``, taken evenly. Default 400.
    :raises ValueError: for a run of another kernel, or before a run.
    """
    kernel = finished_run(mcmc, "bias_report")
    checks.positive_int("num_draws", num_draws)
    checks.is_bool("full_data", full_data)
    factor = np.asarray(kernel.coordinates(mcmc.last_state).factor, np.float64)
    own = jax.tree.map(np.asarray, mcmc.last_state.moments.batches)
    if mcmc.num_chains == 1:
        own = jax.tree.map(lambda x: x[None], own)
    if not (own.weight > 0).any():
        raise ValueError(
            "All draws diverged or have weight zero, so that there is nothing to report on."
        )
    if full_data:
        sums = _full_data_sums(mcmc, kernel, num_draws)
    else:
        sums = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), own)
    noise = kernel.noise
    step_size = float(np.max(mcmc.last_state.adapt_state.step_size))
    predicted = noise.inflation(kernel.dynamics, step_size)
    num_draws = int(np.size(mcmc.get_extra_fields().get("diverging", 0)))
    num_steps = int(np.max(mcmc.last_state.num_steps))
    iterations = int(np.sum(mcmc.last_state.moments.iterations))
    time = iterations * num_steps * float(np.mean(mcmc.last_state.adapt_state.step_size))
    independent = time / float(kernel.dynamics.relaxation_time(step_size))
    return BiasReport(
        names=coordinate_names(mcmc),
        estimates=estimate(sums, factor),
        r_hat=disagreement(jax.tree.map(lambda x: x.sum(1), own), factor),
        step_size=step_size,
        order=kernel.dynamics.schemes[kernel.scheme].order,
        noise_variance=noise.variance,
        noise_inflation=float(np.sqrt(1.0 + predicted) - 1.0),
        divergences=int(np.sum(mcmc.get_extra_fields().get("diverging", 0))),
        num_draws=num_draws,
        num_independent=max(1.0, min(independent, num_draws)),
        full_data=full_data,
    )


def _full_data_sums(mcmc: MCMC, kernel: SGMCMCKernel, num_draws: int) -> Sums:
    """The moments of some of the draws with gradients on all rows, in batches by time."""
    positions = unconstrained_draws(mcmc, kernel)
    per_chain = -(-num_draws // len(positions))
    every = max(1, positions.shape[1] // per_chain)
    positions = positions[:, ::every]
    coordinates = kernel.coordinates(mcmc.last_state)
    flat = positions.reshape(-1, positions.shape[-1])
    gradients = kernel.full_gradients(flat, Arguments(mcmc._args, mcmc._kwargs))
    q = jax.vmap(coordinates.whiten)(flat - coordinates.anchor)
    g = jax.vmap(coordinates.pull)(gradients)
    num_batches = min(_NUM_BATCHES, positions.shape[1])
    batch = np.arange(positions.shape[1]) * num_batches // positions.shape[1]
    batch = (np.arange(len(positions))[:, None] * num_batches + batch).ravel()

    def one(q: Any, g: Any) -> Sums:
        sums = Sums.zeros(q.size, q.dtype).add(q, g)
        return sums.finished(q, jnp.full((), jnp.nan, q.dtype), jnp.ones((), q.dtype))

    each = jax.tree.map(np.asarray, jax.vmap(one)(q, g))
    starts = np.flatnonzero(np.diff(batch, prepend=-1))
    return jax.tree.map(lambda x: np.add.reduceat(x, starts, 0), each)


@dataclass(frozen=True, repr=False)
class BiasReport:
    """What :func:`bias_report` found; prints as a table, in a notebook as HTML.

    :param names: site and name of each coordinate.
    :param estimates: shift, inflation and temperatures.
    :param r_hat: how far the chains disagree, shape ``(d,)``; NaN for a single chain.
    :param step_size: the run's last step size, the longest of the chains'.
    :param order: weak order of the scheme.
    :param noise_variance: variance of the whitened gradient's noise, measured in warm-up.
    :param noise_inflation: by how much that noise is predicted to widen sds, at most.
    :param divergences: diverging iterations.
    :param num_draws: iterations they are out of.
    :param num_independent: as how many independent draws they count at most: their time over that
        in which a Gaussian is forgotten.
    :param full_data: whether the gradients were those on all rows.
    """

    names: list[tuple[str, str]]
    estimates: Estimates
    r_hat: np.ndarray
    step_size: float
    order: int
    noise_variance: float
    noise_inflation: float
    divergences: int
    num_draws: int
    num_independent: float
    full_data: bool

    @property
    def sites(self) -> list[SiteBias]:
        """One row a site: its worst coordinates, and the verdict."""
        by_site: dict[str, list[int]] = {}
        for k, (site, _) in enumerate(self.names):
            by_site.setdefault(site, []).append(k)
        return [self._site(site, np.array(where)) for site, where in by_site.items()]

    def _site(self, site: str, where: np.ndarray) -> SiteBias:
        shift, shift_error = _worst(self.estimates.shift, where)
        inflation, inflation_error = _worst(self.estimates.inflation, where)
        z = NormalDist().inv_cdf(1.0 - 0.025 / len(where))
        verdicts = {
            _judge(self.estimates.shift, where, z, _MEAN, _MEAN_UNCLEAR),
            _judge(self.estimates.inflation, where, z, _SD, _SD_UNCLEAR),
        }
        r_hat = float(self.r_hat[where].max())
        if r_hat > _R_HAT:
            verdicts.add("apart")
        verdict = next(v for v in ("apart", "biased", "unclear", "fine") if v in verdicts)
        errors = shift_error, inflation_error
        return SiteBias(site, len(where), shift, errors[0], inflation, errors[1], r_hat, verdict)

    @property
    def is_flagged(self) -> bool:
        """Whether any site is clearly biased, chains disagree, or iterations diverged often."""
        return self.diverges_often or any(s.verdict in ("biased", "apart") for s in self.sites)

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
        sites = self.sites
        biased = [s for s in sites if s.verdict == "biased"]
        unclear = [s for s in sites if s.verdict == "unclear"]
        apart = [s for s in sites if s.verdict == "apart"]
        said = []
        if self.diverges_often:
            said.append(
                f"{self.divergences} of {self.num_draws} iterations diverged: take a smaller "
                "step_size."
            )
        if apart:
            worst = max(apart, key=lambda s: s.r_hat)
            said.append(
                f"Chains disagree on {_names(apart)} (R-hat up to {worst.r_hat:.2f}), and what the "
                "report says of them means little: run longer; chains that still disagree then "
                "are in different modes."
            )
        said += [self._sentence(s) for s in biased[:3]]
        if (more := len(biased) - 3) > 0:
            said.append(f"{more} more site{'s are' if more > 1 else ' is'} biased.")
        if biased:
            said.append(self._cure(biased))
        if unclear:
            means = "more draws" if self.full_data else "more draws, or full_data=True,"
            said.append(f"The error bars of {_names(unclear)} are too wide to tell: {means} would.")
        if not said:
            said.append("Means and sds are right within the error bars.")
        return " ".join(said)

    def _sentence(self, s: SiteBias) -> str:
        found = []
        if not abs(s.sd_inflation) < _FAR:
            found.append(f"sds of `{s.site}` are too far off to be measured")
        elif abs(s.sd_inflation) > max(_SD, 2.0 * s.sd_inflation_error):
            side = "wide" if s.sd_inflation > 0 else "narrow"
            found.append(
                f"sds of `{s.site}` are up to {100 * abs(s.sd_inflation):.0f} % ± "
                f"{100 * s.sd_inflation_error:.0f} % too {side}"
            )
        if not abs(s.mean_shift) < _FAR:
            found.append(f"means of `{s.site}` are more than {_FAR:.0f} sds off")
        elif abs(s.mean_shift) > max(_MEAN, 2.0 * s.mean_shift_error):
            side = "high" if s.mean_shift > 0 else "low"
            found.append(
                f"means of `{s.site}` are up to {abs(s.mean_shift):.2f} ± "
                f"{s.mean_shift_error:.2f} sds too {side}"
            )
        return " and ".join(found)[:1].upper() + " and ".join(found)[1:] + "."

    def _cure(self, biased: list[SiteBias]) -> str:
        """What to change, and what it costs."""
        halve = f"halve the step size (to {self.step_size / 2:.2g}; twice the cost of a draw)"
        # Noise widens; what is too narrow, or off in the mean alone, is not its doing.
        excess = max(s.sd_inflation for s in biased)
        if excess > _SD and self.noise_inflation > 0.5 * excess:
            return (
                f"Gradient noise explains it: double the subsample_size, or {halve}; either about "
                "halves the excess."
            )
        if self._is_chance(biased):
            return (
                f"So few draws (as good as {self.num_independent:.0f} independent ones at most) "
                "may explain it: draw more."
            )
        if excess > _SD and self.noise_inflation > 0.2 * excess:
            return f"Gradient noise explains a part: {halve}, or double the subsample_size."
        return (
            f"Gradient noise does not explain it, so it is the step: {halve}, and the error "
            f"falls to about 1/{2**self.order}."
        )

    def _is_chance(self, biased: list[SiteBias]) -> bool:
        """Whether the number of draws explains all of it."""
        least = np.sqrt([1.0, 0.5]) / np.sqrt(self.num_independent)
        for s in biased:
            where = np.array([site == s.site for site, _ in self.names])
            errors = np.fmax(self.estimates.chance[:, where].max(1), least)
            if not (np.abs([s.mean_shift, s.sd_inflation]) < _CHANCE * errors).all():
                return False
        return True

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
        header = ("site", "size", "mean shift", "sd inflation", "R-hat", "verdict")
        rows = [header, *self._cells()]
        widths = [max(len(row[k]) for row in rows) for k in range(len(header))]
        lines = [
            "  ".join(
                cell.ljust(w) if k in (0, 5) else cell.rjust(w)
                for k, (cell, w) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, "", *self._notes(), "", self.verdict])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        header = ("site", "size", "mean shift (posterior sds)", "sd inflation", "R-hat", "verdict")
        head = "".join(f"<th>{h}</th>" for h in header)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self._cells()
        )
        notes = "".join(f"<p>{html.escape(n)}</p>" for n in [*self._notes(), self.verdict])
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}"

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (
                s.site,
                str(s.size),
                _cell(s.mean_shift, s.mean_shift_error, _FAR, "{:+.3f} ± {:.3f}"),
                _cell(
                    100 * s.sd_inflation,
                    100 * s.sd_inflation_error,
                    100 * _FAR,
                    "{:+.1f} % ± {:.1f} %",
                ),
                f"{s.r_hat:.2f}" if np.isfinite(s.r_hat) else "-",
                s.verdict,
            )
            for s in self.sites
        ]

    def _notes(self) -> list[str]:
        configurational, kinetic = self.estimates.configurational, self.estimates.kinetic
        heat = f"configurational {configurational.value:.3f} ± {configurational.error:.3f}"
        if np.isfinite(kinetic.value):
            heat += f", kinetic {kinetic.value:.3f} ± {kinetic.error:.3f}"
        gradients = "gradients on all rows" if self.full_data else "the run's own gradients"
        return [
            f"Worst coordinates, in unconstrained space; mean shift in posterior sds; from "
            f"{gradients}.",
            f"Temperature (1 where exact): {heat}.",
            f"Gradient noise: variance {self.noise_variance:.3g} in whitened units, which widens "
            f"sds by at most {100 * self.noise_inflation:.1f} %.",
        ]

    def to_dataset(self) -> Any:
        """The report as an :class:`xarray.Dataset`, one entry a coordinate."""
        xarray = checks.needs("xarray", "BiasReport.to_dataset", "arviz")
        shift, inflation = self.estimates.shift, self.estimates.inflation
        columns = {
            "mean_shift": shift.value,
            "mean_shift_error": shift.error,
            "sd_inflation": inflation.value,
            "sd_inflation_error": inflation.error,
            "r_hat": self.r_hat,
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
            raise ValueError(f"`data` is a {type(data).__name__}, but must be an ArviZ object.")
        if hasattr(data, "add_groups"):
            data.add_groups({"bias_report": dataset})
        else:
            data["bias_report"] = type(data)(dataset)


def _names(sites: list[SiteBias]) -> str:
    return ", ".join(f"`{s.site}`" for s in sites[:3]) + ", ..." * (len(sites) > 3)


def _cell(value: float, error: float, far: float, form: str) -> str:
    return form.format(value, error) if abs(value) < far else "lost"


def _worst(found: Estimate, where: np.ndarray) -> tuple[float, float]:
    """The estimate that is furthest from zero beyond twice its error."""
    value, error = found.value[where], found.error[where]
    k = np.argmax(np.where(np.isfinite(value), np.abs(value) - 2.0 * np.nan_to_num(error), np.inf))
    return float(value[k]), float(error[k])


def _judge(found: Estimate, where: np.ndarray, z: float, tolerance: float, unclear: float) -> str:
    """Whether any coordinate is clearly beyond the tolerance, or may be far beyond it."""
    size, slack = np.abs(found.value[where]), z * found.error[where]
    if (size - slack > tolerance).any():
        return "biased"
    return "fine" if (size + slack < unclear).all() else "unclear"
