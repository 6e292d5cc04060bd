"""Bias estimates from sums and from gradients at draws, on draws whose bias is known."""

import jax
import numpy as np
import pytest

from numpyro_sgmcmc.diagnostics.geometry import TailTransform
from numpyro_sgmcmc.diagnostics.stein_estimates import (
    GradientsAtDraws,
    compute_between_chain_r_hat,
    estimate_bias_at_draws,
    estimate_bias_from_draws,
)
from numpyro_sgmcmc.model.low_rank import LowRankFactor
from numpyro_sgmcmc.model.preconditioner import Preconditioner, stack_preconditioners
from numpyro_sgmcmc.sampling.bias_monitor import FULL_MOMENTS_MAX_DIM, RunningSums

PRECISION = np.linalg.inv(np.array([[1.0, 0.8], [0.8, 2.0]]))
DIM = 3
RNG = np.random.default_rng(0)

# --- Gradients at draws -------------------------------------------------------------------------


def gaussian_draws(scale, offset, num=1000, chains=4):
    """Draws of the Gaussian with this precision, scaled and moved."""
    white = np.random.default_rng(0).standard_normal((chains, num, 2))
    return offset + scale * white @ np.linalg.cholesky(np.linalg.inv(PRECISION)).T


@pytest.mark.parametrize(("scale", "offset"), [(1.0, 0.0), (1.3, 0.5), (0.8, -1.0)])
@pytest.mark.parametrize("noise", [0.0, 2.0])
def test_bias_from_gradients_at_some_draws_is_that_of_all(scale, offset, noise):
    """It is that of the draws themselves, their Monte Carlo error included."""
    draws = gaussian_draws(scale, np.array([offset, 0.0]))
    thinning = slice(None, None, 10)
    gradients = draws[:, thinning] @ PRECISION
    gradients += noise * np.random.default_rng(1).standard_normal(gradients.shape)
    measured = estimate_bias_from_draws(draws, thinning, gradients)
    flat, sd = draws.reshape(-1, 2), np.sqrt(np.diagonal(np.linalg.inv(PRECISION)))
    expected = flat.mean(0) / sd, flat.std(0) / sd - 1
    for estimate, truth in zip(measured.bias_estimates[0], expected, strict=True):
        tolerance = 0.04 if noise == 0.0 else 5 * estimate.error
        assert (np.abs(estimate.value - truth) < tolerance).all()
    error = measured.bias_estimates[0].sd_inflation.error
    assert (error < (0.03 if noise == 0.0 else 0.3)).all()
    assert np.nanmax(measured.convergence.r_hat) < 1.05


def test_single_chain_has_no_r_hat():
    draws = gaussian_draws(1.0, 0.0, chains=1)
    measured = estimate_bias_from_draws(draws, slice(None), draws @ PRECISION)
    assert np.isnan(measured.convergence.r_hat).all()


def test_too_few_gradients_for_a_regression_give_a_finite_estimate():
    draws = 1.5 * np.random.default_rng(2).standard_normal((2, 500, 30))
    thinning = slice(None, None, 50)
    bias = estimate_bias_from_draws(draws, thinning, draws[:, thinning]).bias_estimates[0]
    estimate = bias.sd_inflation
    assert np.isfinite(estimate.value).all()
    assert (np.abs(estimate.value - 0.5) < 5 * estimate.error).mean() > 0.9


def cauchy_draws(scale):
    return scale * np.random.default_rng(3).standard_cauchy((4, 1000, 1))


def test_heavy_tailed_draws_of_the_posterior_have_no_bias():
    q = cauchy_draws(1.0)
    measured = estimate_bias_from_draws(q, slice(None), 2.0 * q / (1.0 + q**2))
    assert measured.heavy_tailed_coordinates.tolist() == [0]
    for value, error in measured.bias_estimates[0]:
        assert abs(value[0]) < min(0.1, 4 * error[0] + 0.01)


def test_bias_of_wider_heavy_tailed_draws_is_estimated_to_first_order():
    """The SD of the transformed draws is 18% too large, of which more than half is estimated."""
    q = cauchy_draws(1.5)
    measured = estimate_bias_from_draws(q, slice(None), 2.0 * q / (1.0 + q**2))
    transform = TailTransform.fit(q.reshape(-1, 1))
    posterior = np.tan(np.pi * (np.linspace(0.0, 1.0, 100_002)[1:-1, None] - 0.5))
    truth = transform.transform(q).std() / transform.transform(posterior).std() - 1.0
    value, error = measured.bias_estimates[0].sd_inflation
    assert truth > 0.15
    assert 0.5 * truth < value[0] < 1.1 * truth
    assert error[0] < 0.02


