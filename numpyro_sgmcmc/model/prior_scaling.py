r"""Effects given a prior scale that the data hardly determine.

Let the effects of a group have a normal prior with precision P, in which the SD of one effect j is
proportional to :math:`e^{z}`, with z linear in the displacements of the shared parameters. With
:math:`w = e^{-z}` this effect's row and column of P are proportional to w, and its diagonal entry
to :math:`w^2`. If the rows have a constant precision R about the effects, then given z

- the variance of the effect is :math:`r = 1/(1 - \tau_1 - \tau_2 + \tau_1 w + \tau_2 w^2)` times
  that at the center, where :math:`z = 0`. For an independent prior :math:`\tau_1 = 0`, and
  :math:`\tau_2` is the prior's share of the precision;
- the deviation of its mean from the location of the prior is :math:`r(c - b + bw)`, with the
  deviation c at the center, and :math:`b = 0` for an independent prior;
- the regression coefficients of the other effects a on this one are :math:`B + B'(w - 1)`, with
  :math:`B' = -(R + P)_{aa}^{-1} P_{aj}`, and their covariance given this effect does not change.

So if z has a wide posterior, SDs and means are far from linear functions of the shared parameters:
for small scales the SD and the deviation vanish with the scale.

With a triangular factor F of the group's covariance in which effect j is the first, its column is
proportional to the covariances with this effect, so that the first two changes are those of one
coordinate. It is exact for normal rows, one grouping, one such effect per group and, if the prior
has correlations, a fixed location.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.model.block_arrow import BlockArrowLayout, SharedStrips, multiply_blocks

# |z|, beyond which scales do not change: far from 44, where the square of w overflows in float32.
_MAX_LOG_SCALE = 20.0


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "exponents",
        "prior_shares",
        "linear_shares",
        "deviations",
        "linear_deviations",
        "deviation_slopes",
        "couplings",
    ],
    meta_fields=[],
)
@dataclass(frozen=True)
class PriorScaling:
    """SDs and means of effects as functions of the displacements of the shared parameters.

    The means are those of a block-arrow factor, which are linear, plus shifts of second order.
    Deviations and shifts are in SDs of the effects given the shared parameters, at the center.
    Arrays of effects have the shape ``(k, G)``, with zeros for effects without such a scale.
    """

    exponents: SharedStrips  # derivatives of z
    prior_shares: Any  # tau_2
    linear_shares: Any  # tau_1
    deviations: Any  # c
    linear_deviations: Any  # b
    # derivatives of the mean minus the location by the shared parameters, at the center
    deviation_slopes: SharedStrips
    # changes of the other effects' coordinates with the deviation, F_aa^-1 B', shape `(k, k, G)`;
    # None if priors are independent
    couplings: Any = None

    def to_linear(self, effects: Any, shared: Any) -> Any:
        """Return effects, in SDs at the center and without the linear mean, from coordinates.

        :param effects: coordinates that are standard normal given the shared parameters.
        :param shared: displacements of the shared parameters, shape ``(..., s)``.
        """
        terms = self._evaluate(shared)
        effects = effects * terms.ratios**0.5 + terms.shifts
        if self.couplings is None:
            return effects
        return effects + multiply_blocks(self.couplings, terms.compute_sources(self, effects))

    def from_linear(self, effects: Any, shared: Any) -> Any:
        """Return coordinates: the inverse of :meth:`to_linear`."""
        terms = self._evaluate(shared)
        if self.couplings is not None:  # to effects without a scale
            sources = terms.compute_sources(self, effects)
            effects = effects - multiply_blocks(self.couplings, sources)
        return (effects - terms.shifts) / terms.ratios**0.5

    def pull_back(self, effects: Any, shared: Any, of_effects: Any) -> tuple[Any, Any]:
        """Return the gradient of the potential by coordinates, and its contribution to the gradient
        by the shared parameters, from the gradient by the result of :meth:`to_linear`.

        They include the log Jacobian determinant.
        """
        terms, by_z, of_deviations = self._evaluate(shared), 0.0, 0.0
        scales = terms.ratios**0.5
        if self.couplings is not None:
            of_sources = multiply_blocks(self.couplings, of_effects, transpose=True)
            deviations = terms.deviations + terms.shifts + effects * scales
            by_z = of_sources * (self.deviations - terms.inverse_scales * deviations)
            of_deviations = of_sources * (terms.inverse_scales - 1.0)
            of_effects = of_effects + of_deviations
        of_effects_scaled = of_effects * scales
        by_z = by_z + (of_effects_scaled * effects - 1.0) * terms.slopes_of_log_sds
        by_z = by_z + of_effects * terms.slopes_of_shifts
        of_deviations = of_deviations + of_effects * (terms.ratios - 1.0)
        of_shared = self.exponents.sum_over_groups(by_z * terms.is_inside)
        return of_effects_scaled, of_shared + self.deviation_slopes.sum_over_groups(of_deviations)

    def rescale_factors(self, factors: np.ndarray, shared: np.ndarray) -> np.ndarray:
        """Return factors of the effects' covariances at other shared parameters, ``(k, k, G)``."""
        terms = self._evaluate(shared)
        if self.couplings is not None:
            changes = self.couplings * (terms.inverse_scales - 1.0)
            factors = factors + np.einsum("abg,bcg->acg", factors, changes)
        return np.asarray(factors * terms.ratios**0.5)

    def find_kinds(self, layout: BlockArrowLayout) -> np.ndarray:
        """Return the kinds of effects with such a scale, shape ``(k, groupings)``; in NumPy."""
        has_scale = (self.exponents.multiply(np.eye(layout.num_shared)) != 0.0).any(0)
        return np.stack([has_scale[:, columns].any(1) for columns, _ in layout.groupings], -1)

    def _evaluate(self, shared: Any) -> _Terms:
        z, xp = self.exponents.multiply(shared), jnp if isinstance(shared, jax.Array) else np
        is_inside = abs(z) < _MAX_LOG_SCALE
        z = xp.clip(z, -_MAX_LOG_SCALE, _MAX_LOG_SCALE)
        w, slopes = xp.exp(-z), self.deviation_slopes.multiply(shared)
        of_rows = 1.0 - self.linear_shares - self.prior_shares
        ratios = 1.0 / (of_rows + w * (self.linear_shares + w * self.prior_shares))
        slopes_of_log_sds = ratios * w * (0.5 * self.linear_shares + w * self.prior_shares)
        means = self.deviations + self.linear_deviations * (w - 1.0)
        # Of the mean by z, at the center, where linear means have it.
        slope = (self.linear_shares + 2.0 * self.prior_shares) * self.deviations
        slope = slope - self.linear_deviations
        shifts = ratios * means - self.deviations + (ratios - 1.0) * slopes - slope * z * ratios
        slopes_of_shifts = 2.0 * slopes_of_log_sds * (means + slopes - slope * z)
        slopes_of_shifts = ratios * (slopes_of_shifts - self.linear_deviations * w - slope)
        return _Terms(
            z,
            w,
            is_inside,
            ratios,
            slopes_of_log_sds,
            self.deviations + slopes,
            shifts,
            slopes_of_shifts,
        )


class _Terms(NamedTuple):
    """Functions of the shared parameters, each of shape ``(..., k, G)``."""

    z: Any
    inverse_scales: Any  # w
    is_inside: Any  # whether z is not clipped
    ratios: Any  # r
    slopes_of_log_sds: Any  # by z
    deviations: Any  # the linear deviations of the means from the location
    shifts: Any  # of the means, relative to the linear ones
    slopes_of_shifts: Any  # by z

    def compute_sources(self, scaling: PriorScaling, effects: Any) -> Any:
        """Return the deviations times w - 1, without terms of first order, which linear means
        include.
        """
        deviations = self.deviations + effects
        return (self.inverse_scales - 1.0) * deviations + self.z * scaling.deviations
