"""The factor that whitens, from curvature and from draws, where its answer is known."""

import numpy as np
import pytest

from numpyro_sgmcmc.posterior.whitening import Whitening
from numpyro_sgmcmc.warmup.factors import (
    factor_from_curvature,
    factor_from_draws,
    hessian_by_products,
    largest_curvature,
    symmetric_root,
)
from tests.warmup.potentials import FACTORS, Quadratic, random_covariance


@pytest.mark.parametrize("d", [1, 2, 20])
@pytest.mark.parametrize("span", [0, 6])
def test_symmetric_root(d, span):
    scale = 10.0 ** np.linspace(-span, span, d)
    matrix = random_covariance(d) * np.outer(scale, scale)
    root, inverse_root = symmetric_root(matrix), symmetric_root(matrix, inverse=True)
    np.testing.assert_allclose(
        (root @ root.T) / np.outer(scale, scale), random_covariance(d), atol=1e-12
    )
    # The whitened matrix is the identity, whatever the units of the columns.
    np.testing.assert_allclose(inverse_root.T @ matrix @ inverse_root, np.eye(d), atol=1e-10)


def test_symmetric_root_turns_negative_curvature_round():
    vectors = np.linalg.qr(np.random.default_rng(0).standard_normal((3, 3)))[0]
    matrix = np.diag([2.0, -2.0, 1.0])
    np.testing.assert_allclose(symmetric_root(matrix) @ symmetric_root(matrix).T, np.abs(matrix))
    indefinite = vectors @ np.diag([3.0, -0.5, 1.0]) @ vectors.T
    root = symmetric_root(indefinite, inverse=True)
    values = np.linalg.eigvalsh(root.T @ indefinite @ root)
    np.testing.assert_allclose(np.abs(values), 1, atol=1e-10)
    assert (values < 0).sum() == 1


@pytest.mark.parametrize("matrix", [np.ones((2, 2)), np.diag([1.0, 0.0])], ids=str)
def test_symmetric_root_of_a_singular_matrix_is_finite(matrix):
    root = symmetric_root(matrix)
    np.testing.assert_allclose(root @ root.T, matrix, atol=1e-6)
    assert np.isfinite(symmetric_root(matrix, inverse=True)).all()


@pytest.mark.parametrize("d", [3, 64, 70])
def test_hessian_by_products(d):
    matrix = random_covariance(d)
    np.testing.assert_allclose(hessian_by_products(Quadratic(matrix), np.zeros(d)), matrix)


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


def whitened_covariance(factor, renewed):
    """Covariance of the renewed coordinates in the old ones."""
    if factor.ndim == 1:
        return np.square(renewed / factor)
    step = np.linalg.solve(factor, renewed)
    return step @ step.T


@pytest.mark.parametrize("kind", FACTORS)
def test_many_draws_are_believed(kind):
    factor = FACTORS[kind]
    covariance = np.array([[2.0, 0.5], [0.5, 0.6]])
    covariance = covariance if kind == "dense" else np.diagonal(covariance)
    renewed = factor_from_draws(factor, covariance, 1e12, None)
    np.testing.assert_allclose(whitened_covariance(factor, renewed), covariance, rtol=1e-6)


@pytest.mark.parametrize("kind", FACTORS)
def test_few_draws_change_nothing(kind):
    factor = FACTORS[kind]
    covariance = np.array([[1.3, 0.2], [0.2, 0.9]])
    covariance = covariance if kind == "dense" else np.diagonal(covariance)
    renewed = factor_from_draws(factor, covariance, 5.0, None)
    identity = np.eye(2) if kind == "dense" else np.ones(2)
    np.testing.assert_allclose(whitened_covariance(factor, renewed), identity, atol=1e-12)


@pytest.mark.parametrize("kind", FACTORS)
def test_shrinkage_is_sampling_variance_over_distance(kind):
    factor = FACTORS[kind]
    covariance = np.array([[2.0, 0.5], [0.5, 0.6]])
    identity, variance = np.eye(2), 2 * 3 / 20
    if kind == "diagonal":
        covariance, identity, variance = np.diagonal(covariance), np.ones(2), 2 * 2 / 20
    shrinkage = variance / np.square(covariance - identity).sum()
    assert 0 < shrinkage < 1
    expected = (1 - shrinkage) * covariance + shrinkage * identity
    renewed = factor_from_draws(factor, covariance, 20.0, None)
    np.testing.assert_allclose(whitened_covariance(factor, renewed), expected, rtol=1e-8)


