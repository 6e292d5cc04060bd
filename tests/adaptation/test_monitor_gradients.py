"""Gradients from which the bias is estimated: those of the steps, or on separate minibatches."""

from types import SimpleNamespace

import pytest

from numpyro_sgmcmc.adaptation.gradient_noise import GradientNoiseStats
from numpyro_sgmcmc.adaptation.settings import MonitorGradients, SubsamplingChoice
from numpyro_sgmcmc.adaptation.step_size import MAX_NUM_STEPS, MONITOR_INTERVAL, choose_num_steps
from numpyro_sgmcmc.adaptation.subsampling_choice import (
    NoiseMeasurement,
    choose_monitor_gradients,
    choose_separate_gradients,
    choose_step_gradients,
)
from numpyro_sgmcmc.data.subsampling import ContiguousSubsampling
from numpyro_sgmcmc.dynamics import UnderdampedLangevin
from numpyro_sgmcmc.model.gradient_estimators import GRADIENT_ESTIMATORS

MINIBATCH = GRADIENT_ESTIMATORS["minibatch"]
CONTROL_VARIATE = GRADIENT_ESTIMATORS["control_variate"]
NOISE_VARIANCES = {MINIBATCH: 400.0, CONTROL_VARIATE: 2.0}


@pytest.mark.parametrize(
    ("dim", "num_steps", "interval"), [(20, 7, 1), (10**5, 10, 5), (10**5, 7, 1)]
)
def test_choose_step_gradients_long_vectors_have_a_longer_interval(dim, num_steps, interval):
    assert choose_step_gradients(dim, num_steps) == MonitorGradients(interval)


@pytest.mark.parametrize("num_steps", [1, 3, 13, 30, 500])
def test_choose_separate_gradients_dependent_minibatches_are_separate(num_steps):
    gradients = choose_separate_gradients(NOISE_VARIANCES, MINIBATCH, False, num_steps)
    assert gradients.estimator == CONTROL_VARIATE
    assert num_steps % gradients.interval == 0
    assert gradients.interval >= min(MONITOR_INTERVAL, num_steps)


def test_chosen_numbers_of_steps_have_many_gradients():
    """A prime number would have a single one."""
    for time in range(2 * MONITOR_INTERVAL, MAX_NUM_STEPS + 1):
        num_steps = choose_num_steps(time, 1.0)
        assert time <= num_steps <= 1.04 * time
        gradients = choose_separate_gradients(NOISE_VARIANCES, MINIBATCH, False, num_steps)
        assert gradients.interval <= 1.5 * MONITOR_INTERVAL


@pytest.mark.parametrize(
    ("noise_variances", "is_separate"),
    [
        (NOISE_VARIANCES, True),
        ({MINIBATCH: 20.0, CONTROL_VARIATE: 2.0}, False),
        ({MINIBATCH: 400.0}, False),
    ],
)
def test_choose_separate_gradients_independent_minibatches_need_a_lower_variance(
    noise_variances, is_separate
):
    gradients = choose_separate_gradients(noise_variances, MINIBATCH, True, 500)
    assert (gradients is not None) == is_separate


@pytest.mark.parametrize(("mean_bias", "is_separate"), [(0.05, False), (0.5, True)])
def test_choose_monitor_gradients_biased_means_need_separate_minibatches(mean_bias, is_separate):
    """Noise that moves means, however little variance it adds, depends on the position."""
    stats = {CONTROL_VARIATE: GradientNoiseStats(0.1, 0.5, 0.1)}
    settings = SimpleNamespace(dynamics=UnderdampedLangevin(1.5), max_mean_bias=0.1)
    potential = SimpleNamespace(dim=2, is_stochastic=False)
    gradients = choose_monitor_gradients(
        SimpleNamespace(settings=settings, potential=potential),
        None,
        SubsamplingChoice(
            CONTROL_VARIATE, ContiguousSubsampling(), stats[CONTROL_VARIATE], 0.006, 0.0, 1.0
        ),
        NoiseMeasurement(stats, stats, 1.0),
        0.006,
        500,
        mean_bias,
    )
    assert (gradients.estimator is not None) == is_separate
