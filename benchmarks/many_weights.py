"""Measure the cost of a network's warm-up in evaluations of a hand-written minibatch gradient.

``SGHMCSplit`` runs with default options on a hand-written network with two hidden layers of one
width, and 60,000 rows of 784 columns in ten classes. The baseline is the gradient of a potential
without NumPyro, one minibatch after the other in a compiled loop. The warm-up runs twice in one
process; the time of the second, without compilation, is divided by that of a gradient. The targets
are 3,000 gradients at 100,000 weights, and a million weights in 24 GB.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, lax, random
from timing import print_header, print_row

from numpyro_sgmcmc import SGHMCSplit

ROWS, COLUMNS, CLASSES = 60_000, 784, 10
CASES = ((115, 128), (115, 1_000), (682, 128))  # units of a layer, rows of a minibatch
GRADIENTS = 100  # of the bare loop
WIDTHS = (9, 6, 11, 11, 8, 10, 8, 8)

Weights = dict[str, Array]


def shapes(units: int) -> dict[str, tuple[int, ...]]:
    """Those of the weights."""
    sizes = (COLUMNS, units, units, CLASSES)
    return {f"w{k}": shape for k, shape in enumerate(itertools.pairwise(sizes))}


def logits(weights: Weights, x: Array) -> Array:
    for k in range(2):
        x = jax.nn.relu(x @ weights[f"w{k}"] / np.sqrt(x.shape[1] / 2))
    return x @ weights["w2"] / np.sqrt(x.shape[1])


def network(x: Array, y: Array, units: int, batch_size: int | None = None) -> None:
    """Standard normal weights, scaled by their layer's width."""
    weights = {
        name: numpyro.sample(name, dist.Normal(0, 1).expand(shape).to_event(2))
        for name, shape in shapes(units).items()
    }
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Categorical(logits=logits(weights, x[i])), obs=y[i])


@partial(jax.jit, static_argnums=(3, 4))
def bare_loop(weights: Weights, x: Array, y: Array, batch: int, num: int) -> Weights:
    """Steps against the gradient, each of a new minibatch."""

    def potential(weights: Weights, rows: Array) -> Array:
        prior = sum(jnp.sum(w**2) for w in weights.values()) / 2.0
        lost = jax.nn.log_softmax(logits(weights, x[rows]))[jnp.arange(batch), y[rows]].sum()
        return prior - ROWS / batch * lost

    def step(weights: Weights, key: Array) -> tuple[Weights, None]:
        slopes = jax.grad(potential)(weights, random.randint(key, (batch,), 0, ROWS))
        return jax.tree.map(lambda w, slope: w - 1e-6 * slope, weights, slopes), None

    return lax.scan(step, weights, random.split(random.key(0), num))[0]


def seconds(run: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU time."""
    wall, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(run())
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(units: int, batch: int) -> tuple[str, ...]:
    """A row of the table."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((ROWS, COLUMNS), np.float32))
    weights = {
        name: jnp.asarray(rng.standard_normal(shape, np.float32))
        for name, shape in shapes(units).items()
    }
    y = jnp.argmax(logits(weights, x) + jnp.asarray(rng.gumbel(size=(ROWS, CLASSES))), 1)

    def warm_up() -> object:
        kernel = SGHMCSplit(network)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return kernel.init(random.key(0), 0, None, (x, y, units), {"batch_size": batch})

    def gradients() -> Weights:
        return bare_loop(weights, x, y, batch, GRADIENTS)

    first = seconds(warm_up)
    gradients()
    before = [seconds(gradients) for _ in range(5)]
    second = seconds(warm_up)
    each = np.median(np.array(before + [seconds(gradients) for _ in range(5)]), axis=0) / GRADIENTS
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    wall, cpu = np.array(second) / each
    return (
        f"{sum(np.prod(s) for s in shapes(units).values()):,}",
        str(batch),
        f"{1e3 * each[0]:.2f} ms",
        f"{first[0]:.0f} s",
        f"{second[0]:.0f} s",
        f"{wall:,.0f}",
        f"{cpu:,.0f}",
        f"{peak:.1f} GB",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measure", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(*measure(*options.measure), sep="|")
        return
    print_header("The warm-up of a network")
    names = ("weights", "rows", "a gradient", "first time", "second", "gradients", "by CPU")
    print_row((*names, "memory"), WIDTHS)
    for case in CASES:
        command = [sys.executable, __file__, "--measure", *map(str, case)]
        out = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=os.environ)
        print_row(out.stdout.splitlines()[-1].split("|"), WIDTHS)


if __name__ == "__main__":
    main()
