"""How well a run knows what is computed from its parameters, such as predictions.

Weights of a network, components of a mixture and factors of a matrix may be exchanged, turned or
mirrored without any change in what the model says: their R-hat is large and means nothing, while
chains agree on every prediction. So what is wanted is judged, not what it is computed from.

Reference: Franzese, Milios, Filippone and Michiardi (2021), *Revisiting the effects of
stochasticity for Hamiltonian samplers*, appendix F.2, for the Kolmogorov distance of predictions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jax import Array, random
from numpyro.infer import Predictive

from numpyro_sgmcmc import checks
from numpyro_sgmcmc.checks import InvalidArgumentError
from numpyro_sgmcmc.diagnostics.dependence import ConvergenceStats
from numpyro_sgmcmc.diagnostics.distances import compute_ks_statistic
from numpyro_sgmcmc.diagnostics.functions import DrawFunctions, get_draws_by_site
from numpyro_sgmcmc.diagnostics.tables import format_html_table

__all__ = ["FunctionSummary", "PredictiveSummary", "predictive_summary"]

_TABLE_NOTE = "Largest R-hat and smallest ESS; Kolmogorov distances, from 0 to 1, are means."
_KOLMOGOROV_MEAN = np.sqrt(np.pi / 2.0) * np.log(2.0)  # of his distribution


class FunctionSummary(NamedTuple):
    """One function of the draws; arrays of its shape at one draw.

    - **mean** - posterior mean.
    - **sd** - posterior standard deviation.
    - **r_hat** - split R-hat; NaN for chains of less than 50 draws.
    - **ess** - effective sample size; NaN for what is the same at all draws.
    - **between_chain_distance** - Kolmogorov distance between a chain and all others, from 0 to 1, the mean over
      the chains; of one chain, between its halves.
    - **expected_distance** - what **between_chain_distance** is, about, where chains agree and draws are as many.
    - **distance_to_reference** - Kolmogorov distance to the reference; NaN without one.
    - **reference_between_chain_distance** - the reference's own **between_chain_distance**; NaN without one.
    """

    mean: np.ndarray
    sd: np.ndarray
    r_hat: np.ndarray
    ess: np.ndarray
    between_chain_distance: np.ndarray
    expected_distance: np.ndarray
    distance_to_reference: np.ndarray
    reference_between_chain_distance: np.ndarray


@dataclass(frozen=True, repr=False)
class PredictiveSummary:
    """What :func:`predictive_summary` found; prints as a table, in a notebook as HTML.

    :param functions: by name.
    :param has_reference: whether there was a reference.
    """

    functions: dict[str, FunctionSummary]
    has_reference: bool

    def __getitem__(self, name: str) -> FunctionSummary:
        return self.functions[name]

    def _make_table_cells(self) -> list[list[str]]:
        """The table's cells, its header first."""
        columns = ["function", "size", "R-hat", "ESS", "between chains", "by chance"]
        if self.has_reference:
            columns += ["to the reference", "reference's own"]
        rows = [columns]
        for name, f in self.functions.items():
            row = [
                name,
                str(f.mean.size),
                _format_cell(np.nanmax, f.r_hat, "{:.3f}"),
                _format_cell(np.nanmin, f.ess, "{:.0f}"),
                _format_cell(np.mean, f.between_chain_distance, "{:.3f}"),
                _format_cell(np.nanmean, f.expected_distance, "{:.3f}"),
            ]
            if self.has_reference:
                row += [
                    f"{f.distance_to_reference.mean():.3f}",
                    f"{f.reference_between_chain_distance.mean():.3f}",
                ]
            rows.append(row)
        return rows

    def __str__(self) -> str:
        rows = self._make_table_cells()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            first, *others = zip(row, widths, strict=True)
            lines.append("  ".join([first[0].ljust(first[1]), *(c.rjust(w) for c, w in others)]))
        return "\n".join([*lines, "", _TABLE_NOTE])

    def _repr_html_(self) -> str:
        header, *rows = self._make_table_cells()
        return format_html_table(header, rows, [_TABLE_NOTE])

    __repr__ = __str__

    def to_dataset(self) -> Any:
        """The summary as an :class:`xarray.Dataset`: variables such as ``mean`` with a leading axis
        ``statistic``, by function.
        """
        xarray = checks.import_optional("xarray", "PredictiveSummary.to_dataset", "arviz")
        found = {}
        for name, f in self.functions.items():
            axes = [f"{name}_dim_{k}" for k in range(f.mean.ndim)]
            found[name] = (["statistic", *axes], np.stack(f))
        return xarray.Dataset(found, coords={"statistic": list(FunctionSummary._fields)})


