r"""Chen, Ding and Carin (2015), *On the convergence of stochastic gradient MCMC algorithms with
high-order integrators*, NeurIPS: the experiments on synthetic data, Figures 1-3 and 5-8.

The model is :math:`x_i \sim N(\theta, 1)`, :math:`\theta \sim N(0, 1)`, with 1,000 points,
minibatches of 10 and the test function :math:`\phi(\theta) = \theta^2`, whose posterior mean is
known. Shown are the bias of the invariant measure against the step size, and bias and mean
squared error (MSE) against the number of steps L, for step sizes :math:`h_l = h_0 l^{-\alpha}`
(averages weighted by step size) and :math:`h = h_0 L^{-\alpha}`.

Where the paper is silent: the data come from :math:`\theta = 0`, so that the spread of
:math:`\phi` does not hide its bias; the friction is 30, of the paper's 10, 20 and 30; chains start
at half the posterior's standard deviation, where the two terms of the full gradient's bias have
one sign. The prefactors 0.033 and 0.045 are the paper's. The rows are dealt to 100 minibatches
once; a step takes the *full* gradient, a minibatch at random (*iid*), or the next of a random
order that is drawn anew each *epoch*.

Numbers called exact have no Monte Carlo error: see :mod:`chen2015_averages`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import output
from chen2015_averages import (
    EULER,
    EXPLICIT,
    NUM_BATCHES,
    PRECISION,
    SGHMC,
    Sampler,
    constant,
    exact,
    largest_step_size,
    simulate,
)
from chen2015_curves import Curve, Jackknifed, bias_of, end_slope, estimate
from chen2015_rates import (
    ALPHAS,
    EXACT_STOPS,
    Rates,
    figures_3_and_6,
    print_best,
    print_rates,
    rates,
)
from jax import Array, random

jax.config.update("jax_enable_x64", True)

# Figure 1: the invariant measure

LIMIT = np.array([1e-5, 2e-5])
NOISY = np.array([2e-4, 3e-4, 5e-4, 7e-4, 1e-3, 2e-3])
INTEGRATORS = {"symmetric": SGHMC, "Euler": EULER, "explicit Euler": EXPLICIT}
CASES = [
    ("full", "symmetric", 2, np.array([1e-2, 1.5e-2, 2e-2, 2.5e-2, 3e-2, 4e-2])),
    ("full", "Euler", 1, np.array([3e-3, 4e-3, 6e-3, 8e-3, 1e-2, 1.5e-2])),
    ("full", "explicit Euler", 1, np.array([5e-4, 7e-4, 1e-3, 1.5e-3, 2e-3, 3e-3])),
    ("iid", "symmetric", 2, NOISY),
    ("epoch", "symmetric", 2, NOISY),
    ("iid", "Euler", 1, NOISY),
    ("epoch", "Euler", 1, NOISY),
]
"""Gradient, integrator, the paper's order and step sizes at which the bias can be measured."""


def relative_bias(sampler: Sampler, order: str, h: np.ndarray, num_steps: int) -> np.ndarray:
    """Exact bias of phi over the posterior variance, averaged over the last steps."""
    burn_in = num_steps - 10 * NUM_BATCHES
    found = exact(sampler, order, constant(h), jnp.array([num_steps]), burn_in, 1.0)
    return PRECISION * np.asarray(found[0][0])


def simulated_bias(
    rng_key: Array, sampler: Sampler, order: str, h: np.ndarray, quick: bool
) -> Jackknifed:
    """Estimate :func:`relative_bias` by simulation."""
    runs, num_steps = (100, 2000) if quick else (2000 if order == "full" else 600, 30_000)
    stops, burn_in = jnp.array([num_steps]), num_steps // 5
    averages = simulate(rng_key, sampler, order, constant(h), stops, runs, burn_in, 1.0)
    return estimate(averages, lambda a: PRECISION * bias_of(a)[0])


def figure_1(quick: bool) -> dict[tuple[str, str], Curve]:
    curves, rows = {}, []
    for k, (order, name, theory, h) in enumerate(CASES[:1] + CASES[4:5] if quick else CASES):
        sampler = INTEGRATORS[name]
        truth = relative_bias(sampler, order, np.concatenate([LIMIT, h]), 100_000)
        found = simulated_bias(random.key(k), sampler, order, h, quick)
        curve = curves[order, name] = Curve(h, found, truth[2:])
        span, limit = f"{h[0]:g} to {h[-1]:g}", f"{end_slope(LIMIT, truth[:2]):.2f}"
        cells = curve.slope, f"{curve.exact_slope:.2f}", limit, theory
        rows.append((order, name, span, *cells))
    output.print_table(
        "Figure 1: order of the bias of the invariant measure in the step size h",
        ("gradient", "integrator", "h", "simulated", "exact", "exact, h to 0", "paper"),
        rows,
    )
    output.print_table(
        "Figure 1: Euler explodes at smaller steps (full gradient)",
        ("integrator", "largest stable h"),
        [(name, f"{largest_step_size(s):.4f}") for name, s in INTEGRATORS.items()],
    )
    return curves


