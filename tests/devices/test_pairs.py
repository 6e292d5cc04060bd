"""Checkpoints of runs whose rows are spread over two processes."""

import json
import subprocess

import pytest

from tests.devices import pairs
from tests.devices.test_devices import find_free_port
from tests.processes import ended, start

_LONGEST = 600  # seconds


def start_pair(folder, *checks):
    port, processes = find_free_port(), []
    for place in range(2):
        with (folder / f"said-{place}").open("w") as said:
            process = start(
                "tests.devices.pairs",
                place,
                port,
                folder,
                *checks,
                devices=2,
                stdout=said,
                stderr=subprocess.STDOUT,
            )
        processes.append(process)
    return processes


def assert_pair(folder, *checks):
    """Both processes pass all checks."""
    processes = start_pair(folder, *checks)
    with ended(*processes):
        for process in processes:
            process.wait(timeout=_LONGEST)
    for place in range(2):
        outcomes = json.loads((folder / f"outcomes-{place}").read_text())
        assert not any(outcomes.values()), "\n".join(outcomes.values())
        assert list(outcomes) == list(checks)


@pytest.mark.slow
def test_run_of_two_processes_after_a_kill_resumes_bitwise(tmp_path):
    assert_pair(tmp_path, "check_complete_run")
    for check in (
        "check_run_with_the_first_process_killed",
        "check_run_with_the_second_process_killed",
    ):
        processes = start_pair(tmp_path, check)
        with ended(*processes):
            # Killed, or ended with an error because the other one was.
            assert all(p.wait(timeout=_LONGEST) for p in processes)
    assert_pair(tmp_path, "check_resumed_run_is_bitwise_the_complete_one")


@pytest.mark.slow
def test_errors_of_runs_of_two_processes_reach_both(tmp_path):
    checks = (
        "check_complete_run",
        "check_ctrl_c_in_one_process_stops_both",
        "check_full_disk_raises_in_both_processes",
        "check_processes_with_different_calls_raise",
        "check_checkpoint_that_one_process_cannot_read_raises_in_both",
        "check_rows_on_hosts_have_the_same_draws",
        "check_damaged_checkpoint_resumes_from_the_one_before",
    )
    assert all(hasattr(pairs, check) for check in checks)
    assert_pair(tmp_path, *checks)
