"""One process at a time in a run's folder.

The processes that share a run: they agree on what comes next, and fail together.

Chains and draws are the same in all of them, bit for bit; only rows are spread. So the first
process alone writes, the others wait until it has, and all read. What one process decides by its
own clock, or is told by its own Ctrl-C, all must do: they would wait for each other for ever.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.experimental import multihost_utils

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.errors import InvalidArgumentError

__all__ = [
    "ProcessGroup",
    "SINGLE_PROCESS",
    "get_process_group",
    "lock_folder",
]

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


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


_MAX_MESSAGE_BYTES = 1024


_SHARED_TOKEN_FILENAME = "shared"


class ProcessGroup(NamedTuple):
    """
    - **num_processes** - how many share the run.
    - **process_index** - this one's number among them.
    """

    num_processes: int
    process_index: int

    @property
    def is_primary(self) -> bool:
        """Whether this is the process that writes."""
        return self.process_index == 0

    def allgather(self, value: Any) -> np.ndarray:
        """A number, or an array of one shape, of each process: shape ``(num, ...)``."""
        value = np.asarray(value)
        if self.num_processes == 1:
            return value[None]
        return np.asarray(multihost_utils.process_allgather(value))

    def allgather_text(self, text: str) -> list[str]:
        """A text of each process, cut to some hundred letters."""
        if self.num_processes == 1:
            return [text]
        told = np.zeros(_MAX_MESSAGE_BYTES, np.uint8)
        own = np.frombuffer(text.encode()[:_MAX_MESSAGE_BYTES], np.uint8)
        told[: len(own)] = own
        return [x.tobytes().rstrip(b"\0").decode(errors="ignore") for x in self.allgather(told)]

    def check_equal(self, description: str, text: str) -> None:
        """Refuse what is not the same in all processes.

        :raises ValueError: with what the first has and what another one.
        """
        texts = self.allgather_text(text)
        for place, other in enumerate(texts):
            if other != texts[0]:
                raise InvalidArgumentError(
                    f"All processes must have the same {description}, but of {self.num_processes} the first has "
                    f"{texts[0] or 'none'} and number {place} has {other or 'none'}."
                )

    def check_all_equal(self, texts: dict[str, str]) -> None:
        """Refuse the first of many things by name that is not the same in all processes.

        :raises ValueError: naming it.
        """
        if self.num_processes > 1:
            self.check_equal("settings and arguments", ", ".join(texts))
            for what, text in texts.items():
                self.check_equal(what, text)

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """What fails in one process fails in all of them, once all have come to the end of this.

        What is done within must not wait for other processes.

        :raises RuntimeError: in the others, with the words of the one that failed.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        told = self.allgather_text(f"{type(failure).__name__}: {failure}" if failure else "")
        if failure is not None:
            raise failure
        for place, text in enumerate(told):
            if text:
                raise RuntimeError(f"Process {place} of {self.num_processes} failed. {text}")

    @contextmanager
    def lock_shared_folder(self, folder: Path) -> Iterator[None]:
        """Hold a folder that all of them see, against every other run.

        :raises RuntimeError: where another run holds it, or a process sees another folder.
        """
        token = self.allgather_text(secrets.token_hex(8))[0]
        with ExitStack() as held:
            with self.fail_together():
                if self.is_primary:
                    held.enter_context(lock_folder(folder))
                    if self.num_processes > 1:
                        (folder / _SHARED_TOKEN_FILENAME).write_text(token)
            with self.fail_together():
                if self.num_processes > 1 and not _file_contains(
                    folder / _SHARED_TOKEN_FILENAME, token
                ):
                    raise RuntimeError(
                        f"'{folder}' is not the folder that process 0 has under this name: give "
                        "`checkpoint` one on a file system that all processes share."
                    )
            yield

    def to_host(self, tree: Any) -> Any:
        """A pytree with arrays that this process can read for itself."""
        return tree if self.num_processes == 1 else jax.tree.map(_to_addressable, tree)


SINGLE_PROCESS = ProcessGroup(1, 0)


def get_process_group(arguments: Arguments) -> ProcessGroup:
    """The processes that share the rows.

    :raises ValueError: where there are several, and share none.
    """
    if jax.process_count() == 1:
        return SINGLE_PROCESS
    devices = {d for x in arguments.sharded_arrays for d in x.shards.mesh.devices.flat}
    if len({d.process_index for d in devices}) < 2:
        raise InvalidArgumentError(
            "The processes share no rows, so that each runs chains of its own: start them without "
            "jax.distributed.initialize, each with a `checkpoint` of its own, or spread the rows "
            "over all of them by ShardedArray."
        )
    return ProcessGroup(jax.process_count(), jax.process_index())


def _file_contains(path: Path, text: str) -> bool:
    try:
        return path.read_text() == text
    except OSError:
        return False


def _to_addressable(x: Any) -> Any:
    if not isinstance(x, Array) or x.is_fully_addressable:
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return random.wrap_key_data(_to_addressable(random.key_data(x)), impl=random.key_impl(x))
    whole = x if x.is_fully_replicated else multihost_utils.process_allgather(x, tiled=True)
    return jnp.asarray(np.asarray(whole))
