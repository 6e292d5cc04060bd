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

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.host_array import (
    HostArray,
    RowArray,
    index_trailing_axes,
    read_and_prefetch,
)
from numpyro_sgmcmc.data.sharded_array import DeviceShardView, HostShardView, ShardedArray, Shards
from numpyro_sgmcmc.errors import InvalidArgumentError

__all__ = [
    "IndexingRecorder",
    "PlateIndexRegistry",
    "PrefetchedRows",
    "RowLookup",
    "ShardedOperands",
    "has_prefetched_rows",
    "is_row_array_or_proxy",
    "read_lookups",
    "with_prefetched_rows",
]


class RowLookup(NamedTuple):
    """An array that the model indexes by a plate's rows.

    - **array** - a :class:`HostArray` or a :class:`ShardedArray`.
    - **plate** - name of the plate.
    """

    array: Any
    plate: str


class PlateIndexRegistry:
    """The rows that plates give out in one run of a model, and by which they are known again.

    A model computes with what a plate gives it (``i // 10``, ``jnp.take(X, i)``), so that it must
    be a JAX array. That leaves no room for a label of ours: ``jax.Array`` cannot be subclassed, and
    JAX drops whatever wraps one. Rows are therefore known by being the very same object. What this
    overlooks, as rows that a ``jit`` in the model has passed on, is taken for an index of the
    user's own: read when the step runs where the array is on the host, refused where it is spread
    over devices; never read wrongly.

    :param indices: rows given out already, by plate.
    """

    def __init__(self, indices: Mapping[str, Any] | None = None) -> None:
        self._indices_by_plate = dict(indices or {})

    def register(self, plate: str, indices: Array) -> Array:
        """The rows, known from now on as those of the plate."""
        self._indices_by_plate[plate] = indices
        return indices

    def find_plate(self, index: Any) -> str | None:
        """The plate whose rows an array is indexed by, in ``X[i]`` or ``X[i, ...]``."""
        first = index[0] if isinstance(index, tuple) and index else index
        return next(
            (plate for plate, rows in self._indices_by_plate.items() if rows is first), None
        )


class _ArrayProxy:
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


def is_row_array_or_proxy(x: Any) -> bool:
    """Whether ``x`` is an array whose rows are on the host or on other devices, or stands in."""
    return isinstance(x, (RowArray, DeviceShardView, _ArrayProxy))


class IndexingRecorder(_ArrayProxy):
    """Notes by which plate's rows it is indexed.

    :param array: the array.
    :param registry: the rows that plates have given out.
    :param lookups: what has been noted.
    :param user_array: the array as the user gave it, where this one is being traced.
    """

    def __init__(
        self,
        array: HostArray | ShardedArray,
        registry: PlateIndexRegistry,
        lookups: dict[RowLookup, None],
        user_array: ShardedArray | None = None,
    ) -> None:
        super().__init__(array)
        self.registry, self.lookups, self.user_array = (
            registry,
            lookups,
            array if user_array is None else user_array,
        )

    def __getitem__(self, index: Any) -> Any:
        plate = self.registry.find_plate(index)
        if plate is not None:
            self.lookups[RowLookup(self.user_array, plate)] = None
        elif isinstance(self.array, ShardedArray):
            raise InvalidArgumentError(
                f"{self.array!r} is indexed by something else than the indices of a plate "
                "whose subsample_size is below its size: a device has no rows but its own."
            )
        return self.array[index]


class PrefetchedRows(_ArrayProxy):
    """Gives the rows that have been read for a step; any others it reads.

    :param array: the array.
    :param registry: the step's rows.
    :param values_by_plate: this array's values there, by plate.
    """

    def __init__(
        self, array: Any, registry: PlateIndexRegistry, values_by_plate: Mapping[str, Array]
    ) -> None:
        super().__init__(array)
        self.registry, self.values_by_plate = registry, values_by_plate

    def __getitem__(self, index: Any) -> Any:
        plate = self.registry.find_plate(index)
        if plate is None or plate not in self.values_by_plate:
            return self.array[index]
        first, *rest = index if isinstance(index, tuple) else (index,)
        return index_trailing_axes(self.values_by_plate[plate], first.shape, rest)


def has_prefetched_rows(arguments: Arguments) -> bool:
    """Whether arrays on the host answer with what has been read for a step."""
    leaves = jax.tree.leaves((arguments.args, arguments.kwargs))
    return any(isinstance(x, PrefetchedRows) for x in leaves)


def with_prefetched_rows(
    arguments: Arguments,
    lookups: tuple[RowLookup, ...],
    indices: Mapping[str, Array],
    values: tuple[Array, ...],
) -> Arguments:
    """The arguments of one step, whose arrays on the host answer with what has been read.

    :param lookups: the arrays, each with the plate that indexes it.
    :param indices: the step's rows, by plate.
    :param values: for each lookup the array's values at its plate's rows.
    """
    issued = PlateIndexRegistry(indices)
    by_array: dict[HostArray | ShardedArray, dict[str, Array]] = {}
    for (array, plate), found in zip(lookups, values, strict=True):
        by_array.setdefault(array, {})[plate] = found

    def read(array: Any) -> Any:
        return PrefetchedRows(array, issued, by_array.get(array, {})) if array.is_on_host else array

    return arguments.map_host_arrays(read).map_sharded_arrays(read)


