"""Checkpoints of a run: the state by orbax, and one JSON manifest each.

``checkpoints/<iterations>/`` in the run's folder has two items of orbax's ``CheckpointManager``:
``state``, the arrays, and ``manifest/manifest.json``, everything else. Orbax writes both into a
temporary folder and renames it, so that a checkpoint is complete or absent whenever the process
is killed. The last two are kept.

Three things orbax does not do. It restores arrays into the structure of a template; a resumed run
has none, as the structure depends on what the warm-up chose, so the manifest holds it
(:func:`encode`). It has no checksums of the values, so the manifest holds those too. And it keeps
no empty arrays.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_sgmcmc import errors
from numpyro_sgmcmc.data.host_array import compute_checksum
from numpyro_sgmcmc.errors import (
    CheckpointError,
    CheckpointWarning,
    InvalidArgumentError,
    warn_user,
)

# Version of the manifest and of the state, its structure and meaning. Draws on disk are the same
# since format 1. Formats 8 and 9: Hessians of hierarchies are those of the rows' part of the
# potential, and their differences have all entries of a block.
_FORMAT_VERSION = 9
# Checkpoints kept: the second one is used where the newest is damaged.
_MAX_CHECKPOINTS = 2
# Digits of a checkpoint's folder, so that names sort as numbers do.
_STEP_DIGITS = 12
# Where a manifest is in its checkpoint's folder; the second is that of formats 1 to 6.
_MANIFEST_PATHS = ("manifest/manifest.json", "checkpoint.json")


class Checkpoint(NamedTuple):
    """A checkpoint of a run."""

    # the JSON part: fingerprint, extra fields, layout of the draws, numbers of complete
    # `iterations` (including warm-up) and `draws` (per chain), and `[first, stop, checksum]` of
    # each of the `blocks` of draws on disk
    manifest: dict[str, Any]
    tree: Any  # the pytree that continues the run

    @property
    def num_iterations(self) -> int:
        return self.manifest["iterations"]

    @property
    def num_draws(self) -> int:
        return self.manifest["draws"]


class CheckpointStore:
    """The checkpoints of the run in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def has_checkpoint(self) -> bool:
        """True if the folder holds a run that can be continued."""
        return bool(_list_checkpoints(self._folder))

    def read_latest_fingerprint(self) -> dict[str, str] | None:
        """Return the fingerprint of the newest readable checkpoint; None where there is none."""
        if (manifest := read_latest_manifest(self._folder)) is None:
            return None
        if (version := manifest["format"]) != _FORMAT_VERSION:
            age = "an older" if version < _FORMAT_VERSION else "a newer"
            raise InvalidArgumentError(
                f"The run in '{self._folder}' has {age} format ({version}) than this version of "
                f"numpyro_sgmcmc writes ({_FORMAT_VERSION}).",
                "continue the run with the version of numpyro_sgmcmc that started it, or start a "
                "run in another folder. `open_draws` reads the draws of the old run.",
                "checkpoint-format",
            )
        return manifest["fingerprint"]

    def write(self, checkpoint: Checkpoint, is_writer: bool = True) -> Checkpoint:
        """Write a checkpoint, if this process is the writer, and return it as it would be read."""
        arrays: list[np.ndarray] = []
        structure = encode(checkpoint.tree, arrays)
        if is_writer:
            manifest = {
                **checkpoint.manifest,
                "format": _FORMAT_VERSION,
                "structure": structure,
                "arrays": [[list(x.shape), x.dtype.name, compute_checksum([x])] for x in arrays],
            }
            step = checkpoint.num_iterations
            with _open_manager(self._folder, is_writer=True) as (ocp, manager):
                # Those of later iterations are damaged: the run went on from one before.
                for later_step in [s for s in manager.all_steps() if s >= step]:
                    manager.delete(later_step)
                items = ocp.args.Composite(
                    state=ocp.args.StandardSave(_name_nonempty(arrays)),
                    manifest=ocp.args.JsonSave(manifest),
                )
                manager.save(step, args=items, force=True)
        return checkpoint._replace(tree=decode(structure, arrays))

    def read_latest(self, check_draws: Callable[[dict[str, Any]], None]) -> Checkpoint:
        """Return the newest undamaged checkpoint, with a warning where it is not the newest one."""
        damages: list[str] = []
        for path in _list_checkpoints(self._folder):
            try:
                manifest = _read_manifest(path)
                tree = self._read_tree(int(path.name), manifest)
                check_draws(manifest)
            # A damaged file can make its reader raise anything.
            except Exception as error:
                reason = " ".join(str(error).split())[:200]
                damages.append(f"iteration {int(path.name)} is damaged ({reason})")
                continue
            if damages:
                warn_user(
                    f"The checkpoint of {' and that of '.join(damages)}. The run resumes from the "
                    f"checkpoint of iteration {manifest['iterations']}.",
                    CheckpointWarning,
                    f"check the disk of '{self._folder}' if this happens more than once.",
                    "damaged-checkpoint",
                )
            return Checkpoint(manifest, tree)
        raise CheckpointError(
            f"No checkpoint in '{self._folder}' can be read: {' and '.join(damages)}.",
            "read the draws that are on disk with `open_draws`, and start a run in another folder.",
            "damaged-checkpoint",
        )

    def _read_tree(self, step: int, manifest: dict[str, Any]) -> Any:
        arrays = [np.zeros(shape, np.dtype(dtype)) for shape, dtype, _ in manifest["arrays"]]
        with _open_manager(self._folder, is_writer=False) as (ocp, manager):
            state_args = ocp.args.StandardRestore(_name_nonempty(arrays))
            items = manager.restore(step, args=ocp.args.Composite(state=state_args))
        for name, x in items["state"].items():
            arrays[int(name)] = np.asarray(x)
        for x, (shape, dtype, checksum) in zip(arrays, manifest["arrays"], strict=True):
            layout = (list(x.shape), x.dtype.name, compute_checksum([x]))
            if layout != (shape, dtype, checksum):
                raise ValueError("the checksum of an array differs")
        return decode(manifest["structure"], arrays)


