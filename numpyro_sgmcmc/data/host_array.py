"""What arrays have in common whose rows no device holds as a whole.

Calls of compiled functions to the host, for rows.

Arrays whose rows are read when a minibatch needs them: larger than memory, or on disk.
"""

from __future__ import annotations

import logging
import math
import mmap
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.errors import InvalidArgumentError

__all__ = [
    "HostArray",
    "RowArray",
    "RowIndexError",
    "call_host",
    "count_reads",
    "index_trailing_axes",
    "read_and_prefetch",
    "unwrap_callback_errors",
]

_MAX_INT32_ROWS = 2**31 - 1


class RowIndexError(TypeError):
    """What is said where an array is used otherwise than by its rows.

    :param array: the array.
    :param reason: goes on from its name.
    """

    def __init__(self, array: Any, reason: str) -> None:
        super().__init__(f"{array!r} {reason}")
        self.array = array


class RowArray:
    """An array with rows along its first axis, to be indexed by the indices of a plate.

    Subclasses have ``shape`` and ``dtype``, and find rows in :meth:`_rows_at`.
    """

    _no_whole_array_reason: ClassVar[str]
    """Why the whole array cannot be had, in words that go on from its name."""

    shape: Any
    dtype: Any

    @property
    def is_on_host(self) -> bool:
        """Whether rows are read from the host when they are needed."""
        return False

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def row_size(self) -> int:
        """Numbers in a row."""
        return math.prod(self.shape[1:])

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise RowIndexError(
            self,
            f"{self._no_whole_array_reason}: index it by the indices of its plate, or pass it through "
            "numpyro.subsample.",
        )

    __jax_array__ = __array__

    def __getitem__(self, index: Any) -> Any:
        """Rows by their numbers.

        :param index: integers of any shape, a slice, or a tuple that starts with one of these and
            goes on along the other axes.
        :raises TypeError: for any other index.
        """
        rows, *rest = index if isinstance(index, tuple) and index else (index,)
        is_slice = isinstance(rows, slice)
        if is_slice:
            rows = np.arange(*rows.indices(len(self)))
        is_none = rows is None or rows is Ellipsis
        if is_none or not jnp.issubdtype(jnp.result_type(rows), jnp.integer):
            raise RowIndexError(
                self,
                "is indexed by rows: by the indices of its plate, an integer array or a slice.",
            )
        found = self._get_rows(rows)
        return found[:, *rest] if is_slice else index_trailing_axes(found, jnp.shape(rows), rest)

    def _get_rows(self, indices: Any) -> jax.Array:
        """The rows of these numbers, shape ``(*rows.shape, *shape[1:])``."""
        raise NotImplementedError

    @classmethod
    def _check_shape_and_dtype(cls, shape: tuple[int, ...], dtype: Any) -> None:
        """Refuse what has no rows, other types than numbers, and more rows than indices name."""
        if not shape or shape[0] < 1:
            raise InvalidArgumentError(
                f"{cls.__name__} needs an array with rows, but got shape {shape}."
            )
        if np.dtype(dtype).kind not in "biuf" and "bfloat" not in str(dtype):
            raise InvalidArgumentError(
                f"{cls.__name__} needs integers, floats or booleans, but got dtype {dtype}."
            )
        cls._check_num_rows(shape[0])

    @classmethod
    def _check_num_rows(cls, num_rows: int) -> None:
        if num_rows > _MAX_INT32_ROWS:
            raise InvalidArgumentError(
                f"{cls.__name__} has {num_rows} rows, but indices of rows are 32-bit integers: at "
                f"most {_MAX_INT32_ROWS}. Split the table."
            )


def index_trailing_axes(
    row_values: jax.Array, indices_shape: tuple[int, ...], trailing_index: Sequence[Any]
) -> jax.Array:
    """``array[rows, *rest]`` from ``row_values``, which is ``array[rows]``, for rows of a shape.

    Arrays in ``trailing_index`` are broadcast with the rows, as in ``array[rows, columns]``.
    """
    if not trailing_index:
        return row_values
    size = math.prod(indices_shape)
    places = jnp.arange(size).reshape(indices_shape)
    return row_values.reshape(size, *row_values.shape[len(indices_shape) :])[
        (places, *trailing_index)
    ]


_MAX_CALLBACK_OPERAND_SIZE = 4096


