"""Arrays whose rows are read when a minibatch needs them: larger than memory, or on disk.

:class:`HostArray` wraps a source of rows, checks every number that it gives, and reads the rows of
coming iterations on a separate thread. :class:`RowArray` is its interface, shared with
:class:`ShardedArray`: an array that can be indexed by rows, and is never available as a whole.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import repeat
from threading import Lock
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.errors import DataReadError, ExplainedError, InvalidArgumentError

# Row indices are 32-bit integers.
_MAX_INT32_ROWS = 2**31 - 1
# Elements per operand of a callback. XLA's CPU client copies small buffers (about 100 kB) inline,
# and larger ones on a thread of its pool.
_MAX_CALLBACK_OPERAND_SIZE = 4096
# Blocks of prefetched rows that an array keeps per device. A run needs one per plate; others are
# left by aborted runs, and the oldest are discarded.
_MAX_PREFETCHES_PER_READER = 8
# Bytes of a memory map that may become resident: a bound on memory.
_MAX_RESIDENT_MMAP_BYTES = 2**29
# Mean length of runs of consecutive rows from which a chunked source is read by slices.
_MIN_RUN_ROWS = 16
# Decoded row groups of Parquet files: 3 of a million rows and 20 columns.
_BLOCK_CACHE_BYTES = 2**28
# Arrays of up to 32 MB are hashed completely, larger ones at evenly spaced rows.
_MAX_FULL_CHECKSUM_BYTES = 2**25
_NUM_CHECKSUM_ROWS = 512
# Rows that are read at once for a checksum: a bound on memory.
_CHECKSUM_READ_ROWS = 8192
# The thread that prefetches for all arrays: disks and h5py prefer one reader.
_PREFETCH_EXECUTOR = ThreadPoolExecutor(1, thread_name_prefix="numpyro_sgmcmc-reader")


class RowIndexError(ExplainedError, TypeError):
    """Raised where a model uses an array other than by its rows; ``array`` is that array."""

    def __init__(self, problem: str, fix: str = "", entry: str = "", array: Any = None) -> None:
        super().__init__(problem, fix, entry)
        self.array = array


class RowArray:
    """An array with rows along its first axis, indexed by the indices of a plate.

    Subclasses have ``shape`` and ``dtype`` and implement :meth:`_get_rows`.
    """

    _location: ClassVar[str]
    """Why the whole array is not available: the predicate of a sentence."""

    shape: Any
    dtype: Any

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def row_size(self) -> int:
        """Number of elements of a row."""
        return math.prod(self.shape[1:])

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise RowIndexError(
            f"{self!r} {self._location}.",
            "index it by the indices of its plate, or pass it through numpyro.subsample.",
            "row-indexing",
            self,
        )

    __jax_array__ = __array__

    def __getitem__(self, index: Any) -> Any:
        """Return rows by their indices.

        :param index: integers of any shape, a slice, or a tuple that begins with one of these and
            continues along the other axes.
        """
        indices, trailing_index = split_index(index)
        if isinstance(indices, slice):
            indices = np.arange(*indices.indices(len(self)))
            return self._get_rows(indices)[:, *trailing_index]
        is_none = indices is None or indices is Ellipsis
        if is_none or not jnp.issubdtype(jnp.result_type(indices), jnp.integer):
            raise RowIndexError(
                f"{self!r} must be indexed by rows.",
                "index it by the indices of its plate, an integer array or a slice.",
                "row-indexing",
                self,
            )
        return index_trailing_axes(self._get_rows(indices), jnp.shape(indices), trailing_index)

    def _get_rows(self, indices: Any) -> jax.Array:
        """Return rows by their indices, shape ``(*indices.shape, *shape[1:])``."""
        raise NotImplementedError

    @classmethod
    def _check_shape_and_dtype(cls, shape: tuple[int, ...], dtype: Any) -> None:
        """Check that there are rows of real numbers, no more than indices can address."""
        if not shape or shape[0] < 1:
            raise InvalidArgumentError(
                f"{cls.__name__} got shape {shape}, which has no rows.",
                "pass an array with the rows along its first axis.",
                "row-array-source",
            )
        if np.dtype(dtype).kind not in "biuf" and "bfloat" not in str(dtype):
            raise InvalidArgumentError(
                f"{cls.__name__} got dtype {dtype}, which is not a type of real numbers.",
                "convert the data to integers, floats or booleans.",
                "row-array-source",
            )
        if shape[0] > _MAX_INT32_ROWS:
            raise InvalidArgumentError(
                f"{cls.__name__} got {shape[0]} rows, more than 32-bit indices can address.",
                f"split the table into parts of at most {_MAX_INT32_ROWS} rows.",
                "row-array-source",
            )


class ArrayProxy:
    """Base of what a model gets in place of an array; all but indexing is that of the array."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __getattr__(self, name: str) -> Any:
        return getattr(self.array, name)

    def __len__(self) -> int:
        return len(self.array)

    def __repr__(self) -> str:
        return repr(self.array)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.array.__array__()

    __jax_array__ = __array__


