"""What a model sees in place of arrays whose rows are on the host or on other devices.

Such an array must know whether it is indexed by a plate's rows, and of which plate:
:class:`IssuedRows` says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from numpyro_sgmcmc.checks import Refusal
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.calls import read_ahead
from numpyro_sgmcmc.data.host import HostArray
from numpyro_sgmcmc.data.rows import RowArray, narrowed
from numpyro_sgmcmc.data.sharded import LocalRows, ReadRows, ShardedArray
from numpyro_sgmcmc.data.shards import Shards

__all__ = [
    "IndexedArray",
    "IssuedRows",
    "Recorder",
    "RowsRead",
    "Spread",
    "has_rows_read",
    "is_elsewhere",
    "read_block",
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

    def __init__(self, array: Any, issued: IssuedRows, values: Mapping[str, Array]) -> None:
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
    by_array: dict[HostArray | ShardedArray, dict[str, Array]] = {}
    for (array, plate), found in zip(lookups, values, strict=True):
        by_array.setdefault(array, {})[plate] = found

    def read(array: Any) -> Any:
        return RowsRead(array, issued, by_array.get(array, {})) if array.is_on_host else array

    return arguments.map_hosts(read).map_sharded(read)


class Spread(NamedTuple):
    """What of a step's arguments is spread over devices: operands of a function of one device.

    - **rows** - the step's rows, by plate.
    - **arrays** - rows that are on devices.
    - **values** - rows that have been read for the step, by plate.
    """

    rows: dict[str, Array]
    arrays: list[Any]
    values: list[Mapping[str, Array]]

    @classmethod
    def of(cls, rows: dict[str, Array], arguments: Arguments) -> Spread:
        """That of some arguments."""
        arrays = [x.array for x in arguments.sharded if not x.is_on_host]
        return cls(rows, arrays, [x.values for x in _spread_reads(arguments)])

    def on_device(self, arguments: Arguments, first: Any, count: Any) -> Arguments:
        """The arguments as a model sees them on one device, which has this part.

        :param first: the number of the device's first row among all.
        :param count: how many it has.
        """
        arrays, values, issued = iter(self.arrays), iter(self.values), IssuedRows(self.rows)

        def local(whole: ShardedArray) -> LocalRows:
            if whole.is_on_host:
                return ReadRows(whole, first, count)
            return LocalRows(whole, next(arrays), first)

        def read(x: Any) -> Any:
            if not _is_spread_read(x):
                return x
            return RowsRead(local(x.array), issued, next(values))

        args, kwargs = jax.tree.map(read, (arguments.args, arguments.kwargs), is_leaf=_is_whole)
        return Arguments(args, kwargs).map_sharded(local)


def _is_whole(x: Any) -> bool:
    return isinstance(x, (RowArray, _StandIn))


def _is_spread_read(x: Any) -> bool:
    return isinstance(x, RowsRead) and isinstance(x.array, ShardedArray)


def _spread_reads(arguments: Arguments) -> list[RowsRead]:
    leaves = jax.tree.leaves((arguments.args, arguments.kwargs), is_leaf=_is_whole)
    return [x for x in leaves if _is_spread_read(x)]


def read_block(
    lookups: tuple[IndexedArray, ...],
    rows: Mapping[str, Array],
    following: Mapping[str, Array],
    chain_axis: str | None = None,
) -> tuple[Array, ...]:
    """:func:`~numpyro_sgmcmc.data.calls.read_ahead`; of spread rows each device reads its own.

    :param lookups: the arrays, each with the plate that indexes it.
    :param rows: by plate, shape ``(iterations, steps, subsample_size)``, or one more axis of chains
        before these.
    :param following: those that the next call will ask for, of the same shapes.
    :param chain_axis: the mesh axis over which chains are spread, if they are.
    """
    spread = [x for x in lookups if isinstance(x.array, ShardedArray)]
    own = [x for x in lookups if x not in spread]
    found = dict(zip(own, read_ahead(own, rows, following), strict=True)) if own else {}
    if spread:
        shards: Shards = spread[0].array.shards
        names = {x.plate for x in spread}
        chains = (chain_axis,) * (next(iter(rows.values())).ndim - 3)
        spec = PartitionSpec(*chains, None, None, shards.axis)
        values = jax.shard_map(
            partial(_read_own, spread),
            mesh=shards.mesh,
            in_specs=(spec, spec),
            out_specs=spec,
            check_vma=False,
        )(*({name: x[name] for name in names} for x in (rows, following)))
        found |= dict(zip(spread, values, strict=True))
    return tuple(found[x] for x in lookups)


def _read_own(
    lookups: list[IndexedArray], rows: Mapping[str, Array], following: Mapping[str, Array]
) -> tuple[Array, ...]:
    """One device's part; where one of them cannot read, all raise an error at once."""
    *values, has_failed = read_ahead(lookups, rows, following, is_quiet=True)
    mesh = lookups[0].array.shards.mesh
    num_failed = lax.psum(has_failed.astype(jnp.int32), mesh.axis_names)

    def is_well(num_failed: Any) -> np.ndarray:
        if num_failed:
            failures = [x.array.array.failure for x in lookups]
            told = [str(x) for x in failures if x is not None]
            raise RuntimeError(
                *told[:1] or ["Another process could not read rows, and says which."]
            )
        return np.array(True)

    # What comes after is given something to wait for.
    is_fine = jax.pure_callback(is_well, jax.ShapeDtypeStruct((), bool), num_failed)
    return tuple(jnp.where(is_fine, x, 0).astype(x.dtype) for x in values)
