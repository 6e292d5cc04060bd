r"""Partial centring of effects that the model multiplies by their scale.

In a non-centred model the rows depend on the product of an effect :math:`e` and its scale
:math:`e^{\lambda}`. Where its rows determine the product, the effect changes as
:math:`e^{-\lambda}` with the scale, and gradients of minibatches have much noise along this curve.
With a fraction :math:`\kappa` from 0 (non-centred) to 1 (centred) and the effect :math:`\hat e` at
the center, its displacement has the coordinate

.. math:: x = e^{\kappa\delta_\lambda} (e - \hat e) +
   \hat e (e^{\kappa\delta_\lambda} - 1 - \kappa\delta_\lambda),

which is the displacement itself to first order. With :math:`\kappa = 1` the product is linear in
:math:`x` and :math:`e^{\delta_\lambda}`. Reference: Papaspiliopoulos, Roberts and Sköld (2007), *A
general framework for the parametrization of hierarchical models*.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_sgmcmc.model.block_arrow import BlockArrowLayout, BlockArrowMatrix, SharedStrips


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["exponents", "effects"],
    meta_fields=["layout"],
)
@dataclass(frozen=True)
class PartialCentering:
    """Coordinates x of displacements, as flat vectors; those of shared parameters are the same."""

    exponents: SharedStrips  # minus the fraction for each scale, so that effects are e^(E delta) x
    effects: Any  # at the center, shape `(k, G)`
    layout: BlockArrowLayout

    def to_displacement(self, x: Any) -> Any:
        """Return the displacement at coordinates."""
        effects, shared = self.layout.split(x)
        t, xp = self.exponents.multiply(shared), _get_namespace(x)
        curve = self.effects * (xp.expm1(t) - t * xp.exp(t))
        return self.layout.merge(effects * xp.exp(t) + curve, shared)

    def from_displacement(self, displacement: Any) -> Any:
        """Return the coordinates of a displacement."""
        effects, shared = self.layout.split(displacement)
        t, xp = self.exponents.multiply(shared), _get_namespace(displacement)
        return self.layout.merge(effects * xp.exp(-t) + self.effects * (xp.expm1(-t) + t), shared)

    def pull_back(self, x: Any, gradient: Any) -> Any:
        """Return the gradient by coordinates from one by displacements, without the Jacobian's."""
        effects, shared = self.layout.split(x)
        of_effects, of_shared = self.layout.split(gradient)
        t = self.exponents.multiply(shared)
        of_effects = of_effects * _get_namespace(x).exp(t)
        work = of_effects * (effects - self.effects * t)
        return self.layout.merge(of_effects, of_shared + self.exponents.sum_over_groups(work))

    def push_forward(self, x: Any, gradient: Any) -> Any:
        """Return the gradient by displacements: the inverse of :meth:`pull_back`."""
        effects, shared = self.layout.split(x)
        of_effects, of_shared = self.layout.split(gradient)
        t = self.exponents.multiply(shared)
        work = of_effects * (effects - self.effects * t)
        of_shared = of_shared - self.exponents.sum_over_groups(work)
        return self.layout.merge(of_effects * _get_namespace(x).exp(-t), of_shared)

    @property
    def log_jacobian_gradient(self) -> Any:
        """Gradient of the log Jacobian determinant, the same everywhere, shape ``(d,)``."""
        ones = _get_namespace(self.effects).ones_like(self.effects)
        return self.layout.merge(0.0 * ones, self.exponents.sum_over_groups(ones))

    def scale_effects(self, shared: Any) -> Any:
        """Return derivatives of the effects by their coordinates, shape ``(..., k, G)``."""
        return _get_namespace(shared).exp(self.exponents.multiply(shared))

    def wrap_gradient(self, fn: Callable[[Any], Any], center: Any) -> Callable[[Any], Any]:
        """Return a function of coordinates that is the gradient of a function of positions."""
        return lambda x: self.pull_back(x, fn(center + self.to_displacement(x)))

    def transform_hessian(
        self, hessian: BlockArrowMatrix, gradient: np.ndarray
    ) -> BlockArrowMatrix:
        """Return the Hessian at the center by coordinates, from one by displacements.

        :param gradient: of the same function at the center.
        """
        of_effects, _ = self.layout.split(gradient)
        exponents = self.exponents.multiply(np.eye(self.layout.num_shared))
        weighted = exponents * of_effects
        curve = np.tensordot(weighted * self.effects, exponents, ((1, 2), (1, 2)))
        strips = hessian.strips.multiply(np.eye(self.layout.num_shared)) + weighted
        return replace(
            hessian, strips=SharedStrips.from_dense(strips), corner=hessian.corner - curve
        )

    def move(self, center: np.ndarray) -> PartialCentering:
        """Return the coordinates of displacements from another center."""
        return replace(self, effects=self.layout.split(center)[0])


def _get_namespace(x: Any) -> Any:
    return jnp if isinstance(x, jax.Array) else np
