"""Blocks of rows in a chain's state: read a few iterations ahead, served a step at a time.

A call to the host costs as much as dozens of steps, so that rows come for several iterations at
once. Which ones follows from the chain's key alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_sgmcmc.arguments import Arguments
from numpyro_sgmcmc.data.host import HostArray
from numpyro_sgmcmc.data.rows import RowArray, narrowed
from numpyro_sgmcmc.data.sharded import LocalRows, ShardedArray

__all__ = [
    "Block",
    "Lookup",
    "Recorder",
    "Upcoming",
    "block_length",
    "empty_block",
    "is_elsewhere",
    "key_words",
    "served",
]

_BLOCK_BYTES = 2**22
_LONGEST_BLOCK = 64


class Lookup(NamedTuple):
    """An array that the model indexes by a plate's rows.

    - **array** - a :class:`HostArray` or a :class:`ShardedArray`.
    - **plate** - name of the plate.
    """

    array: Any
    plate: str


class Upcoming(NamedTuple):
    """Where the drawing of a chain's rows has come to, ahead of the chain.

    - **rng_key** - key of the first iteration whose rows are not drawn yet.
    - **streams** - the minibatch streams there.
    """

    rng_key: Array
    streams: dict[str, Any]


class Block(NamedTuple):
    """Rows read for the next iterations of a chain.

    - **values** - for each lookup, shape ``(iterations, num_steps, subsample_size, ...)``.
    - **rows** - which rows these are, by plate, shape ``(iterations, num_steps, subsample_size)``.
    - **then** - the rows of as many iterations after them, which are being read.
    - **upcoming** - from where the rows after those are drawn.
    - **place** - iterations used.
    - **key** - words of the random key of the iteration that comes next: with another one, the
      rows that have been read are not those that it draws.
    """

    values: tuple[Array, ...]
    rows: dict[str, Array]
    then: dict[str, Array]
    upcoming: Upcoming
    place: Array
    key: Array

    def at(self, place: Array, step: Array) -> tuple[dict[str, Array], tuple[Array, ...]]:
        """The rows of one step and the values there.

        Copied for this step alone and with one index for all chains, which is as fast as memory.

        :param place: iteration in the block.
        :param step: step in the iteration.
        """

        def one(x: Array) -> Array:
            flat = x.reshape(-1, *x.shape[2:])
            return lax.dynamic_index_in_dim(flat, place * x.shape[1] + step, keepdims=False)

        return {p: one(x) for p, x in self.rows.items()}, tuple(one(x) for x in self.values)


def key_words(rng_key: Array) -> Array:
    """The integers of a typed or a raw key."""
    is_typed = jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(rng_key) if is_typed else rng_key


def empty_block(
    lookups: tuple[Lookup, ...], rows: Mapping[str, Any], num_chains: int, upcoming: Upcoming
) -> Block:
    """A chain's block before anything is read, used up.

    :param rows: shape and type of the rows of one iteration of one chain, by plate.
    :param num_chains: chains that read together.
    :param upcoming: the chain's key and streams.
    """
    length = block_length(lookups, rows, num_chains)
    values = tuple(jnp.zeros((length, *rows[p].shape, *a.shape[1:]), a.dtype) for a, p in lookups)
    empty = {p: jnp.zeros((length, *x.shape), x.dtype) for p, x in rows.items()}
    key = ~key_words(upcoming.rng_key)  # no iteration's: nothing is drawn yet
    return Block(values, empty, empty, upcoming, jnp.asarray(length), key)


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


def block_length(lookups: tuple[Lookup, ...], rows: Mapping[str, Any], num_chains: int) -> int:
    """Iterations a block, from 1 to 64, so that those of all chains stay near 4 MB.

    :param rows: shape and type of the rows of one iteration of one chain, by plate.
    :param num_chains: chains that read together.
    """
    sizes = (rows[p].size * max(a.row_size, 1) * a.dtype.itemsize for a, p in lookups)
    return max(1, min(_LONGEST_BLOCK, _BLOCK_BYTES // max(num_chains * sum(sizes), 1)))


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
