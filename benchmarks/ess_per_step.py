r"""Effective sample size per gradient step, compared with exact Langevin dynamics on a normal.

In preconditioned coordinates the kernel's SDE on a standard normal moves each coordinate as a
damped oscillator, whose autocorrelation :math:`\rho` is known
(``UnderdampedLangevin.autocorrelation``). Draws every n steps of size h have the effective sample
size :math:`1 / (1 + 2\sum_{k \ge 1} \rho(knh))` per draw, and that over n per step. Where every
step is a draw it is :math:`h / 2\gamma` for a short step and the friction :math:`\gamma`, since the
integral of :math:`\rho` is :math:`\gamma`. These values, *exact* and *exact, n = 1*, have no
gradient noise, no discretisation error and a perfect preconditioner. They hold for any linear
function of the coordinates, and so for those of the model.

Step size *h* and steps per draw *n* are those of the warm-up; where chains have shortened their
steps, h is the mean over chains. *Limited by* is the last limit that reduced the integrator's
default step size. *Median* and *smallest* are over the unconstrained coordinates of four chains, at
most 1,000 of each site; *site* has the smallest. An effective sample size may exceed the number of
draws where autocorrelations are negative, and is not cut off. NumPyro's estimates are 3% too low
for such autocorrelations, and the smallest of many is lower than the others by chance. Ratios are
therefore to the median and to the smallest estimate from as many draws of as many coordinates of
the exact dynamics. *µs* are CPU microseconds per step and chain, without compilation and warm-up;
*warm-up* is in CPU seconds, with compilation. Run the script on one core (``taskset -c 0``).
"""

from __future__ import annotations

import argparse
import gc
import time
import warnings
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import random
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC
from scalable_problems import SCALABLE_PROBLEMS
from scaling import compile_loop
from scipy.linalg import cholesky, expm
from time_to_accuracy import ROWS, Posterior
from timing import print_header, print_row

from numpyro_sgmcmc import SGHMCSplit
from numpyro_sgmcmc.dynamics import UnderdampedLangevin

_NUM_CHAINS, _NUM_WARMUP = 4, 250
_BLOCK = 250  # draws of a chain in a compiled loop
_MAX_COORDINATES = 1_000  # of a site, chosen at random where there are more
_COLUMNS = {
    "problem": 44,
    "d": 6,
    "B": 6,
    "h": 5,
    "limited by": 14,
    "n": 3,
    "draws": 6,
    "median": 6,
    "smallest": 8,
    "site": 10,
    "exact": 6,
    "exact, n = 1": 12,
    "median / exact": 14,
    "smallest / exact": 16,
    "µs": 6,
    "warm-up": 7,
}


class Run(NamedTuple):
    """
    - **kernel** - with its adaptation.
    - **draws** - unconstrained, shape ``(chains, draws, coordinates)``.
    - **sites** - of the coordinates.
    - **step_size**, **num_steps** - of the chains, the step size averaged.
    - **warmup**, **sampling** - CPU seconds, with and without compilation.
    """

    kernel: SGHMCSplit
    draws: np.ndarray
    sites: np.ndarray
    step_size: float
    num_steps: int
    warmup: float
    sampling: float


