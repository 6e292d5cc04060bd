"""Separate Python processes, with one or several devices."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def environment(devices: int = 1) -> dict[str, str]:
    """Return the environment of a process that imports the tests, without optimisation."""
    flags = (
        os.environ.get("XLA_FLAGS", ""),
        f"--xla_force_host_platform_device_count={devices}",
        # Devices are threads, which may wait long for each other on a loaded machine.
        "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    )
    return {
        **os.environ,
        "XLA_FLAGS": " ".join(flags),
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }


def start(module: str, *arguments: Any, devices: int = 1, **options: Any) -> subprocess.Popen:
    """Start a process that runs a module, with warnings as errors."""
    # Except one: another process may be writing the compiled program that this one reads.
    strict = ("-W", "error", "-W", "ignore:Error reading persistent compilation cache entry")
    command = [sys.executable, *strict, "-m", module, *map(str, arguments)]
    return subprocess.Popen(command, env=environment(devices), text=True, **options)


@contextmanager
def ended(*processes: subprocess.Popen) -> Iterator[None]:
    """Kill the processes at the end of the block."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
