"""Python processes of their own, whose host may pose as several devices."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def environment(devices: int = 1) -> dict[str, str]:
    """That of a process which can import the tests and compiles without optimising."""
    flags = (
        os.environ.get("XLA_FLAGS", ""),
        f"--xla_force_host_platform_device_count={devices}",
        # Devices that are threads of one busy machine may wait long for each other.
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
    """A process that runs a module; its warnings are errors."""
    # Save that another process is just writing a program which this one looks for.
    strict = ("-W", "error", "-W", "ignore:Error reading persistent compilation cache entry")
    command = [sys.executable, *strict, "-m", module, *map(str, arguments)]
    return subprocess.Popen(command, env=environment(devices), text=True, **options)


@contextmanager
def ended(*processes: subprocess.Popen) -> Iterator[None]:
    """None of the processes outlives the block."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
