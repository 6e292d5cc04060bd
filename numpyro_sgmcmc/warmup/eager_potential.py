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
from numpyro_sgmcmc.posterior.target import Target

__all__ = ["EagerPotential", "draw_subset"]

_SUBSET_ROWS = 20_000
_RUN_BYTES = 2**14

_value = jax.jit(Target.full_potential, static_argnums=0)
_gradient = jax.jit(Target.full_gradient, static_argnums=0)
_expansion = jax.jit(Target.full_expansion, static_argnums=0)
_products = jax.jit(Target.full_hessian_products, static_argnums=0)


def run_length(target: Target, plate: Plate) -> int:
    """Rows that random rows are drawn in: one, or as many as share some pages of the disk."""
    widths = [x.array for x in target.lookups if x.plate == plate.name]
    widths = [x.row_size * x.dtype.itemsize for x in widths]
    fitting = max(1, _RUN_BYTES // max(1, *widths)) if widths else 1
    return max(r for r in range(1, min(fitting, plate.part) + 1) if plate.part % r == 0)


def draw_subset(target: Target, seed: int, num: int = _SUBSET_ROWS) -> Indices | None:
    """Random rows that stand for all rows, ``num`` a plate, and no fewer than a minibatch has.

    :return: None where no plate has more, and all rows of it are on one device.
    """
    num = max([num, *(p.subsample_size for p in target.plates)])
    if all(p.size <= num and p.shards is None for p in target.plates):
        return None
    rng = np.random.default_rng(seed)
    return {p.name: _some_rows(p, rng, run_length(target, p), num) for p in target.plates}


def _some_rows(plate: Plate, rng: np.random.Generator, run: int, num: int) -> np.ndarray:
    """Sorted rows of one plate; where they are spread over devices, as many of each shard."""
    if plate.size <= num and plate.shards is None:
        return np.arange(plate.size, dtype=np.int32)
    firsts, counts = plate.strata
    each = -(-num // (run * len(counts)))
    starts = np.sort(rng.integers(0, counts, (len(counts), each)))
    rows = (starts[..., None] + np.arange(run)) % counts[..., None]
    return (firsts + rows.reshape(len(counts), -1)).reshape(-1).astype(np.int32)


class EagerPotential:
    """The full-data potential, or that of a subset of the rows, at positions of float64.

    :param target: the posterior.
    :param arguments: the model's arguments.
    :param subset: rows that stand for all, or None for all rows.
    """

    def __init__(self, target: Target, arguments: Arguments, subset: Indices | None = None) -> None:
        self.target, self.arguments, self.subset = target, arguments, subset
        self._cast = partial(np.asarray, dtype=target.dtype)

    @classmethod
    def on_some_rows(cls, target: Target, arguments: Arguments) -> EagerPotential:
        """The potential on a fixed random subset of the rows, for work that bears its error."""
        return cls(target, arguments, draw_subset(target, 0))

    def value(self, position: np.ndarray) -> float:
        """The potential."""
        return float(_value(self.target, self._cast(position), self.arguments, self.subset))

    def gradient(self, position: np.ndarray) -> np.ndarray:
        """The gradient, shape ``(d,)``."""
        g = _gradient(self.target, self._cast(position), self.arguments, self.subset)
        return np.asarray(g, np.float64)

    def expansion(self, position: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """Potential, gradient and Hessian."""
        u, g, h = _expansion(self.target, self._cast(position), self.arguments, self.subset)
        return float(u), np.asarray(g, np.float64), np.asarray(h, np.float64)

    def hessian_products(self, position: np.ndarray, vectors: np.ndarray) -> np.ndarray:
        """Products of the Hessian with the rows of ``vectors``, shape ``(k, d)``."""
        q, v = self._cast(position), self._cast(vectors)
        return np.asarray(_products(self.target, q, v, self.arguments, self.subset), np.float64)
