"""Runs on memory-mapped data that are disturbed for an hour, compared with an undisturbed run.

    python benchmarks/soak.py [--minutes 60] [--samples 20000]

A child process runs ``CheckpointedMCMC`` on memory maps. At random times it is killed (SIGKILL), is
stopped for some seconds (SIGSTOP), cannot extend files (a full disk), or its data file is
truncated; some children have a clock that jumps by up to a day, both ways. A child that ends is
started again and resumes. Each must end well or with an error of this package, and a complete run
must be bitwise the same as the undisturbed one. Prints the ends of the children by disturbance.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from resume import BATCH, COLUMNS, ROWS, data, model, newest
from timing import print_header, print_row

from numpyro_sgmcmc import CheckpointedMCMC, HostArray, SGHMCSplit, bias_report
from numpyro_sgmcmc.checkpoint.store import encode

DISTURBANCES = ("killed", "stopped", "full disk", "data cut", "clock jumps")
WIDTHS = (14, 7, 110)
_ERROR = re.compile(r"[\w.]*Error: ")


def mcmc_of(folder: Path, samples: int) -> CheckpointedMCMC:
    return CheckpointedMCMC(
        SGHMCSplit(model),
        num_warmup=samples // 10,
        num_samples=samples,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
        checkpoint=folder,
        checkpoint_every=samples // 40,
    )


def rows_on_disk(scratch: Path) -> tuple[HostArray, HostArray]:
    x = np.memmap(scratch / "X.dat", np.float32, "r", shape=(ROWS, COLUMNS))
    return HostArray(x), HostArray(np.memmap(scratch / "y.dat", np.int32, "r", shape=(ROWS,)))


def go_on(folder: Path, samples: int) -> CheckpointedMCMC:
    """Begin the run or go on with it, whichever is due."""
    mcmc, rows = mcmc_of(folder, samples), rows_on_disk(folder.parent)
    if mcmc.has_checkpoint:
        mcmc.resume(*rows, batch_size=BATCH)
    else:
        mcmc.run(jax.random.key(0), *rows, batch_size=BATCH)
    return mcmc


def outcome(folder: Path, samples: int) -> list[tuple]:
    """All that a complete run leaves."""
    mcmc, arrays = go_on(folder, samples), []
    parts = [mcmc.last_state, mcmc.get_samples(True), mcmc.get_extra_fields(True)]
    encode([*parts, mcmc.running_mean(True), mcmc.running_variance(True)], arrays)
    assert bias_report(mcmc).num_draws == 2 * samples
    return [(a.dtype, a.shape, a.tobytes()) for a in arrays]


def let_the_clock_jump() -> None:
    """Every few seconds the time of day becomes another one, up to a day off."""
    right, chance = time.time, random.Random(0)
    offset, due = 0.0, 0.0

    def wrong() -> float:
        nonlocal offset, due
        if time.monotonic() > due:
            offset = chance.uniform(-86_400, 86_400)
            due = time.monotonic() + chance.uniform(1.0, 5.0)
        return right() + offset

    time.time = wrong


class Child:
    """One attempt, and the ways to disturb it."""

    def __init__(self, folder: Path, samples: int, has_wrong_clock: bool) -> None:
        command = [sys.executable, __file__, "--child", str(folder), "--samples", str(samples)]
        command += ["--wrong-clock"] * has_wrong_clock
        cache = {"JAX_COMPILATION_CACHE_DIR": str(folder.parent / "programs")}
        self.folder = folder
        # Not into a file, which a full disk would keep short.
        self.process = subprocess.Popen(
            command, env=os.environ | cache, stderr=subprocess.PIPE, text=True
        )

    def kill(self) -> None:
        self.process.kill()

    def stop_a_while(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(random.uniform(1.0, 5.0))
        self.process.send_signal(signal.SIGCONT)

    def fill_the_disk(self) -> None:
        """No file may grow, of the child's."""
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

    def cut_the_data(self) -> None:
        os.truncate(self.folder.parent / "X.dat", 2 * ROWS * COLUMNS)

    def end(self) -> str:
        """Return how a child process ended."""
        text, code = self.process.communicate()[1], self.process.returncode
        if code == 0:
            return "ended well"
        if code < 0:
            return f"ended by {signal.Signals(-code).name}"
        errors = [line for line in text.splitlines() if _ERROR.match(line)]
        if not errors:
            print(text)  # of which there must be none
            return "ended without a sentence"
        if own := [line for line in errors if "Writing a checkpoint" in line]:
            return self._short(own[-1])  # threads of Orbax may print more as the process ends
        if not any(word in errors[-1] for word in ("HostArray", "mmap")):
            print(text)
        return self._short(errors[-1])

    def _short(self, line: str) -> str:
        line = line.replace(str(self.folder), "FOLDER")  # alike in all runs
        return line if len(line) <= WIDTHS[2] else line[: WIDTHS[2] - 3] + "..."


def run_disturbed(
    folder: Path, samples: int, chance: random.Random, longest: float, found: Counter
) -> None:
    """A run until it is complete, with one disturbance an attempt."""
    ways: dict[str, Callable[[Child], None]] = {
        "killed": Child.kill,
        "stopped": Child.stop_a_while,
        "full disk": Child.fill_the_disk,
        "data cut": Child.cut_the_data,
        "clock jumps": lambda _: None,
    }
    ended = ""
    while ended != "ended well":
        what = chance.choice(DISTURBANCES)
        child = Child(folder, samples, what == "clock jumps")
        try:
            child.process.wait(chance.uniform(0.0, longest))
            what = what if what == "clock jumps" else "none"  # it was ready before
        except subprocess.TimeoutExpired:
            ways[what](child)
        ended = child.end()
        found[what, ended] += 1
        print_row((what, newest(folder)[0], ended), WIDTHS)
        if what == "data cut":
            shutil.copyfile(folder.parent / "X.whole", folder.parent / "X.dat")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--wrong-clock", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        if given.wrong_clock:
            let_the_clock_jump()
        go_on(given.child, given.samples)
        return
    print_header("Runs that are disturbed")
    print_row(("disturbed", "at", "how it ended"), WIDTHS)
    began, chance, found, rounds = time.monotonic(), random.Random(given.seed), Counter(), 0
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        X, y = data()
        X.tofile(scratch / "X.dat")
        y.tofile(scratch / "y.dat")
        shutil.copyfile(scratch / "X.dat", scratch / "X.whole")
        start = time.monotonic()
        assert Child(scratch / "whole", given.samples, False).end() == "ended well"
        longest, whole = time.monotonic() - start, outcome(scratch / "whole", given.samples)
        while time.monotonic() - began < 60.0 * given.minutes:
            folder = scratch / f"run-{rounds}"
            run_disturbed(folder, given.samples, chance, longest, found)
            assert outcome(folder, given.samples) == whole, "not bitwise the same"
            shutil.rmtree(folder)
            rounds += 1
    print(f"\n{rounds} complete runs, each the undisturbed one's to the last bit")
    print_row(("disturbed", "times", "how it ended"), WIDTHS)
    for (what, ended), times in sorted(found.items()):
        print_row((what, times, ended), WIDTHS)


if __name__ == "__main__":
    main()
