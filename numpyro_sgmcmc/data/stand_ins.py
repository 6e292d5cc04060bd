"""Blocks of rows in a chain's state: read a few iterations ahead, served a step at a time.

A call to the host costs as much as dozens of steps, so that rows come for several iterations at
once. Which ones follows from the chain's key alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jax import Array

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.host import HostArray
from numpyro_sgmcmc.data.rows import RowArray, narrowed
from numpyro_sgmcmc.data.sharded import LocalRows, ShardedArray

__all__ = [
    "Lookup",
    "Recorder",
    "is_elsewhere",
    "served",
]


class Lookup(NamedTuple):
    """An array that the model indexes by a plate's rows.

    - **array** - a :class:`HostArray` or a :class:`ShardedArray`.
    - **plate** - name of the plate.
    """

    array: Any
    plate: str


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
    :param issued: the rows that plates have given out, by name, as the very same objects.
    :param lookups: what has been noted.
    :param given: the array as the user gave it, where this one is being traced.
    """

    def __init__(
        self,
        array: HostArray | ShardedArray,
        issued: Mapping[str, Any],
        lookups: dict[Lookup, None],
        given: ShardedArray | None = None,
    ) -> None:
        super().__init__(array)
        self.issued, self.lookups, self.given = issued, lookups, array if given is None else given

    def __getitem__(self, index: Any) -> Any:
        first = index[0] if isinstance(index, tuple) and index else index
        for plate, rows in self.issued.items():
            if rows is first:
                self.lookups[Lookup(self.given, plate)] = None
                break
        else:
            if isinstance(self.array, ShardedArray):
                raise ValueError(
                    f"{self.array!r} is indexed by something else than the indices of a plate "
                    "whose subsample_size is below its size: a device has no rows but its own."
                )
        return self.array[index]


class Served(_StandIn):
    """Gives the rows that have been read for a step; any others it reads.

    :param array: the array.
    :param values: by plate, the plate's rows of the step and this array's values there.
    """

    def __init__(self, array: HostArray, values: Mapping[str, tuple[Any, Any]]) -> None:
        super().__init__(array)
        self.values = values

    def __getitem__(self, index: Any) -> Any:
        first, *rest = index if isinstance(index, tuple) and index else (index,)
        for rows, values in self.values.values():
            if rows is first:
                return narrowed(values, rows.shape, rest)
        return self.array[index]


def served(
    arguments: Arguments,
    lookups: tuple[Lookup, ...],
    rows: Mapping[str, Array],
    values: tuple[Array, ...],
) -> Arguments:
    """The arguments of one step, whose arrays on the host answer with what has been read.

    :param rows: the step's rows, by plate.
    :param values: for each lookup the array's values at its plate's rows.
    """
    by_array: dict[HostArray, dict[str, tuple[Any, Any]]] = {}
    for (array, plate), found in zip(lookups, values, strict=True):
        by_array.setdefault(array, {})[plate] = (rows[plate], found)
    return arguments.map_hosts(lambda a: Served(a, by_array.get(a, {})))
