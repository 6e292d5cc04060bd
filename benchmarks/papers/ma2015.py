r"""A complete recipe for stochastic gradient MCMC: the synthetic experiments.

Reproduces Figures 2 and 3 (left) of Ma, Chen and Fox (2015), *A complete recipe for stochastic
gradient MCMC*: which samplers leave two densities on the line invariant, and how fast they explore
a banana in the plane. The metric is the paper's, ``G^-1 = D sqrt|U + C|`` with D = 3/2, C = 1/2.

The paper gives no step sizes, friction, run lengths or gradient noise. Here each sampler runs on
a grid of step sizes (and frictions, where speed is compared), with the exact gradient unless said
otherwise, by the paper's Euler scheme and by the library's symmetric splitting.

Divergences are ``KL(histogram, density)`` over bins of equal mass. Those of long runs are
jackknifed over groups of independent chains, which takes the finite sample's bias away and gives
the standard error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import common
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax import Array, lax, random
from scipy.stats import norm

from numpyro_sgmcmc.dynamics import Overdamped, Riemannian, RiemannianLangevin, Underdamped

jax.config.update("jax_enable_x64", True)

D, C = 1.5, 0.5
NUM_GROUPS = 16
SHARED = (0.03, 1.0)
SLOPES = 0.9 * jnp.array([1.0, -1.0] * 500)
COLORS = {"SGLD": "C0", "SGRLD": "C4", "SGHMC": "C1", "naive": "C3", "gSGRHMC": "C2"}

Sampler = Callable[[Array], tuple[Any, Any, Callable[[Array], Array]]]
"""``key -> (dynamics, step, gradient)`` on the minibatch that the key draws."""

Make = Callable[[Callable, Any], Sampler]
"""``(potential, friction) -> sampler``."""


class Target(NamedTuple):
    """
    - **name** - the potential as printed.
    - **potential** - U, of a position of shape ``(d,)``.
    - **bin_of** - the index of a position's bin; all bins have the same mass.
    - **num_bins** - their number.
    - **start** - where runs that measure speed begin.
    """

    name: str
    potential: Callable[[Array], Array]
    bin_of: Callable[[Array], Array]
    num_bins: int
    start: tuple[float, ...]


# --- Densities on the line ----------------------------------------------------------------------

GRID = np.linspace(-8.0, 8.0, 160_001)


def on_grid(potential: Callable) -> np.ndarray:
    """``exp(-U)`` on the grid, normalized."""
    density = np.exp(-np.asarray(jax.vmap(lambda x: potential(x[None]))(jnp.asarray(GRID))))
    return density / np.trapezoid(density, GRID)


def quantile_edges(density: np.ndarray, num_bins: int) -> np.ndarray:
    """The inner edges of bins of equal mass."""
    cumulative = np.cumsum(density)
    return np.interp(np.arange(1, num_bins) / num_bins, cumulative / cumulative[-1], GRID)


def binned_divergence(density: np.ndarray, edges: np.ndarray) -> float:
    """KL over the bins of a density on the grid, not necessarily normalized."""
    mass = np.bincount(np.searchsorted(edges, GRID), weights=density, minlength=len(edges) + 1)
    return divergence(mass)


def normal_potential(q: Array) -> Array:
    return q[0] ** 2 / 2


def double_well(q: Array) -> Array:
    return q[0] ** 4 - 2 * q[0] ** 2


def lifted_double_well(q: Array) -> Array:
    """The same density with the smallest potential zero, where U + C has no roots."""
    return double_well(q) + 1.0


def line(name: str, potential: Callable, start: float, num_bins: int = 40) -> Target:
    edges = jnp.asarray(quantile_edges(on_grid(potential), num_bins))
    return Target(name, potential, lambda q: jnp.sum(edges < q[0]), num_bins, (start,))


# --- The banana ---------------------------------------------------------------------------------


def banana_potential(q: Array) -> Array:
    return q[0] ** 4 / 10 + (4 * (q[1] + 1.2) - q[0] ** 2) ** 2 / 2


def banana(num_along: int = 16, num_across: int = 8) -> Target:
    """The coordinate along is independent of the offset across, which is standard normal."""
    along = jnp.asarray(quantile_edges(on_grid(lambda q: q[0] ** 4 / 10), num_along))
    across = jnp.asarray(norm.ppf(np.arange(1, num_across) / num_across))

    def bin_of(q: Array) -> Array:
        offset = 4 * (q[1] + 1.2) - q[0] ** 2
        return num_across * jnp.sum(along < q[0]) + jnp.sum(across < offset)

    return Target("banana", banana_potential, bin_of, num_along * num_across, (0.0, -1.2))


# --- Samplers -----------------------------------------------------------------------------------


def inverse_metric(potential: Callable, q: Array) -> Array:
    return D * jnp.sqrt(jnp.abs(potential(q) + C))


def exactly(potential: Callable, dynamics: Any, scheme: str) -> Sampler:
    """A sampler with the exact gradient."""
    return lambda key: (dynamics, dynamics.step(scheme), jax.grad(potential))


def sgld(potential: Callable, friction: Any, scheme: str) -> Sampler:
    return exactly(potential, Overdamped(), scheme)


def sgrld(potential: Callable, friction: Any, scheme: str) -> Sampler:
    return exactly(potential, RiemannianLangevin(partial(inverse_metric, potential)), scheme)


def sghmc(potential: Callable, friction: Any, scheme: str) -> Sampler:
    return exactly(potential, Underdamped(friction), scheme)


def gsgrhmc(potential: Callable, friction: Any, scheme: str) -> Sampler:
    return exactly(potential, Riemannian(partial(inverse_metric, potential), friction), scheme)


def naive_potential(potential: Callable, q: Array) -> Array:
    """``U + log S``, S = G^-1/2, whose density is what the naive sampler samples."""
    return potential(q) + 0.5 * jnp.log(inverse_metric(potential, q))


def naive(potential: Callable, friction: Any, scheme: str) -> Sampler:
    """The paper's equation (16), without the divergence of S.

    That divergence is S times the gradient of log S, so a gradient with log S in it cancels it.
    """
    dynamics = Riemannian(partial(inverse_metric, potential), friction)
    gradient = jax.grad(partial(naive_potential, potential))
    return lambda key: (dynamics, dynamics.step(scheme), gradient)


def with_minibatches(potential: Callable, friction: Any, scheme: str, source: str) -> Sampler:
    """The generalized SGRHMC with gradients from one row a step.

    The rows are of two kinds that add opposite slopes to the potential. The slopes are below one,
    so that U + C has no roots for any row at U = θ²/2.

    :param source: of the potential in the metric: ``"all rows"``, ``"the same row"`` as the
        gradient's, or ``"another row"``.
    """

    def on_row(row: Array) -> Callable:
        return lambda q: potential(q) + SLOPES[row] * q[0]

    def sampler(key: Array) -> tuple:
        row, other = random.randint(key, (2,), 0, SLOPES.size)
        in_metric = {
            "all rows": potential,
            "the same row": on_row(row),
            "another row": on_row(other),
        }[source]
        dynamics = Riemannian(partial(inverse_metric, in_metric), friction)
        return dynamics, dynamics.step(scheme), jax.grad(on_row(row))

    return sampler


def same_row_density(potential: Callable) -> np.ndarray:
    """What the sampler samples at small steps where one row gives the metric and the gradient.

    The mean force is that of a potential with slope E[S grad U] / E[S], over rows.
    """
    slopes = np.unique(SLOPES)
    u = np.asarray(jax.vmap(lambda x: potential(x[None]))(jnp.asarray(GRID)))[:, None]
    root = np.abs(u + slopes * GRID[:, None] + C) ** 0.25
    extra = np.cumsum((root * slopes).sum(1) / root.sum(1)) * (GRID[1] - GRID[0])
    log_density = -u[:, 0] - extra
    return np.exp(log_density - log_density.max())


# --- Runs ---------------------------------------------------------------------------------------


@partial(jax.jit, static_argnums=(0, 1, 5))
def simulate(
    target: Target, make: Make, key: Array, starts: Array, settings: Array, num_steps: int
) -> tuple[Array, Array]:
    """Bins visited, shape ``(steps, settings, runs)``, and which runs ended in a number.

    :param starts: shape ``(runs, d)``.
    :param settings: step sizes and frictions, shape ``(settings, 2)``.
    """
    shape = (len(settings), len(starts))
    draws = make(target.potential, 1.0)(key)[1].draws

    def init(key: Array, start: Array, setting: Array) -> Any:
        return make(target.potential, setting[1])(key)[0].init(start, key)

    def advance(state: Any, noise: Array, key: Array, setting: Array) -> tuple[Any, Array]:
        _, step, gradient = make(target.potential, setting[1])(key)
        state = step(state, setting[0], gradient, noise)
        return state, target.bin_of(state.position).astype(jnp.uint8)

    def over_all(fn: Callable, *per_run: int | None) -> Callable:
        return jax.vmap(jax.vmap(fn, (*per_run, None)), (0,) * len(per_run) + (0,))

    def body(state: Any, key: Array) -> tuple[Any, Array]:
        noise_key, row_key = random.split(key)
        noise = random.normal(noise_key, (*shape, draws, starts.shape[1]))
        return over_all(advance, 0, 0, 0)(state, noise, random.split(row_key, shape), settings)

    init_key, key = random.split(key)
    repeated = jnp.broadcast_to(starts, (shape[0], *starts.shape))
    state = over_all(init, 0, 0)(random.split(init_key, shape), repeated, settings)
    state, bins = lax.scan(body, state, random.split(key, num_steps))
    return bins, jnp.isfinite(state.position).all(-1)


def divergence(counts: Any) -> float:
    """KL of the counts' frequencies from equal ones."""
    share = np.asarray(counts, float) / np.sum(counts)
    kept = share[share > 0]
    return float(np.sum(kept * np.log(kept * share.size)))


