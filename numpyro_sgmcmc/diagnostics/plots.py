"""Plots of a bias report and of a warm-up; matplotlib is imported when one is drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpyro.infer import MCMC

from numpyro_sgmcmc import errors
from numpyro_sgmcmc.adaptation import Adaptation
from numpyro_sgmcmc.adaptation.settings import StepSizeTrace
from numpyro_sgmcmc.diagnostics.bias_report import BiasReport, bias_report
from numpyro_sgmcmc.diagnostics.diagnosis import (
    MEAN_BIAS_TOLERANCE,
    SD_INFLATION_TOLERANCE,
    compute_simultaneous_z,
)
from numpyro_sgmcmc.diagnostics.warmup_report import check_warmed_up_run, get_coordinate_variances
from numpyro_sgmcmc.errors import InvalidArgumentError
from numpyro_sgmcmc.model.preconditioner import Preconditioner

_BLUE, _RED, _PALE_BLUE, _ORANGE = "#4c78a8", "#d62728", "#b8c7d9", "#d9822b"
# Coordinates with a label each; of more, sites are labelled, so that the figure fits a page.
_MAX_COORDINATE_LABELS = 40
# Lower end of a bar on a logarithmic axis, for a variance of zero.
_MIN_BAR_VARIANCE = 1e-30


def plot_bias(report: BiasReport | MCMC, *, axes: Any = None) -> Any:
    """Plot mean bias and SD bias of every coordinate with simultaneous 95% limits.

    The shaded bands are the report's tolerances. A coordinate is red if its limits lie outside.

    :param report: a bias report, or a run to report on.
    :param axes: two matplotlib axes to draw on. Default None: a new figure.
    :return: the two axes.
    :raises ImportError: if matplotlib is not installed.
    """
    pyplot = errors.import_optional("matplotlib.pyplot", "`plot_bias`", "examples")
    if not isinstance(report, BiasReport):
        report = bias_report(report)
    sites, names = zip(*report.coordinate_names, strict=True)
    height = 1.4 + 0.22 * min(len(names), _MAX_COORDINATE_LABELS)
    axes = _prepare_axes(pyplot, axes, 2, sharey=True, figsize=(8.0, height))
    y = np.arange(len(names))
    z = np.array([compute_simultaneous_z(sites.count(site)) for site in sites])
    estimates = report.bias_estimates
    panels = (
        ([e.mean_bias for e in estimates], 1.0, MEAN_BIAS_TOLERANCE, "mean bias / posterior SD"),
        ([e.sd_inflation for e in estimates], 100.0, SD_INFLATION_TOLERANCE, "SD bias / %"),
    )
    for ax, (panel_estimates, unit, tolerance, label) in zip(axes, panels, strict=True):
        values, standard_errors = (np.stack(x) for x in zip(*panel_estimates, strict=True))
        shows_bias = np.abs(values) - z * standard_errors > tolerance
        # As in the report's table: the first estimate, or another one that clearly shows a bias.
        shown = shows_bias.argmax(0), y
        value, error, is_biased = values[shown], standard_errors[shown], shows_bias[shown]
        value = unit * np.where(np.isinf(error), np.nan, value)  # infinite: no estimate
        margin = unit * z * np.nan_to_num(error, posinf=0.0)
        ax.axvspan(-unit * tolerance, unit * tolerance, color="0.92", zorder=0)
        ax.axvline(0.0, color="0.6", linewidth=0.8, zorder=1)
        for mask, color in ((~is_biased, _BLUE), (is_biased, _RED)):
            ax.errorbar(
                value[mask], y[mask], xerr=margin[mask], fmt="o", markersize=3.5, linewidth=1.0,
                color=color, zorder=2,
            )  # fmt: skip
        ax.set_xlabel(label)
    if len(names) <= _MAX_COORDINATE_LABELS:
        axes[0].set_yticks(y, names)
    else:
        middles = {site: sites.index(site) + (sites.count(site) - 1) / 2 for site in sites}
        axes[0].set_yticks(list(middles.values()), list(middles))
    if not axes[0].yaxis_inverted():
        axes[0].invert_yaxis()
    return axes


def plot_warmup(mcmc: MCMC, *, axes: Any = None) -> Any:
    """Plot the warm-up's results: posterior SDs, gradient noise and the limits of the step size.

    Left: estimated posterior SDs of the unconstrained coordinates in descending order and, for a
    dense mass matrix, of the principal directions. Middle: variance of the gradient noise of each
    estimator in preconditioned coordinates, for random and for contiguous minibatches. The chosen
    combination is darker. The dashed line is the variance of the gradient itself for a normal
    posterior. Right: the step size after each limit.

    :param mcmc: a run of one of this package's kernels, or an ``MCMC`` object after its warm-up.
    :param axes: three matplotlib axes to draw on. Default None: a new figure.
    :return: the three axes.
    :raises ValueError: for a run of another kernel, before the warm-up, for a pickled run, and if
        every setting was given, so that nothing was adapted.
    :raises ImportError: if matplotlib is not installed.
    """
    pyplot = errors.import_optional("matplotlib.pyplot", "`plot_warmup`", "examples")
    _, adaptation = check_warmed_up_run(mcmc, "plot_warmup")
    if adaptation.trace is None:
        raise InvalidArgumentError(
            "`plot_warmup` has nothing to plot, because every setting of the kernel was given.",
            "leave out the settings that the warm-up should adapt, such as `step_size`.",
            "nothing-adapted",
        )
    axes = _prepare_axes(pyplot, axes, 3, figsize=(10.0, 3.2))
    _plot_posterior_sds(axes[0], adaptation.preconditioner)
    _plot_gradient_noise(axes[1], adaptation)
    _plot_step_size_limits(axes[2], adaptation.trace.step_size_limits)
    return axes


def _prepare_axes(pyplot: Any, axes: Any, num_axes: int, **settings: Any) -> Any:
    """Return the user's axes, or those of a new figure."""
    if axes is None:
        axes = pyplot.subplots(1, num_axes, layout="constrained", **settings)[1]
    elif np.shape(axes) != (num_axes,) or not hasattr(axes[0], "errorbar"):
        raise InvalidArgumentError(
            f"`axes` is a {type(axes).__name__} that does not hold {num_axes} matplotlib axes.",
            f"pass the axes of plt.subplots(1, {num_axes}).",
            "plot-axes",
        )
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    return axes


