"""Pictures of what the diagnostics found; matplotlib is imported when one is asked for.

A picture of what the warm-up found; matplotlib is imported when it is asked for.

A picture of how fast runs come to a posterior; matplotlib is imported when it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from numpyro_sgmcmc import errors
from numpyro_sgmcmc.adaptation import Adaptation, StepSizeTrace
from numpyro_sgmcmc.diagnostics.bias_report import BiasReport, bias_report
from numpyro_sgmcmc.diagnostics.predictive import get_draws_by_site
from numpyro_sgmcmc.diagnostics.run_data import ConvergenceStats
from numpyro_sgmcmc.diagnostics.warmup_report import check_warmed_up_run
from numpyro_sgmcmc.errors import InvalidArgumentError
from numpyro_sgmcmc.model.preconditioner import Preconditioner

if TYPE_CHECKING:
    from numpyro.infer import MCMC

__all__ = [
    "plot_bias",
    "plot_speed",
    "plot_warmup",
]

_WITHIN_TOLERANCE_COLOR, _BIASED_COLOR = "#4c78a8", "#d62728"


_MAX_COORDINATE_LABELS = 40


def plot_bias(report: BiasReport | MCMC, *, axes: Any = None) -> Any:
    """Mean shift and sd inflation of every coordinate, with two standard errors.

    The shaded bands are what the report lets pass; coordinates that are clearly outside are red.

    :param report: a bias report, or a run to report on.
    :param axes: two matplotlib axes to draw on. Default: a new figure.
    :return: the two axes.
    :raises ImportError: without matplotlib.
    """
    pyplot = errors.import_optional("matplotlib.pyplot", "plot_bias", "examples")
    if not isinstance(report, BiasReport):
        report = bias_report(report)
    if axes is not None and not (np.shape(axes) == (2,) and hasattr(axes[0], "errorbar")):
        raise InvalidArgumentError(f"`axes` is {axes!r}, but must be two matplotlib axes.")
    names = [name for _, name in report.coordinate_names]
    if axes is None:
        height = 1.4 + 0.22 * min(len(names), _MAX_COORDINATE_LABELS)
        _, axes = pyplot.subplots(1, 2, sharey=True, figsize=(8.0, height), layout="constrained")
    rows = np.arange(len(names))
    shift, inflation = report.bias_estimates[0]  # as in the table
    panels = (
        (shift, 1.0, 0.1, "mean shift / posterior sd"),
        (inflation, 100.0, 0.05, "sd inflation / %"),
    )
    for ax, (found, unit, tolerance, label) in zip(axes, panels, strict=True):
        value = unit * np.where(np.isinf(found.error), np.nan, found.value)  # where unknown, none
        slack = 2.0 * unit * np.nan_to_num(found.error, posinf=0.0)
        is_off = np.abs(value) - slack > unit * tolerance
        ax.axvspan(-unit * tolerance, unit * tolerance, color="0.92", zorder=0)
        ax.axvline(0.0, color="0.6", linewidth=0.8, zorder=1)
        for which, colour in ((~is_off, _WITHIN_TOLERANCE_COLOR), (is_off, _BIASED_COLOR)):
            ax.errorbar(
                value[which], rows[which], xerr=slack[which], fmt="o", markersize=3.5,
                linewidth=1.0, color=colour, zorder=2,
            )  # fmt: skip
        ax.set_xlabel(label)
        ax.spines[["top", "right"]].set_visible(False)
    if len(names) <= _MAX_COORDINATE_LABELS:
        axes[0].set_yticks(rows, names)
    else:
        sites = [site for site, _ in report.coordinate_names]
        places = {site: sites.index(site) + (sites.count(site) - 1) / 2 for site in sites}
        axes[0].set_yticks(list(places.values()), list(places))
    if not axes[0].yaxis_inverted():
        axes[0].invert_yaxis()
    return axes


_SELECTED_COLOR, _UNSELECTED_COLOR, _DIRECTION_SD_COLOR = "#4c78a8", "#b8c7d9", "#d9822b"


_STEP_SIZE_LIMIT_LABELS = {
    "user": "user",
    "integrator": "integrator",
    "stability": "stability",
    "gradient_noise": "gradient noise",
    "dynamics": "dynamics",
    "mean_bias": "mean bias",
    "other_modes": "other modes",
}


def plot_warmup(mcmc: MCMC, *, axes: Any = None) -> Any:
    """What the warm-up found: widths of the posterior, the gradient's noise, the step size.

    On the left the posterior's sds as whitening has them, coordinate by coordinate and, where it is
    dense, along its own directions, in falling order. In the middle the variance of the noise of
    each estimator, for random rows and for blocks, with the estimator that was chosen darker; the
    dashed line is the variance of the gradient itself at draws of a normal posterior. On the right
    how long a step may be after each thing that limits it.

    :param mcmc: a run of one of this package's kernels, or one whose warm-up is done.
    :param axes: three matplotlib axes to draw on. Default: a new figure.
    :return: the three axes.
    :raises ValueError: for a run of another kernel, before a run, for one that was pickled, and
        where nothing was looked for, because all was given.
    :raises ImportError: without matplotlib.
    """
    pyplot = errors.import_optional("matplotlib.pyplot", "plot_warmup", "examples")
    _, adaptation = check_warmed_up_run(mcmc, "plot_warmup")
    if adaptation.trace is None:
        raise InvalidArgumentError(
            "All that a warm-up looks for was given: there is nothing to plot."
        )
    if axes is not None and not (np.shape(axes) == (3,) and hasattr(axes[0], "barh")):
        raise InvalidArgumentError(f"`axes` is {axes!r}, but must be three matplotlib axes.")
    if axes is None:
        _, axes = pyplot.subplots(1, 3, figsize=(10.0, 3.2), layout="constrained")
    _plot_posterior_sds(axes[0], adaptation.preconditioner)
    _plot_gradient_noise(axes[1], adaptation)
    _plot_step_size_limits(axes[2], adaptation.trace.step_size_limits)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    return axes


def _plot_posterior_sds(ax: Any, preconditioner: Preconditioner) -> None:
    matrix = np.asarray(preconditioner.inverse_mass_matrix, np.float64)
    variances = np.diagonal(matrix) if preconditioner.is_dense else matrix
    places = np.arange(1, len(variances) + 1)
    size = 4.0 if len(variances) <= 100 else 1.5
    ax.plot(
        places, np.sort(np.sqrt(variances))[::-1], "o", markersize=size, color=_SELECTED_COLOR,
        label="of coordinates",
    )  # fmt: skip
    if preconditioner.is_dense:
        along = np.sqrt(np.maximum(np.linalg.eigvalsh(matrix), 0.0))[::-1]
        ax.plot(places, along, color=_DIRECTION_SD_COLOR, linewidth=1.2, label="of directions")
        ax.legend(frameon=False, fontsize="small")
    ax.set(yscale="log", xlabel="rank", ylabel="posterior sd, unconstrained", title="Widths")
    ax.xaxis.get_major_locator().set_params(integer=True)


def _plot_gradient_noise(ax: Any, adaptation: Adaptation) -> None:
    assert adaptation.trace is not None
    ax.set(title="Noise of the gradient", xlabel="variance, whitened")
    noise = adaptation.trace.noise_variances
    if not noise:
        ax.set_yticks([])
        ax.text(0.5, 0.5, "none: all rows\nat every step", ha="center", transform=ax.transAxes)
        return
    is_consecutive = adaptation.subsampling.is_contiguous
    for row, (name, variances) in enumerate(noise.items()):
        for is_block, variance in enumerate(variances):
            is_chosen = name == adaptation.estimator.name and is_block == is_consecutive
            ax.barh(
                row + (0.2 if is_block else -0.2), max(variance, 1e-30), height=0.36,
                color=_SELECTED_COLOR if is_chosen else _UNSELECTED_COLOR,
            )  # fmt: skip
    ax.axvline(1.0, color="0.4", linewidth=0.8, linestyle="--", zorder=0)
    places = [row + shift for row in range(len(noise)) for shift in (-0.2, 0.2)]
    names = [f"{name.replace('_', ' ')}\n" for name in noise]
    labels = [text for name in names for text in (f"{_wrap_estimator_name(name)}random", "blocks")]
    ax.set(xscale="log", yticks=places, yticklabels=labels)
    ax.tick_params(axis="y", labelsize="small", length=0)
    ax.set_ylim(max(len(noise), 2) - 0.5, -0.5)


def _wrap_estimator_name(name: str) -> str:
    """An estimator's name in a line of its own, broken where it is long."""
    return name.replace("second order ", "second order\n")


