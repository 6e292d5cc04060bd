"""Factors from curvature, and from draws and gradients, where the right answer is known."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from numpyro_sgmcmc import SGRHMC, SGHMCSplit
from numpyro_sgmcmc.adaptation.preconditioning import (
    assemble_dense_factor,
    compute_geometric_mean_with_inverse,
    factor_from_curvature,
    factor_from_gradients,
    factorize_spd,
    refine_directions,
    thin_draws,
)
from numpyro_sgmcmc.model.low_rank import LowRankFactor
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from tests.adaptation.potentials import (
    FACTORS,
    QuadraticPotential,
    function_gradients,
    random_covariance,
)

# --- Preconditioner -----------------------------------------------------------------------------


@pytest.mark.parametrize("factor", FACTORS.values(), ids=FACTORS)
def test_preconditioner_maps_match_products_with_the_factor(factor):
    matrix = np.diag(factor) if factor.ndim == 1 else factor
    preconditioner = Preconditioner(np.array([1.0, 2.0]), factor, np.zeros(2))
    v = np.random.default_rng(0).standard_normal((3, 2))
    np.testing.assert_allclose(preconditioner.apply(v), v @ matrix.T)
    np.testing.assert_allclose(preconditioner.apply_transpose(v), v @ matrix)
    np.testing.assert_allclose(preconditioner.solve(preconditioner.apply(v)), v)
    np.testing.assert_allclose(preconditioner.solve(preconditioner.apply(v[0])), v[0])
    on_device = preconditioner.cast(jnp.float32)
    for x in v.astype(np.float32):
        np.testing.assert_allclose(on_device.apply(x), preconditioner.apply(x), rtol=1e-5)
        np.testing.assert_allclose(
            on_device.apply_transpose(x), preconditioner.apply_transpose(x), rtol=1e-5
        )
        np.testing.assert_allclose(on_device.solve(on_device.apply(x)), x, rtol=1e-4)
        position = preconditioner.center + preconditioner.apply(x)
        np.testing.assert_allclose(on_device.to_position(x), position, rtol=1e-5)
    covariance = on_device.inverse_mass_matrix
    covariance = np.diag(covariance) if factor.ndim == 1 else covariance
    np.testing.assert_allclose(covariance, matrix @ matrix.T, rtol=1e-5)


@pytest.mark.parametrize("scale", [0.2, 5.0])
def test_preconditioner_low_rank_maps_match_products_with_the_factor(scale):
    rng = np.random.default_rng(2)
    directions = np.linalg.qr(rng.standard_normal((6, 2)))[0]
    low_rank = LowRankFactor(directions, np.array([scale, 2.0]))
    preconditioner = Preconditioner(
        rng.standard_normal(6), rng.uniform(0.5, 2, 6), np.zeros(6), None, low_rank
    )
    matrix = assemble_dense_factor(preconditioner.factor, low_rank, None)
    v = rng.standard_normal((3, 6))
    np.testing.assert_allclose(preconditioner.apply(v), v @ matrix.T)
    np.testing.assert_allclose(preconditioner.apply(v[0]), matrix @ v[0])
    np.testing.assert_allclose(preconditioner.apply_transpose(v), v @ matrix)
    np.testing.assert_allclose(preconditioner.solve(preconditioner.apply(v)), v)
    variances = np.diagonal(matrix @ matrix.T)
    np.testing.assert_allclose(preconditioner.inverse_mass_matrix, variances, rtol=1e-6)
    np.testing.assert_allclose(preconditioner.sds, np.sqrt(variances), rtol=1e-6)
    # Products of positions and gradients by coordinate do not depend on the diagonal's scale.
    g = rng.standard_normal((3, 6))
    model_products = preconditioner.apply(v) * g
    scaled_g = preconditioner.gradient_to_report_coordinates(v, preconditioner.apply_transpose(g))
    scaled_products = preconditioner.to_report_coordinates(v) * scaled_g
    np.testing.assert_allclose(scaled_products, model_products)


def test_preconditioner_infinite_entry_is_not_finite():
    preconditioner = Preconditioner(np.zeros(1), np.ones(1), np.zeros(1))
    assert preconditioner.is_finite()
    assert not preconditioner._replace(reference_hessian=np.array([[np.inf]])).is_finite()


# --- Factorisations -----------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 2, 20])
@pytest.mark.parametrize("max_exponent", [0, 6])
def test_factorize_spd_any_units_is_exact(d, max_exponent):
    units = 10.0 ** np.linspace(-max_exponent, max_exponent, d)
    matrix = random_covariance(d) * np.outer(units, units)
    root, inverse_root = factorize_spd(matrix), factorize_spd(matrix, inverse=True)
    np.testing.assert_allclose(
        (root @ root.T) / np.outer(units, units), random_covariance(d), atol=1e-12
    )
    np.testing.assert_allclose(inverse_root.T @ matrix @ inverse_root, np.eye(d), atol=1e-10)


def test_factorize_spd_negative_eigenvalues_change_sign():
    matrix = np.diag([2.0, -2.0, 1.0])
    np.testing.assert_allclose(factorize_spd(matrix) @ factorize_spd(matrix).T, np.abs(matrix))
    vectors = np.linalg.qr(np.random.default_rng(0).standard_normal((3, 3)))[0]
    indefinite = vectors @ np.diag([3.0, -0.5, 1.0]) @ vectors.T
    root = factorize_spd(indefinite, inverse=True)
    eigenvalues = np.linalg.eigvalsh(root.T @ indefinite @ root)
    np.testing.assert_allclose(np.abs(eigenvalues), 1, atol=1e-10)
    assert (eigenvalues < 0).sum() == 1


@pytest.mark.parametrize("matrix", [np.ones((2, 2)), np.diag([1.0, 0.0])], ids=str)
def test_factorize_spd_singular_matrix_is_finite(matrix):
    root = factorize_spd(matrix)
    np.testing.assert_allclose(root @ root.T, matrix, atol=1e-6)
    assert np.isfinite(factorize_spd(matrix, inverse=True)).all()


def test_geometric_mean_with_inverse_solves_its_equation():
    a, b = random_covariance(5, seed=1), random_covariance(5, seed=2)
    mean = compute_geometric_mean_with_inverse(a, b)
    np.testing.assert_allclose(mean, mean.T)
    np.testing.assert_allclose(mean @ b @ mean, a)


# --- Factors from curvature ---------------------------------------------------------------------


def test_factor_from_curvature_dense_is_root_of_inverse():
    hessian = random_covariance(6)
    factor = factor_from_curvature(hessian, None, True, None, np.zeros(6))
    np.testing.assert_allclose(factor @ factor.T, np.linalg.inv(hessian), rtol=1e-8)


def test_factor_from_curvature_masked_has_blocks_of_inverse():
    hessian, mask = random_covariance(5), np.eye(5, dtype=bool)
    mask[:2, :2] = mask[3:, 3:] = True
    factor = factor_from_curvature(hessian, mask, True, None, np.zeros(5))
    np.testing.assert_allclose(
        factor @ factor.T, np.where(mask, np.linalg.inv(hessian), 0), atol=1e-10
    )


def test_factor_from_curvature_diagonal_is_inverse_root_of_diagonal():
    hessian = random_covariance(6)
    factor = factor_from_curvature(hessian, None, False, None, np.zeros(6))
    np.testing.assert_allclose(factor, 1 / np.sqrt(np.diagonal(hessian)))


def test_factor_from_curvature_hessian_products_estimate_diagonal():
    """The estimate is exact for a diagonal Hessian, and good for one that is nearly diagonal."""
    curvatures = 10.0 ** np.linspace(-1, 1, 40)
    diagonal = QuadraticPotential(np.diag(curvatures))
    factor = factor_from_curvature(None, None, False, diagonal, np.zeros(40))
    floor = 0.1 * np.median(curvatures)
    np.testing.assert_allclose(factor, 1 / np.sqrt(np.maximum(curvatures, floor)))
    correlated = QuadraticPotential(random_covariance(40, correlation=0.05))
    factor = factor_from_curvature(None, None, False, correlated, np.zeros(40))
    np.testing.assert_allclose(factor, 1, atol=0.15)
    assert correlated.num_calls == 1


def test_factor_from_curvature_flat_coordinate_is_finite():
    factor = factor_from_curvature(np.diag([1.0, 0.0]), None, False, None, np.zeros(2))
    assert np.isfinite(factor).all()
    assert factor[1] > 100


# --- Factors from draws and gradients -----------------------------------------------------------


def gaussian_draws(covariance, num, seed=0):
    """Draws of a Gaussian posterior, and gradients of its potential there."""
    root = np.linalg.cholesky(covariance)
    x = np.random.default_rng(seed).standard_normal((num, len(covariance))) @ root.T
    return x, x @ np.linalg.inv(covariance)


def preconditioned_eigenvalues(covariance, factor, low_rank):
    """Eigenvalues of the preconditioned covariance, all one for an exact factor."""
    inverse = np.linalg.inv(assemble_dense_factor(factor, low_rank, None))
    return np.linalg.eigvalsh(inverse @ covariance @ inverse.T)


def test_factor_from_gradients_diagonal_posterior_is_exact_from_five_draws():
    sds = 10.0 ** np.linspace(-4, 4, 50)
    factor, low_rank = factor_from_gradients(*gaussian_draws(np.diag(sds**2), 5))
    np.testing.assert_allclose(factor, sds, rtol=1e-6)
    assert low_rank is None


def test_factor_from_gradients_few_directions_need_fewer_draws_than_coordinates():
    """A diagonal with two wide directions and a narrow one, in units from 0.01 to 100."""
    d = 200
    rng = np.random.default_rng(1)
    vectors = np.linalg.qr(rng.standard_normal((d, 3)))[0]
    sds = 10.0 ** rng.uniform(-2, 2, d)
    correlation = np.eye(d) + vectors * (np.array([50.0, 9.0, 0.02]) - 1.0) @ vectors.T
    covariance = correlation * np.outer(sds, sds)
    factor, low_rank = factor_from_gradients(*gaussian_draws(covariance, 100))
    eigenvalues = preconditioned_eigenvalues(covariance, factor, low_rank)
    assert 0.4 < eigenvalues.min() < eigenvalues.max() < 2.5
    # A diagonal alone leaves the wide direction as wide as it was.
    assert preconditioned_eigenvalues(covariance, factor, None).max() > 20.0
    assert low_rank is not None
    assert len(low_rank.scales) <= 10


def test_factor_from_gradients_stiff_shared_direction_leaves_others_equal():
    """Columns with a common component: one direction is stiff and all others are equal."""
    d = 150
    ones = np.ones((d, 1)) / np.sqrt(d)
    covariance = np.eye(d) - (1.0 - 1e-3) * ones @ ones.T
    fit = factor_from_gradients(*gaussian_draws(covariance, 100))
    eigenvalues = preconditioned_eigenvalues(covariance, *fit)
    assert eigenvalues.max() / eigenvalues.min() < 1.5


def test_factor_from_gradients_inflated_draws_give_the_same_factor():
    """Draws that gradient noise has widened have gradients that are larger by the same factor."""
    x, g = gaussian_draws(random_covariance(30), 200)
    exact, inflated = factor_from_gradients(x, g), factor_from_gradients(2.0 * x, 2.0 * g)
    np.testing.assert_allclose(
        assemble_dense_factor(*exact, None), assemble_dense_factor(*inflated, None), rtol=1e-2
    )


def test_factor_from_gradients_constant_coordinate_is_finite():
    x, g = gaussian_draws(np.eye(3), 100)
    x[:, 0] = 1.0
    factor, low_rank = factor_from_gradients(x, g)
    assert np.isfinite(assemble_dense_factor(factor, low_rank, None)).all()
    assert (factor > 0).all()


def test_assemble_dense_factor_mask_keeps_blocks_only():
    mask = np.kron(np.eye(2, dtype=bool), np.ones((2, 2), dtype=bool))
    factor, low_rank = factor_from_gradients(*gaussian_draws(random_covariance(4), 500))
    masked = assemble_dense_factor(factor, low_rank, mask)
    full = assemble_dense_factor(factor, low_rank, None)
    np.testing.assert_array_equal((masked @ masked.T)[~mask], 0.0)
    np.testing.assert_allclose((masked @ masked.T)[mask], (full @ full.T)[mask])


@pytest.mark.parametrize(("num_draws", "per_chain"), [(1, 2), (12, 3), (100, 7)])
def test_thin_draws_are_evenly_spaced_in_each_chain(num_draws, per_chain):
    draws = np.arange(4 * 7).reshape(4, 7, 1)
    thinned = thin_draws(draws, num_draws)
    assert thinned.shape == (4, per_chain, 1)
    np.testing.assert_array_equal(thinned[0, :, 0], np.linspace(0, 6, per_chain).astype(int))


# --- Refined directions -------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
def test_refine_directions_noisy_wide_directions_move_to_the_widest():
    """Each direction is contaminated by all others, as one estimated from a few draws."""
    dim, normal = 400, np.random.default_rng(0).standard_normal
    widest = np.linalg.qr(normal((dim, 2)))[0]
    precision = np.eye(dim) - widest @ np.diag([1 - 1 / 50, 1 - 1 / 20]) @ widest.T
    gradients = function_gradients(lambda q: q @ jnp.asarray(precision) @ q / 2, dim)
    estimated = np.linalg.qr(widest + 0.05 * normal(widest.shape))[0]
    assert np.linalg.norm(widest.T @ estimated) ** 2 < 2 * 0.55
    preconditioner = Preconditioner(np.zeros(dim), np.ones(dim), np.zeros(dim))
    refined = np.linalg.qr(refine_directions(gradients, preconditioner, estimated))[0]
    assert np.linalg.norm(widest.T @ refined) ** 2 > 2 * 0.99


@pytest.mark.parametrize(
    "fn", [lambda q: -q @ q / 2, lambda q: jnp.sqrt(-1.0 - q @ q)], ids=["negative", "not finite"]
)
def test_refine_directions_unusable_curvature_keeps_the_direction(fn):
    preconditioner, direction = Preconditioner(np.zeros(3), np.ones(3)), np.eye(3)[:, :1]
    refined = refine_directions(function_gradients(fn, 3), preconditioner, direction)
    np.testing.assert_array_equal(refined, direction)


# --- Kernels ------------------------------------------------------------------------------------


def test_kernel_with_metric_has_no_low_rank_factor():
    """With correlations of 0.98, a low-rank factor would mix the coordinates of the metric."""
    precision = jnp.eye(8) - 0.98 / 8 * jnp.ones((8, 8))

    def potential_fn(z):
        return z["a"] @ precision @ z["a"] / 2

    def adapted_preconditioner(kernel):
        kernel.init(random.key(0), 10, {"a": jnp.zeros(8)}, (), {})
        return kernel.adaptation.preconditioner

    options = {"potential_fn": potential_fn, "num_steps": 2}
    assert adapted_preconditioner(SGHMCSplit(dense_mass=False, **options)).low_rank is not None
    metric = SGRHMC(inverse_metric=lambda z: {"a": 1 + 0.1 * jnp.sin(z["a"])}, **options)
    preconditioner = adapted_preconditioner(metric)
    assert preconditioner.low_rank is None
    np.testing.assert_allclose(preconditioner.factor, preconditioner.factor.mean(), rtol=0.5)
