"""A Parquet folder sorted by time: shuffled once on disk, then sampled as fast as npy files.

Ten columns: time, seven real covariates, an integer one and a label. The folder is shuffled in
``--memory`` megabytes; then a logistic regression is sampled from the result, and from npy files
with the same rows in the same order. Each stage is a separate process. Targets: resident memory of
the shuffle below ``--memory`` beside that of an idle process; the run within 1.3 times the run on
npy files; memory of the run that does not grow with the rows (the last of ``--num-rows`` is the one
of which runs are repeated).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
from jax import random
from logistic_regression import logistic
from numpyro.infer import MCMC
from timing import print_header, print_row

from numpyro_sgmcmc import HostArray, SGHMCSplit, open_rows, shuffle_rows

NAMES = ["time", *(f"x{j}" for j in range(8))]
ROW_GROUP_ROWS, FILE_ROWS = 250_000, 5_000_000
WIDTHS = (34, 10, 9, 9, 12, 12)
BATCH_SIZE = 1000


def write_parquet(folder: Path, num_rows: int) -> None:
    """The sorted folder: covariates drift with time."""
    import pyarrow as pa
    from pyarrow import parquet

    folder.mkdir()
    for start in range(0, num_rows, FILE_ROWS):
        writer = None
        for first in range(start, min(start + FILE_ROWS, num_rows), ROW_GROUP_ROWS):
            num = min(ROW_GROUP_ROWS, num_rows - first)
            rng = np.random.default_rng(first)
            X = rng.standard_normal((9, num), dtype=np.float32)
            X[0] = 2 * (first + np.arange(num)) / num_rows - 1
            X[1:] += X[0]
            X[8] = X[8].round()
            logits = np.linspace(-1, 1, 9, dtype=np.float32) @ X
            columns = dict(zip(NAMES, [*X[:8], X[8].astype(np.int32)], strict=True))
            label = (rng.random(num) < 1 / (1 + np.exp(-logits))).astype(np.int32)
            table = pa.table({**columns, "label": label})
            writer = writer or parquet.ParquetWriter(folder / f"{start:012d}.parquet", table.schema)
            writer.write_table(table)
        assert writer is not None
        writer.close()


def resident_mb(field: str) -> float:
    """Memory of this process: ``VmHWM`` (largest) or ``RssAnon`` (without files)."""
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) / 1024


def measure(stage: str, folder: Path, memory_mb: int) -> None:
    """Run one stage and print its seconds and memory."""
    baseline, peaks, is_done = resident_mb("RssAnon"), [0.0], Event()

    def sample() -> None:
        while not is_done.wait(0.02):
            peaks.append(resident_mb("RssAnon"))

    thread = Thread(target=sample)
    thread.start()
    start, cpu = time.perf_counter(), time.process_time()
    if stage == "shuffle":
        columns = {"X": NAMES, "y": "label"}
        shuffle_rows(
            folder / "parquet",
            folder / "shuffled",
            columns=columns,
            max_memory_bytes=memory_mb * 10**6,
            progress_bar=False,
        )
    elif stage.startswith("read"):
        if stage == "read parquet":
            arrays = {"X": HostArray.from_parquet(folder / "parquet", NAMES)}
        else:
            arrays, _ = open_rows(folder / "shuffled")
        rng = np.random.default_rng(0)
        start, cpu = time.perf_counter(), time.process_time()
        arrays["X"].read(rng.integers(len(arrays["X"]), size=BATCH_SIZE))
    else:
        data = open_rows(folder / "shuffled").arrays
        if stage == "npy":
            data = {
                n: HostArray(np.load(folder / "npy" / f"{n}.npy", mmap_mode="r"))
                for n in ("X", "y")
            }
        mcmc = MCMC(
            SGHMCSplit(logistic, step_size=0.1, num_steps=10),
            num_warmup=100,
            num_samples=500,
            num_chains=4,
            chain_method="vectorized",
            progress_bar=False,
        )
        mcmc.run(random.key(0), **data, batch_size=BATCH_SIZE)
        mcmc.get_samples()["beta"].block_until_ready()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    is_done.set()
    thread.join()
    print(
        json.dumps([seconds, cpu, max(peaks), max(peaks) - baseline, resident_mb("VmHWM")]),
        flush=True,
    )


def run_stage(stage: str, folder: Path, memory_mb: int) -> list[float]:
    """Run one stage in a separate process."""
    command = [sys.executable, __file__, "--stage", stage, "--folder", str(folder)]
    command += ["--memory", str(memory_mb)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare(folder: Path, num_rows: int, memory_mb: int, repeats: int) -> None:
    """All stages for a number of rows."""
    write_parquet(folder / "parquet", num_rows)
    stages = ["shuffle", "read parquet", "read shuffled", *["npy", "shuffled"] * repeats]
    found: dict[str, list[Any]] = {}
    for stage in stages:
        result = run_stage(stage, folder, memory_mb)
        print(f"  {stage}: {np.round(result, 2)}", flush=True)
        found.setdefault(stage, []).append(result)
        if stage == "shuffle":
            (folder / "npy").mkdir()
            for file in (folder / "shuffled").glob("*.npy"):
                shutil.copy(file, folder / "npy")
    titles = {
        "shuffle": f"shuffle in {memory_mb} MB",
        "read parquet": f"read {BATCH_SIZE} random rows, Parquet",
        "read shuffled": f"read {BATCH_SIZE} random rows, shuffled",
        "npy": "run on npy files",
        "shuffled": "run on the shuffled rows",
    }
    medians = {stage: np.median(x, 0) for stage, x in found.items()}
    for stage, title in titles.items():
        seconds, cpu, peak, growth, largest = medians[stage]
        cells = f"{seconds:.2f}", f"{cpu:.2f}", f"{growth:.0f} MB", f"{max(peak, largest):.0f} MB"
        print_row([title, f"{num_rows:.0e}", *cells], WIDTHS)
    ratio = medians["shuffled"] / medians["npy"]
    print(
        f"Run: {ratio[0]:.2f} times the seconds on npy files, {ratio[1]:.2f} in CPU\n", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--num-rows", type=float, nargs="+", default=[2e6, 1e7, 5e7])
    parser.add_argument("--memory", type=int, default=500, help="megabytes for the shuffle")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="folder for the files: 2 GB for 1e7 rows")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.stage:
        measure(args.stage, args.folder, args.memory)
        return
    print_header("Parquet: no arguments")
    print_row(["", "rows", "seconds", "CPU s", "more memory", "largest"], WIDTHS)
    for num_rows in args.num_rows:
        repeats = args.repeats if num_rows == args.num_rows[-1] else 1
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            compare(Path(folder), int(num_rows), args.memory, repeats)


if __name__ == "__main__":
    main()
