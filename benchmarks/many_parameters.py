"""Draws of many parameters that do not fit in memory, written and read by separate processes.

    python benchmarks/many_parameters.py [--parameters 1e6] [--draws 1000]

The first process writes random draws in segments, as ``CheckpointedMCMC`` does. The second opens
them and reads all draws of one parameter. Prints the largest resident memory of each, and the size
of the draws.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from numpyro_sgmcmc import open_draws
from numpyro_sgmcmc.checkpoint.draws import DrawsOnDisk
from numpyro_sgmcmc.checkpoint.store import Checkpoint, CheckpointStore


def report(what: str, began: float) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    seconds = time.perf_counter() - began
    print(f"{what}: {seconds:.0f} s, at most {peak:.2f} GB resident", flush=True)


def write(folder: Path, parameters: int, draws: int) -> None:
    began, segment = time.perf_counter(), max(1, draws // 50)
    disk, rng, blocks = DrawsOnDisk(folder, "z"), np.random.default_rng(0), []
    template = {"z": {"w": np.empty((1, segment, parameters), np.float32)}}
    disk.create(template, draws)
    for start in range(0, draws, segment):
        shape = (1, min(segment, draws - start), parameters)
        values = {"z": {"w": rng.standard_normal(shape, np.float32)}}
        blocks.append(disk.write(values, start))
    CheckpointStore(folder).write(Checkpoint(draws, draws, blocks, {}, np.zeros(1)))
    report("written", began)


def read(folder: Path, parameters: int) -> None:
    began = time.perf_counter()
    column = np.asarray(open_draws(folder)["posterior"]["w"][:, :, parameters // 2])
    assert np.isfinite(column).all()
    report(f"draws of one parameter, SD {column.std():.2f}", began)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parameters", type=float, default=1e6)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="where the draws go")
    parser.add_argument("--child", choices=("write", "read"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    parameters = int(options.parameters)
    if options.child == "write":
        write(options.folder, parameters, options.draws)
    elif options.child == "read":
        read(options.folder, parameters)
    else:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            gigabytes = 4 * parameters * options.draws / 1e9
            print(f"{options.draws:,} draws of {parameters:,} parameters: {gigabytes:.1f} GB")
            sys.stdout.flush()
            for child in ("write", "read"):
                arguments = ["--parameters", str(parameters), "--draws", str(options.draws)]
                command = [sys.executable, __file__, "--folder", folder, "--child", child]
                subprocess.run([*command, *arguments], check=True)


if __name__ == "__main__":
    main()
