"""Where the moments are read: the steps' own gradients where they may be, apart where they must."""

import pytest

from numpyro_sgmcmc.adaptation.settings import MonitorGradients
from numpyro_sgmcmc.adaptation.subsampling_choice import (
    MONITOR_INTERVAL,
    choose_separate_gradients,
    choose_step_gradients,
)
from numpyro_sgmcmc.model.gradient_estimators import GRADIENT_ESTIMATORS

PLAIN, CONTROL_VARIATE = GRADIENT_ESTIMATORS["minibatch"], GRADIENT_ESTIMATORS["control_variate"]

NOISY = {PLAIN: 400.0, CONTROL_VARIATE: 2.0}


def test_own_gradients_are_read_at_every_step_unless_vectors_are_long():
    assert choose_step_gradients(20, 7) == MonitorGradients(1)
    assert choose_step_gradients(10**5, 10) == MonitorGradients(5)
    assert choose_step_gradients(10**5, 7) == MonitorGradients(1)


@pytest.mark.parametrize("num_steps", [1, 3, 13, 30, 500])
def test_dependent_minibatches_are_read_apart(num_steps):
    found = choose_separate_gradients(NOISY, PLAIN, False, num_steps)
    assert found.estimator == CONTROL_VARIATE
    assert num_steps % found.interval == 0
    assert found.interval >= min(MONITOR_INTERVAL, num_steps)


def test_noise_is_read_apart_only_where_that_is_clearly_sharper():
    assert choose_separate_gradients(NOISY, PLAIN, True, 500) is not None
    assert choose_separate_gradients({PLAIN: 20.0, CONTROL_VARIATE: 2.0}, PLAIN, True, 500) is None
    assert choose_separate_gradients({PLAIN: 400.0}, PLAIN, True, 500) is None
