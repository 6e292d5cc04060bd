r"""Rows sharded over devices and processes: each device computes on the rows that it holds.

A minibatch is stratified: every device samples its part, of the same number of rows. With
:math:`N_s` of the :math:`N` rows on device s, and :math:`\tilde U_s` the minibatch potential of a
model whose rows are those of device s, scaled to N,

.. math:: \tilde U = \sum_s \frac{N_s}{N} \tilde U_s

is unbiased for the potential on all rows, however uneven the shards, and so is its gradient. The
sum is the only communication between devices in a step.

:class:`ShardedArray` holds the rows, on the devices or as a :class:`HostArray` on each host;
:class:`Shards` describes their distribution; :class:`ShardView` replaces the array in a model that
runs on one device.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from numpyro_sgmcmc.data.host_array import (
    ArrayProxy,
    HostArray,
    RowArray,
    call_host,
    check_unmasked,
    exceeds_integer_range,
    find_nonfinite_rows,
    index_trailing_axes,
    split_index,
)
from numpyro_sgmcmc.errors import DataReadError, InvalidArgumentError


class Shards(NamedTuple):
    """Distribution of rows over devices."""

    mesh: Mesh  # the devices
    axis: str | tuple[str, ...]  # mesh axis (or axes) over which the rows are sharded
    rows_per_shard: tuple[int, ...]  # number of rows of each shard, in order

    @property
    def size(self) -> int:
        """Number of rows."""
        return sum(self.rows_per_shard)

    @property
    def max_rows_per_shard(self) -> int:
        """Number of rows of the largest shard, to which the others are padded."""
        return max(self.rows_per_shard)

    @property
    def is_balanced(self) -> bool:
        """True where all shards have the same number of rows."""
        return min(self.rows_per_shard) == self.max_rows_per_shard

    @property
    def row_offsets(self) -> np.ndarray:
        """Index of the first row of each shard."""
        return np.cumsum((0, *self.rows_per_shard[:-1]), dtype=np.int64).astype(np.int32)

    @property
    def chain_axis(self) -> str | None:
        """The other mesh axis, over which chains are distributed, if there is exactly one."""
        row_axes = _axis_names(self.axis)
        others = [name for name in self.mesh.axis_names if name not in row_axes]
        return others[0] if len(others) == 1 else None

    def shard_indices(self, indices: Array) -> Array:
        """Constrain row indices, shape ``(..., num_shards * n)``, to the devices of their rows."""
        spec = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * (indices.ndim - 1), self.axis)
        return lax.with_sharding_constraint(indices, NamedSharding(self.mesh, spec))

    def mean_over_shards(self, fn: Callable[[Any, Any, Any], Any], operands: Any) -> Any:
        """Return the mean of a function's values on the shards, weighted by the numbers of rows.

        :param fn: ``(operands, row_offset, num_rows) -> pytree`` of a shard's part of the operands,
            the index of its first row, and its number of rows (an int where all are equal).
        :param operands: pytree of arrays sharded along their first axis.
        """
        rows_per_shard = jnp.asarray(self.rows_per_shard, jnp.int32)

        def weighted(operands: Any, row_offset: Any, num_rows: Any) -> Any:
            value = fn(operands, row_offset, num_rows)
            weight = rows_per_shard[lax.axis_index(self.axis)] / self.size
            return jax.tree.map(lambda x: weight.astype(x.dtype) * x, value)

        return self.sum_over_shards(weighted, operands, PartitionSpec(self.axis))

    def sum_over_shards(
        self, fn: Callable[[Any, Any, Any], Any], operands: Any, in_spec: PartitionSpec
    ) -> Any:
        """Return the sum of a function's values on the shards, as :meth:`mean_over_shards`."""
        row_offsets = jnp.asarray(self.row_offsets)
        rows_per_shard = jnp.asarray(self.rows_per_shard, jnp.int32)

        def local(operands: Any) -> Any:
            shard = lax.axis_index(self.axis)
            num_rows = self.max_rows_per_shard if self.is_balanced else rows_per_shard[shard]
            return lax.psum(fn(operands, row_offsets[shard], num_rows), self.axis)

        return jax.shard_map(
            local, mesh=self.mesh, in_specs=(in_spec,), out_specs=PartitionSpec(), check_vma=False
        )(operands)


