"""Chains on several devices, and rows spread over devices and over processes."""

import json
import signal
import socket
import subprocess
import time

import numpy as np
import pytest

from numpyro_sgmcmc import ShardedArray
from tests.devices.checks import CHECKS, SLOW
from tests.processes import ended, start

_LONGEST = 600  # seconds


def run_checks(names):
    """What each check on four devices ended with: nothing, or a traceback."""
    process = start("tests.devices.checks", *names, devices=4, stdout=subprocess.PIPE)
    with ended(process):
        out, _ = process.communicate(timeout=_LONGEST)
    assert process.returncode == 0
    return json.loads(out)


QUICK = sorted(set(CHECKS) - SLOW)


@pytest.fixture(scope="module")
def results():
    return run_checks(QUICK)


@pytest.fixture(scope="module")
def slow_results():
    return run_checks(sorted(SLOW))


@pytest.mark.parametrize("name", QUICK)
def test_on_four_devices(results, name):
    assert not results[name], results[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SLOW))
def test_runs_on_four_devices(slow_results, name):
    assert not slow_results[name], slow_results[name]


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start_processes(folder, num, num_samples):
    """Processes that share the rows; each writes its draws to a file and its words to another."""
    port, processes = free_port(), []
    for k in range(num):
        arguments = k, num, port, folder / f"draws-{num}-{k}.npy", num_samples
        with (folder / f"said-{num}-{k}").open("w") as said:
            process = start(
                "tests.devices.process",
                *arguments,
                devices=4 // num,
                stdout=said,
                stderr=subprocess.STDOUT,
            )
        processes.append(process)
    return processes


@pytest.mark.slow
def test_all_processes_have_the_draws_of_a_single_one(tmp_path):
    for num in (1, 2):
        processes = start_processes(tmp_path, num, 30)
        with ended(*processes):
            for k, process in enumerate(processes):
                said = tmp_path / f"said-{num}-{k}"
                assert process.wait(timeout=_LONGEST) == 0, said.read_text()
    alone, first, second = (
        np.load(tmp_path / f"draws-{name}.npy") for name in ("1-0", "2-0", "2-1")
    )
    assert alone.shape == (2, 30, 2)
    assert np.unique(alone, axis=1).shape == alone.shape
    np.testing.assert_array_equal(first, second)
    # Sums over devices are taken in another order; differences grow with the steps.
    np.testing.assert_allclose(first, alone, atol=1e-3 * alone.std())


@pytest.mark.slow
def test_a_process_that_is_lost_ends_the_others_within_a_minute(tmp_path):
    processes = start_processes(tmp_path, 2, 100_000_000)
    said = [tmp_path / f"said-2-{k}" for k in range(2)]
    with ended(*processes):
        deadline = time.monotonic() + _LONGEST
        while not all("sampling" in path.read_text() for path in said):
            assert time.monotonic() < deadline, said[0].read_text()
            assert all(p.poll() is None for p in processes), said[0].read_text()
            time.sleep(0.5)
        processes[1].send_signal(signal.SIGKILL)
        assert processes[0].wait(timeout=60) != 0
        assert "another task died" in said[0].read_text() or "peer" in said[0].read_text()


def test_one_device_holds_all_rows():
    x = np.arange(12.0).reshape(4, 3)
    array = ShardedArray(x, name="x")
    assert (array.shape, array.ndim, len(array)) == ((4, 3), 2, 4)
    np.testing.assert_array_equal(array[1:3], x[1:3])
    np.testing.assert_array_equal(array[np.array([3, -4]), 1], x[[3, 0], 1])
    assert repr(array) == "ShardedArray('x', shape=(4, 3), dtype=float32, shards=1)"
    foreign = ShardedArray(x.astype(">f4"))
    np.testing.assert_array_equal(foreign[np.array([3, 1])], x[[3, 1]])
    with pytest.raises(TypeError, match="on no device as a whole"):
        np.asarray(array)
    with pytest.raises(TypeError, match="indexed by rows"):
        array[0.5]