def jackknifed(counts: np.ndarray) -> tuple[float, float]:
    """KL without its bias of order 1/n, and its standard error.

    :param counts: of independent groups, shape ``(groups, bins)``.
    """
    n, total = len(counts), counts.sum(0)
    left_out = np.array([divergence(total - c) for c in counts])
    value = n * divergence(total) - (n - 1) * left_out.mean()
    return value, float(np.sqrt((n - 1) / n * np.sum((left_out - left_out.mean()) ** 2)))


class LongRun(NamedTuple):
    """
    - **value**, **error** - KL and its standard error; NaN where a chain diverged.
    - **diverged** - share of the chains that ended in no number.
    - **share** - of the draws in each bin.
    """

    value: float
    error: float
    diverged: float
    share: np.ndarray


def long_runs(
    target: Target,
    make: Make,
    step_sizes: Sequence[float],
    num_chains: int,
    num_steps: int,
    seed: int = 0,
) -> list[LongRun]:
    """Chains from exact draws; friction 1, as in the paper's metric; the first quarter left out."""
    start_key, key = random.split(random.key(seed))
    cumulative = np.cumsum(on_grid(target.potential))
    levels = random.uniform(start_key, (num_chains,))
    starts = jnp.interp(levels, cumulative / cumulative[-1], GRID)[:, None]
    settings = jnp.stack([jnp.asarray(step_sizes), jnp.ones(len(step_sizes))], 1)
    bins, finite = simulate(target, make, key, starts, settings, num_steps)
    bins, found = np.asarray(bins[num_steps // 4 :]), []
    for i, ok in enumerate(np.asarray(finite)):
        groups = bins[:, i].reshape(len(bins), NUM_GROUPS, -1)
        counts = np.stack(
            [
                np.bincount(groups[:, g].ravel(), minlength=target.num_bins)
                for g in range(NUM_GROUPS)
            ]
        )
        value, error = jackknifed(counts) if ok.all() else (np.nan, np.nan)
        found.append(LongRun(value, error, 1.0 - ok.mean(), counts.sum(0) / counts.sum()))
    return found


class Speed(NamedTuple):
    """
    - **value**, **error** - mean KL of one run's histogram after each number of steps.
    - **step_size**, **friction** - the best of the grid, for each number of steps.
    - **common**, **common_error** - mean KL at the settings that all samplers share.
    """

    value: np.ndarray
    error: np.ndarray
    step_size: np.ndarray
    friction: np.ndarray
    common: np.ndarray
    common_error: np.ndarray


def speed(
    target: Target,
    make: Make,
    settings: np.ndarray,
    lengths: Sequence[int],
    num_runs: int,
    seed: int = 1,
) -> Speed:
    """Settings chosen on one half of the runs and measured on the other: choosing flatters none.

    :param settings: step sizes and frictions, those that all samplers share first.
    """
    starts = jnp.tile(jnp.asarray(target.start), (num_runs, 1))
    bins, finite = simulate(
        target, make, random.key(seed), starts, jnp.asarray(settings), lengths[-1]
    )
    bins = np.asarray(bins).reshape(lengths[-1], -1)
    offsets = np.arange(bins.shape[1]) * target.num_bins
    counts = np.zeros((bins.shape[1], target.num_bins))
    values = []
    for first, last in zip((0, *lengths[:-1]), lengths, strict=True):
        visited = (bins[first:last] + offsets).ravel()
        counts += np.bincount(visited, minlength=counts.size).reshape(counts.shape)
        share = counts / last
        logs = np.log(np.where(share > 0, share, 1.0) * target.num_bins)
        values.append((share * logs).sum(-1))
    # A run that diverged has explored nothing: it gets the largest divergence that there is.
    values = np.stack(values).reshape(len(lengths), len(settings), num_runs)
    values = np.where(np.asarray(finite), values, np.log(target.num_bins))
    half = num_runs // 2
    best = values[..., :half].mean(-1).argmin(1)
    tested = np.take_along_axis(values[..., half:], best[:, None, None], 1)[:, 0]
    shared = values[:, 0]

    def error(x: np.ndarray) -> np.ndarray:
        return x.std(1, ddof=1) / np.sqrt(x.shape[1])

    return Speed(tested.mean(1), error(tested), *settings[best].T, shared.mean(1), error(shared))


# --- The experiments ----------------------------------------------------------------------------

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
        return f"{100 * run.diverged:.3g} % diverged"
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
        make, scheme = INVARIANCE[name]
        make = partial(make, scheme=scheme)
        found[name] = long_runs(target, make, step_sizes, num_chains, num_steps)
    limit = f"{1000 * naive_limit(target):.2f}"
    common.print_table(
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
    for scheme in ("explicit_euler", "symmetric"):
        make = partial(gsgrhmc, scheme=scheme)
        runs = long_runs(target, make, step_sizes, num_chains, num_steps)
        rows.append((scheme, *(f"{100 * r.diverged:.3g} %" for r in runs)))
    common.print_table(
        "gSGRHMC on U = θ⁴ - 2θ² as it stands, its smallest value not lifted to 0: share of the "
        "chains that diverge",
        ("scheme", *(f"h = {h:g}" for h in step_sizes)),
        rows,
    )


def minibatch_metrics(
    target: Target, step_sizes: Sequence[float], num_chains: int, num_steps: int
) -> None:
    """Whether the potential in the metric may be the minibatch's, as in the paper."""
    edges = quantile_edges(on_grid(target.potential), target.num_bins)
    biased = binned_divergence(same_row_density(target.potential), edges)
    rows = []
    for source in ("all rows", "another row", "the same row"):
        make = partial(with_minibatches, scheme="symmetric", source=source)
        runs = long_runs(target, make, step_sizes, num_chains, num_steps)
        theory = f"{1000 * biased:.2f}" if source == "the same row" else "0"
        rows.append((source, *map(scientific, runs), theory))
    common.print_table(
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
        make, scheme = SPEED[name]
        has_friction = make in (sghmc, gsgrhmc)
        used = frictions if has_friction else frictions[:1]
        settings = np.array([SHARED, *((h, friction) for friction in used for h in step_sizes)])
        found[name] = s = speed(target, partial(make, scheme=scheme), settings, lengths, num_runs)
        # n independent draws have a mean KL of about (bins - 1) / 2n.
        per_draw = 2 * lengths[-1] / (target.num_bins - 1) * np.array([s.value[-1], s.error[-1]])
        rows.append(
            (
                name,
                *(f"{v:.3f} ± {e:.3f}" for v, e in zip(s.value, s.error, strict=True)),
                f"{per_draw[0]:.1f} ± {per_draw[1]:.1f}",
                f"{s.step_size[-1]:.2g}",
                f"{s.friction[-1]:g}" if has_friction else "-",
                f"{s.common[-1]:.3f} ± {s.common_error[-1]:.3f}",
            )
        )
    common.print_table(
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
    figure, axes = plt.subplots(2, 2, figsize=(11, 8.5), layout="constrained")
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
        ax.errorbar(lengths, s.value, s.error, **line_of(name))
    draws = np.array(lengths)
    ax.plot(draws, (num_bins - 1) / 2 / draws, color="grey", ls="--", label="independent draws")
    ax.set(xscale="log", yscale="log", xlabel="gradients", ylabel="mean KL of one run")
    ax.set_xticks(lengths, [str(n) for n in lengths])
    ax.minorticks_off()
    ax.set_title("banana: each sampler at its best settings")
    ax.legend(fontsize=8, frameon=False, loc="lower left")
    return figure


def main() -> None:
    quick = common.arguments(__doc__).quick
    common.print_title("Ma, Chen and Fox (2015): two densities on the line and a banana")
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
        common.save(figure, "ma2015")


if __name__ == "__main__":
    main()