@jax.tree_util.register_pytree_node_class
class ShardedArray(RowArray):
    """Rows that are sharded over devices.

    Pass a ShardedArray to ``mcmc.run`` in place of the array. The model does not change. It may use
    ``X.shape``, which is that of all rows, index the rows by a plate's indices (``X[i]``,
    ``X[i, 0]``), or call ``numpyro.subsample(X, event_dim=...)``. Every device samples its part of
    a minibatch and computes the likelihood of its rows. The gradient is the sum over the devices.
    ``mcmc.run`` converts a ``jax.Array`` that is sharded by rows to a :class:`ShardedArray`.

    With several processes (``jax.distributed``), each process passes the rows that it has, and all
    processes run the same program.

    :param rows: rows of this process, shape ``(n, ...)``, in the order of the devices along the
        axis. A NumPy or JAX array, or an object with ``shape`` and slices, is copied to the
        devices. The rows of a :class:`HostArray` are read when a device needs them.
    :param mesh: the devices. Default: all devices along one axis, "rows". A single process
        distributes its chains along a second axis of the mesh, if the number of chains is a
        multiple of the length of that axis.
    :param axis: mesh axis (or tuple of axes) over which the rows are sharded. Default: the first.
    :param counts: number of rows for each of this process's devices along the axis. Default: as
        equal as possible.
    :param name: name in messages.
    :raises ValueError: for rows, counts or an axis that do not fit each other, for values that are
        masked, missing or infinite, or if the rows of processes have different shapes.

    .. doctest::

        >>> X = ShardedArray(np.arange(6.0, dtype=np.float32).reshape(3, 2), name="X")
        >>> X
        ShardedArray('X', shape=(3, 2), dtype=float32, shards=1)
        >>> X[np.array([2, 0])]
        Array([[4., 5.],
               [0., 1.]], dtype=float32)
    """

    _location = "is on no device as a whole"

    array: Any
    """A JAX array whose shards are padded to the longest, or a :class:`HostArray`."""

    def __init__(
        self,
        rows: Any,
        mesh: Mesh | None = None,
        axis: str | tuple[str, ...] | None = None,
        *,
        counts: Sequence[int] | None = None,
        name: str = "ShardedArray",
    ) -> None:
        if not hasattr(rows, "shape"):
            raise InvalidArgumentError(
                f"ShardedArray got a {type(rows).__name__}, which has no shape.",
                "pass an array with the rows along its first axis.",
                "row-array-source",
            )
        self._check_shape_and_dtype(tuple(rows.shape), rows.dtype)
        if mesh is None:
            mesh = Mesh(np.array(jax.devices()), ("rows",))
        # Without axis types: with explicit axes, every operation of a model would need a sharding.
        mesh = Mesh(mesh.devices, mesh.axis_names)
        axis = mesh.axis_names[0] if axis is None else axis
        if unknown := set(_axis_names(axis)) - set(mesh.axis_names):
            raise InvalidArgumentError(
                f"`axis` names {sorted(unknown)}, which is not an axis of the mesh.",
                f"use one of {list(mesh.axis_names)}.",
                "sharded-rows",
            )
        devices_by_shard = _local_devices_by_shard(mesh, axis)
        if not devices_by_shard:
            raise InvalidArgumentError(
                "`mesh` has no device of this process.",
                "include devices of every process in the mesh.",
                "sharded-rows",
            )
        sizes = _split_rows(len(rows), len(devices_by_shard), counts)
        local_rows_per_shard = dict(zip(devices_by_shard, sizes, strict=True))
        rows_per_shard = _allgather_rows_per_shard(rows, local_rows_per_shard, mesh, axis)
        self.shards, self.name = Shards(mesh, axis, rows_per_shard), name
        self._check_shape_and_dtype((self.shards.size,), rows.dtype)
        if isinstance(rows, HostArray):
            rows.num_readers = max(rows.num_readers, sum(map(len, devices_by_shard.values())))
            self.array = rows
            return
        # Every shard is padded to the longest.
        max_size, pieces, start = self.shards.max_rows_per_shard, [], 0
        for size, devices in zip(sizes, devices_by_shard.values(), strict=True):
            piece = _check_values(rows[start : start + size], start)
            padding = [(0, max_size - size)] + [(0, 0)] * (piece.ndim - 1)
            padded = np.pad(piece, padding, mode="edge")
            pieces += [jax.device_put(padded, device) for device in devices]
            start += size
        self.array = jax.make_array_from_single_device_arrays(
            (len(rows_per_shard) * max_size, *rows.shape[1:]),
            NamedSharding(mesh, PartitionSpec(axis)),
            pieces,
        )

    @classmethod
    def from_padded_array(cls, array: Any, shards: Shards, name: str) -> ShardedArray:
        """Return a ShardedArray of a sharded array whose shards are padded to the longest."""
        sharded = object.__new__(cls)
        sharded.array, sharded.shards, sharded.name = array, shards, name
        return sharded

    @property
    def is_on_host(self) -> bool:
        """True where rows are read from the host when they are needed."""
        return isinstance(self.array, HostArray)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of all rows, without padding."""
        return (self.shards.size, *self.array.shape[1:])

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def __repr__(self) -> str:
        return (
            f"ShardedArray('{self.name}', shape={self.shape}, dtype={self.dtype}, "
            f"shards={len(self.shards.rows_per_shard)})"
        )

    def _get_rows(self, indices: Any) -> Array:
        """Return rows from whichever device or host has them, on all devices; not for a step."""
        indices = jnp.where(indices < 0, indices + self.shards.size, indices)
        if not self.is_on_host:
            return _gather_rows(self.array, self.shards, indices)
        is_traced = isinstance(indices, jax.core.Tracer)
        if jax.process_count() == 1 and not is_traced:
            return jnp.asarray(self.read(np.asarray(indices)))

        def read_own_rows(indices: Array, row_offset: Any, num_rows: Any) -> Array:
            rows = ShardView(self, row_offset, num_rows)[indices]
            is_own = (indices >= row_offset) & (indices < row_offset + num_rows)
            is_own = is_own.reshape(*indices.shape, *[1] * (rows.ndim - indices.ndim))
            return jnp.where(is_own, rows, 0)

        def sum_rows(indices: Any) -> Array:
            return self.shards.sum_over_shards(read_own_rows, indices, PartitionSpec())

        if is_traced:
            return sum_rows(indices).astype(self.dtype)
        return jax.jit(sum_rows)(np.asarray(indices)).astype(self.dtype)

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Read rows of this process from its host, by their indices among all rows."""
        return self.array.read(self._local_indices(indices))

    def read_deferring_errors(self, indices: np.ndarray) -> np.ndarray:
        """Read rows as :meth:`read`, or return NaN where the source fails.

        The other devices would wait forever for one that has raised an error. The array keeps the
        error, to be raised after the program.
        """
        try:
            if self.array.pending_error is None:
                return self.read(indices)
        except DataReadError as error:
            self.array.pending_error = error
        fill_value = np.nan if self.dtype.kind == "f" else 0
        return np.full((*np.shape(indices), *self.shape[1:]), fill_value, self.dtype)

    def prefetch(self, indices: np.ndarray) -> None:
        """Start to read rows of this process, by their indices among all rows."""
        self.array.prefetch(self._local_indices(indices))

    def read_prefetched(self, indices: np.ndarray) -> np.ndarray:
        """Return prefetched rows of this process, by their indices among all rows."""
        if self.array.pending_error is not None:
            raise self.array.pending_error
        return self.array.read_prefetched(self._local_indices(indices))

    def _local_indices(self, indices: np.ndarray) -> np.ndarray:
        """Return indices among this process's rows from those among all rows."""
        global_offsets, local_offsets = _local_shard_offsets(self.shards)
        shard = np.searchsorted(global_offsets, indices, side="right") - 1
        return indices - global_offsets[shard] + local_offsets[shard]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShardedArray) or self.shards != other.shards:
            return False
        a, b = self.array, other.array
        return a is b or (not isinstance(a, Array) and not isinstance(b, Array) and a == b)

    def __hash__(self) -> int:
        is_jax_array = isinstance(self.array, Array)
        return hash((self.shards, id(self.array) if is_jax_array else self.array))

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Shards, str, HostArray | None]]:
        if self.is_on_host:
            return (), (self.shards, self.name, self.array)
        return (self.array,), (self.shards, self.name, None)

    @classmethod
    def tree_unflatten(
        cls, aux: tuple[Shards, str, HostArray | None], children: Any
    ) -> ShardedArray:
        shards, name, host_array = aux
        array = children[0] if host_array is None else host_array
        return cls.from_padded_array(array, shards, name)


