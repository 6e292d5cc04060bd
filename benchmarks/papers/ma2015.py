r"""A complete recipe for stochastic gradient MCMC: the synthetic experiments.

Reproduces Figures 2 and 3 (left) of Ma, Chen and Fox (2015), *A complete recipe for stochastic
gradient MCMC*: which samplers leave two densities on the line invariant, and how fast they explore
a banana in the plane. The metric is the paper's, ``G^-1 = D sqrt|U + C|`` with D = 3/2, C = 1/2.

The paper gives no step sizes, friction, run lengths or gradient noise. Here each sampler runs on
a grid of step sizes (and frictions, where speed is compared), with the exact gradient unless said
otherwise, by the paper's Euler integrator and by the library's symmetric splitting.

Divergences are ``KL(histogram, density)`` over bins of equal mass. Those of long runs are
jackknifed over groups of independent chains, which takes the finite sample's bias away and gives
the standard error.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
import output
from ma2015_runs import LongRun, Speed, long_runs, speed
from ma2015_samplers import (
    SLOPES,
    gsgrhmc,
    naive,
    naive_potential,
    same_row_density,
    sghmc,
    sgld,
    sgrld,
    with_minibatches,
)
from ma2015_targets import (
    GRID,
    Target,
    banana,
    binned_divergence,
    double_well,
    lifted_double_well,
    line,
    normal_potential,
    on_grid,
    quantile_edges,
)
from standard_errors import Mean

jax.config.update("jax_enable_x64", True)

SHARED = (0.03, 1.0)
"""Step size and friction at which samplers are compared."""
COLORS = {"SGLD": "C0", "SGRLD": "C4", "SGHMC": "C1", "naive": "C3", "gSGRHMC": "C2"}

INVARIANCE = {
    "SGLD": (sgld, "euler"),
    "SGHMC": (sghmc, "explicit_euler"),
    "SGHMC, symmetric": (sghmc, "symmetric"),
    "naive": (naive, "explicit_euler"),
    "naive, symmetric": (naive, "symmetric"),
    "gSGRHMC": (gsgrhmc, "explicit_euler"),
    "gSGRHMC, symmetric": (gsgrhmc, "symmetric"),
}
SPEED = {
    "SGLD": (sgld, "euler"),
    "SGRLD": (sgrld, "euler"),
    "SGHMC": (sghmc, "explicit_euler"),
    "gSGRHMC": (gsgrhmc, "explicit_euler"),
    "SGHMC, symmetric": (sghmc, "symmetric"),
    "gSGRHMC, symmetric": (gsgrhmc, "symmetric"),
}


def scientific(run: LongRun) -> str:
    if run.diverged > 0:
        return f"{100 * run.diverged:.3g}% diverged"
    return f"{1000 * run.value:.2f} ± {1000 * run.error:.2f}"


def naive_limit(target: Target) -> float:
    """KL of the naive sampler's own density, at a step size of zero."""
    density = on_grid(partial(naive_potential, target.potential))
    return binned_divergence(density, quantile_edges(on_grid(target.potential), target.num_bins))


def invariance(
    target: Target,
    samplers: Sequence[str],
    step_sizes: Sequence[float],
    num_chains: int,
    num_steps: int,
) -> dict[str, list[LongRun]]:
    """Figure 2: the divergence of long runs, against the step size."""
    found = {}
    for name in samplers:
        make, integrator = INVARIANCE[name]
        make = partial(make, integrator=integrator)
        found[name] = long_runs(target, make, step_sizes, num_chains, num_steps)
    limit = f"{1000 * naive_limit(target):.2f}"
    output.print_table(
        f"Figure 2, U = {target.name}: 1000 KL of long runs by step size, exact gradients. The "
        "paper: all but the naive sampler converge to the target.",
        ("sampler", *(f"h = {h:g}" for h in step_sizes), "h -> 0, theory"),
        [
            (name, *map(scientific, runs), limit if name.startswith("naive") else "0")
            for name, runs in found.items()
        ],
    )
    return found