def test_mean_bias_is_estimated_by_gradients_at_draws():
    """Standard normal draws, and the gradient for a mean half an SD lower."""
    q = np.random.default_rng(0).standard_normal((4, 1000, 3))
    bias = estimate_bias_at_draws(
        GradientsAtDraws.from_arrays(q, q + 0.5), Preconditioner(np.zeros(3), np.ones(3))
    ).bias
    assert (np.abs(bias.mean_bias.value - 0.5) < 4 * bias.mean_bias.error).all()
    assert (bias.mean_bias.error < 0.05).all()
    assert (np.abs(bias.sd_inflation.value) < 0.05).all()


def test_bias_along_a_direction_of_many_coordinates_is_not_missed():
    """Draws are narrower along the diagonal, and no entry of C between coordinates shows it.

    The first coordinate of the model is this direction; the others are orthogonal to it.
    """
    dim, scale = 8, 0.88
    direction = np.full(dim, dim**-0.5)
    basis = np.linalg.qr(np.column_stack([direction, np.eye(dim)[:, 1:]]))[0]
    q = np.random.default_rng(0).standard_normal((4, 500, dim))
    q += (scale - 1.0) * (q @ direction)[..., None] * direction
    gradients = GradientsAtDraws.from_arrays(q @ basis, q @ basis)
    value, error = estimate_bias_at_draws(gradients, Preconditioner(np.zeros(dim), basis.T)).bias[1]
    truth = (q @ basis).std((0, 1)) - 1.0
    assert truth[0] < -0.1
    np.testing.assert_allclose(value, truth, atol=0.01)
    assert error.max() < 0.03


# --- Low-rank preconditioners -------------------------------------------------------------------

WIDE_DIM = FULL_MOMENTS_MAX_DIM + 36


def make_ridge(kind):
    """Return a preconditioner of wide and narrow directions that many coordinates share."""
    rng = np.random.default_rng(1)
    directions = np.linalg.qr(rng.standard_normal((WIDE_DIM, 3)))[0]
    scales = np.array([30.0, 8.0, 0.1])
    if kind == "intercept and dummies":
        directions = np.full((WIDE_DIM, 1), WIDE_DIM**-0.5)
        directions[0] *= -1.0
        scales = np.array([40.0])
    if kind == "one coordinate":
        directions[:, 0] = np.eye(WIDE_DIM)[0]
        directions = np.linalg.qr(directions)[0]
    if kind == "padded":
        directions, scales = np.pad(directions, ((0, 0), (0, 2))), np.append(scales, [1.0, 1.0])
    factor = rng.uniform(0.5, 2.0, WIDE_DIM)
    low_rank = LowRankFactor(directions, scales)
    return Preconditioner(rng.standard_normal(WIDE_DIM), factor, low_rank=low_rank)


def make_gradients(preconditioner, q, g):
    """Return positions, and gradients there, of which the preconditioned ones are given."""
    gradients = preconditioner.low_rank.solve(g.reshape(-1, WIDE_DIM)) / preconditioner.factor
    positions = preconditioner.to_position(q.reshape(-1, WIDE_DIM)).reshape(q.shape)
    return GradientsAtDraws.from_arrays(positions, gradients)


@pytest.mark.parametrize(
    "kind", ["three directions", "intercept and dummies", "one coordinate", "padded"]
)
@pytest.mark.parametrize(
    ("scale", "offset"), [(1.0, 0.0), (1.3, 0.0), (0.8, 0.3)], ids=["right", "wide", "narrow"]
)
def test_bias_beyond_full_moments_is_precise_along_shared_directions(kind, scale, offset):
    """The posterior is the preconditioner's Gaussian; the chain's SDs and mean are others."""
    preconditioner = make_ridge(kind)
    q = offset + scale * np.random.default_rng(0).standard_normal((4, 1000, WIDE_DIM))
    g = q + 0.3 * np.random.default_rng(2).standard_normal(q.shape)
    estimates = estimate_bias_at_draws(make_gradients(preconditioner, q, g), preconditioner)
    mean_bias = preconditioner.apply(np.full(WIDE_DIM, offset)) / preconditioner.sds
    exact = mean_bias, np.full(WIDE_DIM, scale - 1.0)
    for estimate, truth in zip(estimates.bias, exact, strict=True):
        assert (np.abs(estimate.value - truth) < 6 * estimate.error + 0.02).all()
        assert estimate.error.max() < 0.06
    assert estimates.configurational_temperature.value == pytest.approx(
        scale**2, abs=6 * estimates.configurational_temperature.error
    )
    sds = np.sqrt(estimates.chain_covariance) * preconditioner.factor
    np.testing.assert_allclose(sds, scale * preconditioner.sds, rtol=0.08)


