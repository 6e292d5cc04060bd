"""Store printed tables as JSON, each with its day, commit, versions, machine and load.

If the environment variable BENCHMARK_RESULTS is a folder, the tables of a script go into its
``python-3.13.json`` (by the Python version) and replace the same tables of an earlier run.
``benchmarks/pages.py`` puts them into the pages of the site, ``benchmarks/compare.py`` compares two
files.
"""

from __future__ import annotations

import atexit
import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpyro

FOLDER = "BENCHMARK_RESULTS"

Table = dict[str, Any]
_printed: list[Table] = []


def begin(title: str, **where: Any) -> None:
    """Begin a table; :func:`add` adds its rows, the columns' names first.

    :param where: what differs from :func:`describe`, for a table that was measured elsewhere.
    """
    if FOLDER not in os.environ:
        return
    if not _printed:
        atexit.register(_keep)
    table = {"benchmark": Path(sys.argv[0]).stem, "title": title}
    _printed.append(table | describe() | where | {"rows": []})


def describe() -> dict[str, Any]:
    """Return the day, the commit, the load, the versions and the machine of this process."""
    return {
        "day": datetime.date.today().isoformat(),
        "commit": _describe_commit(),
        "load": round(os.getloadavg()[0], 1),  # processes, mean over the minute before
        "versions": {
            "Python": platform.python_version(),
            "JAX": jax.__version__,
            "NumPyro": numpyro.__version__,
        },
        "machine": f"{os.cpu_count()} cores, {jax.default_backend()}",
    }


def _describe_commit() -> str:
    """Return the short name of the commit, with a plus sign where files have changed since."""
    git = ["git", "-C", str(Path(__file__).parent)]

    def run(*arguments: str) -> str:
        out = subprocess.run([*git, *arguments], capture_output=True, check=True, text=True)
        return out.stdout.strip()

    try:
        changes = run(
            "status", "--porcelain", "--untracked-files=no", "--", "../numpyro_sgmcmc", "."
        )
        is_changed = any(not line.endswith(".json") for line in changes.splitlines())
        return run("rev-parse", "--short", "HEAD") + "+" * is_changed
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def add(cells: Iterable[Any]) -> None:
    """A row of the last table."""
    if _printed:
        _printed[-1]["rows"].append([str(cell) for cell in cells])


def _keep() -> None:
    """Put what was printed into the files of the Pythons."""
    folder = Path(os.environ[FOLDER])
    folder.mkdir(parents=True, exist_ok=True)
    for python in {_minor_version(table) for table in _printed}:
        path = folder / f"python-{python}.json"
        kept = {key(table): table for table in (read(path) if path.exists() else [])}
        for table in _printed:
            if len(table["rows"]) > 1 and _minor_version(table) == python:
                kept[key(table)] = table
        path.write_text(json.dumps(list(kept.values()), indent=1, ensure_ascii=False) + "\n")


def _minor_version(table: Table) -> str:
    return ".".join(table["versions"]["Python"].split(".")[:2])


def key(table: Table) -> tuple[str, str]:
    """Return the key that identifies a table across runs."""
    return table["benchmark"], table["title"]


def read(path: Path) -> list[Table]:
    """The tables of a file."""
    tables: list[Table] = json.loads(path.read_text())
    return tables