def run(posterior: Posterior, max_draws: int, max_seconds: float) -> Run:
    """Sample blocks of draws until there are enough, or so many CPU seconds are spent."""
    kernel = SGHMCSplit(posterior.model)
    mcmc = MCMC(
        kernel,
        num_warmup=_NUM_WARMUP,
        num_samples=_BLOCK,
        num_chains=_NUM_CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    settings = {"batch_size": posterior.problem.batch_size}
    start = time.process_time()
    mcmc.warmup(random.key(1), *posterior.args, **settings)
    state = jax.block_until_ready(mcmc.post_warmup_state)
    warmup = time.process_time() - start
    loop = compile_loop(kernel, posterior.args, settings, _BLOCK)
    state, _ = loop(state)
    blocks: list[dict[str, np.ndarray]] = []
    seconds = 0.0
    while len(blocks) * _BLOCK < max_draws and seconds < max_seconds:
        start = time.process_time()
        state, sites = jax.block_until_ready(loop(state))
        seconds += time.process_time() - start
        blocks.append({name: _choose_coordinates(x) for name, x in sites.items()})
    draws = {name: np.concatenate([block[name] for block in blocks], 1) for name in blocks[0]}
    return Run(
        kernel,
        np.concatenate(list(draws.values()), -1),
        np.repeat(list(draws), [x.shape[-1] for x in draws.values()]),
        float(np.mean(state.adapt_state.step_size)),
        int(np.max(state.num_steps)),
        warmup,
        seconds,
    )


def _choose_coordinates(draws: Any) -> np.ndarray:
    """Return draws of a site, shape ``(draws, chains, ...)``, as ``(chains, draws, k)``."""
    flat = np.asarray(draws).reshape(*draws.shape[:2], -1).swapaxes(0, 1)
    if (dim := flat.shape[-1]) <= _MAX_COORDINATES:
        return flat
    return flat[..., np.random.default_rng(0).choice(dim, _MAX_COORDINATES, replace=False)]


def ess_per_step(draws: np.ndarray, num_steps: int) -> np.ndarray:
    """Return the effective sample size of each coordinate over the steps of all chains."""
    return np.asarray(effective_sample_size(draws)) / (draws.shape[0] * draws.shape[1] * num_steps)


def exact_ess_per_step(dynamics: UnderdampedLangevin, step_size: float, num_steps: int) -> float:
    """Return that of the exact dynamics on a normal, for a draw every ``num_steps`` steps."""
    time_per_draw = step_size * num_steps
    num_lags = int(20.0 * dynamics.relaxation_time(step_size) / time_per_draw) + 1
    correlations = dynamics.autocorrelation(np.arange(1, num_lags) * time_per_draw, step_size)
    return float(1.0 / (1.0 + 2.0 * correlations.sum()) / num_steps)


def simulate_exact(
    dynamics: UnderdampedLangevin, time_per_draw: float, shape: tuple[int, ...]
) -> np.ndarray:
    """Return positions of the exact dynamics on a normal, shape ``(chains, draws, d)``."""
    transition = expm(time_per_draw * np.array([[0.0, 1.0], [-1.0, -dynamics.friction]]))
    root = cholesky(np.eye(2) - transition @ transition.T, lower=True)
    num_chains, num_draws, dim = shape
    rng = np.random.default_rng(0)
    state = rng.standard_normal((2, num_chains * dim))
    positions = np.empty((num_draws, num_chains, dim), np.float32)
    for i in range(num_draws):
        state = transition @ state + root @ rng.standard_normal(state.shape)
        positions[i] = state[0].reshape(num_chains, dim)
    return positions.swapaxes(0, 1)


def print_case(name: str, num_rows: int, max_draws: int, max_seconds: float) -> None:
    """Run a problem and print its row."""
    posterior = Posterior(name, num_rows)
    found = run(posterior, max_draws, max_seconds)
    h, n = found.step_size, found.num_steps
    num_draws = found.draws.shape[0] * found.draws.shape[1]
    dynamics, adaptation = found.kernel.dynamics, found.kernel.adaptation
    measured = ess_per_step(found.draws, n)
    simulated = ess_per_step(simulate_exact(dynamics, h * n, found.draws.shape), n)
    limits = ["integrator", *adaptation.trace.step_size_limits.binding]
    cells = [
        f"{name}, {num_rows:,} rows",
        f"{found.kernel.potential.dim:,}",
        f"{posterior.problem.batch_size:,}",
        f"{h:.2g}",
        limits[-1].replace("_", " "),
        n,
        f"{num_draws:,}",
        f"{np.median(measured):.2g}",
        f"{measured.min():.2g}",
        found.sites[measured.argmin()],
        f"{exact_ess_per_step(dynamics, h, n):.2g}",
        f"{exact_ess_per_step(dynamics, h, 1):.2g}",
        f"{np.median(measured) / np.median(simulated):.2f}",
        f"{measured.min() / simulated.min():.2f}",
        f"{1e6 * found.sampling / (num_draws * n):.1f}",
        f"{found.warmup:.0f}",
    ]
    print_row(cells, _COLUMNS.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--problems", nargs="+", choices=SCALABLE_PROBLEMS, default=list(SCALABLE_PROBLEMS)
    )
    parser.add_argument("--draws", type=int, default=4_000, help="draws of a chain at most")
    parser.add_argument("--seconds", type=float, default=20.0, help="CPU seconds of sampling")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print_header("Effective sample size per gradient step")
    print_row(_COLUMNS, _COLUMNS.values())
    for name in options.problems:
        for num_rows in ROWS.get(name, (100_000,)):
            print_case(name, num_rows, options.draws, options.seconds)
            gc.collect()


if __name__ == "__main__":
    main()
