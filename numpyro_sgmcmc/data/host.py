"""Arrays whose rows are read when a minibatch needs them: larger than memory, or on disk."""

from __future__ import annotations

import logging
import mmap
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.checks import Refusal
from numpyro_sgmcmc.data.rows import RowArray

__all__ = ["HostArray", "counting", "plain_failures"]

_AHEAD = 8
_RELEASE_BYTES = 2**29
_MOST_JUMPS = 256
_FAULT_BYTES = 2**16  # what most systems map at a page fault
_SHORTEST_RUN = 16
_CHECKED_BYTES, _CHECKED_ROWS = 2**25, 512
_PLAIN = (np.ndarray, np.memmap)


@cache
def _reader() -> ThreadPoolExecutor:
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

    _why_not_whole = "is never in memory as a whole"

    def __init__(self, source: Any, *, name: str | None = None, sort: bool | None = None) -> None:
        if hasattr(source, "iloc"):
            raise Refusal(
                f"HostArray reads rows by their places, but a {type(source).__name__} gives "
                "them by its labels: pass its to_numpy()."
            )
        try:
            shape, dtype = tuple(int(n) for n in source.shape), np.dtype(source.dtype)
        except (AttributeError, TypeError):
            raise Refusal(
                f"HostArray needs a source with a shape and a dtype, but got "
                f"{type(source).__name__}."
            ) from None
        if isinstance(source, HostArray):
            raise Refusal(f"{source!r} is a HostArray already.")
        self._check_form(shape, dtype)
        self._source = source
        # A memory map copies some of its own attributes at every indexing.
        self._rows = np.asarray(source) if type(source) in _PLAIN else source
        self._dtype = dtype.newbyteorder("=")
        self.shape = shape
        self.name = name or _name_of(source)
        self._sort = type(source).__module__.startswith("h5py") if sort is None else sort
        self._ahead: list[tuple[np.ndarray, Future]] = []
        self._lock = Lock()  # each device asks on a thread of its own
        self.readers = 1
        found = getattr(source, "_mmap", None)
        self._map = found if isinstance(found, mmap.mmap) else None
        self._map_bytes = self._map.size() if self._map else 0
        self._mapped, self._resident_before = 0, _resident_file_bytes() or 0
        self._by_slices = hasattr(source, "chunks")
        self._on_read: Callable[[int], None] | None = None
        self.failure: RuntimeError | None = None
        self.untold: RuntimeError | None = None  # a failure that no compiled function has raised

    is_on_host = True

    @property
    def dtype(self) -> np.dtype:
        """The type that its rows have on the device."""
        return jax.dtypes.canonicalize_dtype(self._dtype)

    def __repr__(self) -> str:
        return f"HostArray('{self.name}', shape={self.shape}, dtype={self.dtype})"

    def _rows_at(self, rows: Any) -> jax.Array:
        """Rows, read now, or where they are being traced, when the compiled function runs."""
        if not isinstance(rows, jax.core.Tracer):
            return jnp.asarray(self.read(np.asarray(rows)))
        form = jax.ShapeDtypeStruct((*rows.shape, *self.shape[1:]), self.dtype)
        return jax.pure_callback(self.read, form, rows, vmap_method="broadcast_all")

    def __getstate__(self) -> dict[str, Any]:
        own: dict[str, Any] = {"_source": self._rows, "_ahead": [], "_on_read": None, "_map": None}
        return {**self.__dict__, **own, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=Lock())

    def read(self, rows: Any) -> np.ndarray:
        """Rows as a NumPy array of shape ``(*rows.shape, *shape[1:])``, each number looked at.

        :param rows: integer array of any shape.
        :raises RuntimeError: naming source and rows, where the source fails, gives something else
            than these rows, or numbers that are not finite.
        """
        rows = np.asarray(rows)
        try:
            values = self._read(rows.ravel())
        except RuntimeError as error:
            self.failure = error
            raise
        if self._on_read is not None:
            self._on_read(rows.size)
        return values.reshape(*rows.shape, *self.shape[1:])

    def _read(self, rows: np.ndarray) -> np.ndarray:
        num = len(self)
        first, last = (rows.min(), rows.max()) if rows.size else (0, 0)
        if not -num <= first <= last < num:
            outside = rows[(rows < -num) | (rows >= num)]
            raise RuntimeError(f"{self!r} has no {_span(outside[:5])}.")
        if first < 0:
            rows = np.where(rows < 0, rows + num, rows)
        try:
            values = self._take(rows)
        except Exception as error:
            raise RuntimeError(
                f"{self!r} could not read {_span(rows)}: {type(error).__name__}: {error}"
            ) from error
        expected = (rows.size, *self.shape[1:])
        if values.shape != expected:
            raise RuntimeError(
                f"{self!r} gave shape {values.shape} for {_span(rows)}, where {expected} was "
                "expected."
            )
        if not np.can_cast(values.dtype, self._dtype, "same_kind"):
            raise RuntimeError(
                f"{self!r} gave type {values.dtype} for {_span(rows)}, where {self._dtype} was "
                "expected."
            )
        if self._dtype.kind in "iu" and self.dtype != self._dtype and rows.size:
            limits = np.iinfo(self.dtype)
            if values.size and (values.min() < limits.min or values.max() > limits.max):
                raise RuntimeError(
                    f"{self!r} holds integers that {self.dtype} cannot, in {_span(rows)}: switch "
                    "on jax_enable_x64, or give it floats."
                )
        # As the device will have them: what a shorter type cannot hold is infinite there.
        with np.errstate(over="ignore"):
            values = values.astype(self.dtype, copy=False)
        self._check_finite(values, rows)
        return values

    def _take(self, rows: np.ndarray) -> np.ndarray:
        """The source's rows; long runs of consecutive ones as slices, where those are cheaper."""
        if self._map is not None and (size := self._map.size()) < self._map_bytes:
            # To touch a page that a file no longer has ends the process, without a word.
            raise OSError(f"its file had {self._map_bytes} bytes, and now has {size}")
        if type(self._rows) is np.ndarray:
            if self._map is None or self._rows.nbytes <= _RELEASE_BYTES:
                return self._rows.take(rows, 0)
            # A jump to another place may bring much with it, so that there are few between looks.
            jumps = np.flatnonzero(np.diff(rows) != 1)[_MOST_JUMPS - 1 :: _MOST_JUMPS] + 1
            parts = []
            for part in np.split(rows, jumps):
                parts.append(self._rows.take(part, 0))
                self._release(parts[-1].nbytes)
            return parts[0] if len(parts) == 1 else np.concatenate(parts)
        if self._by_slices:
            ends = np.flatnonzero(np.diff(rows) != 1) + 1
            if rows.size >= _SHORTEST_RUN * (len(ends) + 1):
                found = np.empty((rows.size, *self.shape[1:]), self._dtype)
                for start, end in zip([0, *ends], [*ends, rows.size], strict=True):
                    first = int(rows[start])
                    found[start:end] = _unmasked(self._rows[first : first + end - start])
                return found
        if self._sort:
            distinct, where = np.unique(rows, return_inverse=True)
            return _unmasked(self._rows[distinct])[where]
        return _unmasked(self._rows[rows])

    def _check_finite(self, values: np.ndarray, rows: np.ndarray) -> None:
        if not jnp.issubdtype(self._dtype, jnp.floating):
            return
        if values.dtype.char in "fd":  # one pass first, without an array of its own
            flat = values.reshape(-1)
            with np.errstate(over="ignore", invalid="ignore"):
                if np.isfinite(np.dot(flat, flat)):
                    return
        is_finite = np.isfinite(values)
        if not is_finite.all():
            bad = rows[~is_finite.reshape(len(rows), -1).all(1)]
            raise RuntimeError(
                f"{self!r} holds missing or infinite values, for example in {_span(bad[:5])}. "
                "Clean the source first."
            )

    def checksum(self) -> int:
        """Of all values, or of 512 rows of a source above 32 MB: whether it is the same data."""
        every = len(self) * max(self.row_size, 1) * self._dtype.itemsize <= _CHECKED_BYTES
        num = len(self) if every else _CHECKED_ROWS
        rows = np.linspace(0, len(self) - 1, num).astype(np.int64)
        return zlib.crc32(np.ascontiguousarray(self.read(rows)).data)

    def _release(self, num_bytes: int) -> None:
        """Let go of a memory map's pages: the system would keep them as this process's memory."""
        assert self._map is not None
        resident = _resident_file_bytes()
        if resident is None:
            self._mapped += num_bytes + _MOST_JUMPS * _FAULT_BYTES
        else:
            self._resident_before = min(self._resident_before, resident)
            self._mapped = resident - self._resident_before
        if self._mapped > _RELEASE_BYTES and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
            self._mapped, self._resident_before = 0, _resident_file_bytes() or 0

    def start_reading(self, rows: np.ndarray) -> None:
        """Read rows ahead, on the reader's thread."""
        with self._lock:
            if self._place_ahead(rows) is None:
                self._ahead.append((rows, _reader().submit(self.read, rows)))
                del self._ahead[: -_AHEAD * self.readers]

    def forget(self) -> None:
        """Drop what has been read ahead: the source may change from run to run."""
        self._ahead.clear()
        self.untold = None

    def finish_reading(self, rows: np.ndarray) -> np.ndarray:
        """Rows read ahead, or now if they were not."""
        with self._lock:
            place = self._place_ahead(rows)
            ahead = None if place is None else self._ahead.pop(place)[1]
        if ahead is None:
            return self.read(rows)
        try:
            return ahead.result()
        except RuntimeError as error:
            self.failure = error
            raise

    def _place_ahead(self, rows: np.ndarray) -> int | None:
        first = rows.flat[:1]
        for place, (ahead, _) in enumerate(self._ahead):
            # The first tells most of them apart.
            if ahead.flat[:1] == first and np.array_equal(ahead, rows):
                return place
        return None


