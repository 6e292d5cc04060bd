"""A picture of what the warm-up found; matplotlib is imported when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from numpyro_sgmcmc import checks
from numpyro_sgmcmc.checks import InvalidArgumentError
from numpyro_sgmcmc.diagnostics.explain import check_warmed_up_run
from numpyro_sgmcmc.posterior.whitening import Preconditioner
from numpyro_sgmcmc.warmup import Adaptation

if TYPE_CHECKING:
    from numpyro.infer import MCMC

__all__ = ["plot_warmup"]

_SELECTED_COLOR, _UNSELECTED_COLOR, _DIRECTION_SD_COLOR = "#4c78a8", "#b8c7d9", "#d9822b"
_STEP_SIZE_LIMIT_LABELS = {
    "given": "as given",
    "integrator": "suits the scheme",
    "curvature": "after curvature",
    "noise": "after noise",
    "settings": "after settings",
    "means": "after means",
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
    pyplot = checks.import_optional("matplotlib.pyplot", "plot_warmup", "examples")
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


def _plot_step_size_limits(ax: Any, step_sizes: dict[str, float]) -> None:
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
