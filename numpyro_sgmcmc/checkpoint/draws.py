"""Draws on disk: a Zarr group with an array for each site and field, opened lazily by ArviZ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import jax
import numpy as np

from numpyro_sgmcmc import errors
from numpyro_sgmcmc.checkpoint.store import compute_checksum, decode, read_latest_header

__all__ = ["DrawsOnDisk", "open_draws"]

_MAX_CHUNK_BYTES = 2**24


def _import_zarr() -> Any:
    return errors.import_optional("zarr", "`CheckpointedMCMC`", "checkpoint")


def _iter_named_arrays(draws: dict[str, Any], sample_field: str) -> Iterator[tuple[str, Any]]:
    """The arrays with their places in the group: sites by name, fields by field and path."""
    for field, tree in draws.items():
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            inner = jax.tree_util.keystr(path, simple=True, separator=".")
            if field == sample_field:
                yield f"posterior/{quote(inner or field, safe='')}", leaf
            else:
                name = f"{field}.{inner}" if inner else field
                yield f"sample_stats/{quote(name, safe='')}", leaf


def _compute_chunk_shape(
    shape: tuple[int, ...], itemsize: int, draws_per_chunk: int
) -> tuple[int, ...]:
    """One chain and one segment, cut along the site's own axes where that is much."""
    inner = list(shape[2:])
    while (
        inner and max(inner) > 1 and draws_per_chunk * np.prod(inner) * itemsize > _MAX_CHUNK_BYTES
    ):
        longest = inner.index(max(inner))
        inner[longest] = -(-inner[longest] // 2)
    return (1, draws_per_chunk, *inner)


class DrawsOnDisk:
    """The draws of one run.

    :param folder: the run's folder.
    :param sample_field: the field that holds the sites.
    """

    def __init__(self, folder: Path, sample_field: str) -> None:
        self._zarr_path, self._sample_field = folder / "draws.zarr", sample_field

    def create(self, draws: dict[str, Any], num_draws: int) -> None:
        """Make room for a run's draws; takes none on disk yet.

        :param draws: those of a segment, leaves of shape ``(chains, room, ...)``.
        :param num_draws: draws of a chain in the whole run.
        """
        zarr = _import_zarr()
        root = zarr.open_group(str(self._zarr_path), mode="w", zarr_format=3)
        for group in ("posterior", "sample_stats"):
            root.create_group(group)
        for name, x in _iter_named_arrays(draws, self._sample_field):
            inner = [f"{unquote(name.split('/')[1])}_dim_{k}" for k in range(len(x.shape) - 2)]
            root.create_array(
                name,
                shape=(x.shape[0], num_draws, *x.shape[2:]),
                chunks=_compute_chunk_shape(x.shape, x.dtype.itemsize, x.shape[1]),
                dtype=x.dtype,
                # What is missing shows, and what is damaged cannot be decompressed.
                fill_value=np.nan if x.dtype.kind == "f" else None,
                compressors=zarr.codecs.ZstdCodec(checksum=True),
                dimension_names=("chain", "draw", *inner),
            )

    def compute_checksum(self, draws: dict[str, Any]) -> int:
        """Of draws, as :meth:`read` compares it."""
        return compute_checksum(x for _, x in _iter_named_arrays(draws, self._sample_field))

    def write(self, draws: dict[str, Any], first_draw: int) -> None:
        """Write draws from ``first_draw`` on over whatever is there."""
        root = _import_zarr().open_group(str(self._zarr_path), mode="r+")
        for name, x in _iter_named_arrays(draws, self._sample_field):
            root[name][:, first_draw : first_draw + x.shape[1]] = x

    def read(self, layout: Any, draw_blocks: list[list[int]]) -> dict[str, Any]:
        """The draws in some blocks, which follow each other.

        :param layout: the structure of the draws, as a checkpoint's header has it.
        :param draw_blocks: of a :class:`~numpyro_sgmcmc.checkpoint.store.Checkpoint`.
        :raises RuntimeError: naming the first block that is damaged.
        """
        like = decode(layout, defaultdict(lambda: np.zeros(0)))
        names = [name for name, _ in _iter_named_arrays(like, self._sample_field)]
        parts: list[list[np.ndarray]] = []
        for start, stop, crc in draw_blocks:
            try:
                root = _import_zarr().open_group(str(self._zarr_path), mode="r")
                arrays = [np.asarray(root[name][:, start:stop]) for name in names]
                reason = "its checksum is another" if compute_checksum(arrays) != crc else None
            except ImportError:
                raise
            # Whatever a damaged file makes its reader raise.
            except Exception as error:
                reason = " ".join(str(error).split())[:200]
            if reason:
                raise RuntimeError(
                    f"Draws {start} to {stop} in '{self._zarr_path}' are damaged ({reason}); "
                    "`open_draws` reads the others."
                )
            parts.append(arrays)
        leaves = [np.concatenate(blocks, 1) for blocks in zip(*parts, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)


def open_draws(folder: str | Path) -> Any:
    """The draws of a checkpointed run as an ArviZ object, whose values are read when asked for.

    Works while the run goes on, too: it has the draws of the last checkpoint.

    :param folder: the run's ``checkpoint``.
    :return: ``InferenceData`` for ArviZ 0.x, ``DataTree`` for 1.x, with the groups ``posterior``
        (unless draws were not kept) and ``sample_stats``; dimensions ``(chain, draw, ...)``.
    :raises FileNotFoundError: where the folder holds no run.
    """
    _import_zarr()
    arviz = errors.import_optional("arviz", "`open_draws`", "arviz")
    import xarray  # ArviZ brings it

    folder = Path(folder)
    num_draws = read_latest_header(folder)["draws"]
    groups = {}
    for group in ("posterior", "sample_stats"):
        found = xarray.open_zarr(
            str(folder / "draws.zarr"), group=group, chunks=None, consolidated=False
        )
        if found.data_vars:
            found = found.rename({name: unquote(str(name)) for name in found.data_vars})
            found = found.isel(draw=slice(0, num_draws))
            groups[group] = found.assign_coords(
                chain=np.arange(found.sizes["chain"]), draw=np.arange(num_draws)
            )
    if arviz.__version__.startswith("0."):
        return arviz.InferenceData(**groups)
    return xarray.DataTree.from_dict(groups)
