"""What arrays have in common whose rows no device holds as a whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.checks import InvalidArgumentError

__all__ = ["RowArray", "RowIndexError", "index_trailing_axes"]

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