def test_bias_of_single_coordinates_shows_beside_shared_directions():
    """Every tenth coordinate is 40% too wide, and 0.5 SD off."""
    preconditioner = make_ridge("three directions")
    is_biased = np.arange(WIDE_DIM) % 10 == 0
    low_rank = preconditioner.low_rank
    q = np.random.default_rng(0).standard_normal((4, 1000, WIDE_DIM))
    orthogonal = q - q @ low_rank.directions @ low_rank.directions.T
    moved = q + is_biased * (0.4 * orthogonal + 0.5)
    gradients = make_gradients(preconditioner, moved, moved)
    bias = estimate_bias_at_draws(gradients, preconditioner).bias
    z = (gradients.positions - preconditioner.center) / preconditioner.sds
    exact = z.mean((0, 1)), z.std((0, 1)) - 1.0
    for estimate, truth in zip(bias, exact, strict=True):
        assert np.abs(estimate.value - truth).max() < 0.05
        assert np.abs(truth).max() > 0.15


# --- Sums ---------------------------------------------------------------------------------------


def make_preconditioner(is_dense):
    factor = 0.5 + RNG.random(DIM)
    if is_dense:
        factor = np.diag(factor) + 0.3 * np.tril(RNG.standard_normal((DIM, DIM)), -1)
    return Preconditioner(5.0 * RNG.standard_normal(DIM), factor, RNG.standard_normal(DIM))


@pytest.mark.parametrize(
    ("is_full", "is_dense"), [(True, True), (True, False), (False, False)], ids=str
)
def test_r_hat_from_sums_in_each_chains_coordinates_is_that_of_the_draws(is_full, is_dense):
    """Means are compared in model coordinates, about the first chain's center."""
    preconditioners = [make_preconditioner(is_dense) for _ in range(3)]
    draws = RNG.standard_normal((3, 200, DIM)) + RNG.standard_normal((3, 1, DIM))
    sums = []
    for chain, p in zip(draws, preconditioners, strict=True):
        q = Preconditioner(*p[:2]).solve(chain - p.center)
        products = q.T @ q if is_full else np.square(q).sum(0)
        sums.append(RunningSums(200.0, q.sum(0), q.sum(0), products, products, 0.0))
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *sums)
    expected = np.sqrt(1 + draws.mean(1).var(0, ddof=1) / draws.var(1).mean(0))
    r_hat = compute_between_chain_r_hat(stacked, preconditioners)
    np.testing.assert_allclose(r_hat, expected, rtol=1e-9)


def test_r_hat_of_stuck_chains_is_large():
    """Their variances are rounding errors, of either sign."""
    place = np.array([1e6, 2e6])
    square = 10 * (place**2 * (1 - 1e-12))[:, None]
    zeros = np.zeros((2, 1))
    sums = RunningSums(np.full(2, 10.0), 10 * place[:, None], zeros, zeros, square, zeros)
    preconditioner = Preconditioner(np.zeros(1), np.ones(1))
    assert compute_between_chain_r_hat(sums, [preconditioner] * 2)[0] > 100


def test_stacked_preconditioners_of_different_rank_stay_the_same():
    direction = np.linalg.qr(RNG.standard_normal((DIM, 2)))[0]
    preconditioners = [
        make_preconditioner(False)._replace(low_rank=LowRankFactor(direction, np.array([3, 0.5]))),
        make_preconditioner(False)._replace(
            low_rank=LowRankFactor(direction[:, :1], np.array([2]))
        ),
        make_preconditioner(False),
    ]
    stacked = stack_preconditioners([p.cast(np.float32) for p in preconditioners])
    q = RNG.standard_normal((5, DIM))
    for k, expected in enumerate(preconditioners):
        one = jax.tree.map(lambda x, k=k: np.asarray(x[k], float), stacked)
        for method in ("to_position", "apply_transpose"):
            np.testing.assert_allclose(
                getattr(one, method)(q), getattr(expected, method)(q), rtol=1e-5, atol=1e-5
            )
