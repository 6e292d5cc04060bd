r"""Effects given a prior scale that the data hardly determine.

Let an effect have the prior SD :math:`s\,e^{z}`, with z linear in the displacements of the shared
parameters, and let :math:`\tau` be the prior's share of its precision at the center, where
:math:`z = 0`. With rows whose information R about it is constant, its variance given the shared
parameters is r(z) times that at the center, and its prior's share of the precision there is
:math:`\tau_z`:

.. math:: r = \frac{1}{1 - \tau + \tau e^{-2z}}, \quad \tau_z = \tau e^{-2z} r =
   \tfrac12\frac{d\log r}{dz}.

Its mean deviates from the location of its prior by r times the deviation c at the center. So where
z has a wide posterior, SD and mean are far from linear functions of the shared parameters: for
small scales both vanish with the scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.model.block_arrow import BlockArrowLayout, SharedStrips


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["exponents", "shares", "deviations", "slopes"],
    meta_fields=[],
)
@dataclass(frozen=True)
class PriorScaling:
    """SDs and means of effects as functions of the displacements of the shared parameters.

    The means are the linear ones of a block-arrow factor plus :meth:`compute_shifts`, which are
    zero to first order.
    """

    exponents: SharedStrips  # derivatives of z
    shares: Any  # of the prior in the precision at the center, shape `(k, G)`
    deviations: Any  # c
    # of the deviations from the location of the prior, by the shared parameters, in the linear
    # approximation: those of the mean by the scales; of other parameters minus what the rows' share
    # takes from the derivative of the location
    slopes: SharedStrips

    def scale_effects(self, shared: Any) -> Any:
        """Return SDs relative to those at the center, shape ``(..., k, G)``."""
        return self._evaluate(shared)[1] ** 0.5

    def differentiate_scales(self, shared: Any, products: Any) -> Any:
        """Return sums over groups of products times derivatives of log SDs, shape ``(..., s)``."""
        return self.exponents.sum_over_groups(products * self._evaluate(shared)[2])

    def compute_shifts(self, shared: Any) -> Any:
        """Return the means minus the linear ones, shape ``(..., k, G)``."""
        z, ratios, _ = self._evaluate(shared)
        deviations = self.deviations + self.slopes.multiply(shared)
        return (ratios - 1.0) * deviations - 2.0 * self.shares * self.deviations * z * ratios

    def differentiate_shifts(self, shared: Any, of_effects: Any) -> Any:
        """Return sums over groups of gradients times derivatives of shifts, shape ``(..., s)``."""
        z, ratios, shares = self._evaluate(shared)
        deviations = self.deviations + self.slopes.multiply(shared)
        linear = self.shares * self.deviations
        by_z = 2.0 * ratios * (shares * (deviations - 2.0 * linear * z) - linear)
        return self.exponents.sum_over_groups(of_effects * by_z) + self.slopes.sum_over_groups(
            of_effects * (ratios - 1.0)
        )

    def find_kinds(self, layout: BlockArrowLayout) -> np.ndarray:
        """Return the kinds of effects with such a scale, shape ``(k, groupings)``; for NumPy."""
        has_scale = self.exponents.multiply(np.eye(layout.num_shared)).any(0)
        return np.stack([has_scale[:, columns].any(1) for columns, _ in layout.groupings], -1)

    def _evaluate(self, shared: Any) -> tuple[Any, Any, Any]:
        """Return z, r and the prior's share of the precision."""
        z, xp = self.exponents.multiply(shared), jnp if isinstance(shared, jax.Array) else np
        of_rows = 1.0 - self.shares
        ratios = 1.0 / (of_rows + self.shares * xp.exp(-2.0 * z))
        return z, ratios, self.shares / (self.shares + of_rows * xp.exp(2.0 * z))
