"""Pilot chains sample the posterior, whatever fits into memory."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_sgmcmc import SGHMCSplit
from numpyro_sgmcmc.adaptation.budget import WarmupBudget
from numpyro_sgmcmc.adaptation.gradient_noise import NO_NOISE
from numpyro_sgmcmc.adaptation.pilot import (
    PilotResult,
    compute_max_r_hat,
    compute_r_hat,
    run_pilot,
    run_pilot_windows,
)
from numpyro_sgmcmc.adaptation.preconditioning import (
    refit_standard_normal,
    update_preconditioner,
)
from numpyro_sgmcmc.adaptation.settings import WarmupInputs
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.model.gradient_estimators import MinibatchGradient
from numpyro_sgmcmc.model.potential import make_function_potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.progress import ProgressReporter
from numpyro_sgmcmc.sampling.options import build_warmup_settings

DIM, NUM_CHAINS = 60, 16


def make_function_inputs(dim, potential_fn=lambda z: 0.5 * z @ z, **options):
    """Return the inputs of a warm-up on a potential function, by default of a standard normal."""
    potential = make_function_potential(potential_fn, jnp.zeros(dim))
    kernel = SGHMCSplit(potential_fn=potential_fn)
    settings = build_warmup_settings(
        kernel.options,
        potential,
        kernel.dynamics,
        kernel.integrator,
        lambda preconditioner: kernel.dynamics,
        has_init_params=True,
        is_site_aligned=False,
    )
    return WarmupInputs(potential, Arguments(), settings, WarmupBudget(), **options)


def make_pilot(q, gradient=0.0):
    """Return chains about a position with this gradient in each coordinate."""
    dim = q.shape[1]
    return PilotResult(Preconditioner(np.zeros(dim), np.ones(dim), np.full(dim, gradient)), q)


class RecordingReporter(ProgressReporter):
    def __init__(self):
        super().__init__()
        self.amounts = []

    def advance(self, work):
        self.amounts.append(work)


@pytest.mark.parametrize(
    ("max_normals", "steps_per_call", "backend"),
    [(2**25, 100, "cpu"), (20_000, 20, "cpu"), (1, 5, "cpu"), (2**25, 100, "gpu")],
)
def test_run_pilot_limited_normals_per_call_samples_standard_normal(
    max_normals, steps_per_call, backend, monkeypatch
):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)  # which draws the normals
    progress = RecordingReporter()
    inputs = make_function_inputs(DIM, progress=progress)
    pilot = make_pilot(inputs.rng.standard_normal((NUM_CHAINS, DIM)))
    draws = run_pilot(inputs, pilot, MinibatchGradient(), 0.3, 400, max_normals)
    assert draws.shape == (NUM_CHAINS, 40, DIM)
    # A step takes the gradient of each chain, and that of the reference position.
    assert progress.amounts == [steps_per_call * (NUM_CHAINS + 1)] * (400 // steps_per_call)
    # Draws are a time of 1.5 apart, so that some 12,000 are independent: four standard errors.
    assert abs(draws.var() - 1) < 0.05
    assert abs(draws.mean()) < 0.05


def test_r_hat_matches_ratio_of_variances():
    means = np.array([[0.0, 1.0], [0.0, 3.0]])
    np.testing.assert_allclose(compute_r_hat(means, np.array([1.0, 4.0])), [1.0, 1.5**0.5])


def test_run_pilot_windows_lost_chains_restart_nearer():
    """A potential without a minimum, along which all chains go beyond 1,000 SDs."""
    inputs = make_function_inputs(2, lambda z: 1e5 * z.sum())
    pilot = make_pilot(np.ones((4, 2)), gradient=1e5)
    lost = run_pilot_windows(inputs, pilot, (100, 100))
    np.testing.assert_array_equal(lost.q, 0.25)
    np.testing.assert_array_equal(pilot.q, 1.0)  # the argument is not changed
    assert not lost.is_converged
    assert not lost.window_medians


def test_run_pilot_windows_near_start_converges_about_the_mean():
    pilot = make_pilot(np.full((16, 2), 5.0))
    pilot = run_pilot_windows(make_function_inputs(2), pilot, (400,) * 6)
    assert pilot.is_converged
    assert np.abs(pilot.preconditioner.center).max() < 0.5
    np.testing.assert_allclose(pilot.preconditioner.sds, 1.0, rtol=0.2)


@pytest.mark.parametrize("scale", [100.0, 300.0])
@pytest.mark.parametrize("has_user_matrix", [False, True])
def test_run_pilot_windows_wide_start_ends_in_the_bulk(scale, has_user_matrix):
    """Chains that start far wider than the posterior agree long before they have relaxed."""
    inputs = make_function_inputs(3, lambda z: 0.5 * scale**2 * z @ z)
    if has_user_matrix:
        settings = replace(inputs.settings, inverse_mass_matrix=np.ones(3))
        inputs = replace(inputs, settings=settings)
    pilot = make_pilot(inputs.rng.standard_normal((16, 3)))
    pilot = run_pilot_windows(inputs, pilot, (400,) * 6)
    assert pilot.is_converged
    assert 0.5 < np.square(scale * pilot.positions).mean() < 2.0
    if not has_user_matrix:
        np.testing.assert_allclose(pilot.preconditioner.sds, 1.0 / scale, rtol=0.2)


def test_run_pilot_windows_wide_start_in_the_last_window_ends_in_the_bulk():
    inputs = make_function_inputs(3, lambda z: 0.5e4 * z @ z)
    pilot = make_pilot(inputs.rng.standard_normal((16, 3)))
    pilot = run_pilot_windows(inputs, pilot, (100,))
    assert not pilot.is_converged
    assert np.square(pilot.q).mean() < 10.0


def test_update_preconditioner_heavy_tails_have_variance_ratio_of_one():
    """The ratio of variances is one for any posterior, not for Gaussian ones only."""
    inputs = make_function_inputs(2, lambda z: 1.75 * jnp.log1p(z**2 / 2.5).sum())
    draws = np.random.default_rng(0).standard_t(2.5, (16, 200, 2))
    preconditioner = make_pilot(draws[:, 0]).preconditioner
    for width in (1.0, 4.0):
        updated = update_preconditioner(inputs, preconditioner, width * draws, NO_NOISE, True)
        assert (updated.min_variance_ratios.max() > 1.5) == (width > 1.0)


def make_correlated_draws(rng, num_chains, num_draws, factor, lag_correlation=0.8):
    """Return draws of autoregressive chains with the covariance of a factor."""
    x = rng.standard_normal((num_chains, num_draws, len(factor)))
    for i in range(1, num_draws):
        x[:, i] = lag_correlation * x[:, i - 1] + np.sqrt(1 - lag_correlation**2) * x[:, i]
    return x @ factor.T


def test_few_draws_of_many_shared_parameters_change_no_covariance():
    # 160 draws, about 18 of them independent, have eigenvalues between 0.00 and 5 by chance.
    draws = make_correlated_draws(np.random.default_rng(0), 8, 20, np.eye(41))
    assert np.linalg.eigvalsh(np.cov(draws.reshape(-1, 41), rowvar=False)).min() < 0.1
    refit = refit_standard_normal(draws, 18.0)
    assert refit is None or (refit[1] == np.eye(41)).all()


def test_covariance_of_few_draws_is_shrunk():
    factor = np.diag([6.0, *np.ones(40)])
    draws = make_correlated_draws(np.random.default_rng(1), 8, 40, factor)
    _, refitted = refit_standard_normal(draws, 35.0)
    covariance = refitted @ refitted.T
    # The wide direction is found, and no other one is scaled by more than a factor of two.
    assert 10.0 < covariance[0, 0] < 60.0
    others = np.linalg.eigvalsh(covariance)[:-1]
    assert others.min() > 0.25
    assert others.max() < 4.0


def test_covariance_of_many_draws_is_refitted():
    factor = np.array([[2.0, 0.0, 0.0], [1.0, 0.5, 0.0], [0.0, 0.0, 1.0]])
    draws = make_correlated_draws(np.random.default_rng(2), 8, 400, factor)
    mean, refitted = refit_standard_normal(0.5 + draws, 350.0)
    covariance = refitted @ refitted.T
    np.testing.assert_allclose(covariance, factor @ factor.T, atol=0.8, rtol=0.25)
    np.testing.assert_allclose(mean, 0.5, atol=0.4)


def test_r_hat_of_exact_chains_is_below_its_bound():
    rng = np.random.default_rng(3)
    num_draws, num_chains, dim, num_trials = 7, 8, 41, 400
    draws = rng.standard_normal((num_trials, num_chains, num_draws, dim))
    r_hats = np.array([compute_r_hat(x.mean(1), x.var(1, ddof=1).mean(0)).max() for x in draws])
    bound = compute_max_r_hat(num_draws, num_chains, dim)
    # The bound is exceeded with a probability of 1%, and 1.1 nearly always.
    assert (r_hats > bound).mean() < 0.03
    assert np.quantile(r_hats, 0.9) > 0.92 * bound
    assert np.mean(r_hats > 1.1) > 0.9
    assert compute_max_r_hat(1e4, num_chains, dim) == 1.1
