"""Columns of data frames, Parquet files and Arrow files as arrays of a model.

Numbers become 32-bit arrays (64 bits with ``jax_enable_x64``), and categorical columns integer
codes with their levels. All tables are read through Arrow, by blocks: a data frame is one block,
and files have a block for each row group of Parquet or record batch of Arrow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_sgmcmc.data.host_array import find_nonfinite_rows
from numpyro_sgmcmc.errors import InvalidArgumentError, import_optional, summarise_error

Names = str | Sequence[str]

_ARROW_SUFFIXES = (".feather", ".arrow", ".ipc")
# Names of columns in a message.
_MAX_LISTED_NAMES = 8
# Steps between numbers of an array's type, per SD of its column, from which values merge.
_MAX_STEP_SDS = 1e-2


class Table(NamedTuple):
    """Arrays by name, and the levels of categorical columns.

    - **arrays** - NumPy arrays, or :class:`HostArray` for data on disk.
    - **levels** - levels by name of the column. ``levels["city"][code]`` is the city of a code.
    """

    arrays: dict[str, Any]
    levels: dict[str, np.ndarray]


def as_arrays(
    frame: Any,
    columns: Names | Mapping[str, Names] | None = None,
    *,
    categories: Names = (),
    levels: Mapping[str, Sequence[Any]] | None = None,
) -> Table:
    """Return columns of a data frame as NumPy arrays that a model can use.

    Floats become ``float32``, integers and booleans become ``int32``, and categorical columns
    become ``int32`` codes from 0. With ``jax_enable_x64``, columns of 64 bits keep their precision.
    Needs the extra ``parquet``.

    :param frame: pandas or polars data frame, or ``pyarrow.Table``.
    :param columns: names of columns, which are also those of the arrays; or a dict from the name of
        each array to one column, or to a list of columns for a matrix. Default: all columns.
    :param categories: columns of strings or identifiers to encode, with sorted levels. Categorical
        columns are always encoded, and keep their levels in their order. Default: none.
    :param levels: dict from columns to the levels by which to encode them, in the order of the
        codes. For new rows, pass the levels that the call for the fit returned. Default: none.
    :return: a pair ``arrays, levels``.
    :raises ValueError: for columns that do not exist or cannot be converted, and for values that
        are missing, infinite, or not among the ``levels``.

    .. doctest::

        >>> import pandas as pd
        >>> frame = pd.DataFrame({"x": [0.5, 1.5], "z": [2, 3], "city": ["Rome", "Oslo"]})
        >>> arrays, levels = as_arrays(frame, {"X": ["x", "z"], "city": "city"}, categories="city")
        >>> arrays["X"].shape, arrays["city"], levels["city"]
        ((2, 2), array([1, 0], dtype=int32), array(['Oslo', 'Rome'], dtype='<U4'))
        >>> as_arrays(frame[:1], "city", levels=levels).arrays["city"]
        array([1], dtype=int32)
    """
    import_optional("pyarrow", "`as_arrays`", "parquet")
    table = BlockTable([_FrameBlock(frame)], "`frame`", columns, categories, levels=levels)
    for name in table.column_names:
        _check_complete(name, len(find_nonfinite_rows(table.read_block(0, name))))
    for part in table.layout.values():
        for name in set(as_names(part)) - set(table.levels):
            _check_precision(name, table.blocks[0].read(name), table.get_dtype(part))
    arrays = {name: table.read_block(0, part) for name, part in table.layout.items()}
    return Table(arrays, table.levels)


class _Block:
    """Consecutive rows of a table."""

    num_rows: int
    names: list[Any]

    def get_type(self, name: Any, is_encoded: bool) -> Any:
        """Return the Arrow type of a column."""
        raise NotImplementedError

    def has_declared_levels(self, name: Any) -> bool:
        """Return whether a column keeps its levels, also those that do not occur, if encoded."""
        return False

    def get_statistics(self, name: Any) -> tuple[int, Any, Any] | None:
        """Return the number of missing values, minimum and maximum; None where unknown."""
        return None

    def read(self, name: Any) -> Any:
        """Return a column as a ``pyarrow.ChunkedArray``."""
        raise NotImplementedError


class _FrameBlock(_Block):
    """A data frame."""

    def __init__(self, frame: Any) -> None:
        has_rows = hasattr(frame, "iloc") or hasattr(frame, "__arrow_c_stream__")
        if not has_rows or hasattr(frame, "to_frame"):  # a series
            raise InvalidArgumentError(
                f"`frame` is of type {type(frame).__name__}, which is not a data frame.",
                "pass a pandas or polars data frame. Call collect() of a lazy frame, and "
                "to_frame() of a series.",
                "table-columns",
            )
        self._frame, self.num_rows = frame, len(frame)
        self.names = list(getattr(frame, "column_names", getattr(frame, "columns", [])))
        self._columns: dict[Any, Any] = {}

    def get_type(self, name: Any, is_encoded: bool) -> Any:
        if self.names.count(name) > 1:
            raise InvalidArgumentError(
                f"`frame` has several columns with the name '{name}'.",
                "give each column another name.",
                "table-columns",
            )
        dtype = str(getattr(self._frame[name], "dtype", "")).lower()
        if dtype == "object" and not is_encoded:
            raise InvalidArgumentError(
                f"Column '{name}' has dtype object.",
                "convert it to numbers by pandas.to_numeric, or encode it as one of `categories`.",
                "table-columns",
            )
        return self.read(name).type

    def has_declared_levels(self, name: Any) -> bool:
        import pyarrow as pa

        # Of polars' Categorical the levels are those that occur, in no meaningful order.
        is_open = str(getattr(self._frame[name], "dtype", "")) == "Categorical"
        return pa.types.is_dictionary(self.read(name).type) and not is_open

    def read(self, name: Any) -> Any:
        import pyarrow as pa

        if name not in self._columns:
            try:
                if isinstance(self._frame, pa.Table):
                    table = self._frame.select([name])
                elif hasattr(self._frame, "iloc"):
                    table = pa.Table.from_pandas(self._frame[[name]], preserve_index=False)
                else:
                    table = pa.table(self._frame[[name]])
            except (pa.ArrowException, TypeError, ValueError) as error:
                raise InvalidArgumentError(
                    f"Column '{name}' cannot be read: {summarise_error(error)}.",
                    "convert its values to one type, such as numbers or strings.",
                    "table-columns",
                ) from error
            self._columns[name] = table.column(0)
        return self._columns[name]


class _FileBlock(_Block):
    """A row group of a Parquet file, or a record batch of an Arrow file."""

    def __init__(
        self, fragment: Any, index: int, partition_keys: dict[str, Any], positions: dict[str, int]
    ) -> None:
        self._fragment, self._index, self._partition_keys = fragment, index, partition_keys
        self._positions = positions
        self.names = [*fragment.physical_schema.names, *partition_keys]
        if positions:
            self.num_rows = fragment.metadata.row_group(index).num_rows
        else:
            self.num_rows = self._read_batch([0]).num_rows

    def get_type(self, name: str, is_encoded: bool) -> Any:
        import pyarrow as pa

        if name in self._partition_keys:
            return pa.scalar(self._partition_keys[name]).type
        return self._fragment.physical_schema.field(name).type

    def get_statistics(self, name: str) -> tuple[int, Any, Any] | None:
        if name not in self._positions:
            return None
        column = self._fragment.metadata.row_group(self._index).column(self._positions[name])
        statistics = column.statistics
        if statistics is None or not (statistics.has_null_count and statistics.has_min_max):
            return None
        return statistics.null_count, statistics.min, statistics.max

    def read(self, name: str) -> Any:
        import pyarrow as pa

        if name in self._partition_keys:
            value = pa.scalar(self._partition_keys[name])
            return pa.chunked_array([pa.repeat(value, self.num_rows)])
        if self._positions:
            block = self._fragment.subset(row_group_ids=[self._index])
            return block.to_table(columns=[name]).column(0)
        position = self._fragment.physical_schema.get_field_index(name)
        return pa.chunked_array([self._read_batch([position]).column(0)])

    def _read_batch(self, positions: list[int]) -> Any:
        import pyarrow as pa

        options = pa.ipc.IpcReadOptions(included_fields=positions)
        with self._fragment.open() as file:
            return pa.ipc.open_file(file, options=options).get_batch(self._index)


class BlockTable:
    """Columns of a table that is read by blocks, after all checks that do not read every value.

    The levels of categorical columns, missing values and integers beyond 32 bits are found by one
    pass over the columns concerned, or from the statistics in Parquet files.

    :param blocks: blocks of the table, at least one.
    :param source_name: name in messages.
    :param columns: as of :func:`as_arrays`; None in place of names selects all columns.
    :param categories: columns of strings or identifiers to encode.
    :param files: files of the blocks.
    :param levels: levels by column, of columns to encode by these.
    """

    def __init__(
        self,
        blocks: Sequence[_Block],
        source_name: str,
        columns: Any,
        categories: Names,
        files: Sequence[Path] = (),
        levels: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        self.blocks, self.files = blocks, files
        self.starts = np.cumsum([0, *(block.num_rows for block in blocks)])
        names, given_levels = blocks[0].names, levels or {}
        encoded = [*as_names(categories), *given_levels]
        if not isinstance(columns, Mapping):
            selected = names if columns is None else as_names(columns)
            columns = {str(name): name for name in selected}
        self.layout: dict[str, Any] = {
            array: list(names) if part is None else _as_part(part)
            for array, part in columns.items()
        }
        """Column of each array, or a list of the columns of a matrix."""
        selected = [name for part in self.layout.values() for name in as_names(part)]
        unknown = [n for n in [*selected, *encoded] if not all(n in b.names for b in blocks)]
        if unknown or not selected:
            raise InvalidArgumentError(
                f"{source_name} has no column {unknown[0]!r}."
                if unknown
                else f"`columns` selects no column of {source_name}.",
                f"select from {_list_names(names)}. Each file of a folder must have the column.",
                "table-columns",
            )
        self.column_names = list(dict.fromkeys(selected))
        self._level_values: dict[Any, Any] = {}  # as Arrow arrays
        self._dtypes: dict[Any, np.dtype] = {}
        for name in self.column_names:
            is_encoded = name in encoded
            types = {block.get_type(name, is_encoded) for block in blocks}
            dtype = None if is_encoded else _find_dtype(name, types)
            if dtype is None:
                is_given = name in given_levels
                is_declared = not is_given and blocks[0].has_declared_levels(name)
                values = _find_levels(name, blocks, is_encoded and not is_declared)
                if is_given:
                    values = _check_levels(name, values, given_levels[name])
                self._level_values[name] = values
            else:
                _check_values(name, blocks, dtype)
            self._dtypes[name] = dtype or np.dtype(np.int32)
        for array, part in self.layout.items():
            kinds = {name in self._level_values for name in as_names(part)}
            if len(kinds) > 1:
                raise InvalidArgumentError(
                    f"Array '{array}' has numbers and codes of categorical columns.",
                    "select these as separate arrays.",
                    "table-columns",
                )
        self.levels = {n: np.asarray(x.to_pylist()) for n, x in self._level_values.items()}
        """Levels of the categorical columns."""

    def get_dtype(self, part: Any) -> np.dtype:
        """Return the type of an array."""
        common = np.result_type(*(self._dtypes[name] for name in as_names(part)))
        return np.dtype(jax.dtypes.canonicalize_dtype(common))

    def read_block(self, block: int, part: Any) -> np.ndarray:
        """Return the rows of a column, or of a matrix of columns, in one block."""
        if not isinstance(part, list):
            return self._read_column(block, part)
        values = np.empty((self.blocks[block].num_rows, len(part)), self.get_dtype(part))
        for j, name in enumerate(part):
            values[:, j] = self._read_column(block, name)
        return values

    def _read_column(self, block: int, name: Any) -> np.ndarray:
        import pyarrow as pa

        column, dtype = self.blocks[block].read(name), self._dtypes[name]
        if name in self._level_values:
            return _encode(column, self._level_values[name])
        if pa.types.is_decimal(column.type):
            column = column.cast(pa.float64())
        with np.errstate(over="ignore"):  # numbers beyond float32 are infinite
            return column.to_numpy().astype(dtype, copy=False)


class TableRows:
    """Rows of a column or of a matrix of columns, as the source of a :class:`HostArray`.

    :param part: column, or list of columns.
    :param cache_bytes: bytes of blocks that stay in memory; one block stays in any case.
    """

    def __init__(self, table: BlockTable, part: Any, cache_bytes: int) -> None:
        self._table, self._part, self._cache_bytes = table, part, cache_bytes
        width = (len(part),) if isinstance(part, list) else ()
        self.shape, self.dtype = (int(table.starts[-1]), *width), table.get_dtype(part)
        self.levels = {n: table.levels[n] for n in as_names(part) if n in table.levels}
        self._cache: dict[int, np.ndarray] = {}  # the block used last at the end
        self._lock = Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": {}, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=Lock())

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        values = np.empty((len(indices), *self.shape[1:]), self.dtype)
        blocks = np.searchsorted(self._table.starts, indices, "right") - 1
        for block in np.flatnonzero(np.bincount(blocks)):
            is_inside = blocks == block
            rows = indices[is_inside] - self._table.starts[block]
            values[is_inside] = self._get_block(int(block))[rows]
        return values

    def _get_block(self, block: int) -> np.ndarray:
        with self._lock:
            values = self._cache.pop(block, None)
            if values is None:
                row_bytes = self.dtype.itemsize * math.prod(self.shape[1:])
                num_bytes = self._table.blocks[block].num_rows * row_bytes
                while self._cache and self.cached_bytes + num_bytes > self._cache_bytes:
                    del self._cache[next(iter(self._cache))]
                values = self._table.read_block(block, self._part)
            self._cache[block] = values
            return values

    @property
    def max_block_rows(self) -> int:
        """Rows of the largest block."""
        return int(np.diff(self._table.starts).max())

    @property
    def cached_bytes(self) -> int:
        """Bytes of the blocks in memory."""
        return sum(values.nbytes for values in self._cache.values())


def open_files(path: Any, columns: Any, categories: Names, caller: str) -> BlockTable:
    """Open Parquet or Arrow files.

    :param path: file, list of files, or folder, whose files are read in the order of their names;
        parts of paths such as ``year=2020`` are a column.
    :param caller: function in messages.
    """
    import_optional("pyarrow", caller, "parquet")
    import pyarrow as pa
    import pyarrow.dataset as ds

    paths = [Path(x) for x in ([path] if isinstance(path, (str, Path)) else path)]
    files = [file for x in paths for file in (sorted(find_table_files(x)) if x.is_dir() else [x])]
    source_name = f"'{paths[0]}'" if len(paths) == 1 else f"'{files[0]}' or a file after it"
    if not files or not all(file.is_file() for file in files):
        raise InvalidArgumentError(
            f"{source_name} is neither a Parquet or Arrow file nor a folder of such files.",
            "pass the path of a file that ends in .parquet, .feather or .arrow, or its folder.",
            "table-files",
        )
    is_arrow = {file.suffix in _ARROW_SUFFIXES for file in files}
    try:
        encoded = set(as_names(categories))
        table_format = ds.ParquetFileFormat(dictionary_columns=encoded)
        dataset = ds.dataset(
            [str(file) for file in files],
            format="ipc" if is_arrow == {True} else table_format,
            partitioning="hive",
        )
        blocks = [block for x in dataset.get_fragments() for block in _list_blocks(x)]
    except (pa.ArrowException, OSError) as error:
        raise InvalidArgumentError(
            f"{source_name} cannot be opened: {summarise_error(error)}.",
            "check that the files are complete, and are all Parquet files or all Arrow files.",
            "table-files",
        ) from error
    if not any(block.num_rows for block in blocks):
        raise InvalidArgumentError(
            f"{source_name} has no rows.", "check how the files were written.", "table-files"
        )
    return BlockTable(blocks, source_name, columns, categories, files)


def find_table_files(folder: Path) -> list[Path]:
    """Return the Parquet and Arrow files in a folder and the folders below."""
    suffixes = (".parquet", *_ARROW_SUFFIXES)
    return [x for x in folder.rglob("*") if x.suffix in suffixes and x.name[0] not in "._"]


def _list_blocks(fragment: Any) -> list[_FileBlock]:
    import pyarrow as pa
    import pyarrow.dataset as ds

    keys = ds.get_partition_keys(fragment.partition_expression)
    if not isinstance(fragment, ds.ParquetFileFragment):
        with fragment.open() as file:
            num_blocks = pa.ipc.open_file(file).num_record_batches
        return [_FileBlock(fragment, k, keys, {}) for k in range(num_blocks)]
    schema = fragment.metadata.schema
    positions = {schema.column(j).path: j for j in range(len(schema))}
    return [_FileBlock(fragment, k, keys, positions) for k in range(fragment.num_row_groups)]


def as_names(names: Any) -> list[Any]:
    """Return a list of one name or of several, such as the ``columns`` of a data frame."""
    part = _as_part(names)
    return part if isinstance(part, list) else [part]


def _as_part(names: Any) -> Any:
    """Return the name of a column, or a list of the columns of a matrix."""
    return list(names) if isinstance(names, Iterable) and not isinstance(names, str) else names


def _list_names(names: Sequence[Any]) -> str:
    listed, num_others = names[:_MAX_LISTED_NAMES], len(names) - _MAX_LISTED_NAMES
    return ", ".join(map(repr, listed)) + (f" and {num_others} others" if num_others > 0 else "")


def _find_dtype(name: Any, types: set[Any]) -> np.dtype | None:
    """Return the type of a column in an array; None for a categorical column.

    :param types: Arrow types of the column in all blocks.
    """
    from pyarrow import types as kinds

    if any(kinds.is_dictionary(t) for t in types):
        return None
    for t in types:
        if (kinds.is_primitive(t) and not kinds.is_temporal(t)) or kinds.is_decimal(t):
            continue
        is_string = kinds.is_string(t) or kinds.is_large_string(t) or kinds.is_string_view(t)
        raise InvalidArgumentError(
            f"Column '{name}' has type {t}, which is not a type of numbers.",
            "list it in `categories` to get codes and levels."
            if is_string
            else "convert it to numbers, or leave it out with `columns`.",
            "table-columns",
        )
    is_real = any(kinds.is_floating(t) or kinds.is_decimal(t) for t in types)
    is_wide = any(kinds.is_decimal(t) or t.bit_width > 32 or kinds.is_uint32(t) for t in types)
    dtype = f"{'float' if is_real else 'int'}{64 if is_wide else 32}"
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def _check_values(name: Any, blocks: Sequence[_Block], dtype: np.dtype) -> None:
    """Check that a column of numbers has no missing values, and no integers beyond its type."""
    import pyarrow.compute as pc

    num_missing = 0
    for block in blocks:
        statistics = block.get_statistics(name)
        if statistics is None:
            column = block.read(name)
            bounds = pc.min_max(column).as_py()
            statistics = column.null_count, bounds["min"], bounds["max"]
        num_missing += statistics[0]
        extremes = [x for x in statistics[1:] if x is not None and dtype.kind == "i"]
        if any(not np.iinfo(dtype).min <= x <= np.iinfo(dtype).max for x in extremes):
            raise InvalidArgumentError(
                f"Column '{name}' has integers beyond {dtype}'s range.",
                "list the column in `categories` if it has identifiers. Otherwise switch on "
                "jax_enable_x64, or convert the column to floats.",
                "integer-range",
            )
    _check_complete(name, num_missing, "missing values")


def _check_precision(name: Any, column: Any, dtype: np.dtype) -> None:
    """Raise an error where an array's type is too coarse for the values of a column."""
    if not np.issubdtype(dtype, np.floating):
        return
    values = np.asarray(column.to_numpy(), np.float64)
    deviation = float(values.std())
    step = float(np.finfo(dtype).eps * np.abs(values).max(initial=0.0))
    if 0.0 < _MAX_STEP_SDS * deviation < step:
        raise InvalidArgumentError(
            f"Column '{name}' has an SD of {deviation:.3g}, but neighbouring {dtype} numbers as "
            f"large as its values differ by {step:.2g}.",
            "subtract a constant from it, such as its mean.",
            "table-columns",
        )