class ShardedOperands(NamedTuple):
    """What of a step's arguments is spread over devices: operands of a function of one device.

    - **indices** - the step's rows, by plate.
    - **device_arrays** - rows that are on devices.
    - **prefetched_values** - rows that have been read for the step, by plate.
    """

    indices: dict[str, Array]
    device_arrays: list[Any]
    prefetched_values: list[Mapping[str, Array]]

    @classmethod
    def from_arguments(cls, indices: dict[str, Array], arguments: Arguments) -> ShardedOperands:
        """That of some arguments."""
        arrays = [x.array for x in arguments.sharded_arrays if not x.is_on_host]
        return cls(indices, arrays, [x.values_by_plate for x in _sharded_prefetches(arguments)])

    def local_arguments(self, arguments: Arguments, row_offset: Any, num_rows: Any) -> Arguments:
        """The arguments as a model sees them on one device, which has this part.

        :param row_offset: the number of the device's first row among all.
        :param num_rows: how many it has.
        """
        arrays, values, issued = (
            iter(self.device_arrays),
            iter(self.prefetched_values),
            PlateIndexRegistry(self.indices),
        )

        def local(whole: ShardedArray) -> DeviceShardView:
            if whole.is_on_host:
                return HostShardView(whole, row_offset, num_rows)
            return DeviceShardView(whole, next(arrays), row_offset)

        def read(x: Any) -> Any:
            if not _is_sharded_prefetch(x):
                return x
            return PrefetchedRows(local(x.array), issued, next(values))

        args, kwargs = jax.tree.map(
            read, (arguments.args, arguments.kwargs), is_leaf=_is_global_array_or_proxy
        )
        return Arguments(args, kwargs).map_sharded_arrays(local)


def _is_global_array_or_proxy(x: Any) -> bool:
    return isinstance(x, (RowArray, _ArrayProxy))


def _is_sharded_prefetch(x: Any) -> bool:
    return isinstance(x, PrefetchedRows) and isinstance(x.array, ShardedArray)


def _sharded_prefetches(arguments: Arguments) -> list[PrefetchedRows]:
    leaves = jax.tree.leaves((arguments.args, arguments.kwargs), is_leaf=_is_global_array_or_proxy)
    return [x for x in leaves if _is_sharded_prefetch(x)]


def read_lookups(
    lookups: tuple[RowLookup, ...],
    indices: Mapping[str, Array],
    next_indices: Mapping[str, Array],
    chain_axis: str | None = None,
) -> tuple[Array, ...]:
    """:func:`~numpyro_sgmcmc.data.host_array.read_ahead`; of spread rows each device reads its own.

    :param lookups: the arrays, each with the plate that indexes it.
    :param indices: by plate, shape ``(iterations, steps, subsample_size)``, or one more axis of chains
        before these.
    :param next_indices: those that the next call will ask for, of the same shapes.
    :param chain_axis: the mesh axis over which chains are spread, if they are.
    """
    spread = [x for x in lookups if isinstance(x.array, ShardedArray)]
    own = [x for x in lookups if x not in spread]
    found = (
        dict(zip(own, read_and_prefetch(own, indices, next_indices), strict=True)) if own else {}
    )
    if spread:
        shards: Shards = spread[0].array.shards
        names = {x.plate for x in spread}
        chains = (chain_axis,) * (next(iter(indices.values())).ndim - 3)
        spec = PartitionSpec(*chains, None, None, shards.axis)
        values = jax.shard_map(
            partial(_read_local_lookups, spread),
            mesh=shards.mesh,
            in_specs=(spec, spec),
            out_specs=spec,
            check_vma=False,
        )(*({name: x[name] for name in names} for x in (indices, next_indices)))
        found |= dict(zip(spread, values, strict=True))
    return tuple(found[x] for x in lookups)


def _read_local_lookups(
    lookups: list[RowLookup], indices: Mapping[str, Array], next_indices: Mapping[str, Array]
) -> tuple[Array, ...]:
    """One device's part; where one of them cannot read, all raise an error at once."""
    *values, has_failed = read_and_prefetch(lookups, indices, next_indices, defer_errors=True)
    mesh = lookups[0].array.shards.mesh
    num_failed = lax.psum(has_failed.astype(jnp.int32), mesh.axis_names)

    def is_well(num_failed: Any) -> np.ndarray:
        if num_failed:
            failures = [x.array.array.read_error for x in lookups]
            told = [str(x) for x in failures if x is not None]
            raise RuntimeError(
                *told[:1] or ["Another process could not read rows, and says which."]
            )
        return np.array(True)

    # What comes after is given something to wait for.
    is_fine = jax.pure_callback(is_well, jax.ShapeDtypeStruct((), bool), num_failed)
    return tuple(jnp.where(is_fine, x, 0).astype(x.dtype) for x in values)
