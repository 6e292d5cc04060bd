"""A picture of how fast runs come to a posterior; matplotlib is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from numpyro_sgmcmc import checks
from numpyro_sgmcmc.checks import InvalidArgumentError
from numpyro_sgmcmc.diagnostics.dependence import ConvergenceStats
from numpyro_sgmcmc.diagnostics.functions import get_draws_by_site

__all__ = ["plot_speed"]

_LINE_COLORS = ("#2b6a99", "#d9822b", "#6a9e5b", "#b0417e", "#5d4a8a", "#7f7f7f")
_MAX_POINTS_PER_LINE = 200
_MOMENTS = ("mean", "sd")
_LOG_TICK_SUBS = (tuple(range(1, 10)), (1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,))


def plot_speed(
    runs: Mapping[str, tuple[Sequence[float], Any]],
    reference: Any,
    *,
    moment: str = "mean",
    sites: Sequence[str] | None = None,
    ax: Any = None,
) -> Any:
    r"""Error of the posterior's means, or sds, by the seconds spent, both on logarithmic scales.

    A point of a run's line is the error of all its draws up to then: the root mean square over the
    coordinates of their means' distance from the reference's, in the reference's sds, or of the
    sds' relative error. Independent draws let it fall as :math:`t^{-1/2}`; a run that is biased
    comes to rest at its bias. Below the grey area's edge, two standard errors of the reference,
    nothing can be told. Chains count as side by side: at each time they have as many draws each.

    ::

        start = time.perf_counter()
        mcmc.warmup(key, *data)
        begun = time.perf_counter() - start
        mcmc.run(key, *data)
        seconds = begun, time.perf_counter() - start
        plot_speed({"SGHMCSplit": (seconds, mcmc)}, reference=nuts)

    :param runs: by label, ``(seconds, draws)``: two numbers, when the draws began and when they
        ended, not negative and rising, from the run's beginning; and the run of any kernel,
        NumPyro's own too, or a dict of draws by site, ``(chains, draws, ...)``.
    :param reference: a run that is trusted, independent of these and longer, or its draws.
    :param moment: ``"mean"`` (default) or ``"sd"``.
    :param sites: sites to compare. Default None: all of the reference. Coordinates of which the
        reference has one value only are left out.
    :param ax: matplotlib axes to draw on. Default: a new figure.
    :return: the axes.
    :raises ValueError: without runs, for seconds that are none, draws that are missing or of other
        shapes than the reference's, and for a run that is itself the reference.
    :raises ImportError: without matplotlib.
    """
    pyplot = checks.import_optional("matplotlib.pyplot", "plot_speed", "examples")
    checks.check_choice("moment", moment, _MOMENTS)
    if not (isinstance(runs, Mapping) and runs):
        raise InvalidArgumentError(
            "`runs` must be a dict with a pair (seconds, draws) for each label."
        )
    if ax is not None and not hasattr(ax, "loglog"):
        raise InvalidArgumentError(f"`ax` is {ax!r}, but must be matplotlib axes.")
    truth = get_draws_by_site(reference, "reference")
    names = list(truth) if sites is None else list(sites)
    trusted = _flatten_draws(truth, names, "reference")
    mean, sd = trusted.mean((0, 1)), trusted.std((0, 1))
    kept = sd > 0
    if not kept.any():
        raise InvalidArgumentError(
            "All draws of `reference` are the same: there is nothing to compare with."
        )
    lines = {}
    for label, pair in runs.items():
        seconds, draws = _validate_timed_run(label, pair)
        if draws is reference:
            raise InvalidArgumentError(
                f"Run '{label}' is the reference itself: compare with another run."
            )
        x = _flatten_draws(get_draws_by_site(draws, label), names, label)
        if x.shape[2:] != trusted.shape[2:]:
            raise InvalidArgumentError(
                f"The draws of run '{label}' have other shapes than the reference's."
            )
        lines[label] = _compute_error_curve(seconds, (x[..., kept] - mean[kept]) / sd[kept], moment)
    if ax is None:
        _, ax = pyplot.subplots(figsize=(6.0, 4.0), layout="constrained")
    for k, (label, (times, errors)) in enumerate(lines.items()):
        colour = _LINE_COLORS[k % len(_LINE_COLORS)]
        ax.loglog(times, errors, color=colour, linewidth=1.6, label=label)
        ax.plot(times[-1], errors[-1], "o", color=colour, markersize=4)
    floor = 2.0 * _compute_reference_error((trusted[..., kept] - mean[kept]) / sd[kept], moment)
    bottom = min(floor / 2.0, *(errors.min() for _, errors in lines.values()))
    ax.axhspan(0.8 * bottom, floor, color="0.92", zorder=0)
    ax.set_ylim(0.8 * bottom, None)
    of = {"mean": "means / posterior sds", "sd": "sds, relative"}[moment]
    ax.set(xlabel="seconds", ylabel=f"error of {of}")
    for axis in (ax.xaxis, ax.yaxis):
        _format_log_ticks(axis)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    return ax


def _format_log_ticks(axis: Any) -> None:
    """Numbers written out, the more to a decade the fewer decades there are."""
    low, high = axis.get_view_interval()
    marks = 10.0 / np.log10(high / low)  # that have room, in a decade
    subs = next((s for s in _LOG_TICK_SUBS if len(s) <= marks), _LOG_TICK_SUBS[-1])
    axis.get_major_locator().set_params(subs=subs, numticks=12)
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


def _validate_timed_run(label: str, timed_run: Any) -> tuple[tuple[float, float], Any]:
    """Seconds and draws of a run."""
    if not (
        isinstance(timed_run, tuple) and len(timed_run) == 2 and np.shape(timed_run[0]) == (2,)
    ):
        raise InvalidArgumentError(
            f"Run '{label}' must be a pair (seconds, draws), with seconds two numbers: when the "
            "draws began and when they ended."
        )
    begun, ended = (float(t) for t in timed_run[0])
    if not 0.0 <= begun < ended < np.inf:
        raise InvalidArgumentError(
            f"The seconds of run '{label}' are {begun:g} and {ended:g}, but must rise from 0."
        )
    return (begun, ended), timed_run[1]


def _flatten_draws(draws: Mapping[str, Any], sites: Sequence[str], label: str) -> np.ndarray:
    """Draws of these sites side by side, shape ``(chains, draws, d)``."""
    missing = [name for name in sites if name not in draws]
    if missing or not sites:
        raise InvalidArgumentError(
            f"There are no draws of site '{(missing or ['?'])[0]}' in '{label}'."
        )
    arrays = [np.asarray(draws[name], np.float64) for name in sites]
    return np.concatenate([x.reshape(*x.shape[:2], -1) for x in arrays], -1)


def _compute_error_curve(
    seconds: tuple[float, float], standardized_draws: np.ndarray, moment: str
) -> tuple[np.ndarray, np.ndarray]:
    """Times, and the errors of the draws up to then, at about even distances in their logarithm.

    :param standardized_draws: draws less the reference's mean, in its sds, ``(chains, draws, d)``.
    """
    num = standardized_draws.shape[1]
    places = np.unique(np.geomspace(1, num, _MAX_POINTS_PER_LINE).round().astype(int))
    counts = places[:, None]
    mean = (standardized_draws.mean(0).cumsum(0))[places - 1] / counts
    error = mean
    if moment == "sd":
        square = (np.square(standardized_draws).mean(0).cumsum(0))[places - 1] / counts
        error = np.sqrt(np.maximum(square - np.square(mean), 0.0)) - 1.0
    begun, ended = seconds
    times = begun + (ended - begun) * places / num
    return times, np.sqrt(np.square(error).mean(-1))


def _compute_reference_error(standardized_draws: np.ndarray, moment: str) -> float:
    """Of the reference's own means or sds, the root mean square over the coordinates."""
    terms = standardized_draws if moment == "mean" else np.square(standardized_draws) / 2.0
    variance = terms.var((0, 1)) / ConvergenceStats.from_draws(terms).ess
    return float(np.sqrt(np.nanmean(variance)))
