"""Warnings about gradient noise and discretisation recommend a batch size that serves."""

import re
import warnings
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_sgmcmc import SGHMCSplit
from numpyro_sgmcmc.adaptation.batch_size import StepCost
from numpyro_sgmcmc.adaptation.gradient_noise import GradientNoiseStats
from numpyro_sgmcmc.adaptation.settings import StepSizeTrace, SubsamplingChoice
from numpyro_sgmcmc.adaptation.step_size import (
    NoiseLimit,
    PredictedMeanBias,
    StepSizeChoice,
    limit_step_size_by_mean_bias,
)
from numpyro_sgmcmc.adaptation.subsampling_choice import list_candidates
from numpyro_sgmcmc.adaptation.warnings import (
    PendingWarning,
    find_batch_size_warnings,
    find_compensation_warnings,
    find_convergence_warnings,
    find_long_draw_warnings,
    find_noise_warnings,
    issue_once,
    warn_slow_gradients,
)
from numpyro_sgmcmc.data.subsampling import ContiguousSubsampling, Plate
from numpyro_sgmcmc.dynamics import NoseHooverThermostat, UnderdampedLangevin
from numpyro_sgmcmc.dynamics.base import GradientNoiseCovariance
from numpyro_sgmcmc.errors import (
    ConvergenceWarning,
    DataOrderWarning,
    DiscretisationWarning,
    GradientNoiseWarning,
    PlateWarning,
    SGMCMCWarning,
    SubsampleSizeWarning,
)
from numpyro_sgmcmc.model.gradient_estimators import ControlVariate
from tests.adaptation.inputs import make_inputs
from tests.adaptation.large_posteriors import crossed
from tests.contract.kernels import quietly

REMEDY = r"subsample_size=(\d+) of plate 'rows'( \(the whole data\))? \((\d+) steps per draw\)"
ROW_COST, OVERHEAD = 1.4, 100  # of a control variate, and of a step in gradients of observations
STEP_COST = StepCost(OVERHEAD, ROW_COST)


def normal_mean(y, batch_size=None):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


def test_compensation_of_more_noise_than_injected_names_the_directions():
    dynamics, step_size = UnderdampedLangevin(1.5), 0.2
    fraction = dynamics.gradient_noise_fraction(step_size)
    inputs = SimpleNamespace(settings=SimpleNamespace(dynamics=dynamics))

    def find(*ratios):
        covariance = GradientNoiseCovariance(np.array(ratios) / fraction)
        return list(find_compensation_warnings(inputs, covariance, step_size))

    assert not find(0.2, 0.9)
    (warning,) = find(0.2, 1.1, 1.44)
    assert warning.category is GradientNoiseWarning
    assert "2 of 3 directions: SDs will be up to 20% too wide" in warning.message
    assert "step_size below 0.2" in warning.fix


@pytest.fixture(scope="module")
def inputs():
    return make_inputs(normal_mean, (jnp.zeros(10),), 5)


def make_choices(
    inputs,
    noise_variance,
    noise_bias=0.0,
    discretisation_bias=0.0,
    size=100_000,
    batch_size=100,
    **settings,
):
    """Return the inputs, and the choices of a warm-up that measured this noise.

    ``noise_bias`` is the bias of a mean by noise over the step size, ``discretisation_bias`` that
    by discretisation over its square. A draw takes a time of 3, as for a standard normal: 40 steps
    times the noise variance, at least 10.
    """
    inputs = replace(
        inputs,
        potential=replace(inputs.potential, plates=(Plate("rows", size, batch_size),)),
        settings=replace(inputs.settings, **settings),
    )
    noise_stats = GradientNoiseStats(noise_variance, 1.0, noise_variance)
    mean_bias = PredictedMeanBias(
        np.array([0.0, -noise_bias]), np.array([0.0, discretisation_bias]), 1.0, 1.0, 2
    )
    limit = NoiseLimit.from_settings(inputs.settings, 1.0)
    by_noise, inflation = limit.limit_step_size(noise_stats)
    choice = SubsamplingChoice(
        ControlVariate(), ContiguousSubsampling(), noise_stats, by_noise, inflation, 1.0
    )
    step_size = limit_step_size_by_mean_bias(inputs.settings, mean_bias, by_noise)
    limits = dict.fromkeys(("gradient_noise", "dynamics", "observations"), by_noise)
    limits["mean_bias"] = step_size
    trace = StepSizeTrace(limits)
    return inputs, choice, StepSizeChoice(step_size, trace, noise_stats, inflation, mean_bias)


def get_warnings(inputs, noise_variance=0.1, **kwargs):
    """Return the warnings about noise and discretisation."""
    inputs, choice, step = make_choices(inputs, noise_variance, **kwargs)
    found = find_noise_warnings(inputs, list_candidates(inputs), choice, step)
    return [PendingWarning(w.message + w.fix, *w[1:]) for w in found]


