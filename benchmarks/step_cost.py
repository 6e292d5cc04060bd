"""Measure the cost of a step relative to its gradient.

Microseconds a stochastic-gradient step of ``SGHMCSplit`` on a NumPyro logistic regression, over
those of a bare loop: draw B random rows, look them up, take the gradient of a hand-written
potential, move against it. Both run in one compiled loop on the same data, in turn; the kernel's
is the one that ``MCMC(progress_bar=False)`` compiles for one chain, iterations of ten steps with
all that an iteration adds. Compilation and adaptation are not timed.

Targets, times the bare loop:

=====================  =========  ================
rows                   minibatch  control variates
=====================  =========  ================
random                 1.3        1.7
random, D = 1e5        1.1        2.1
contiguous, N >= 1e6   0.5        0.7
=====================  =========  ================

The bare loop draws its random rows at every step. Drawn for ten steps at once, as the kernel
does, they may cost less: that loop's ratio is shown beside it.
"""

from __future__ import annotations

import argparse
import gc
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from logistic_regression import BATCH_SIZE, DIM, logistic, make_data
from timing import interleaved, print_header, print_row

from numpyro_sgmcmc import SGHMCSplit
from numpyro_sgmcmc.data.subsampling import SUBSAMPLINGS
from numpyro_sgmcmc.model.gradient_estimators import GRADIENT_ESTIMATORS

NUM_STEPS = 10
WIDTHS = (11, 8, 10, 9, 8, 9, 11, 8, 12, 14)


def gradient(theta: Array, X: Array, y: Array, rows: Array) -> Array:
    """Gradient of the potential that a user would write by hand."""

    def potential(theta: Array) -> Array:
        logits = X[rows] @ theta
        log_likelihood = jnp.sum(y[rows] * logits - jax.nn.softplus(logits))
        return 0.5 * jnp.sum(theta**2) - (len(y) / BATCH_SIZE) * log_likelihood

    return jax.grad(potential)(theta)


@partial(jax.jit, static_argnums=(3, 4))
def bare_loop(rng_key: Array, X: Array, y: Array, num_iterations: int, rows_ahead: int) -> Array:
    """Ten steps an iteration, the rows drawn for ``rows_ahead`` of them at once."""

    def draw(carry: Any, _: None) -> Any:
        rng_key, theta = carry
        rng_key, row_key = random.split(rng_key)
        if rows_ahead == 1:
            rows = random.randint(row_key, (BATCH_SIZE,), 0, len(y))
            return (rng_key, theta - 1e-6 * gradient(theta, X, y, rows)), None
        rows = random.randint(row_key, (rows_ahead, BATCH_SIZE), 0, len(y))
        theta, _ = lax.scan(
            lambda theta, r: (theta - 1e-6 * gradient(theta, X, y, r), None), theta, rows
        )
        return (rng_key, theta), None

    length = num_iterations * NUM_STEPS // rows_ahead
    return lax.scan(draw, (rng_key, jnp.zeros(X.shape[1])), None, length)[0][1]


def kernel_loops(X: Array, y: Array, num_iterations: int) -> dict[str, Callable[[], Any]]:
    """The kernel's own iterations, for each estimator and each way to choose rows."""
    dim = X.shape[1]
    options = {"num_steps": NUM_STEPS, "step_size": 0.1}
    if dim > 1000:
        options["inverse_mass_matrix"] = np.full(dim, 4.0 / len(y), np.float32)
    kernel = SGHMCSplit(logistic, **options)
    state = kernel.init(random.key(1), 0, None, (X, y), {"batch_size": BATCH_SIZE})

    def loop(estimator: str, minibatch: str) -> Callable[[], Any]:
        chosen = kernel.adaptation._replace(
            estimator=GRADIENT_ESTIMATORS[estimator], subsampling=SUBSAMPLINGS[minibatch]
        )
        variant = kernel.copy_with(adaptation=chosen)  # adapted once for all

        def iterate(_: int, state: Any) -> Any:
            return variant.sample(state, (X, y), {"batch_size": BATCH_SIZE})

        compiled = jax.jit(lambda state: lax.fori_loop(0, num_iterations, iterate, state))
        return lambda: compiled(state)

    return {
        f"{minibatch} {estimator}": loop(estimator, minibatch)
        for estimator in ("minibatch", "control_variate")
        for minibatch in ("iid", "shuffled", "contiguous")
    }


def measure(num_rows: int, dim: int, seconds: float, repeats: int) -> None:
    """One row of the table."""
    X, y = make_data(random.key(0), num_rows, dim)

    def bare(n: int, ahead: int = 1) -> Callable[[], Any]:
        return lambda: bare_loop(random.key(0), X, y, n, ahead)

    guess = interleaved({"bare": bare(2)}, 5)["bare"].min() / 2
    n = max(2, int(seconds / guess))
    loops = {"bare": bare(n), "ahead": bare(n, NUM_STEPS), **kernel_loops(X, y, n)}
    times = interleaved(loops, repeats)
    base = times.pop("bare")
    micros = np.median(base) / n / NUM_STEPS * 1e6
    ratios = [f"{np.median(t / base):.2f}" for t in times.values()]
    fastest = [f"{t.min() / base.min():.2f}" for t in times.values()]
    print_row([f"{num_rows:,}", f"{dim:,}", f"{micros:.1f} µs", *ratios], WIDTHS)
    print_row([f"{num_rows:,}", f"{dim:,}", "fastest", *fastest], WIDTHS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num-rows", type=float, nargs="+", default=[1e4, 1e5, 1e6, 1e7])
    parser.add_argument("--wide-dim", type=float, default=1e5, help="0 leaves the wide model out")
    parser.add_argument("--wide-rows", type=float, default=2e3)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=0.05, help="length of one bare run")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print_header(f"Cost of a step over the bare loop's, B = {BATCH_SIZE}")
    kinds = ["iid", "shuffled", "contiguous"]
    with_reference = [f"cv {kind}" for kind in kinds]  # control variates
    print_row(["N", "D", "bare step", "10 ahead", *kinds, *with_reference], WIDTHS)
    for num_rows in args.num_rows:
        measure(int(num_rows), DIM, args.seconds, args.repeats)
        gc.collect()
    if args.wide_dim:
        measure(int(args.wide_rows), int(args.wide_dim), 4 * args.seconds, args.repeats)


if __name__ == "__main__":
    main()
