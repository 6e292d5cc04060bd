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
    - **first** - the first of its rows: not 0 where these are one device's part.
    - **bound** - the most rows that it may have, where ``size`` is known only when it runs.
    - **decisive** - rows that are in every minibatch, in rising order; the others are drawn for
      what room is left.
    """

    name: str
    size: int
    subsample_size: int
    shards: Shards | None = None
    first: Any = 0
    bound: int = 0
    decisive: tuple[int, ...] = ()

    @property
    def part(self) -> int:
        """Rows of a minibatch on one device."""
        return self.subsample_size // (1 if self.shards is None else len(self.shards.counts))

    @property
    def strata(self) -> tuple[np.ndarray, np.ndarray]:
        """First row and number of rows of each shard, shape ``(num_shards, 1)``."""
        if self.shards is None:
            return np.array([[0]]), np.array([[self.size]])
        return self.shards.firsts[:, None], np.array(self.shards.counts)[:, None]

    @property
    def drawn(self) -> Plate:
        """The rows that are drawn, of which there are as many as are not decisive."""
        num = len(self.decisive)
        size, part = self.size - num, self.subsample_size - num
        return self._replace(size=size, subsample_size=part, decisive=())

    @property
    def weights(self) -> np.ndarray | None:
        """What a minibatch's rows weigh beside (rows / chosen rows) each, so that the likelihood
        stays unbiased; None where all weigh the same.
        """
        if not self.decisive:
            return None
        num, drawn = len(self.decisive), self.drawn
        each = [1.0] * num + [drawn.size / drawn.subsample_size] * drawn.subsample_size
        return np.array(each) * (self.subsample_size / self.size)

    def with_decisive(self, drawn: Any) -> Any:
        """Minibatches of all rows from the places of those that are drawn.

        :param drawn: places among the rows that are not decisive, shape ``(..., room)``, NumPy's or
            JAX's.
        :return: the decisive rows before these rows, shape ``(..., subsample_size)``.
        """
        if not self.decisive:
            return drawn
        xp: Any = np if isinstance(drawn, np.ndarray) else jnp
        first = xp.asarray(self.decisive, drawn.dtype)
        # A place is as many rows further on as there are decisive ones before it.
        ahead = xp.asarray(np.array(self.decisive) - np.arange(len(self.decisive)))
        rows = drawn + xp.searchsorted(ahead, drawn, side="right").astype(drawn.dtype)
        first = xp.broadcast_to(first, (*drawn.shape[:-1], len(self.decisive)))
        return xp.concatenate([first, rows], -1)

    @property
    def per_epoch(self) -> int:
        """Minibatches in an epoch; in that of the largest shard."""
        if self.decisive:
            return self.drawn.per_epoch
        return -(-int(self.strata[1].max()) // self.part)

    @property
    def most(self) -> int:
        """The largest ``subsample_size`` that it can have."""
        if self.shards is None:
            return self.size
        return len(self.shards.counts) * min(self.shards.counts)

    def spread_over(self, shards: Shards) -> Plate:
        """With rows spread over devices, each of which has as many rows of a minibatch."""
        num = len(shards.counts)
        part = -(-self.subsample_size // num)
        return self._replace(subsample_size=num * part, shards=shards)

    def of_shard(self, first: Any, count: Any) -> Plate:
        """The part of one device, if its rows are spread over devices."""
        if self.shards is None:
            return self
        return Plate(self.name, count, self.part, None, first, self.shards.longest)
