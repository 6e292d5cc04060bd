"""One process at a time in a run's folder."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["lock_folder"]

_LOCK_FILENAME = "lock"


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the folder, which is made if need be, against every other run.

    The system lets go of the lock when its process ends, whatever ends it. A file system that
    knows no locks, and Windows, give none.

    :raises RuntimeError: naming the folder and the process that uses it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RuntimeError(
            f"'{folder}' cannot be made: {error.strerror}. Give `checkpoint` another folder."
        ) from None
    with open(folder / _LOCK_FILENAME, "a+") as file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                file.seek(0)
                holder = file.read().strip() or "unknown"
                raise RuntimeError(
                    f"'{folder}' is in use by another run, of process {holder}: wait until that "
                    "ends, or give `checkpoint` another folder."
                ) from None
        # Its number is for the message alone: on a full disk the lock holds all the same. What is
        # left in the file's own buffer would be written again, and fail, when it is closed.
        with suppress(OSError):
            file.truncate(0)
            os.write(file.fileno(), str(os.getpid()).encode())
        yield