def vanishing_metric(step_sizes: Sequence[float], num_chains: int, num_steps: int) -> None:
    """The double well as the paper writes it: U + C has four roots, where the metric is zero."""
    target = line("θ⁴ - 2θ²", double_well, 1.0)
    rows = []
    for integrator in ("explicit_euler", "symmetric"):
        make = partial(gsgrhmc, integrator=integrator)
        runs = long_runs(target, make, step_sizes, num_chains, num_steps)
        rows.append((integrator, *(f"{100 * r.diverged:.3g}%" for r in runs)))
    output.print_table(
        "gSGRHMC on U = θ⁴ - 2θ² as it stands, its smallest value not lifted to 0: share of the "
        "chains that diverge",
        ("integrator", *(f"h = {h:g}" for h in step_sizes)),
        rows,
    )


def minibatch_metrics(
    target: Target, step_sizes: Sequence[float], num_chains: int, num_steps: int
) -> None:
    """Check whether the metric may use the potential of the minibatch, as in the paper."""
    edges = quantile_edges(on_grid(target.potential), target.num_bins)
    biased = binned_divergence(same_row_density(target.potential), edges)
    rows = []
    for source in ("all rows", "another row", "the same row"):
        make = partial(with_minibatches, integrator="symmetric", source=source)
        runs = long_runs(target, make, step_sizes, num_chains, num_steps)
        theory = f"{1000 * biased:.2f}" if source == "the same row" else "0"
        rows.append((source, *map(scientific, runs), theory))
    output.print_table(
        f"gSGRHMC (symmetric), U = {target.name}, gradients from one row of variance "
        f"{SLOPES.var():.2f}: 1000 KL by where the metric's U comes from",
        ("U in the metric", *(f"h = {h:g}" for h in step_sizes), "h -> 0, theory"),
        rows,
    )


def exploration(
    target: Target,
    samplers: Sequence[str],
    frictions: Sequence[float],
    step_sizes: np.ndarray,
    lengths: Sequence[int],
    num_runs: int,
) -> dict[str, Speed]:
    """Figure 3: the divergence of a single run's histogram, against its length."""
    found, rows = {}, []
    for name in samplers:
        make, integrator = SPEED[name]
        has_friction = make in (sghmc, gsgrhmc)
        used = frictions if has_friction else frictions[:1]
        settings = np.array([SHARED, *((h, friction) for friction in used for h in step_sizes)])
        found[name] = s = speed(
            target, partial(make, integrator=integrator), settings, lengths, num_runs
        )
        # n independent draws have a mean KL of about (bins - 1) / 2n.
        per_draw = Mean(*(2 * lengths[-1] / (target.num_bins - 1) * np.array(s.best[-1])))
        rows.append(
            (
                name,
                *(f"{s.best[i]:.3f}" for i in range(len(lengths))),
                f"{per_draw:.1f}",
                f"{s.step_size[-1]:.2g}",
                f"{s.friction[-1]:g}" if has_friction else "-",
                f"{s.shared[-1]:.3f}",
            )
        )
    output.print_table(
        f"Exploring, U = {target.name}: mean KL of one run after n gradients, each at its best "
        "settings; gradients an independent draw and best settings at the largest n",
        (
            "sampler",
            *(f"n = {n}" for n in lengths),
            "gradients a draw",
            "h",
            "friction",
            f"n = {lengths[-1]} at h = {SHARED[0]:g}, friction {SHARED[1]:g}",
        ),
        rows,
    )
    return found


# --- The figure ---------------------------------------------------------------------------------


def plot_density(ax: Any, target: Target, runs: dict[str, LongRun], reach: float) -> None:
    exact = on_grid(target.potential)
    edges = quantile_edges(exact, target.num_bins)
    ax.plot(GRID, exact, color="black", lw=1, label="exact")
    tilted = on_grid(partial(naive_potential, target.potential))
    ax.plot(GRID, tilted, color="grey", ls="--", label="naive in theory")
    centers, widths = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    for name, marker in (("SGHMC", "v"), ("naive", "x"), ("gSGRHMC", "o")):
        density = runs[f"{name}, symmetric"].share[1:-1] / widths
        ax.plot(centers, density, marker, color=COLORS[name], ms=4, mfc="none", label=name)
    ax.set(xlim=(-reach, reach), ylim=(0, 0.72), xlabel="θ", ylabel="density")
    ax.legend(loc="upper center", fontsize=8, frameon=False, ncols=3)


