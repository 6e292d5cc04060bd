"""The bias that a run reports is the bias that it has; draws are corrected by it."""

import copy
import html

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.diagnostics import gelman_rubin
from numpyro.infer import MCMC
from numpyro.infer.reparam import LocScaleReparam

from numpyro_sgmcmc import SGLD, SGNHT, SHMC, SGHMCSplit, bias_report
from numpyro_sgmcmc.diagnostics import bias_corrected_samples
from numpyro_sgmcmc.dynamics import UnderdampedLangevin
from numpyro_sgmcmc.model.low_rank import LowRankFactor
from tests.contract.kernels import GIVEN, KERNELS, quietly, survey, survey_posterior
from tests.diagnostics.survey_runs import DATA, QUICK, SETTINGS, run, run_with, true_bias
from tests.dynamics.orders import stationary_covariance
from tests.quick import quick_if

# --- The numbers --------------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("num_chains", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_report_of_discretised_gaussian_agrees_with_the_lyapunov_equation(num_chains):
    """Coordinates of different curvature, large steps."""
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
    init_params = jnp.zeros((num_chains, 3) if num_chains > 1 else 3)
    mcmc.run(jax.random.key(1), init_params=init_params)
    curvature = np.diag(1 / scales**2)
    curvature[0, 1] = curvature[1, 0] = 0.5
    dynamics = UnderdampedLangevin(1.5, is_fsal=True)
    state = dynamics.init(jnp.zeros(3), jax.random.key(0))
    step = dynamics.make_step("obabo")
    covariance = stationary_covariance(step, state, 2, 0.9, curvature)[:3, :3]
    truth = np.sqrt(np.diagonal(covariance) / np.diagonal(np.linalg.inv(curvature))) - 1
    assert truth.max() > truth.min() + 0.05 > 0.1
    report = bias_report(mcmc)
    sd_inflation, mean_bias = report.sd_inflation, report.mean_bias
    assert (np.abs(sd_inflation.value - truth) < 4 * sd_inflation.error).all()
    assert sd_inflation.error.max() < 0.02
    assert (np.abs(mean_bias.value) < 4 * mean_bias.error + 0.01).all()


