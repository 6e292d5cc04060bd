r"""Rows spread over devices and processes: each device computes on the rows that it holds.

A minibatch is stratified: every device draws its own part, of the same number of rows. With
:math:`N_s` of the :math:`N` rows on device s, and :math:`\tilde U_s` the minibatch potential of a
model that thinks its rows stand for all N,

.. math:: \tilde U = \sum_s \frac{N_s}{N} \tilde U_s

is unbiased for the potential on all rows, however uneven the shards, and so is its gradient. The
sum is the one thing that devices tell each other in a step.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from numpyro_sgmcmc.checks import Refusal
from numpyro_sgmcmc.data.rows import RowArray

__all__ = ["LocalRows", "ShardedArray", "Shards", "as_sharded"]


class Shards(NamedTuple):
    """Which device holds which rows.

    - **mesh** - the devices.
    - **axis** - the mesh axis (or axes) over which rows are spread.
    - **counts** - rows of each shard, in order.
    """

    mesh: Mesh
    axis: str | tuple[str, ...]
    counts: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of rows."""
        return sum(self.counts)

    @property
    def longest(self) -> int:
        """Rows of the largest shard; the others are padded to it."""
        return max(self.counts)

    @property
    def is_even(self) -> bool:
        """Whether all shards have the same number of rows."""
        return min(self.counts) == self.longest

    @property
    def firsts(self) -> np.ndarray:
        """The first row of each shard."""
        return np.cumsum((0, *self.counts[:-1]), dtype=np.int64).astype(np.int32)

    @property
    def chain_axis(self) -> str | None:
        """The other mesh axis, over which chains are spread, if there is exactly one."""
        taken = (self.axis,) if isinstance(self.axis, str) else self.axis
        others = [name for name in self.mesh.axis_names if name not in taken]
        return others[0] if len(others) == 1 else None

    @property
    def rows_spec(self) -> PartitionSpec:
        """First axis spread over the shards."""
        return PartitionSpec(self.axis)

    def spread(self, rows: Array) -> Array:
        """Row indices of shape ``(..., num_shards * n)``, each shard's part where it is needed."""
        spec = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * (rows.ndim - 1), self.axis)
        return lax.with_sharding_constraint(rows, NamedSharding(self.mesh, spec))

    def average(self, fn: Callable[[Any, Any, Any], Any], operands: Any) -> Any:
        """The mean of a function's values on the shards, weighted by their numbers of rows.

        :param fn: ``(operands, first, count) -> pytree`` of a shard's part of the operands, its
            first row, and its number of rows (an int where all have the same).
        :param operands: pytree of arrays spread over the shards along their first axis.
        """
        firsts, counts = jnp.asarray(self.firsts), jnp.asarray(self.counts, jnp.int32)

        def local(operands: Any) -> Any:
            shard = lax.axis_index(self.axis)
            count = self.longest if self.is_even else counts[shard]
            value = fn(operands, firsts[shard], count)
            share = counts[shard] / self.size
            return lax.psum(jax.tree.map(lambda x: share.astype(x.dtype) * x, value), self.axis)

        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(self.rows_spec,),
            out_specs=PartitionSpec(),
            check_vma=False,
        )(operands)


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
        with ``shape`` and slices. Their order is that of the devices along the axis.
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

    _why_not_whole = "is on no device as a whole"

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
            raise Refusal(f"ShardedArray needs an array with rows, but got {type(rows).__name__}.")
        self._check_form(tuple(rows.shape), rows.dtype)
        if mesh is None:
            mesh = Mesh(np.array(jax.devices()), ("rows",))
        # Without types on its axes: explicit ones would be asked for at every operation of a model.
        mesh = Mesh(mesh.devices, mesh.axis_names)
        axis = mesh.axis_names[0] if axis is None else axis
        unknown = set((axis,) if isinstance(axis, str) else axis) - set(mesh.axis_names)
        if unknown:
            raise Refusal(
                f"`axis` names {sorted(unknown)}, but the mesh has the axes "
                f"{list(mesh.axis_names)}."
            )
        own = _own_devices(mesh, axis)
        if not own:
            raise Refusal("None of this process's devices is in the mesh.")
        sizes = _split(int(rows.shape[0]), len(own), counts)
        shards = Shards(mesh, axis, _agree(rows, dict(zip(own, sizes, strict=True)), mesh, axis))
        self._check_number(shards.size)
        pieces, start = [], 0
        for devices, count in zip(own.values(), sizes, strict=True):
            piece = np.asarray(rows[start : start + count])
            piece = _as_held(piece)
            missing = shards.longest - count
            padded = np.pad(piece, [(0, missing)] + [(0, 0)] * (piece.ndim - 1), mode="edge")
            pieces += [jax.device_put(padded, device) for device in devices]
            start += count
        shape = (len(shards.counts) * shards.longest, *rows.shape[1:])
        sharding = NamedSharding(mesh, shards.rows_spec)
        self.array: Any = jax.make_array_from_single_device_arrays(shape, sharding, pieces)
        self.shards, self.name = shards, name

    @classmethod
    def of(cls, array: Any, shards: Shards, name: str) -> ShardedArray:
        """From an array that is spread already, every shard padded to the longest."""
        made = object.__new__(cls)
        made.array, made.shards, made.name = array, shards, name
        return made

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
            f"shards={len(self.shards.counts)})"
        )

    def _rows_at(self, rows: Any) -> Array:
        """Rows from wherever they are, for all devices: not for use in a step."""
        return _gather(self.array, self.shards, jnp.asarray(rows))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShardedArray) or self.shards != other.shards:
            return False
        a, b = self.array, other.array
        return a is b or (not isinstance(a, Array) and not isinstance(b, Array) and a == b)

    def __hash__(self) -> int:
        is_array = isinstance(self.array, Array)
        return hash((self.shards, id(self.array) if is_array else self.array))

    def tree_flatten(self) -> tuple[tuple[Any], tuple[Shards, str]]:
        return (self.array,), (self.shards, self.name)

    @classmethod
    def tree_unflatten(cls, aux: tuple[Shards, str], children: Any) -> ShardedArray:
        return cls.of(children[0], *aux)


