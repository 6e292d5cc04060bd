"""Plot of the error of runs against a reference by the seconds spent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from numpyro_sgmcmc.diagnostics.predictive import get_draws_by_site
from numpyro_sgmcmc.diagnostics.run_data import ConvergenceStats

__all__ = ["plot_speed"]

_COLORS = ("#2b6a99", "#d9822b", "#6a9e5b", "#b0417e", "#5d4a8a", "#7f7f7f")
# Points of a line: more are not seen.
_MAX_POINTS = 200
# Multiples of a power of ten that are ticks, from the most to the fewest.
_TICK_MULTIPLES = (tuple(range(1, 10)), (1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,))


def plot_speed(
    runs: Mapping[str, tuple[Sequence[float], Any]],
    reference: Any,
    *,
    moment: str = "mean",
    sites: Sequence[str] | None = None,
    ax: Any = None,
) -> Any:
    r"""Plot the error of posterior means, or SDs, by the seconds spent, on logarithmic scales.

    A point of a run's line is the error of all its draws until then: the root mean square over the
    coordinates of the difference of their means from the reference's, in the reference's SDs, or of
    the relative error of their SDs. The error of independent draws falls as :math:`t^{-1/2}`, that
    of a biased run to its bias. Errors in the grey area are within two standard errors of the
    reference. Chains count as parallel: at each time they have equally many draws.

    ::

        start = time.perf_counter()
        mcmc.warmup(key, *data)
        begun = time.perf_counter() - start
        mcmc.run(key, *data)
        seconds = begun, time.perf_counter() - start
        plot_speed({"SGHMCSplit": (seconds, mcmc)}, reference=nuts)

    :param runs: by label, ``(seconds, draws)``: two numbers, the time from the start of the run to
        the first draw and to the last; and the run, of any kernel, or a dict of draws by site,
        ``(chains, draws, ...)``.
    :param reference: a trusted run, independent of these and longer, or its draws.
    :param moment: ``"mean"`` (default) or ``"sd"``.
    :param sites: sites to compare. Default None: all of the reference. Coordinates that are
        constant in the reference are left out.
    :param ax: matplotlib axes to draw on. Default: a new figure.
    :return: the axes.
    :raises ValueError: without runs, for times that do not increase from zero, draws that are
        missing or of other shapes than the reference's, and for the reference among the runs.
    """
    from matplotlib import pyplot

    if moment not in ("mean", "sd"):
        raise ValueError(f"`moment` is {moment!r}, but must be 'mean' or 'sd'.")
    if not (isinstance(runs, Mapping) and runs):
        raise ValueError("`runs` must be a dict with a pair (seconds, draws) for each label.")
    reference_draws = get_draws_by_site(reference, "reference")
    names = list(reference_draws) if sites is None else list(sites)
    x_reference = _flatten_draws(reference_draws, names, "reference")
    mean, sd = x_reference.mean((0, 1)), x_reference.std((0, 1))
    varies = sd > 0
    if not varies.any():
        raise ValueError("All draws of `reference` are equal.")
    lines = {}
    for label, timed_run in runs.items():
        seconds, draws = _validate_timed_run(label, timed_run)
        if draws is reference:
            raise ValueError(f"Run '{label}' is the reference: compare with another run.")
        x = _flatten_draws(get_draws_by_site(draws, label), names, label)
        if x.shape[2:] != x_reference.shape[2:]:
            raise ValueError(f"The draws of run '{label}' have other shapes than the reference's.")
        standardized = (x[..., varies] - mean[varies]) / sd[varies]
        lines[label] = _compute_error_curve(seconds, standardized, moment)
    if ax is None:
        _, ax = pyplot.subplots(figsize=(6.0, 4.0), layout="constrained")
    for k, (label, (times, distances)) in enumerate(lines.items()):
        color = _COLORS[k % len(_COLORS)]
        ax.loglog(times, distances, color=color, linewidth=1.6, label=label)
        ax.plot(times[-1], distances[-1], "o", color=color, markersize=4)
    standardized = (x_reference[..., varies] - mean[varies]) / sd[varies]
    floor = 2.0 * _compute_reference_error(standardized, moment)
    bottom = min(floor / 2.0, *(distances.min() for _, distances in lines.values()))
    ax.axhspan(0.8 * bottom, floor, color="0.92", zorder=0)
    ax.set_ylim(0.8 * bottom, None)
    quantity = {"mean": "means / posterior SDs", "sd": "SDs, relative"}[moment]
    ax.set(xlabel="seconds", ylabel=f"error of {quantity}")
    for axis in (ax.xaxis, ax.yaxis):
        _format_log_ticks(axis)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    return ax


def _format_log_ticks(axis: Any) -> None:
    """Write numbers out, more per decade the fewer decades there are."""
    low, high = axis.get_view_interval()
    max_ticks = 10.0 / np.log10(high / low)  # that fit into a decade
    multiples = next((m for m in _TICK_MULTIPLES if len(m) <= max_ticks), _TICK_MULTIPLES[-1])
    axis.get_major_locator().set_params(subs=multiples, numticks=12)
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


def _validate_timed_run(label: str, timed_run: Any) -> tuple[tuple[float, float], Any]:
    """Return seconds and draws of a run."""
    is_pair = isinstance(timed_run, tuple) and len(timed_run) == 2
    if not (is_pair and np.shape(timed_run[0]) == (2,)):
        raise ValueError(f"Run '{label}' must be a pair (seconds, draws), with two seconds.")
    begun, ended = (float(t) for t in timed_run[0])
    if not 0.0 <= begun < ended < np.inf:
        raise ValueError(
            f"The seconds of run '{label}' are {begun:g} and {ended:g}, but must rise from 0."
        )
    return (begun, ended), timed_run[1]


def _flatten_draws(draws: Mapping[str, Any], sites: Sequence[str], label: str) -> np.ndarray:
    """Return the draws of some sites, shape ``(chains, draws, d)``."""
    missing = [name for name in sites if name not in draws]
    if missing or not sites:
        raise ValueError(f"There are no draws of site '{(missing or ['?'])[0]}' in '{label}'.")
    arrays = [np.asarray(draws[name], np.float64) for name in sites]
    return np.concatenate([x.reshape(*x.shape[:2], -1) for x in arrays], -1)


def _compute_error_curve(
    seconds: tuple[float, float], standardized_draws: np.ndarray, moment: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return times, about evenly spaced in their logarithm, and the errors until then.

    :param standardized_draws: draws minus the reference's mean, in its SDs, ``(chains, draws, d)``.
    """
    num_draws = standardized_draws.shape[1]
    counts = np.unique(np.geomspace(1, num_draws, _MAX_POINTS).round().astype(int))
    mean = standardized_draws.mean(0).cumsum(0)[counts - 1] / counts[:, None]
    error = mean
    if moment == "sd":
        mean_square = np.square(standardized_draws).mean(0).cumsum(0)[counts - 1] / counts[:, None]
        error = np.sqrt(np.maximum(mean_square - np.square(mean), 0.0)) - 1.0
    begun, ended = seconds
    times = begun + (ended - begun) * counts / num_draws
    return times, np.sqrt(np.square(error).mean(-1))


def _compute_reference_error(standardized_draws: np.ndarray, moment: str) -> float:
    """Return the root mean square standard error of the reference's means or SDs."""
    terms = standardized_draws if moment == "mean" else np.square(standardized_draws) / 2.0
    variance = terms.var((0, 1)) / ConvergenceStats.from_draws(terms).ess
    return float(np.sqrt(np.nanmean(variance)))
