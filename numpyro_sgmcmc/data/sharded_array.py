r"""Rows spread over devices and processes: each device computes on the rows that it holds.

A minibatch is stratified: every device draws its own part, of the same number of rows. With
:math:`N_s` of the :math:`N` rows on device s, and :math:`\tilde U_s` the minibatch potential of a
model that thinks its rows stand for all N,

.. math:: \tilde U = \sum_s \frac{N_s}{N} \tilde U_s

is unbiased for the potential on all rows, however uneven the shards, and so is its gradient. The
sum is the one thing that devices tell each other in a step.

Rows spread over devices and processes: on each device, or on the disk of its host.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from numpyro_sgmcmc.data.host_array import HostArray, RowArray, call_host, index_trailing_axes
from numpyro_sgmcmc.errors import InvalidArgumentError

__all__ = [
    "DeviceShardView",
    "HostShardView",
    "ShardedArray",
    "Shards",
    "allgather_rows_per_shard",
    "as_sharded",
    "local_devices_by_shard",
    "split_rows",
]


class Shards(NamedTuple):
    """Which device holds which rows.

    - **mesh** - the devices.
    - **axis** - the mesh axis (or axes) over which rows are spread.
    - **rows_per_shard** - rows of each shard, in order.
    """

    mesh: Mesh
    axis: str | tuple[str, ...]
    rows_per_shard: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of rows."""
        return sum(self.rows_per_shard)

    @property
    def max_rows_per_shard(self) -> int:
        """Rows of the largest shard; the others are padded to it."""
        return max(self.rows_per_shard)

    @property
    def is_balanced(self) -> bool:
        """Whether all shards have the same number of rows."""
        return min(self.rows_per_shard) == self.max_rows_per_shard

    @property
    def row_offsets(self) -> np.ndarray:
        """The first row of each shard."""
        return np.cumsum((0, *self.rows_per_shard[:-1]), dtype=np.int64).astype(np.int32)

    @property
    def chain_axis(self) -> str | None:
        """The other mesh axis, over which chains are spread, if there is exactly one."""
        taken = (self.axis,) if isinstance(self.axis, str) else self.axis
        others = [name for name in self.mesh.axis_names if name not in taken]
        return others[0] if len(others) == 1 else None

    @property
    def partition_spec(self) -> PartitionSpec:
        """First axis spread over the shards."""
        return PartitionSpec(self.axis)

    def shard_indices(self, indices: Array) -> Array:
        """Row indices of shape ``(..., num_shards * n)``, each shard's part where it is needed."""
        spec = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * (indices.ndim - 1), self.axis)
        return lax.with_sharding_constraint(indices, NamedSharding(self.mesh, spec))

    def mean_over_shards(self, fn: Callable[[Any, Any, Any], Any], operands: Any) -> Any:
        """The mean of a function's values on the shards, weighted by their numbers of rows.

        :param fn: ``(operands, first, count) -> pytree`` of a shard's part of the operands, its
            first row, and its number of rows (an int where all have the same).
        :param operands: pytree of arrays spread over the shards along their first axis.
        """
        counts = jnp.asarray(self.rows_per_shard, jnp.int32)

        def weighted(operands: Any, first: Any, count: Any) -> Any:
            value = fn(operands, first, count)
            share = counts[lax.axis_index(self.axis)] / self.size
            return jax.tree.map(lambda x: share.astype(x.dtype) * x, value)

        return self._psum_over_shards(weighted, operands, self.partition_spec)

    def sum_over_shards(self, fn: Callable[[Any, Any, Any], Any], operands: Any) -> Any:
        """The sum of a function's values on the shards, as for :meth:`average`.

        :param operands: pytree of arrays that every shard gets as a whole.
        """
        return self._psum_over_shards(fn, operands, PartitionSpec())

    def _psum_over_shards(
        self, fn: Callable[[Any, Any, Any], Any], operands: Any, in_spec: PartitionSpec
    ) -> Any:
        firsts, counts = jnp.asarray(self.row_offsets), jnp.asarray(self.rows_per_shard, jnp.int32)

        def local(operands: Any) -> Any:
            shard = lax.axis_index(self.axis)
            count = self.max_rows_per_shard if self.is_balanced else counts[shard]
            return lax.psum(fn(operands, firsts[shard], count), self.axis)

        return jax.shard_map(
            local, mesh=self.mesh, in_specs=(in_spec,), out_specs=PartitionSpec(), check_vma=False
        )(operands)


