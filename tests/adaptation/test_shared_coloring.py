"""Few products determine how shared parameters couple with effects and with each other."""

import numpy as np
import pytest

from numpyro_sgmcmc.adaptation.shared_coloring import SharedColoring
from numpyro_sgmcmc.model.block_arrow import BlockArrowLayout, BlockArrowMatrix, EffectSite

GROUPS, EFFECTS = 7, 4
NUM_SHARED = 2 * EFFECTS + 1
LAYOUT = BlockArrowLayout(
    NUM_SHARED + GROUPS * EFFECTS, (EffectSite(EFFECTS, (GROUPS, EFFECTS), (0,)),)
)


def make_hessian(is_dense=False, seed=0):
    """Return a Hessian of means and scales of four effects and one SD of the rows."""
    rng = np.random.default_rng(seed)
    blocks = rng.standard_normal((EFFECTS, EFFECTS, GROUPS))
    strips = rng.standard_normal((NUM_SHARED, EFFECTS, GROUPS))
    corner = rng.standard_normal((NUM_SHARED, NUM_SHARED))
    if not is_dense:
        unit = np.eye(EFFECTS)
        strips *= np.concatenate([unit, unit, np.ones((1, EFFECTS))])[..., None]
        has_entry = np.eye(NUM_SHARED)
        has_entry[:-1, :-1] += np.kron([[0.0, 1.0], [1.0, 0.0]], unit)
        corner *= has_entry
    products = LAYOUT.merge(
        np.concatenate([blocks + blocks.swapaxes(0, 1), strips]),
        np.concatenate([np.moveaxis(strips.sum(-1), 1, 0), corner + corner.T]),
    )
    return BlockArrowMatrix.from_products(LAYOUT, products)


@pytest.mark.parametrize(("is_dense", "num_colors"), [(False, 3), (True, NUM_SHARED)])
def test_coloring_recovers_strips_and_corner_from_a_product_of_each_color(is_dense, num_colors):
    coloring = SharedColoring.find(make_hessian(is_dense))
    assert coloring.num_colors == num_colors
    hessian = make_hessian(is_dense, seed=1)  # other values in the same places
    products = np.stack([hessian @ v for v in coloring.make_probes().astype(float)])
    strips, corner = coloring.recover(products)
    np.testing.assert_allclose(corner, hessian.corner, atol=1e-12)
    units = np.eye(NUM_SHARED)
    np.testing.assert_allclose(strips.multiply(units), hessian.strips.multiply(units), atol=1e-12)
    assert (strips.columns is None) == is_dense


@pytest.mark.parametrize("is_dense", [False, True])
def test_sum_of_squares_of_strips_with_factors(is_dense):
    strips = make_hessian(is_dense).strips
    factors = np.random.default_rng(2).standard_normal((EFFECTS, EFFECTS, GROUPS))
    products = np.einsum("bag,sbg->sag", factors, strips.multiply(np.eye(NUM_SHARED)))
    expected = np.einsum("sag,tag->st", products, products)
    np.testing.assert_allclose(strips.sum_squares(factors), expected, rtol=1e-10)
