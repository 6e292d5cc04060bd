"""Alternating timed runs, and the tables that the benchmarks print."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro
import results

sys.path.insert(0, str(Path(__file__).parents[1]))


def interleaved(
    runs: Mapping[str, Callable[[], Any]],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, np.ndarray]:
    """Seconds of each run, ``repeats`` times in turn, so that a busy machine slows all alike.

    :param clock: that of the wall, or ``time.process_time``.
    """
    for run in runs.values():
        jax.block_until_ready(run())
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = clock()
            jax.block_until_ready(run())
            seconds[name].append(clock() - start)
    return {name: np.array(s) for name, s in seconds.items()}


def use_empty_compilation_cache() -> tempfile.TemporaryDirectory:
    """Use a new folder for JAX's compilation cache, as long as the returned object lives.

    NumPyro traces the loop of each run of an MCMC object anew; with the cache, continued runs do
    not compile it again.
    """
    folder = tempfile.TemporaryDirectory()
    jax.config.update("jax_compilation_cache_dir", folder.name)
    return folder


def print_header(title: str, **where: Any) -> None:
    """The title, the versions and the machine, of a table whose rows follow.

    :param where: see :func:`results.begin`; not printed.
    """
    results.begin(title, **where)
    versions = f"Python {platform.python_version()}, JAX {jax.__version__}"
    machine = f"{os.cpu_count()} cores, {jax.default_backend()}"
    print(f"{title}\n{versions}, NumPyro {numpyro.__version__}; {machine}\n", flush=True)


def print_row(cells: Iterable[Any], widths: Iterable[int]) -> None:
    """One row of a table, numbers to the right; the first has the columns' names."""
    cells = list(cells)
    results.add(cells)
    text = (
        f"{cell:>{width}}" if i else f"{cell:<{width}}"
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    print(" ".join(text), flush=True)
