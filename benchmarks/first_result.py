"""Measure the time to the first result, and how much of it is compilation.

Each case runs in a separate process, first with an empty cache of compiled programs, then with the
cache that this has left. *Seconds* are wall time and CPU time of one call of ``MCMC.run``; data
and imports are made before. *Tracing* and *compiling* are seconds by JAX's own events, on all
threads; *programs* those whose compilation took more than 0.1 s.

================================================  =======  ==========
case                                              cold     warm cache
================================================  =======  ==========
flights, the fit of the quickstart                20 s     10 s
logistic, 20 columns, to the first draw           4 s      2 s
logistic, a million rows, four chains of 1,000    5 s      2.5 s
================================================  =======  ==========

are the targets.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import jax
from logistic_regression import BATCH_SIZE, DIM, logistic, make_data
from numpyro.infer import MCMC
from timing import print_header, print_row

from numpyro_sgmcmc import SGHMCSplit

WIDTHS = (40, 6, 8, 8, 8, 10, 9)
CASES = ("flights", "first draw, 1e4 rows", "first draw, 1e6 rows", "all draws, 1e6 rows")

TRACING = "/jax/core/compile/jaxpr_trace_duration"
LOWERING = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILING = "/jax/core/compile/backend_compile_duration"


def prepare(case: str):
    """Make the data of a case and return a function that runs it."""
    if case == "flights":
        sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
        import flights

        x, late, levels = flights.load_flights()
        num_levels = {factor: len(levels[factor]) for factor in flights.FACTORS}
        return lambda: flights.fit(x, late, num_levels)
    what, rows = case.split(", ")
    num_rows = int(float(rows.removesuffix(" rows")))
    X, y = jax.block_until_ready(make_data(jax.random.key(0), num_rows, DIM))
    mcmc = MCMC(
        SGHMCSplit(logistic),
        num_warmup=300 if what == "all draws" else 0,
        num_samples=1000 if what == "all draws" else 1,
        num_chains=4 if what == "all draws" else 1,
        chain_method="vectorized",
        progress_bar=False,
    )

    def run() -> None:
        mcmc.run(jax.random.key(1), X, y, batch_size=BATCH_SIZE)
        jax.block_until_ready(mcmc.get_samples())

    return run


def measure(case: str) -> dict[str, float]:
    """One run of a case in this process."""
    run = prepare(case)
    durations = defaultdict(list)
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: durations[event].append(seconds)
    )
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return {
        "wall": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "tracing": sum(durations[TRACING]) + sum(durations[LOWERING]),
        "compiling": sum(durations[COMPILING]),
        "programs": sum(seconds > 0.1 for seconds in durations[COMPILING]),
    }


def in_process(case: str, cache: str) -> dict[str, float]:
    """Measure in a separate process, with compiled programs cached in the folder ``cache``."""
    settings = {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
    out = subprocess.run(
        [sys.executable, __file__, "--measure", case],
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return json.loads(out.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--measure", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    print_header("First result")
    print_row(("", "cache", "wall s", "CPU s", "tracing", "compiling", "programs"), WIDTHS)
    for case in options.cases:
        with tempfile.TemporaryDirectory() as folder:
            for cache in ("cold", "warm"):
                found = in_process(case, folder)
                seconds = (f"{found[k]:.1f}" for k in ("wall", "cpu", "tracing", "compiling"))
                print_row((case, cache, *seconds, found["programs"]), WIDTHS)


if __name__ == "__main__":
    main()
