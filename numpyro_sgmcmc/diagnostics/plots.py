"""Pictures of what the diagnostics found; matplotlib is imported when one is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from numpyro_sgmcmc import checks
from numpyro_sgmcmc.checks import InvalidArgumentError
from numpyro_sgmcmc.diagnostics.bias import bias_report
from numpyro_sgmcmc.diagnostics.report import BiasReport

if TYPE_CHECKING:
    from numpyro.infer import MCMC

__all__ = ["plot_bias"]

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
    pyplot = checks.import_optional("matplotlib.pyplot", "plot_bias", "examples")
    if not isinstance(report, BiasReport):
        report = bias_report(report)
    if axes is not None and not (np.shape(axes) == (2,) and hasattr(axes[0], "errorbar")):
        raise InvalidArgumentError(f"`axes` is {axes!r}, but must be two matplotlib axes.")
    names = [name for _, name in report.names]
    if axes is None:
        height = 1.4 + 0.22 * min(len(names), _MAX_COORDINATE_LABELS)
        _, axes = pyplot.subplots(1, 2, sharey=True, figsize=(8.0, height), layout="constrained")
    rows = np.arange(len(names))
    shift, inflation = report.bias_diagnostics.bias_estimates[0]  # as in the table
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
        sites = [site for site, _ in report.names]
        places = {site: sites.index(site) + (sites.count(site) - 1) / 2 for site in sites}
        axes[0].set_yticks(list(places.values()), list(places))
    if not axes[0].yaxis_inverted():
        axes[0].invert_yaxis()
    return axes
