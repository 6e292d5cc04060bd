"""A step's minibatch: rows in memory, or rows that have been read ahead."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array

from numpyro_sgmcmc.chain.block import Block
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.stand_ins import IndexedArray, with_rows_read

__all__ = ["Minibatch", "RowSource", "RowsInMemory", "RowsReadAhead"]


class Minibatch(NamedTuple):
    """
    - **rows** - row indices by plate.
    - **arguments** - the model's arguments, as it sees them for these rows.
    """

    rows: dict[str, Array]
    arguments: Arguments


class RowSource(Protocol):
    """Where the rows of an iteration's steps come from."""

    def scanned(self) -> Any:
        """What the loop over steps takes apart, a leading axis of steps."""
        ...

    def minibatch(self, step: Any) -> Minibatch:
        """The minibatch of the step that got this part."""
        ...


class RowsInMemory:
    """Rows that the compiled step looks up itself.

    :param rows: indices by plate, ``(num_steps, subsample_size)``.
    :param arguments: the model's arguments.
    """

    def __init__(self, rows: dict[str, Array], arguments: Arguments) -> None:
        self._rows, self._arguments = rows, arguments

    def scanned(self) -> Any:
        return self._rows

    def minibatch(self, step: Any) -> Minibatch:
        return Minibatch(step, self._arguments)


class RowsReadAhead:
    """Rows that have been read from the host, a block of iterations at a time.

    :param block: the block.
    :param iteration: the iteration's number in the block, the same for all chains.
    :param num_steps: steps of an iteration.
    :param lookups: the arrays that have been read, by plate.
    :param arguments: the model's arguments.
    """

    def __init__(
        self,
        block: Block,
        iteration: Array,
        num_steps: int,
        lookups: tuple[IndexedArray, ...],
        arguments: Arguments,
    ) -> None:
        self._block, self._iteration, self._num_steps = block, iteration, num_steps
        self._lookups, self._arguments = lookups, arguments

    def scanned(self) -> Any:
        return jnp.arange(self._num_steps)

    def minibatch(self, step: Any) -> Minibatch:
        rows, values = self._block.at(self._iteration, step)
        return Minibatch(rows, with_rows_read(self._arguments, self._lookups, rows, values))
