"""Measure the memory that a process retains after repeated runs.

A hundred runs of ``MCMC(kernel(model))`` follow each other, each with a new kernel, on the same
model function or on a new one each (a closure, as in a loop over models). ``CheckpointedMCMC`` and
NUTS are measured as well. The table has resident memory, live compiled programs and arrays of JAX,
cached potentials and memory mappings after the first run, the tenth, half of the runs and all of
them. Each series runs in a separate process.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax import random
from logistic_regression import logistic, make_data
from numpyro.infer import MCMC, NUTS
from timing import print_header, print_row

from numpyro_sgmcmc import CheckpointedMCMC, SGHMCSplit
from numpyro_sgmcmc.model.subsampled import _potential_cache

SERIES = ("same model", "new models", "checkpointed", "NUTS, same", "NUTS, new")
WIDTHS = (14, 6, 8, 10, 8, 9, 10)
SETTINGS = {"num_warmup": 50, "num_samples": 50, "progress_bar": False}
ROWS, DIM, BATCH = 2_000, 5, 50


def another_model() -> Callable:
    """A new function each time, which is the same model."""

    def model(X: Any, y: Any, batch_size: int | None = None) -> None:
        logistic(X, y, batch_size)

    return model


def fit(series: str, number: int, scratch: Path) -> None:
    model = another_model() if "new" in series else logistic
    data, key = make_data(random.key(0), ROWS, DIM), random.key(number)
    if "NUTS" in series:
        mcmc = MCMC(NUTS(model), **SETTINGS)
        mcmc.run(key, *data)
    elif series == "checkpointed":
        mcmc = CheckpointedMCMC(
            SGHMCSplit(model), checkpoint=scratch / str(number), checkpoint_every=50, **SETTINGS
        )
        mcmc.run(key, *data, batch_size=BATCH)
    else:
        mcmc = MCMC(SGHMCSplit(model), **SETTINGS)
        mcmc.run(key, *data, batch_size=BATCH)
    jax.block_until_ready(mcmc.get_samples())


def held() -> tuple[str, int, int, int, int]:
    """Resident megabytes, programs, arrays, targets and mappings."""
    gc.collect()
    resident = 4096 * int(Path("/proc/self/statm").read_text().split()[1])
    programs = len(jax.devices()[0].client.live_executables())
    mappings = Path("/proc/self/maps").read_text().count("\n")
    return (
        f"{resident / 1e6:.0f}",
        programs,
        len(jax.live_arrays()),
        len(_potential_cache),
        mappings,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--series", nargs="+", choices=SERIES, default=SERIES)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        warnings.simplefilter("ignore")
        with tempfile.TemporaryDirectory() as scratch:
            for number in range(given.runs):
                fit(given.child, number, Path(scratch))
                if number == 0 or (number + 1) % 10 == 0:
                    print("held", number + 1, *held(), flush=True)
        return
    print_header(f"What a process keeps of {given.runs} runs")
    print_row(["series", "runs", "MB", "programs", "arrays", "targets", "mappings"], WIDTHS)
    for series in given.series:
        command = [sys.executable, __file__, "--runs", str(given.runs), "--child", series]
        out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        looks = [line.split()[1:] for line in out.stdout.splitlines() if line.startswith("held ")]
        for runs, *numbers in looks:
            if int(runs) in (1, 10, given.runs // 2, given.runs):
                print_row([series, runs, *numbers], WIDTHS)
        if out.returncode:
            print_row([series, f"ended: {out.returncode}", *[""] * 5], WIDTHS)


if __name__ == "__main__":
    main()
