"""Effective draws per second against the number of rows.

Logistic regression, D = 20, ``SGHMCSplit`` with default options, B = 100, four vectorized chains;
for small N also one chain of NUTS on all rows. The time is that of sampling alone: the kernel's
iterations after warm-up, compiled beforehand, as ``MCMC(progress_bar=False)`` runs them; the
fastest of three runs. The effective sample size is the smallest over coordinates. The error is that
of the posterior mean relative to the mode, the largest over coordinates, in posterior SDs; it
includes Monte Carlo error and the skewness of the posterior. Warm-up is the time of
``MCMC.warmup``: adaptation, burn-in and all compilation.

Target: ESS/s equal within a factor of 2 from the N at which the data leave the cache.
"""

from __future__ import annotations

import argparse
import gc
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from logistic_regression import BATCH_SIZE, DIM, logistic, make_data
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS
from timing import print_header, print_row

from numpyro_sgmcmc import SGHMCSplit

WIDTHS = (11, 12, 10, 10, 10, 12, 12)


class Result(NamedTuple):
    """
    - **warmup** - seconds of the warm-up, compilation included.
    - **sampling** - seconds of the sampling, compilation excluded.
    - **draws** - shape ``(chains, draws, d)``.
    """

    warmup: float
    sampling: float
    draws: np.ndarray

    @property
    def ess(self) -> float:
        """The smallest effective sample size of a coordinate."""
        return float(effective_sample_size(self.draws).min())


def sample(
    kernel: Any,
    num_chains: int,
    num_draws: int,
    args: tuple,
    kwargs: dict,
) -> Result:
    """Warm up, then time compiled iterations of the kernel."""
    mcmc = MCMC(
        kernel,
        num_warmup=300,
        num_samples=num_draws,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    start = time.perf_counter()
    mcmc.warmup(random.key(1), *args, **kwargs)
    jax.block_until_ready(mcmc.post_warmup_state)
    warmup = time.perf_counter() - start

    loop = compile_loop(kernel, args, kwargs, num_draws)
    state, _ = loop(mcmc.post_warmup_state)
    seconds = []
    for _ in range(3 if num_chains > 1 else 1):
        start = time.perf_counter()
        _, draws = jax.block_until_ready(loop(state))
        seconds.append(time.perf_counter() - start)
    draws = np.asarray(draws["beta"]).reshape(num_draws, num_chains, -1).swapaxes(0, 1)
    return Result(warmup, min(seconds), draws)


def compile_loop(kernel: Any, args: tuple, kwargs: dict, num_draws: int) -> Callable:
    """Return a function from a state to the last state and the unconstrained draws of its sites.

    The loop is that of ``MCMC(progress_bar=False)``; its first call compiles it.
    """

    def iterate(state: Any, _: None) -> Any:
        state = kernel.sample(state, args, kwargs)
        return state, state.z

    return jax.jit(lambda state: lax.scan(iterate, state, None, num_draws))


def laplace(X: Array, y: Array) -> tuple[np.ndarray, np.ndarray]:
    """The posterior's mode and the SDs of the Gaussian there, by Newton's method."""

    @jax.jit
    def on_chunk(beta: Array, X: Array, y: Array) -> tuple[Array, Array]:
        p = jax.nn.sigmoid(X @ beta)
        return X.T @ (p - y), (X.T * (p * (1 - p))) @ X

    num_chunks = max(1, len(y) // 100_000)
    beta = np.zeros(X.shape[1])
    for _ in range(8):
        gradient, hessian = beta.copy(), np.eye(beta.size)
        for rows in np.array_split(np.arange(len(y)), num_chunks):
            chunk = slice(rows[0], rows[-1] + 1)
            parts = on_chunk(jnp.asarray(beta, X.dtype), X[chunk], y[chunk])
            gradient += np.asarray(parts[0], np.float64)
            hessian += np.asarray(parts[1], np.float64)
        beta = beta - np.linalg.solve(hessian, gradient)
    return beta, np.sqrt(np.diagonal(np.linalg.inv(hessian)))


def report(num_rows: int, name: str, result: Result, mean: np.ndarray, sd: np.ndarray) -> None:
    numbers = [f"{result.warmup:.1f} s", f"{result.sampling:.2f} s", f"{result.ess:.0f}"]
    error = float((np.abs(result.draws.mean((0, 1)) - mean) / sd).max())
    rate = f"{result.ess / result.sampling:,.0f}"
    print_row([f"{num_rows:,}", name, *numbers, rate, f"{error:.3f} SD"], WIDTHS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num-rows", type=float, nargs="+", default=[1e4, 1e5, 1e6, 1e7])
    parser.add_argument("--num-draws", type=int, default=2000, help="a chain")
    parser.add_argument("--nuts-max-rows", type=float, default=1e5)
    parser.add_argument("--nuts-draws", type=int, default=300)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print_header(f"Effective draws a second against N; D = {DIM}, B = {BATCH_SIZE}")
    print_row(["N", "kernel", "warm-up", "sampling", "ESS", "ESS/s", "mean error"], WIDTHS)
    rates = []
    for num_rows in (int(n) for n in args.num_rows):
        X, y = make_data(random.key(0), num_rows, DIM)
        kwargs = {"batch_size": BATCH_SIZE}
        ours = sample(SGHMCSplit(logistic), 4, args.num_draws, (X, y), kwargs)
        mean, sd = laplace(X, y)
        if num_rows <= args.nuts_max_rows:
            nuts = sample(NUTS(logistic), 1, args.nuts_draws, (X, y), {})
            report(num_rows, "NUTS", nuts, mean, sd)
        report(num_rows, "SGHMCSplit", ours, mean, sd)
        rates.append(ours.ess / ours.sampling)
        del X, y
        gc.collect()
    print(
        f"\nlargest over smallest ESS/s from the second N on: {max(rates[1:]) / min(rates[1:]):.2f}"
    )


if __name__ == "__main__":
    main()
