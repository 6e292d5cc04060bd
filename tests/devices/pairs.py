"""Checks of checkpoints of two processes that share the rows, run in both at once.

``python -m tests.devices.pairs PROCESS PORT FOLDER NAME...`` writes the outcome of each check to a
file: an empty string, or a traceback. `test_pairs.py` starts both processes.
"""

import json
import os
import signal
import sys
import traceback
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from numpyro_sgmcmc import CheckpointedMCMC, HostArray, SGHMCSplit, ShardedArray, bias_report
from numpyro_sgmcmc.checkpoint import store
from tests.checkpoint.runs import end_at, outcome
from tests.devices.process import COUNTS, DIM, regression

# Everything that a warm-up adapts.
GIVEN = {
    "inverse_mass_matrix": np.full(DIM, 1.0 / 50.0),
    "gradient_estimator": "control_variate",
    "subsampling": "contiguous",
    "step_size": 0.2,
    "num_steps": 2,
}
START = {"beta": np.zeros((2, DIM), np.float32)}
KERNEL = SGHMCSplit(regression, **GIVEN)
# Checkpoints at iterations 0, 4, 6 (the warm-up), 10, 14.
SETTINGS = {
    "num_warmup": 6,
    "num_samples": 8,
    "num_chains": 2,
    "chain_method": "vectorized",
    "checkpoint_every": 4,
}


