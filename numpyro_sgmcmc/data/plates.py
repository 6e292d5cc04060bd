"""The subsampled plate, and the rows that are wanted of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgmcmc.data.shards import Shards

__all__ = ["Indices", "Plate"]


Indices = Mapping[str, Array | np.ndarray]
"""Row indices by plate name."""


class Plate(NamedTuple):
    """
    - **name** - the plate's name.
    - **size** - number of rows.
    - **subsample_size** - rows in a minibatch.
    - **shards** - where its rows are spread over devices, each of which has the same part of a
      minibatch; else None.
    - **row_offset** - the first of its rows: not 0 where these are one device's part.
    - **max_size** - the most rows that it may have, where ``size`` is known only when it runs.
    - **included_rows** - rows that are in every minibatch, in rising order; the others are drawn for
      what room is left.
    """

    name: str
    size: int
    subsample_size: int
    shards: Shards | None = None
    row_offset: Any = 0
    max_size: int = 0
    included_rows: tuple[int, ...] = ()

    @property
    def subsample_size_per_shard(self) -> int:
        """Rows of a minibatch on one device."""
        return self.subsample_size // (
            1 if self.shards is None else len(self.shards.rows_per_shard)
        )

    @property
    def shard_offsets_and_sizes(self) -> tuple[np.ndarray, np.ndarray]:
        """First row and number of rows of each shard, shape ``(num_shards, 1)``."""
        if self.shards is None:
            return np.array([[0]]), np.array([[self.size]])
        return self.shards.row_offsets[:, None], np.array(self.shards.rows_per_shard)[:, None]

    @property
    def random_part(self) -> Plate:
        """The rows that are drawn, of which there are as many as are not decisive."""
        num = len(self.included_rows)
        size, part = self.size - num, self.subsample_size - num
        return self._replace(size=size, subsample_size=part, included_rows=())

    @property
    def row_weights(self) -> np.ndarray | None:
        """What a minibatch's rows weigh beside (rows / chosen rows) each, so that the likelihood
        stays unbiased; None where all weigh the same.
        """
        if not self.included_rows:
            return None
        num, drawn = len(self.included_rows), self.random_part
        each = [1.0] * num + [drawn.size / drawn.subsample_size] * drawn.subsample_size
        return np.array(each) * (self.subsample_size / self.size)

    def add_included_rows(self, random_indices: Any) -> Any:
        """Minibatches of all rows from the places of those that are drawn.

        :param random_indices: places among the rows that are not decisive, shape ``(..., room)``, NumPy's or
            JAX's.
        :return: the decisive rows before these rows, shape ``(..., subsample_size)``.
        """
        if not self.included_rows:
            return random_indices
        xp: Any = np if isinstance(random_indices, np.ndarray) else jnp
        first = xp.asarray(self.included_rows, random_indices.dtype)
        # A place is as many rows further on as there are decisive ones before it.
        ahead = xp.asarray(np.array(self.included_rows) - np.arange(len(self.included_rows)))
        rows = random_indices + xp.searchsorted(ahead, random_indices, side="right").astype(
            random_indices.dtype
        )
        first = xp.broadcast_to(first, (*random_indices.shape[:-1], len(self.included_rows)))
        return xp.concatenate([first, rows], -1)

    @property
    def batches_per_epoch(self) -> int:
        """Minibatches in an epoch; in that of the largest shard."""
        if self.included_rows:
            return self.random_part.batches_per_epoch
        return -(-int(self.shard_offsets_and_sizes[1].max()) // self.subsample_size_per_shard)

    @property
    def max_subsample_size(self) -> int:
        """The largest ``subsample_size`` that it can have."""
        if self.shards is None:
            return self.size
        return len(self.shards.rows_per_shard) * min(self.shards.rows_per_shard)

    def with_shards(self, shards: Shards) -> Plate:
        """With rows spread over devices, each of which has as many rows of a minibatch."""
        num = len(shards.rows_per_shard)
        part = -(-self.subsample_size // num)
        return self._replace(subsample_size=num * part, shards=shards)

    def for_shard(self, row_offset: Any, num_rows: Any) -> Plate:
        """The part of one device, if its rows are spread over devices."""
        if self.shards is None:
            return self
        return Plate(
            self.name,
            num_rows,
            self.subsample_size_per_shard,
            None,
            row_offset,
            self.shards.max_rows_per_shard,
        )
