"""Measure the cost of the moments from which the bias is estimated.

The ratio is the time of an iteration of ten steps of ``SGHMCSplit`` with moments to that without.
*own*: moments from the gradients of the steps (at every step; at every fifth with more than 10,000
coordinates). *apart*: moments from one more minibatch in each iteration. Runs alternate in one
process, without compilation. The target is 1.1.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax, random
from logistic_regression import BATCH_SIZE, DIM, logistic, make_data
from timing import interleaved, print_header, print_row

from numpyro_sgmcmc import SGHMCSplit
from numpyro_sgmcmc.adaptation.settings import MonitorGradients
from numpyro_sgmcmc.adaptation.subsampling_choice import choose_step_gradients
from numpyro_sgmcmc.data.subsampling import SUBSAMPLINGS
from numpyro_sgmcmc.model.gradient_estimators import GRADIENT_ESTIMATORS, MinibatchGradient

NUM_STEPS = 10
WIDTHS = (10, 8, 8, 16, 12, 8, 8)


def measure(num_rows: int, dim: int, seconds: float, repeats: int) -> None:
    """One row for each estimator and each way to choose rows."""
    data = make_data(random.key(0), num_rows, dim)
    batch = {"batch_size": BATCH_SIZE}
    options: dict[str, Any] = {"num_steps": NUM_STEPS, "step_size": 0.1}
    if dim > 1000:
        options["inverse_mass_matrix"] = np.full(dim, 4.0 / num_rows, np.float32)
    kernel = SGHMCSplit(logistic, gradient_estimator="control_variate", **options)
    state = kernel.init(random.key(1), 0, None, data, batch)

    def loop(num_iterations: int, **chosen: Any) -> Callable[[], Any]:
        variant = kernel.copy_with(adaptation=kernel.adaptation._replace(**chosen))

        def iterate(_: int, state: Any) -> Any:
            return variant.sample(state, data, batch)

        compiled = jax.jit(lambda state: lax.fori_loop(0, num_iterations, iterate, state))
        return lambda: compiled(state)

    sources = {
        "without": MonitorGradients(0),
        "own": choose_step_gradients(dim, NUM_STEPS),
        "apart": MonitorGradients(NUM_STEPS, MinibatchGradient()),
    }
    for minibatch in ("contiguous", "iid"):
        for estimator in ("minibatch", "control_variate"):
            chosen = {
                "subsampling": SUBSAMPLINGS[minibatch],
                "estimator": GRADIENT_ESTIMATORS[estimator],
            }
            guess = (
                interleaved({"": loop(2, monitor_gradients=MonitorGradients(0), **chosen)}, 5)[
                    ""
                ].min()
                / 2
            )
            n = max(2, int(seconds / guess))
            loops = {k: loop(n, monitor_gradients=s, **chosen) for k, s in sources.items()}
            times = interleaved(loops, repeats)
            base = times.pop("without")
            micros = f"{np.median(base) / n / NUM_STEPS * 1e6:.1f} µs"
            ratios = [f"{np.median(t / base):.2f}" for t in times.values()]
            print_row([f"{num_rows:,}", f"{dim:,}", minibatch, estimator, micros, *ratios], WIDTHS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=0.1, help="length of one run")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print_header(f"Time of an iteration with moments over without, B = {BATCH_SIZE}")
    print_row(["N", "D", "rows", "gradient", "step", "own", "apart"], WIDTHS)
    for num_rows, dim in ((10**5, DIM), (10**6, DIM), (10**5, 64), (2000, 10**5)):
        scale = 4.0 if dim > 1000 else 1.0
        measure(num_rows, dim, scale * args.seconds, args.repeats)


if __name__ == "__main__":
    main()