def rows(shift=0.0):
    """Return the rows of this process."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(sum(COUNTS), DIM)).astype(np.float32)
    y = (rng.random(len(X)) < 0.5).astype(np.float32)
    X[-1] += shift
    own = slice(2 * jax.process_index(), 2 * jax.process_index() + 2)
    ends = np.cumsum((0, *COUNTS))
    rows = slice(ends[own.start], ends[own.stop])
    return [ShardedArray(x[rows], counts=COUNTS[own]) for x in (X, y)]


def on_hosts(data):
    """Return the same rows, of which each process keeps its part on the host."""
    own = [np.concatenate([np.asarray(s.data) for s in x.array.addressable_shards]) for x in data]
    counts = COUNTS[2 * jax.process_index() : 2 * jax.process_index() + 2]
    # Shards on devices are padded to the longest.
    longest = max(COUNTS)
    places = np.concatenate([k * longest + np.arange(n) for k, n in enumerate(counts)])
    return [ShardedArray(HostArray(x[places]), counts=counts) for x in own]


def mcmc_of(folder, kernel=KERNEL, **settings):
    settings = {**SETTINGS, "progress_bar": False, "checkpoint": folder, **settings}
    return CheckpointedMCMC(kernel, **settings)


def run(folder, data=None, **settings):
    mcmc = mcmc_of(folder, **settings)
    mcmc.run(jax.random.key(1), *(data or DATA), batch_size=20, init_params=START)
    return mcmc


def resume(folder, data=None):
    mcmc = mcmc_of(folder, SGHMCSplit(regression, **GIVEN))
    mcmc.resume(*(data or DATA), batch_size=20)
    return mcmc


def bits(mcmc):
    return [(x.dtype.str, x.shape, x.tobytes()) for x in outcome(mcmc)]


def keep(name, mcmc):
    """Save the draws for the processes that are started next."""
    np.savez(FOLDER / f"{name}-{jax.process_index()}", *outcome(mcmc))


def assert_kept(name, mcmc):
    for place in range(2):
        kept = np.load(FOLDER / f"{name}-{place}.npz")
        arrays = outcome(mcmc)
        assert len(kept.files) == len(arrays)
        for file, x in zip(kept.files, arrays, strict=True):
            assert kept[file].tobytes() == x.tobytes()


# In the order in which they run


def check_complete_run():
    mcmc = run(FOLDER / "whole", progress_bar=jax.process_index() == 0)
    keep("whole", mcmc)
    np.save(FOLDER / f"draws-{jax.process_index()}", np.asarray(mcmc.get_samples(True)["beta"]))
    assert mcmc.get_samples(True)["beta"].shape == (2, 8, DIM)
    assert "beta" in str(bias_report(mcmc, full_data=True))
    # A complete run is read.
    assert bits(resume(FOLDER / "whole")) == bits(mcmc)


def lose(place):
    """Kill one of the processes; the other one must end as well."""

    def die():
        if jax.process_index() == place:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        end_at(patch, 12, die)
        run(FOLDER / f"lost-{place}")


def check_run_with_the_first_process_killed():
    lose(0)


def check_run_with_the_second_process_killed():
    lose(1)


def check_resumed_run_is_bitwise_the_complete_one():
    for place in range(2):
        folder = FOLDER / f"lost-{place}"
        assert store.read_latest_manifest(folder)["iterations"] == 10
        assert_kept("whole", resume(folder))


def check_ctrl_c_in_one_process_stops_both():
    is_asked = jax.process_index() == 1
    folder = FOLDER / "stopped"
    with pytest.MonkeyPatch.context() as patch:
        end_at(patch, 12, lambda: is_asked and signal.raise_signal(signal.SIGINT))
        with pytest.warns(UserWarning, match="Ctrl-C.* 6 of 8 draws"):
            mcmc = run(folder)
    assert mcmc.get_samples(True)["beta"].shape == (2, 6, DIM)
    assert_kept("whole", resume(folder))


def check_full_disk_raises_in_both_processes():
    folder, calls = FOLDER / "full", []
    before = ocp.JsonCheckpointHandler.async_save

    def save(*args, **kwargs):
        calls.append(1)
        return fail() if len(calls) == 4 else before(*args, **kwargs)

    async def fail():
        raise OSError("No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ocp.JsonCheckpointHandler, "async_save", save)
        with pytest.raises(RuntimeError, match=r"No space left.* 0 draws"):
            run(folder)
    assert len(calls) == (4 if jax.process_index() == 0 else 0)
    assert_kept("whole", resume(folder))


def check_rows_on_hosts_have_the_same_draws():
    data, folder = on_hosts(DATA), FOLDER / "hosts"
    rows_of_hosts = data[0][np.array([0, 60, 200, 400, -1])]
    np.testing.assert_array_equal(rows_of_hosts, DATA[0][np.array([0, 60, 200, 400, -1])])
    with pytest.MonkeyPatch.context() as patch:
        end_at(patch, 12, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.warns(UserWarning, match="Ctrl-C.* 6 of 8 draws"):
            mcmc = run(folder, data)
    expected = np.load(FOLDER / f"draws-{jax.process_index()}.npy")
    np.testing.assert_array_equal(mcmc.get_samples(True)["beta"], expected[:, :6])
    mcmc = resume(folder, on_hosts(DATA))
    np.testing.assert_array_equal(mcmc.get_samples(True)["beta"], expected)
    assert "beta" in str(bias_report(mcmc, full_data=True))
    with pytest.raises(ValueError, match=r"HostArray `X` was .* of all processes"):
        resume(folder, on_hosts(rows(shift=1.0)))


def check_damaged_checkpoint_resumes_from_the_one_before():
    folder = FOLDER / "whole"
    if jax.process_index() == 0:
        newest = max((folder / "checkpoints").iterdir())
        os.truncate(newest / "manifest/manifest.json", 10)
    DATA[0][np.array([0])]  # a sum over processes, which waits for both
    with pytest.warns(UserWarning, match="iteration 14 is damaged.*of iteration 10"):
        assert_kept("whole", resume(folder))


def check_processes_with_different_calls_raise():
    place, folder = jax.process_index(), FOLDER / "whole"
    call = (lambda: resume(folder)) if place else (lambda: run(FOLDER / "other"))
    with pytest.raises(ValueError, match=r"differ in the call.*`run`, process 1"):
        call()
    with pytest.raises(RuntimeError, match="same folder"):
        run(FOLDER / f"own-{place}")
    unlike = r"differ in `num_samples`.* 8, process 1 has 9"
    with pytest.raises(ValueError, match=unlike):
        run(FOLDER / "unlike", num_samples=8 + place)
    with pytest.raises(ValueError, match="the key"):
        mcmc_of(FOLDER / "keys").run(jax.random.key(place), *DATA, batch_size=20)
    with pytest.raises(FileExistsError, match="already holds"):
        run(folder)
    # The data are those of all processes.
    with pytest.raises(ValueError, match="data `X` was"):
        resume(folder, data=rows(shift=1.0))
    alone = [np.zeros((40, DIM), np.float32), np.zeros(40, np.float32)]
    with pytest.raises(ValueError, match="share no rows"):
        run(FOLDER / "unshared", data=alone)


def check_checkpoint_that_one_process_cannot_read_raises_in_both():
    place, folder = jax.process_index(), FOLDER / "whole"

    def gone(*args):
        raise RuntimeError("the disk is gone")

    with pytest.MonkeyPatch.context() as patch:
        if place:
            patch.setattr(store.CheckpointStore, "read_latest", gone)
        with pytest.raises(RuntimeError, match="the disk is gone" if place else "Process 1 of 2"):
            resume(folder)
    with pytest.MonkeyPatch.context() as patch:
        if place:
            steps = store._list_checkpoints
            patch.setattr(store, "_list_checkpoints", lambda path: steps(path)[1:])
        with pytest.raises(ValueError, match=r"the checkpoint.* iteration 14 .* iteration 10"):
            resume(folder)


if __name__ == "__main__":
    PROCESS, PORT, FOLDER = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    # Devices that are threads deadlock where each has begun another program.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{PORT}",
        2,
        PROCESS,
        heartbeat_timeout_seconds=20,
        shutdown_timeout_seconds=20,
    )
    DATA = rows()
    outcomes = {}
    for check in sys.argv[4:]:
        try:
            globals()[check]()
            outcomes[check] = ""
        except BaseException:
            outcomes[check] = traceback.format_exc()
        (FOLDER / f"outcomes-{PROCESS}").write_text(json.dumps(outcomes))
        if outcomes[check]:
            os._exit(1)  # otherwise the other one would wait
