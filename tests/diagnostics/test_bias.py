"""The bias that a run reports is the bias that it has."""

import html
import warnings
from dataclasses import replace
from functools import cache

import arviz as az
import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import pytest
from numpyro.diagnostics import gelman_rubin
from numpyro.infer import MCMC, NUTS

from numpyro_sgmcmc import (
    SGHMC,
    SGLD,
    SGNHT,
    SGRLD,
    SHMC,
    SGHMCSplit,
    bias_report,
    diagnostics,
    print_summary,
)
from numpyro_sgmcmc.diagnostics.bias import _is_own
from numpyro_sgmcmc.diagnostics.estimates import Estimate
from numpyro_sgmcmc.diagnostics.site_bias import SiteBias, judge
from numpyro_sgmcmc.diagnostics.verdict import _cure_of_noise, sentence
from numpyro_sgmcmc.dynamics import Underdamped
from tests.contract.kernels import (
    BATCH,
    KERNELS,
    quietly,
    survey,
    survey_data,
    survey_posterior,
)
from tests.dynamics.orders import stationary_covariance

mpl.use("Agg")


from tests.quick import quick_if

DATA = survey_data()


def run(kernel, num_samples=1000, num_chains=4, **options):
    settings = {"num_samples": num_samples, "num_chains": num_chains, **options}
    mcmc = quietly(kernel, num_warmup=100, chain_method="vectorized", **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        mcmc.run(jax.random.key(0), *DATA, batch_size=BATCH)
    return mcmc


SETTINGS = {
    "default": {},
    "plain, independent rows": {"gradient": "plain", "minibatch": "iid", "step_size": 0.3},
    "plain, an epoch's rows": {"gradient": "plain", "minibatch": "epoch", "step_size": 0.3},
    "long steps": {"step_size": 0.6},
}
QUICK = {"default", "plain, independent rows"}  # whose runs other tests share


@cache
def run_with(kernel_class, label):
    """A run of 1,000 draws, made once."""
    settings = dict(SETTINGS[label])
    if kernel_class in (SGLD, SGRLD, SGHMC) and "step_size" in settings:
        settings["step_size"] /= 3.0
    return run(kernel_class(survey, **settings))


def true_bias(mcmc):
    """Shift and inflation of a run on the survey, whose posterior is known."""
    posterior = survey_posterior(DATA)
    samples = mcmc.get_samples()
    found = {}
    for site in ("beta", "rate"):
        draws = np.asarray(samples[site], np.float64)
        mean, sd = posterior[site]
        found[site] = (draws.mean(0) - mean) / sd, draws.std(0) / sd - 1.0
    return found


@pytest.fixture
def noisy():
    return run_with(SGHMCSplit, "plain, independent rows")


@pytest.fixture
def good():
    return run_with(SGHMCSplit, "default")


# --- The numbers --------------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("num_chains", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_discretisation_of_a_gaussian_is_reported_to_the_percent(num_chains):
    """Columns of different curvature, long steps: the truth solves a Lyapunov equation."""
    scales = np.array([0.7, 1.0, 1.3])
    mcmc = MCMC(
        SHMC(
            potential_fn=lambda q: jnp.square(q / scales).sum() / 2 + q[0] * q[1] / 2,
            scheme="obabo",
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
    dynamics = Underdamped(1.5, keeps_gradient=True)
    state = dynamics.init(jnp.zeros(3), jax.random.key(0))
    covariance = stationary_covariance(dynamics.step("obabo"), state, 2, 0.9, curvature)[:3, :3]
    truth = np.sqrt(np.diagonal(covariance) / np.diagonal(np.linalg.inv(curvature))) - 1
    assert truth.max() > truth.min() + 0.05 > 0.1
    found = bias_report(mcmc).estimates
    assert (np.abs(found.inflation.value - truth) < 4 * found.inflation.error).all()
    assert found.inflation.error.max() < 0.02
    assert (np.abs(found.shift.value) < 4 * found.shift.error + 0.01).all()


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
    found = bias_report(mcmc).estimates
    truth = true_bias(mcmc)
    shift = np.concatenate([np.ravel(truth[s][0]) for s in ("beta", "rate")])
    inflation = np.concatenate([np.ravel(truth[s][1]) for s in ("beta", "rate")])
    assert (np.abs(found.shift.value - shift) < 4 * found.shift.error + 0.05).all()
    assert (np.abs(found.inflation.value - inflation) < 4 * found.inflation.error + 0.04).all()


def test_gradients_on_all_rows_agree(noisy):
    cheap, sharp = bias_report(noisy), bias_report(noisy, full_data=True, num_draws=2000)
    a, b = cheap.estimates.inflation, sharp.estimates.inflation
    assert a.value.min() > 0.2
    assert (np.abs(a.value - b.value) < 4 * np.hypot(a.error, b.error)).all()
    assert sharp.full_data
    assert "all rows" in str(sharp)


def test_kinetic_temperature_is_another_number():
    """Long exact-gradient steps: the momenta are colder than the positions."""
    kernel = SGHMCSplit(potential_fn=lambda q: jnp.square(q).sum() / 2, step_size=1.2, num_steps=3)
    mcmc = MCMC(kernel, num_warmup=10, num_samples=20_000, progress_bar=False)
    mcmc.run(jax.random.key(0), init_params=jnp.zeros(2))
    found = bias_report(mcmc).estimates
    assert found.configurational.value == pytest.approx(0.877, abs=0.03)
    assert found.kinetic.value == pytest.approx(0.817, abs=0.03)
    overdamped = run(SGLD(survey), num_samples=50)
    report = bias_report(overdamped)
    assert np.isnan(report.estimates.kinetic.value)
    assert "kinetic" not in str(report)


# --- The words ----------------------------------------------------------------------------------


def test_verdict_names_site_size_cause_and_cure(noisy):
    report = bias_report(noisy)
    assert report.is_flagged
    assert {s.verdict for s in report.sites} == {"biased"}
    for part in ("Sds of `beta`", "% too wide", "Gradient noise", "subsample_size", "step size"):
        assert part in report.verdict
    steps = bias_report(run(SHMC(survey, scheme="symmetric", step_size=1.4, num_steps=4)))
    assert steps.is_flagged
    assert "it is the step" in steps.verdict
    assert "1/4" in steps.verdict
    assert not steps.has_own_scheme
    assert "check_invariance" not in steps.verdict
    assert "check_invariance" in replace(steps, has_own_scheme=True).verdict


def test_what_the_user_has_written_is_known():
    class Own(Underdamped):
        pass

    assert _is_own(Own())
    assert not _is_own(Underdamped())


def test_nobody_is_told_to_halve_ten_times():
    """To bring sds from nine times theirs within 5 % the variance's excess of 80 must be 0.1."""
    few, many = (_cure_of_noise(excess, "halve the step size") for excess in (0.2, 8.0))
    assert "either about halves" in few
    assert "halve" not in many
    assert "subsample_size some 800 times as large" in many


def test_what_cannot_be_measured_is_said_in_words():
    lost = SiteBias("tau", 1, 3.0, 0.1, np.nan, np.nan, 1.0, 500.0, "biased")
    said = sentence(lost)
    assert said.startswith("Sds of `tau` are too far off to be measured and means of `tau`")
    assert "nan" not in said
    gone = SiteBias("tau", 1, -7e5, 4e5, 0.3, 0.1, 1.0, 500.0, "biased")
    assert sentence(gone).endswith("means of `tau` are more than 100 sds off.")


def test_few_dependent_draws_are_told_from_long_steps():
    kernel = SGHMCSplit(survey, step_size=0.1, num_steps=1)
    report = bias_report(run(kernel, num_samples=100, num_chains=1))
    assert "biased" in {s.verdict for s in report.sites}
    assert "independent ones at most) may explain it: draw more" in report.verdict
    assert "step" not in report.verdict


def test_noise_is_named_before_chance():
    """Noise that widens sds, and few draws: more draws would not cure it."""
    settings = {"gradient": "plain", "minibatch": "iid", "step_size": 0.3}
    report = bias_report(run(SGHMCSplit(survey, **settings), num_samples=60))
    assert report.noise_inflation > 0.15
    assert "draw more" not in report.verdict


def test_fine_needs_error_bars_that_rule_the_rest_out():
    judged = [
        judge(Estimate(np.array([value]), np.array([error])), np.array([0]), 2.0, 0.05, 0.15)
        for value, error in ((0.02, 0.01), (0.1, 0.04), (0.1, 0.02), (0.02, 0.09))
    ]
    assert judged == ["fine", "unclear", "biased", "unclear"]


def test_chains_in_different_modes_are_seen():
    """Two narrow modes, each sampled perfectly: the moments alone say that all is well."""

    def potential(q):
        return -jnp.logaddexp(-jnp.square(q - 5.0).sum() / 2, -jnp.square(q + 5.0).sum() / 2)

    kernel = SGHMCSplit(potential_fn=potential, inverse_mass_matrix=np.ones(1), step_size=0.3)
    mcmc = quietly(kernel, num_samples=1000, num_chains=4, chain_method="vectorized")
    mcmc.run(jax.random.key(0), init_params=jnp.array([[-5.0], [5.0], [-5.0], [5.0]]))
    report = bias_report(mcmc)
    assert report.is_flagged
    assert {s.verdict for s in report.sites} == {"apart"}
    assert report.verdict.startswith("Chains disagree on `z` (R-hat up to ")
    draws = np.asarray(mcmc.get_samples(group_by_chain=True))
    np.testing.assert_allclose(report.r_hat, gelman_rubin(draws), rtol=0.05)


def test_nothing_is_flagged_where_nothing_is_wrong(good):
    report = bias_report(good)
    assert not report.is_flagged
    assert report.verdict.startswith("Means and sds are right within the error bars: R-hat is at ")
    assert f"effective sample size is {report.ess.min():.0f}, and gradients at " in report.verdict
    assert report.line.startswith("Bias: means off by at most 0.")


def test_few_draws_are_unclear_and_not_fine():
    dependent = run(SGHMCSplit(survey, num_steps=1), num_samples=30, num_chains=1)
    assert not bias_report(dependent).is_fine
    report = bias_report(run(SGHMCSplit(survey), num_samples=30, num_chains=1))
    assert not report.is_fine
    assert "unclear" in {s.verdict for s in report.sites}
    assert "too few to tell: draw more" in report.verdict


def test_report_prints_and_converts(noisy):
    report = bias_report(noisy)
    lines = str(report).splitlines()
    assert lines[0].split() == [
        "site",
        "size",
        "mean",
        "shift",
        "sd",
        "inflation",
        "R-hat",
        "ESS",
        "verdict",
    ]
    assert lines[1].split()[:2] == ["beta", "2"]
    assert max(map(len, lines[:3])) < 80
    page = report._repr_html_()
    assert page.count("<tr>") == 3
    assert html.escape(report.verdict) in page
    table = report.to_dataframe()
    assert list(table.index) == ["beta", "rate"]
    assert table.loc["beta", "verdict"] == "biased"
    each = report.to_dataframe(coordinates=True)
    assert list(each.index) == ["beta[0]", "beta[1]", "rate"]
    np.testing.assert_allclose(each["sd_inflation"], report.estimates.inflation.value)


def test_summary_ends_with_a_line_on_bias(noisy, good, capsys):
    print_summary(good)
    right = capsys.readouterr().out.splitlines()
    good.print_summary()
    assert capsys.readouterr().out.splitlines() == right[:-1]
    assert right[-1] == bias_report(good).line
    print_summary(noisy)
    assert "Gradient noise explains it" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("sites", "exclude_deterministic", "shown"),
    [
        (["rate"], True, ["rate"]),
        ("contrast", True, ["contrast"]),
        (["~beta"], True, ["rate"]),
        (["~beta"], False, ["contrast", "rate"]),
    ],
)
def test_summary_of_some_sites(good, capsys, sites, exclude_deterministic, shown):
    good.print_summary(exclude_deterministic=False)
    rows = capsys.readouterr().out.splitlines()
    print_summary(good, exclude_deterministic=exclude_deterministic, sites=sites)
    found = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in found[2:-3]] == shown
    assert {" ".join(x.split()) for x in found[2:-3]} <= {" ".join(x.split()) for x in rows}
    assert found[-2:] == [rows[-1], bias_report(good).line]
    assert len(found) == len(shown) + 5


@pytest.mark.parametrize("sites", [["foo"], ["~foo"], ["beta", "~rate"], [], 3, [3]])
def test_sites_that_are_none_are_refused(good, sites):
    with pytest.raises(ValueError, match="`sites`"):
        print_summary(good, sites=sites)


def test_report_lands_in_the_arviz_object(noisy):
    data = az.from_numpyro(noisy)
    report = bias_report(noisy)
    report.add_to(data)
    group = data["bias_report"]
    assert group.attrs["verdict"] == report.verdict
    assert list(group["coordinate"].values) == ["beta[0]", "beta[1]", "rate"]


def test_plot_shows_every_coordinate(noisy):
    left, right = diagnostics.plot_bias(noisy)
    assert [t.get_text() for t in left.get_yticklabels()] == ["beta[0]", "beta[1]", "rate"]
    assert "posterior sd" in left.get_xlabel()
    shown = sorted(x for line in right.lines for x in line.get_xdata() if line.get_marker() == "o")
    expected = sorted(100 * bias_report(noisy).estimates.inflation.value)
    np.testing.assert_allclose(shown, expected)
    mpl.pyplot.close("all")


@pytest.mark.slow
def test_a_schedule_is_reported_on():
    kernel = SGHMCSplit(
        survey, step_size=lambda count: jnp.where(count < 5000, 0.3, 0.2), num_steps=10
    )
    assert not bias_report(run(kernel)).is_flagged


# --- Calibrated draws ---------------------------------------------------------------------------


def test_calibrated_draws_have_the_right_spread(noisy):
    samples = diagnostics.calibrated_samples(noisy)
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
    chains = diagnostics.calibrated_samples(noisy, group_by_chain=True)
    assert chains["beta"].shape == (4, 1000, 2)


def test_calibration_leaves_right_draws_alone(good):
    samples = diagnostics.calibrated_samples(good)["rate"]
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
        diagnostics.calibrated_samples(MCMC(SGHMCSplit(survey), num_warmup=1, num_samples=1))


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
    assert np.isfinite(report.estimates.inflation.value).all()
    assert report.is_flagged
    assert f"{diverging} of 2000 iterations diverged" in report.verdict


@pytest.mark.slow
def test_thermostat_report_without_noise_is_fine():
    assert not bias_report(run(SGNHT(survey))).is_flagged
