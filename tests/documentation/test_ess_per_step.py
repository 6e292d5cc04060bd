"""The exact effective sample size per step, to which a benchmark compares runs."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

from numpyro_sgmcmc.dynamics import UnderdampedLangevin

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
benchmark = importlib.import_module("ess_per_step")


@pytest.mark.parametrize(("friction", "num_steps"), [(1.5, 10), (0.3, 10), (4.0, 20)])
def test_exact_ess_per_step_is_that_of_simulated_draws(friction, num_steps):
    dynamics = UnderdampedLangevin(friction)
    exact = benchmark.exact_ess_per_step(dynamics, 0.3, num_steps)
    draws = benchmark.simulate_exact(dynamics, 0.3 * num_steps, (4, 4_000, 20))
    estimates = benchmark.ess_per_step(draws, num_steps)
    # Estimates are a few per cent too low.
    assert np.median(estimates) == pytest.approx(exact, rel=0.06)


def test_ess_of_all_steps_is_a_time_over_the_integral_of_the_autocorrelation():
    for friction in (0.5, 1.5, 4.0):
        exact = benchmark.exact_ess_per_step(UnderdampedLangevin(friction), 0.01, 1)
        assert exact == pytest.approx(0.01 / (2.0 * friction), rel=1e-3)