class LocalRows:
    """What a model sees in place of a :class:`ShardedArray` on one device.

    :param whole: the array that it stands for.
    :param rows: the device's rows.
    :param first: the number of the first of them among all rows.
    """

    def __init__(self, whole: ShardedArray, rows: Array, first: Array) -> None:
        self.whole, self.rows, self.first = whole, rows, first

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    def __len__(self) -> int:
        return len(self.whole)

    def __getitem__(self, index: Any) -> Array:
        rows, *rest = index if isinstance(index, tuple) and index else (index,)
        return self.rows[(rows - self.first, *rest)]


def _as_held(x: np.ndarray) -> np.ndarray:
    """In the type that a device holds; refused where that cannot hold its integers."""
    dtype = jax.dtypes.canonicalize_dtype(x.dtype.newbyteorder("="))
    if x.dtype.kind in "iu" and dtype != x.dtype:
        limits = np.iinfo(dtype)
        if x.min() < limits.min or x.max() > limits.max:
            raise Refusal(
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
        raise Refusal(
            f"An array of shape {x.shape} is spread over a mesh with explicit axes, which models "
            "do not know of: pass ShardedArray(rows, mesh), or make the mesh with "
            "jax.sharding.Mesh(devices, names)."
        )
    shards = Shards(mesh, axis, (x.shape[0] // num,) * num)
    return ShardedArray.of(x, shards, f"array of shape {x.shape}")


def _gather(array: Any, shards: Shards, rows: Array) -> Array:
    """Rows by their numbers among all, on every device."""
    rows = jnp.where(rows < 0, rows + shards.size, rows)
    if not shards.is_even:
        ends = jnp.asarray(np.cumsum(shards.counts), jnp.int32)
        shard = jnp.searchsorted(ends, rows, side="right")
        rows = rows - jnp.asarray(shards.firsts)[shard] + shard * shards.longest
    if any(isinstance(x, jax.core.Tracer) for x in (array, rows)):
        return array[rows]
    everywhere = NamedSharding(shards.mesh, PartitionSpec())
    return jax.jit(lambda a, i: a[i], out_shardings=everywhere)(array, np.asarray(rows))


def _own_devices(mesh: Mesh, axis: str | tuple[str, ...]) -> dict[int, list[Any]]:
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


def _split(num_rows: int, num_parts: int, counts: Sequence[int] | None) -> list[int]:
    """Rows of each part."""
    if counts is None:
        each, rest = divmod(num_rows, num_parts)
        counts = [each + (part < rest) for part in range(num_parts)]
    elif len(counts) != num_parts or sum(counts) != num_rows:
        raise Refusal(
            f"`counts` is {list(counts)}, but must give the rows of {num_parts} devices, "
            f"{num_rows} in all."
        )
    if min(counts) < 1:
        raise Refusal(
            f"ShardedArray has {num_rows} rows for {num_parts} devices, but every device needs "
            "one at least: use a mesh of fewer devices."
        )
    return [int(n) for n in counts]


def _agree(
    rows: Any, own: dict[int, int], mesh: Mesh, axis: str | tuple[str, ...]
) -> tuple[int, ...]:
    """Rows of every shard, which processes tell each other."""
    names = (axis,) if isinstance(axis, str) else axis
    counts = np.zeros(math.prod(mesh.shape[name] for name in names), np.int32)
    counts[list(own)] = list(own.values())
    if jax.process_count() == 1:
        return tuple(int(n) for n in counts)
    form = zlib.crc32(repr((tuple(rows.shape[1:]), np.dtype(rows.dtype).str)).encode())
    told = np.asarray(multihost_utils.process_allgather(counts))
    forms = np.asarray(multihost_utils.process_allgather(np.uint32(form)))
    if len(set(forms.tolist())) > 1:
        raise Refusal(
            f"The processes give rows of different shapes or types; here they are "
            f"{tuple(rows.shape[1:])}, {rows.dtype}."
        )
    agreed = told.max(0)
    if ((told != 0) & (told != agreed)).any():
        raise Refusal(
            "Processes that share a place along the rows' axis give different numbers of rows."
        )
    return tuple(int(n) for n in agreed)
