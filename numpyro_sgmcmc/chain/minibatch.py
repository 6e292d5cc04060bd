"""A step's minibatch: rows in memory, or rows that have been read ahead."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array

from numpyro_sgmcmc.chain.block import PrefetchBuffer
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.stand_ins import RowLookup, with_prefetched_rows

__all__ = ["InMemoryMinibatchSource", "Minibatch", "MinibatchSource", "PrefetchedMinibatchSource"]


class Minibatch(NamedTuple):
    """
    - **indices** - row indices by plate.
    - **arguments** - the model's arguments, as it sees them for these rows.
    """

    indices: dict[str, Array]
    arguments: Arguments


class MinibatchSource(Protocol):
    """Where the rows of an iteration's steps come from."""

    def get_scan_inputs(self) -> Any:
        """What the loop over steps takes apart, a leading axis of steps."""
        ...

    def get_minibatch(self, scan_input: Any) -> Minibatch:
        """The minibatch of the step that got this part."""
        ...


class InMemoryMinibatchSource:
    """Rows that the compiled step looks up itself.

    :param indices: indices by plate, ``(num_steps, subsample_size)``.
    :param arguments: the model's arguments.
    """

    def __init__(self, indices: dict[str, Array], arguments: Arguments) -> None:
        self._indices, self._arguments = indices, arguments

    def get_scan_inputs(self) -> Any:
        return self._indices

    def get_minibatch(self, scan_input: Any) -> Minibatch:
        return Minibatch(scan_input, self._arguments)


class PrefetchedMinibatchSource:
    """Rows that have been read from the host, a block of iterations at a time.

    :param buffer: the block.
    :param buffer_index: the iteration's number in the block, the same for all chains.
    :param num_steps: steps of an iteration.
    :param lookups: the arrays that have been read, by plate.
    :param arguments: the model's arguments.
    """

    def __init__(
        self,
        buffer: PrefetchBuffer,
        buffer_index: Array,
        num_steps: int,
        lookups: tuple[RowLookup, ...],
        arguments: Arguments,
    ) -> None:
        self._buffer, self._buffer_index, self._num_steps = buffer, buffer_index, num_steps
        self._lookups, self._arguments = lookups, arguments

    def get_scan_inputs(self) -> Any:
        return jnp.arange(self._num_steps)

    def get_minibatch(self, scan_input: Any) -> Minibatch:
        rows, values = self._buffer.slice_step(self._buffer_index, scan_input)
        return Minibatch(rows, with_prefetched_rows(self._arguments, self._lookups, rows, values))