def line_of(name: str) -> dict[str, Any]:
    """Color, line and label of a sampler."""
    kind, is_symmetric = name.split(",")[0], "symmetric" in name
    return {
        "color": COLORS[kind],
        "ls": "-" if is_symmetric else ":",
        "marker": "o" if is_symmetric else "s",
        "ms": 4,
        "capsize": 2,
        "label": name if is_symmetric or kind in ("SGLD", "SGRLD") else f"{name}, Euler",
    }


def plot(
    targets: Sequence[Target],
    step_sizes: Sequence[Sequence[float]],
    found: Sequence[dict[str, list[LongRun]]],
    explored: dict[str, Speed],
    lengths: Sequence[int],
    num_bins: int,
) -> Any:
    figure, axes = plt.subplots(2, 2, figsize=(9, 7))
    panels = zip(axes[0], targets, found, step_sizes, (3.2, 2.0), (2, 1), strict=True)
    for ax, target, runs, sizes, reach, at in panels:
        plot_density(ax, target, {name: r[at] for name, r in runs.items()}, reach)
        ax.set_title(f"U = {target.name}, symmetric splitting, h = {sizes[at]:g}")
    ax = axes[1, 0]
    for name, runs in found[0].items():
        value, error = (1000 * np.array([getattr(r, f) for r in runs]) for f in ("value", "error"))
        ax.errorbar(step_sizes[0], value, error, **line_of(name))
    limit = 1000 * naive_limit(targets[0])
    ax.axhline(limit, color="grey", ls="--", label="naive in theory, h → 0")
    ax.set_xscale("log")
    ax.set_yscale("symlog", linthresh=0.1)
    ax.set_xticks(step_sizes[0], [f"{h:g}" for h in step_sizes[0]])
    ax.minorticks_off()
    ax.set(xlabel="step size", ylabel="1000 KL of long runs", ylim=(-0.1, 5000))
    ax.set_title(f"U = {targets[0].name}: what is left after long runs")
    ax.legend(fontsize=8, frameon=False, loc="upper left", ncols=2)
    ax = axes[1, 1]
    for name, s in explored.items():
        ax.errorbar(lengths, *s.best, **line_of(name))
    draws = np.array(lengths)
    ax.plot(draws, (num_bins - 1) / 2 / draws, color="grey", ls="--", label="independent draws")
    ax.set(xscale="log", yscale="log", xlabel="gradients", ylabel="mean KL of one run")
    ax.set_xticks(lengths, [str(n) for n in lengths])
    ax.minorticks_off()
    ax.set_title("banana: each sampler at its best settings")
    ax.legend(fontsize=8, frameon=False, loc="lower left")
    return figure


def main() -> None:
    quick = output.arguments(__doc__).quick
    output.print_title("Ma, Chen and Fox (2015): two densities on the line and a banana")
    size = (128, 400) if quick else (1024, 3000)
    symmetric = [name for name in INVARIANCE if "symmetric" in name]
    samplers = symmetric if quick else list(INVARIANCE)
    targets = (line("θ²/2", normal_potential, 0.0), line("θ⁴ - 2θ² + 1", lifted_double_well, 1.0))
    step_sizes = ((0.4, 0.2, 0.1, 0.05), (0.1, 0.05, 0.025, 0.0125))
    found = [
        invariance(target, samplers, sizes, *size)
        for target, sizes in zip(targets, step_sizes, strict=True)
    ]
    vanishing_metric(step_sizes[1], *size)
    minibatch_metrics(targets[0], (0.2, 0.1, 0.05, 0.025), *size)

    lengths = (100, 300, 1000) if quick else (100, 300, 1000, 3000)
    grid = np.geomspace(0.003, 0.6, 4 if quick else 10)
    frictions, num_runs = ((1.0,), 32) if quick else ((0.5, 1.0, 2.0), 128)
    movers = [name for name in SPEED if "symmetric" in name] if quick else list(SPEED)
    plane = banana()
    explored = [
        exploration(target, movers, frictions, grid, lengths, num_runs)
        for target in ((plane,) if quick else (targets[1], plane))
    ]
    figure = plot(targets, step_sizes, found, explored[-1], lengths, plane.num_bins)
    if not quick:
        output.save(figure, "ma2015")


if __name__ == "__main__":
    main()