def split_index(index: Any) -> tuple[Any, list[Any]]:
    """Return the index along the first axis, and those along the other axes."""
    first, *trailing_index = index if isinstance(index, tuple) and index else (index,)
    return first, trailing_index


def index_trailing_axes(
    row_values: jax.Array, indices_shape: tuple[int, ...], trailing_index: Sequence[Any]
) -> jax.Array:
    """Return ``array[indices, *trailing_index]`` from ``row_values``, which is ``array[indices]``.

    Arrays in ``trailing_index`` are broadcast with the indices, as in ``array[rows, columns]``.
    """
    if not trailing_index:
        return row_values
    size = math.prod(indices_shape)
    flat_rows = row_values.reshape(size, *row_values.shape[len(indices_shape) :])
    return flat_rows[(jnp.arange(size).reshape(indices_shape), *trailing_index)]


def check_unmasked(values: Any) -> np.ndarray:
    """Return an array; raise where values are masked, because NumPy would drop the mask."""
    if np.ma.is_masked(values):
        raise InvalidArgumentError(
            "Some values of the data are masked.",
            "leave the masked rows out, or pass the mask to handlers.mask.",
            "masked-data",
        )
    return np.asarray(values)


def exceeds_integer_range(values: np.ndarray, dtype: Any) -> bool:
    """Return whether an integer type cannot hold some of the integers."""
    is_integer = values.dtype.kind in "iu" and np.dtype(dtype).kind in "iu"
    if values.dtype == dtype or not values.size or not is_integer:
        return False
    limits = np.iinfo(dtype)
    return bool(values.min() < limits.min or values.max() > limits.max)


def compute_checksum(arrays: Iterable[Any]) -> int:
    """Return the CRC-32 of the values of some arrays, in order."""
    checksum = 0
    for x in arrays:
        checksum = zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data, checksum)
    return checksum


def select_checksum_rows(num_rows: int, num_bytes: int) -> np.ndarray | range:
    """Return the indices of all rows, or of 512 evenly spaced ones of an array above 32 MB."""
    if num_bytes <= _MAX_FULL_CHECKSUM_BYTES or num_rows <= _NUM_CHECKSUM_ROWS:
        return range(num_rows)
    return np.linspace(0, num_rows - 1, _NUM_CHECKSUM_ROWS).astype(int)


def find_nonfinite_rows(values: np.ndarray) -> np.ndarray:
    """Return the positions along the first axis where a value is missing or infinite."""
    is_finite = not jnp.issubdtype(values.dtype, jnp.floating)
    if values.dtype.char in "fd":  # one pass without a temporary array, where all is well
        with np.errstate(over="ignore", invalid="ignore"):
            is_finite = np.isfinite(np.dot(values.reshape(-1), values.reshape(-1)))
    if is_finite:
        return np.empty(0, np.int64)
    return np.flatnonzero(~np.isfinite(values).all(axis=tuple(range(1, values.ndim))))