def call_host(fn: Callable[[Any], Any], result_shape_dtypes: Any, operands: Any) -> Any:
    """``jax.pure_callback`` of one device among several, batched under ``vmap``.

    JAX hands large operands over by a thread of the pool in which devices that are threads of one
    CPU wait: where all of them wait for this call, it never comes. Small ones it hands over at
    once, so that operands go in pieces.

    :param fn: a function of NumPy arrays.
    :param result_shape_dtypes: shapes and types of what it returns.
    :param operands: a pytree of arrays.
    """
    leaves, structure = jax.tree.flatten(operands)
    shapes = [x.shape for x in leaves]
    flat = [x.reshape(-1) for x in leaves]
    pieces = [
        [
            x[k : k + _MAX_CALLBACK_OPERAND_SIZE]
            for k in range(0, x.size, _MAX_CALLBACK_OPERAND_SIZE)
        ]
        for x in flat
    ]

    def joined(pieces: list[list[Any]]) -> Any:
        whole = [np.concatenate([np.asarray(x) for x in some], -1) for some in pieces]
        shaped = [x.reshape(*x.shape[:-1], *s) for x, s in zip(whole, shapes, strict=True)]
        return fn(jax.tree.unflatten(structure, shaped))

    return jax.pure_callback(joined, result_shape_dtypes, pieces, vmap_method="broadcast_all")


def read_and_prefetch(
    lookups: Sequence[tuple[Any, str]],
    indices: Mapping[str, jax.Array],
    next_indices: Mapping[str, jax.Array],
    defer_errors: bool = False,
) -> tuple[jax.Array, ...]:
    """Rows of each array inside a compiled function, and a start on those wanted after them.

    :param lookups: the arrays, each with the name of what gives its rows.
    :param indices: integer indices by that name, of three axes.
    :param next_indices: the indices that the next call will ask for, of the same shapes.
    :param defer_errors: whether not to raise what goes wrong, but to give zeros.
    :return: for each array its rows, shape ``(*rows.shape, *array.shape[1:])``; where quiet, also
        whether something has gone wrong.
    """
    forms = tuple(
        jax.ShapeDtypeStruct((*indices[n].shape, *a.shape[1:]), a.dtype) for a, n in lookups
    )

    def fetch(both: Mapping[str, Any]) -> tuple[np.ndarray, ...]:
        arrays = {name: np.asarray(x) for name, x in both.items()}
        found = tuple(a.read_prefetched(arrays[n][..., 0, :, :, :]) for a, n in lookups)
        for array, name in lookups:
            array.prefetch(arrays[name][..., 1, :, :, :])
        return found

    def fetch_quietly(both: Mapping[str, Any]) -> tuple[np.ndarray, ...]:
        try:
            return (*fetch(both), np.array(False))
        except RuntimeError:  # which the array has noted
            return (*(np.zeros(x.shape, x.dtype) for x in forms), np.array(True))

    # As one array: each one that a callback takes costs it some 50 microseconds.
    both = {name: jnp.stack([indices[name], next_indices[name]], -4) for _, name in lookups}
    if defer_errors:
        return call_host(fetch_quietly, (*forms, jax.ShapeDtypeStruct((), bool)), both)
    return jax.pure_callback(fetch, forms, both, vmap_method="broadcast_all")


_MAX_PREFETCHES_PER_READER = 8


_MAX_RESIDENT_MMAP_BYTES = 2**29


_MAX_JUMPS_PER_READ = 256


_PAGE_FAULT_BYTES = 2**16  # what most systems map at a page fault


_MIN_RUN_ROWS = 16


_MAX_FULL_CHECKSUM_BYTES, _NUM_CHECKSUM_ROWS = 2**25, 512


_NUMPY_ARRAY_TYPES = (np.ndarray, np.memmap)


@cache
def _prefetch_executor() -> ThreadPoolExecutor:
    """One thread that reads ahead for all arrays: disks and h5py like one reader best."""
    return ThreadPoolExecutor(1, thread_name_prefix="numpyro_sgmcmc-reader")