def get_batch_size_warnings(inputs, noise_variance, step_cost=STEP_COST, **kwargs):
    """Return the warnings about the batch size, however short a draw is."""
    found = find_batch_size_warnings(
        *make_choices(inputs, noise_variance, **kwargs), step_cost, 0.0
    )
    return [PendingWarning(w.message + w.fix, *w[1:]) for w in found]


def read_remedy(warning):
    """Return recommended batch size, whether it is the whole data, and steps per draw."""
    batch_size, is_whole, num_steps = re.search(REMEDY, str(warning.message)).groups()
    return int(batch_size), is_whole is not None, int(num_steps)


@pytest.mark.parametrize(
    ("noise_variance", "settings"),
    [
        (0.1, {}),
        (3.0, {}),
        (0.1, {"batch_size": 200}),
        (12.0, {"step_cost": StepCost(1.0, 1.4)}),
    ],
    ids=[
        "few steps",
        "as many times fewer steps as more rows",
        "hardly longer steps than with fewer rows",
        "long steps with more rows",
    ],
)
def test_find_batch_size_warnings_no_size_halves_the_time(inputs, noise_variance, settings):
    assert not get_batch_size_warnings(inputs, noise_variance, **settings)


def test_find_batch_size_warnings_many_steps_recommend_all_rows(inputs):
    """A draw takes 484 steps of 100 rows and a control variate, or ten of all 2,000."""
    (warning,) = get_batch_size_warnings(inputs, 12.0, size=2_000)
    assert "use NUTS, since" in warning.message
    assert warning.category is SubsampleSizeWarning
    assert "takes 484 steps" in warning.message
    assert read_remedy(warning) == (2_000, True, 10)
    costs = 484 * (OVERHEAD + 100 * ROW_COST), 10 * (OVERHEAD + 2_000)
    assert f"{costs[0] / costs[1]:.1f} times as long" in warning.message


def test_find_batch_size_warnings_many_steps_recommend_some_more_rows(inputs):
    """A step of 256 rows costs a sixth of one of 2,600, and a draw takes ten times as many."""
    step_cost = StepCost(1_000.0, ROW_COST)
    (warning,) = get_batch_size_warnings(inputs, 2.55, step_cost, batch_size=256)
    assert "takes 104 steps" in warning.message
    batch_size, is_whole, num_steps = read_remedy(warning)
    assert 1_500 <= batch_size <= 3_000
    assert not is_whole
    assert num_steps <= 20


def test_find_batch_size_warnings_needlessly_many_rows_recommend_fewer(inputs):
    """With little noise a draw takes ten steps, whether of 5,000 rows or of a sixteenth of them."""
    (warning,) = get_batch_size_warnings(inputs, 0.001, batch_size=5_000)
    assert "takes 10 steps" in warning.message
    assert read_remedy(warning) == (320, False, 10)


def test_find_batch_size_warnings_noise_prevents_fewer_rows(inputs):
    """The noise of fewer rows shortens steps as much as they are faster."""
    assert not get_batch_size_warnings(inputs, 0.25, batch_size=5_000)


def test_find_batch_size_warnings_short_draws_are_not_reported(inputs):
    choices = make_choices(inputs, 12.0, size=2_000)
    seconds = StepCost(1e-7, 1e-9)
    assert not [*find_batch_size_warnings(*choices, seconds)]
    assert [*find_batch_size_warnings(*choices, seconds, 0.0)]


def test_warn_slow_gradients_of_a_loop_predicts_minutes():
    """A scan over 1,000 times has thousands of operations, whatever the number of rows."""

    def model(y, batch_size=None):
        decay = numpyro.sample("decay", dist.Beta(2, 2))

        def scan_body(total, y):
            return decay * total + y, total

        with numpyro.plate("series", len(y), subsample_size=batch_size) as i:
            mean = jax.lax.scan(scan_body, jnp.zeros(len(i)), y[i].T)[1].T
            numpyro.sample("y", dist.Normal(mean, 1).to_event(1), obs=y[i])

    inputs = make_inputs(model, (jnp.zeros((200, 1_000)),), 20)
    with pytest.warns(SubsampleSizeWarning, match="gradients with subsample_size=20 of 'series'"):
        warn_slow_gradients(inputs, 10.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_slow_gradients(make_inputs(normal_mean, (Y,), 20), 10.0)


def test_find_noise_warnings_absurd_prediction_is_a_bound(inputs):
    (warning,) = get_warnings(inputs, 1e20, size=10**8)
    assert "SDs are predicted to be more than 1,000% too wide" in warning.message


def test_find_noise_warnings_sd_target_out_of_reach_recommends_batch_size(inputs):
    (warning,) = get_warnings(inputs, 1_000.0, size=10**8)
    assert warning.category is GradientNoiseWarning
    assert "SDs are predicted to be 73% too wide" in str(warning.message)
    batch_size, is_whole, num_steps = read_remedy(warning)
    assert not is_whole
    assert "NUTS" not in warning.message
    # Variance inflation of underdamped dynamics: V h / (2 friction).
    assert 1_000.0 * 100 / batch_size * (3.0 / num_steps) / 3.0 <= 0.05


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"inverse_mass_matrix": np.ones(2)}, "leave `inverse_mass_matrix` out"),
        ({"dynamics": UnderdampedLangevin(1e-4)}, "friction of 1.5"),
    ],
)
def test_find_noise_warnings_names_options_that_may_be_the_cause(inputs, settings, remedy):
    (warning,) = get_warnings(inputs, 1_000.0, **settings)
    assert remedy in str(warning.message)


