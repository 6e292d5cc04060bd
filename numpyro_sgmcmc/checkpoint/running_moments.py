"""Running means and variances of draws, which need not be kept; in float64 on the host.

They are updated one draw at a time (Welford, 1962; West, 1979, with weights), so that the result
is bitwise the same however the run is cut into segments.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np


class RunningMoments(NamedTuple):
    """Running moments of each chain's draws."""

    weight: np.ndarray  # sum of the draws' weights, shape `(chains,)`
    mean: Any  # weighted means, a pytree of arrays of shape `(chains, ...)`
    m2: Any  # weighted sums of squared deviations from the mean, of the same shapes

    @classmethod
    def zeros(cls, draws: Any) -> RunningMoments:
        """Return moments of no draws, for draws with leaves of shape ``(chains, draws, ...)``."""
        leaves = jax.tree.leaves(draws)
        zeros = jax.tree.map(lambda x: np.zeros((x.shape[0], *x.shape[2:])), draws)
        weight = np.zeros(leaves[0].shape[0] if leaves else 1)
        return cls(weight, zeros, jax.tree.map(np.copy, zeros))

    def add(self, draws: Any, weights: np.ndarray) -> RunningMoments:
        r"""Return the moments with more draws.

        With weight w and new total W, :math:`\delta = x - m`, :math:`m \leftarrow m + (w/W)\delta`
        and :math:`M_2 \leftarrow M_2 + w\,\delta\,(x - m)` with the new m.
        """
        total, steps = self.weight, []
        for w in np.asarray(weights, np.float64).T:
            total = total + w
            steps.append((w, np.divide(w, total, out=np.zeros_like(w), where=total > 0)))
        leaves, structure = jax.tree.flatten(draws)
        means, m2s = jax.tree.leaves(self.mean), jax.tree.leaves(self.m2)
        # A diverging chain can reach 1e20, whose square overflows; the result shows it.
        with np.errstate(over="ignore", invalid="ignore"):
            for i, x in enumerate(leaves):
                x = np.asarray(x, np.float64)
                for k, (w, share) in enumerate(steps):
                    delta = x[:, k] - means[i]
                    means[i] = means[i] + _append_axes(share, delta.ndim) * delta
                    m2s[i] = m2s[i] + _append_axes(w, delta.ndim) * delta * (x[:, k] - means[i])
        return RunningMoments(
            total, jax.tree.unflatten(structure, means), jax.tree.unflatten(structure, m2s)
        )

    def mean_and_variance(self, group_by_chain: bool) -> tuple[Any, Any]:
        """Return mean and variance of each chain's draws, or of all draws together."""
        if group_by_chain:
            variance = jax.tree.map(lambda m2: m2 / _append_axes(self.weight, m2.ndim), self.m2)
            return self.mean, variance
        total = self.weight.sum()

        def pool_means(mean: np.ndarray) -> np.ndarray:
            return (mean * _append_axes(self.weight, mean.ndim)).sum(0) / total

        def pool_variances(m2: np.ndarray, mean: np.ndarray, pooled: np.ndarray) -> np.ndarray:
            return (m2 + _append_axes(self.weight, m2.ndim) * (mean - pooled) ** 2).sum(0) / total

        pooled_mean = jax.tree.map(pool_means, self.mean)
        return pooled_mean, jax.tree.map(pool_variances, self.m2, self.mean, pooled_mean)


def _append_axes(x: np.ndarray, ndim: int) -> np.ndarray:
    """Reshape per-chain values, shape ``(chains,)``, to broadcast against ``ndim`` axes."""
    return x.reshape((-1,) + (1,) * (ndim - 1))
