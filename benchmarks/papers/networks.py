"""Bayesian neural networks by this library's kernels, beside what is used today.

Regressions on tables (one hidden layer), and Fashion-MNIST on 784-128-10 units (101,770 weights),
with digits as out-of-distribution images. Compared with the kernels: Adam to the posterior's mode
and with a separate weight decay, a deep ensemble, dropout in prediction, and a Laplace
approximation of the last layer. Rates, decays, dropout, the kernels' steps and temperature are
chosen on a tenth of the training rows, as is the predictive SD where a method has none.

    python benchmarks/papers/networks.py              # both
    python benchmarks/papers/networks.py --only images
    python benchmarks/papers/networks.py --full       # more splits and seeds (an hour)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import networks_data
import networks_kernels
import numpy as np
import output
from networks_data import Data
from networks_kernels import Run
from networks_rivals import Training, Tuned, dropout, ensemble, laplace, score, single, tune
from networks_task import Scores, Task
from standard_errors import mean

from numpyro_sgmcmc import SGHMCSplit


class Size(NamedTuple):
    """
    - **seeds** - splits of a table, or runs on the images.
    - **epochs** - of a network of the rivals.
    - **batch** - its minibatches.
    - **decay** - like the prior's pull; of numbers for a noise of SD 0.3.
    - **rates**, **decays**, **drops** - among which held-out rows choose.
    - **runs** - the kernels', by name; where there are several, held-out rows choose.
    """

    seeds: int
    epochs: int
    batch: int
    decay: float
    rates: tuple[float, ...]
    decays: tuple[float, ...]
    drops: tuple[float, ...]
    runs: Mapping[str, Sequence[Run]]


TABLES = Size(
    seeds=3,
    epochs=200,
    batch=32,
    decay=0.1,
    rates=(0.003, 0.01, 0.03, 0.1, 0.3),
    decays=(0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    drops=(0.02, 0.05, 0.1, 0.2),
    runs={
        "SGHMCSplit, T = 1": tuple(
            Run(SGHMCSplit, 100, 4, 100, 100, step, 60, Training(100, 32, 0.01, 0.1), gain=gain)
            for gain in (1.0, 2.0, 4.0)
            for step in (0.001, 0.003)
        ),
        # The prior is that which held-out rows choose for either table, here as above.
        "SGHMCSplit, no arguments": (Run(SGHMCSplit, 100, 4, 400, 100, gain=2.0),),
    },
)
# As many passes in all as the ensemble has, 20 for each chain: Adam, then cycles.
_CYCLES = ((12, 4, 0.02), (4, 16, 0.04))
IMAGES = Size(
    seeds=1,
    epochs=20,
    batch=128,
    decay=1.0,
    rates=(0.005, 0.01, 0.02, 0.04),
    decays=(0.1, 0.3, 1.0, 3.0),
    drops=(0.02, 0.05, 0.15),
    runs={
        "SGHMCSplit, cycles": tuple(
            Run(
                SGHMCSplit,
                128,
                5,
                warmup=0,
                draws=(20 - begun) // cycle,
                step_size=step,
                start=Training(begun, 128, 0.02, 0.3),
                temperature=0.03,
                decay=0.3,
                cycle=cycle,
            )
            for begun, cycle, step in _CYCLES
        ),
        "SGHMCSplit, T = 1": tuple(
            Run(SGHMCSplit, 1000, 5, 5, 10, step, 60, Training(5, 128, 0.01, 1.0))
            for step in (0.001, 0.002)
        ),
        "SGHMCSplit, no arguments": (Run(SGHMCSplit, 1000, 4, 1, 3),),
    },
)
FULL = {"tables": TABLES._replace(seeds=10), "images": IMAGES._replace(seeds=3)}


class Found(NamedTuple):
    """
    - **scores** - of a run.
    - **seconds** - of CPU, tuning left out.
    """

    scores: Scores
    seconds: float


def timed(score_of: Callable[[], Scores]) -> Found:
    began = time.process_time()
    scores = score_of()
    return Found(scores, time.process_time() - began)


def measure(task: Task, load: Callable[[int], Data], size: Size) -> dict[str, list[Found]]:
    """All methods, at each seed; what is tuned, is so at the first one."""
    found: dict[str, list[Found]] = {}
    settings: dict[str, Any] = {}
    for seed in range(size.seeds):
        data = load(seed)
        settings = settings or _tuned(task, data, size)
        for name, score_of in _methods(task, data, settings, seed).items():
            one = timed(score_of)
            found.setdefault(name, []).append(one)
            print(
                name, *(f"{x:.4g}" for x in one.scores), f"{one.seconds:.0f} s of CPU", flush=True
            )
    return found


def _methods(
    task: Task, data: Data, settings: Mapping[str, Any], seed: int
) -> dict[str, Callable[[], Scores]]:
    """Return functions that compute the scores, by name."""
    rivals, runs = settings["rivals"], settings["runs"]
    methods: dict[str, Callable[[], Scores]] = {
        name: partial(_by_rival, task, data, method, tuned, seed)
        for name, (method, tuned) in rivals.items()
    }
    how = rivals["Adam, decay tuned"][1].how
    methods["Laplace, last layer"] = partial(_by_laplace, task, data, how, seed)
    for name, run in runs.items():
        methods[name] = partial(_by_kernel, task, data, run, seed)
    return methods


def _by_rival(task: Task, data: Data, method: Callable, tuned: Tuned, seed: int) -> Scores:
    return score(task, method(task, data, tuned.how, seed), data, tuned.sd)


def _by_laplace(task: Task, data: Data, how: Training, seed: int) -> Scores:
    predict, sd = laplace(task, data, how, seed)
    return score(task, predict, data, sd)


def _by_kernel(task: Task, data: Data, run: Run, seed: int) -> Scores:
    task = run.of(task)
    return networks_kernels.score(task, networks_kernels.sample(task, data, run, seed), data)


def _tuned(task: Task, data: Data, size: Size) -> dict[str, Any]:
    """Rivals that are trained, and the kernels' runs, with what held-out rows have chosen."""
    began = time.process_time()
    first = [Training(size.epochs, size.batch, rate, size.decay) for rate in size.rates]
    mode = tune(task, data, single, first, 0)
    decays = [mode.how._replace(decay=decay) for decay in size.decays]
    network = tune(task, data, single, decays, 0)
    several = tune(task, data, _pair, decays, 0)
    drops = [network.how._replace(dropout=share) for share in size.drops]
    found = {
        "Adam, the prior's decay": (single, mode),
        "Adam, decay tuned": (single, network),
        "deep ensemble of 5": (ensemble, several),
        "dropout": (dropout, tune(task, data, dropout, drops, 0)),
    }
    for name, (_, tuned) in found.items():
        print(f"{name}: {tuned}")
    print(f"tuning of the rivals: {time.process_time() - began:.0f} s of CPU", flush=True)
    began = time.process_time()
    runs = {name: networks_kernels.tune(task, data, among) for name, among in size.runs.items()}
    print(*runs.items(), sep="\n")
    print(f"tuning of the kernels: {time.process_time() - began:.0f} s of CPU", flush=True)
    return {"rivals": found, "runs": runs}


