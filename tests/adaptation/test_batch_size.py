"""Draws with minibatches of other sizes are predicted from the noise at one size."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_sgmcmc import SGHMCSplit
from numpyro_sgmcmc.adaptation.batch_size import (
    DrawPrediction,
    StepCost,
    choose_batch_size,
    estimate_step_cost,
    predict_draws,
    scale_batch_sizes,
)
from numpyro_sgmcmc.adaptation.gradient_noise import GradientNoiseStats
from numpyro_sgmcmc.adaptation.settings import StepSizeTrace, SubsamplingChoice
from numpyro_sgmcmc.adaptation.step_size import PredictedMeanBias
from numpyro_sgmcmc.data.subsampling import ContiguousSubsampling, IIDSubsampling, Plate
from numpyro_sgmcmc.jaxpr import Work, count_work
from numpyro_sgmcmc.model.gradient_estimators import ControlVariate
from numpyro_sgmcmc.sampling.options import build_warmup_settings
from tests.adaptation.inputs import make_inputs

Y = jnp.asarray(np.random.default_rng(0).standard_normal(4_000), jnp.float32)


def normal_mean(y, batch_size=None):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


def shared_scale(y, batch_size=None):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    sd = numpyro.sample("sd", dist.HalfNormal(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(mu, sd), obs=y[i])


@pytest.fixture(scope="module")
def settings():
    return make_inputs(normal_mean, (Y,), 100).settings


def predict(settings, noise_variance, plate, factors, mean_bias=None, **choice_fields):
    """Return draws with other batch sizes, where this noise was measured with the plate's."""
    noise_stats = GradientNoiseStats(noise_variance, 1.0, noise_variance)
    choice = SubsamplingChoice(
        ControlVariate(), ContiguousSubsampling(), noise_stats, 0.3, 0.0, 1.0
    )
    return predict_draws(
        settings,
        (plate,),
        replace(choice, **choice_fields),
        StepSizeTrace({"integrator": 0.3}),
        mean_bias or PredictedMeanBias(),
        factors,
    )


def test_predict_draws_steps_are_inversely_proportional_to_the_batch_size(settings):
    """A draw takes 40 steps times the noise variance, at least ten and at most 500."""
    draws = predict(settings, 2.0, Plate("rows", 10**9, 1_000), [0.25, 0.5, 1.0, 2.0, 4.0, 1e3])
    assert [d.batch_sizes["rows"] for d in draws] == [250, 500, 1_000, 2_000, 4_000, 10**6]
    steps = np.array([d.num_steps for d in draws])
    np.testing.assert_allclose(steps[:5], 80.0 / np.array([0.25, 0.5, 1.0, 2.0, 4.0]), rtol=0.1)
    assert steps[5] == 10
    assert all(d.is_within_target for d in draws)


def test_predict_draws_too_small_minibatches_bias(settings):
    small, given = predict(settings, 10.0, Plate("rows", 10**6, 1_000), [1 / 16, 1.0])
    assert small.num_steps == 500
    assert not small.is_within_target
    assert given.is_within_target


def test_predict_draws_without_replacement_noise_vanishes_with_all_rows(settings):
    plate = Plate("rows", 1_000, 500)
    nearly_all, all_rows = predict(settings, 2.0, plate, [1.8, 2.0])
    # (1/900 - 1/1000) / (1/500 - 1/1000) of the noise, and no control variate with all rows.
    assert nearly_all.num_steps == 10
    assert nearly_all.num_rows == 900
    assert all_rows.num_rows == pytest.approx(1_000 / ControlVariate.relative_cost)
    iid, _ = predict(settings, 2.0, plate, [1.8, 2.0], subsampling=IIDSubsampling())
    assert iid.num_steps == pytest.approx(80 / 1.8, rel=0.05)


def test_predict_draws_included_rows_add_no_noise(settings):
    """Of 100 rows 50 are in every minibatch: 150 rows have three times as many random ones."""
    plate = Plate("rows", 10**9, 100, included_rows=tuple(range(50)))
    (draw,) = predict(settings, 3.0, plate, [1.5])
    assert draw.num_steps == pytest.approx(120 / 2, rel=0.06)


def test_predict_draws_bias_of_means_is_proportional_to_the_noise(settings):
    """Means allow 60 steps, and four times as many rows a quarter of them."""
    mean_bias = PredictedMeanBias(np.array([settings.max_mean_bias / (3.0 / 60)]))
    plate = Plate("rows", 10**9, 1_000)
    given, larger = predict(settings, 0.01, plate, [1.0, 4.0], mean_bias)
    assert given.num_steps == pytest.approx(60, rel=0.06)
    assert larger.num_steps == pytest.approx(15, abs=1)


def test_predict_draws_user_settings_are_kept(settings):
    settings = replace(settings, step_size=0.01, num_steps=7)
    (draw,) = predict(settings, 2.0, Plate("rows", 10**6, 1_000), [4.0])
    assert draw.num_steps == 7
    assert draw.steps_per_effective_draw == pytest.approx(300, rel=0.1)


