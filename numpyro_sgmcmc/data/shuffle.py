"""Rows in random order on disk, by an external sort in bounded memory.

Files are often sorted by time or customer, and reading random rows from Parquet is slow. Each row
gets an independent, uniformly distributed 64-bit key, and the rows are sorted by their keys. All
orders of independent and identically distributed keys are equally likely: the permutation is
uniform. It depends on the seed and the number of rows only, not on the memory.

The first pass writes chunks of rows. In a chunk, rows are grouped by buckets, which are intervals
of keys. The second pass reads each bucket from all chunks, sorts it in memory, and writes its rows.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpyro.util import tqdm_auto

from numpyro_sgmcmc.data.host_array import HostArray
from numpyro_sgmcmc.data.tables import Names, Table, TableRows, as_names, open_files
from numpyro_sgmcmc.errors import InvalidArgumentError, check_positive_int, import_optional

_MANIFEST, _WORK_FOLDER, _PROGRESS = "rows.json", "unfinished", "finished-buckets"
# Rows that are read from a source at once: more for large chunks of Zarr, and at most this share of
# a chunk.
_READ_ROWS, _READ_SHARE = 2**16, 1 / 8
# Bytes per row of a chunk, in units of a row of the largest array (values, sorted copy, and what is
# read, in two types), and for each row: key, bucket, order, and workspace of the sort.
_ROW_COPIES, _SORT_BYTES_PER_ROW = 2.5, 32
# Share of the memory for a mean bucket; the sizes of buckets are random.
_MEAN_BUCKET_SHARE = 0.9


def shuffle_rows(
    source: Any,
    target: str | os.PathLike,
    *,
    columns: Names | Mapping[str, Names] | None = None,
    categories: Names = (),
    seed: int = 0,
    max_memory_bytes: int = 2**30,
    progress_bar: bool = True,
) -> Table:
    """Write the rows of a table to disk once, in random order, and open the written rows.

    Contiguous minibatches of shuffled rows are random minibatches, and are read fast. The order is
    a uniformly distributed permutation. The same source and seed give the same files. If the
    process is killed, the same call resumes the work. Complete files are only opened.

    :param source: Parquet or Arrow files (as in :meth:`HostArray.from_parquet`); an npy file or a
        folder of them; a Zarr array or group; or a dict of arrays that :class:`HostArray` reads.
    :param target: new or empty folder, for one npy file per array. The disk needs space for two
        copies of the rows and for 8 bytes per row.
    :param columns: columns as in :func:`as_arrays`, or the names of arrays. Default: all.
    :param categories: columns of files to encode, as in :func:`as_arrays`. Default: none.
    :param seed: seed of the permutation, an integer that is not negative. Default 0.
    :param max_memory_bytes: largest number of bytes of rows in memory, in addition to the buffers
        of the reader. Default 2**30.
    :param progress_bar: whether to show a progress bar. Default True.
    :return: the pair ``arrays, levels`` of :func:`open_rows`.
    :raises ValueError: before the work begins, for columns that cannot be used, for a target with
        other files, and for too little memory or disk space.
    :raises RuntimeError: if a value is not finite or the source cannot be read.
    """
    check_positive_int("max_memory_bytes", max_memory_bytes)
    if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool) or seed < 0:
        raise InvalidArgumentError(
            f"`seed` is {seed!r}, which is not a non-negative integer.",
            "pass an integer such as 0.",
            "number-range",
        )
    target = Path(target)
    arrays, levels, fingerprint = _open_source(source, columns, categories)
    shuffle = _Shuffle(arrays, target, int(seed), max_memory_bytes)
    manifest = {
        "seed": int(seed),
        "source": fingerprint,
        "arrays": {name: [str(a.dtype), *a.shape] for name, a in arrays.items()},
        "levels": {name: values.tolist() for name, values in levels.items()},
        "layout": [shuffle.chunk_rows, shuffle.num_buckets],
    }
    if shuffle.prepare_target(json.loads(json.dumps(manifest))):
        with tqdm_auto(
            total=2 * shuffle.num_rows,
            desc="shuffling",
            unit=" rows",
            unit_scale=True,
            disable=not progress_bar,
        ) as bar:
            shuffle.scatter(bar)
            shuffle.sort_buckets(bar)
        shutil.rmtree(shuffle.work)
    return open_rows(target)


def open_rows(target: str | os.PathLike) -> Table:
    """Open the rows that :func:`shuffle_rows` has written.

    :param target: folder of the files.
    :return: a pair ``arrays, levels``: a dict of :class:`HostArray` by name, and a dict of the
        levels of each categorical column.
    :raises ValueError: if there are no such files, or they are not complete.
    """
    folder = Path(target)
    is_unfinished = (folder / _WORK_FOLDER).exists()
    if is_unfinished or not (folder / _MANIFEST).exists():
        raise InvalidArgumentError(
            f"'{folder}' has {'an unfinished shuffle' if is_unfinished else 'no shuffled rows'}.",
            f"call shuffle_rows{' again with the same arguments' if is_unfinished else ''}.",
            "shuffle-target",
        )
    manifest = json.loads((folder / _MANIFEST).read_text())
    arrays = {
        name: HostArray(np.load(_array_path(folder, name), mmap_mode="r"), name=name)
        for name in manifest["arrays"]
    }
    return Table(arrays, {name: np.asarray(x) for name, x in manifest["levels"].items()})


def _open_source(
    source: Any, columns: Any, categories: Names
) -> tuple[dict[str, HostArray], dict[str, np.ndarray], Any]:
    """Return arrays and levels of a source, and what identifies its content."""
    found, levels = _find_arrays(source)
    if found is None:
        table = open_files(source, columns, categories, "`shuffle_rows`")
        arrays = {
            name: HostArray(TableRows(table, part, 0), name=name)
            for name, part in table.layout.items()
        }
        files = [[str(x), x.stat().st_size, x.stat().st_mtime_ns] for x in table.files]
        return arrays, table.levels, {"files": files, "columns": table.layout}
    layout = columns if isinstance(columns, Mapping) else None
    if layout is None:
        layout = {name: name for name in (found if columns is None else as_names(columns))}
    if encoded := as_names(categories):
        raise InvalidArgumentError(
            f"`categories` names '{encoded[0]}', but `source` has arrays, which are not encoded.",
            "leave `categories` out. For a data frame, as_arrays(frame) encodes its columns.",
            "table-columns",
        )
    unknown = [x for x in layout.values() if x not in list(found)]
    if unknown or not layout:
        raise InvalidArgumentError(
            f"`source` has no array {unknown[0]!r}." if unknown else "`source` has no arrays.",
            f"select arrays by their names: {sorted(found)}.",
            "table-columns",
        )
    arrays = {
        name: found[x] if isinstance(found[x], HostArray) else HostArray(found[x], name=name)
        for name, x in layout.items()
    }
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise InvalidArgumentError(
            f"The arrays of `source` have different numbers of rows: {lengths}.",
            "pass arrays with equal numbers of rows.",
            "table-columns",
        )
    return arrays, levels, {name: array.checksum() for name, array in arrays.items()}


def _find_arrays(source: Any) -> tuple[Mapping[str, Any] | None, dict[str, np.ndarray]]:
    """Return the arrays of a source by name, None for a table, and the levels of its columns."""
    if isinstance(source, Mapping):
        return source, {}
    if hasattr(source, "arrays"):  # a Zarr group
        return dict(source.arrays()), {}
    if not isinstance(source, (str, os.PathLike)):
        if isinstance(source, (list, tuple)):
            return None, {}
        raise InvalidArgumentError(
            f"`source` is of type {type(source).__name__}, which is not a source of rows.",
            "pass a path of files or a dict of arrays. For a data frame, pass as_arrays(frame)[0].",
            "table-files",
        )
    path = Path(source)
    if (path / _MANIFEST).exists():
        return open_rows(path)
    if path.suffix == ".npy" and path.is_file():
        return {path.stem: np.load(path, mmap_mode="r")}, {}
    if any((path / name).exists() for name in ("zarr.json", ".zgroup", ".zarray")):
        zarr = import_optional("zarr", "`shuffle_rows`", "checkpoint")
        root = zarr.open(str(path), mode="r")
        return dict(root.arrays()) if hasattr(root, "arrays") else {path.stem: root}, {}
    if files := sorted(path.glob("*.npy")):
        return {x.stem: np.load(x, mmap_mode="r") for x in files}, {}
    return None, {}


class _Shuffle:
    """One shuffle: its sizes, and the two passes."""

    def __init__(
        self, arrays: dict[str, HostArray], target: Path, seed: int, max_memory_bytes: int
    ) -> None:
        self.arrays, self.target, self.seed = arrays, target, seed
        self.work = target / _WORK_FOLDER
        self.num_rows = len(next(iter(arrays.values())))
        # NumPy's files have no bfloat16.
        self.dtypes = [
            np.dtype(np.float32) if a.dtype.kind == "V" else a.dtype for a in arrays.values()
        ]
        sizes = [a.row_size * d.itemsize for a, d in zip(arrays.values(), self.dtypes, strict=True)]
        self.row_bytes = sum(sizes)
        bytes_per_chunk_row = int(_ROW_COPIES * max(sizes)) + _SORT_BYTES_PER_ROW
        # Each array keeps one block of its source, and one column of a block is decoded at a time.
        max_block_rows = max(getattr(a.source, "max_block_rows", 0) for a in arrays.values())
        block_bytes = max_block_rows * (self.row_bytes + _SORT_BYTES_PER_ROW)
        needed_bytes = 2 * block_bytes + bytes_per_chunk_row
        if max_memory_bytes < needed_bytes:
            raise InvalidArgumentError(
                f"`max_memory_bytes` is {max_memory_bytes}, but {needed_bytes} bytes are needed.",
                f"pass at least {needed_bytes}, or write the files with smaller row groups.",
                "shuffle-resources",
            )
        max_chunk_rows = (max_memory_bytes - block_bytes) // bytes_per_chunk_row
        self.chunk_rows = min(max_chunk_rows, self.num_rows)
        self.num_chunks = -(-self.num_rows // self.chunk_rows)
        mean_bucket_rows = max(1, int(_MEAN_BUCKET_SHARE * self.chunk_rows))
        self.num_buckets = 1 if self.num_chunks == 1 else -(-self.num_rows // mean_bucket_rows)

    def prepare_target(self, manifest: dict[str, Any]) -> bool:
        """Check the target and the disk; return whether there is work to do."""
        path = self.target / _MANIFEST
        if path.exists():
            stored = json.loads(path.read_text())
            is_finished = not self.work.exists()
            if is_finished:
                stored["layout"] = manifest["layout"]
            if stored != manifest:
                raise InvalidArgumentError(
                    f"'{self.target}' has a shuffle of another source or with other arguments.",
                    "pass the arguments of that shuffle, or the path of a new folder.",
                    "shuffle-target",
                )
            if is_finished:
                return False
        elif self.target.exists() and (
            not self.target.is_dir() or {x.name for x in self.target.iterdir()} - {_WORK_FOLDER}
        ):
            raise InvalidArgumentError(
                f"'{self.target}' is not an empty folder.",
                "pass the path of a new folder.",
                "shuffle-target",
            )
        chunk_bytes = sum(x.stat().st_size for x in self.work.glob("chunk-*"))
        needed_bytes = self.num_rows * (2 * self.row_bytes + 8) - chunk_bytes
        parent = next(x for x in (self.target, *self.target.absolute().parents) if x.exists())
        free_bytes = shutil.disk_usage(parent).free
        if free_bytes < needed_bytes:
            raise InvalidArgumentError(
                f"'{self.target}' needs {needed_bytes / 1e9:.2f} GB of disk space, of which "
                f"{free_bytes / 1e9:.2f} GB are free.",
                "free disk space, select fewer columns, or pass a folder on another disk.",
                "shuffle-resources",
            )
        self.work.mkdir(parents=True, exist_ok=True)
        _write(path, json.dumps(manifest).encode())
        return True

    def scatter(self, bar: Any) -> None:
        """Write chunks of rows, grouped by bucket, unless they have been written."""
        for chunk in range(self.num_chunks):
            first = chunk * self.chunk_rows
            num = min(self.chunk_rows, self.num_rows - first)
            if not self._chunk_path(chunk).exists():
                _write(self._chunk_path(chunk), self._make_chunk(first, num))
            bar.update(num)

    def _chunk_path(self, chunk: int) -> Path:
        return self.work / f"chunk-{chunk}"

    def _make_chunk(self, first: int, num: int) -> Iterator[np.ndarray]:
        """Yield the sizes of the buckets in a chunk, its keys and its arrays, by bucket."""
        # A step of this generator gives one number, so that each chunk can be made by itself.
        keys = np.random.PCG64(self.seed).advance(first).random_raw(num)
        buckets = keys >> np.uint64(32)
        buckets *= np.uint64(self.num_buckets)
        buckets >>= np.uint64(32)
        # Integers of 16 bits are sorted in linear time.
        buckets = buckets.astype(np.uint16 if self.num_buckets < 2**16 else np.uint32)
        yield np.bincount(buckets, minlength=self.num_buckets)
        order = np.argsort(buckets, kind="stable")
        yield keys[order]
        del keys, buckets
        for array, dtype in zip(self.arrays.values(), self.dtypes, strict=True):
            values = np.empty((num, *array.shape[1:]), dtype)
            step = max(_READ_ROWS, (getattr(array.source, "chunks", None) or (1,))[0])
            step = max(1, min(step, int(_READ_SHARE * num)))
            for start in range(0, num, step):
                rows = np.arange(start, min(start + step, num))
                values[start : start + step] = array.read(first + rows)
            yield values[order]

    def sort_buckets(self, bar: Any) -> None:
        """Write the rows of each bucket by their keys, unless they have been written."""
        progress = self.work / _PROGRESS
        num_finished = int(progress.read_text()) if progress.exists() else 0
        if not num_finished:
            for (name, array), dtype in zip(self.arrays.items(), self.dtypes, strict=True):
                shape = (self.num_rows, *array.shape[1:])
                np.lib.format.open_memmap(_array_path(self.target, name), "w+", dtype, shape)
        paths = [self._chunk_path(chunk) for chunk in range(self.num_chunks)]
        sizes = np.stack([np.fromfile(path, np.int64, self.num_buckets) for path in paths])
        ends = np.cumsum(sizes.sum(0))
        for bucket, end in enumerate(ends):
            num = int(sizes[:, bucket].sum())
            if bucket >= num_finished:
                self._sort_bucket(sizes, bucket, int(end) - num)
                _write(progress, str(bucket + 1).encode())
            bar.update(num)

    def _sort_bucket(self, sizes: np.ndarray, bucket: int, first: int) -> None:
        """Write the rows of a bucket.

        :param sizes: number of rows of each bucket (axis 1) in each chunk (axis 0).
        :param first: number of rows of the buckets before.
        """
        starts, nums = sizes[:, :bucket].sum(1), sizes[:, bucket]
        offsets = np.full(self.num_chunks, sizes[0].nbytes)  # of an array in the chunks' files

        def read(dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
            values, row_size = np.empty((nums.sum(), *shape), dtype), math.prod(shape)
            row_bytes = row_size * dtype.itemsize
            for chunk, end in enumerate(np.cumsum(nums)):
                offset = int(offsets[chunk] + starts[chunk] * row_bytes)
                path, num = self._chunk_path(chunk), int(nums[chunk])
                rows = np.fromfile(path, dtype, num * row_size, offset=offset)
                values[end - num : end] = rows.reshape(num, *shape)
            offsets[:] += sizes.sum(1) * row_bytes
            return values

        # A stable sort, so that equal keys have the same order with any number of buckets.
        order = np.argsort(read(np.dtype(np.uint64), ()), kind="stable")
        for (name, array), dtype in zip(self.arrays.items(), self.dtypes, strict=True):
            values = read(dtype, array.shape[1:])
            path = _array_path(self.target, name)
            header_bytes = np.load(path, mmap_mode="r").offset
            with path.open("r+b") as file:
                file.seek(header_bytes + first * array.row_size * dtype.itemsize)
                values[order].tofile(file)
                os.fsync(file.fileno())


def _array_path(folder: Path, name: str) -> Path:
    return folder / f"{quote(name, safe=' ')}.npy"


def _write(path: Path, parts: Iterable[np.ndarray] | bytes) -> None:
    """Write a file that is complete once it has its name."""
    partial_path = path.with_name(f"{path.name}.partial")
    with partial_path.open("wb") as file:
        for part in [parts] if isinstance(parts, bytes) else parts:
            file.write(part) if isinstance(part, bytes) else part.tofile(file)
        file.flush()
        os.fsync(file.fileno())
    partial_path.replace(path)