@jax.tree_util.register_static
class HostArray(RowArray):
    """Rows that stay where they are until a minibatch needs them.

    Pass it to ``mcmc.run`` in place of the array; the model does not change. It may ask for
    ``X.shape``, index the rows by a plate's indices (``X[i]``, ``X[i, 0]``), or call
    ``numpyro.subsample(X, event_dim=...)``; the whole array it cannot use, since it is never in
    memory. Rows are read a block of iterations ahead, on a thread of their own, while the block
    before computes; full-data passes of the warm-up go by chunks. Draws are those of the same rows
    in memory, with the same key and settings; the warm-up may choose others for rows on the host.

    Two of these are equal only if they are the same object.

    :param source: anything with ``shape``, ``dtype`` and indexing by an integer array along the
        first axis: ``numpy.memmap``, an ``h5py.Dataset``, a Zarr array, a reader of one's own.
        Shape ``(N, ...)``; integers, floats or booleans.
    :param name: what to call it in messages. Default the source's own file or name, if it has one.
    :param sort: whether rows must be asked for in ascending order and once each, as h5py wants it.
        Default: only for h5py.
    :raises ValueError: for a source without rows, or of another type.

    .. doctest::

        >>> rows = HostArray(np.arange(6.0).reshape(3, 2), name="X")
        >>> rows
        HostArray('X', shape=(3, 2), dtype=float32)
        >>> rows[np.array([2, 0])]
        Array([[4., 5.],
               [0., 1.]], dtype=float32)
    """

    _no_whole_array_reason = "is never in memory as a whole"

    def __init__(self, source: Any, *, name: str | None = None, sort: bool | None = None) -> None:
        if hasattr(source, "iloc"):
            raise InvalidArgumentError(
                f"HostArray reads rows by their places, but a {type(source).__name__} gives "
                "them by its labels: pass its to_numpy()."
            )
        try:
            shape, dtype = tuple(int(n) for n in source.shape), np.dtype(source.dtype)
        except (AttributeError, TypeError):
            raise InvalidArgumentError(
                f"HostArray needs a source with a shape and a dtype, but got "
                f"{type(source).__name__}."
            ) from None
        if isinstance(source, HostArray):
            raise InvalidArgumentError(f"{source!r} is a HostArray already.")
        self._check_shape_and_dtype(shape, dtype)
        self._source = source
        # A memory map copies some of its own attributes at every indexing.
        self._backing_array = np.asarray(source) if type(source) in _NUMPY_ARRAY_TYPES else source
        self._dtype = dtype.newbyteorder("=")
        self.shape = shape
        self.name = name or _source_name(source)
        self._needs_sorted_indices = (
            type(source).__module__.startswith("h5py") if sort is None else sort
        )
        self._prefetches: list[tuple[np.ndarray, Future]] = []
        self._lock = Lock()  # each device asks on a thread of its own
        self.num_readers = 1
        found = getattr(source, "_mmap", None)
        self._mmap = found if isinstance(found, mmap.mmap) else None
        self._mmap_bytes = self._mmap.size() if self._mmap else 0
        self._bytes_since_release, self._baseline_resident_bytes = 0, _resident_file_bytes() or 0
        self._is_chunked = hasattr(source, "chunks")
        self._on_read: Callable[[int], None] | None = None
        self.read_error: RuntimeError | None = None
        self.pending_error: RuntimeError | None = (
            None  # a failure that no compiled function has raised
        )

    is_on_host = True

    @property
    def dtype(self) -> np.dtype:
        """The type that its rows have on the device."""
        return jax.dtypes.canonicalize_dtype(self._dtype)

    def __repr__(self) -> str:
        return f"HostArray('{self.name}', shape={self.shape}, dtype={self.dtype})"

    def _get_rows(self, indices: Any) -> jax.Array:
        """Rows, read now, or where they are being traced, when the compiled function runs."""
        if not isinstance(indices, jax.core.Tracer):
            return jnp.asarray(self.read(np.asarray(indices)))
        form = jax.ShapeDtypeStruct((*indices.shape, *self.shape[1:]), self.dtype)
        return jax.pure_callback(self.read, form, indices, vmap_method="broadcast_all")

    def __getstate__(self) -> dict[str, Any]:
        own: dict[str, Any] = {
            "_source": self._backing_array,
            "_prefetches": [],
            "_on_read": None,
            "_mmap": None,
        }
        return {**self.__dict__, **own, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=Lock())

    def read(self, indices: Any) -> np.ndarray:
        """Rows as a NumPy array of shape ``(*rows.shape, *shape[1:])``, each number looked at.

        :param indices: integer array of any shape.
        :raises RuntimeError: naming source and rows, where the source fails, gives something else
            than these rows, or numbers that are not finite.
        """
        indices = np.asarray(indices)
        try:
            values = self._read_flat(indices.ravel())
        except RuntimeError as error:
            self.read_error = error
            raise
        if self._on_read is not None:
            self._on_read(indices.size)
        return values.reshape(*indices.shape, *self.shape[1:])

    def _read_flat(self, indices: np.ndarray) -> np.ndarray:
        num = len(self)
        first, last = (indices.min(), indices.max()) if indices.size else (0, 0)
        if not -num <= first <= last < num:
            outside = indices[(indices < -num) | (indices >= num)]
            raise RuntimeError(f"{self!r} has no {_describe_rows(outside[:5])}.")
        if first < 0:
            indices = np.where(indices < 0, indices + num, indices)
        try:
            values = self._read_from_source(indices)
        except Exception as error:
            raise RuntimeError(
                f"{self!r} could not read {_describe_rows(indices)}: {type(error).__name__}: {error}"
            ) from error
        expected = (indices.size, *self.shape[1:])
        if values.shape != expected:
            raise RuntimeError(
                f"{self!r} gave shape {values.shape} for {_describe_rows(indices)}, where {expected} was "
                "expected."
            )
        if not np.can_cast(values.dtype, self._dtype, "same_kind"):
            raise RuntimeError(
                f"{self!r} gave type {values.dtype} for {_describe_rows(indices)}, where {self._dtype} was "
                "expected."
            )
        if self._dtype.kind in "iu" and self.dtype != self._dtype and indices.size:
            limits = np.iinfo(self.dtype)
            if values.size and (values.min() < limits.min or values.max() > limits.max):
                raise RuntimeError(
                    f"{self!r} holds integers that {self.dtype} cannot, in {_describe_rows(indices)}: switch "
                    "on jax_enable_x64, or give it floats."
                )
        # As the device will have them: what a shorter type cannot hold is infinite there.
        with np.errstate(over="ignore"):
            values = values.astype(self.dtype, copy=False)
        self._check_finite(values, indices)
        return values

    def _read_from_source(self, indices: np.ndarray) -> np.ndarray:
        """The source's rows; long runs of consecutive ones as slices, where those are cheaper."""
        if self._mmap is not None and (size := self._mmap.size()) < self._mmap_bytes:
            # To touch a page that a file no longer has ends the process, without a word.
            raise OSError(f"its file had {self._mmap_bytes} bytes, and now has {size}")
        if type(self._backing_array) is np.ndarray:
            if self._mmap is None or self._backing_array.nbytes <= _MAX_RESIDENT_MMAP_BYTES:
                return self._backing_array.take(indices, 0)
            # A jump to another place may bring much with it, so that there are few between looks.
            jumps = (
                np.flatnonzero(np.diff(indices) != 1)[
                    _MAX_JUMPS_PER_READ - 1 :: _MAX_JUMPS_PER_READ
                ]
                + 1
            )
            parts = []
            for part in np.split(indices, jumps):
                parts.append(self._backing_array.take(part, 0))
                self._release_pages(parts[-1].nbytes)
            return parts[0] if len(parts) == 1 else np.concatenate(parts)
        if self._is_chunked:
            ends = np.flatnonzero(np.diff(indices) != 1) + 1
            if indices.size >= _MIN_RUN_ROWS * (len(ends) + 1):
                found = np.empty((indices.size, *self.shape[1:]), self._dtype)
                for start, end in zip([0, *ends], [*ends, indices.size], strict=True):
                    first = int(indices[start])
                    found[start:end] = _check_unmasked(
                        self._backing_array[first : first + end - start]
                    )
                return found
        if self._needs_sorted_indices:
            distinct, where = np.unique(indices, return_inverse=True)
            return _check_unmasked(self._backing_array[distinct])[where]
        return _check_unmasked(self._backing_array[indices])

    def _check_finite(self, values: np.ndarray, indices: np.ndarray) -> None:
        if not jnp.issubdtype(self._dtype, jnp.floating):
            return
        if values.dtype.char in "fd":  # one pass first, without an array of its own
            flat = values.reshape(-1)
            with np.errstate(over="ignore", invalid="ignore"):
                if np.isfinite(np.dot(flat, flat)):
                    return
        is_finite = np.isfinite(values)
        if not is_finite.all():
            bad = indices[~is_finite.reshape(len(indices), -1).all(1)]
            raise RuntimeError(
                f"{self!r} holds missing or infinite values, for example in {_describe_rows(bad[:5])}. "
                "Clean the source first."
            )

    def checksum(self) -> int:
        """Of all values, or of 512 rows of a source above 32 MB: whether it is the same data."""
        every = len(self) * max(self.row_size, 1) * self._dtype.itemsize <= _MAX_FULL_CHECKSUM_BYTES
        num = len(self) if every else _NUM_CHECKSUM_ROWS
        rows = np.linspace(0, len(self) - 1, num).astype(np.int64)
        return zlib.crc32(np.ascontiguousarray(self.read(rows)).data)

    def _release_pages(self, num_bytes: int) -> None:
        """Let go of a memory map's pages: the system would keep them as this process's memory."""
        assert self._mmap is not None
        resident = _resident_file_bytes()
        if resident is None:
            self._bytes_since_release += num_bytes + _MAX_JUMPS_PER_READ * _PAGE_FAULT_BYTES
        else:
            self._baseline_resident_bytes = min(self._baseline_resident_bytes, resident)
            self._bytes_since_release = resident - self._baseline_resident_bytes
        if self._bytes_since_release > _MAX_RESIDENT_MMAP_BYTES and hasattr(mmap, "MADV_DONTNEED"):
            self._mmap.madvise(mmap.MADV_DONTNEED)
            self._bytes_since_release, self._baseline_resident_bytes = (
                0,
                _resident_file_bytes() or 0,
            )

    def prefetch(self, indices: np.ndarray) -> None:
        """Read rows ahead, on the reader's thread."""
        with self._lock:
            if self._find_prefetch(indices) is None:
                self._prefetches.append((indices, _prefetch_executor().submit(self.read, indices)))
                del self._prefetches[: -_MAX_PREFETCHES_PER_READER * self.num_readers]

    def clear_prefetched(self) -> None:
        """Drop what has been read ahead: the source may change from run to run."""
        self._prefetches.clear()
        self.pending_error = None

    def read_prefetched(self, indices: np.ndarray) -> np.ndarray:
        """Rows read ahead, or now if they were not."""
        with self._lock:
            place = self._find_prefetch(indices)
            ahead = None if place is None else self._prefetches.pop(place)[1]
        if ahead is None:
            return self.read(indices)
        try:
            return ahead.result()
        except RuntimeError as error:
            self.read_error = error
            raise

    def _find_prefetch(self, indices: np.ndarray) -> int | None:
        first = indices.flat[:1]
        for place, (ahead, _) in enumerate(self._prefetches):
            # The first tells most of them apart.
            if ahead.flat[:1] == first and np.array_equal(ahead, indices):
                return place
        return None


