r"""Effects given a prior scale that the data hardly determine.

Let an effect have a normal prior with an SD proportional to :math:`e^{z}`, where z is linear in the
displacements of the shared parameters, and let :math:`\tau` be the prior's share of its precision
at the center, where :math:`z = 0`. If its rows have a constant precision, its variance given the
shared parameters is r times that at the center, and the prior's share of the precision is
:math:`\tau_z`:

.. math:: r = \frac{1}{1 - \tau + \tau e^{-2z}}, \quad \tau_z = \tau e^{-2z} r =
   \tfrac12\frac{d\log r}{dz}.

Its mean deviates from the location of its prior by r times the deviation c at the center. So if z
has a wide posterior, SD and mean are far from linear functions of the shared parameters: for small
scales the SD and the deviation vanish with the scale.

The other effects of the group move with this effect. With a triangular factor F of the group's
covariance in which this effect is the first, its column is proportional to the covariances with
this effect, so that all of this is a change of one coordinate. It is exact for normal rows and
independent priors of the effects of a group, of which one has such a scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.model.block_arrow import BlockArrowLayout, SharedStrips

_MAX_LOG_SCALE = 20.0  # |z|, beyond which scales do not change: float32 would overflow


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["exponents", "shares", "deviations", "slopes"],
    meta_fields=[],
)
@dataclass(frozen=True)
class PriorScaling:
    """SDs and means of effects as functions of the displacements of the shared parameters.

    The means are those of a block-arrow factor, which are linear, plus shifts of second order.
    Deviations and shifts are in SDs of the effects given the shared parameters, at the center.
    """

    exponents: SharedStrips  # derivatives of z
    shares: Any  # of the prior in the precision at the center, shape `(k, G)`
    deviations: Any  # c, of the mean from the location of the prior at the center
    # derivatives of the mean minus the location by the shared parameters, at the center
    slopes: SharedStrips

    def evaluate(self, shared: Any) -> tuple[Any, Any]:
        """Return SDs relative to those at the center, and shifts, each ``(..., k, G)``."""
        z, ratios, _ = self._evaluate_ratios(shared)
        deviations = self.deviations + self.slopes.multiply(shared)
        shifts = (ratios - 1.0) * deviations - 2.0 * self.shares * self.deviations * z * ratios
        return ratios**0.5, shifts

    def differentiate(self, shared: Any, of_log_sds: Any, of_shifts: Any) -> Any:
        """Return the derivative by the shared parameters, shape ``(..., s)``.

        :param of_log_sds: derivatives of a function by the logarithms of the SDs, ``(..., k, G)``.
        :param of_shifts: derivatives by the shifts.
        """
        z, ratios, shares = self._evaluate_ratios(shared)
        deviations, linear = self.slopes.multiply(shared), self.shares * self.deviations
        deviations = shares * (self.deviations + deviations - 2.0 * linear * z)
        by_z = of_log_sds * shares + of_shifts * 2.0 * ratios * (deviations - linear)
        by_z = by_z * (abs(z) < _MAX_LOG_SCALE)
        of_slopes = self.slopes.sum_over_groups(of_shifts * (ratios - 1.0))
        return self.exponents.sum_over_groups(by_z) + of_slopes

    def find_kinds(self, layout: BlockArrowLayout) -> np.ndarray:
        """Return the exponents of each effect of the groupings, ``(s, k, groupings)``; in NumPy."""
        exponents = self.exponents.multiply(np.eye(layout.num_shared))
        return np.stack([exponents[..., columns.start] for columns, _ in layout.groupings], -1)

    def _evaluate_ratios(self, shared: Any) -> tuple[Any, Any, Any]:
        """Return z, r and the prior's share of the precision."""
        z, xp = self.exponents.multiply(shared), jnp if isinstance(shared, jax.Array) else np
        z = xp.clip(z, -_MAX_LOG_SCALE, _MAX_LOG_SCALE)
        power, of_rows, is_small = xp.exp(-2.0 * abs(z)), 1.0 - self.shares, z < 0.0
        of_prior = xp.where(is_small, self.shares, self.shares * power)
        precisions = xp.where(is_small, of_rows * power, of_rows) + of_prior
        return z, xp.where(is_small, power, 1.0) / precisions, of_prior / precisions