def _plot_posterior_sds(ax: Any, preconditioner: Preconditioner) -> None:
    variances = get_coordinate_variances(preconditioner)
    rank = np.arange(1, len(variances) + 1)
    size = 4.0 if len(variances) <= 100 else 1.5
    sds = np.sort(np.sqrt(variances))[::-1]
    ax.plot(rank, sds, "o", markersize=size, color=_BLUE, label="coordinates")
    if preconditioner.is_dense:
        covariance = np.asarray(preconditioner.inverse_mass_matrix, np.float64)
        direction_sds = np.sqrt(np.maximum(np.linalg.eigvalsh(covariance), 0.0))[::-1]
        ax.plot(rank, direction_sds, color=_ORANGE, linewidth=1.2, label="principal directions")
        ax.legend(frameon=False, fontsize="small")
    ax.set(yscale="log", xlabel="rank", ylabel="unconstrained posterior SD", title="Posterior SDs")
    ax.xaxis.get_major_locator().set_params(integer=True)


def _plot_gradient_noise(ax: Any, adaptation: Adaptation) -> None:
    assert adaptation.trace is not None
    ax.set(title="Gradient noise", xlabel="variance, preconditioned")
    noise_variances = adaptation.trace.noise_variances
    if not noise_variances:
        ax.set_yticks([])
        ax.text(0.5, 0.5, "none: all rows\nat every step", ha="center", transform=ax.transAxes)
        return
    labels = {}
    for k, (name, variances) in enumerate(noise_variances.items()):
        for is_contiguous, variance in enumerate(variances):
            y = k + (0.2 if is_contiguous else -0.2)
            is_chosen = (name, is_contiguous) == (
                adaptation.estimator.name,
                adaptation.subsampling.is_contiguous,
            )
            color = _BLUE if is_chosen else _PALE_BLUE
            ax.barh(y, max(variance, _MIN_BAR_VARIANCE), height=0.36, color=color)
            estimator = name.replace("_", " ").replace("second order ", "second order\n")
            labels[y] = "contiguous" if is_contiguous else f"{estimator}\nrandom"
    ax.axvline(1.0, color="0.4", linewidth=0.8, linestyle="--", zorder=0)
    ax.set(xscale="log", yticks=list(labels), yticklabels=list(labels.values()))
    ax.tick_params(axis="y", labelsize="small", length=0)
    ax.set_ylim(max(len(noise_variances), 2) - 0.5, -0.5)


def _plot_step_size_limits(ax: Any, trace: StepSizeTrace) -> None:
    step_sizes = list(trace.limits.values())
    y = range(len(step_sizes))
    ax.barh(y, step_sizes, color=[_PALE_BLUE] * (len(y) - 1) + [_BLUE], height=0.6)
    for k, step_size in enumerate(step_sizes):
        ax.annotate(
            f"{step_size:.3g}", (step_size, k), xytext=(3, 0), textcoords="offset points",
            va="center", fontsize="small",
        )  # fmt: skip
    ax.set_yticks(y, [name.replace("_", " ") for name in trace.limits])
    ax.set(title="Step size", xlabel="after each limit, preconditioned")
    ax.margins(x=0.2)
    ax.tick_params(axis="y", labelsize="small", length=0)
    ax.invert_yaxis()
