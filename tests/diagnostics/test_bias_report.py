"""The bias that a run reports is the bias that it has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.infer import MCMC, NUTS

from numpyro_sgmcmc import SGLD, SGNHT, SHMC, SGHMCSplit, bias_report, diagnostics
from numpyro_sgmcmc.dynamics import UnderdampedLangevin
from tests.contract.kernels import (
    BATCH,
    KERNELS,
    quietly,
    survey,
    survey_posterior,
)
from tests.diagnostics.survey_runs import DATA, QUICK, SETTINGS, run, run_with, true_bias
from tests.dynamics.orders import stationary_covariance
from tests.quick import quick_if

# --- The numbers --------------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("num_chains", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_discretisation_of_a_gaussian_is_reported_to_the_percent(num_chains):
    """Columns of different curvature, long steps: the truth solves a Lyapunov equation."""
    scales = np.array([0.7, 1.0, 1.3])
    mcmc = MCMC(
        SHMC(
            potential_fn=lambda q: jnp.square(q / scales).sum() / 2 + q[0] * q[1] / 2,
            integrator="obabo",
            step_size=0.9,
            num_steps=5,
            inverse_mass_matrix=np.ones(3),
        ),
        num_warmup=50,
        num_samples=40_000 // num_chains,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    starts = jnp.zeros((num_chains, 3) if num_chains > 1 else 3)
    mcmc.run(jax.random.key(1), init_params=starts)
    curvature = np.diag(1 / scales**2)
    curvature[0, 1] = curvature[1, 0] = 0.5
    dynamics = UnderdampedLangevin(1.5, is_fsal=True)
    state = dynamics.init(jnp.zeros(3), jax.random.key(0))
    covariance = stationary_covariance(dynamics.make_step("obabo"), state, 2, 0.9, curvature)[
        :3, :3
    ]
    truth = np.sqrt(np.diagonal(covariance) / np.diagonal(np.linalg.inv(curvature))) - 1
    assert truth.max() > truth.min() + 0.05 > 0.1
    found = bias_report(mcmc).stein_estimates
    assert (np.abs(found.sd_inflation.value - truth) < 4 * found.sd_inflation.error).all()
    assert found.sd_inflation.error.max() < 0.02
    assert (np.abs(found.mean_bias.value) < 4 * found.mean_bias.error + 0.01).all()


@pytest.mark.parametrize(
    ("kernel_class", "label"),
    [
        quick_if(kernel is SGHMCSplit and label in QUICK, kernel, label)
        for kernel in KERNELS
        for label in SETTINGS
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_reported_bias_is_the_true_one(kernel_class, label):
    mcmc = run_with(kernel_class, label)
    found = bias_report(mcmc).stein_estimates
    truth = true_bias(mcmc)
    shift = np.concatenate([np.ravel(truth[s][0]) for s in ("beta", "rate")])
    inflation = np.concatenate([np.ravel(truth[s][1]) for s in ("beta", "rate")])
    assert (np.abs(found.mean_bias.value - shift) < 4 * found.mean_bias.error + 0.05).all()
    assert (
        np.abs(found.sd_inflation.value - inflation) < 4 * found.sd_inflation.error + 0.04
    ).all()


def test_gradients_on_all_rows_agree(noisy):
    cheap, sharp = bias_report(noisy), bias_report(noisy, full_data=True, num_draws=2000)
    a, b = cheap.stein_estimates.sd_inflation, sharp.stein_estimates.sd_inflation
    assert a.value.min() > 0.2
    assert (np.abs(a.value - b.value) < 4 * np.hypot(a.error, b.error)).all()
    assert sharp.full_data
    assert "all rows" in str(sharp)


def test_kinetic_temperature_is_another_number():
    """Long exact-gradient steps: the momenta are colder than the positions."""
    kernel = SGHMCSplit(potential_fn=lambda q: jnp.square(q).sum() / 2, step_size=1.2, num_steps=3)
    mcmc = MCMC(kernel, num_warmup=10, num_samples=20_000, progress_bar=False)
    mcmc.run(jax.random.key(0), init_params=jnp.zeros(2))
    found = bias_report(mcmc).stein_estimates
    assert found.configurational_temperature.value == pytest.approx(0.877, abs=0.03)
    assert found.kinetic_temperature.value == pytest.approx(0.817, abs=0.03)
    overdamped = run(SGLD(survey), num_samples=50)
    report = bias_report(overdamped)
    assert np.isnan(report.stein_estimates.kinetic_temperature.value)
    assert "kinetic" not in str(report)


# --- Calibrated draws ---------------------------------------------------------------------------


def test_calibrated_draws_have_the_right_spread(noisy):
    samples = diagnostics.bias_corrected_samples(noisy)
    posterior = survey_posterior(DATA)
    raw = noisy.get_samples()
    assert set(samples) == set(raw)
    for site in ("beta", "rate"):
        mean, sd = posterior[site]
        draws = np.asarray(samples[site])
        assert draws.shape == raw[site].shape
        assert (np.abs(np.std(draws, 0) / sd - 1) < 0.06).all()
        assert (np.abs(np.std(raw[site], 0) / sd - 1) > 0.2).all()
        assert (np.abs(draws.mean(0) - mean) / sd < 0.15).all()
    contrast = samples["beta"][:, 0] - samples["beta"][:, 1]
    np.testing.assert_allclose(samples["contrast"], contrast, rtol=1e-4, atol=1e-5)
    chains = diagnostics.bias_corrected_samples(noisy, group_by_chain=True)
    assert chains["beta"].shape == (4, 1000, 2)


def test_calibration_leaves_right_draws_alone(good):
    samples = diagnostics.bias_corrected_samples(good)["rate"]
    assert np.abs(np.log(samples / good.get_samples()["rate"])).max() < 0.03


# --- Bad input ----------------------------------------------------------------------------------


def test_what_has_no_moments_is_refused(good):
    with pytest.raises(ValueError, match="There are no draws yet"):
        bias_report(MCMC(SGHMCSplit(survey), num_warmup=1, num_samples=1))
    with pytest.raises(ValueError, match="ran NUTS, which keeps no moments"):
        bias_report(MCMC(NUTS(survey), num_warmup=1, num_samples=1))
    with pytest.raises(ValueError, match="got dict: draws alone do not tell it"):
        bias_report(good.get_samples())
    with pytest.raises(ValueError, match="`num_draws` is 0"):
        bias_report(good, full_data=True, num_draws=0)
    with pytest.raises(ValueError, match="before `calibrated_samples`"):
        diagnostics.bias_corrected_samples(MCMC(SGHMCSplit(survey), num_warmup=1, num_samples=1))


def test_draws_that_were_not_kept_are_named():
    mcmc = quietly(SGHMCSplit(survey))
    mcmc.run(jax.random.key(0), *DATA, batch_size=BATCH, extra_fields=("~z.rate",))
    assert len(bias_report(mcmc).names) == 3
    with pytest.raises(ValueError, match="site 'rate' were not kept"):
        bias_report(mcmc, full_data=True)


def test_diverging_iterations_are_reported_and_left_out():
    """A potential that is not finite far out: no NaN reaches the report."""

    def potential(q):
        return (jnp.where(jnp.abs(q) < 2.6, 0.5, jnp.nan) * jnp.square(q)).sum()

    mcmc = quietly(SGHMCSplit(potential_fn=potential, step_size=0.3), num_samples=2000)
    mcmc.run(jax.random.key(0), init_params=jnp.zeros(1))
    diverging = int(np.sum(mcmc.get_extra_fields()["diverging"]))
    assert 20 < diverging < 1000
    report = bias_report(mcmc)
    assert np.isfinite(report.stein_estimates.sd_inflation.value).all()
    assert report.is_flagged
    assert f"{diverging} of 2000 iterations diverged" in report.diagnosis


@pytest.mark.slow
def test_thermostat_report_without_noise_is_fine():
    assert not bias_report(run(SGNHT(survey))).is_flagged
