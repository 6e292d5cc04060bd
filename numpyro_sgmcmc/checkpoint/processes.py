"""Locking of a run's folder, and the processes that share a run.

Processes share a run where a ``ShardedArray`` shards the rows over them. Chains and draws are
bitwise equal in all of them, so the first process alone writes, the others wait until it has, and
all read. They must agree on every decision (an error, Ctrl-C, the number of iterations of a
chunk), or they would wait for each other in a collective that not all of them enter.
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
from numpyro_sgmcmc.errors import CheckpointError, InvalidArgumentError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# Bytes of a text that processes exchange: a bound on the size of a collective.
_MAX_TEXT_BYTES = 1024


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Create the folder if needed, and lock it against every other run.

    The system releases the lock when the process ends, for whatever reason. Windows, and file
    systems without locks, do not lock.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"The folder `checkpoint='{folder}'` cannot be created: {error.strerror}.",
            "give `checkpoint` another folder.",
            "checkpoint-folder",
        ) from None
    with open(folder / "lock", "a+") as file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                file.seek(0)
                owner = file.read().strip() or "unknown"
                raise CheckpointError(
                    f"'{folder}' is in use by another run (process {owner}).",
                    "wait until that run ends, or give `checkpoint` another folder.",
                    "checkpoint-lock",
                ) from None
        # The process number is for the message only: on a full disk the lock works without. It is
        # written unbuffered, as a buffer would be written again, and fail, when the file closes.
        with suppress(OSError):
            file.truncate(0)
            os.write(file.fileno(), str(os.getpid()).encode())
        yield


class ProcessGroup(NamedTuple):
    """The processes that share a run, and the index of this one."""

    num_processes: int
    process_index: int

    @property
    def is_primary(self) -> bool:
        """True in the process that writes."""
        return self.process_index == 0

    def allgather(self, value: Any) -> np.ndarray:
        """Return a number or array of each process, shape ``(num_processes, ...)``."""
        value = np.asarray(value)
        if self.num_processes == 1:
            return value[None]
        return np.asarray(multihost_utils.process_allgather(value))

    def allgather_text(self, text: str) -> list[str]:
        """Return a text of each process, cut to 1,024 bytes."""
        if self.num_processes == 1:
            return [text]
        padded = text.encode()[:_MAX_TEXT_BYTES].ljust(_MAX_TEXT_BYTES, b"\0")
        texts = self.allgather(np.frombuffer(padded, np.uint8))
        return [x.tobytes().rstrip(b"\0").decode(errors="ignore") for x in texts]

    def check_equal(self, description: str, text: str) -> None:
        """Check that a text is the same in all processes."""
        texts = self.allgather_text(text)
        for index, other in enumerate(texts):
            if other != texts[0]:
                raise InvalidArgumentError(
                    f"The processes differ in {description}: process 0 of {self.num_processes} has "
                    f"{texts[0] or 'none'}, process {index} has {other or 'none'}.",
                    "run the same script with the same arguments in all processes.",
                    "processes-differ",
                )

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """Raise in all processes where the block raises in one, once all have left the block.

        The block must not wait for other processes.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        texts = self.allgather_text(f"{type(failure).__name__}: {failure}" if failure else "")
        if failure is not None:
            raise failure
        for index, text in enumerate(texts):
            if text:
                raise CheckpointError(
                    f"Process {index} of {self.num_processes} failed: {text}",
                    "solve the problem of that process, then call `resume` in all processes.",
                    "process-failed",
                )

    @contextmanager
    def lock_shared_folder(self, folder: Path) -> Iterator[None]:
        """Lock a folder that all processes see, against every other run."""
        token = self.allgather_text(secrets.token_hex(8))[0]
        token_path = folder / "shared"
        with ExitStack() as stack:
            with self.fail_together():
                if self.is_primary:
                    stack.enter_context(lock_folder(folder))
                    if self.num_processes > 1:
                        token_path.write_text(token)
            with self.fail_together():
                try:
                    is_same_folder = self.num_processes == 1 or token_path.read_text() == token
                except OSError:
                    is_same_folder = False
                if not is_same_folder:
                    raise CheckpointError(
                        f"`checkpoint='{folder}'` is not the same folder in all processes.",
                        "give `checkpoint` a folder on a file system that all processes share.",
                        "processes-differ",
                    )
            yield

    def to_host(self, tree: Any) -> Any:
        """Return a pytree with arrays that this process can read without the others."""
        return tree if self.num_processes == 1 else jax.tree.map(_to_addressable, tree)


SINGLE_PROCESS = ProcessGroup(1, 0)


def get_process_group(arguments: Arguments) -> ProcessGroup:
    """Return the processes that share the rows."""
    if jax.process_count() == 1:
        return SINGLE_PROCESS
    devices = {d for x in arguments.sharded_arrays for d in x.shards.mesh.devices.flat}
    if len({d.process_index for d in devices}) < 2:
        raise InvalidArgumentError(
            "The processes share no rows, so each would run separate chains.",
            "start the processes without jax.distributed.initialize, each with another "
            "`checkpoint`, or shard the rows over all processes by ShardedArray.",
            "processes-share-nothing",
        )
    return ProcessGroup(jax.process_count(), jax.process_index())


def _to_addressable(x: Any) -> Any:
    if not isinstance(x, Array) or x.is_fully_addressable:
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return random.wrap_key_data(_to_addressable(random.key_data(x)), impl=random.key_impl(x))
    full = x if x.is_fully_replicated else multihost_utils.process_allgather(x, tiled=True)
    return jnp.asarray(np.asarray(full))
