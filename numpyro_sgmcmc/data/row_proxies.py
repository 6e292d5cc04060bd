"""Proxies that a model sees in place of arrays whose rows are on the host or on other devices.

While a model is traced, an :class:`IndexingRecorder` records which plate indexes which array (a
:class:`RowLookup`). While it runs, :class:`PrefetchedRows` answers with the rows that
:func:`read_lookups` has read for the step, and :class:`ShardedOperands` gives each device its part.
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
    ArrayProxy,
    HostArray,
    RowArray,
    index_trailing_axes,
    read_and_prefetch,
    split_index,
)
from numpyro_sgmcmc.data.sharded_array import ShardedArray, Shards, ShardView
from numpyro_sgmcmc.errors import DataReadError, InvalidModelError


class RowLookup(NamedTuple):
    """An array that the model indexes by the indices of a plate."""

    array: Any  # a `HostArray` or a `ShardedArray`
    plate: str  # name of the plate


class PlateIndexRegistry:
    """Indices that plates return in one run of a model, recognised by object identity.

    A model computes with the indices of a plate (``i // 10``, ``jnp.take(X, i)``), so that they
    must be a JAX array, which can neither be subclassed nor labelled. Identity misses indices that
    were passed through a ``jit`` in the model. These are treated as other indices: an array on the
    host is read when the step runs, a sharded array raises an error; rows are never wrong.
    """

    def __init__(self, indices: Mapping[str, Any] | None = None) -> None:
        self._indices_by_plate = dict(indices or {})

    def register(self, plate: str, indices: Array) -> Array:
        """Register and return the indices of a plate."""
        self._indices_by_plate[plate] = indices
        return indices

    def find_plate(self, index: Any) -> str | None:
        """Return the plate whose indices ``X[i]`` or ``X[i, ...]`` uses, or None."""
        first, _ = split_index(index)
        for plate, indices in self._indices_by_plate.items():
            if indices is first:
                return plate
        return None


def is_row_array_or_proxy(x: Any) -> bool:
    """Return whether ``x`` is an array of rows on the host or on devices, or its proxy."""
    return isinstance(x, (RowArray, ArrayProxy))


class IndexingRecorder(ArrayProxy):
    """Proxy that records which plates index it; ``user_array`` is recorded where given."""

    def __init__(
        self,
        array: HostArray | ShardedArray,
        registry: PlateIndexRegistry,
        lookups: dict[RowLookup, None],
        user_array: ShardedArray | None = None,
    ) -> None:
        super().__init__(array)
        self.registry, self.lookups = registry, lookups
        self.user_array = array if user_array is None else user_array

    def __getitem__(self, index: Any) -> Any:
        plate = self.registry.find_plate(index)
        if plate is not None:
            self.lookups[RowLookup(self.user_array, plate)] = None
        elif isinstance(self.array, ShardedArray):
            raise InvalidModelError(
                f"{self.array!r} is not indexed by the indices of a subsampled plate.",
                "index it by the indices of a plate whose subsample_size is below its size.",
                "sharded-indexing",
            )
        return self.array[index]


class PrefetchedRows(ArrayProxy):
    """Proxy that returns the rows read for a step, and reads all others."""

    def __init__(
        self, array: Any, registry: PlateIndexRegistry, values_by_plate: Mapping[str, Array]
    ) -> None:
        super().__init__(array)
        self.registry, self.values_by_plate = registry, values_by_plate

    def __getitem__(self, index: Any) -> Any:
        plate = self.registry.find_plate(index)
        if plate is None or plate not in self.values_by_plate:
            return self.array[index]
        indices, trailing_index = split_index(index)
        return index_trailing_axes(self.values_by_plate[plate], indices.shape, trailing_index)


def has_prefetched_rows(arguments: Arguments) -> bool:
    """Return whether arrays of the arguments are replaced by rows read for a step."""
    leaves = jax.tree.leaves((arguments.args, arguments.kwargs))
    return any(isinstance(x, PrefetchedRows) for x in leaves)


def with_prefetched_rows(
    arguments: Arguments,
    lookups: tuple[RowLookup, ...],
    indices: Mapping[str, Array],
    values: tuple[Array, ...],
) -> Arguments:
    """Return the arguments with the arrays of ``lookups`` replaced by ``values``, a step's rows.

    Other arrays on the host are replaced by proxies that read them.
    """
    registry = PlateIndexRegistry(indices)
    values_by_array: dict[HostArray | ShardedArray, dict[str, Array]] = {}
    for (array, plate), array_values in zip(lookups, values, strict=True):
        values_by_array.setdefault(array, {})[plate] = array_values

    def replace(array: Any) -> Any:
        if not array.is_on_host and array not in values_by_array:
            return array
        return PrefetchedRows(array, registry, values_by_array.get(array, {}))

    return arguments.map_host_arrays(replace).map_sharded_arrays(replace)


class ShardedOperands(NamedTuple):
    """The sharded part of a step's arguments: operands of a function of one device."""

    indices: dict[str, Array]  # indices of the step, by plate
    device_arrays: list[Any]  # rows that are on devices
    prefetched_values: list[Mapping[str, Array]]  # rows that were read for the step, by plate

    @classmethod
    def from_arguments(cls, indices: dict[str, Array], arguments: Arguments) -> ShardedOperands:
        """Return the sharded operands of the arguments."""
        device_arrays = [x.array for x in arguments.sharded_arrays if not x.is_on_host]
        leaves = jax.tree.leaves((arguments.args, arguments.kwargs), is_leaf=is_row_array_or_proxy)
        prefetched_values = [x.values_by_plate for x in leaves if _is_sharded_prefetch(x)]
        return cls(indices, device_arrays, prefetched_values)

    def local_arguments(self, arguments: Arguments, row_offset: Any, num_rows: Any) -> Arguments:
        """Return the arguments that a model sees on the device that has these operands."""
        device_arrays, prefetched_values = iter(self.device_arrays), iter(self.prefetched_values)
        registry = PlateIndexRegistry(self.indices)

        def view(array: ShardedArray) -> ArrayProxy:
            local_array = None if array.is_on_host else next(device_arrays)
            return ShardView(array, row_offset, num_rows, local_array)

        def replace(x: Any) -> Any:
            if _is_sharded_prefetch(x):
                return PrefetchedRows(view(x.array), registry, next(prefetched_values))
            return view(x) if isinstance(x, ShardedArray) else x

        args, kwargs = jax.tree.map(
            replace, (arguments.args, arguments.kwargs), is_leaf=is_row_array_or_proxy
        )
        return Arguments(args, kwargs)


def _is_sharded_prefetch(x: Any) -> bool:
    return isinstance(x, PrefetchedRows) and isinstance(x.array, ShardedArray)


def read_lookups(
    lookups: tuple[RowLookup, ...],
    indices: Mapping[str, Array],
    next_indices: Mapping[str, Array],
    chain_axis: str | None = None,
) -> tuple[Array, ...]:
    """Read rows of each array, and start to read the next ones; each device reads its shard.

    :param indices: indices by plate, shape ``([chains,] iterations, steps, subsample_size)``.
    :param chain_axis: mesh axis over which chains are distributed, if there is one.
    """
    sharded = [x for x in lookups if isinstance(x.array, ShardedArray)]
    local = [x for x in lookups if not isinstance(x.array, ShardedArray)]
    values: dict[RowLookup, Array] = {}
    if local:
        values |= zip(local, read_and_prefetch(local, indices, next_indices), strict=True)
    if sharded:
        shards: Shards = sharded[0].array.shards
        plates = {x.plate for x in sharded}
        chains = (chain_axis,) * (next(iter(indices.values())).ndim - 3)
        spec = PartitionSpec(*chains, None, None, shards.axis)
        sharded_values = jax.shard_map(
            partial(_read_local_lookups, sharded),
            mesh=shards.mesh,
            in_specs=(spec, spec),
            out_specs=spec,
            check_vma=False,
        )(*({plate: x[plate] for plate in plates} for x in (indices, next_indices)))
        values |= zip(sharded, sharded_values, strict=True)
    return tuple(values[x] for x in lookups)


def _read_local_lookups(
    lookups: list[RowLookup], indices: Mapping[str, Array], next_indices: Mapping[str, Array]
) -> tuple[Array, ...]:
    """Read one device's rows; where one device fails, all raise an error."""
    *values, has_failed = read_and_prefetch(lookups, indices, next_indices, defer_errors=True)
    mesh = lookups[0].array.shards.mesh
    num_failed = lax.psum(has_failed.astype(jnp.int32), mesh.axis_names)

    def check(num_failed: Any) -> np.ndarray:
        if num_failed:
            for lookup in lookups:
                if (error := lookup.array.array.read_error) is not None:
                    raise error
            raise DataReadError(
                "Another process could not read rows.",
                "see the error of that process.",
                "host-array-source",
            )
        return np.array(True)

    # The values depend on the check, so that nothing runs before it.
    is_ok = jax.pure_callback(check, jax.ShapeDtypeStruct((), bool), num_failed)
    return tuple(jnp.where(is_ok, x, 0).astype(x.dtype) for x in values)
