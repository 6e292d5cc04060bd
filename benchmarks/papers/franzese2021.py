r"""Revisiting the effects of stochasticity for Hamiltonian samplers: the synthetic experiments.

Reproduces Figure 6 (the two-point toy with an exact integrator, appendix E), the synthetic data
set of Figures 1 and 9 (256 random trigonometric features, appendix F.1), the Kolmogorov distances
of appendix F.2 and the integration lengths of Figure 5, of Franzese, Milios, Filippone and
Michiardi (2021), *Revisiting the effects of stochasticity for Hamiltonian samplers*.

Both potentials are quadratic, so that a step is an affine map and the moments of the stationary
law follow without sampling (:mod:`linear_steps`). Minibatches are a partition of the rows, visited
in a new random order in every epoch, as in the paper's theorems. Only the Kolmogorov distances are
simulated. The standard errors of orders are those of a straight line's fit, not of sampling.

Figures 8 to 10 on a network and Tables 1 and 2 have separate scripts
(:mod:`franzese2021_network`, :mod:`franzese2021_tables`).

The paper gives neither the number of rows nor the frequencies: here 40 rows in 5 minibatches of 8,
standard normal frequencies times 5 and inputs from -1 to 1. The sampler does not see a rotation of
the features, so they are rotated into the few directions that the inputs reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
import output
from franzese2021_distances import distances
from franzese2021_lengths import integration_lengths
from franzese2021_regression import (
    BATCHES,
    FULL,
    NUM_FEATURES,
    ORDERS,
    Errors,
    bottleneck,
    make_regression,
    slope_table,
)
from franzese2021_toy import toy
from matplotlib.ticker import NullFormatter
from standard_errors import Mean

COLORS = {"leapfrog": "C0", "lie_trotter": "C1", "symmetric": "C2", "mt3": "C3"}


def guide(ax: Any, x: np.ndarray, first: float, order: int, is_above: bool = False) -> None:
    """A grey dashed line of a given order from ``(x[0], first)``, above or below the data."""
    y = first * (x / x[0]) ** order
    ax.plot(x, y, color="grey", ls="--", lw=1)
    place = {"ha": "right", "va": "bottom"} if is_above else {"ha": "left", "va": "top"}
    middle = len(x) // 2
    ax.annotate(f"order {order}", (x[middle], y[middle]), color="grey", **place)


def plot(
    toy_errors: dict[str, np.ndarray],
    toy_sizes: np.ndarray,
    found: dict[str, dict[str, list[Errors]]],
    step_sizes: np.ndarray,
    drawn: dict[str, np.ndarray],
    itself: Mean,
    drawn_sizes: Sequence[float],
) -> Any:
    figure, axes = plt.subplots(2, 2, figsize=(9, 7))
    ax = axes[0, 0]
    styles = (("C3", "o-"), ("C0", "o-"), ("C2", "x:"))
    for (name, errors), (color, style) in zip(toy_errors.items(), styles, strict=True):
        ax.plot(toy_sizes, errors, style, color=color, ms=5, label=name)
    guide(ax, toy_sizes, toy_errors["with replacement"][0] * 0.5, 1)
    guide(ax, toy_sizes, toy_errors["permuted, ends"][0] * 0.4, 3)
    ax.set(title="two points, exact integrator", ylabel="relative error of the variance")
    for ax, way in ((axes[0, 1], "full batch"), (axes[1, 0], "permuted, ends")):
        for integrator, errors in found.items():
            values = np.array([e.predictive for e in errors[way]])
            if values.max() > 1e-9:
                ax.plot(step_sizes, values, "o-", color=COLORS[integrator], ms=4, label=integrator)
        ax.set(title=f"trigonometric features, {way}", ylabel="relative error, predictive moments")
        ax.set_ylim(1e-10, 1)
    ax = axes[0, 1]
    guide(ax, step_sizes, 1e-6, 2, is_above=True)
    guide(ax, step_sizes[2:], 1e-9, 3)
    ax = axes[1, 0]
    iid = [e.predictive for e in found["mt3"]["with replacement"]]
    ax.plot(step_sizes, iid, "x:", color="C3", ms=5, label="mt3, with replacement")
    guide(ax, step_sizes, 1e-7, 2)
    guide(ax, step_sizes[:-2], 6e-3, 1, is_above=True)
    ax = axes[1, 1]
    for i, (integrator, values) in enumerate(drawn.items()):
        law = [e.kolmogorov for e in found[integrator]["permuted, ends"]]
        ax.plot(step_sizes, law, "-", color=COLORS[integrator], lw=1)
        # Side by side, to be seen.
        x = np.array(drawn_sizes) * 1.08 ** (i - 1)
        ax.errorbar(
            x, *values.T, fmt="o", color=COLORS[integrator], ms=5, capsize=2, label=integrator
        )
    ax.axhline(itself.value, color="grey", ls="--", label="self-distance of the draws")
    ax.set(title="permuted, ends: draws (points) and law (lines)")
    ax.set(ylabel="mean Kolmogorov distance", xlim=(1e-3, 0.1), ylim=(1e-5, 1))
    for ax in axes.flat:
        ax.set(xscale="log", yscale="log", xlabel="step size")
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.legend(fontsize=8, frameon=False, loc="upper left")
    axes[1, 0].legend(fontsize=8, frameon=False, loc="lower right")
    ax = axes[0, 0]
    ax.set_xticks(toy_sizes[::2], [f"{h:.2g}" for h in toy_sizes[::2]])
    ax.set_ylim(top=30)  # space for the legend
    return figure


def main() -> None:
    """Figures 1, 5, 6 and appendix F.2."""
    quick = output.arguments(__doc__).quick
    # Moments follow exactly in float64.
    jax.config.update("jax_enable_x64", True)
    output.print_title("Franzese et al. (2021): two points and 256 trigonometric features")
    toy_sizes = np.geomspace(0.025, 0.4, 3 if quick else 9)
    toy_errors = toy(5 if quick else 30, toy_sizes)

    problem = make_regression()
    curvatures = [
        np.linalg.eigvalsh(problem.quadratic(rows)[0])[-1] for rows in (*BATCHES, FULL[0])
    ]
    print(
        f"regression: {len(problem.mean)} of {NUM_FEATURES} directions reached; largest curvature "
        f"{curvatures[-1]:.0f} on all rows, up to {max(curvatures[:-1]):.0f} on a minibatch"
    )
    integrators = ("lie_trotter", "mt3") if quick else tuple(ORDERS)
    step_sizes = 0.08 / 2.0 ** np.arange(9, -1, -3 if quick else -1)
    found = bottleneck(problem, integrators, step_sizes)
    windows = (slice(0, 2),) if quick else (slice(0, 4), slice(3, 7))
    slope_table(found, step_sizes, windows)
    lengths = (1, 10) if quick else (1, 5, 10, 25, 50, 100)
    integration_lengths(problem, lengths, step_sizes[windows[0]], (0.005, 0.02))
    drawn_sizes = (0.04,) if quick else (0.08, 0.04, 0.02)
    drawn_integrators = integrators[:1] if quick else ("leapfrog", "lie_trotter", "mt3")
    drawn, itself = distances(
        problem, drawn_integrators, drawn_sizes, *((50, 1.0) if quick else (1000, 15.0))
    )
    figure = plot(toy_errors, toy_sizes, found, step_sizes, drawn, itself, drawn_sizes)
    if not quick:
        output.save(figure, "franzese2021")


if __name__ == "__main__":
    main()
