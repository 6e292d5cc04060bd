"""Cost of a step on an accelerator, and the time of a run.

Microseconds of a step of all chains together, of ``SGHMCSplit`` with control variates on a
logistic regression of a million rows, beside those of a loop that only takes the chains' minibatch
gradients. Rows of *regression* have 20 covariates; rows of the others have the intercept of one of
many groups. The last line is a run with no arguments, from the call to the last draw, compilation
included.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, lax, random
from logistic_regression import DIM, logistic, make_data
from numpyro.diagnostics import summary
from numpyro.infer import MCMC
from timing import interleaved, print_header, print_row

from numpyro_sgmcmc import SGHMCSplit

NUM_ROWS, NUM_STEPS, NUM_ITERATIONS = 1_000_000, 10, 20
BATCH_SIZES, NUM_CHAINS = (100, 1_000, 10_000), (1, 4, 64)
GROUPS, GATHER_BATCH_SIZE, GATHER_CHAINS = (8, 48, 900, 15_000), 1_000, 4
_COLUMNS = {"model": 22, "B": 7, "chains": 7, "gradient": 10, "step": 10, "ratio": 7}
_RUN_COLUMNS = {"run": 30, "wall s": 8, "CPU s": 8, "ESS": 8, "R-hat": 8}


def intercepts(num_groups: int, group: Any, y: Any, batch_size: int | None = None) -> None:
    """Logistic regression with an intercept for each group."""
    effect = numpyro.sample("effect", dist.Normal(0, 1).expand([num_groups]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=effect[group[i]]), obs=y[i])


def regression_gradient(theta: Array, X: Array, y: Array, rows: Array) -> Array:
    """Gradient of the potential on a minibatch."""

    def potential(theta: Array) -> Array:
        logits = X[rows] @ theta
        log_likelihood = jnp.sum(y[rows] * logits - jax.nn.softplus(logits))
        return 0.5 * jnp.sum(theta**2) - len(y) / len(rows) * log_likelihood

    return jax.grad(potential)(theta)


def intercept_gradient(theta: Array, group: Array, y: Array, rows: Array) -> Array:
    """Gradient of the potential on a minibatch."""

    def potential(theta: Array) -> Array:
        logits = theta[group[rows]]
        log_likelihood = jnp.sum(y[rows] * logits - jax.nn.softplus(logits))
        return 0.5 * jnp.sum(theta**2) - len(y) / len(rows) * log_likelihood

    return jax.grad(potential)(theta)


def gradient_loop(
    gradient: Callable, args: tuple, dim: int, batch_size: int, num_chains: int
) -> Callable[[], Any]:
    """Return a loop of minibatch gradients of all chains."""

    @jax.jit
    def run(rng_key: Array, theta: Array, *args: Array) -> Array:
        def step(theta: Array, rng_key: Array) -> tuple[Array, None]:
            rows = random.randint(rng_key, (num_chains, batch_size), 0, len(args[-1]))
            g = jax.vmap(lambda theta, rows: gradient(theta, *args, rows))(theta, rows)
            return theta - 1e-6 * g, None

        return lax.scan(step, theta, random.split(rng_key, NUM_ITERATIONS * NUM_STEPS))[0]

    return lambda: run(random.key(0), jnp.zeros((num_chains, dim)), *args)


def kernel_loop(
    model: Callable, args: tuple, dim: int, batch_size: int, num_chains: int
) -> Callable[[], Any]:
    """Return the iterations of the kernel with all settings given."""
    kernel = SGHMCSplit(
        model,
        step_size=0.1,
        num_steps=NUM_STEPS,
        gradient_estimator="control_variate",
        subsampling="iid",
        inverse_mass_matrix=np.full(dim, 4.0 * dim / NUM_ROWS, np.float32),
    )
    keys = random.split(random.key(1), num_chains)
    state = kernel.init(keys, 0, None, args, {"batch_size": batch_size})

    @jax.jit
    def run(state: Any, args: tuple) -> Any:
        def iterate(_: int, state: Any) -> Any:
            return kernel.sample(state, args, {"batch_size": batch_size})

        return lax.fori_loop(0, NUM_ITERATIONS, iterate, state)

    return lambda: run(state, args)


def measure(
    name: str,
    model: Callable,
    gradient: Callable,
    args: tuple,
    dim: int,
    batch_size: int,
    num_chains: int,
    repeats: int,
) -> None:
    """Print a row of the table of steps."""
    loops = {
        "gradient": gradient_loop(gradient, args, dim, batch_size, num_chains),
        "step": kernel_loop(model, args, dim, batch_size, num_chains),
    }
    seconds = interleaved(loops, repeats)
    micros = {k: 1e6 * np.median(t) / NUM_ITERATIONS / NUM_STEPS for k, t in seconds.items()}
    cells = {
        "model": name,
        "B": f"{batch_size:,}",
        "chains": num_chains,
        "gradient": f"{micros['gradient']:.1f} µs",
        "step": f"{micros['step']:.1f} µs",
        "ratio": f"{micros['step'] / micros['gradient']:.2f}",
    }
    print_row([cells[c] for c in _COLUMNS], _COLUMNS.values())


def run_without_arguments(name: str, model: Callable, args: tuple, batch_size: int) -> None:
    """Print a row of the table of runs."""
    mcmc = MCMC(
        SGHMCSplit(model),
        num_warmup=500,
        num_samples=1000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    wall, cpu = time.perf_counter(), time.process_time()
    mcmc.run(random.key(0), *args, batch_size=batch_size)
    draws = jax.block_until_ready(mcmc.get_samples(group_by_chain=True))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    sites = summary(draws).values()
    cells = {
        "run": name,
        "wall s": f"{wall:.1f}",
        "CPU s": f"{cpu:.1f}",
        "ESS": f"{min(np.min(s['n_eff']) for s in sites):.0f}",
        "R-hat": f"{max(np.max(s['r_hat']) for s in sites):.3f}",
    }
    print_row([cells[c] for c in _RUN_COLUMNS], _RUN_COLUMNS.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print_header("Cost of a step on an accelerator")
    print_row(_COLUMNS, _COLUMNS.values())
    args = make_data(random.key(0), NUM_ROWS, DIM)
    for batch_size in BATCH_SIZES:
        for num_chains in NUM_CHAINS:
            what = ("regression", logistic, regression_gradient, args, DIM)
            measure(*what, batch_size, num_chains, options.repeats)
    rng = np.random.default_rng(0)
    y = jnp.asarray(rng.random(NUM_ROWS) < 0.3, jnp.float32)
    for num_groups in GROUPS:
        grouped = jnp.asarray(rng.integers(0, num_groups, NUM_ROWS), jnp.int32), y
        what = (f"{num_groups:,} intercepts", partial(intercepts, num_groups), intercept_gradient)
        sizes = (num_groups, GATHER_BATCH_SIZE, GATHER_CHAINS)
        measure(*what, grouped, *sizes, options.repeats)
    print_header("Runs on an accelerator")
    print_row(_RUN_COLUMNS, _RUN_COLUMNS.values())
    run_without_arguments("logistic, 1e6 rows, 20 columns", logistic, args, 1_000)


if __name__ == "__main__":
    main()
