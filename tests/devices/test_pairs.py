"""Checkpoints of runs whose rows are spread over two processes."""

import json
import subprocess

import pytest

from tests.devices import pairs
from tests.devices.test_devices import free_port
from tests.processes import ended, start

_LONGEST = 600  # seconds


def start_pair(folder, *checks):
    port, processes = free_port(), []
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
        found = json.loads((folder / f"found-{place}").read_text())
        assert not any(found.values()), "\n".join(found.values())
        assert list(found) == list(checks)


@pytest.mark.slow
def test_a_run_that_loses_a_process_is_resumed_to_the_same_bits(tmp_path):
    assert_pair(tmp_path, "check_a_whole_run")
    for check in ("check_first_is_lost", "check_second_is_lost"):
        processes = start_pair(tmp_path, check)
        with ended(*processes):
            # Killed, or ended with an error because the other one was.
            assert all(p.wait(timeout=_LONGEST) for p in processes)
    assert_pair(tmp_path, "check_resumed_after_either_was_lost")


@pytest.mark.slow
def test_what_two_processes_are_told(tmp_path):
    checks = (
        "check_a_whole_run",
        "check_ctrl_c_in_one_process_stops_both",
        "check_a_full_disk_is_told_by_both",
        "check_what_is_not_the_same_is_refused",
        "check_what_one_process_cannot_read_both_are_told",
        "check_rows_on_hosts_give_the_same_draws",
        "check_a_damaged_checkpoint",
    )
    assert all(hasattr(pairs, check) for check in checks)
    assert_pair(tmp_path, *checks)