@pytest.mark.parametrize(
    ("kernel_class", "label"),
    [
        quick_if(kernel is SGHMCSplit and label in QUICK, kernel, label)
        for kernel in KERNELS
        for label in SETTINGS
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_reported_bias_is_the_true_bias(kernel_class, label):
    mcmc = run_with(kernel_class, label)
    report = bias_report(mcmc)
    mean_bias, sd_inflation = true_bias(mcmc)
    off = np.abs(report.mean_bias.value - mean_bias)
    assert (off < 4 * report.mean_bias.error + 0.05).all()
    off = np.abs(report.sd_inflation.value - sd_inflation)
    assert (off < 4 * report.sd_inflation.error + 0.04).all()


def test_full_data_report_agrees_with_minibatch_report(noisy, noisy_report):
    full = bias_report(noisy, full_data=True, num_draws=2000)
    a, b = noisy_report.sd_inflation, full.sd_inflation
    assert a.value.min() > 0.2
    assert (np.abs(a.value - b.value) < 4 * np.hypot(a.error, b.error)).all()
    assert full.full_data
    assert "all rows" in str(full)


@pytest.mark.slow
def test_intercept_and_dummies_are_estimated_as_precisely_as_other_coordinates():
    """152 coordinates with one wide direction, which all but one of them share."""
    num_levels, num_rows = 150, 6_000
    rng = np.random.default_rng(0)
    level = rng.integers(0, num_levels, num_rows)
    effect = rng.standard_normal(num_levels)
    y = (1.0 + effect[level] + rng.standard_normal(num_rows)).astype(np.float32)

    def dummies(level, y, batch_size=None):
        b0 = numpyro.sample("b0", dist.Normal(0, 10))
        d = numpyro.sample("d", dist.Normal(0, 2).expand([num_levels]).to_event(1))
        s = numpyro.sample("s", dist.HalfNormal(5))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(b0 + d[level[i]], s), obs=y[i])

    settings = {"num_samples": 1000, "num_chains": 4, "chain_method": "vectorized"}
    mcmc = quietly(SGHMCSplit(dummies), num_warmup=300, **settings)
    mcmc.run(jax.random.key(0), level, y, batch_size=200)
    report = bias_report(mcmc)
    assert report.is_ok
    assert report.mean_bias.error.max() < 0.03
    assert report.sd_inflation.error.max() < 0.02
    draws = {name: np.asarray(x, float) for name, x in mcmc.get_samples().items()}
    # Given the scale, whose posterior is narrow, coefficients are Gaussian.
    x = np.column_stack([np.ones(num_rows), np.eye(num_levels)[level]]) / draws["s"].mean()
    prior_sds = np.append(10.0, np.full(num_levels, 2.0))
    covariance = np.linalg.inv(x.T @ x + np.diag(prior_sds**-2))
    mean, sd = covariance @ x.T @ y / draws["s"].mean(), np.sqrt(np.diagonal(covariance))
    coefficients = np.column_stack([draws["b0"], draws["d"]])
    assert (np.abs(coefficients.mean(0) - mean) < 0.09 * sd).all()
    assert (np.abs(coefficients.std(0) / sd - 1.0) < 0.05).all()


def test_kinetic_temperature_is_that_of_the_momenta():
    """Large exact-gradient steps: the momenta are colder than the positions."""  # vocabulary: ok
    kernel = SGHMCSplit(potential_fn=lambda q: jnp.square(q).sum() / 2, step_size=1.2, num_steps=3)
    mcmc = MCMC(kernel, num_warmup=10, num_samples=20_000, progress_bar=False)
    mcmc.run(jax.random.key(0), init_params=jnp.zeros(2))
    report = bias_report(mcmc)
    assert report.configurational_temperature.value == pytest.approx(0.877, abs=0.03)
    assert report.kinetic_temperature.value == pytest.approx(0.817, abs=0.03)


def test_report_of_a_run_on_all_rows_names_no_minibatches():
    kernel = SGHMCSplit(potential_fn=lambda q: jnp.square(q).sum() / 2)
    mcmc = MCMC(kernel, num_warmup=10, num_samples=100, progress_bar=False)
    mcmc.run(jax.random.key(0), init_params=jnp.zeros(2))
    report = str(bias_report(mcmc))
    assert "minibatch gradients" not in report
    assert "Gradient noise: none, because every step takes all rows." in report


def test_overdamped_report_has_no_kinetic_temperature():
    options = {**GIVEN, "step_size": 1e-3}
    report = bias_report(run(SGLD(survey, **options), num_samples=50))
    assert np.isnan(report.kinetic_temperature.value)
    assert "kinetic" not in str(report)


def test_diverging_iterations_are_reported_and_left_out():
    """A potential that is not finite far out: the report stays finite."""

    def potential(q):
        return (jnp.where(jnp.abs(q) < 2.6, 0.5, jnp.nan) * jnp.square(q)).sum()

    mcmc = quietly(SGHMCSplit(potential_fn=potential, step_size=0.3), num_samples=2000)
    mcmc.run(jax.random.key(0), init_params=jnp.zeros(1))
    num_divergences = int(np.sum(mcmc.get_extra_fields()["diverging"]))
    assert 20 < num_divergences < 1000
    report = bias_report(mcmc)
    assert np.isfinite(report.sd_inflation.value).all()
    assert report.num_divergences == num_divergences
    assert report.is_flagged
    assert f"{num_divergences} of 2000" in report.diagnosis


@pytest.mark.slow
def test_thermostat_without_noise_is_not_flagged():
    assert not bias_report(run(SGNHT(survey))).is_flagged


@pytest.mark.slow
def test_schedule_is_not_flagged():
    kernel = SGHMCSplit(
        survey, step_size=lambda count: jnp.where(count < 5000, 0.3, 0.2), num_steps=10
    )
    assert not bias_report(run(kernel)).is_flagged


def test_chains_in_different_modes_are_not_converged():
    """Two narrow modes, each sampled well: the sums alone show no bias."""

    def potential(q):
        return -jnp.logaddexp(-jnp.square(q - 5.0).sum() / 2, -jnp.square(q + 5.0).sum() / 2)

    kernel = SGHMCSplit(potential_fn=potential, inverse_mass_matrix=np.ones(1), step_size=0.3)
    mcmc = quietly(kernel, num_samples=1000, num_chains=4, chain_method="vectorized")
    mcmc.run(jax.random.key(0), init_params=jnp.array([[-5.0], [5.0], [-5.0], [5.0]]))
    report = bias_report(mcmc)
    assert report.is_flagged
    assert {s.diagnosis for s in report.sites} == {"not converged"}
    draws = np.asarray(mcmc.get_samples(group_by_chain=True))
    np.testing.assert_allclose(report.r_hat, gelman_rubin(draws), rtol=0.05)


# --- Tails, funnels and data --------------------------------------------------------------------


def location(y, batch_size=None):
    a = numpyro.sample("a", dist.Normal(0, 2))
    numpyro.sample("c", dist.Cauchy(0, 1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(a, 1), obs=y[i])


def location_data(mean=0.0):
    return jnp.asarray(mean + np.random.default_rng(5).standard_normal(300), jnp.float32)


@pytest.fixture(scope="module")
def location_runs():
    """Runs of one kernel on two sets of data."""
    kernel, runs = SGHMCSplit(location), []
    for mean in (0.0, 9.0):
        mcmc = quietly(
            kernel, num_warmup=200, num_samples=1000, num_chains=4, chain_method="vectorized"
        )
        mcmc.run(jax.random.key(0), location_data(mean), batch_size=100)
        runs.append(mcmc)
    return runs


def test_heavy_tails_are_judged_after_a_transform(location_runs):
    mcmc = location_runs[0]
    report = bias_report(mcmc)
    heavy = [report.coordinate_names[k][0] for k in report.heavy_tailed_coordinates]
    assert heavy == ["c"]
    assert "Heavy tails" in str(report)
    assert {s.site: s.diagnosis for s in report.sites} == {"a": "ok", "c": "ok"}
    ranks = np.asarray(dist.Cauchy(0, 1).cdf(mcmc.get_samples()["c"]))
    error = 1 / np.sqrt(report.ess[1])
    assert abs(ranks.mean() - 0.5) < 4 * error * 12**-0.5
    assert ranks.std() == pytest.approx(12**-0.5, rel=0.1)


def test_report_uses_the_data_of_its_run(location_runs):
    """The kernel has been run on other data since."""
    for mcmc in location_runs:
        assert {s.site: s.diagnosis for s in bias_report(mcmc).sites}["a"] == "ok"


def test_reference_gradient_is_computed_if_the_run_has_none():
    """All settings given, minibatch gradients and a center off the mean."""

    def model(y, batch_size=None):
        a = numpyro.sample("a", dist.Normal(0, 2))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(a, 1), obs=y[i])

    kernel = SGHMCSplit(
        model,
        step_size=0.1,
        num_steps=20,
        gradient_estimator="minibatch",
        subsampling="contiguous",
        inverse_mass_matrix=np.array([1 / 300]),
    )
    mcmc = quietly(kernel, num_warmup=100, num_samples=1000)
    mcmc.run(jax.random.key(0), location_data(), batch_size=100, init_params={"a": jnp.array(0.2)})
    at_draws = bias_report(mcmc).bias_estimates[1]
    assert abs(at_draws.mean_bias.value[0]) < 0.5


def groups(group, y, batch_size=None):
    mean = numpyro.sample("mean", dist.Normal(0, 5))
    scale = numpyro.sample("scale", dist.HalfNormal(2))
    with numpyro.plate("groups", 30):
        effect = numpyro.sample("effect", dist.Normal(mean, scale))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(effect[group[i]], 1), obs=y[i])