class ShardView(ArrayProxy):
    """Rows of one device, in place of the whole array while a model runs there.

    :param num_rows: number of its rows; indices beyond give the last row on the host.
    :param local_array: its rows, or None where they are read from its host.
    """

    def __init__(
        self, array: ShardedArray, row_offset: Any, num_rows: Any, local_array: Any = None
    ) -> None:
        super().__init__(array)
        self.row_offset, self.num_rows, self.local_array = row_offset, num_rows, local_array

    def __getitem__(self, index: Any) -> Array:
        indices, trailing_index = split_index(index)
        if self.local_array is not None:
            return self.local_array[(indices - self.row_offset, *trailing_index)]
        indices = jnp.clip(indices, self.row_offset, self.row_offset + self.num_rows - 1)
        result = jax.ShapeDtypeStruct((*indices.shape, *self.shape[1:]), self.dtype)
        rows = call_host(self.read_deferring_errors, result, indices)
        return index_trailing_axes(rows, indices.shape, trailing_index)


def as_sharded(x: Any) -> Any:
    """Return a JAX array that is sharded by rows as a :class:`ShardedArray`, others as they are."""
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer) or x.ndim == 0:
        return x
    sharding = x.sharding
    if not isinstance(sharding, NamedSharding) or not sharding.spec or sharding.spec[0] is None:
        return x
    axis, mesh = sharding.spec[0], sharding.mesh
    assert isinstance(mesh, Mesh)
    num_shards = _count_shards(mesh, axis)
    if num_shards == 1 or any(other is not None for other in sharding.spec[1:]):
        return x
    if any(kind != jax.sharding.AxisType.Auto for kind in mesh.axis_types):
        raise InvalidArgumentError(
            f"An array of shape {x.shape} is sharded over a mesh with explicit axes.",
            "pass ShardedArray(rows, mesh), or make the mesh with jax.sharding.Mesh.",
            "explicit-mesh-axes",
        )
    shards = Shards(mesh, axis, (x.shape[0] // num_shards,) * num_shards)
    return ShardedArray.from_padded_array(x, shards, f"array of shape {x.shape}")


def _axis_names(axis: str | tuple[str, ...]) -> tuple[str, ...]:
    return (axis,) if isinstance(axis, str) else axis


def _count_shards(mesh: Mesh, axis: str | tuple[str, ...]) -> int:
    return math.prod(mesh.shape[name] for name in _axis_names(axis))


def _local_devices_by_shard(mesh: Mesh, axis: str | tuple[str, ...]) -> dict[int, list[Any]]:
    """Return this process's devices by the number of their shard."""
    sharding = NamedSharding(mesh, PartitionSpec(axis))
    one_row_per_shard = (_count_shards(mesh, axis),)
    devices_by_shard: dict[int, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(one_row_per_shard).items():
        assert index is not None
        devices_by_shard.setdefault(index[0].start or 0, []).append(device)
    return dict(sorted(devices_by_shard.items()))


@cache
def _local_shard_offsets(shards: Shards) -> tuple[np.ndarray, np.ndarray]:
    """Return the first row of each of this process's shards, among all rows and among its rows."""
    local = list(_local_devices_by_shard(shards.mesh, shards.axis))
    sizes = np.array(shards.rows_per_shard)[local]
    return shards.row_offsets[local], np.cumsum(sizes) - sizes


def _split_rows(num_rows: int, num_shards: int, counts: Sequence[int] | None) -> list[int]:
    if counts is None:
        per_shard, rest = divmod(num_rows, num_shards)
        counts = [per_shard + (shard < rest) for shard in range(num_shards)]
    elif len(counts) != num_shards or sum(counts) != num_rows:
        raise InvalidArgumentError(
            f"`counts` is {list(counts)}, but there are {num_shards} devices and {num_rows} rows.",
            "pass the number of rows of each device along the axis.",
            "sharded-rows",
        )
    if min(counts) < 1:
        raise InvalidArgumentError(
            f"ShardedArray got {num_rows} rows for {num_shards} devices, so one would have none.",
            "use a mesh of fewer devices, so that each has a row.",
            "sharded-rows",
        )
    return [int(n) for n in counts]


def _allgather_rows_per_shard(
    rows: Any, local_rows_per_shard: dict[int, int], mesh: Mesh, axis: str | tuple[str, ...]
) -> tuple[int, ...]:
    """Return the number of rows of every shard, exchanged among processes."""
    counts = np.zeros(_count_shards(mesh, axis), np.int32)
    counts[list(local_rows_per_shard)] = list(local_rows_per_shard.values())
    if jax.process_count() == 1:
        return tuple(int(n) for n in counts)
    layout = zlib.crc32(repr((tuple(rows.shape[1:]), np.dtype(rows.dtype).str)).encode())
    all_counts = np.asarray(multihost_utils.process_allgather(counts))
    all_layouts = np.asarray(multihost_utils.process_allgather(np.uint32(layout)))
    if len(set(all_layouts.tolist())) > 1:
        raise InvalidArgumentError(
            "The processes pass rows of different shapes or types. This process passes shape "
            f"{tuple(rows.shape[1:])} and type {rows.dtype}.",
            "pass rows of the same shape and type in every process.",
            "sharded-rows",
        )
    max_counts = all_counts.max(0)
    if ((all_counts != 0) & (all_counts != max_counts)).any():
        raise InvalidArgumentError(
            "Processes that hold the same shard pass different numbers of rows.",
            "pass the same rows in all processes along the other mesh axes.",
            "sharded-rows",
        )
    return tuple(int(n) for n in max_counts)


def _check_values(rows: Any, first: int) -> np.ndarray:
    """Return rows, of which ``first`` is the first, in the type of the devices, without loss."""
    rows = check_unmasked(rows)
    dtype = jax.dtypes.canonicalize_dtype(rows.dtype.newbyteorder("="))
    if exceeds_integer_range(rows, dtype):
        raise InvalidArgumentError(
            f"ShardedArray got integers that {dtype} cannot hold.",
            "switch on jax_enable_x64, or convert the data to floats.",
            "integer-range",
        )
    with np.errstate(over="ignore"):  # numbers beyond the range become infinite
        rows = rows.astype(dtype, copy=False)
    nonfinite = find_nonfinite_rows(rows)
    if nonfinite.size:
        raise InvalidArgumentError(
            f"ShardedArray got missing or infinite values, first in row {first + nonfinite[0]}.",
            "remove these rows, or replace the values.",
            "nonfinite-data",
        )
    return rows


def _gather_rows(array: Any, shards: Shards, indices: Array) -> Array:
    """Return rows by their non-negative indices among all rows, on every device."""
    if not shards.is_balanced:
        ends = jnp.asarray(np.cumsum(shards.rows_per_shard), jnp.int32)
        shard = jnp.searchsorted(ends, indices, side="right")
        local_indices = indices - jnp.asarray(shards.row_offsets)[shard]
        indices = local_indices + shard * shards.max_rows_per_shard
    if any(isinstance(x, jax.core.Tracer) for x in (array, indices)):
        return array[indices]
    return _make_replicated_gather(shards.mesh)(array, np.asarray(indices))


@cache
def _make_replicated_gather(mesh: Mesh) -> Callable[[Array, np.ndarray], Array]:
    """Return the function that gathers rows on all devices of a mesh, compiled once."""
    return jax.jit(lambda a, i: a[i], out_shardings=NamedSharding(mesh, PartitionSpec()))
