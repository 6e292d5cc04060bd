"""Runs that are interrupted: by a full disk, Ctrl-C, a signal, another process."""

import errno
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from numpyro_sgmcmc import bias_report, open_draws
from numpyro_sgmcmc.checkpoint.processes import lock_folder
from numpyro_sgmcmc.errors import CheckpointError, CheckpointWarning
from tests.checkpoint.runs import (
    DATA,
    assert_bitwise_equal,
    end_at,
    fail_writing,
    mcmc_of,
    outcome,
    resume,
    run,
    slow,
)
from tests.processes import environment


@pytest.mark.parametrize("step", ["draws", pytest.param("state", marks=slow), "manifest"])
def test_full_disk_raises_and_the_run_can_be_resumed(whole, tmp_path, monkeypatch, step):
    mcmc = mcmc_of(tmp_path)
    with monkeypatch.context() as patch:
        fail_writing(patch, step, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        with pytest.raises(CheckpointError, match=r"No space left on device.* 2 draws"):
            run(mcmc)
    assert mcmc.get_samples(True)["beta"].shape == (2, 2, 2)
    assert open_draws(tmp_path)["posterior"].sizes["draw"] == 2
    assert_bitwise_equal(resume(tmp_path), whole[1])


ON_A_SMALL_DISK = """
import resource, sys
import tests.checkpoint.runs as t

mcmc = t.mcmc_of(sys.argv[1])
limit = int(sys.argv[2])
run_iterations = t.ChainRunner.run_iterations

def run_and_limit(self, segment, num_iterations):
    if t.np.max(segment.state.i) >= 11:  # two draws are on disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    return run_iterations(self, segment, num_iterations)

t.ChainRunner.run_iterations = run_and_limit
try:
    t.run(mcmc)
except RuntimeError as error:
    assert " 2 draws" in str(error), error
    print(mcmc.get_samples(True)["beta"].shape, error)
"""


@slow
@pytest.mark.parametrize("limit", [0, 40, 300])
def test_files_that_cannot_grow_raise_and_the_run_can_be_resumed(whole, tmp_path, limit):
    """The system's own errors, in the threads of orbax and Zarr as well.

    With no bytes at all, with enough for the draws, and with enough for the smallest arrays of the
    state as well.
    """
    pytest.importorskip("resource")
    assert "(2, 2, 2)" in run_in_a_child(ON_A_SMALL_DISK, tmp_path / "run", limit)
    assert_bitwise_equal(resume(tmp_path / "run"), whole[1])


@pytest.mark.parametrize(("iteration", "draws"), [pytest.param(3, 0, marks=slow), (13, 3)])
def test_ctrl_c_stops_at_the_next_draw_with_a_checkpoint(
    whole, tmp_path, monkeypatch, iteration, draws
):
    mcmc = mcmc_of(tmp_path)
    with monkeypatch.context() as patch:
        end_at(patch, iteration, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.warns(CheckpointWarning, match=f"Ctrl-C.* {draws} of 6") as caught:
            run(mcmc)
    (message,) = (str(w.message) for w in caught if w.category is CheckpointWarning)
    assert ("use the draws" in message) == (draws > 0)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if draws:
        samples, expected = mcmc.get_samples(True), whole[2].get_samples(True)
        np.testing.assert_array_equal(samples["beta"], expected["beta"][:, :draws])
        assert bias_report(mcmc).num_draws == 2 * draws
    else:
        with pytest.raises(ValueError, match="no draws"):
            mcmc.get_samples()
    mcmc.resume(*DATA, batch_size=40)
    assert_bitwise_equal(mcmc, whole[1])


@slow
def test_second_ctrl_c_raises_keyboard_interrupt(whole, tmp_path, monkeypatch):
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


def run_in_a_child(code, *arguments):
    """Return what Python code prints in another process."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    child = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr[-4000:]
    return child.stdout


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
def test_run_killed_by_a_signal_is_resumed_bitwise(tmp_path):
    command = [sys.executable, "-c", CHILD]
    subprocess.run([*command, str(tmp_path / "whole")], env=environment(), check=True)
    for kill_at in (3, 12, 30):
        child = subprocess.Popen([*command, str(tmp_path / "killed")], env=environment())
        while child.poll() is None:
            paths = (tmp_path / "killed").glob("checkpoints/*")
            # Those that orbax is writing have a suffix: the child may be killed while writing.
            steps = [int(path.name.partition(".")[0]) for path in paths]
            if steps and max(steps) >= 100 * kill_at:
                child.kill()
            time.sleep(0.01)
        assert child.returncode == -signal.SIGKILL
    settings = {"num_samples": 4013, "checkpoint_every": 100}
    whole, resumed = (mcmc_of(tmp_path / n, **settings) for n in ("whole", "killed"))
    whole.resume(*DATA, batch_size=40)
    resumed.resume(*DATA, batch_size=40)
    assert_bitwise_equal(resumed, outcome(whole))


def test_lock_on_a_full_disk_raises_the_first_error(tmp_path):
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(KeyError, match="first error"), lock_folder(tmp_path / "run"):
            raise KeyError("first error")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "run/lock").read_text()


LOCK = """
import sys, time
from pathlib import Path
from numpyro_sgmcmc.checkpoint.processes import lock_folder

with lock_folder(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(600)
"""


def assert_in_use(folder, process):
    for use in (resume, lambda folder: run(mcmc_of(folder))):
        with pytest.raises(CheckpointError, match=rf"copy' is in use.*process {process}"):
            use(folder)
    assert open_draws(folder)["posterior"].sizes["draw"] == 6


def test_folder_in_use_raises_until_it_is_released(copy, whole):
    pytest.importorskip("fcntl")
    with lock_folder(copy):
        assert_in_use(copy, os.getpid())
    assert_bitwise_equal(resume(copy), whole[1])


@slow
def test_folder_in_use_raises_until_the_other_process_ends(copy, whole):
    pytest.importorskip("fcntl")
    command = [sys.executable, "-c", LOCK, str(copy)]
    owner = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE)
    try:
        assert owner.stdout.readline() == b"locked\n"
        assert_in_use(copy, owner.pid)
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    assert_bitwise_equal(resume(copy), whole[1])
    assert_bitwise_equal(resume(copy), whole[1])
