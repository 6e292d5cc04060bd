"""What a model sees in place of arrays whose rows are on the host or on other devices.

Such an array must know whether it is indexed by a plate's rows, and of which plate:
:class:`IssuedRows` says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax import Array

from numpyro_sgmcmc.checks import Refusal
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.host import HostArray
from numpyro_sgmcmc.data.rows import RowArray, narrowed
from numpyro_sgmcmc.data.sharded import LocalRows, ShardedArray

__all__ = [
    "IndexedArray",
    "IssuedRows",
    "Recorder",
    "RowsRead",
    "has_rows_read",
    "is_elsewhere",
    "with_rows_read",
]


class IndexedArray(NamedTuple):
    """An array that the model indexes by a plate's rows.

    - **array** - a :class:`HostArray` or a :class:`ShardedArray`.
    - **plate** - name of the plate.
    """

    array: Any
    plate: str


class IssuedRows:
    """The rows that plates give out in one run of a model, and by which they are known again.

    A model computes with what a plate gives it (``i // 10``, ``jnp.take(X, i)``), so that it must
    be a JAX array. That leaves no room for a label of ours: ``jax.Array`` cannot be subclassed, and
    JAX drops whatever wraps one. Rows are therefore known by being the very same object. What this
    overlooks, as rows that a ``jit`` in the model has passed on, is taken for an index of the
    user's own: read when the step runs where the array is on the host, refused where it is spread
    over devices; never read wrongly.

    :param rows: rows given out already, by plate.
    """

    def __init__(self, rows: Mapping[str, Any] | None = None) -> None:
        self._rows = dict(rows or {})

    def issue(self, plate: str, rows: Array) -> Array:
        """The rows, known from now on as those of the plate."""
        self._rows[plate] = rows
        return rows

    def plate_of(self, index: Any) -> str | None:
        """The plate whose rows an array is indexed by, in ``X[i]`` or ``X[i, ...]``."""
        first = index[0] if isinstance(index, tuple) and index else index
        return next((plate for plate, rows in self._rows.items() if rows is first), None)


class _StandIn:
    """What a model sees in place of such an array during one evaluation.

    :param array: the array.
    """

    def __init__(self, array: HostArray | ShardedArray) -> None:
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

    def __getitem__(self, index: Any) -> Any:
        return self.array[index]


def is_elsewhere(x: Any) -> bool:
    """Whether ``x`` is an array whose rows are on the host or on other devices, or stands in."""
    return isinstance(x, (RowArray, LocalRows, _StandIn))


class Recorder(_StandIn):
    """Notes by which plate's rows it is indexed.

    :param array: the array.
    :param issued: the rows that plates have given out.
    :param indexed: what has been noted.
    :param given: the array as the user gave it, where this one is being traced.
    """

    def __init__(
        self,
        array: HostArray | ShardedArray,
        issued: IssuedRows,
        indexed: dict[IndexedArray, None],
        given: ShardedArray | None = None,
    ) -> None:
        super().__init__(array)
        self.issued, self.indexed, self.given = issued, indexed, array if given is None else given

    def __getitem__(self, index: Any) -> Any:
        plate = self.issued.plate_of(index)
        if plate is not None:
            self.indexed[IndexedArray(self.given, plate)] = None
        elif isinstance(self.array, ShardedArray):
            raise Refusal(
                f"{self.array!r} is indexed by something else than the indices of a plate "
                "whose subsample_size is below its size: a device has no rows but its own."
            )
        return self.array[index]


class RowsRead(_StandIn):
    """Gives the rows that have been read for a step; any others it reads.

    :param array: the array.
    :param issued: the step's rows.
    :param values: this array's values there, by plate.
    """

    def __init__(self, array: HostArray, issued: IssuedRows, values: Mapping[str, Array]) -> None:
        super().__init__(array)
        self.issued, self.values = issued, values

    def __getitem__(self, index: Any) -> Any:
        plate = self.issued.plate_of(index)
        if plate is None or plate not in self.values:
            return self.array[index]
        first, *rest = index if isinstance(index, tuple) else (index,)
        return narrowed(self.values[plate], first.shape, rest)


def has_rows_read(arguments: Arguments) -> bool:
    """Whether arrays on the host answer with what has been read for a step."""
    leaves = jax.tree.leaves((arguments.args, arguments.kwargs))
    return any(isinstance(x, RowsRead) for x in leaves)


def with_rows_read(
    arguments: Arguments,
    lookups: tuple[IndexedArray, ...],
    rows: Mapping[str, Array],
    values: tuple[Array, ...],
) -> Arguments:
    """The arguments of one step, whose arrays on the host answer with what has been read.

    :param lookups: the arrays, each with the plate that indexes it.
    :param rows: the step's rows, by plate.
    :param values: for each lookup the array's values at its plate's rows.
    """
    issued = IssuedRows(rows)
    by_array: dict[HostArray, dict[str, Array]] = {}
    for (array, plate), found in zip(lookups, values, strict=True):
        by_array.setdefault(array, {})[plate] = found
    return arguments.map_hosts(lambda a: RowsRead(a, issued, by_array.get(a, {})))
