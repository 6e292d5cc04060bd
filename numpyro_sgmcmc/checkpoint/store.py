"""Pytrees as JSON and a list of NumPy arrays, and back: to the same types and the same bits.

No pickle: a checkpoint is data, and reading one runs no code of its own.

A run's folder: checkpoints of the state by orbax, each complete or not there at all.

``checkpoints/<iterations>/state`` is orbax's; ``checkpoint.json`` beside it is written last and
moved into place at once, so that a folder without it does not count. It has a checksum of every
array, and of every block of draws so far.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_sgmcmc import errors
from numpyro_sgmcmc.errors import InvalidArgumentError, warn_user

__all__ = [
    "Checkpoint",
    "CheckpointStore",
    "compute_checksum",
    "decode",
    "encode",
    "read_latest_header",
    "report_write_failure",
]


def _is_prng_key(x: Any) -> bool:
    return isinstance(x, Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def encode(tree: Any, arrays: list[np.ndarray]) -> Any:
    """The structure of ``tree`` as JSON; its arrays are appended to ``arrays``.

    :param tree: named tuples, dataclasses, dicts with strings or tuples of them as keys, lists,
        tuples, arrays, random keys, numbers, strings, bools and None.
    :raises TypeError: for anything else.
    """
    if tree is None or isinstance(tree, (bool, str)) or type(tree) in (int, float):
        return tree
    if _is_prng_key(tree):
        arrays.append(np.asarray(random.key_data(tree)))
        return {"key": len(arrays) - 1, "impl": str(random.key_impl(tree))}
    if isinstance(tree, Array):
        arrays.append(np.asarray(tree))
        return {"jax": len(arrays) - 1}
    if isinstance(tree, (np.ndarray, np.generic)):
        arrays.append(np.asarray(tree))
        return {"scalar" if isinstance(tree, np.generic) else "numpy": len(arrays) - 1}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        kind = f"{type(tree).__module__}:{type(tree).__qualname__}"
        parts = zip(tree._fields, tree, strict=True)
        return {"type": kind, "fields": {n: encode(x, arrays) for n, x in parts}}
    if is_dataclass(tree) and not isinstance(tree, type):
        kind = f"{type(tree).__module__}:{type(tree).__qualname__}"
        values = {f.name: encode(getattr(tree, f.name), arrays) for f in fields(tree)}
        return {"object": kind, **({"values": values} if values else {})}
    if isinstance(tree, (list, tuple)):
        return {type(tree).__name__: [encode(x, arrays) for x in tree]}
    if isinstance(tree, dict) and all(isinstance(k, str) for k in tree):
        return {"dict": {k: encode(x, arrays) for k, x in tree.items()}}
    if isinstance(tree, dict) and all(isinstance(k, tuple) for k in tree):
        return {"by tuples": [[list(k), encode(x, arrays)] for k, x in tree.items()]}
    raise TypeError(f"A {type(tree).__name__} cannot be kept in a checkpoint.")


def _resolve_type(qualified_name: str) -> type:
    """A type of a module that is loaded already: reading a checkpoint imports nothing."""
    module, name = qualified_name.split(":")
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    if not isinstance(found, type):
        raise ValueError(f"{qualified_name} is no type.")
    return found


def _resolve_named_tuple(qualified_name: str) -> type:
    found = _resolve_type(qualified_name)
    if not (issubclass(found, tuple) and hasattr(found, "_fields")):
        raise ValueError(f"{qualified_name} is no named tuple.")
    return found


def _resolve_dataclass(qualified_name: str) -> type:
    """An estimator's, a minibatch scheme's, that of the mass matrix's blocks."""
    found = _resolve_type(qualified_name)
    if not is_dataclass(found):
        raise ValueError(f"{qualified_name} is no dataclass.")
    return found


def decode(structure: Any, arrays: Sequence[np.ndarray] | Mapping[int, np.ndarray]) -> Any:
    """The tree of :func:`encode`; JAX arrays are on the default device."""
    if not isinstance(structure, dict):
        return structure
    match structure:
        case {"key": place, "impl": impl}:
            return random.wrap_key_data(jnp.array(arrays[place]), impl=impl)
        case {"jax": place}:
            return jnp.array(arrays[place])
        case {"numpy": place}:
            return arrays[place]
        case {"scalar": place}:
            return arrays[place][()]
        case {"type": kind, "fields": parts}:
            return _resolve_named_tuple(kind)(**{n: decode(x, arrays) for n, x in parts.items()})
        case {"object": kind}:
            values = structure.get("values", {})
            return _resolve_dataclass(kind)(**{n: decode(x, arrays) for n, x in values.items()})
        case {"list": items}:
            return [decode(x, arrays) for x in items]
        case {"tuple": items}:
            return tuple(decode(x, arrays) for x in items)
        case {"dict": items}:
            return {k: decode(x, arrays) for k, x in items.items()}
        case {"by tuples": items}:
            return {tuple(k): decode(x, arrays) for k, x in items}
    raise ValueError(f"A checkpoint holds no {structure!r}.")