def group_report(model, scale, batch_size=100):
    rng = np.random.default_rng(1)
    group = rng.integers(0, 30, 900)
    y = scale * rng.standard_normal(30)[group] + rng.standard_normal(900)
    kernel = SGHMCSplit(model)
    mcmc = quietly(
        kernel, num_warmup=200, num_samples=1000, num_chains=4, chain_method="vectorized"
    )
    data = jnp.asarray(group), jnp.asarray(y, jnp.float32)
    mcmc.run(jax.random.key(0), *data, batch_size=batch_size)
    return bias_report(mcmc)


@pytest.mark.slow
def test_groups_without_variation_are_a_funnel_neck():
    report = group_report(groups, scale=0.0)
    assert not report.is_ok
    names = {report.coordinate_names[n.coordinate][0] for n in report.funnel_necks}
    assert names == {"scale"}
    assert "small values of `scale`" in report.diagnosis
    assert "LocScaleReparam(0)" in report.diagnosis


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # the minibatch is all rows
def test_non_centred_groups_without_variation_are_ok():
    non_centred = numpyro.handlers.reparam(groups, config={"effect": LocScaleReparam(0)})
    report = group_report(non_centred, scale=0.0, batch_size=900)
    assert report.is_ok
    assert not report.funnel_necks


@pytest.mark.slow
def test_groups_that_differ_have_no_funnel_neck():
    report = group_report(groups, scale=0.5)
    assert report.is_ok
    assert not report.funnel_necks


