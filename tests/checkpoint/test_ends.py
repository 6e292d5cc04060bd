"""What ends a run: a full disk, Ctrl-C, a signal, another process."""

import errno
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from numpyro_sgmcmc import bias_report, open_draws
from tests.checkpoint.runs import (
    DATA,
    assert_same_bits,
    compilation_cache,
    copy,
    end_at,
    fail_writing,
    foreground,
    mcmc_of,
    outcome,
    resume,
    run,
    slow,
    whole,
)
from tests.processes import environment

__all__ = ["compilation_cache", "copy", "foreground", "whole"]


@pytest.mark.parametrize(
    "step", ["draws", pytest.param("state", marks=slow), pytest.param("header", marks=slow)]
)
def test_full_disk(whole, tmp_path, monkeypatch, step):
    mcmc = mcmc_of(tmp_path)
    with monkeypatch.context() as patch:
        fail_writing(patch, step, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        with pytest.raises(
            RuntimeError, match=r"No space left on device.*2 draws a chain are safe"
        ):
            run(mcmc)
    assert mcmc.get_samples(True)["beta"].shape == (2, 2, 2)
    assert open_draws(tmp_path)["posterior"].sizes["draw"] == 2
    assert_same_bits(resume(tmp_path), whole[1])


ON_A_SMALL_DISK = """
import resource, sys
import tests.checkpoint.runs as t

mcmc = t.mcmc_of(sys.argv[1])
limit = int(sys.argv[2])
advance, begun = t.ChainRunner.run_iterations, []

def advance_and_limit(self, segment, iterations):
    if t.np.max(segment.state.i) >= 11:  # two draws are on disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    return advance(self, segment, iterations)

t.ChainRunner.run_iterations = advance_and_limit
try:
    t.run(mcmc)
except RuntimeError as error:
    assert "2 draws a chain are safe" in str(error), error
    print(mcmc.get_samples(True)["beta"].shape, error)
"""


@slow
@pytest.mark.parametrize("limit", [0, 40, 300])
def test_files_that_cannot_grow(whole, tmp_path, limit):
    """The system's own refusal, in orbax's and Zarr's threads as well: no file may grow further.

    With no bytes at all, with enough for the draws, and with enough for the smallest arrays of the
    state as well.
    """
    pytest.importorskip("resource")
    printed = in_a_child(ON_A_SMALL_DISK, tmp_path / "run", limit)
    assert "(2, 2, 2)" in printed
    assert_same_bits(resume(tmp_path / "run"), whole[1])


@pytest.mark.parametrize(("iteration", "draws"), [pytest.param(3, 0, marks=slow), (13, 3)])
def test_ctrl_c(whole, tmp_path, monkeypatch, iteration, draws):
    mcmc = mcmc_of(tmp_path)
    with monkeypatch.context() as patch:
        end_at(patch, iteration, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.warns(UserWarning, match=f"Ctrl-C after {draws} of 6 draws.*`resume`"):
            run(mcmc)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if draws:
        found, expected = mcmc.get_samples(True), whole[2].get_samples(True)
        np.testing.assert_array_equal(found["beta"], expected["beta"][:, :draws])
        assert bias_report(mcmc).num_draws == 2 * draws
    else:
        with pytest.raises(RuntimeError, match="no draws yet"):
            mcmc.get_samples()
    mcmc.resume(*DATA, batch_size=40)
    assert_same_bits(mcmc, whole[1])


@slow
def test_second_ctrl_c(whole, tmp_path, monkeypatch):
    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    mcmc = mcmc_of(tmp_path)
    with monkeypatch.context() as patch:
        end_at(patch, 13, twice)
        with pytest.raises(KeyboardInterrupt):
            run(mcmc)
    expected = whole[2].get_samples(True)["beta"][:, :2]
    np.testing.assert_array_equal(mcmc.get_samples(True)["beta"], expected)


def in_a_child(code, *arguments):
    """What Python code prints in a process of its own."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


CHILD = """
import sys
import tests.checkpoint.runs as t

mcmc = t.mcmc_of(sys.argv[1], num_samples=4013, checkpoint_every=100)
if mcmc.has_checkpoint:
    mcmc.resume(*t.DATA, batch_size=40)
else:
    t.run(mcmc)
"""


@slow
def test_killed_in_earnest(tmp_path):
    command = [sys.executable, "-c", CHILD]
    subprocess.run([*command, str(tmp_path / "whole")], env=environment(), check=True)
    for kill_at in (3, 12, 30):
        child = subprocess.Popen([*command, str(tmp_path / "killed")], env=environment())
        while child.poll() is None:
            done = [int(p.name) for p in (tmp_path / "killed").glob("checkpoints/*")]
            if done and max(done) >= 100 * kill_at:
                child.kill()
            time.sleep(0.01)
        assert child.returncode == -signal.SIGKILL
    settings = {"num_samples": 4013, "checkpoint_every": 100}
    whole, resumed = (mcmc_of(tmp_path / n, **settings) for n in ("whole", "killed"))
    whole.resume(*DATA, batch_size=40)
    resumed.resume(*DATA, batch_size=40)
    assert_same_bits(resumed, outcome(whole))


LOCK_ON_A_FULL_DISK = """
import resource, sys
from pathlib import Path
from numpyro_sgmcmc.checkpoint.processes import lock_folder

resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
try:
    with lock_folder(Path(sys.argv[1])):
        raise ValueError("what is told")
except ValueError as error:
    print(error)
"""


def test_a_full_disk_does_not_hide_what_went_wrong(tmp_path):
    pytest.importorskip("resource")
    assert in_a_child(LOCK_ON_A_FULL_DISK, tmp_path / "run") == "what is told\n"


HOLD = """
import sys, time
from pathlib import Path
from numpyro_sgmcmc.checkpoint.processes import lock_folder

with lock_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_one_process_at_a_time(copy, tmp_path, whole):
    """What holds the folder is named; once it is killed, nothing is in the way."""
    pytest.importorskip("fcntl")
    command = [sys.executable, "-c", HOLD, str(copy)]
    holder = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        for use in (resume, lambda folder: run(mcmc_of(folder))):
            with pytest.raises(RuntimeError, match=rf"copy' is in use .* process {holder.pid}:"):
                use(copy)
        assert open_draws(copy)["posterior"].sizes["draw"] == 6
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    assert_same_bits(resume(copy), whole[1])
    assert_same_bits(resume(copy), whole[1])