_HEADER_FILENAME = "checkpoint.json"


_FORMAT_VERSION = 6
"""Of what continues a run; draws on disk have been the same since format 1."""


class Checkpoint(NamedTuple):
    """
    - **num_iterations** - complete iterations, warm-up counted in.
    - **num_draws** - complete draws of a chain.
    - **draw_blocks** - first and last draw (exclusive) of each block on disk, and its checksum.
    - **header** - what else is JSON: fingerprint, settings, structure of the draws.
    - **tree** - what continues the run.
    """

    @property
    def label(self) -> str:
        """Tells it from others."""
        arrays = zlib.crc32(json.dumps(self.header["arrays"]).encode())
        return f"that of iteration {self.num_iterations} ({arrays:08x})"

    num_iterations: int
    num_draws: int
    draw_blocks: list[list[int]]
    header: dict[str, Any]
    tree: Any


def compute_checksum(arrays: Any) -> int:
    """Of the values of some arrays, in order."""
    total = 0
    for x in arrays:
        total = zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data, total)
    return total


def _create_checkpointer() -> Any:
    ocp = errors.import_optional("orbax.checkpoint", "`CheckpointedMCMC`", "checkpoint")
    if jax.process_count() == 1:
        return ocp.StandardCheckpointer()
    # One of several processes, which does not wait for the others to write or to read.
    place = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=place, active_processes={place}, barrier_sync_key_prefix=f"process-{place}"
    )
    return ocp.StandardCheckpointer(multiprocessing_options=alone)


