"""The factor that whitens, from curvature, draws and gradients, where its answer is known."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from numpyro_sgmcmc import SGRHMC, SGHMCSplit
from numpyro_sgmcmc.adaptation.batched_gradients import assemble_hessian
from numpyro_sgmcmc.adaptation.preconditioning import (
    assemble_dense_factor,
    factor_from_curvature,
    factor_from_gradients,
    factorize_spd,
)
from numpyro_sgmcmc.model.preconditioner import LowRankFactor, Preconditioner
from tests.adaptation.potentials import Quadratic, random_covariance


@pytest.mark.parametrize("d", [1, 2, 20])
@pytest.mark.parametrize("span", [0, 6])
def test_symmetric_root(d, span):
    scale = 10.0 ** np.linspace(-span, span, d)
    matrix = random_covariance(d) * np.outer(scale, scale)
    root, inverse_root = factorize_spd(matrix), factorize_spd(matrix, inverse=True)
    np.testing.assert_allclose(
        (root @ root.T) / np.outer(scale, scale), random_covariance(d), atol=1e-12
    )
    # The whitened matrix is the identity, whatever the units of the columns.
    np.testing.assert_allclose(inverse_root.T @ matrix @ inverse_root, np.eye(d), atol=1e-10)


def test_symmetric_root_turns_negative_curvature_round():
    vectors = np.linalg.qr(np.random.default_rng(0).standard_normal((3, 3)))[0]
    matrix = np.diag([2.0, -2.0, 1.0])
    np.testing.assert_allclose(factorize_spd(matrix) @ factorize_spd(matrix).T, np.abs(matrix))
    indefinite = vectors @ np.diag([3.0, -0.5, 1.0]) @ vectors.T
    root = factorize_spd(indefinite, inverse=True)
    values = np.linalg.eigvalsh(root.T @ indefinite @ root)
    np.testing.assert_allclose(np.abs(values), 1, atol=1e-10)
    assert (values < 0).sum() == 1


@pytest.mark.parametrize("matrix", [np.ones((2, 2)), np.diag([1.0, 0.0])], ids=str)
def test_symmetric_root_of_a_singular_matrix_is_finite(matrix):
    root = factorize_spd(matrix)
    np.testing.assert_allclose(root @ root.T, matrix, atol=1e-6)
    assert np.isfinite(factorize_spd(matrix, inverse=True)).all()


@pytest.mark.parametrize("d", [3, 64, 70])
def test_hessian_by_products(d):
    matrix = random_covariance(d)
    np.testing.assert_allclose(assemble_hessian(Quadratic(matrix), np.zeros(d)), matrix)


def test_dense_factor_is_the_root_of_the_inverse():
    hessian = random_covariance(6)
    factor = factor_from_curvature(hessian, None, True, None, np.zeros(6))
    np.testing.assert_allclose(factor @ factor.T, np.linalg.inv(hessian), rtol=1e-8)


def test_masked_factor_has_the_blocks_of_the_inverse():
    hessian, mask = random_covariance(5), np.eye(5, dtype=bool)
    mask[:2, :2] = mask[3:, 3:] = True
    factor = factor_from_curvature(hessian, mask, True, None, np.zeros(5))
    np.testing.assert_allclose(
        factor @ factor.T, np.where(mask, np.linalg.inv(hessian), 0), atol=1e-10
    )


def test_diagonal_factor():
    hessian = random_covariance(6)
    factor = factor_from_curvature(hessian, None, False, None, np.zeros(6))
    np.testing.assert_allclose(factor, 1 / np.sqrt(np.diagonal(hessian)))


def test_diagonal_factor_from_products():
    # The estimate is exact where the Hessian is diagonal, and good where it nearly is.
    scales = 10.0 ** np.linspace(-1, 1, 40)
    diagonal = Quadratic(np.diag(scales))
    factor = factor_from_curvature(None, None, False, diagonal, np.zeros(40))
    floor = 0.1 * np.median(scales)
    np.testing.assert_allclose(factor, 1 / np.sqrt(np.maximum(scales, floor)))
    near = Quadratic(random_covariance(40, correlation=0.05))
    factor = factor_from_curvature(None, None, False, near, np.zeros(40))
    np.testing.assert_allclose(factor, 1, atol=0.15)
    assert near.num_calls == 1


def test_flat_coordinates_have_a_finite_factor():
    factor = factor_from_curvature(np.diag([1.0, 0.0]), None, False, None, np.zeros(2))
    assert np.isfinite(factor).all()
    assert factor[1] > 100


def gaussian_draws(covariance, num, seed=0):
    """Draws and the gradients of the potential there."""
    root = np.linalg.cholesky(covariance)
    x = np.random.default_rng(seed).standard_normal((num, len(covariance))) @ root.T
    return x, x @ np.linalg.inv(covariance)


def spread_of(covariance, factor, stretch):
    """Eigenvalues of the whitened covariance, which are ones for a right factor."""
    inverse = np.linalg.inv(assemble_dense_factor(factor, stretch, None))
    return np.linalg.eigvalsh(inverse @ covariance @ inverse.T)


def test_a_diagonal_posterior_is_whitened_exactly_by_a_few_draws():
    sds = 10.0 ** np.linspace(-4, 4, 50)
    factor, stretch = factor_from_gradients(*gaussian_draws(np.diag(sds**2), 5))
    np.testing.assert_allclose(factor, sds, rtol=1e-6)
    assert stretch is None


def test_a_few_directions_are_found_by_fewer_draws_than_coordinates():
    """A diagonal with two long directions and a short one, in units from 0.01 to 100."""
    d = 200
    rng = np.random.default_rng(1)
    vectors = np.linalg.qr(rng.standard_normal((d, 3)))[0]
    sds = 10.0 ** rng.uniform(-2, 2, d)
    core = np.eye(d) + vectors * (np.array([50.0, 9.0, 0.02]) - 1.0) @ vectors.T
    covariance = core * np.outer(sds, sds)
    factor, stretch = factor_from_gradients(*gaussian_draws(covariance, 100))
    found = spread_of(covariance, factor, stretch)
    assert 0.4 < found.min() < found.max() < 2.5
    # A diagonal alone leaves the long direction as long as it was.
    assert spread_of(covariance, factor, None).max() > 20.0
    assert stretch is not None
    assert len(stretch.scales) <= 10


def test_a_stiff_direction_of_many_coordinates_does_not_shorten_the_others():
    """Columns with a common part: one direction is stiff and all others are alike."""
    d = 150
    ones = np.ones((d, 1)) / np.sqrt(d)
    covariance = np.eye(d) - (1.0 - 1e-3) * ones @ ones.T
    found = spread_of(covariance, *factor_from_gradients(*gaussian_draws(covariance, 100)))
    assert found.max() / found.min() < 1.5


def test_heat_leaves_the_whitening_as_it_is():
    """Draws too wide by noise have gradients that are as much too large."""
    covariance = random_covariance(30)
    x, g = gaussian_draws(covariance, 200)
    cold, hot = factor_from_gradients(x, g), factor_from_gradients(2.0 * x, 2.0 * g)
    np.testing.assert_allclose(
        assemble_dense_factor(*cold, None), assemble_dense_factor(*hot, None), rtol=1e-2
    )


def test_mask_keeps_blocks_apart():
    mask = np.kron(np.eye(2, dtype=bool), np.ones((2, 2), dtype=bool))
    x, g = gaussian_draws(random_covariance(4), 500)
    factor, stretch = factor_from_gradients(x, g)
    matrix = assemble_dense_factor(factor, stretch, mask)
    np.testing.assert_array_equal((matrix @ matrix.T)[~mask], 0.0)
    whole = assemble_dense_factor(factor, stretch, None)
    np.testing.assert_allclose((matrix @ matrix.T)[mask], (whole @ whole.T)[mask])


def test_stuck_coordinates_keep_a_usable_factor():
    x, g = gaussian_draws(np.eye(3), 100)
    x[:, 0] = 1.0
    factor, stretch = factor_from_gradients(x, g)
    assert np.isfinite(assemble_dense_factor(factor, stretch, None)).all()
    assert (factor > 0).all()


@pytest.mark.parametrize("stretch_of", [0.2, 5.0])
def test_stretch(stretch_of):
    rng = np.random.default_rng(2)
    directions = np.linalg.qr(rng.standard_normal((6, 2)))[0]
    stretch = LowRankFactor(directions, np.array([stretch_of, 2.0]))
    whitening = Preconditioner(
        rng.standard_normal(6), rng.uniform(0.5, 2, 6), np.zeros(6), None, stretch
    )
    matrix = assemble_dense_factor(whitening.factor, stretch, None)
    v = rng.standard_normal((3, 6))
    np.testing.assert_allclose(whitening.apply(v), v @ matrix.T)
    np.testing.assert_allclose(whitening.apply(v[0]), matrix @ v[0])
    np.testing.assert_allclose(whitening.apply_transpose(v), v @ matrix)
    np.testing.assert_allclose(whitening.solve(whitening.apply(v)), v)
    diagonal = np.diagonal(matrix @ matrix.T)
    np.testing.assert_allclose(whitening.inverse_mass_matrix, diagonal, rtol=1e-6)
    np.testing.assert_allclose(whitening.sds, np.sqrt(diagonal), rtol=1e-6)
    # Products of positions and gradients are the same in any coordinates; each has its own there.
    g = rng.standard_normal((3, 6))
    sites = whitening.apply(v) * g
    own = whitening.apply_low_rank(v) * whitening.solve_low_rank(whitening.apply_transpose(g))
    np.testing.assert_allclose(own, sites)


def test_a_metric_has_the_sites_own_coordinates():
    """With 0.98 in all correlations: a few directions besides a diagonal would mix the sites."""
    inverse = jnp.eye(8) - 0.98 / 8 * jnp.ones((8, 8))

    def potential(z):
        return z["a"] @ inverse @ z["a"] / 2

    def whitening(kernel):
        kernel.init(random.key(0), 10, {"a": jnp.zeros(8)}, (), {})
        return kernel.adaptation.preconditioner

    plain = whitening(SGHMCSplit(potential_fn=potential, dense_mass=False, num_steps=2))
    assert plain.low_rank is not None
    metric = {"inverse_metric": lambda z: {"a": 1 + 0.1 * jnp.sin(z["a"])}}
    located = whitening(SGRHMC(potential_fn=potential, num_steps=2, **metric))
    assert located.low_rank is None
    np.testing.assert_allclose(located.factor, located.factor.mean(), rtol=0.5)
