"""Minibatches in palindromic order where their bias is known exactly."""

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "papers"))
import paulin2025

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize("order", paulin2025.ORDERS)
def test_bias_on_equal_hessians_is_that_of_constant_noise(order):
    """The mean over all permutations agrees with the covariance of the noise."""
    slopes = np.array([1.0, 2.0, -4.0, 0.5, 0.5])
    slopes *= np.sqrt(5 / np.square(slopes).mean())
    by_map = paulin2025.variance_bias(order, "ubu", 0.3, np.ones(5), slopes)
    assert by_map == pytest.approx(paulin2025.variance_bias_of_a_mean(order, "ubu", 0.3, 5))


@pytest.mark.parametrize(
    ("order", "expected"), [("independent", 1), ("shuffled", 3), ("palindrome", 4)]
)
def test_order_of_the_bias_over_short_epochs(order, expected):
    """Of 100 minibatches, where the discretisation error is small beside the noise's."""
    long, short = (paulin2025.variance_bias_of_a_mean(order, "ubu", h, 100) for h in (4e-3, 2e-3))
    assert np.log2(long / short) == pytest.approx(expected, abs=0.3)


@pytest.mark.parametrize("order", ["shuffled", "palindrome"])
def test_bias_on_different_hessians_has_order_two(order):
    """In steps so short that the discretisation error is larger than the noise's."""
    long, short = (paulin2025.variance_bias_of_a_slope(order, "ubu", h, 4) for h in (8e-3, 4e-3))
    assert np.log2(long / short) == pytest.approx(2, abs=0.2)
