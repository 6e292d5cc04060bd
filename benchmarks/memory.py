"""Peak memory of a run.

A process makes N rows of D float32 columns as JAX arrays, runs ``MCMC(SGHMCSplit(model))`` on them
with default options and reads the draws. The table has its peak resident memory relative to the
size of the data. Each chain method runs in a separate process, and one process only makes the data.
Target: under 2.5 at N = 1e7, D = 20.

A second table varies the numbers of draws and rows, in memory and with ``CheckpointedMCMC``, which
writes the draws to disk, of which only means are read. A third has 200 columns and four chains,
where draws take more memory than rows.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import warnings

import jax
from jax import random
from logistic_regression import BATCH_SIZE, DIM, logistic, make_data
from numpyro.infer import MCMC
from timing import print_header, print_row

from numpyro_sgmcmc import CheckpointedMCMC, SGHMCSplit

WIDTHS = (12, 8, 8, 10, 10)
MANY = (11, 8, 8, 9, 10, 8, 8)


def run(num_rows: int, dim: int, how: str, num_chains: int, num_draws: int) -> None:
    """Make the data, sample, and print the data's bytes and the process's peak."""
    warnings.simplefilter("ignore")
    data = jax.block_until_ready(make_data(random.key(0), num_rows, dim))
    settings = {
        "num_warmup": 100,
        "num_samples": num_draws,
        "num_chains": num_chains,
        "chain_method": "sequential" if how == "sequential" else "vectorized",
        "progress_bar": False,
    }
    if how == "disk":
        with tempfile.TemporaryDirectory() as folder:
            every = max(100, num_draws // 100)
            mcmc = CheckpointedMCMC(
                SGHMCSplit(logistic), checkpoint=folder, checkpoint_every=every, **settings
            )
            mcmc.run(random.key(1), *data, batch_size=BATCH_SIZE)
            mcmc.running_mean()
    elif how != "none":
        mcmc = MCMC(SGHMCSplit(logistic), **settings)
        mcmc.run(random.key(1), *data, batch_size=BATCH_SIZE)
        mcmc.get_samples()["beta"].block_until_ready()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    print(sum(x.nbytes for x in data), peak)


def measured(num_rows: int, dim: int, how: str, chains: int, draws: int) -> tuple[int, int]:
    """Bytes of the data and of the peak, in a separate process."""
    command = [sys.executable, __file__, "--num-rows", str(num_rows), "--child", how]
    command += ["--dim", str(dim), "--chains", str(chains), "--draws", str(draws)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    data, peak = (int(word) for word in out.split()[-2:])
    return data, peak


def table_of_chains(num_rows: int, chains: list[int]) -> None:
    print_header(f"Peak resident memory, N = {num_rows:,}, D = {DIM}, B = {BATCH_SIZE}")
    print_row(["chains", "", "data MB", "peak MB", "peak/data"], WIDTHS)
    for how, number in [("none", 0), ("sequential", 1), *(("vectorized", n) for n in chains)]:
        data, peak = measured(num_rows, DIM, how, number, 100)
        cells = [how, number or "", f"{data / 1e6:.0f}", f"{peak / 1e6:.0f}", f"{peak / data:.2f}"]
        print_row(cells, WIDTHS)


def table_of_draws(rows: list[int], dim: int, chains: int, draws: list[int]) -> None:
    shape = f"D = {dim}, B = {BATCH_SIZE}, chains: {chains}"
    print_header(f"Peak resident memory by rows and draws, {shape}")
    print_row(["rows", "draws", "data MB", "draws MB", "data only", "MCMC", "on disk"], MANY)
    for num_rows in rows:
        data, alone = measured(num_rows, dim, "none", chains, 0)
        for number in draws:
            peaks = [measured(num_rows, dim, how, chains, number)[1] for how in ("memory", "disk")]
            sizes = [data, 4 * dim * chains * number, alone, *peaks]
            print_row([f"{num_rows:,}", f"{number:,}", *(f"{x / 1e6:.0f}" for x in sizes)], MANY)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num-rows", type=float, nargs="+", default=[1e5, 1e6, 1e7])
    parser.add_argument("--chains", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--draws", type=float, nargs="+", default=[1e3, 1e4, 1e5])
    parser.add_argument("--dim", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=("chains", "draws", "many"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    rows, draws = [int(n) for n in args.num_rows], [int(n) for n in args.draws]
    if args.child:
        run(rows[0], args.dim, args.child, args.chains[0], draws[0])
        return
    if args.only in (None, "chains"):
        table_of_chains(max(rows), args.chains)
    if args.only in (None, "draws"):
        table_of_draws(rows, DIM, 1, draws)
    if args.only in (None, "many"):
        # A hundred thousand draws of 200 numbers by four chains take a quarter of an hour.
        table_of_draws(rows[:1], 200, 4, [number for number in draws if number <= 10_000])


if __name__ == "__main__":
    main()
