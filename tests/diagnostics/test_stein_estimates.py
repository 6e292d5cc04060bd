"""Bias estimates from sums and from gradients at draws, on draws whose bias is known."""

import jax
import numpy as np
import pytest

from numpyro_sgmcmc.diagnostics.geometry import TailTransform
from numpyro_sgmcmc.diagnostics.run_data import Sums
from numpyro_sgmcmc.diagnostics.stein_estimates import (
    GradientsAtDraws,
    compute_between_chain_r_hat,
    convert_sums_to_first_chain,
    estimate_bias_at_draws,
    estimate_bias_from_draws,
)
from numpyro_sgmcmc.model.preconditioner import LowRankFactor, Preconditioner, stack_preconditioners

PRECISION = np.linalg.inv(np.array([[1.0, 0.8], [0.8, 2.0]]))
DIM, BATCHES, DRAWS_PER_BATCH = 3, 4, 50
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
    )
    assert (np.abs(bias.mean_bias.value - 0.5) < 4 * bias.mean_bias.error).all()
    assert (bias.mean_bias.error < 0.05).all()
    assert (np.abs(bias.sd_inflation.value) < 0.05).all()


# --- Sums ---------------------------------------------------------------------------------------


def make_preconditioner(is_dense):
    factor = 0.5 + RNG.random(DIM)
    if is_dense:
        factor = np.diag(factor) + 0.3 * np.tril(RNG.standard_normal((DIM, DIM)), -1)
    return Preconditioner(5.0 * RNG.standard_normal(DIM), factor, RNG.standard_normal(DIM))


def make_sums(positions, gradients, preconditioner, is_full):
    """Sum each batch by definition."""
    batches = []
    for theta, gradient in zip(positions, gradients, strict=True):
        q = preconditioner.solve(theta - preconditioner.center)
        g = preconditioner.apply_transpose(gradient)
        products = q.T @ g, q.T @ q
        if not is_full:
            products = tuple(np.diagonal(x) for x in products)
        batches.append(Sums(float(len(q)), q.sum(0), g.sum(0), *products, 0.0))
    return jax.tree.map(lambda *xs: np.stack(xs), *batches)


@pytest.mark.parametrize(
    ("is_full", "is_dense"), [(True, True), (True, False), (False, False)], ids=str
)
def test_converted_sums_are_those_in_the_first_chains_coordinates(is_full, is_dense):
    preconditioners = [make_preconditioner(is_dense) for _ in range(3)]
    positions = RNG.standard_normal((3, BATCHES, DRAWS_PER_BATCH, DIM))
    gradients = RNG.standard_normal((3, BATCHES, DRAWS_PER_BATCH, DIM))
    own, first = (
        jax.tree.map(
            lambda *xs: np.stack(xs),
            *(
                make_sums(q, g, p, is_full)
                for q, g, p in zip(positions, gradients, coordinates, strict=True)
            ),
        )
        for coordinates in (preconditioners, [preconditioners[0]] * 3)
    )
    converted = convert_sums_to_first_chain(own, preconditioners)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), converted, first)


def test_r_hat_of_stuck_chains_is_large():
    """Their variances are rounding errors, of either sign."""
    place = np.array([1e6, 2e6])
    square = 10 * (place**2 * (1 - 1e-12))[:, None]
    zeros = np.zeros((2, 1))
    sums = Sums(np.full(2, 10.0), 10 * place[:, None], zeros, zeros, square, zeros)
    assert compute_between_chain_r_hat(sums, np.ones(1))[0] > 100


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