def _write_atomically(path: Path, text: str) -> None:
    """All of the text or none of it, whatever happens meanwhile."""
    draft = path.with_suffix(".draft")
    with open(draft, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def _list_checkpoint_folders(folder: Path) -> list[Path]:
    """The folders of complete checkpoints, newest first."""
    found = folder.glob(f"checkpoints/*/{_HEADER_FILENAME}")
    return sorted((f.parent for f in found), key=lambda p: p.name, reverse=True)


def _read_header(checkpoint_folder: Path) -> dict[str, Any]:
    header = json.loads((checkpoint_folder / _HEADER_FILENAME).read_text())
    header["format"], header["draws"]
    return header


def read_latest_header(folder: Path) -> dict[str, Any]:
    """What the newest readable checkpoint says of itself, whatever its format.

    :raises FileNotFoundError: where there is none.
    """
    for step in _list_checkpoint_folders(folder):
        try:
            return _read_header(step)
        except (ValueError, KeyError, OSError):
            continue
    raise FileNotFoundError(f"'{folder}' holds no checkpoint of a run.")


@contextmanager
def report_write_failure(folder: Path, num_draws: int) -> Iterator[None]:
    """Turn whatever goes wrong while writing into one sentence on what is safe.

    :param num_draws: draws of a chain in the last checkpoint.
    """
    try:
        yield
    except ImportError:
        raise
    # Orbax and Zarr have errors of their own for a full disk.
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise RuntimeError(
            f"A checkpoint could not be written to '{folder}' ({reason}): {num_draws} draws a chain "
            "are safe there and can be read by `open_draws`; once there is room, `resume` "
            "continues the run."
        ) from error


class CheckpointStore:
    """The checkpoints of one run, of which the last two are kept.

    :param folder: the run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._latest_folder: Path | None = None

    @property
    def has_checkpoint(self) -> bool:
        """Whether a run could be continued."""
        return bool(_list_checkpoint_folders(self._folder))

    def write(self, checkpoint: Checkpoint, is_writer: bool = True) -> Any:
        """Keep a checkpoint, and of those before only the last.

        :param is_writer: whether this process writes, and not another one that has the same.
        :return: the tree as :meth:`newest` would give it.
        """
        arrays: list[np.ndarray] = []
        structure = encode(checkpoint.tree, arrays)
        if is_writer:
            self._write_files(checkpoint, structure, arrays)
        return decode(structure, arrays)

    def _write_files(
        self, checkpoint: Checkpoint, structure: Any, arrays: list[np.ndarray]
    ) -> None:
        step = self._folder / "checkpoints" / f"{checkpoint.num_iterations:012d}"
        if step.exists():
            _remove_checkpoint(step)
        step.mkdir(parents=True)
        with _create_checkpointer() as checkpointer:
            # Orbax keeps no empty arrays; their shape says everything.
            filled = {f"{i:04d}": x for i, x in enumerate(arrays) if x.size}
            checkpointer.save((step / "state").absolute(), filled)
            checkpointer.wait_until_finished()
        header = {
            **checkpoint.header,
            "format": _FORMAT_VERSION,
            "iterations": checkpoint.num_iterations,
            "draws": checkpoint.num_draws,
            "blocks": checkpoint.draw_blocks,
            "structure": structure,
            "arrays": [[list(x.shape), x.dtype.name, compute_checksum([x])] for x in arrays],
        }
        _write_atomically(step / _HEADER_FILENAME, json.dumps(header))
        for other in (self._folder / "checkpoints").iterdir():
            if other not in (step, self._latest_folder):
                _remove_checkpoint(other)
        self._latest_folder = step

    def read_headers(self) -> list[tuple[Path, dict[str, Any] | Exception]]:
        """The checkpoints, newest first, each with its header or with what is wrong with it."""
        found: list[tuple[Path, dict[str, Any] | Exception]] = []
        for step in _list_checkpoint_folders(self._folder):
            try:
                found.append((step, _read_header(step)))
            except (ValueError, KeyError, OSError) as error:
                found.append((step, error))
        return found

    @property
    def latest_fingerprint(self) -> dict[str, str] | None:
        """That of the run, as the newest readable checkpoint has it; None where there is none."""
        readable = (
            h["fingerprint"] for _, h in self.read_headers() if not isinstance(h, Exception)
        )
        return next(readable, None)

    def check_no_run(self) -> None:
        """Refuse to begin a run where there is one.

        :raises FileExistsError: naming the folder.
        """
        if self.has_checkpoint:
            raise FileExistsError(
                f"'{self._folder}' holds a run already: call `resume` to continue it, or give "
                "`checkpoint` another folder."
            )

    def check_format_version(self) -> None:
        """Refuse to continue a run that another version of the package has stored.

        :raises ValueError: naming both formats, with the way out.
        """
        for _, header in self.read_headers():
            if isinstance(header, Exception):
                continue
            found = header["format"]
            if found == _FORMAT_VERSION:
                return
            age = "an older" if found < _FORMAT_VERSION else "a newer"
            raise InvalidArgumentError(
                f"The run in '{self._folder}' was stored in {age} format ({found}) than this "
                f"version of numpyro_sgmcmc continues ({_FORMAT_VERSION}): continue it with the version "
                "that began it, or run in another folder. Its draws can be read by `open_draws`."
            )

    def read_latest(self, check_draws: Any) -> Checkpoint:
        """The newest checkpoint that is whole, with a warning where that is not the last one.

        :param check_draws: called with a header; raises where the last draws on disk are damaged.
        :raises RuntimeError: where none is whole.
        """
        wrong: list[str] = []
        for step, header in self.read_headers():
            try:
                if isinstance(header, Exception):
                    raise header
                tree = _read_tree(step, header)
                check_draws(header)
            # Whatever a damaged file makes its reader raise.
            except Exception as error:
                reason = " ".join(str(error).split())[:200]
                wrong.append(f"that of iteration {int(step.name)} is damaged ({reason})")
                continue
            if wrong:
                warn_user(
                    f"Of the checkpoints in '{self._folder}' {' and '.join(wrong)}: the run goes "
                    f"on from the one before, of iteration {header['iterations']}."
                )
            self._latest_folder = step
            return Checkpoint(header["iterations"], header["draws"], header["blocks"], header, tree)
        raise RuntimeError(
            f"No checkpoint in '{self._folder}' can be read: {' and '.join(wrong)}. Draws on disk "
            "are left as they are; run in another folder."
        )


def _read_tree(checkpoint_folder: Path, header: dict[str, Any]) -> Any:
    stored = [(tuple(shape), np.dtype(dtype), crc) for shape, dtype, crc in header["arrays"]]
    arrays = [np.zeros(shape, dtype) for shape, dtype, _ in stored]
    target = {f"{i:04d}": x for i, x in enumerate(arrays) if x.size}
    with _create_checkpointer() as checkpointer:
        found = checkpointer.restore((checkpoint_folder / "state").absolute(), target)
    for name, x in found.items():
        arrays[int(name)] = np.asarray(x)
    for x, (shape, dtype, crc) in zip(arrays, stored, strict=True):
        if x.shape != shape or x.dtype != dtype or compute_checksum([x]) != crc:
            raise ValueError("an array is not the one that was written")
    return decode(header["structure"], arrays)


def _remove_checkpoint(checkpoint_folder: Path) -> None:
    """Remove a checkpoint, which is none from the first moment on."""
    (checkpoint_folder / _HEADER_FILENAME).unlink(missing_ok=True)
    shutil.rmtree(checkpoint_folder, ignore_errors=True)