# --- Conversions --------------------------------------------------------------------------------


def test_report_is_printed_as_a_table(noisy_report):
    lines = str(noisy_report).splitlines()
    assert " ".join(lines[0].split()) == (
        "site size mean bias (SD) SD bias (%) R-hat ESS diagnosis"
    )
    assert lines[1].split()[:2] == ["beta", "2"]
    assert lines[1].split()[-1] == "biased"
    assert max(map(len, lines[:3])) < 80
    assert "worst of up to 2 coordinates" in lines[4]
    assert "simultaneous 95% limits" in " ".join(lines)
    assert max(map(len, lines)) <= 100
    page = noisy_report._repr_html_()
    assert page.count("<tr>") == 3
    assert html.escape(noisy_report.diagnosis) in page


def test_report_is_converted_to_tables_of_sites_and_coordinates(noisy_report):
    sites = noisy_report.to_dataframe()
    assert list(sites.index) == ["beta", "rate"]
    assert sites.loc["beta", "diagnosis"] == "biased"
    coordinates = noisy_report.to_dataframe(coordinates=True)
    assert list(coordinates.index) == ["beta[0]", "beta[1]", "rate"]
    np.testing.assert_allclose(coordinates["sd_inflation"], noisy_report.sd_inflation.value)


def test_report_is_added_to_an_arviz_object(noisy, noisy_report):
    data = az.from_numpyro(noisy)
    noisy_report.add_to(data)
    group = data["bias_report"]
    assert group.attrs["diagnosis"] == noisy_report.diagnosis
    assert list(group["coordinate"].values) == ["beta[0]", "beta[1]", "rate"]
    with pytest.raises(ValueError, match=r"`data`.*ArviZ"):
        noisy_report.add_to({})


# --- Corrected draws ----------------------------------------------------------------------------


def test_corrected_draws_have_the_posteriors_sd(noisy):
    samples = bias_corrected_samples(noisy)
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
    chains = bias_corrected_samples(noisy, group_by_chain=True)
    assert chains["beta"].shape == (4, 1000, 2)


def test_corrected_draws_of_unbiased_run_are_almost_unchanged(default):
    samples = bias_corrected_samples(default)["rate"]
    assert np.abs(np.log(samples / default.get_samples()["rate"])).max() < 0.03


def test_correction_is_in_coordinates_without_the_low_rank_part(noisy, noisy_report):
    """The covariances of a report are those of the coordinates of the running sums."""
    mcmc = copy.copy(noisy)
    expected = bias_corrected_samples(mcmc, noisy_report)
    state = mcmc.last_state
    direction = np.full((4, 3, 1), 3**-0.5, np.float32)
    preconditioner = state.adapt_state.preconditioner._replace(
        low_rank=LowRankFactor(jnp.asarray(direction), jnp.full((4, 1), 3.0))
    )
    adapt_state = state.adapt_state._replace(preconditioner=preconditioner)
    mcmc._last_state = state._replace(adapt_state=adapt_state)
    samples = bias_corrected_samples(mcmc, noisy_report)
    jax.tree.map(np.testing.assert_array_equal, samples, expected)


def test_correction_by_report_of_another_run_raises(location_runs, noisy_report):
    for report in (noisy_report, "report"):
        with pytest.raises(ValueError, match="`report`"):
            bias_corrected_samples(location_runs[0], report)