@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize("num_draws", [60, 300])
def test_a_right_factor_is_spoiled_less_than_by_the_draws_themselves(is_dense, num_draws):
    rng, d = np.random.default_rng(0), 20
    factor = np.eye(d) if is_dense else np.ones(d)
    kept, believed = [], []
    for _ in range(20):
        draws = rng.standard_normal((num_draws, d))
        covariance = np.cov(draws, rowvar=False) if is_dense else draws.var(0, ddof=1)
        renewed = factor_from_draws(factor, covariance, num_draws, None)
        kept.append(np.linalg.norm(whitened_covariance(factor, renewed) - factor))
        believed.append(np.linalg.norm(covariance - factor))
    assert np.mean(kept) < 0.2 * np.mean(believed)


def test_a_wrong_factor_is_mended_by_as_few_draws():
    rng, d = np.random.default_rng(0), 20
    truth = random_covariance(d, correlation=0.8)
    draws = rng.standard_normal((300, d)) @ np.linalg.cholesky(truth).T
    renewed = factor_from_draws(np.eye(d), np.cov(draws, rowvar=False), 300, None)
    spread = np.linalg.eigvalsh(np.linalg.solve(renewed, truth) @ np.linalg.inv(renewed).T)
    assert 0.4 < spread.min() < spread.max() < 2.0
    assert np.linalg.eigvalsh(truth).max() > 10


def test_mask_keeps_blocks_apart():
    covariance, mask = random_covariance(4), np.eye(4, dtype=bool)
    mask[:2, :2] = True
    renewed = factor_from_draws(np.eye(4), covariance, 1e12, mask)
    np.testing.assert_allclose(renewed @ renewed.T, np.where(mask, covariance, 0), atol=1e-10)


def test_stuck_or_lost_coordinates_keep_a_usable_factor():
    renewed = factor_from_draws(np.ones(3), np.array([0.0, 1.0, 1e12]), 1e9, None)
    assert (renewed >= 0.1).all()
    assert (renewed <= 10).all()


@pytest.mark.parametrize(
    "factor", [np.array([1.0, 0.1, 5.0]), np.tril(random_covariance(3))], ids=["diagonal", "dense"]
)
def test_largest_curvature(factor):
    hessian = random_covariance(3, seed=1)
    dense = np.diag(factor) if factor.ndim == 1 else factor
    expected = np.linalg.eigvalsh(dense.T @ hessian @ dense).max()
    whitening = Whitening(np.zeros(3), factor, np.zeros(3))
    assert largest_curvature(hessian, whitening, None) == pytest.approx(expected)
    assert largest_curvature(None, whitening, Quadratic(hessian)) == pytest.approx(
        expected, rel=0.02
    )
    assert largest_curvature(-hessian, whitening, None) == pytest.approx(expected)


def test_correlated_columns_are_stiff_for_a_diagonal_factor():
    # What decides the step: a diagonal factor leaves an eigenvalue of about d times correlation.
    covariance = random_covariance(20, correlation=0.95)
    hessian = np.linalg.inv(covariance)
    whitening = Whitening(np.zeros(20), np.sqrt(np.diagonal(covariance)), np.zeros(20))
    assert largest_curvature(hessian, whitening, None) == pytest.approx(20, rel=0.01)
    dense = whitening._replace(factor=np.linalg.cholesky(covariance))
    assert largest_curvature(hessian, dense, None) == pytest.approx(1)


def test_curvature_that_is_not_finite_counts_as_one():
    whitening = Whitening(np.zeros(2), np.ones(2), np.zeros(2))
    assert largest_curvature(np.full((2, 2), np.nan), whitening, None) == 1.0
    assert largest_curvature(None, whitening, Quadratic(np.full((2, 2), np.nan))) == 1.0
    assert largest_curvature(None, whitening, Quadratic(np.zeros((2, 2)))) == 1.0
