"""The step size and the number of steps that the warm-up chooses."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_sgmcmc.adaptation import adapt
from numpyro_sgmcmc.adaptation.gradient_noise import NO_NOISE, GradientNoiseStats
from numpyro_sgmcmc.adaptation.settings import StepSizeTrace
from numpyro_sgmcmc.adaptation.step_size import (
    MAX_NUM_STEPS,
    NoiseLimit,
    PredictedMeanBias,
    choose_num_steps,
)
from numpyro_sgmcmc.dynamics import NoseHooverThermostat, OverdampedLangevin, UnderdampedLangevin
from tests.adaptation.inputs import make_inputs

DYNAMICS = [OverdampedLangevin(), UnderdampedLangevin(1.5), UnderdampedLangevin(0.2)]


def noise_of(variance):
    return GradientNoiseStats(variance, 1.0, variance)


# --- Limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamics", DYNAMICS, ids=repr)
@pytest.mark.parametrize("curvature", [0.1, 1.0])
def test_limit_by_noise_without_noise_is_the_integrators_step(dynamics, curvature):
    assert NoiseLimit(dynamics, 0.2, curvature, 0.05).limit_step_size(NO_NOISE) == (0.2, 0.0)


@pytest.mark.parametrize(
    ("dynamics", "power"), [(OverdampedLangevin(), 1), (UnderdampedLangevin(1.5), 0.5)], ids=repr
)
def test_limit_by_noise_large_curvature_shortens_the_step(dynamics, power):
    at = {
        c: NoiseLimit(dynamics, 0.2, c, 0.05).limit_step_size(NO_NOISE)[0] for c in (50.0, 5000.0)
    }
    assert at[50.0] < 0.2
    assert at[50.0] / at[5000.0] == pytest.approx(100**power)


@pytest.mark.parametrize("dynamics", DYNAMICS, ids=repr)
@pytest.mark.parametrize("target_sd_bias", [0.02, 0.05, 0.2])
@pytest.mark.parametrize("variance", [0.01, 1.0, 10.0])
def test_limit_by_noise_keeps_within_the_target(dynamics, target_sd_bias, variance):
    step_size, inflation = NoiseLimit(dynamics, 0.2, 1.0, target_sd_bias).limit_step_size(
        noise_of(variance)
    )
    assert 0 < step_size <= 0.2
    assert inflation == pytest.approx(dynamics.variance_inflation(variance, step_size))
    min_step_size = dynamics.relaxation_time(step_size) / MAX_NUM_STEPS
    assert inflation <= target_sd_bias / 2 or step_size == pytest.approx(min_step_size)
    assert choose_num_steps(dynamics.relaxation_time(step_size), step_size) <= MAX_NUM_STEPS


@pytest.mark.parametrize("dynamics", DYNAMICS, ids=repr)
def test_limit_by_noise_ends_at_500_steps_per_draw(dynamics):
    step_size, inflation = NoiseLimit(dynamics, 0.2, 1.0, 0.05).limit_step_size(noise_of(1e6))
    assert choose_num_steps(dynamics.relaxation_time(step_size), step_size) == MAX_NUM_STEPS
    assert inflation > 1


def test_limit_by_noise_thermostat_steps_grow_as_noise_depends_less_on_the_position():
    steps = [
        NoiseLimit(NoseHooverThermostat(1.5), 0.3, 1.0, 0.05).limit_step_size(
            GradientNoiseStats(10.0, v, 10.0)
        )[0]
        for v in (1.0, 0.3, 0.1, 0.0)
    ]
    assert (np.diff(steps) > 0).all()
    scalar = NoseHooverThermostat(1.5, False)
    of_scalar = NoiseLimit(scalar, 0.3, 1.0, 0.05).limit_step_size(noise_of(10.0))[0]
    assert steps[0] == pytest.approx(of_scalar, rel=0.1)


def test_limit_by_noise_is_monotone_in_the_noise():
    steps = [
        NoiseLimit(UnderdampedLangevin(1.5), 0.3, 1.0, 0.05).limit_step_size(noise_of(v))[0]
        for v in np.geomspace(1e-3, 1e5, 50)
    ]
    assert (np.diff(steps) <= 0).all()


def test_predicted_mean_bias_limits_the_step_size():
    """Noise biases the first mean, discretisation the second, and both the third, oppositely."""
    bias = PredictedMeanBias(np.array([1.0, 0.0, 1.0]), np.array([0.0, -50.0, -20.0]), 1.0, 1.0, 2)
    assert bias.compute_max(0.1) == pytest.approx(0.5)
    assert bias.compute_max(0.04) == pytest.approx(0.08)
    assert bias.by_noise.compute_max(0.04) == pytest.approx(0.04)
    assert bias.by_discretisation.compute_max(0.04) == pytest.approx(0.08)
    assert bias.compute_max(0.04, batch_size_factor=10.0) == pytest.approx(0.08)
    assert bias.by_noise.compute_max(0.04, batch_size_factor=10.0) == pytest.approx(0.004)
    limit = bias.limit_step_size(0.3, 0.001, 0.06)
    assert limit == pytest.approx(np.sqrt(0.06 / 50), rel=0.04)
    assert bias.limit_step_size(0.3, 0.1, 0.06) == 0.1
    assert bias.limit_step_size(0.02, 0.001, 0.06) == 0.02


@pytest.mark.parametrize(("sd_of_log", "fraction"), [(0.0, 0.0), (0.3, 0.3), (3.0, 1.0)])
def test_noise_stats_position_dependence_excludes_sampling_error(sd_of_log, fraction):
    """Variances measured on 32 numbers differ by a quarter by chance."""
    rng = np.random.default_rng(0)
    variances = 2.0 * np.exp(sd_of_log * rng.standard_normal((400, 1)) - sd_of_log**2 / 2)
    gradients = np.sqrt(variances)[..., None] * rng.standard_normal((400, 5, 32))
    stats = GradientNoiseStats.from_variances(
        gradients.var(-1, ddof=1), 32, use_noisiest_coordinate=True
    )
    assert stats.position_dependent_fraction == pytest.approx(fraction, abs=0.07)
    if sd_of_log < 1:
        assert stats.mean_variance == pytest.approx(2.0, rel=0.1)
        assert 1.0 <= stats.variance / stats.mean_variance < 1.1


@pytest.mark.parametrize(
    ("time", "step_size", "num_steps"),
    [
        (3.0, 0.3, 10),
        (3.0, 0.29, 11),
        (2.0, 5.0, 1),
        (2.0, 1e-9, MAX_NUM_STEPS),
        (2.0, np.float32(0.1), 20),
    ],
)
def test_choose_num_steps_covers_the_relaxation_time(time, step_size, num_steps):
    assert choose_num_steps(time, step_size) == num_steps


# --- The trace ------------------------------------------------------------------------------------


def test_trace_binding_limits_reduce_the_step_by_a_percent():
    names = ("integrator", "stability", "gradient_noise", "dynamics", "mean_bias")
    step_sizes = (0.3, 0.3, 0.1, 0.0995, 0.05)
    trace = StepSizeTrace(dict(zip(names, step_sizes, strict=True)))
    assert trace.binding == {"gradient_noise": 0.1, "mean_bias": 0.05}
    assert trace.step_size == 0.05


def normal_mean(y, batch_size=None):
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(mu, 1).to_event(1), obs=y[i])


Y = jnp.asarray(np.random.default_rng(0).standard_normal((600, 3)), jnp.float32)


def warm_up(**options):
    """Return the adaptation of a normal mean, whose gradients are linear in the position."""
    inputs = make_inputs(normal_mean, (Y,), 60, **options)
    init_positions = [np.zeros(3, np.float32), np.ones(3, np.float32)]
    return adapt(inputs.potential, inputs.arguments, inputs.settings, init_positions)


@pytest.mark.parametrize(
    ("options", "binding"),
    [
        ({}, []),
        ({"gradient_estimator": "minibatch", "subsampling": "iid"}, ["gradient_noise"]),
        ({"friction": 12.0}, ["dynamics"]),
    ],
    ids=["normal posterior", "minibatch gradient", "large friction"],
)
def test_warm_up_trace_names_what_limits_the_step(options, binding):
    adaptation = warm_up(**options)
    trace = adaptation.trace.step_size_limits
    assert list(trace.binding) == binding
    step_sizes = list(trace.limits.values())
    assert step_sizes == sorted(step_sizes, reverse=True)
    assert trace.step_size == pytest.approx(float(adaptation.step_size), rel=1e-6)


def test_warm_up_user_step_size_is_the_only_limit():
    trace = warm_up(step_size=0.1).trace.step_size_limits
    assert trace.limits == {"user": 0.1}
    assert not trace.binding
