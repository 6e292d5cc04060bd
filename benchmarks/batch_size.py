"""Compare predicted and measured time per effective draw at three batch sizes of five models.

``suggest_subsample_size`` predicts it from a warm-up with the first size. The warm-up's own warning
estimates the seconds of a step from the operations of a gradient. Draws are then timed at each size
and at the recommended one, after a warm-up with that size; their ESS is the median over
coordinates.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from jax.flatten_util import ravel_pytree
from numpyro.diagnostics import effective_sample_size
from timing import print_header, print_row

from numpyro_sgmcmc import SGHMCSplit, suggest_subsample_size
from numpyro_sgmcmc.adaptation.batch_size import estimate_step_cost
from numpyro_sgmcmc.data.arguments import Arguments

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import flights

NUM_CHAINS, NUM_WARMUP, NUM_DRAWS = 4, 200, 600
COLUMNS = (
    *("problem", "size", "steps, predicted", "steps", "ms, estimated", "ms, predicted", "ms"),
    *("ratio", "ESS/draw", "smallest"),
)
WIDTHS = (9, 13, 16, 6, 14, 14, 7, 6, 8, 8)


class Problem(NamedTuple):
    """A model, its arguments, and batch sizes of which the first is that of the prediction."""

    model: Callable
    args: tuple[Any, ...]
    batch_sizes: tuple[int, ...]


def logistic(X: Any, y: Any, batch_size: int | None = None) -> None:
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ beta), obs=y[i])


def slopes(group: Any, x: Any, y: Any, num_groups: int, batch_size: int | None = None) -> None:
    mean = numpyro.sample("mean", dist.Normal(0, 2).expand([2]).to_event(1))
    sd = numpyro.sample("sd", dist.HalfNormal(1).expand([2]).to_event(1))
    with numpyro.plate("groups", num_groups):
        effect = numpyro.sample("effect", dist.Normal(mean, sd).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        logits = effect[group[i], 0] + effect[group[i], 1] * x[i]
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y[i])


def crossed(a: Any, b: Any, y: Any, sizes: tuple[int, int], batch_size: int | None = None) -> None:
    mean = numpyro.sample("mean", dist.Normal(0, 2))
    sd = numpyro.sample("sd", dist.HalfNormal(1).expand([3]).to_event(1))
    with numpyro.plate("first", sizes[0]):
        first = numpyro.sample("effect_a", dist.Normal(0, sd[0]))
    with numpyro.plate("second", sizes[1]):
        second = numpyro.sample("effect_b", dist.Normal(0, sd[1]))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(mean + first[a[i]] + second[b[i]], sd[2]), obs=y[i])


def counts(X: Any, y: Any, batch_size: int | None = None) -> None:
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Poisson(jnp.exp(X[i] @ beta)), obs=y[i])


def make_problems() -> dict[str, Problem]:
    """Return the problems by name, with simulated data."""
    rng = np.random.default_rng(0)

    def bernoulli(logits: np.ndarray) -> jax.Array:
        return jnp.asarray(rng.random(len(logits)) < 1.0 / (1.0 + np.exp(-logits)), jnp.float32)

    X = rng.standard_normal((100_000, 20)).astype(np.float32)
    y = bernoulli(X @ rng.normal(0.0, 0.5, 20))
    group = rng.integers(0, 500, 30_000)
    x = rng.standard_normal(30_000).astype(np.float32)
    effect = np.array([-0.5, 0.7]) + rng.standard_normal((500, 2)) * np.array([0.8, 0.4])
    a, b = rng.integers(0, 200, 40_000), rng.integers(0, 100, 40_000)
    levels = 1.0 + rng.normal(0.0, 0.5, 200)[a] + rng.normal(0.0, 0.8, 100)[b]
    # Rows with heavy tails have unequal leverage.
    Z = np.clip(rng.standard_t(3, (50_000, 10)), -12.0, 12.0).astype(np.float32)
    Z[:, 0] = 1.0
    visits = rng.poisson(np.exp(Z @ np.array([0.5, *rng.normal(0.0, 0.1, 9)])))
    columns, late, names = flights.load_flights()
    num_levels = {factor: len(names[factor]) for factor in flights.FACTORS}
    return {
        "logistic": Problem(logistic, (jnp.asarray(X), y), (256, 1_000, 4_000)),
        "slopes": Problem(
            slopes,
            (jnp.asarray(group), jnp.asarray(x), bernoulli((effect[group] * _pair(x)).sum(1)), 500),
            (500, 2_000, 8_000),
        ),
        "crossed": Problem(
            crossed,
            (
                jnp.asarray(a),
                jnp.asarray(b),
                jnp.asarray(levels + rng.standard_normal(40_000), jnp.float32),
                (200, 100),
            ),
            (256, 1_000, 4_000),
        ),
        "flights": Problem(flights.model, (columns, num_levels, late), (1_000, 130, 300)),
        "counts": Problem(
            counts, (jnp.asarray(Z), jnp.asarray(visits, jnp.float32)), (256, 1_000, 4_000)
        ),
    }


def _pair(x: np.ndarray) -> np.ndarray:
    """Return ones and x as two columns."""
    return np.stack([np.ones_like(x), x], 1)


def time_draws(kernel: SGHMCSplit, args: tuple, batch_size: int) -> tuple[float, np.ndarray]:
    """Return the seconds per draw of all chains together, and the ESS per draw by coordinate."""
    kwargs = {"batch_size": batch_size}
    keys = random.split(random.key(1), NUM_CHAINS)
    state = kernel.init(keys, NUM_WARMUP, None, args, kwargs)

    @jax.jit
    def run(state: Any) -> Any:
        return kernel.sample(state, args, kwargs)

    draws, durations = [], []
    for k in range(NUM_WARMUP + NUM_DRAWS):
        starts = time.perf_counter(), time.process_time()
        state = jax.block_until_ready(run(state))
        if k >= NUM_WARMUP:
            durations.append(min(time.perf_counter() - starts[0], time.process_time() - starts[1]))
            draws.append(np.asarray(jax.vmap(lambda z: ravel_pytree(z)[0])(state.z), np.float64))
    ess = effective_sample_size(np.stack(draws, 1))
    # The fastest draw: other processes may have slowed down the others.
    return min(durations) / NUM_CHAINS, ess / (NUM_CHAINS * NUM_DRAWS)


def main() -> None:
    problems = make_problems()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(problems), help="problems to run")
    print_header("Predicted and measured time per effective draw")
    print_row(COLUMNS, WIDTHS)
    for name in parser.parse_args().names:
        problem = problems[name]
        kernel = SGHMCSplit(problem.model)
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            suggestion = suggest_subsample_size(
                kernel, *problem.args, num_chains=NUM_CHAINS, batch_size=problem.batch_sizes[0]
            )
        arguments = Arguments(problem.args, {"batch_size": problem.batch_sizes[0]})
        cost = estimate_step_cost(kernel.potential, arguments, kernel.adaptation.trace.choice)
        sizes = np.array(next(iter(suggestion.subsample_sizes.values())), float)
        measured = {}
        for batch_size in sorted({*problem.batch_sizes, suggestion.best}):
            at_size = SGHMCSplit(problem.model) if batch_size != problem.batch_sizes[0] else kernel
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                seconds, ess = time_draws(at_size, problem.args, batch_size)
            num_steps, predicted = (
                np.exp(np.interp(np.log(batch_size), np.log(sizes), np.log(column)))
                for column in (suggestion.steps_per_draw, suggestion.seconds_per_draw)
            )
            measured[batch_size] = seconds / np.median(ess)
            label = f"{batch_size:,}" + ", best" * (batch_size == suggestion.best)
            cells = [name, label, f"{num_steps:.0f}", at_size.adaptation.num_steps]
            estimated = num_steps * (cost.per_step + cost.per_row * batch_size)
            cells += [f"{1e3 * estimated:.3f}", f"{1e3 * predicted:.3f}"]
            cells += [f"{1e3 * measured[batch_size]:.3f}"]
            cells += [f"{measured[batch_size] / predicted:.2f}"]
            cells += [f"{np.median(ess):.2f}", f"{ess.min():.2f}"]
            print_row(cells, WIDTHS)


if __name__ == "__main__":
    main()
