"""A run that is killed at random times and resumed each time, compared with an undisturbed run.

    python benchmarks/resume.py [--kills 20] [--samples 200000] [--longest 25]

The run is a child process of a logistic regression on 100,000 rows, killed by SIGKILL, which no
process can catch. Prints a line for each kill; then whether the results of both runs (draws, state,
data cursors, moments, running means) are bitwise the same; and the cost of the checkpoints relative
to ``MCMC``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from numpyro_sgmcmc import CheckpointedMCMC, SGHMCSplit  # noqa: E402
from numpyro_sgmcmc.checkpoint.store import encode  # noqa: E402

ROWS, COLUMNS, BATCH = 100_000, 20, 100


def model(X: Any, y: Any = None, batch_size: int | None = None) -> None:
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ beta), obs=None if y is None else y[i])


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    p = 1 / (1 + np.exp(-X @ rng.standard_normal(COLUMNS) / 4))
    return X, (rng.random(ROWS) < p).astype(np.int32)


def settings(samples: int) -> dict[str, Any]:
    return {
        "num_warmup": samples // 10,
        "num_samples": samples,
        "num_chains": 2,
        "chain_method": "vectorized",
        "progress_bar": False,
    }


def checkpointed(folder: Path, samples: int) -> CheckpointedMCMC:
    every = max(1, samples // 40)
    return CheckpointedMCMC(
        SGHMCSplit(model), checkpoint=folder, checkpoint_every=every, **settings(samples)
    )


def child(folder: Path, samples: int) -> None:
    """Begin the run or go on with it, whichever is due."""
    mcmc = checkpointed(folder, samples)
    if mcmc.has_checkpoint:
        mcmc.resume(*data(), batch_size=BATCH)
    else:
        mcmc.run(jax.random.key(0), *data(), batch_size=BATCH)


def newest(folder: Path) -> tuple[int, float]:
    """Iteration and time of the newest checkpoint."""
    paths = folder.glob("checkpoints/*/manifest/manifest.json")
    found = [(int(p.parents[1].name), p) for p in paths if p.parents[1].name.isdigit()]
    if not found:
        return -1, 0.0
    try:
        return max(found)[0], max(found)[1].stat().st_mtime
    except FileNotFoundError:
        return newest(folder)


def spawn(folder: Path, samples: int) -> subprocess.Popen:
    """A child that compiles once for all attempts, as one does where runs are killed often."""
    command = [sys.executable, __file__, "--child", str(folder), "--samples", str(samples)]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder.parent / "programs")}
    return subprocess.Popen(command, env=os.environ | cache)


def outcome(folder: Path, samples: int) -> tuple[list[np.ndarray], float]:
    """All that a complete run leaves, and the seconds it takes to read it."""
    mcmc = checkpointed(folder, samples)
    began = time.perf_counter()
    mcmc.resume(*data(), batch_size=BATCH)
    arrays: list[np.ndarray] = []
    parts = [mcmc.last_state, mcmc.get_samples(True), mcmc.get_extra_fields(True)]
    encode([*parts, mcmc.running_mean(True), mcmc.running_variance(True)], arrays)
    return arrays, time.perf_counter() - began


def plain(samples: int) -> None:
    mcmc = MCMC(SGHMCSplit(model), **settings(samples))
    mcmc.run(jax.random.key(0), *data(), batch_size=BATCH)
    jax.block_until_ready(mcmc.last_state)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--longest", type=float, default=25.0, help="seconds before a kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-plain", action="store_true")
    parser.add_argument("--child", type=Path)
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    if options.child:
        child(options.child, options.samples)
        return
    if options.plain:
        plain(options.samples)
        return
    with tempfile.TemporaryDirectory() as scratch:
        measure(
            Path(scratch),
            options.kills,
            options.samples,
            options.longest,
            options.seed,
            not options.no_plain,
        )


def measure(
    scratch: Path, kills: int, samples: int, longest: float, seed: int, with_plain: bool
) -> None:
    seconds = {}
    commands = {"plain": ["--plain"], "whole": ["--child", str(scratch / "whole")]}
    if not with_plain:
        del commands["plain"]
    for name, extra in commands.items():
        began = time.perf_counter()
        command = [sys.executable, __file__, "--samples", str(samples), *extra]
        subprocess.run(command, check=True)
        seconds[name] = time.perf_counter() - began
    steps = json.loads(max(scratch.glob("whole/checkpoints/*/manifest/manifest.json")).read_text())
    last = steps["iterations"]
    print(", ".join(f"{name} run {taken:.1f} s" for name, taken in seconds.items()), flush=True)

    chance, folder = random.Random(seed), scratch / "killed"
    print("\n kill   after  checkpoint reached   seconds lost")
    killed = 0
    while killed < kills:
        process = spawn(folder, samples)
        # A fifth of the kills at any time from the process's start on, also in its imports,
        # adaptation and compilation; the others some time after it has got further.
        began, before = time.time(), newest(folder)[0]
        if chance.random() > 0.2:
            while process.poll() is None and newest(folder)[0] <= before:
                time.sleep(0.02)
            wait = chance.uniform(0.0, seconds["whole"] / 100)
        else:
            wait = chance.uniform(0.0, longest)
        try:
            process.wait(wait)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            killed += 1
            iteration, when = newest(folder)
            lost = time.time() - max(began, when)
            where = "none yet" if iteration < 0 else f"{iteration} of {last}"
            print(f"{killed:5d} {time.time() - began:5.1f} s {where:>19} {lost:14.1f}", flush=True)
        else:
            assert process.returncode == 0, "the run ended by itself, and not well"
            if newest(folder)[0] == last:
                print(f"complete after {killed} kills")
                break
    if newest(folder)[0] != last:
        assert spawn(folder, samples).wait() == 0
    (whole, _), (resumed, reading) = (outcome(scratch / n, samples) for n in ("whole", "killed"))
    same = len(whole) == len(resumed) and all(
        (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
        for a, b in zip(whole, resumed, strict=True)
    )
    print(f"\n{killed} kills, {len(whole)} arrays: bit-identical {'yes' if same else 'NO'}")
    print(f"opening the complete run again {reading:.2f} s")
    raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    main()
