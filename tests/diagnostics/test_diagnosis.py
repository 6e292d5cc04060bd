"""Diagnoses of sites, and the description of what is wrong, why, and how to fix it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import pytest

from numpyro_sgmcmc import SHMC, SGHMCSplit, bias_report, print_summary
from numpyro_sgmcmc.diagnostics import Diagnosis, SiteBias, plot_bias
from numpyro_sgmcmc.diagnostics.diagnosis import (
    classify_bias,
    describe_site_bias,
    diagnose_site,
    format_r_hat,
)
from numpyro_sgmcmc.diagnostics.geometry import Excursion, FunnelNeck
from numpyro_sgmcmc.diagnostics.run_data import ConvergenceStats
from numpyro_sgmcmc.diagnostics.stein_estimates import BiasEstimate, Estimate
from numpyro_sgmcmc.dynamics import UnderdampedLangevin
from numpyro_sgmcmc.errors import ModelWarning, ModelWarningKind
from tests.contract.kernels import GIVEN, quietly, survey
from tests.diagnostics.survey_runs import run

mpl.use("Agg")

# --- Diagnoses ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "error", "expected"),
    [
        (0.02, 0.01, "ok"),
        (0.1, 0.04, "inconclusive"),
        (0.1, 0.02, "biased"),
        (0.02, 0.09, "inconclusive"),
        (np.nan, np.nan, "inconclusive"),
        (0.0, np.inf, "inconclusive"),
    ],
)
def test_bias_is_classified_by_its_limits(value, error, expected):
    estimate = Estimate(np.array([value]), np.array([error]))
    diagnosis = classify_bias(estimate, 2.0, tolerance=0.05, detection_limit=0.15)
    assert diagnosis == expected


def make_site(sd_inflation=0.0, error=0.01, r_hat=1.0, ess=1000.0, reported=Diagnosis.OK, size=1):
    """Diagnose a site of which one coordinate has this SD inflation."""
    zeros = np.zeros(size)
    values = zeros.copy()
    values[0] = sd_inflation
    estimates = BiasEstimate(
        Estimate(zeros, np.full(size, error)), Estimate(values, np.full(size, error))
    )
    convergence = ConvergenceStats(np.full(size, r_hat), np.full(size, ess))
    return diagnose_site("x", np.arange(size), [estimates], convergence, reported)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "ok"),
        ({"sd_inflation": 0.3}, "biased"),
        ({"r_hat": np.nan}, "ok"),
        ({"r_hat": 1.07}, "inconclusive"),
        ({"r_hat": 1.2, "sd_inflation": 0.3}, "not converged"),
        ({"ess": 50.0}, "inconclusive"),
        ({"ess": 50.0, "sd_inflation": 0.3}, "biased"),
        ({"reported": Diagnosis.MULTIMODAL}, "multimodal"),
        ({"reported": Diagnosis.MULTIMODAL, "sd_inflation": 0.3}, "biased"),
        ({"reported": Diagnosis.INCONCLUSIVE}, "inconclusive"),
    ],
)
def test_worst_diagnosis_of_a_site_counts(changes, expected):
    assert make_site(**changes).diagnosis == expected


def test_limits_of_a_site_are_simultaneous():
    """0.05 + 2.5 errors: clear for one coordinate, not for the worst of 200."""
    assert make_site(sd_inflation=0.075).diagnosis == "biased"
    assert make_site(sd_inflation=0.075, size=200).diagnosis == "ok"
    assert make_site(sd_inflation=0.1, size=200).diagnosis == "biased"


@pytest.mark.parametrize(
    ("value", "size", "expected"),
    [(0.075, 1, "biased"), (0.075, 200, ""), (0.1, 200, "biased"), (-0.1, 200, "biased")],
)
def test_described_bias_is_beyond_the_simultaneous_limits(value, size, expected):
    """Errors are 1%: 7.5% is within 3.7 of them of the tolerance, but not within two."""
    site = make_site(sd_inflation=value, size=size)
    assert site.sd_inflation == value
    assert bool(describe_site_bias(site)) == (expected == "biased")


def test_worst_coordinate_is_that_with_the_furthest_limits():
    """Of 9% ± 1.5% and 6% ± 0.2% the second alone is clear for the worst of 200."""
    zeros = np.zeros(200)
    values, errors = zeros.copy(), np.full(200, 0.001)
    values[:2], errors[:2] = (0.09, 0.06), (0.015, 0.002)
    estimates = BiasEstimate(Estimate(zeros, errors), Estimate(values, errors))
    stats = ConvergenceStats(zeros + 1.0, zeros + 1000.0)
    site = diagnose_site("x", np.arange(200), [estimates], stats)
    assert (site.sd_inflation, site.diagnosis) == (0.06, "biased")
    assert "simultaneous 95% limits" in describe_site_bias(site)


def test_coordinate_of_an_inconclusive_site_is_that_with_the_widest_limits():
    """4% ± 0.5% is within the limit, and 1% ± 8% may be beyond it."""
    zeros = np.zeros(2)
    values, errors = np.array([0.04, 0.01]), np.array([0.005, 0.08])
    estimates = BiasEstimate(Estimate(zeros, zeros + 0.001), Estimate(values, errors))
    stats = ConvergenceStats(zeros + 1.0, zeros + 1000.0)
    site = diagnose_site("x", np.arange(2), [estimates], stats)
    assert (site.sd_inflation, site.diagnosis) == (0.01, "inconclusive")


def test_diagnosis_equals_its_string():
    assert str(Diagnosis.NOT_CONVERGED) == Diagnosis.NOT_CONVERGED == "not converged"
    assert f"{Diagnosis.OK}" == "ok"
    assert list(Diagnosis) == ["not converged", "biased", "multimodal", "inconclusive", "ok"]


def test_coordinate_without_estimate_is_the_worst(default_report):
    """It counts as infinite in the line on bias, wherever it stands."""
    estimate = default_report.bias_estimates[0]
    value = estimate.sd_inflation.value.copy()
    value[-1] = np.nan
    lost = estimate._replace(sd_inflation=Estimate(value, estimate.sd_inflation.error))
    report = replace(default_report, bias_estimates=(lost,))
    assert np.isnan(report.sites[1].sd_inflation)
    assert "nan" in report.summary_line
    assert "unknown" in str(report)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (ModelWarningKind.NON_ADDITIVE, "biased"),
        (ModelWarningKind.MULTIMODAL, "multimodal"),
        (ModelWarningKind.MODES_VISITED, "not converged"),
        (ModelWarningKind.NOT_CONVERGED, "inconclusive"),
        (ModelWarningKind.NON_IDENTIFIED, "ok"),
    ],
)
def test_model_warning_is_diagnosed_and_repeated(default_report, kind, expected):
    warning = ModelWarning(("rate",), kind, "The message.")
    report = replace(default_report, model_warnings=(warning,))
    assert {s.site: s.diagnosis for s in report.sites} == {"beta": "ok", "rate": expected}
    assert "The message." in report.diagnosis


# --- Descriptions -------------------------------------------------------------------------------


def test_noisy_run_is_described_by_site_size_cause_and_remedy(noisy_report):
    assert noisy_report.is_flagged
    assert {s.diagnosis for s in noisy_report.sites} == {"biased"}
    for part in ("SDs of `beta`", "% too wide", "Gradient noise", "subsample_size", "step_size"):
        assert part in noisy_report.diagnosis
    limits = "(± one standard error; worst of 2 coordinates by simultaneous 95% limits)"
    assert limits in noisy_report.diagnosis


# Control variates with the preconditioner of the survey's posterior.
EXACT = {
    **GIVEN,
    "gradient_estimator": "control_variate",
    "inverse_mass_matrix": np.array([1 / 400, 1 / 400, 1 / 1200]),
}


@pytest.mark.slow
def test_large_steps_are_described_as_discretisation_error():
    options = {**EXACT, "step_size": 1.4, "num_steps": 4}
    kernel = SHMC(survey, integrator="symmetric", **options)
    report = bias_report(run(kernel, num_samples=500))
    assert report.is_flagged
    assert "discretisation error" in report.diagnosis
    assert "1/4" in report.diagnosis
    assert not report.has_custom_dynamics
    assert "check_invariance" not in report.diagnosis
    assert "check_invariance" in replace(report, has_custom_dynamics=True).diagnosis


def test_dynamics_of_the_user_are_custom():
    class Own(UnderdampedLangevin):
        pass

    kernel = SGHMCSplit(potential_fn=lambda q: jnp.square(q).sum() / 2, num_steps=2, step_size=0.1)
    mcmc = quietly(kernel, num_warmup=1, num_samples=2)
    mcmc.run(np.array([0, 0], np.uint32), init_params=jnp.zeros(1))
    assert not bias_report(mcmc).has_custom_dynamics
    kernel._dynamics = Own()
    assert bias_report(mcmc).has_custom_dynamics


def with_sd_inflation(report, sd_inflation):
    """The report with SDs of all coordinates inflated, all of it by noise."""
    estimate = report.bias_estimates[0]
    values = Estimate(np.full(3, sd_inflation), np.full(3, 0.01))
    return replace(
        report,
        bias_estimates=(estimate._replace(sd_inflation=values),),
        noise_sd_inflation=sd_inflation,
    )


def test_large_noise_is_not_fixed_by_halving(noisy_report):
    """To bring nine times the SD within 5%, a variance inflation of 80 must fall to 0.1."""
    little, much = (with_sd_inflation(noisy_report, x).diagnosis for x in (0.2, 8.0))
    assert "either about halves" in little
    assert "halve" not in much
    assert "800-fold" in much


def test_noise_of_many_steps_per_draw_is_not_fixed_by_shorter_steps(noisy_report):
    few, many = (replace(noisy_report, num_steps=n) for n in (10, 400))
    diagnosis = with_sd_inflation(few, 0.35).diagnosis
    assert "8-fold; if that is all rows, use NUTS; or reduce step_size 8-fold" in diagnosis
    diagnosis = with_sd_inflation(many, 0.35).diagnosis
    assert "increase subsample_size 8-fold; or use NUTS" in diagnosis
    assert "reduce step_size" not in diagnosis


@pytest.mark.parametrize(
    ("changes", "keyword"),
    [
        ({"noise_sd_inflation": np.nan}, "not measured"),
        ({"noise_sd_inflation": 0.05}, "a part"),
        ({"noise_sd_inflation": 0.05, "max_grad_norm": 3.0}, "max_grad_norm"),
        ({"step_size": np.nan}, "each block"),
        ({"max_ess": 4.0, "noise_sd_inflation": 0.0}, "more draws"),
    ],
)
def test_cause_of_bias_is_named(noisy_report, changes, keyword):
    report = replace(with_sd_inflation(noisy_report, 0.2), **changes)
    assert keyword in report.diagnosis


@pytest.mark.parametrize(
    "kind", [ModelWarningKind.NON_ADDITIVE, ModelWarningKind.INCONSISTENT_GRADIENT]
)
def test_bias_by_the_model_is_not_fixed_by_settings(noisy_report, kind):
    report = replace(noisy_report, model_warnings=(ModelWarning((), kind, "The message."),))
    assert "The message." in report.diagnosis
    assert "halve" not in report.diagnosis


def test_site_that_cannot_be_measured_is_described_without_nan():
    lost = SiteBias("tau", 1, 3.0, 0.1, np.nan, np.nan, 1.0, 500.0, Diagnosis.BIASED)
    assert "SDs of `tau` are too far off" in describe_site_bias(lost)
    assert "nan" not in describe_site_bias(lost)
    far = SiteBias("tau", 1, -7e5, 4e5, 0.3, 0.1, 1.0, 500.0, Diagnosis.BIASED)
    assert "means of `tau` are more than 100 SDs off" in describe_site_bias(far)


def test_few_dependent_draws_are_described_as_monte_carlo_error():
    kernel = SGHMCSplit(survey, step_size=0.1, num_steps=1)
    report = bias_report(run(kernel, num_samples=100, num_chains=1))
    assert "biased" in {s.diagnosis for s in report.sites}
    assert "Monte Carlo error" in report.diagnosis
    assert "step" not in report.diagnosis


def test_noise_is_named_before_monte_carlo_error(noisy):
    """More draws would not remove the bias."""
    report = bias_report(run(noisy.sampler, num_samples=60))
    assert report.noise_sd_inflation > 0.15
    assert "more draws" not in report.diagnosis


def test_few_draws_are_inconclusive():
    independent = {**EXACT, "step_size": 0.3, "num_steps": 10}
    report = bias_report(run(SGHMCSplit(survey, **independent), num_samples=30, num_chains=1))
    assert not report.is_ok
    assert "inconclusive" in {s.diagnosis for s in report.sites}
    assert "too small for a diagnosis" in report.diagnosis


@pytest.mark.slow
def test_few_dependent_draws_are_not_ok():
    dependent = run(SGHMCSplit(survey, **EXACT), num_samples=30, num_chains=1)
    assert not bias_report(dependent).is_ok


def test_run_without_bias_is_ok_and_says_on_which_grounds(default_report):
    report = default_report
    assert report.is_ok
    assert not report.is_flagged
    for ground in (
        "R-hat is at most 1.0",
        f"ESS is {report.ess.min():.0f}",
        f"gradients at {report.num_gradient_draws} draws",
        "mode",
    ):
        assert ground in report.diagnosis
    assert f"gradients at {report.num_gradient_draws} draws" in str(report)


@pytest.mark.parametrize(
    ("funnel_neck", "keywords"),
    [
        (FunnelNeck(2, "low", 0.04), ("do not reach small", "4%", "LocScaleReparam(0)")),
        (FunnelNeck(2, "low", 0.02), ("may not reach small", "2%", "LocScaleReparam(0)")),
        (FunnelNeck(2, "high", 0.04), ("do not reach large", " centred", "smaller step_size")),
        (FunnelNeck(2, "low", 0.2, True), ("step_size is too large", "smaller step_size")),
    ],
)
def test_funnel_neck_is_described_by_its_side(default_report, funnel_neck, keywords):
    report = replace(default_report, funnel_necks=(funnel_neck,))
    for keyword in ("`rate`", *keywords):
        assert keyword in report.diagnosis
    expected = "biased" if funnel_neck.is_significant else "inconclusive"
    assert {s.site: s.diagnosis for s in report.sites}["rate"] == expected
    assert ("LocScaleReparam" in report.diagnosis) == ("LocScaleReparam(0)" in keywords)


def test_draws_outside_of_the_posterior_bias_their_site_only(default_report):
    heavy = np.array([0, 2])
    excursions = Excursion(2, 80.4), Excursion(1, 3.0)
    report = replace(default_report, heavy_tailed_coordinates=heavy, excursions=excursions[:1])
    assert {s.site: s.diagnosis for s in report.sites} == {"beta": "ok", "rate": "biased"}
    assert "Some draws of `rate` are far outside of the posterior" in report.diagnosis
    assert "e^-80 times" in report.diagnosis
    assert report.diagnosis.endswith("Fix: a larger subsample_size, or a smaller step_size.")
    assert "Heavy tails, for which SDs are not meaningful: beta[0]." in str(report)
    assert "of `rate`, `beta[1]` are" in replace(report, excursions=excursions).diagnosis


def test_bias_of_sites_with_draws_outside_of_the_posterior_has_one_fix(noisy_report):
    report = replace(noisy_report, excursions=(Excursion(2, 80.4),))
    assert "SDs of `rate` are" in noisy_report.diagnosis
    assert "SDs of `rate` are" not in report.diagnosis
    assert "SDs of `beta` are" in report.diagnosis


@pytest.mark.parametrize("problem", ["r_hat", "divergences"])
def test_chains_that_do_not_converge_have_the_fix_for_that(default_report, problem):
    report = replace(default_report, excursions=(Excursion(2, np.inf),))
    assert "larger subsample_size" in report.diagnosis
    assert "the farthest draw of `rate` is zero." in report.diagnosis
    if problem == "r_hat":
        convergence = ConvergenceStats(np.full(3, 1.5), np.full(3, 500.0))
        report = replace(report, convergence=convergence)
        assert {s.diagnosis for s in report.sites} == {"not converged"}
    else:
        report = replace(report, num_divergences=1000)
    assert "outside of the posterior" in report.diagnosis
    assert "larger subsample_size" not in report.diagnosis


@pytest.mark.parametrize("r_hat", [1.0, 1.5])
def test_step_that_is_far_too_long_has_one_fix(noisy_report, r_hat):
    """Neither a longer run, nor more draws, nor larger minibatches."""
    convergence = ConvergenceStats(np.full(3, r_hat), np.array([50.0, 500.0, 500.0]))
    funnel_necks = FunnelNeck(0, "low", 0.2, True), FunnelNeck(2, "high", 0.2, True)
    report = replace(noisy_report, funnel_necks=funnel_necks, convergence=convergence)
    assert "small values of `beta[0]`, large values of `rate`" in report.diagnosis
    assert report.diagnosis.count("Fix:") == 1
    assert report.diagnosis.endswith("Fix: a smaller step_size.")


def test_chains_with_divergences_that_disagree_need_no_longer_run(noisy_report):
    convergence = ConvergenceStats(np.full(3, 1.5), np.full(3, 500.0))
    report = replace(noisy_report, num_divergences=1000, convergence=convergence)
    assert "Fix: a smaller step_size." in report.diagnosis
    assert "longer run" not in report.diagnosis


@pytest.mark.parametrize(
    ("r_hat", "expected"),
    [(1.004, "1.00"), (99.0, "99.00"), (7.9e20, ">100"), (np.inf, ">100"), (np.nan, "-")],
)
def test_r_hat_is_printed_with_an_upper_bound(r_hat, expected):
    assert format_r_hat(r_hat) == expected


# --- Summary and plot ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (ModelWarningKind.INCONSISTENT_GRADIENT, "gradient misses"),
        (ModelWarningKind.NON_ADDITIVE, "not additive"),
    ],
)
def test_summary_line_says_that_the_estimate_is_invalid(default_report, kind, reason):
    warning = ModelWarning((), kind, "The message.")
    line = replace(default_report, model_warnings=(warning,)).summary_line
    assert line.startswith("Bias (invalid estimate: ")
    assert reason in line
    harmless = ModelWarning((), ModelWarningKind.NOT_CONVERGED, "The message.")
    report = replace(default_report, model_warnings=(harmless,))
    assert report.summary_line == default_report.summary_line


def test_summary_ends_with_a_line_on_bias(noisy, noisy_report, default, default_report, capsys):
    print_summary(default)
    lines = capsys.readouterr().out.splitlines()
    default.print_summary()
    assert capsys.readouterr().out.splitlines() == lines[:-1]
    assert lines[-1] == default_report.summary_line
    assert lines[-1].startswith("Bias: means off by at most 0.")
    num_coordinates = len(default_report.coordinate_names)
    assert lines[-1].endswith(f"% (worst of {num_coordinates})")
    print_summary(noisy)
    lines = capsys.readouterr().out.splitlines()
    assert "Gradient noise explains it" in " ".join(lines[lines.index(noisy_report.summary_line) :])
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("sites", "exclude_deterministic", "shown"),
    [
        (["rate"], True, ["rate"]),
        ("contrast", True, ["contrast"]),
        (["~beta"], True, ["rate"]),
        (["~beta"], False, ["contrast", "rate"]),
    ],
)
def test_summary_shows_the_sites_asked_for(
    default, default_report, capsys, sites, exclude_deterministic, shown
):
    default.print_summary(exclude_deterministic=False)
    full = capsys.readouterr().out.splitlines()
    print_summary(default, exclude_deterministic=exclude_deterministic, sites=sites)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:-3]] == shown
    assert {" ".join(x.split()) for x in lines[2:-3]} <= {" ".join(x.split()) for x in full}
    assert lines[-2:] == [full[-1], default_report.summary_line]
    assert len(lines) == len(shown) + 5


@pytest.mark.parametrize("sites", [["foo"], ["~foo"], ["beta", "~rate"], [], 3, [3]])
def test_summary_of_unknown_sites_raises(default, sites):
    with pytest.raises(ValueError, match="`sites`"):
        print_summary(default, sites=sites)


@pytest.mark.parametrize("sites", [None, ["x"]])
def test_summary_of_three_draws_raises(sites):
    kernel = SGHMCSplit(potential_fn=lambda q: jnp.square(q["x"]).sum() / 2, step_size=0.1)
    mcmc = quietly(kernel, num_warmup=1, num_samples=3)
    mcmc.run(jax.random.key(0), init_params={"x": jnp.zeros(2)})
    with pytest.raises(ValueError, match=r"`print_summary`.*4 draws.*are 3\.") as info:
        print_summary(mcmc, sites=sites)
    assert "num_samples" in str(info.value)


def test_plot_shows_every_coordinate(noisy_report):
    left, right = plot_bias(noisy_report)
    assert [t.get_text() for t in left.get_yticklabels()] == ["beta[0]", "beta[1]", "rate"]
    for axes, values in (
        (left, noisy_report.mean_bias.value),
        (right, 100 * noisy_report.sd_inflation.value),
    ):
        points = [line for line in axes.lines if line.get_marker() == "o"]
        shown = sorted(x for line in points for x in line.get_xdata())
        np.testing.assert_allclose(shown, sorted(values))
    mpl.pyplot.close("all")
