"""Chains on several devices, and rows sharded over devices and over processes."""

import json
import signal
import socket
import subprocess
import time

import numpy as np
import pytest

from tests.devices.checks import CHECKS, SLOW
from tests.processes import ended, start

_LONGEST = 600  # seconds


def run_checks(names):
    """Return the outcome of each check on four devices: an empty string, or a traceback."""
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
def test_check_on_four_devices_passes(results, name):
    assert not results[name], results[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SLOW))
def test_slow_check_on_four_devices_passes(slow_results, name):
    assert not slow_results[name], slow_results[name]


def find_free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start_processes(folder, num, num_samples):
    """Start processes that share the rows; each writes its draws and its output to files."""
    port, processes = find_free_port(), []
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
def test_run_of_two_processes_has_the_draws_of_one(tmp_path):
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
    # Sums over devices are in another order, and differences grow with the steps.
    np.testing.assert_allclose(first, alone, atol=1e-3 * alone.std())


@pytest.mark.slow
def test_run_with_a_killed_process_ends_the_others_within_a_minute(tmp_path):
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
