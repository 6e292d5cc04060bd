"""What the benchmarks share: the logistic regression, its data, interleaved timing, a table."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, lax, random

sys.path.insert(0, str(Path(__file__).parents[1]))

DIM = 20
BATCH_SIZE = 100


def logistic(X: Array, y: Array, batch_size: int | None = None) -> None:
    """Logistic regression with standard normal coefficients."""
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ beta), obs=y[i])


@partial(jax.jit, static_argnums=(1, 2))
def make_data(rng_key: Array, num_rows: int, dim: int) -> tuple[Array, Array]:
    """Standard normal columns and float labels, made by chunks: no second copy of the data."""
    num_chunks = max(1, num_rows * dim // 2**22)
    while num_rows % num_chunks:
        num_chunks -= 1
    shape = (num_rows // num_chunks, dim)
    beta = jnp.linspace(-1.0, 1.0, dim) * min(1.0, (DIM / dim) ** 0.5)

    def fill(k: Array, data: tuple[Array, Array]) -> tuple[Array, Array]:
        X, y = data
        key, label_key = random.split(random.fold_in(rng_key, k))
        rows = random.normal(key, shape)
        labels = random.uniform(label_key, shape[:1]) < jax.nn.sigmoid(rows @ beta)
        start = k * shape[0]
        return (
            lax.dynamic_update_slice(X, rows, (start, 0)),
            lax.dynamic_update_slice(y, labels.astype(y.dtype), (start,)),
        )

    return lax.fori_loop(0, num_chunks, fill, (jnp.zeros((num_rows, dim)), jnp.zeros(num_rows)))


def interleaved(runs: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, np.ndarray]:
    """Seconds of each run, ``repeats`` times in turn, so that a busy machine slows all alike."""
    for run in runs.values():
        jax.block_until_ready(run())
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - start)
    return {name: np.array(s) for name, s in seconds.items()}


def print_header(title: str) -> None:
    """The title, the versions and the machine."""
    versions = f"Python {platform.python_version()}, JAX {jax.__version__}"
    machine = f"{os.cpu_count()} cores, {jax.default_backend()}"
    print(f"{title}\n{versions}, NumPyro {numpyro.__version__}; {machine}\n", flush=True)


def print_row(cells: Iterable[Any], widths: Iterable[int]) -> None:
    """One row of a table, numbers to the right."""
    text = (
        f"{cell:>{width}}" if i else f"{cell:<{width}}"
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    print(" ".join(text), flush=True)