def _begins_with_npy_header(rows: np.memmap) -> bool:
    """Return whether the first bytes of a memory map are those of a file in NumPy's format."""
    prefix = np.lib.format.MAGIC_PREFIX
    return np.asarray(rows[: len(prefix)]).tobytes().startswith(prefix)


@jax.tree_util.register_static
class HostArray(RowArray):
    """Rows that stay on disk or on the host until a minibatch needs them.

    Pass a HostArray to ``mcmc.run`` in place of the array. The model does not change. It may use
    ``X.shape``, index the rows by a plate's indices (``X[i]``, ``X[i, 0]``), or call
    ``numpyro.subsample(X, event_dim=...)``. It cannot use the array as a whole, which is never in
    memory. While a chain computes a block of iterations, another thread reads the rows of the next
    block. The warm-up reads all data in chunks. With the same key and settings, the draws are those
    of the same rows in memory, but the warm-up may choose other settings for rows on the host.

    Two HostArrays are equal only if they are the same object.

    :param source: an object of shape ``(N, ...)`` with ``shape``, ``dtype`` and indexing by an
        integer array along the first axis, such as ``numpy.memmap``, an ``h5py.Dataset``, a Zarr
        array, or a reader class. Its values are integers, floats or booleans.
    :param name: name in messages. Default: the source's file or name, if it has one.
    :param sort: whether to request rows in increasing order and once each, as h5py requires.
        Default: True for h5py, False for other sources.
    :raises ValueError: for a source without rows, or of another type.

    .. doctest::

        >>> rows = HostArray(np.arange(6.0).reshape(3, 2), name="X")
        >>> rows
        HostArray('X', shape=(3, 2), dtype=float32)
        >>> rows[np.array([2, 0])]
        Array([[4., 5.],
               [0., 1.]], dtype=float32)
    """

    _location = "is never in memory as a whole"

    def __init__(self, source: Any, *, name: str | None = None, sort: bool | None = None) -> None:
        if hasattr(source, "iloc") or hasattr(source, "__arrow_c_stream__"):
            raise InvalidArgumentError(
                f"HostArray got a {type(source).__name__}, which is indexed by labels.",
                "pass its to_numpy(), or the arrays of numpyro_sgmcmc.as_arrays(frame).",
                "row-array-source",
            )
        try:
            shape, dtype = tuple(int(n) for n in source.shape), np.dtype(source.dtype)
        except (AttributeError, TypeError):
            raise InvalidArgumentError(
                f"HostArray got a {type(source).__name__}, which has no shape and dtype.",
                "pass an array, or a class with shape, dtype and indexing by integer arrays.",
                "row-array-source",
            ) from None
        if isinstance(source, HostArray):
            raise InvalidArgumentError(
                f"{source!r} is a HostArray already.", "pass it as it is.", "row-array-source"
            )
        self._check_shape_and_dtype(shape, dtype)
        if isinstance(source, np.memmap) and _begins_with_npy_header(source):
            raise InvalidArgumentError(
                "HostArray got a memory map of a .npy file whose first rows are the file's header.",
                "open the file with np.load(path, mmap_mode='r').",
                "row-array-source",
            )
        self.shape = shape
        self.name = name or _source_name(source)
        self.num_readers = 1
        """Number of devices that read rows, each on a thread."""
        self.read_error: DataReadError | None = None
        """Last failure."""
        self.pending_error: DataReadError | None = None
        """Failure that no compiled function has raised yet."""
        self.levels: Mapping[str, np.ndarray] = getattr(source, "levels", {})
        """Levels of categorical columns, by name of the column."""
        self.source = source
        # Indexing a memory map copies its attributes each time; the plain array does not.
        is_numpy = type(source) in (np.ndarray, np.memmap)
        self._backing_array = np.asarray(source) if is_numpy else source
        self._dtype = dtype.newbyteorder("=")
        is_h5py = type(source).__module__.startswith("h5py")
        self._needs_sorted_indices = is_h5py if sort is None else sort
        self._is_chunked = hasattr(source, "chunks")
        self._prefetches: dict[tuple[tuple[int, ...], bytes], Future] = {}
        self._lock = Lock()
        self._on_read: Callable[[int], None] | None = None
        file_map = getattr(source, "_mmap", None)
        self._mmap = file_map if isinstance(file_map, mmap.mmap) else None
        self._mmap_bytes = self._mmap.size() if self._mmap else 0
        self._descriptor = self._open_map() if self._mmap and is_numpy else None
        self.max_resident_bytes = _MAX_RESIDENT_MMAP_BYTES
        """Bytes of a memory map that may become resident."""

    is_on_host = True

    def _open_map(self) -> int | None:
        """Open the file of a memory map; None where its rows cannot be read from the file."""
        has_rows = self.source[:1].flags.c_contiguous and self.source.mode != "c"
        if not has_rows or self.source.filename is None or not hasattr(os, "pread"):
            return None
        try:
            descriptor = os.open(self.source.filename, os.O_RDONLY)
        except OSError:
            return None
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    @classmethod
    def from_parquet(
        cls,
        path: Any,
        columns: str | Sequence[str] | None = None,
        *,
        categories: str | Sequence[str] = (),
        name: str | None = None,
        cache_bytes: int = _BLOCK_CACHE_BYTES,
    ) -> HostArray:
        """Return columns of Parquet or Arrow (Feather) files. Needs the extra ``parquet``.

        A row group is decoded as a whole, so that random rows are slow to read.
        :func:`shuffle_rows` writes a copy from which random minibatches are read fast. Columns are
        converted as by :func:`as_arrays`, with the same codes in all files. The attribute
        ``levels`` has the levels of categorical columns.

        :param path: file, list of files, or folder. The files of a folder are read in the order of
            their names. Folders with names such as ``year=2020`` become a column ``year``.
        :param columns: name of a column, or names of the columns of a matrix. Default: all columns.
        :param categories: columns of strings or identifiers to encode, with sorted levels.
        :param name: name in messages. Default: the path.
        :param cache_bytes: bytes of decoded row groups that stay in memory, at least one group.
        :return: an array of shape ``(N,)`` for one column, ``(N, k)`` for k columns.
        :raises ValueError: for columns that do not exist, have missing values, or cannot be
            converted.
        """
        from numpyro_sgmcmc.data.tables import TableRows, open_files

        name = name or str(path)
        table = open_files(path, {name: columns}, categories, "`HostArray.from_parquet`")
        return cls(TableRows(table, table.layout[name], cache_bytes), name=name)

    @property
    def dtype(self) -> np.dtype:
        """Type of the rows on the device."""
        return jax.dtypes.canonicalize_dtype(self._dtype)

    def __repr__(self) -> str:
        return f"HostArray('{self.name}', shape={self.shape}, dtype={self.dtype})"

    def __getstate__(self) -> dict[str, Any]:
        transient: dict = {"_prefetches": {}, "_on_read": None, "_mmap": None, "_lock": None}
        return {**self.__dict__, "source": self._backing_array, "_descriptor": None, **transient}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=Lock())

    def _get_rows(self, indices: Any) -> jax.Array:
        if not isinstance(indices, jax.core.Tracer):
            return jnp.asarray(self.read(np.asarray(indices)))
        result = jax.ShapeDtypeStruct((*indices.shape, *self.shape[1:]), self.dtype)
        return jax.pure_callback(self.read, result, indices, vmap_method="broadcast_all")

    def read(self, indices: Any) -> np.ndarray:
        """Return rows as a NumPy array of shape ``(*indices.shape, *shape[1:])``.

        :raises RuntimeError: naming source and rows, where the source fails, returns something
            other than these rows, or values that are not finite.
        """
        indices = np.asarray(indices)
        try:
            values = self._read_flat(indices.ravel())
        except DataReadError as error:
            self.read_error = error
            raise
        if self._on_read is not None:
            self._on_read(indices.size)
        return values.reshape((*indices.shape, *self.shape[1:]))

    def _read_flat(self, indices: np.ndarray) -> np.ndarray:
        """Return the rows of a one-dimensional array of indices, after all checks."""
        num_rows = len(self)
        first, last = (indices.min(), indices.max()) if indices.size else (0, 0)
        if not -num_rows <= first <= last < num_rows:
            outside = indices[(indices < -num_rows) | (indices >= num_rows)]
            raise DataReadError(
                f"{self!r} has no {_describe_rows(outside[:5])}.",
                f"index rows from 0 to {num_rows - 1}.",
                "host-array-rows",
            )
        if first < 0:
            indices = np.where(indices < 0, indices + num_rows, indices)
        try:
            values = self._read_from_source(indices)
        except InvalidArgumentError:
            raise DataReadError(
                f"{self!r} has masked values in {_describe_rows(indices)}.",
                "leave the masked rows out, or pass the mask to handlers.mask.",
                "masked-data",
            ) from None
        except Exception as error:
            raise DataReadError(
                f"{self!r} could not read {_describe_rows(indices)}: "
                f"{type(error).__name__}: {error}.",
                "check the source, which raised the error.",
                "host-array-source",
            ) from error
        expected_shape = (indices.size, *self.shape[1:])
        if values.shape != expected_shape:
            raise DataReadError(
                f"{self!r} gave shape {values.shape} for {_describe_rows(indices)}, "
                f"not {expected_shape}.",
                "let the source return one row per index, in the order of the indices.",
                "host-array-source",
            )
        if not np.can_cast(values.dtype, self._dtype, "same_kind"):
            raise DataReadError(
                f"{self!r} gave dtype {values.dtype} for {_describe_rows(indices)}, "
                f"not {self._dtype}.",
                "let the source return rows of the dtype that its attribute `dtype` states.",
                "host-array-source",
            )
        if exceeds_integer_range(values, self.dtype):
            raise DataReadError(
                f"{self!r} has integers beyond {self.dtype}'s range in {_describe_rows(indices)}.",
                "switch on jax_enable_x64, or convert the data to floats.",
                "integer-range",
            )
        # In the type of the device: numbers beyond its range are infinite there.
        with np.errstate(over="ignore"):
            values = values.astype(self.dtype, copy=False)
        nonfinite = indices[find_nonfinite_rows(values)]
        if nonfinite.size:
            raise DataReadError(
                f"{self!r} has missing or infinite values, for example in "
                f"{_describe_rows(nonfinite[:5])}.",
                "remove these rows from the source, or replace the values.",
                "nonfinite-data",
            )
        return values

    def _read_from_source(self, indices: np.ndarray) -> np.ndarray:
        """Return the source's rows by non-negative indices, in the cheapest way."""
        if self._mmap is not None and (size := self._mmap.size()) < self._mmap_bytes:
            # Access to a page that the file no longer has would kill the process.
            raise OSError(f"its file had {self._mmap_bytes} bytes, and now has {size}")
        source = self._backing_array
        if type(source) is np.ndarray:
            if self._mmap is None or source.nbytes <= self.max_resident_bytes:
                return source.take(indices, 0)
            if self._descriptor is not None and indices.size:
                return self._read_file(self._mmap, self._descriptor, indices)
            values = source.take(indices, 0)
            if self.source.mode != "c" and hasattr(mmap, "MADV_DONTNEED"):
                self._mmap.madvise(mmap.MADV_DONTNEED)
            return values
        if self._is_chunked and indices.size:
            # Slices are cheaper than indices where runs are long.
            starts, ends = _find_runs(indices)
            if indices.size >= _MIN_RUN_ROWS * len(ends):
                values = np.empty((indices.size, *self.shape[1:]), self._dtype)
                for start, end in zip(starts, ends, strict=True):
                    first = int(indices[start])
                    values[start:end] = check_unmasked(source[first : first + end - start])
                return values
        if self._needs_sorted_indices:
            distinct, positions = np.unique(indices, return_inverse=True)
            return check_unmasked(source[distinct])[positions]
        return check_unmasked(source[indices])

    def _read_file(self, file_map: mmap.mmap, descriptor: int, indices: np.ndarray) -> np.ndarray:
        """Return rows of a memory map from its file, without pages in this process's memory."""
        source = self._backing_array
        stride, row_bytes = source.strides[0], source[:1].nbytes
        starts, ends = _find_runs(indices)
        if stride != row_bytes:
            starts, ends = np.arange(indices.size), np.arange(1, indices.size + 1)
        # A slice of a map has the offset of the map.
        map_start = self.source.offset - self.source.offset % mmap.ALLOCATIONGRANULARITY
        first = source.ctypes.data - np.frombuffer(file_map, np.uint8).ctypes.data + map_start
        places, sizes = first + indices[starts] * stride, (ends - starts) * row_bytes
        parts = map(os.pread, repeat(descriptor), sizes.tolist(), places.tolist())
        return np.frombuffer(bytearray().join(parts), source.dtype).reshape(-1, *self.shape[1:])

    def checksum(self) -> int:
        """Return a CRC of all values, or of 512 evenly spaced rows of a source above 32 MB."""
        num_bytes = len(self) * self.row_size * self._dtype.itemsize
        rows = select_checksum_rows(len(self), num_bytes)
        starts = range(0, len(rows), _CHECKSUM_READ_ROWS)
        return compute_checksum(
            self.read(np.asarray(rows[i : i + _CHECKSUM_READ_ROWS])) for i in starts
        )

    def prefetch(self, indices: np.ndarray) -> None:
        """Start to read rows on the reader's thread."""
        key = (indices.shape, indices.tobytes())
        with self._lock:
            if key not in self._prefetches:
                self._prefetches[key] = _PREFETCH_EXECUTOR.submit(self.read, indices)
            while len(self._prefetches) > _MAX_PREFETCHES_PER_READER * self.num_readers:
                del self._prefetches[next(iter(self._prefetches))]  # the oldest

    def read_prefetched(self, indices: np.ndarray) -> np.ndarray:
        """Return rows that have been prefetched, or read them now."""
        with self._lock:
            future = self._prefetches.pop((indices.shape, indices.tobytes()), None)
        if future is None:
            return self.read(indices)
        try:
            return future.result()
        except DataReadError as error:
            # Again: the run that started the read may have ended since, and reset it.
            self.read_error = error
            raise

    def clear_prefetched(self) -> None:
        """Discard prefetched rows: the source may change between runs."""
        with self._lock:
            self._prefetches.clear()
        self.pending_error = None


