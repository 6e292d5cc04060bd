"""What a report says in words, prints and draws: what is wrong, why, and what would cure it."""

import html
from dataclasses import replace

import arviz as az
import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import pytest
from numpyro.diagnostics import gelman_rubin

from numpyro_sgmcmc import SHMC, SGHMCSplit, bias_report, diagnostics, print_summary
from numpyro_sgmcmc.diagnostics.bias_report import _is_custom_dynamics
from numpyro_sgmcmc.diagnostics.diagnosis import (
    SiteBias,
    _recommend_noise_remedy,
    classify_bias,
    describe_site_bias,
)
from numpyro_sgmcmc.diagnostics.stein_estimates import Estimate
from numpyro_sgmcmc.dynamics import UnderdampedLangevin
from tests.contract.kernels import (
    quietly,
    survey,
)
from tests.diagnostics.survey_runs import run

mpl.use("Agg")


def test_verdict_names_site_size_cause_and_cure(noisy):
    report = bias_report(noisy)
    assert report.is_flagged
    assert {s.diagnosis for s in report.sites} == {"biased"}
    for part in ("Sds of `beta`", "% too wide", "Gradient noise", "subsample_size", "step size"):
        assert part in report.diagnosis
    steps = bias_report(run(SHMC(survey, integrator="symmetric", step_size=1.4, num_steps=4)))
    assert steps.is_flagged
    assert "it is the step" in steps.diagnosis
    assert "1/4" in steps.diagnosis
    assert not steps.has_custom_dynamics
    assert "check_invariance" not in steps.diagnosis
    assert "check_invariance" in replace(steps, has_custom_dynamics=True).diagnosis


def test_what_the_user_has_written_is_known():
    class Own(UnderdampedLangevin):
        pass

    assert _is_custom_dynamics(Own())
    assert not _is_custom_dynamics(UnderdampedLangevin())


def test_nobody_is_told_to_halve_ten_times():
    """To bring sds from nine times theirs within 5 % the variance's excess of 80 must be 0.1."""
    few, many = (_recommend_noise_remedy(excess, "halve the step size") for excess in (0.2, 8.0))
    assert "either about halves" in few
    assert "halve" not in many
    assert "subsample_size some 800 times as large" in many


def test_what_cannot_be_measured_is_said_in_words():
    lost = SiteBias("tau", 1, 3.0, 0.1, np.nan, np.nan, 1.0, 500.0, "biased")
    said = describe_site_bias(lost)
    assert said.startswith("Sds of `tau` are too far off to be measured and means of `tau`")
    assert "nan" not in said
    gone = SiteBias("tau", 1, -7e5, 4e5, 0.3, 0.1, 1.0, 500.0, "biased")
    assert describe_site_bias(gone).endswith("means of `tau` are more than 100 sds off.")


def test_few_dependent_draws_are_told_from_long_steps():
    kernel = SGHMCSplit(survey, step_size=0.1, num_steps=1)
    report = bias_report(run(kernel, num_samples=100, num_chains=1))
    assert "biased" in {s.diagnosis for s in report.sites}
    assert "independent ones at most) may explain it: draw more" in report.diagnosis
    assert "step" not in report.diagnosis


def test_noise_is_named_before_chance():
    """Noise that widens sds, and few draws: more draws would not cure it."""
    settings = {"gradient_estimator": "minibatch", "subsampling": "iid", "step_size": 0.3}
    report = bias_report(run(SGHMCSplit(survey, **settings), num_samples=60))
    assert report.noise_sd_inflation > 0.15
    assert "draw more" not in report.diagnosis


def test_fine_needs_error_bars_that_rule_the_rest_out():
    judged = [
        classify_bias(
            Estimate(np.array([value]), np.array([error])), np.array([0]), 2.0, 0.05, 0.15
        )
        for value, error in ((0.02, 0.01), (0.1, 0.04), (0.1, 0.02), (0.02, 0.09))
    ]
    assert judged == ["ok", "inconclusive", "biased", "inconclusive"]


def test_chains_in_different_modes_are_seen():
    """Two narrow modes, each sampled perfectly: the moments alone say that all is well."""

    def potential(q):
        return -jnp.logaddexp(-jnp.square(q - 5.0).sum() / 2, -jnp.square(q + 5.0).sum() / 2)

    kernel = SGHMCSplit(potential_fn=potential, inverse_mass_matrix=np.ones(1), step_size=0.3)
    mcmc = quietly(kernel, num_samples=1000, num_chains=4, chain_method="vectorized")
    mcmc.run(jax.random.key(0), init_params=jnp.array([[-5.0], [5.0], [-5.0], [5.0]]))
    report = bias_report(mcmc)
    assert report.is_flagged
    assert {s.diagnosis for s in report.sites} == {"not converged"}
    assert report.diagnosis.startswith("Chains disagree on `z` (R-hat up to ")
    draws = np.asarray(mcmc.get_samples(group_by_chain=True))
    np.testing.assert_allclose(report.r_hat, gelman_rubin(draws), rtol=0.05)


def test_nothing_is_flagged_where_nothing_is_wrong(good):
    report = bias_report(good)
    assert not report.is_flagged
    assert report.diagnosis.startswith(
        "Means and sds are right within the error bars: R-hat is at "
    )
    assert f"effective sample size is {report.ess.min():.0f}, and gradients at " in report.diagnosis
    assert report.summary_line.startswith("Bias: means off by at most 0.")


def test_few_draws_are_unclear_and_not_fine():
    dependent = run(SGHMCSplit(survey, num_steps=1), num_samples=30, num_chains=1)
    assert not bias_report(dependent).is_ok
    report = bias_report(run(SGHMCSplit(survey), num_samples=30, num_chains=1))
    assert not report.is_ok
    assert "inconclusive" in {s.diagnosis for s in report.sites}
    assert "too few to tell: draw more" in report.diagnosis


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
    assert html.escape(report.diagnosis) in page
    table = report.to_dataframe()
    assert list(table.index) == ["beta", "rate"]
    assert table.loc["beta", "verdict"] == "biased"
    each = report.to_dataframe(coordinates=True)
    assert list(each.index) == ["beta[0]", "beta[1]", "rate"]
    np.testing.assert_allclose(each["sd_inflation"], report.stein_estimates.sd_inflation.value)


def test_summary_ends_with_a_line_on_bias(noisy, good, capsys):
    print_summary(good)
    right = capsys.readouterr().out.splitlines()
    good.print_summary()
    assert capsys.readouterr().out.splitlines() == right[:-1]
    assert right[-1] == bias_report(good).summary_line
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
    assert found[-2:] == [rows[-1], bias_report(good).summary_line]
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
    assert group.attrs["verdict"] == report.diagnosis
    assert list(group["coordinate"].values) == ["beta[0]", "beta[1]", "rate"]


def test_plot_shows_every_coordinate(noisy):
    left, right = diagnostics.plot_bias(noisy)
    assert [t.get_text() for t in left.get_yticklabels()] == ["beta[0]", "beta[1]", "rate"]
    assert "posterior sd" in left.get_xlabel()
    shown = sorted(x for line in right.lines for x in line.get_xdata() if line.get_marker() == "o")
    expected = sorted(100 * bias_report(noisy).stein_estimates.sd_inflation.value)
    np.testing.assert_allclose(shown, expected)
    mpl.pyplot.close("all")


@pytest.mark.slow
def test_a_schedule_is_reported_on():
    kernel = SGHMCSplit(
        survey, step_size=lambda count: jnp.where(count < 5000, 0.3, 0.2), num_steps=10
    )
    assert not bias_report(run(kernel)).is_flagged