def _plot_step_size_limits(ax: Any, trace: StepSizeTrace) -> None:
    step_sizes = {limit.name: limit.step_size for limit in trace.limits}
    rows = range(len(step_sizes))
    colours = [_UNSELECTED_COLOR] * (len(step_sizes) - 1) + [_SELECTED_COLOR]
    ax.barh(rows, list(step_sizes.values()), color=colours, height=0.6)
    for row, step_size in zip(rows, step_sizes.values(), strict=True):
        ax.annotate(
            f"{step_size:.3g}", (step_size, row), xytext=(3, 0), textcoords="offset points",
            va="center", fontsize="small",
        )  # fmt: skip
    ax.set_yticks(rows, [_STEP_SIZE_LIMIT_LABELS[name] for name in step_sizes])
    ax.set(title="Step size", xlabel="length, whitened")
    ax.margins(x=0.2)
    ax.tick_params(axis="y", labelsize="small", length=0)
    ax.invert_yaxis()


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
    pyplot = errors.import_optional("matplotlib.pyplot", "plot_speed", "examples")
    errors.check_choice("moment", moment, _MOMENTS)
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
    for k, (label, (times, distances)) in enumerate(lines.items()):
        colour = _LINE_COLORS[k % len(_LINE_COLORS)]
        ax.loglog(times, distances, color=colour, linewidth=1.6, label=label)
        ax.plot(times[-1], distances[-1], "o", color=colour, markersize=4)
    floor = 2.0 * _compute_reference_error((trusted[..., kept] - mean[kept]) / sd[kept], moment)
    bottom = min(floor / 2.0, *(distances.min() for _, distances in lines.values()))
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
