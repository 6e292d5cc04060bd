"""Rows on disk compared with the same rows in memory: speed, memory and the posterior.

First, steps per second with a table that fits into memory, as arrays and as ``HostArray`` over
memory maps. Runs alternate, so that other load slows both, and have the same settings, since the
warm-up might choose others. Target: at least 0.7 of the speed. The ratio of CPU seconds of all
threads is less sensitive to other load. Then (``--gigabytes``) a table larger than the intended
memory, sampled in a separate process: largest resident memory, and means and SDs compared with
Newton's method by chunks. Targets for 20 GB: under 3 GB of memory, and a warm-up of three times one
sequential read.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax, random
from logistic_regression import DIM, logistic, make_data
from numpyro.infer import MCMC
from timing import interleaved, print_header, print_row

from numpyro_sgmcmc import HostArray, SGHMCSplit

WIDTHS = (10, 8, 10, 12, 12, 8, 8)
STEPS = 10  # a draw
CHUNK = 250_000
FLOAT = np.dtype(np.float32)


def write_table(folder: Path, num_rows: int) -> None:
    """Columns and labels as plain files, chunk by chunk."""
    rng = np.random.default_rng(0)
    beta = np.linspace(-1.0, 1.0, DIM, dtype=np.float32)
    with (folder / "X").open("wb") as columns, (folder / "y").open("wb") as labels:
        for start in range(0, num_rows, CHUNK):
            X = rng.standard_normal((min(CHUNK, num_rows - start), DIM), dtype=np.float32)
            y = rng.random(len(X), dtype=np.float32) < 1.0 / (1.0 + np.exp(-X @ beta))
            X.tofile(columns)
            y.astype(np.float32).tofile(labels)


def open_table(folder: Path) -> tuple[np.memmap, np.memmap]:
    """The files as memory maps."""
    num_rows = (folder / "y").stat().st_size // FLOAT.itemsize
    X = np.memmap(folder / "X", FLOAT, "r", shape=(num_rows, DIM))
    return X, np.memmap(folder / "y", FLOAT, "r", shape=(num_rows,))


def make_loop(data: tuple, batch_size: int, minibatch: str, num: int) -> Callable[[], Any]:
    """Iterations of four warm chains, compiled once."""
    given: dict[str, Any] = {
        "gradient_estimator": "control_variate",
        "step_size": 0.2,
        "num_steps": STEPS,
    }
    kernel = SGHMCSplit(logistic, subsampling=minibatch, **given)
    kwargs = {"batch_size": batch_size}
    keys = random.split(random.key(1), 4)
    state = kernel.init(keys, 0, None, data, kwargs)
    loop = jax.jit(
        lambda s: lax.scan(lambda s, _: (kernel.sample(s, data, kwargs), None), s, None, num)[0]
    )
    return lambda: loop(state).z


def compare_speed(num_rows: int, repeats: int) -> None:
    """The first table."""
    print_row(["rows", "B", "minibatch", "in memory", "on disk", "ratio", "CPU"], WIDTHS)
    with tempfile.TemporaryDirectory() as folder:
        X, y = make_data(random.key(0), num_rows, DIM)
        for name, array in (("X", X), ("y", y)):
            np.asarray(array).tofile(Path(folder) / name)
        on_disk = tuple(
            HostArray(a, name=n) for a, n in zip(open_table(Path(folder)), "Xy", strict=True)
        )
        for batch_size, minibatch in [
            (b, m) for m in ("contiguous", "shuffled") for b in (100, 1000)
        ]:
            num = 200_000 // batch_size
            runs = {
                name: make_loop(data, batch_size, minibatch, num)
                for name, data in (("memory", (X, y)), ("disk", on_disk))
            }
            seconds, cpu = (
                {k: np.median(v) for k, v in interleaved(runs, repeats, clock).items()}
                for clock in (time.perf_counter, time.process_time)
            )
            steps = 4 * STEPS * num
            print_row(
                [
                    f"{num_rows:.0e}",
                    batch_size,
                    minibatch,
                    f"{steps / seconds['memory']:,.0f}/s",
                    f"{steps / seconds['disk']:,.0f}/s",
                    f"{seconds['memory'] / seconds['disk']:.2f}",
                    f"{cpu['memory'] / cpu['disk']:.2f}",
                ],
                WIDTHS,
            )


def laplace_by_chunks(X: np.memmap, y: np.memmap) -> tuple[np.ndarray, np.ndarray]:
    """The posterior's mode and SDs: Newton's method on a part, then twice on all rows."""
    beta = np.zeros(DIM)
    for last in [min(len(y), 10 * CHUNK)] * 5 + [len(y)] * 2:
        weight = len(y) / last
        gradient, hessian = beta.copy(), np.eye(DIM)
        for start in range(0, last, CHUNK):
            rows = np.asarray(X[start : min(start + CHUNK, last)], np.float32)
            p = 1.0 / (1.0 + np.exp(-(rows @ beta.astype(np.float32))))
            gradient += weight * (rows.T @ (p - y[start : start + len(rows)]))
            hessian += weight * ((rows.T * (p * (1.0 - p))) @ rows)
        beta = beta - np.linalg.solve(hessian, gradient)
    return beta, np.sqrt(np.diagonal(np.linalg.inv(hessian)))


def drop_from_page_cache(folder: Path) -> None:
    """Have the system keep nothing of the files in memory."""
    for path in (folder / "X", folder / "y"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_once(folder: Path) -> float:
    """Seconds in which the files are read from end to end."""
    drop_from_page_cache(folder)
    start = time.perf_counter()
    for path in (folder / "X", folder / "y"):
        with path.open("rb", buffering=0) as file:
            while file.read(2**26):
                pass
    return time.perf_counter() - start


def sample_table(folder: Path) -> None:
    """Samples the table and prints what it cost; the process does nothing else."""
    data = [HostArray(a, name=n) for a, n in zip(open_table(folder), "Xy", strict=True)]
    drop_from_page_cache(folder)
    start = time.perf_counter()
    kernel, warm_up = SGHMCSplit(logistic), []
    init = kernel.init

    def timed_init(*args: Any, **kwargs: Any) -> Any:
        state = init(*args, **kwargs)
        warm_up.append(time.perf_counter() - start)
        return state

    kernel.init = timed_init
    mcmc = MCMC(
        kernel,
        num_warmup=300,
        num_samples=1000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), *data, batch_size=1000)
    draws = np.asarray(mcmc.get_samples()["beta"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    found = {"seconds": time.perf_counter() - start, "warm-up": warm_up[0], "gigabytes": peak}
    print(json.dumps({**found, "mean": draws.mean(0).tolist(), "sd": draws.std(0).tolist()}))


def larger_than_memory(gigabytes: float, folder: Path) -> None:
    """The second part."""
    num_rows = int(gigabytes * 1e9) // ((DIM + 1) * FLOAT.itemsize)
    write_table(folder, num_rows)
    once = read_once(folder)
    done = subprocess.run(
        [sys.executable, __file__, "--sample", str(folder)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    mean, sd = laplace_by_chunks(*open_table(folder))
    shift = np.abs((np.array(found["mean"]) - mean) / sd).max()
    ratio = np.array(found["sd"]) / sd
    print(
        f"\n{num_rows:.2e} rows, {gigabytes:g} GB on disk: {found['seconds']:.0f} s, of which "
        f"{found['warm-up']:.0f} s until the first iteration, {found['warm-up'] / once:.1f} times "
        f"one read from end to end ({once:.0f} s); at most "
        f"{found['gigabytes']:.2f} GB resident; means within {shift:.2f} SDs, SDs "
        f"{ratio.min():.3f} to {ratio.max():.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--num-rows", type=float, default=1e6)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gigabytes", type=float, default=20.0, help="0: leave this part out")
    parser.add_argument("--folder", type=Path, help="where the large table goes")
    parser.add_argument("--sample", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.sample:
        sample_table(args.sample)
        return
    print_header(f"Rows on disk; D = {DIM}, four chains")
    compare_speed(int(args.num_rows), args.repeats)
    if args.gigabytes:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            larger_than_memory(args.gigabytes, Path(folder))


if __name__ == "__main__":
    main()