def _find_runs(indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    ends = np.flatnonzero(np.diff(indices) != 1) + 1
    return np.r_[0, ends], np.r_[ends, indices.size]


def _describe_rows(indices: np.ndarray) -> str:
    if indices.size == 1:
        return f"row {indices[0]}"
    if indices.size <= 5:
        return "rows " + ", ".join(map(str, indices))
    return f"rows at {indices.size:,} indices between {indices.min()} and {indices.max()}"


def _source_name(source: Any) -> str:
    """Return the source's file and the path inside it, as far as it has these attributes."""
    holders = (getattr(source, "file", None), source, getattr(source, "store", None))
    names = [getattr(x, attribute, None) for x in holders for attribute in ("filename", "root")]
    parts = [str(x) for x in names if isinstance(x, (str, bytes)) or hasattr(x, "__fspath__")]
    inner_path = getattr(source, "name", None) or getattr(source, "path", None)
    if isinstance(inner_path, str) and inner_path.strip("/"):
        parts.append(inner_path.strip("/"))
    return ":".join(parts) or type(source).__name__


# Reads inside compiled functions


def call_host(fn: Callable[[Any], Any], result_shape_dtypes: Any, operands: Any) -> Any:
    """Call a host function from one of several devices, batched under ``vmap``.

    ``jax.pure_callback`` transfers large operands on a thread of the pool in which the devices of
    one CPU run: where all of them wait for this call, it never returns. Small operands are
    transferred inline, so that operands are split into pieces.
    """
    leaves, structure = jax.tree.flatten(operands)
    shapes, size = [x.shape for x in leaves], _MAX_CALLBACK_OPERAND_SIZE
    pieces = [
        [x[start : start + size] for start in range(0, x.size, size)]
        for x in (leaf.reshape(-1) for leaf in leaves)
    ]

    def call(pieces: list[list[Any]]) -> Any:
        flat = [np.concatenate([np.asarray(x) for x in leaf], -1) for leaf in pieces]
        shaped = [x.reshape(*x.shape[:-1], *s) for x, s in zip(flat, shapes, strict=True)]
        return fn(jax.tree.unflatten(structure, shaped))

    return jax.pure_callback(call, result_shape_dtypes, pieces, vmap_method="broadcast_all")


def read_and_prefetch(
    lookups: Sequence[tuple[Any, str]],
    indices: Mapping[str, jax.Array],
    next_indices: Mapping[str, jax.Array],
    defer_errors: bool = False,
) -> list[jax.Array]:
    """Read rows of each array inside a compiled function, and start to read the next ones.

    :param lookups: arrays, each with the name of the plate that indexes it.
    :param indices: indices by plate, with three axes.
    :return: rows of each array, shape ``(*indices.shape, *array.shape[1:])``; with
        ``defer_errors``, zeros where a source fails, and whether it did.
    """
    results = [jax.ShapeDtypeStruct((*indices[n].shape, *a.shape[1:]), a.dtype) for a, n in lookups]

    def fetch(stacked: Mapping[str, Any]) -> list[np.ndarray]:
        by_plate = {name: np.asarray(x) for name, x in stacked.items()}
        rows = [a.read_prefetched(by_plate[n][..., 0, :, :, :]) for a, n in lookups]
        for array, name in lookups:
            array.prefetch(by_plate[name][..., 1, :, :, :])
        return rows

    def fetch_deferring_errors(stacked: Mapping[str, Any]) -> list[np.ndarray]:
        try:
            return [*fetch(stacked), np.array(False)]
        except DataReadError:  # the array keeps it
            return [*(np.zeros(x.shape, x.dtype) for x in results), np.array(True)]

    # One array per plate: each operand of a callback costs about 50 microseconds.
    stacked = {name: jnp.stack([indices[name], next_indices[name]], -4) for _, name in lookups}
    if defer_errors:
        has_failed = jax.ShapeDtypeStruct((), bool)
        return call_host(fetch_deferring_errors, [*results, has_failed], stacked)
    return jax.pure_callback(fetch, results, stacked, vmap_method="broadcast_all")


@contextmanager
def count_reads(array: HostArray, callback: Callable[[int], None]) -> Iterator[None]:
    """Call ``callback`` at each read, with the number of rows read since the context began."""
    total = 0

    def add(num_rows: int) -> None:
        nonlocal total
        total += num_rows
        callback(total)

    previous, array._on_read = array._on_read, add
    try:
        yield
    finally:
        array._on_read = previous


@contextmanager
def unwrap_callback_errors(arrays: Sequence[HostArray]) -> Iterator[None]:
    """Raise the error of a source as it was, without what a compiled function adds to it."""
    for array in arrays:
        array.read_error = array.pending_error = None

    def is_other_error(record: logging.LogRecord) -> bool:
        return all(array.read_error is None for array in arrays)

    # JAX logs a callback's traceback here.
    logger = logging.getLogger(jax.pure_callback.__module__)
    logger.addFilter(is_other_error)
    try:
        yield
    except Exception:  # of several types: JAX raises a different one at the first call
        for array in arrays:
            if array.read_error is not None:
                raise array.read_error from None
        raise
    finally:
        logger.removeFilter(is_other_error)
    for array in arrays:
        if array.pending_error is not None:
            raise array.pending_error