@contextmanager
def count_reads(array: HostArray | None, callback: Callable[[int], None]) -> Iterator[None]:
    """Call ``callback`` with the number of rows of the array that have been read since, at each read.

    :param array: the array; None for none.
    """
    if array is None:
        yield
        return
    total = 0

    def add(rows: int) -> None:
        nonlocal total
        total += rows
        callback(total)

    before, array._on_read = array._on_read, add
    try:
        yield
    finally:
        array._on_read = before


@contextmanager
def unwrap_callback_errors(arrays: Sequence[HostArray]) -> Iterator[None]:
    """Raise a source's failure as it was, not as what a compiled function makes of it."""
    for array in arrays:
        array.read_error = array.pending_error = None

    def is_news(record: logging.LogRecord) -> bool:
        return all(array.read_error is None for array in arrays)

    # Where JAX logs a callback's traceback.
    logger = logging.getLogger(jax.pure_callback.__module__)
    logger.addFilter(is_news)
    try:
        yield
    except Exception:  # JAX has several types for it: another at the first call than later
        for array in arrays:
            if array.read_error is not None:
                raise array.read_error from None
        raise
    finally:
        logger.removeFilter(is_news)
    for array in arrays:
        if array.pending_error is not None:
            raise array.pending_error


def _resident_file_bytes() -> int | None:
    """Bytes of mapped files in this process's memory; None where the system does not say.

    How much one page fault brings depends on the system, so that it is asked, and not reckoned.
    """
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[2]) * mmap.PAGESIZE
    except (OSError, IndexError, ValueError):
        return None


def _check_unmasked(values: Any) -> np.ndarray:
    """An array, unless some of its values are missing by a mask, which NumPy would drop."""
    if np.ma.is_masked(values):
        raise InvalidArgumentError("some values are masked")
    return np.asarray(values)


def _describe_rows(indices: np.ndarray) -> str:
    """A few row numbers in words."""
    if indices.size == 1:
        return f"row {indices[0]}"
    if indices.size <= 5:
        return "rows " + ", ".join(map(str, indices))
    return f"{indices.size} rows between {indices.min()} and {indices.max()}"


def _source_name(source: Any) -> str:
    """The source's file, with the place in it, as far as it tells."""
    parts = []
    for found in (getattr(source, "file", None), source, getattr(source, "store", None)):
        for attribute in ("filename", "root"):
            name = getattr(found, attribute, None)
            if isinstance(name, (str, bytes)) or hasattr(name, "__fspath__"):
                parts.append(str(name))
    inside = getattr(source, "name", None) or getattr(source, "path", None)
    if isinstance(inside, str) and inside.strip("/"):
        parts.append(inside.strip("/"))
    return ":".join(parts) or type(source).__name__
