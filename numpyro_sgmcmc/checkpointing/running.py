"""Running means and variances of draws that need not be kept, in float64 on the host.

Draw by draw (Welford 1962; West 1979 with weights), so that the result is the same to the last bit
however the run is cut into segments.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

__all__ = ["RunningMoments"]


class RunningMoments(NamedTuple):
    """
    - **weight** - sum of the draws' weights, shape ``(chains,)``.
    - **mean** - weighted means, a pytree of arrays of shape ``(chains, ...)``.
    - **m2** - weighted sums of squared deviations from the mean, of the same shapes.
    """

    weight: np.ndarray
    mean: Any
    m2: Any

    @classmethod
    def zeros(cls, draws: Any) -> RunningMoments:
        """Moments of no draws; ``draws`` has leaves of shape ``(chains, draws, ...)``."""
        leaves = jax.tree.leaves(draws)
        empty = jax.tree.map(lambda x: np.zeros((x.shape[0], *x.shape[2:])), draws)
        weight = np.zeros(leaves[0].shape[0] if leaves else 1)
        return cls(weight, empty, jax.tree.map(np.copy, empty))

    def add(self, draws: Any, weights: np.ndarray) -> RunningMoments:
        """With some draws more.

        :param draws: leaves of shape ``(chains, draws, ...)``.
        :param weights: not negative, shape ``(chains, draws)``.
        """
        total, shares = self.weight, []
        for w in np.asarray(weights, np.float64).T:
            total = total + w
            shares.append((w, np.divide(w, total, out=np.zeros_like(w), where=total > 0)))

        def follow(mean: np.ndarray, square: np.ndarray, x: np.ndarray) -> tuple:
            column = (-1,) + (1,) * (mean.ndim - 1)
            for k, (w, share) in enumerate(shares):
                away = x[:, k] - mean
                mean = mean + share.reshape(column) * away
                square = square + w.reshape(column) * away * (x[:, k] - mean)
            return mean, square

        leaves, structure = jax.tree.flatten(draws)
        before = zip(jax.tree.leaves(self.mean), jax.tree.leaves(self.m2), leaves, strict=True)
        # Deviations of 10^20 are squared too; that is the draws' doing and seen in the result.
        with np.errstate(over="ignore", invalid="ignore"):
            pairs = [follow(m, s, np.asarray(x, np.float64)) for m, s, x in before]
        mean = jax.tree.unflatten(structure, [m for m, _ in pairs])
        return RunningMoments(total, mean, jax.tree.unflatten(structure, [s for _, s in pairs]))

    def compute_chain_moments(self) -> tuple[Any, Any]:
        """Means and variances of each chain, leaves of shape ``(chains, ...)``."""
        variance = jax.tree.map(lambda s: s / self._broadcast_weight(s), self.m2)
        return self.mean, variance

    def compute_pooled_moments(self) -> tuple[Any, Any]:
        """Mean and variance of the draws of all chains together, leaves of shape ``(...)``."""
        total = self.weight.sum()
        mean = jax.tree.map(lambda m: (m * self._broadcast_weight(m)).sum(0) / total, self.mean)

        def variance(s: np.ndarray, m: np.ndarray, centre: np.ndarray) -> np.ndarray:
            return (s + self._broadcast_weight(m) * (m - centre) ** 2).sum(0) / total

        return mean, jax.tree.map(variance, self.m2, self.mean, mean)

    def _broadcast_weight(self, x: np.ndarray) -> np.ndarray:
        return self.weight.reshape((-1,) + (1,) * (x.ndim - 1))
