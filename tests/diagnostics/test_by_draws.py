"""Bias from draws alone and gradients at some of them."""

import numpy as np
import pytest

from numpyro_sgmcmc.diagnostics.stein_estimates import estimate_bias_from_draws

PRECISION = np.linalg.inv(np.array([[1.0, 0.8], [0.8, 2.0]]))


def draws_of(scale, shift, num=1000, chains=4):
    rng = np.random.default_rng(0)
    white = rng.standard_normal((chains, num, 2))
    return shift + scale * white @ np.linalg.cholesky(np.linalg.inv(PRECISION)).T


@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (1.3, 0.5), (0.8, -1.0)])
@pytest.mark.parametrize("noise", [0.0, 2.0])
def test_gradients_at_a_few_draws_tell_of_all(scale, shift, noise):
    """The chance that is in the draws themselves is told, not added to."""
    draws = draws_of(scale, np.array([shift, 0.0]))
    some = slice(None, None, 10)
    gradients = draws[:, some] @ PRECISION
    gradients += noise * np.random.default_rng(1).standard_normal(gradients.shape)
    estimates, evidence = estimate_bias_from_draws(draws, some, gradients)
    flat, sds = draws.reshape(-1, 2), np.sqrt(np.diagonal(np.linalg.inv(PRECISION)))
    truth = flat.mean(0) / sds, flat.std(0) / sds - 1
    for found, true in zip((estimates.mean_bias, estimates.sd_inflation), truth, strict=True):
        off = np.abs(found.value - true)
        assert (off < (0.04 if noise == 0.0 else 5 * found.error)).all(), (found, true)
    assert (estimates.sd_inflation.error < (0.03 if noise == 0.0 else 0.3)).all()
    assert np.nanmax(evidence.convergence.r_hat) < 1.05


def test_a_chain_alone_has_no_r_hat():
    draws = draws_of(1.0, 0.0, chains=1)
    evidence = estimate_bias_from_draws(draws, slice(None), draws @ PRECISION)[1]
    assert np.isnan(evidence.convergence.r_hat).all()


def test_too_few_gradients_for_a_regression():
    """Then they count alone, as often as there are draws for each."""
    rng = np.random.default_rng(2)
    draws = 1.5 * rng.standard_normal((2, 500, 30))
    some = slice(None, None, 50)
    estimates, _ = estimate_bias_from_draws(draws, some, draws[:, some])
    assert np.isfinite(estimates.sd_inflation.value).all()
