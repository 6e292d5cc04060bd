"""Peak memory of a run.

Peak resident memory of a whole process that makes N rows of D float32 columns as JAX arrays, runs
``MCMC(SGHMCSplit(model))`` on them with default arguments and reads the draws, over the bytes of
the data. Each chain method runs in a process of its own; a process that only makes the data
stands beside them. Target: under 2.5 at N = 1e7, D = 20.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import warnings

import jax
from jax import random
from logistic_regression import BATCH_SIZE, DIM, logistic, make_data
from numpyro.infer import MCMC
from timing import print_header, print_row

from numpyro_sgmcmc import SGHMCSplit

WIDTHS = (12, 8, 8, 10, 10)


def run(num_rows: int, chain_method: str, num_chains: int) -> None:
    """Make the data, sample, and print the data's bytes and the process's peak."""
    warnings.simplefilter("ignore")
    data = jax.block_until_ready(make_data(random.key(0), num_rows, DIM))
    if chain_method != "none":
        mcmc = MCMC(
            SGHMCSplit(logistic),
            num_warmup=100,
            num_samples=100,
            num_chains=num_chains,
            chain_method=chain_method,
            progress_bar=False,
        )
        mcmc.run(random.key(1), *data, batch_size=BATCH_SIZE)
        mcmc.get_samples()["beta"].block_until_ready()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    print(sum(x.nbytes for x in data), peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num-rows", type=float, default=1e7)
    parser.add_argument("--chains", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    num_rows = int(args.num_rows)
    if args.child:
        run(num_rows, args.child, args.chains[0])
        return
    print_header(f"Peak resident memory, N = {args.num_rows:.0e}, D = {DIM}, B = {BATCH_SIZE}")
    print_row(["chains", "", "data MB", "peak MB", "peak/data"], WIDTHS)
    cases = [("none", 0), ("sequential", 1), *(("vectorized", n) for n in args.chains)]
    for method, chains in cases:
        command = [sys.executable, __file__, "--num-rows", str(num_rows)]
        command += ["--chains", str(chains), "--child", method]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        data, peak = (int(word) for word in out.split()[-2:])
        cells = [
            method,
            chains or "",
            f"{data / 1e6:.0f}",
            f"{peak / 1e6:.0f}",
            f"{peak / data:.2f}",
        ]
        print_row(cells, WIDTHS)


if __name__ == "__main__":
    main()
