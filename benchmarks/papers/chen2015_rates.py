"""Figures 2, 3, 5, 6 and 7 of Chen, Ding and Carin (2015): bias and mean squared error against the
number of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
import output
from chen2015_averages import (
    PRECISION,
    SGHMC,
    SGLD,
    Averages,
    Sampler,
    Steps,
    constant,
    exact,
    simulate,
)
from chen2015_curves import Curve, Jackknifed, bias_of, end_slope, estimate, mse_of, pick
from jax import Array, random

from numpyro_sgmcmc.sampling.schedules import optimal_decay_exponent

ALPHAS = (0.1, 1 / 5, 1 / 3, 1 / 2, 0.7)
PREFACTORS = {"decreasing": 0.045, "fixed": 0.033}
STOPS = np.array([100, 300, 1000, 3000])
EXACT_STOPS = np.array([100, 300, 1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000])
Rates: TypeAlias = dict[tuple[str, str, str], list[Curve]]
"""A curve for each alpha, by criterion, gradient and kind of step size."""


def fixed_steps(prefactor: float, alphas: Sequence[float], num_steps: Any) -> np.ndarray:
    return prefactor * np.asarray(num_steps, float)[..., None] ** -np.asarray(alphas)


def exact_rates(
    sampler: Sampler, order: str, kind: str, prefactor: float, alphas: Sequence[float], stops: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Bias and MSE at each stop, shape ``(stops, alphas)``, over powers of the variance."""
    if kind == "decreasing":
        steps = Steps(jnp.full(len(alphas), prefactor), jnp.asarray(alphas))
        found = exact(sampler, order, steps, jnp.asarray(stops))
    else:
        h = fixed_steps(prefactor, alphas, stops)
        found = exact(sampler, order, constant(h.ravel()), jnp.asarray(stops))
        diagonal = np.arange(len(stops))
        found = tuple(np.asarray(y).reshape(-1, *h.shape)[diagonal, diagonal] for y in found)
    bias, mse = map(np.asarray, found)
    return PRECISION * bias, PRECISION**2 * mse


def simulated_rates(
    rng_key: Array,
    sampler: Sampler,
    order: str,
    kind: str,
    prefactor: float,
    alphas: Sequence[float],
    stops: np.ndarray,
    runs: int,
) -> tuple[Jackknifed, Jackknifed]:
    """Estimate :func:`exact_rates` by simulation."""
    if kind == "decreasing":
        steps = Steps(jnp.full(len(alphas), prefactor), jnp.asarray(alphas))
        averages = simulate(rng_key, sampler, order, steps, jnp.asarray(stops), runs)
    else:
        parts = [
            simulate(
                random.fold_in(rng_key, int(num_steps)),
                sampler,
                order,
                constant(fixed_steps(prefactor, alphas, num_steps)),
                jnp.array([num_steps]),
                runs,
            )
            for num_steps in stops
        ]
        averages = Averages(*(np.concatenate(field) for field in zip(*parts, strict=True)))
    return (
        estimate(averages, lambda a: PRECISION * bias_of(a)),
        estimate(averages, lambda a: PRECISION**2 * mse_of(a)),
    )


def rate(criterion: str, order: int, alpha: float) -> float:
    """The theory's exponent of L for an integrator of this order."""
    return -min(1.0 - alpha, order * alpha * (1 if criterion == "bias" else 2))


def rates(quick: bool) -> tuple[Rates, Rates]:
    """Curves over the simulated range, and exact ones over a longer one."""
    short: Rates = {}
    long: Rates = {}
    exact_stops = EXACT_STOPS[:5] if quick else EXACT_STOPS
    stops = STOPS[:2] if quick else STOPS
    for order in ("full", "iid"):
        runs = 100 if quick else {"full": 20_000, "iid": 4000}[order]
        for kind, prefactor in PREFACTORS.items():
            setting = SGHMC, order, kind, prefactor, ALPHAS
            found = simulated_rates(random.key(10), *setting, stops, runs)
            truth = exact_rates(*setting, exact_stops)
            for criterion, simulated, true in zip(("bias", "MSE"), found, truth, strict=True):
                key = criterion, order, kind
                at = range(len(ALPHAS))
                each = [pick(simulated, lambda y, i=i: y[..., i]) for i in at]
                short[key] = [Curve(stops, each[i], true[: len(stops), i]) for i in at]
                long[key] = [Curve(exact_stops, each[i], true[:, i]) for i in at]
    return short, long


