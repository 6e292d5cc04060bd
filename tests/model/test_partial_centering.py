"""Partial centring: its maps have inverses, and gradients are those of the transformed density."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import expm

from numpyro_sgmcmc.model.block_arrow import (
    BlockArrowFactor,
    BlockArrowLayout,
    BlockArrowMatrix,
    EffectSite,
    GroupNesting,
    SharedStrips,
)
from numpyro_sgmcmc.model.partial_centering import MatrixCentering, PartialCentering
from numpyro_sgmcmc.model.preconditioner import Preconditioner

# Twelve schools in six districts, and three shared parameters.
LAYOUT = BlockArrowLayout(21, (EffectSite(1, (6,), (0,)), EffectSite(8, (12,), (0,), grouping=1)))
SHARED_SHAPE = LAYOUT.num_shared, LAYOUT.effects_per_group, LAYOUT.num_groups

# Seven groups of two effects, and three shared parameters.
MATRIX_LAYOUT = BlockArrowLayout(17, (EffectSite(1, (7, 2), (0,)),))


def make_centering(rng):
    exponents = -rng.uniform(0.0, 1.0, SHARED_SHAPE)
    exponents[0] = 0.0
    effects = rng.standard_normal(SHARED_SHAPE[1:])
    return PartialCentering(SharedStrips.from_dense(exponents), effects, LAYOUT)


def make_matrix_centering(rng):
    generators = 0.5 * rng.standard_normal((3, 2, 2))
    generators[0] = 0.0
    coefficients = 0.3 * rng.standard_normal((4, 2, 2))
    powers = (0, 2, 0), (0, 1, 1), (0, 0, 2), (0, 2, 1)
    effects = rng.standard_normal((2, 7))
    return MatrixCentering(generators, effects, MATRIX_LAYOUT, coefficients, powers)


def make_matrix_preconditioner(rng):
    factors = rng.standard_normal((2, 2, 7))
    inverse_factors = np.moveaxis(np.linalg.inv(np.moveaxis(factors, -1, 0)), 0, -1)
    factor = BlockArrowFactor(
        factors,
        inverse_factors,
        SharedStrips.from_dense(rng.standard_normal((3, 2, 7))),
        rng.standard_normal((3, 3)),
        MATRIX_LAYOUT,
        centering=make_matrix_centering(rng),
    )
    return Preconditioner(rng.standard_normal(MATRIX_LAYOUT.dim), factor)


def make_preconditioner(rng):
    parents = np.concatenate([np.arange(6), np.arange(12) % 6]).astype(np.int32)
    coupling = np.zeros((1, 1, 18))
    coupling[0, 0, 6:] = rng.standard_normal(12)
    factors = rng.uniform(0.5, 2.0, (1, 1, 18))
    factor = BlockArrowFactor(
        factors,
        1.0 / factors,
        SharedStrips.from_dense(rng.standard_normal(SHARED_SHAPE)),
        rng.standard_normal((3, 3)),
        LAYOUT,
        nesting=GroupNesting(parents, coupling),
        centering=make_centering(rng),
    )
    return Preconditioner(rng.standard_normal(LAYOUT.dim), factor)


@pytest.mark.parametrize("make", [make_centering, make_matrix_centering])
def test_maps_have_inverses(make):
    rng = np.random.default_rng(0)
    centering = make(rng)
    x, gradient = rng.standard_normal((2, centering.layout.dim))
    displacement = centering.to_displacement(x)
    np.testing.assert_allclose(centering.from_displacement(displacement), x, atol=1e-12)
    pulled_back = centering.pull_back(x, gradient)
    np.testing.assert_allclose(centering.push_forward(x, pulled_back), gradient, atol=1e-12)


def test_products_with_fully_centred_effects_are_linear_in_the_scale():
    centering = make_centering(np.random.default_rng(0))
    exponents = np.zeros(SHARED_SHAPE)
    exponents[1] = -1.0
    centering = replace(centering, exponents=SharedStrips.from_dense(exponents))
    rng = np.random.default_rng(1)
    effects, shared = rng.standard_normal((18,))[None], 0.5 * rng.standard_normal(3)
    moved, _ = LAYOUT.split(centering.to_displacement(LAYOUT.merge(effects, shared)))
    product = np.exp(shared[1]) * (centering.effects + moved)
    np.testing.assert_allclose(product, effects + centering.effects * (1.0 + shared[1]))


def test_products_with_a_matrix_are_linear_in_the_coordinates():
    rng = np.random.default_rng(0)
    centering = make_matrix_centering(rng)
    effects, shared = rng.standard_normal((2, 7)), np.array([0.4, 0.9, -0.5])
    moved, _ = MATRIX_LAYOUT.split(centering.to_displacement(MATRIX_LAYOUT.merge(effects, shared)))
    linear = np.tensordot(shared, centering.generators, 1)
    monomials = (shared ** np.array(centering.powers)).prod(1)
    exponent = linear + np.tensordot(monomials, centering.coefficients, 1)
    products = expm(exponent) @ (centering.effects + moved)
    expected = effects + (np.eye(2) + linear) @ centering.effects
    np.testing.assert_allclose(products, expected, atol=1e-9)


@pytest.mark.parametrize("make", [make_preconditioner, make_matrix_preconditioner])
def test_gradient_is_that_of_the_transformed_density(make):
    rng = np.random.default_rng(2)
    preconditioner = make(rng)
    q = 0.5 * rng.standard_normal(preconditioner.center.size)

    def potential(position):
        return jnp.sum(jnp.cosh(position)) + jnp.sum(position[1:] * position[:-1]) ** 2

    def transformed(preconditioner, q):
        _, log_det = jnp.linalg.slogdet(jax.jacobian(preconditioner.to_position)(q))
        return potential(preconditioner.to_position(q)) - log_det

    expected = jax.grad(transformed, 1)(preconditioner.cast(jnp.float32), jnp.asarray(q))
    gradient = np.asarray(jax.grad(potential)(jnp.asarray(preconditioner.to_position(q))))
    pulled_back = preconditioner.pull_back(q, gradient)
    size = np.abs(expected).max()
    np.testing.assert_allclose(pulled_back, expected, atol=1e-4 * size)
    # The report's coordinates are linear functions of the position.
    np.testing.assert_allclose(
        preconditioner.to_report_coordinates(q),
        preconditioner.solve(preconditioner.to_position(q) - preconditioner.center),
    )
    of_sites = preconditioner.gradient_to_report_coordinates(q, pulled_back)
    np.testing.assert_allclose(of_sites, preconditioner.apply_transpose(gradient), atol=1e-9 * size)


@pytest.mark.parametrize("has_strips", [False, True])
def test_transposed_factor_has_its_inverse(has_strips):
    rng = np.random.default_rng(3)
    factor = make_preconditioner(rng).factor
    if has_strips:
        factor = replace(factor, nesting=None, has_strips=True)
    gradient = rng.standard_normal((4, LAYOUT.dim))
    found = factor.solve_transpose(factor.apply_transpose(gradient))
    np.testing.assert_allclose(found, gradient, atol=1e-9)


@pytest.mark.parametrize("make", [make_preconditioner, make_matrix_preconditioner])
def test_coordinates_about_another_center_have_the_same_scale(make):
    """The map from the new coordinates to the old is linear in the effects given the shared."""
    rng = np.random.default_rng(4)
    preconditioner = make(rng)
    layout = preconditioner.factor.layout
    no_effects = np.zeros((layout.effects_per_group, layout.num_groups))
    center = preconditioner.to_position(layout.merge(no_effects, 0.3 * rng.standard_normal(3)))
    shift = layout.take_shared(preconditioner.from_position(center))
    factor = preconditioner.factor.refit_shared(shift, np.eye(3))
    factor = replace(factor, centering=factor.centering.move(center))
    moved = Preconditioner(center, factor)
    effects = rng.standard_normal(no_effects.shape)
    expected = preconditioner.to_position(layout.merge(effects, shift)) - center
    moved_effects = layout.merge(effects, np.zeros(3))
    found = moved.to_position(moved_effects) - center
    np.testing.assert_allclose(moved.solve(moved.apply(moved_effects)), moved_effects, atol=1e-9)
    np.testing.assert_allclose(found, expected, atol=1e-9)


@pytest.mark.parametrize("make", [make_centering, make_matrix_centering])
def test_hessian_and_blocks_are_those_of_the_transformed_function(make):
    rng = np.random.default_rng(5)
    centering = make(rng)
    layout = centering.layout
    size, num_groups = centering.effects.shape
    blocks = rng.standard_normal((size, size, num_groups))
    corner = rng.standard_normal((3, 3))
    strips = SharedStrips.from_dense(rng.standard_normal((3, size, num_groups)))
    matrix = BlockArrowMatrix(blocks + blocks.swapaxes(0, 1), strips, corner + corner.T, layout)
    gradient, units = rng.standard_normal(layout.dim), np.eye(layout.dim)
    dense = jnp.asarray(matrix @ units, "f")
    centering_32 = jax.tree.map(lambda x: jnp.asarray(x, "f"), centering)

    def fn(x):
        displacement = centering_32.to_displacement(x)
        return jnp.asarray(gradient, "f") @ displacement + displacement @ dense @ displacement / 2

    expected = jax.hessian(fn)(jnp.zeros(layout.dim, "f"))
    found = centering.transform_hessian(matrix, gradient) @ units
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    # Elsewhere the map is linear in the effects alone.
    shared = 0.3 * rng.standard_normal(3)
    x = jnp.asarray(layout.merge(np.zeros((size, num_groups)), shared), "f")
    probes = layout.make_probes(with_shared=False)
    expected = layout.make_blocks(probes @ np.asarray(jax.hessian(fn)(x)))
    found = centering.transform_blocks(shared, matrix.blocks)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