@contextmanager
def counting(array: HostArray | None, told: Callable[[int], None]) -> Iterator[None]:
    """Call ``told`` with the number of rows of the array that have been read since, at each read.

    :param array: the array; None for none.
    """
    if array is None:
        yield
        return
    total = 0

    def add(rows: int) -> None:
        nonlocal total
        total += rows
        told(total)

    before, array._on_read = array._on_read, add
    try:
        yield
    finally:
        array._on_read = before


@contextmanager
def plain_failures(arrays: Sequence[HostArray]) -> Iterator[None]:
    """Raise a source's failure as it was, not as what a compiled function makes of it."""
    for array in arrays:
        array.failure = array.untold = None

    def is_news(record: logging.LogRecord) -> bool:
        return all(array.failure is None for array in arrays)

    # Where JAX logs a callback's traceback.
    logger = logging.getLogger(jax.pure_callback.__module__)
    logger.addFilter(is_news)
    try:
        yield
    except Exception:  # JAX has several types for it: another at the first call than later
        for array in arrays:
            if array.failure is not None:
                raise array.failure from None
        raise
    finally:
        logger.removeFilter(is_news)
    for array in arrays:
        if array.untold is not None:
            raise array.untold


def _resident_file_bytes() -> int | None:
    """Bytes of mapped files in this process's memory; None where the system does not say.

    How much one page fault brings depends on the system, so that it is asked, and not reckoned.
    """
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[2]) * mmap.PAGESIZE
    except (OSError, IndexError, ValueError):
        return None


def _unmasked(values: Any) -> np.ndarray:
    """An array, unless some of its values are missing by a mask, which NumPy would drop."""
    if np.ma.is_masked(values):
        raise Refusal("some values are masked")
    return np.asarray(values)


def _span(rows: np.ndarray) -> str:
    """A few row numbers in words."""
    if rows.size == 1:
        return f"row {rows[0]}"
    if rows.size <= 5:
        return "rows " + ", ".join(map(str, rows))
    return f"{rows.size} rows between {rows.min()} and {rows.max()}"


def _name_of(source: Any) -> str:
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