# Figure

LINES = {"full": "-", "iid": ":", "epoch": "-."}
MARKERS = {"full": "o", "iid": "s", "epoch": "^"}


def draw(biases: dict[tuple[str, str], Curve], long: Rates, short: Rates) -> Any:
    figure, axes = plt.subplots(1, 3, figsize=(10, 4))
    draw_invariant(axes[0], biases)
    draw_rates(axes[1], "bias", "decreasing", long, short)
    draw_rates(axes[2], "MSE", "fixed", long, short)
    return figure


def draw_theory(ax: Any, x: Any, start: float, exponent: float, text: str) -> None:
    x = np.asarray(x, float)
    y = start * (x / x[0]) ** exponent
    ax.plot(x, y, "--", color="grey", lw=1)
    ax.annotate(text, (x[-1], y[-1]), xytext=(3, 0), textcoords="offset points", color="grey")


def draw_points(ax: Any, curve: Curve, order: str, colour: str) -> None:
    value, error = np.abs(curve.simulated.value), curve.simulated.error
    ax.errorbar(curve.x, value, error, fmt=MARKERS[order], ms=3, color=colour, capsize=2)


def draw_invariant(ax: Any, biases: dict[tuple[str, str], Curve]) -> None:
    colours = {"symmetric": "C0", "Euler": "C1", "explicit Euler": "C3"}
    for (order, name), curve in biases.items():
        top = 0.99 * largest_step_size(INTEGRATORS[name])
        h = np.geomspace(2e-4 if order == "full" else 1e-4, top, 60)
        y = np.abs(relative_bias(INTEGRATORS[name], order, h, 30_000))
        ax.plot(h, y, LINES[order], color=colours[name], label=f"{order}, {name}")
        draw_points(ax, curve, order, colours[name])
    draw_theory(ax, [5e-3, 5e-2], 2e-5, 1.0, "h")
    draw_theory(ax, [5e-3, 5e-2], 2e-5, 2.0, "h²")
    ax.set(xscale="log", yscale="log", xlabel="step size h", ylim=(1e-6, 1e6))
    ax.set(ylabel="|bias| / variance", title="Bias of the invariant measure (Fig. 1)")
    ax.legend(fontsize=8, loc="upper left", ncols=2)


def draw_rates(ax: Any, criterion: str, kind: str, long: Rates, short: Rates) -> None:
    for order in ("full", "iid"):
        for i, alpha in enumerate(ALPHAS):
            far, near = long[criterion, order, kind][i], short[criterion, order, kind][i]
            label = f"α = {alpha:.2f}" if order == "full" else None
            ax.plot(far.x, np.abs(far.exact), LINES[order], color=f"C{i}", label=label)
            draw_points(ax, near, order, f"C{i}")
    exponent, text = (-2 / 3, "$L^{-2/3}$") if criterion == "bias" else (-4 / 5, "$L^{-4/5}$")
    low = min(abs(c.exact[0]) for c in long[criterion, "full", kind])
    draw_theory(ax, EXACT_STOPS[[0, -1]], low / 3, exponent, text)
    ax.set(xscale="log", yscale="log", xlabel="steps L", xlim=(70, 5e6))
    ax.set_ylim(bottom=1e-5 * low)  # space for the legend
    ax.set(ylabel={"bias": "|bias| / variance", "MSE": "MSE / variance²"}[criterion])
    ax.set(title=f"{criterion[0].upper() + criterion[1:]}, {kind} steps (Fig. 2)")
    ax.legend(fontsize=8, loc="lower left", title="solid: full\ndotted: iid", title_fontsize=8)


def agreement(curves: Iterable[Curve]) -> str:
    close, total = np.sum([c.within for c in curves], axis=0)
    return f"{close} of {total}"


def main() -> None:
    quick = output.arguments(__doc__).quick
    output.print_title("Chen, Ding and Carin (2015): synthetic experiments")
    biases = figure_1(quick)
    short, long = rates(quick)
    for criterion in ("bias", "MSE"):
        print_rates(criterion, short, long)
    print_best(long)
    figures_3_and_6(quick)
    everything = [*biases.values(), *(c for curves in short.values() for c in curves)]
    print(f"simulated values within two standard errors of the exact: {agreement(everything)}")
    if not quick:
        output.save(draw(biases, long, short), "chen2015")


if __name__ == "__main__":
    main()