def test_step_cost_fit_recovers_a_line():
    rows = [16, 1_000, 20_000]
    fitted = StepCost.fit(rows, [2e-6 + 3e-8 * n for n in rows])
    np.testing.assert_allclose(fitted, (2e-6, 3e-8), rtol=1e-6)
    assert StepCost.fit([100, 1_000], [1e-6, 2e-5]).per_step == 0.0
    falling = StepCost.fit([100, 1_000], [3e-6, 2e-6])
    assert falling.per_row == 0.0
    assert 2e-6 < falling.per_step < 3e-6
    assert math.isclose(StepCost.fit([50], [1e-5]).per_row * 50, 1e-5, rel_tol=0.5)


@pytest.mark.parametrize(
    ("fn", "work"),
    [
        (lambda x: x @ x.T, Work(2, 3 * 4 + 3 * 3 * 4)),  # a transposition and a product
        (lambda x: jax.jit(jnp.exp)(x).sum(), Work(2, 5 * 12 + 12)),
        (lambda x: jax.lax.scan(lambda c, v: (c + v, v), jnp.zeros(4), x), Work(3, 3 * 4)),
        (
            # Values that a scatter adds count 20 times, beside the three indices.
            lambda x: jax.ops.segment_sum(x, jnp.arange(3), 3, mode="promise_in_bounds"),
            Work(2, 3 + 20 * 12),
        ),
    ],
    ids=["product", "reduction", "scan", "scatter"],
)
def test_count_work_of_known_functions(fn, work):
    assert count_work(jax.make_jaxpr(fn)(jnp.zeros((3, 4))).jaxpr) == work


def test_estimate_step_cost_is_linear_in_rows():
    """Operations make the constant part, with the estimator's cost; values of rows the other."""
    costs = []
    for batch_size in (100, 800):
        inputs = make_inputs(shared_scale, (Y,), batch_size)
        choice = SubsamplingChoice(
            ControlVariate(), ContiguousSubsampling(), GradientNoiseStats(1.0, 1.0, 1.0), 0.3, 0, 1
        )
        costs.append(estimate_step_cost(inputs.potential, inputs.arguments, choice))
    np.testing.assert_allclose(*costs, rtol=1e-6)
    assert 5e-6 < costs[0].per_step < 2e-5
    assert 3e-9 < costs[0].per_row < 3e-8


def test_choose_batch_size_takes_the_largest_of_the_fastest():
    def draw(size, num_steps, is_within_target=True):
        return DrawPrediction({"rows": size}, size, num_steps, num_steps, is_within_target)

    cost = StepCost(100.0, 1.0)
    draws = [draw(50, 60), draw(100, 31), draw(200, 20), draw(400, 15)]
    assert choose_batch_size(draws, cost) == draws[2]
    draws = [draw(50, 20, False), draw(100, 18, False)]
    assert choose_batch_size(draws, cost) == draws[1]
    assert choose_batch_size([*draws, draw(10**6, 10)], cost).batch_sizes == {"rows": 10**6}


def test_scale_batch_sizes_are_round_and_at_most_all_rows():
    plates = Plate("a", 1_000, 257), Plate("b", 10**6, 257)
    assert scale_batch_sizes(plates, 1.0) == {"a": 257, "b": 257}
    assert scale_batch_sizes(plates, 10.0) == {"a": 1_000, "b": 2_600}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::numpyro_sgmcmc.errors.GradientNoiseWarning")
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (normal_mean, {"gradient_estimator": "minibatch", "subsampling": "iid"}),
        (normal_mean, {"gradient_estimator": "minibatch", "subsampling": "shuffled"}),
        (shared_scale, {}),
    ],
    ids=["minibatch gradient, iid", "minibatch gradient, shuffled", "control variates"],
)
def test_predict_draws_agree_with_the_warm_up_at_other_sizes(model, options):
    """Steps per draw are those of warm-ups at the size.

    A warm-up measures the variance of noise with 64 minibatches, to 18%.
    """

    def warm_up(batch_size):
        kernel = SGHMCSplit(model, **options)
        kernel.init(jax.random.key(0), 0, None, (Y,), {"batch_size": batch_size})
        return kernel

    kernel = warm_up(200)
    trace, potential = kernel.adaptation.trace, kernel.potential
    settings = build_warmup_settings(kernel.options, potential, kernel.dynamics, kernel.integrator)
    small, given, large = predict_draws(
        settings,
        potential.plates,
        trace.choice,
        trace.step_size_limits,
        trace.predicted_mean_bias,
        [1 / 5, 1.0, 4.0],
    )
    assert given.num_steps == kernel.adaptation.num_steps
    for draw in (small, large):
        num_steps = warm_up(draw.batch_sizes["rows"]).adaptation.num_steps
        assert draw.num_steps == pytest.approx(num_steps, rel=0.5, abs=1)