def local_devices_by_shard(mesh: Mesh, axis: str | tuple[str, ...]) -> dict[int, list[Any]]:
    """This process's devices by their place along the axis."""
    names = (axis,) if isinstance(axis, str) else axis
    places = [mesh.axis_names.index(name) for name in names]
    own: dict[int, list[Any]] = {}
    for index, device in np.ndenumerate(mesh.devices):
        if device.process_index == jax.process_index():
            lengths = [mesh.devices.shape[p] for p in places]
            place = int(np.ravel_multi_index([index[p] for p in places], lengths))
            own.setdefault(place, []).append(device)
    return dict(sorted(own.items()))


def split_rows(num_rows: int, num_shards: int, counts: Sequence[int] | None) -> list[int]:
    """Rows of each part."""
    if counts is None:
        each, rest = divmod(num_rows, num_shards)
        counts = [each + (part < rest) for part in range(num_shards)]
    elif len(counts) != num_shards or sum(counts) != num_rows:
        raise InvalidArgumentError(
            f"`counts` is {list(counts)}, but must give the rows of {num_shards} devices, "
            f"{num_rows} in all."
        )
    if min(counts) < 1:
        raise InvalidArgumentError(
            f"ShardedArray has {num_rows} rows for {num_shards} devices, but every device needs "
            "one at least: use a mesh of fewer devices."
        )
    return [int(n) for n in counts]


def allgather_rows_per_shard(
    rows: Any, local_rows_per_shard: dict[int, int], mesh: Mesh, axis: str | tuple[str, ...]
) -> tuple[int, ...]:
    """Rows of every shard, which processes tell each other."""
    names = (axis,) if isinstance(axis, str) else axis
    counts = np.zeros(math.prod(mesh.shape[name] for name in names), np.int32)
    counts[list(local_rows_per_shard)] = list(local_rows_per_shard.values())
    if jax.process_count() == 1:
        return tuple(int(n) for n in counts)
    form = zlib.crc32(repr((tuple(rows.shape[1:]), np.dtype(rows.dtype).str)).encode())
    told = np.asarray(multihost_utils.process_allgather(counts))
    forms = np.asarray(multihost_utils.process_allgather(np.uint32(form)))
    if len(set(forms.tolist())) > 1:
        raise InvalidArgumentError(
            f"The processes give rows of different shapes or types; here they are "
            f"{tuple(rows.shape[1:])}, {rows.dtype}."
        )
    agreed = told.max(0)
    if ((told != 0) & (told != agreed)).any():
        raise InvalidArgumentError(
            "Processes that share a place along the rows' axis give different numbers of rows."
        )
    return tuple(int(n) for n in agreed)


