"""Where the moments are read: the steps' own gradients where they may be, apart where they must."""

import pytest

from numpyro_sgmcmc.warmup.reading import READING_APART, Reading, choose_reading, own_reading

NOISY = {"plain": 400.0, "control_variate": 2.0}


def test_own_gradients_are_read_at_every_step_unless_vectors_are_long():
    assert own_reading(20, 7) == Reading(1)
    assert own_reading(10**5, 10) == Reading(5)
    assert own_reading(10**5, 7) == Reading(1)


@pytest.mark.parametrize("num_steps", [1, 3, 13, 30, 500])
def test_dependent_minibatches_are_read_apart(num_steps):
    found = choose_reading(NOISY, "plain", False, num_steps)
    assert found.estimator == "control_variate"
    assert num_steps % found.every == 0
    assert found.every >= min(READING_APART, num_steps)


def test_noise_is_read_apart_only_where_that_is_clearly_sharper():
    assert choose_reading(NOISY, "plain", True, 500) is not None
    assert choose_reading({"plain": 20.0, "control_variate": 2.0}, "plain", True, 500) is None
    assert choose_reading({"plain": 400.0}, "plain", True, 500) is None
