"""Draws on disk: a Zarr group with one array per site and field, which ArviZ opens lazily."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import jax
import numpy as np

from numpyro_sgmcmc import errors
from numpyro_sgmcmc.checkpoint.store import decode, read_latest_manifest
from numpyro_sgmcmc.data.host_array import compute_checksum
from numpyro_sgmcmc.errors import CheckpointError, format_message

# A bound on memory: a reader of one parameter loads whole chunks of this size at most.
_MAX_CHUNK_BYTES = 2**24


def open_draws(folder: str | Path) -> Any:
    """Open the draws of a checkpointed run as an ArviZ object that reads values on access.

    While the run goes on, the object has the draws up to the last checkpoint.

    :param folder: folder of the run, the argument ``checkpoint`` of :class:`CheckpointedMCMC`.
    :return: :class:`arviz.InferenceData` for ArviZ 0.x, :class:`xarray.DataTree` for 1.x. Its
        groups are ``posterior`` (unless ``keep_draws=False``) and ``sample_stats``, with the
        dimensions ``(chain, draw, ...)``.
    :raises FileNotFoundError: if the folder holds no run.
    :raises ImportError: if ArviZ or Zarr is not installed.
    """
    _import_zarr()
    arviz = errors.import_optional("arviz", "`open_draws`", "arviz")
    import xarray  # a dependency of ArviZ

    folder = Path(folder)
    if (manifest := read_latest_manifest(folder)) is None:
        raise FileNotFoundError(
            format_message(
                f"'{folder}' holds no checkpoint of a run.",
                "pass the folder that `CheckpointedMCMC` got as `checkpoint`.",
                "checkpoint-folder",
            )
        )
    groups = {}
    for group in ("posterior", "sample_stats"):
        dataset = xarray.open_zarr(
            str(folder / "draws.zarr"), group=group, chunks=None, consolidated=False
        )
        if not dataset.data_vars:
            continue
        dataset = dataset.rename({name: unquote(str(name)) for name in dataset.data_vars})
        dataset = dataset.isel(draw=slice(manifest["draws"]))
        groups[group] = dataset.assign_coords(
            {name: np.arange(dataset.sizes[name]) for name in ("chain", "draw")}
        )
    if arviz.__version__.startswith("0."):
        return arviz.InferenceData(**groups)
    return xarray.DataTree.from_dict(groups)


class DrawsOnDisk:
    """The draws of the run in a folder; ``sample_field`` holds the sites."""

    def __init__(self, folder: Path, sample_field: str) -> None:
        self._zarr_path, self._sample_field = folder / "draws.zarr", sample_field

    def create(self, draws: dict[str, Any], num_draws: int) -> None:
        """Create the arrays of a run of ``num_draws`` per chain, without values."""
        zarr = _import_zarr()
        root = zarr.open_group(str(self._zarr_path), mode="w", zarr_format=3)
        for group in ("posterior", "sample_stats"):
            root.create_group(group)
        for name, x in self._iter_named_arrays(draws):
            site_dims = [f"{unquote(name.split('/')[1])}_dim_{k}" for k in range(len(x.shape) - 2)]
            root.create_array(
                name,
                shape=(x.shape[0], num_draws, *x.shape[2:]),
                chunks=_compute_chunk_shape(x.shape, x.dtype.itemsize),
                dtype=x.dtype,
                # Missing draws are NaN, and damaged ones cannot be decompressed.
                fill_value=np.nan if x.dtype.kind == "f" else None,
                compressors=zarr.codecs.ZstdCodec(checksum=True),
                dimension_names=("chain", "draw", *site_dims),
            )

    def write(
        self, draws: dict[str, Any], first_draw: int, is_writer: bool = True
    ) -> tuple[int, int, int]:
        """Write draws, and return their block ``(first, stop, checksum)`` for the manifest."""
        named = list(self._iter_named_arrays(draws))
        stop = first_draw + named[0][1].shape[1]
        if is_writer:
            root = _import_zarr().open_group(str(self._zarr_path), mode="r+")
            for name, x in named:
                root[name][:, first_draw:stop] = x
        return first_draw, stop, compute_checksum(x for _, x in named)

    def read(self, layout: Any, draw_blocks: list[list[int]]) -> dict[str, Any]:
        """Return the draws of consecutive blocks; layout and blocks are those of the manifest."""
        template = decode(layout, defaultdict(lambda: np.zeros(0)))
        names = [name for name, _ in self._iter_named_arrays(template)]
        zarr = _import_zarr()
        blocks: list[list[np.ndarray]] = []
        for start, stop, checksum in draw_blocks:
            try:
                root = zarr.open_group(str(self._zarr_path), mode="r")
                arrays = [np.asarray(root[name][:, start:stop]) for name in names]
                damage = "checksum differs" if compute_checksum(arrays) != checksum else None
            # A damaged file can make its reader raise anything.
            except Exception as error:
                damage = " ".join(str(error).split())[:200]
            if damage:
                raise CheckpointError(
                    f"Draws {start} to {stop - 1} in '{self._zarr_path}' are damaged ({damage}).",
                    "read the other draws with `open_draws`.",
                    "damaged-draws",
                )
            blocks.append(arrays)
        leaves = [np.concatenate(arrays, 1) for arrays in zip(*blocks, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(template), leaves)

    def read_leading(self, num_draws: int, max_per_axis: int) -> dict[str, np.ndarray]:
        """Return the draws of the first values of each site, at most so many along each axis."""
        group = _import_zarr().open_group(str(self._zarr_path), mode="r")["posterior"]
        return {
            name: np.asarray(x[:, :num_draws, *[slice(max_per_axis)] * (x.ndim - 2)])
            for name, x in group.arrays()
        }

    def _iter_named_arrays(self, draws: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield each array with its path in the Zarr group: a site or ``field.path``, quoted."""
        for field, tree in draws.items():
            for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
                leaf_name = jax.tree_util.keystr(path, simple=True, separator=".")
                if field == self._sample_field:
                    yield f"posterior/{quote(leaf_name or field, safe='')}", leaf
                else:
                    name = f"{field}.{leaf_name}" if leaf_name else field
                    yield f"sample_stats/{quote(name, safe='')}", leaf


def _compute_chunk_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return chunks of one chain and one segment, cut along the site's axes where too large."""
    site_shape = list(shape[2:])
    while site_shape and max(site_shape) > 1:
        if shape[1] * np.prod(site_shape) * itemsize <= _MAX_CHUNK_BYTES:
            break
        longest_axis = site_shape.index(max(site_shape))
        site_shape[longest_axis] = -(-site_shape[longest_axis] // 2)
    return (1, shape[1], *site_shape)


def _import_zarr() -> Any:
    return errors.import_optional("zarr", "`CheckpointedMCMC`", "checkpoint")
