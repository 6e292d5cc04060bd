"""The step size and the number of steps that the warm-up chooses."""

import numpy as np
import pytest

from numpyro_sgmcmc.adaptation.gradient_noise import NO_NOISE, GradientNoiseStats
from numpyro_sgmcmc.adaptation.step_size import (
    MAX_NUM_STEPS,
    choose_num_steps,
    limit_step_size_by_noise,
)
from numpyro_sgmcmc.dynamics import NoseHooverThermostat, OverdampedLangevin, UnderdampedLangevin

DYNAMICS = [OverdampedLangevin(), UnderdampedLangevin(1.5), UnderdampedLangevin(0.2)]


@pytest.mark.parametrize("dynamics", DYNAMICS, ids=repr)
def test_largest_step_where_nothing_stands_against_it(dynamics):
    for curvature in (0.1, 1.0):
        assert limit_step_size_by_noise(dynamics, 0.2, NO_NOISE, curvature, 0.05) == (0.2, 0.0)


@pytest.mark.parametrize(
    ("dynamics", "power"), [(OverdampedLangevin(), 1), (UnderdampedLangevin(1.5), 0.5)], ids=repr
)
def test_stiff_directions_shorten_the_step(dynamics, power):
    at = {c: limit_step_size_by_noise(dynamics, 0.2, NO_NOISE, c, 0.05)[0] for c in (50.0, 5000.0)}
    assert at[50.0] < 0.2
    assert at[50.0] / at[5000.0] == pytest.approx(100**power)


def noise_of(variance):
    return GradientNoiseStats(variance, 1.0, variance)


@pytest.mark.parametrize("dynamics", DYNAMICS, ids=repr)
@pytest.mark.parametrize("target_sd_bias", [0.02, 0.05, 0.2])
@pytest.mark.parametrize("variance", [0.01, 1.0, 10.0])
def test_noise_shortens_the_step_until_its_share_of_the_bias_is_kept(
    dynamics, target_sd_bias, variance
):
    step_size, inflation = limit_step_size_by_noise(
        dynamics, 0.2, noise_of(variance), 1.0, target_sd_bias
    )
    assert 0 < step_size <= 0.2
    assert inflation == pytest.approx(dynamics.variance_inflation(variance, step_size))
    shortest = dynamics.relaxation_time(step_size) / MAX_NUM_STEPS
    assert np.sqrt(1 + inflation) - 1 < target_sd_bias or step_size == pytest.approx(shortest)
    assert choose_num_steps(dynamics.relaxation_time(step_size), step_size) <= MAX_NUM_STEPS


@pytest.mark.parametrize("dynamics", DYNAMICS, ids=repr)
def test_step_is_not_shorter_than_a_draw_can_pay_for(dynamics):
    step_size, inflation = limit_step_size_by_noise(dynamics, 0.2, noise_of(1e6), 1.0, 0.05)
    assert choose_num_steps(dynamics.relaxation_time(step_size), step_size) == MAX_NUM_STEPS
    assert inflation > 1


def test_thermostats_take_longer_steps_the_less_the_noise_varies():
    steps = [
        limit_step_size_by_noise(
            NoseHooverThermostat(1.5), 0.3, GradientNoiseStats(10.0, v, 10.0), 1.0, 0.05
        )[0]
        for v in (1.0, 0.3, 0.1, 0.0)
    ]
    assert (np.diff(steps) > 0).all()
    assert steps[0] == pytest.approx(
        limit_step_size_by_noise(NoseHooverThermostat(1.5, False), 0.3, noise_of(10.0), 1.0, 0.05)[
            0
        ],
        rel=0.1,
    )


@pytest.mark.parametrize(("spread", "varying"), [(0.0, 0.0), (0.3, 0.3), (3.0, 1.0)])
def test_share_of_noise_that_varies(spread, varying):
    """Not what variances measured on few numbers differ by of themselves: a quarter here."""
    rng = np.random.default_rng(0)
    size = 2.0 * np.exp(spread * rng.standard_normal((400, 1)) - spread**2 / 2)
    numbers = np.sqrt(size)[..., None] * rng.standard_normal((400, 5, 32))
    found = GradientNoiseStats.from_variances(
        numbers.var(-1, ddof=1), 32, use_noisiest_coordinate=True
    )
    assert found.position_dependent_fraction == pytest.approx(varying, abs=0.07)
    if spread < 1:
        assert found.mean_variance == pytest.approx(2.0, rel=0.1)
        assert 1.0 <= found.variance / found.mean_variance < 1.1


def test_less_noise_is_never_a_shorter_step():
    steps = [
        limit_step_size_by_noise(UnderdampedLangevin(1.5), 0.3, noise_of(v), 1.0, 0.05)[0]
        for v in np.geomspace(1e-3, 1e5, 50)
    ]
    assert (np.diff(steps) <= 0).all()


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
def test_choose_num_steps(time, step_size, num_steps):
    assert choose_num_steps(time, step_size) == num_steps