@jax.tree_util.register_pytree_node_class
class ShardedArray(RowArray):
    """Rows spread over devices, for ``mcmc.run`` in place of the array; the model does not change.

    The model may ask for ``X.shape``, which is that of all rows, index the rows by a plate's
    indices (``X[i]``, ``X[i, 0]``), or call ``numpyro.subsample(X, event_dim=...)``. Every device
    draws its own part of a minibatch and computes the likelihood where the rows are; one sum over
    the devices makes the gradient. A ``jax.Array`` that is spread by rows already is taken as one
    of these.

    With several processes (``jax.distributed``) each gives the rows that it has, and all run the
    same program.

    :param rows: the rows of this process, shape ``(n, ...)``: a NumPy or JAX array, or anything
        with ``shape`` and slices, which are copied to the devices; a :class:`HostArray`, whose rows
        stay where they are, and are read for each device as it needs its own. Their order is that
        of the devices along the axis.
    :param mesh: the devices. Default: all of them along one axis, "rows". Along a second axis of
        the mesh a single process spreads its chains, if their number is a multiple of its length.
    :param axis: the mesh axis (or tuple of axes) over which rows are spread. Default the first.
    :param counts: rows for each of this process's devices along the axis. Default: as equal as can
        be.
    :param name: what to call it in messages.
    :raises ValueError: for rows, counts or an axis that do not fit, or processes whose rows have
        different shapes.

    .. doctest::

        >>> X = ShardedArray(np.arange(6.0, dtype=np.float32).reshape(3, 2), name="X")
        >>> X
        ShardedArray('X', shape=(3, 2), dtype=float32, shards=1)
        >>> X[np.array([2, 0])]
        Array([[4., 5.],
               [0., 1.]], dtype=float32)
    """

    _no_whole_array_reason = "is on no device as a whole"

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
                f"ShardedArray needs an array with rows, but got {type(rows).__name__}."
            )
        self._check_shape_and_dtype(tuple(rows.shape), rows.dtype)
        if mesh is None:
            mesh = Mesh(np.array(jax.devices()), ("rows",))
        # Without types on its axes: explicit ones would be asked for at every operation of a model.
        mesh = Mesh(mesh.devices, mesh.axis_names)
        axis = mesh.axis_names[0] if axis is None else axis
        unknown = set((axis,) if isinstance(axis, str) else axis) - set(mesh.axis_names)
        if unknown:
            raise InvalidArgumentError(
                f"`axis` names {sorted(unknown)}, but the mesh has the axes "
                f"{list(mesh.axis_names)}."
            )
        own = local_devices_by_shard(mesh, axis)
        if not own:
            raise InvalidArgumentError("None of this process's devices is in the mesh.")
        sizes = split_rows(len(rows), len(own), counts)
        shards = Shards(
            mesh,
            axis,
            allgather_rows_per_shard(rows, dict(zip(own, sizes, strict=True)), mesh, axis),
        )
        self._check_num_rows(shards.size)
        self.array: Any
        self.shards, self.name = shards, name
        if isinstance(rows, HostArray):
            rows.num_readers = max(rows.num_readers, sum(map(len, own.values())))
            self.array = rows
            return
        pieces, start = [], 0
        for devices, count in zip(own.values(), sizes, strict=True):
            piece = np.asarray(rows[start : start + count])
            piece = _as_device_dtype(piece)
            missing = shards.max_rows_per_shard - count
            padded = np.pad(piece, [(0, missing)] + [(0, 0)] * (piece.ndim - 1), mode="edge")
            pieces += [jax.device_put(padded, device) for device in devices]
            start += count
        shape = (len(shards.rows_per_shard) * shards.max_rows_per_shard, *rows.shape[1:])
        sharding = NamedSharding(mesh, shards.partition_spec)
        self.array = jax.make_array_from_single_device_arrays(shape, sharding, pieces)

    @classmethod
    def from_padded_array(cls, array: Any, shards: Shards, name: str) -> ShardedArray:
        """From an array that is spread already, every shard padded to the longest."""
        made = object.__new__(cls)
        made.array, made.shards, made.name = array, shards, name
        return made

    @property
    def is_on_host(self) -> bool:
        """Whether rows are read from the host when they are needed."""
        return isinstance(self.array, HostArray)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all rows, without padding."""
        return (self.shards.size, *self.array.shape[1:])

    @property
    def dtype(self) -> Any:
        """The type of the numbers."""
        return self.array.dtype

    def __repr__(self) -> str:
        return (
            f"ShardedArray('{self.name}', shape={self.shape}, dtype={self.dtype}, "
            f"shards={len(self.shards.rows_per_shard)})"
        )

    def _get_rows(self, indices: Any) -> Array:
        """Rows from wherever they are, for all devices: not for use in a step."""
        if not self.is_on_host:
            return _gather_rows(self.array, self.shards, jnp.asarray(indices))
        indices = jnp.where(indices < 0, indices + self.shards.size, indices)
        if jax.process_count() == 1 and not isinstance(indices, jax.core.Tracer):
            return jnp.asarray(self.read(np.asarray(indices)))

        def own(rows: Array, first: Any, count: Any) -> Array:
            found = HostShardView(self, first, count)[rows]
            is_own = (rows >= first) & (rows < first + count)
            return jnp.where(is_own.reshape(*rows.shape, *[1] * (found.ndim - rows.ndim)), found, 0)

        of_rows = partial(self.shards.sum_over_shards, own)
        if isinstance(indices, jax.core.Tracer):
            return of_rows(indices).astype(self.dtype)
        return jax.jit(of_rows)(np.asarray(indices)).astype(self.dtype)

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Rows that this process has, from its host, by their numbers among all."""
        return self.array.read(self._local_indices(indices))

    def read_deferring_errors(self, indices: np.ndarray) -> np.ndarray:
        """The same, or no numbers where the source fails: the other devices would wait for ever for
        one that has raised an error. The array keeps it, to be raised when they are done.
        """
        try:
            if self.array.pending_error is None:
                return self.read(indices)
        except RuntimeError as error:
            self.array.pending_error = error
        none = np.nan if self.dtype.kind == "f" else 0
        return np.full((*np.shape(indices), *self.shape[1:]), none, self.dtype)

    def prefetch(self, indices: np.ndarray) -> None:
        """As :meth:`HostArray.start_reading`, by their numbers among all."""
        self.array.prefetch(self._local_indices(indices))

    def read_prefetched(self, indices: np.ndarray) -> np.ndarray:
        """As :meth:`HostArray.finish_reading`, by their numbers among all."""
        if self.array.pending_error is not None:
            raise self.array.pending_error
        return self.array.read_prefetched(self._local_indices(indices))

    def _local_indices(self, indices: np.ndarray) -> np.ndarray:
        """Numbers among this process's rows from those among all."""
        firsts, before = _local_shard_offsets(self.shards)
        place = np.searchsorted(firsts, indices, side="right") - 1
        return indices - firsts[place] + before[place]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShardedArray) or self.shards != other.shards:
            return False
        a, b = self.array, other.array
        return a is b or (not isinstance(a, Array) and not isinstance(b, Array) and a == b)

    def __hash__(self) -> int:
        is_array = isinstance(self.array, Array)
        return hash((self.shards, id(self.array) if is_array else self.array))

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Shards, str, HostArray | None]]:
        if self.is_on_host:
            return (), (self.shards, self.name, self.array)
        return (self.array,), (self.shards, self.name, None)

    @classmethod
    def tree_unflatten(
        cls, aux: tuple[Shards, str, HostArray | None], children: Any
    ) -> ShardedArray:
        shards, name, host = aux
        return cls.from_padded_array(children[0] if host is None else host, shards, name)