def test_find_noise_warnings_mean_bias_recommends_batch_size(inputs):
    """Means are biased by 0.6 SD at 500 steps per draw."""
    rate = 0.6 / (3.0 / 500)
    (warning,) = get_warnings(inputs, 1.0, noise_bias=rate, size=10**9)
    assert warning.category is GradientNoiseWarning
    assert "bias posterior means by 0.6 SD" in str(warning.message)
    batch_size, _, num_steps = read_remedy(warning)
    assert rate * 3.0 / num_steps * 100 / batch_size <= 0.062


@pytest.mark.parametrize(
    ("noise_bias", "discretisation_bias", "cause"),
    [(8.0, 0.0, "gradient noise"), (0.0, 1e3, "dis")],
)
def test_find_long_draw_warnings_names_site_and_cause(noise_bias, discretisation_bias, cause):
    """Means are biased by 0.06 SD at 400 steps per draw, so that they are within the target."""

    def model(y, batch_size=None):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(mu, scale), obs=y[i])

    choices = make_choices(
        make_inputs(model, (jnp.zeros(10),), 5), 0.1, noise_bias, discretisation_bias
    )
    (warning,) = find_long_draw_warnings(*choices, 400)
    assert warning.category is SubsampleSizeWarning
    assert "takes 400 steps" in warning.message
    assert f"mean of 'scale' by {cause}" in warning.message
    assert ("subsample_size=" in warning.fix) == (noise_bias > 0.0)
    assert "NUTS" in warning.fix
    assert not [*find_long_draw_warnings(*choices, 200)]
    given = replace(choices[0], settings=replace(choices[0].settings, num_steps=400))
    assert not [*find_long_draw_warnings(given, *choices[1:], 400)]


def test_find_long_draw_warnings_other_reasons_are_not_reported(inputs):
    assert not [*find_long_draw_warnings(*make_choices(inputs, 12.0), 500)]


def test_find_noise_warnings_discretisation_shortens_steps(inputs):
    """A bias of 3 h^2 allows steps of 0.14; noise alone allows 0.3."""
    (warning,) = get_warnings(inputs, discretisation_bias=3.0)
    assert warning.category is DiscretisationWarning
    assert "0.14 instead of 0.3" in str(warning.message)
    assert "baoab" in str(warning.message)
    assert not get_warnings(inputs, discretisation_bias=3.0, dynamics=NoseHooverThermostat())
    assert not get_warnings(inputs, discretisation_bias=1.0)


def test_find_noise_warnings_discretisation_biases_means(inputs):
    (warning,) = get_warnings(inputs, discretisation_bias=3e4)
    assert warning.category is DiscretisationWarning
    assert "bias posterior means by 1.1 SD" in str(warning.message)


@pytest.mark.parametrize("settings", [{"step_size": 0.01}, {"num_steps": 500}])
def test_find_noise_warnings_user_options_are_not_reported(inputs, settings):
    assert not get_warnings(inputs, 12.0, size=10**6, batch_size=10_000, **settings)


def test_issue_once_modes_with_similar_warnings_are_reported_once():
    pending = [
        PendingWarning(f"{problem}.", GradientNoiseWarning, "a fix.", entry)
        for problem, entry in (("First", "a"), ("Second", "b"), ("Third", "a"))
    ]
    with pytest.warns(GradientNoiseWarning) as caught:
        issue_once(pending)
    assert [str(w.message).split(".")[0] for w in caught] == ["First", "Second"]


# --- In a warm-up ---------------------------------------------------------------------------------

Y = jnp.asarray(np.random.default_rng(0).standard_normal(2_000), jnp.float32)