def encode(tree: Any, arrays: list[np.ndarray]) -> Any:
    """Return the structure of a pytree as JSON, and append its arrays to ``arrays``.

    JSON and not pickle: a checkpoint is data, and reading one runs no code of it.

    :param tree: named tuples, dataclasses, enums, dicts with strings or tuples of strings as keys,
        lists, tuples, arrays, random keys, numbers, strings, bools and None.
    """
    if tree is None or isinstance(tree, (bool, str)) or type(tree) in (int, float):
        return tree
    if isinstance(tree, Array) and jnp.issubdtype(tree.dtype, jax.dtypes.prng_key):
        arrays.append(np.asarray(random.key_data(tree)))
        return {"key": len(arrays) - 1, "impl": str(random.key_impl(tree))}
    for kind, array_type in (("jax", Array), ("scalar", np.generic), ("numpy", np.ndarray)):
        if isinstance(tree, array_type):
            arrays.append(np.asarray(tree))
            return {kind: len(arrays) - 1}
    qualified_name = f"{type(tree).__module__}:{type(tree).__qualname__}"
    if isinstance(tree, Enum):
        return {"enum": qualified_name, "name": tree.name}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        names: Iterable[str] = tree._fields
    elif is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in fields(tree)]
    elif isinstance(tree, (list, tuple)):
        return {type(tree).__name__: [encode(x, arrays) for x in tree]}
    elif isinstance(tree, dict) and all(isinstance(k, (str, tuple)) for k in tree):
        # Tuples become lists in JSON, which keys cannot be otherwise.
        return {"dict": [[k, encode(x, arrays)] for k, x in tree.items()]}
    else:
        raise TypeError(f"A {type(tree).__name__} cannot be stored in a checkpoint.")
    return {"class": qualified_name, "fields": {n: encode(getattr(tree, n), arrays) for n in names}}


