r"""Effects of a hierarchy that the model multiplies by their scale, and their partial centring.

Where the rows depend on effects :math:`e` and a shared parameter :math:`\psi_j` only by the product
:math:`e^{a\psi_j}e`, their part of the potential is constant along
:math:`(\delta e, \delta\psi_j) = (-a e, 1)` at every position. So their Hessian H and gradient g
have :math:`H_{\cdot j} = H_{\cdot e}(a \circ e) + a \circ g_e`. The exponents a of the effects of
each grouping are found by least squares, and the products from what is left.
"""

from __future__ import annotations

import numpy as np

from numpyro_sgmcmc.model.block_arrow import (
    BlockArrowFactor,
    BlockArrowLayout,
    BlockArrowMatrix,
    SharedStrips,
)
from numpyro_sgmcmc.model.partial_centering import PartialCentering

# Size of what is left relative to the Hessian's column, in units of the posterior SDs, up to which
# effects are multiplied by a scale: float32 leaves about 1e-4.
_MAX_REMAINDER = 1e-2
_MIN_EXPONENT = 0.1  # 1 for the logarithm of an SD, 0.5 for that of a variance
# Mean over groups of the fraction of an effect's precision that is from the rows, from which on
# its centring pays.
_MIN_CENTERED_FRACTION = 0.5


def find_partial_centering(
    rows_hessian: BlockArrowMatrix,
    rows_gradient: np.ndarray,
    center: np.ndarray,
    prior_precisions: np.ndarray,
    factor: BlockArrowFactor,
) -> PartialCentering | None:
    """Return the partial centring of effects that a scale multiplies, None without such.

    :param rows_hessian: Hessian at the center of the rows' part of the potential.
    :param prior_precisions: of each effect, shape ``(k, G)``.
    :param factor: with the posterior SDs.
    """
    layout = rows_hessian.layout
    effects, _ = layout.split(center)
    of_effects, _ = layout.split(rows_gradient)
    sds = np.sqrt(factor.apply_squared(np.ones(layout.dim)))
    units = np.eye(layout.num_shared)
    columns = np.stack([rows_hessian @ layout.merge(0.0 * effects, x) for x in units]) * sds
    kinds = _list_kinds(layout)
    # The change of the gradient along a relative change of all effects of a kind.
    no_shared = np.zeros(layout.num_shared)
    changes = (
        np.stack(
            [
                rows_hessian @ layout.merge(kind * effects, no_shared)
                + layout.merge(kind * of_effects, no_shared)
                for kind in kinds
            ]
        )
        * sds
    )
    exponents = np.linalg.lstsq(changes.T, columns.T, rcond=None)[0].T
    remainders = np.linalg.norm(columns - exponents @ changes, axis=1)
    is_scale = remainders < _MAX_REMAINDER * np.linalg.norm(columns, axis=1)
    precisions = np.einsum("aag->ag", rows_hessian.blocks)
    fractions = precisions / np.maximum(precisions + prior_precisions, np.finfo(float).tiny)
    fractions = np.clip(fractions, 0.0, 1.0)
    is_determined = (kinds * fractions).sum((1, 2)) > _MIN_CENTERED_FRACTION * kinds.sum((1, 2))
    is_kept = is_scale[:, None] & is_determined & (np.abs(exponents) > _MIN_EXPONENT)
    if not is_kept.any():
        return None
    strips = -np.tensordot(np.where(is_kept, exponents, 0.0), kinds, 1) * fractions
    return PartialCentering(SharedStrips.from_dense(strips), effects, layout)


def _list_kinds(layout: BlockArrowLayout) -> np.ndarray:
    """Return one for each effect of the groups of a grouping, else zero, shape ``(n, k, G)``."""
    kinds = []
    for columns, num_effects in layout.groupings:
        for j in range(num_effects):
            kind = np.zeros((layout.effects_per_group, layout.num_groups))
            kind[j, columns] = 1.0
            kinds.append(kind)
    return np.stack(kinds)