def _pair(task: Task, data: Data, how: Training, seed: int) -> Any:
    """An ensemble as small as may be, to tune one."""
    return ensemble(task, data, how, seed, members=2)


def rows_of(found: Mapping[str, list[Found]]) -> list[list[str]]:
    """A line for each method: means over seeds with their standard errors."""
    rows = []
    for name, runs in found.items():
        cells = []
        for values, digits in zip(
            np.transpose([r.scores for r in runs]), (3, 2, 1, 2, 2, 1), strict=True
        ):
            if not np.isnan(values).all():
                several = len(values) > 1
                cells.append(f"{mean(values) if several else values[0]:.{digits}f}")
        rows.append([name, *cells, f"{np.mean([r.seconds for r in runs]):.0f}"])
    return rows


def regressions(size: Size, units: int, names: tuple[str, ...]) -> None:
    for name in names:
        task = Task((networks_data.table(name, 0).x.shape[1], units, 1), 1.0, False)
        found = measure(task, lambda seed, name=name: networks_data.table(name, seed), size)
        output.print_table(
            f"{name}: {units} hidden units, {size.seeds} splits; calibration error in %",
            ("method", "NLL", "RMSE", "calibration error", "CPU s"),
            rows_of(found),
        )


def images(data: Data, sizes: tuple[int, ...], size: Size, name: str) -> None:
    found = measure(Task(sizes, 2.0, True), lambda _: data, size)
    output.print_table(
        f"{name}: {'-'.join(map(str, sizes))} units, {len(data.y):,} rows to learn from, "
        f"{len(data.y_test):,} to test on, runs: {size.seeds}",
        (
            "method",
            "NLL",
            "accuracy, %",
            "ECE, %",
            "entropy",
            "others' entropy",
            "AUROC, %",
            "CPU s",
        ),
        rows_of(found),
    )


def quick(size: Size) -> Size:
    """A small part of it."""
    start = Training(5, 20, 0.03, 0.3)
    own = tuple(Run(SGHMCSplit, 20, 2, 5, 5, 0.02, 5, start, t) for t in (1.0, 0.3))
    return size._replace(
        epochs=5,
        batch=20,
        rates=(0.03,),
        decays=(0.1, 0.3),
        drops=(0.1,),
        seeds=2,
        runs={
            "SGHMCSplit, T chosen": own,
            "SGHMCSplit, cycles": (Run(SGHMCSplit, 20, 2, 0, 2, 0.02, start=start, cycle=2),),
        },
    )


def main() -> None:
    asked = output.arguments(__doc__, "regressions", "images")
    output.print_title("Networks beside Adam, ensembles, dropout and Laplace")
    if asked.quick:
        regressions(quick(TABLES), 5, ("Made up",))
        size = quick(IMAGES)._replace(seeds=1)
        images(networks_data.made_up(200), (2, 8, 3), size, "Made up")
        return
    if asked.only != "images":
        names = ("Boston", "Concrete", "Diabetes") if asked.full else ("Boston", "Concrete")
        regressions(FULL["tables"] if asked.full else TABLES, 50, names)
    if asked.only != "regressions":
        size = FULL["images"] if asked.full else IMAGES
        images(networks_data.fashion(has_others=True), (784, 128, 10), size, "Fashion-MNIST")


if __name__ == "__main__":
    main()