def decode(structure: Any, arrays: Sequence[np.ndarray] | Mapping[int, np.ndarray]) -> Any:
    """Return the pytree of :func:`encode`; JAX arrays are on the default device."""
    if not isinstance(structure, dict):
        return structure
    match structure:
        case {"key": index, "impl": impl}:
            return random.wrap_key_data(jnp.array(arrays[index]), impl=impl)
        case {"jax": index}:
            return jnp.array(arrays[index])
        case {"numpy": index}:
            return arrays[index]
        case {"scalar": index}:
            return arrays[index][()]
        case {"enum": qualified_name, "name": name}:
            return _resolve_class(qualified_name)[name]
        case {"class": qualified_name, "fields": values}:
            cls = _resolve_class(qualified_name)
            return cls(**{name: decode(x, arrays) for name, x in values.items()})
        case {"list": items}:
            return [decode(x, arrays) for x in items]
        case {"tuple": items}:
            return tuple(decode(x, arrays) for x in items)
        case {"dict": items}:
            return {tuple(k) if isinstance(k, list) else k: decode(x, arrays) for k, x in items}
    raise ValueError(f"a checkpoint has no {structure!r}")


def _resolve_class(qualified_name: str) -> Any:
    """Return a named tuple, dataclass or enum of a module that is loaded already."""
    module, name = qualified_name.split(":")
    cls: Any = sys.modules[module]
    for part in name.split("."):
        cls = getattr(cls, part)
    is_named_tuple = isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields")
    is_enum = isinstance(cls, type) and issubclass(cls, Enum)
    if not (is_named_tuple or is_enum or is_dataclass(cls)):
        raise ValueError(f"{qualified_name} is no named tuple, dataclass or enum")
    return cls


def _name_nonempty(arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays by number, without empty ones, which orbax cannot store."""
    return {f"{i:04d}": x for i, x in enumerate(arrays) if x.size}


def _find_manifests(checkpoint_folder: Path) -> list[Path]:
    paths = [checkpoint_folder / name for name in _MANIFEST_PATHS]
    return [path for path in paths if path.exists()]


def _list_checkpoints(folder: Path) -> list[Path]:
    """Return the folders of complete checkpoints, newest first."""
    # Orbax's temporary folders have a suffix.
    steps = [path for path in folder.glob("checkpoints/*") if path.name.isdigit()]
    return sorted(filter(_find_manifests, steps), key=lambda path: path.name, reverse=True)


def _read_manifest(checkpoint_folder: Path) -> dict[str, Any]:
    manifest = json.loads(_find_manifests(checkpoint_folder)[0].read_text())
    manifest["format"], manifest["draws"]  # a KeyError where they are missing
    return manifest


def read_latest_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of the newest readable checkpoint, of any format."""
    for path in _list_checkpoints(folder):
        with suppress(ValueError, KeyError, OSError):
            return _read_manifest(path)
    return None


@contextmanager
def _open_manager(folder: Path, is_writer: bool) -> Iterator[tuple[Any, Any]]:
    """Import orbax and open its manager of the run's checkpoints, for one call.

    A manager keeps a list of the checkpoints, which is wrong after a save that failed. That of a
    writer removes what a killed process left half written.
    """
    ocp = errors.import_optional("orbax.checkpoint", "`CheckpointedMCMC`", "checkpoint")
    path, index = (folder / "checkpoints").absolute(), jax.process_index()
    # This process alone reads or writes and does not wait for the others.
    process_options = ocp.options.MultiprocessingOptions(
        primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"process-{index}"
    )
    if is_writer:
        path.mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(
        max_to_keep=_MAX_CHECKPOINTS,
        step_format_fixed_length=_STEP_DIGITS,
        create=False,
        cleanup_tmp_directories=is_writer,
        save_root_metadata=False,
        enable_async_checkpointing=False,
        multiprocessing_options=process_options,
    )
    handlers = {
        "state": ocp.StandardCheckpointHandler(multiprocessing_options=process_options),
        "manifest": ocp.JsonCheckpointHandler(
            Path(_MANIFEST_PATHS[0]).name, multiprocessing_options=process_options
        ),
    }
    with ocp.CheckpointManager(path, options=options, item_handlers=handlers) as manager:
        yield ocp, manager
