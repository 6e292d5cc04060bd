"""The potential as the warm-up asks for it: compiled once, called from Python.

Small linear algebra is done by NumPy in float64: it compiles nothing, and curvature of columns in
very different units needs the digits.
"""

from __future__ import annotations

from functools import partial

import jax
import numpy as np

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.plates import Indices, Plate
from numpyro_sgmcmc.posterior.target import Potential

__all__ = ["JittedPotential", "sample_subset"]

_NUM_SUBSET_ROWS = 20_000
_CONTIGUOUS_RUN_BYTES = 2**14

_jitted_value = jax.jit(Potential.full_value, static_argnums=0)
_jitted_gradient = jax.jit(Potential.full_gradient, static_argnums=0)
_jitted_value_grad_hessian = jax.jit(Potential.full_value_grad_hessian, static_argnums=0)
_jitted_hessian_products = jax.jit(Potential.full_hessian_products, static_argnums=0)


def choose_run_length(potential: Potential, plate: Plate) -> int:
    """Rows that random rows are drawn in: one, or as many as share some pages of the disk."""
    widths = [x.array for x in potential.host_lookups if x.plate == plate.name]
    widths = [x.row_size * x.dtype.itemsize for x in widths]
    fitting = max(1, _CONTIGUOUS_RUN_BYTES // max(1, *widths)) if widths else 1
    return max(
        r
        for r in range(1, min(fitting, plate.subsample_size_per_shard) + 1)
        if plate.subsample_size_per_shard % r == 0
    )


def sample_subset(
    potential: Potential, seed: int, num_rows: int = _NUM_SUBSET_ROWS
) -> Indices | None:
    """Random rows that stand for all rows, ``num_rows`` a plate, and no fewer than a minibatch has.

    :return: None where no plate has more, and all rows of it are on one device.
    """
    num_rows = max([num_rows, *(p.subsample_size for p in potential.plates)])
    if all(p.size <= num_rows and p.shards is None for p in potential.plates):
        return None
    rng = np.random.default_rng(seed)
    return {
        p.name: _sample_stratified_rows(p, rng, choose_run_length(potential, p), num_rows)
        for p in potential.plates
    }


def _sample_stratified_rows(
    plate: Plate, rng: np.random.Generator, run_length: int, num_rows: int
) -> np.ndarray:
    """Sorted rows of one plate; where they are spread over devices, as many of each shard."""
    if plate.size <= num_rows and plate.shards is None:
        return np.arange(plate.size, dtype=np.int32)
    firsts, counts = plate.shard_offsets_and_sizes
    each = -(-num_rows // (run_length * len(counts)))
    starts = np.sort(rng.integers(0, counts, (len(counts), each)))
    rows = (starts[..., None] + np.arange(run_length)) % counts[..., None]
    return (firsts + rows.reshape(len(counts), -1)).reshape(-1).astype(np.int32)


class JittedPotential:
    """The full-data potential, or that of a subset of the rows, at positions of float64.

    :param potential: the posterior.
    :param arguments: the model's arguments.
    :param subset_indices: rows that stand for all, or None for all rows.
    """

    def __init__(
        self, potential: Potential, arguments: Arguments, subset_indices: Indices | None = None
    ) -> None:
        self.potential, self.arguments, self.subset_indices = potential, arguments, subset_indices
        self._cast = partial(np.asarray, dtype=potential.dtype)

    @classmethod
    def from_random_subset(cls, potential: Potential, arguments: Arguments) -> JittedPotential:
        """The potential on a fixed random subset of the rows, for work that bears its error."""
        return cls(potential, arguments, sample_subset(potential, 0))

    def value(self, position: np.ndarray) -> float:
        """The potential."""
        return float(
            _jitted_value(self.potential, self._cast(position), self.arguments, self.subset_indices)
        )

    def gradient(self, position: np.ndarray) -> np.ndarray:
        """The gradient, shape ``(d,)``."""
        g = _jitted_gradient(
            self.potential, self._cast(position), self.arguments, self.subset_indices
        )
        return np.asarray(g, np.float64)

    def value_grad_hessian(self, position: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """Potential, gradient and Hessian."""
        u, g, h = _jitted_value_grad_hessian(
            self.potential, self._cast(position), self.arguments, self.subset_indices
        )
        return float(u), np.asarray(g, np.float64), np.asarray(h, np.float64)

    def hessian_products(self, position: np.ndarray, vectors: np.ndarray) -> np.ndarray:
        """Products of the Hessian with the rows of ``vectors``, shape ``(k, d)``."""
        q, v = self._cast(position), self._cast(vectors)
        return np.asarray(
            _jitted_hessian_products(self.potential, q, v, self.arguments, self.subset_indices),
            np.float64,
        )