def _check_complete(name: Any, num_missing: int, what: str = "missing or infinite values") -> None:
    if num_missing:
        raise InvalidArgumentError(
            f"Column '{name}' has {num_missing} {what}.",
            "leave these rows out, or replace the values. Missing levels can be a separate level.",
            "nonfinite-data",
        )


def _find_levels(name: Any, blocks: Sequence[_Block], is_encoded: bool) -> Any:
    """Return the levels of a column as an Arrow array.

    :param is_encoded: whether the levels are the values that occur, sorted. Otherwise they are
        those of a categorical column, in their order if this is the same everywhere, else sorted.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    levels, is_sorted, num_missing = None, is_encoded, 0
    for block in blocks:
        column = block.read(name)
        num_missing += column.null_count
        for chunk in column.chunks:
            values = pc.unique(chunk)
            if pa.types.is_dictionary(chunk.type):
                if chunk.dictionary.null_count:
                    num_missing += chunk.dictionary_decode().null_count - chunk.null_count
                # Not by Arrow's own decoding, which has no strings of polars.
                levels_of_chunk = _normalise(values.dictionary)
                values = levels_of_chunk.take(values.indices) if is_encoded else levels_of_chunk
            values = _normalise(values.drop_null())
            if levels is None:
                levels = values
            elif not levels.equals(values):
                levels, is_sorted = pc.unique(pa.concat_arrays([levels, values])), True
    _check_complete(name, num_missing, "missing levels")
    if levels is None or not len(levels):
        raise InvalidArgumentError(
            f"Column '{name}' has no levels.", "select a column with values.", "table-columns"
        )
    return levels.take(pc.array_sort_indices(levels)) if is_sorted else levels


def _check_levels(name: Any, found: Any, given: Any) -> Any:
    """Return the given levels of a column as an Arrow array, if all values found are among them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        levels = _normalise(pa.array(as_names(given)))
    except (pa.ArrowException, TypeError, ValueError):
        levels = pa.nulls(1)
    if levels.null_count or len(pc.unique(levels)) < len(levels):
        raise InvalidArgumentError(
            f"`levels` of column '{name}' are missing, repeated or of several types.",
            "list each level once, such as the `levels` that `as_arrays` returned for the fit.",
            "unknown-levels",
        )
    known = set(levels.to_pylist())
    if unknown := [x for x in found.to_pylist() if x not in known]:
        raise InvalidArgumentError(
            f"Column '{name}' has values that are not in its `levels`: {_list_names(unknown)}.",
            "leave out the rows with these values, or fit the model with these levels.",
            "unknown-levels",
        )
    return levels


def _normalise(levels: Any) -> Any:
    """Return levels as 64-bit integers, or as strings."""
    import pyarrow as pa

    is_integer = pa.types.is_integer(levels.type) and not pa.types.is_uint64(levels.type)
    return levels.cast(pa.int64() if is_integer else pa.large_string())


def _encode(column: Any, levels: Any) -> np.ndarray:
    """Return the codes of a column without missing values."""
    import pyarrow as pa
    import pyarrow.compute as pc

    parts = [np.empty(0, np.int32)]
    for chunk in column.chunks:
        is_dictionary = pa.types.is_dictionary(chunk.type)
        distinct = chunk.dictionary if is_dictionary else chunk
        codes = pc.fill_null(pc.index_in(_normalise(distinct), value_set=levels), -1).to_numpy()
        parts.append(codes[chunk.indices.to_numpy()] if is_dictionary else codes)
    return np.concatenate(parts)
