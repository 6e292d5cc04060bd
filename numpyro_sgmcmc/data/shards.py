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

from numpyro_sgmcmc.checks import InvalidArgumentError

__all__ = ["Shards", "allgather_rows_per_shard", "local_devices_by_shard", "split_rows"]


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