class DeviceShardView:
    """What a model sees in place of a :class:`ShardedArray` on one device.

    :param global_array: the array that it stands for.
    :param local_array: the device's rows.
    :param row_offset: the number of the first of them among all rows.
    """

    def __init__(self, global_array: ShardedArray, local_array: Array, row_offset: Array) -> None:
        self.global_array, self.local_array, self.row_offset = global_array, local_array, row_offset

    def __getattr__(self, name: str) -> Any:
        return getattr(self.global_array, name)

    def __len__(self) -> int:
        return len(self.global_array)

    def __getitem__(self, index: Any) -> Array:
        rows, *rest = index if isinstance(index, tuple) and index else (index,)
        return self.local_array[(rows - self.row_offset, *rest)]


class HostShardView(DeviceShardView):
    """The same where the device's rows are on its host: they are read when the program runs.

    :param global_array: the array that it stands for.
    :param row_offset: the number of the device's first row among all.
    :param num_rows: how many it has; what lies beyond is its last row.
    """

    def __init__(self, global_array: ShardedArray, row_offset: Any, num_rows: Any) -> None:
        self.global_array, self.row_offset, self.num_rows = global_array, row_offset, num_rows

    def __getitem__(self, index: Any) -> Array:
        rows, *rest = index if isinstance(index, tuple) and index else (index,)
        rows = jnp.clip(rows, self.row_offset, self.row_offset + self.num_rows - 1)
        form = jax.ShapeDtypeStruct(
            (*rows.shape, *self.global_array.shape[1:]), self.global_array.dtype
        )
        found = call_host(self.global_array.read_deferring_errors, form, rows)
        return index_trailing_axes(found, rows.shape, rest)