def warm_up(y, batch_size, **options):
    """Return the adaptation and the warnings."""
    kernel = SGHMCSplit(normal_mean, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        kernel.init(jax.random.key(0), 10, None, (y,), {"batch_size": batch_size})
    return kernel.adaptation, caught


def test_warm_up_recommended_batch_size_serves():
    """Twenty of 2,000 rows are too noisy for minibatch gradients; all of them are not."""
    options = {"gradient_estimator": "minibatch", "subsampling": "iid"}
    _, (warning,) = warm_up(Y, 20, **options)
    assert "gradient_estimator='auto'" in str(warning.message)
    batch_size, _, num_steps = read_remedy(warning)
    adaptation, caught = warm_up(Y, batch_size, **options)
    assert [w.category for w in caught] == [PlateWarning]
    assert adaptation.num_steps == num_steps
    # Both recommend the same: no warning asks for all rows, and the next for fewer.
    assert all("use NUTS" in str(w.message) for w in (warning, *caught))


def test_warm_up_sorted_data_uses_shuffled_minibatches():
    adaptation, caught = warm_up(jnp.sort(Y), 20, gradient_estimator="minibatch")
    assert adaptation.subsampling.name == "shuffled"
    assert [w.category for w in caught] == [DataOrderWarning]


@pytest.mark.slow
def test_warm_up_slow_batch_size_of_crossed_effects_recommends_another():
    """With 256 rows a draw takes a hundred steps; 2,000 rows take half the time (measured).

    Chains that may start in several modes have no block-arrow matrices, with which it takes ten.
    """
    problem = crossed(users=200, films=100, num=40_000)
    kernel = SGHMCSplit(problem.model, init_in_modes=True)
    with pytest.warns(SubsampleSizeWarning) as caught:
        kernel.init(jax.random.key(0), 10, None, problem.args, {"batch_size": 256})
    batch_size, _, num_steps = read_remedy(caught[0])
    assert kernel.adaptation.num_steps > 60
    assert 1_000 <= batch_size <= 4_000
    assert num_steps <= 20
    with warnings.catch_warnings(record=True) as caught_again:
        warnings.simplefilter("always", SubsampleSizeWarning)
        kernel.init(jax.random.key(0), 10, None, problem.args, {"batch_size": batch_size})
    assert kernel.adaptation.num_steps == pytest.approx(num_steps, rel=0.5)
    assert not [w for w in caught_again if issubclass(w.category, SubsampleSizeWarning)]


# --- Large counts ---------------------------------------------------------------------------------


def poisson_regression(X, y, batch_size=None):
    b0 = numpyro.sample("b0", dist.Normal(10, 5))
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Poisson(jnp.exp(b0 + X[i] @ b)), obs=y[i])


def make_counts(rate):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((5_000, 2))
    y = rng.poisson(rate * np.exp(X @ [0.8, -0.5]))
    return jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.float32)


def fit_counts(X, y):
    """Return mode and covariance of the posterior by Newton's method in double precision."""
    D, y = np.c_[X, np.ones(len(y))].astype(float), np.asarray(y, float)
    precision, mean = np.diag([1.0, 1.0, 1 / 25]), np.array([0.0, 0.0, 10.0])
    theta = np.array([0.0, 0.0, np.log(y.mean())])
    for _ in range(30):
        mu = np.exp(D @ theta)
        hessian = (D * mu[:, None]).T @ D + precision
        theta = theta + np.linalg.solve(hessian, D.T @ (y - mu) - precision @ (theta - mean))
    return theta, np.linalg.inv(hessian)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1e4, 1e5, 1e6])
def test_run_large_counts_matches_posterior_without_warnings(rate):
    """Posteriors whose SD is a millionth of the prior's, in single precision."""
    X, y = make_counts(rate)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SGMCMCWarning)
        mcmc = quietly(SGHMCSplit(poisson_regression), num_warmup=200, num_samples=500)
        mcmc.run(jax.random.key(0), X, y, batch_size=100)
    adaptation = mcmc.sampler.adaptation
    assert adaptation.num_steps <= 30
    assert adaptation.trace.variance_inflation < 0.04  # SDs at most 2% too wide
    mean, covariance = fit_counts(X, y)
    draws = mcmc.get_samples()
    draws = np.column_stack([draws["b"], draws["b0"]]).astype(float)
    z = np.linalg.solve(np.linalg.cholesky(covariance), (draws - mean).T)
    # Some 1,500 independent draws: four standard errors, and 2% of bias.
    assert np.abs(z.mean(1)).max() < 0.12
    np.testing.assert_allclose(z.std(1), 1.0, atol=0.1)


def test_pilot_chains_far_from_converged_are_warned_of():
    assert not list(find_convergence_warnings(1.4))
    (warning,) = find_convergence_warnings(2.31)
    assert warning.category is ConvergenceWarning
    assert "R-hat 2.31" in warning.message