def print_rates(criterion: str, short: Rates, long: Rates) -> None:
    rows = []
    for i, alpha in enumerate(ALPHAS):
        for kind in PREFACTORS:
            cells: list[Any] = [f"{alpha:.2f}", kind]
            for order, K in (("full", 2), ("iid", 1)):
                near, far = short[criterion, order, kind][i], long[criterion, order, kind][i]
                cells += [
                    f"{near.slope} ({near.exact_slope:.2f})",
                    f"{end_slope(far.x, far.exact):.2f}",
                    f"{rate(criterion, K, alpha):.2f}",
                ]
            rows.append(cells)
    first, last = next(iter(short.values()))[0].x[[0, -1]]
    end = next(iter(long.values()))[0].x[-2:]
    output.print_table(
        f"Figures 2, 5 and 7: exponent of L in the {criterion}; simulated from L = {first} to "
        f"{last} (exact there), exact from {end[0]:.0e} to {end[1]:.0e}, and the theory for "
        "order 2 and order 1",
        ("alpha", "steps", "full", "full, far", "K = 2", "iid", "iid, far", "K = 1"),
        rows,
    )


def print_best(long: Rates) -> None:
    rows = []
    for (criterion, order, kind), curves in long.items():
        slopes = [end_slope(c.x, c.exact) for c in curves]
        ends = [abs(c.exact[-1]) for c in curves]
        best = [f"{ALPHAS[int(np.argmin(values))]:.2f}" for values in (slopes, ends)]
        paper = optimal_decay_exponent(2, criterion.lower())
        rows.append((criterion, order, kind, *best, f"{paper:.2f}"))
    last = next(iter(long.values()))[0].x[-1]
    output.print_table(
        f"The best alpha of those tried (exact, at L = {last:.0e})",
        ("what", "gradient", "steps", "falls fastest", "is smallest", "paper"),
        sorted(rows),
    )


# Figures 3 and 6: SGLD beside SGHMC

GRID = np.arange(1e-3, 0.5, 2e-3)
COMPARED = {"SGHMC": (SGHMC, 2), "SGLD": (SGLD, 1)}


def best_prefactor(sampler: Sampler, order: str, alpha: float) -> float:
    """Return the prefactor with the least MSE after 500 steps, as in the paper."""
    h = GRID * 500.0**-alpha
    mse = np.asarray(exact(sampler, order, constant(h), jnp.array([500]))[1][0])
    return float(GRID[np.nanargmin(np.where(np.isfinite(mse), mse, np.inf))])


def figures_3_and_6(quick: bool) -> None:
    rows = []
    stops = STOPS[:2] if quick else STOPS
    far = np.array([1000, 3000] if quick else [10_000, 100_000])
    for order in ("full",) if quick else ("full", "iid"):
        for criterion in ("MSE",) if quick else ("bias", "MSE"):
            for name, (sampler, K) in COMPARED.items():
                alpha = optimal_decay_exponent(K, criterion.lower())
                prefactor = best_prefactor(sampler, order, alpha)
                setting = sampler, order, "fixed", prefactor, (alpha,)
                which = ("bias", "MSE").index(criterion)
                runs = 100 if quick else 4000
                found = simulated_rates(random.key(20), *setting, stops, runs)[which]
                found = pick(found, lambda y: y[:, 0])
                near = Curve(stops, found, exact_rates(*setting, stops)[which][:, 0])
                true = exact_rates(*setting, far)[which][:, 0]
                rows.append(
                    (
                        order,
                        criterion,
                        name,
                        f"{prefactor:.3f} L^-{alpha:.2f}",
                        f"{found.value[-1]:.2g} ± {found.error[-1]:.1g} ({near.exact[-1]:.2g})",
                        f"{true[-1]:.2g}",
                        f"{end_slope(far, true):.2f}",
                        f"{rate(criterion, K, alpha):.2f}",
                    )
                )
    output.print_table(
        f"Figures 3 and 6: SGHMC and SGLD, fixed steps; at L = {stops[-1]} simulated (exact), at "
        f"{far[1]:.0e} exact, and the exponent of L from {far[0]:.0e}",
        (
            "gradient",
            "what",
            "sampler",
            "h",
            f"L = {stops[-1]}",
            f"L = {far[1]:.0e}",
            "exponent",
            "paper",
        ),
        rows,
    )