def _format_cell(reduce_fn: Callable[[np.ndarray], Any], values: np.ndarray, template: str) -> str:
    """One number for an array, or none where it holds none."""
    return "-" if np.isnan(values).all() else template.format(reduce_fn(values))


def predictive_summary(
    mcmc: Any,
    fn: Callable[..., Any] | Predictive,
    *rows: Any,
    reference: Any = None,
    rng_key: Array | None = None,
) -> PredictiveSummary:
    """R-hat, effective sample sizes and Kolmogorov distances of functions of the draws.

    ::

        def mean(draw, X):
            return X @ draw["beta"]

        predictive_summary(mcmc, mean, X_test, reference=nuts)

    A chunk of the rows at a time, so that predictions for draws times rows are never in memory.

    :param mcmc: a run of any kernel, NumPyro's own too; or a dict of draws by site, with axes
        ``(chains, draws, ...)``.
    :param fn: a function of one draw, a dict of values by site, and rows, that returns an array or
        a dict of arrays; or a :class:`~numpyro.infer.Predictive`, of which model, parameters and
        sites are used.
    :param rows: arrays to cut into chunks of rows, with as many rows each; ``fn`` gets the chunks
        after the draw, and its results must have a place for each row along their first axis. A
        ``Predictive`` gets them as its model's arguments.
    :param reference: a run that is trusted, as ``mcmc``, for distances to it. Default: none.
    :param rng_key: for a ``Predictive`` that draws. Default: ``random.key(0)``.
    :raises ValueError: for runs without draws of what ``fn`` asks for, rows that are no numbers or
        of different lengths, or results that are no numbers, are not finite, or lack the rows'
        axis.
    """
    runs = [get_draws_by_site(mcmc, "mcmc")]
    if reference is not None:
        runs.append(get_draws_by_site(reference, "reference"))
    functions = DrawFunctions.from_fn(fn, rows)
    rng_key = random.key(0) if rng_key is None else rng_key
    checks.check_rng_key(rng_key)
    found = {
        name: FunctionSummary(*(np.full(x.shape, np.nan) for _ in FunctionSummary._fields))
        for name, x in functions.eval_shape(runs[0]).items()
    }
    for where, values in functions.iterate_chunks(runs, rng_key):
        for name, into in found.items():
            for whole, part in zip(
                into, _summarize_function(name, [v[name] for v in values]), strict=True
            ):
                whole[where] = part
    return PredictiveSummary(found, has_reference=reference is not None)


def _summarize_function(name: str, values: list[np.ndarray]) -> FunctionSummary:
    """That of some places.

    :param values: of the run, and of the reference if there is one; ``(chains, draws, ...)``.
    """
    for x in values:
        if not np.isfinite(x).all():
            raise InvalidArgumentError(f"`{name}` is not finite at some of the draws.")
    x = values[0].astype(np.float64)
    dependence = ConvergenceStats.from_draws(x.reshape(*x.shape[:2], -1))
    ess = dependence.ess.reshape(x.shape[2:])
    missing = np.full(x.shape[2:], np.nan)
    chains = max(2, len(x))
    summary = FunctionSummary(
        mean=x.mean((0, 1)),
        sd=x.std((0, 1)),
        r_hat=dependence.r_hat.reshape(x.shape[2:]),
        ess=ess,
        between_chain_distance=_compute_between_chain_distance(x),
        expected_distance=_KOLMOGOROV_MEAN * np.sqrt((chains + chains / (chains - 1)) / ess),
        distance_to_reference=missing,
        reference_between_chain_distance=missing,
    )
    if len(values) == 1:
        return summary
    trusted = values[1].astype(np.float64)
    pooled = (v.reshape(-1, *v.shape[2:]) for v in (x, trusted))
    return summary._replace(
        distance_to_reference=compute_ks_statistic(*pooled),
        reference_between_chain_distance=_compute_between_chain_distance(trusted),
    )


def _compute_between_chain_distance(values: np.ndarray) -> np.ndarray:
    """Kolmogorov distance between a chain and all others, the mean over the chains.

    :param values: shape ``(chains, draws, ...)``.
    """
    if len(values) == 1:
        half = values.shape[1] // 2
        return compute_ks_statistic(values[0, :half], values[0, half:])
    found = [
        compute_ks_statistic(values[k], np.delete(values, k, axis=0).reshape(-1, *values.shape[2:]))
        for k in range(len(values))
    ]
    return np.asarray(np.mean(found, axis=0))