@cache
def _local_shard_offsets(shards: Shards) -> tuple[np.ndarray, np.ndarray]:
    """First row of each of this process's shards, among all rows and among its own."""
    places = list(local_devices_by_shard(shards.mesh, shards.axis))
    counts = np.array(shards.rows_per_shard)[places]
    return shards.row_offsets[places], np.cumsum(counts) - counts


def _as_device_dtype(x: np.ndarray) -> np.ndarray:
    """In the type that a device holds; refused where that cannot hold its integers."""
    dtype = jax.dtypes.canonicalize_dtype(x.dtype.newbyteorder("="))
    if x.dtype.kind in "iu" and dtype != x.dtype:
        limits = np.iinfo(dtype)
        if x.min() < limits.min or x.max() > limits.max:
            raise InvalidArgumentError(
                f"ShardedArray holds integers that {dtype} cannot: switch on jax_enable_x64, or "
                "give it floats."
            )
    return x.astype(dtype, copy=False)


def as_sharded(x: Any) -> Any:
    """A JAX array that is spread by rows over several devices as a :class:`ShardedArray`.

    :raises ValueError: for a mesh with explicit axes.
    """
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer) or x.ndim == 0:
        return x
    sharding = x.sharding
    if not isinstance(sharding, NamedSharding) or not sharding.spec or sharding.spec[0] is None:
        return x
    axis, mesh = sharding.spec[0], sharding.mesh
    assert isinstance(mesh, Mesh)
    num = math.prod(mesh.shape[a] for a in ((axis,) if isinstance(axis, str) else axis))
    if num == 1 or any(other is not None for other in sharding.spec[1:]):
        return x
    if any(kind != jax.sharding.AxisType.Auto for kind in mesh.axis_types):
        raise InvalidArgumentError(
            f"An array of shape {x.shape} is spread over a mesh with explicit axes, which models "
            "do not know of: pass ShardedArray(rows, mesh), or make the mesh with "
            "jax.sharding.Mesh(devices, names)."
        )
    shards = Shards(mesh, axis, (x.shape[0] // num,) * num)
    return ShardedArray.from_padded_array(x, shards, f"array of shape {x.shape}")


def _gather_rows(array: Any, shards: Shards, indices: Array) -> Array:
    """Rows by their numbers among all, on every device."""
    indices = jnp.where(indices < 0, indices + shards.size, indices)
    if not shards.is_balanced:
        ends = jnp.asarray(np.cumsum(shards.rows_per_shard), jnp.int32)
        shard = jnp.searchsorted(ends, indices, side="right")
        indices = (
            indices - jnp.asarray(shards.row_offsets)[shard] + shard * shards.max_rows_per_shard
        )
    if any(isinstance(x, jax.core.Tracer) for x in (array, indices)):
        return array[indices]
    everywhere = NamedSharding(shards.mesh, PartitionSpec())
    return jax.jit(lambda a, i: a[i], out_shardings=everywhere)(array, np.asarray(indices))
