"""The plot of a bias report; that of a warm-up is in test_warmup_report.py."""

from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.colors import to_hex

from numpyro_sgmcmc import bias_report
from numpyro_sgmcmc.diagnostics import plot_bias
from numpyro_sgmcmc.diagnostics.stein_estimates import BiasEstimate, Estimate

mpl.use("Agg")


@pytest.fixture(autouse=True)
def close_figures():
    yield
    pyplot.close("all")


def points(ax):
    """Values and colors of the points, by their height."""
    lines = [line for line in ax.lines if line.get_marker() == "o"]
    data = [(y, x, to_hex(line.get_color())) for line in lines for x, y in line.get_xydata()]
    return [(x, color) for _, x, color in sorted(data)]


def test_plot_bias_marks_what_the_report_calls_biased(noisy):
    """Two coordinates of `beta` share limits of 2.24 standard errors, `rate` has 1.96."""
    zero = Estimate(np.zeros(3), np.full(3, 0.01))
    first = BiasEstimate(Estimate(np.array([0.0, 0.31, 0.31]), np.full(3, 0.1)), zero)
    second = BiasEstimate(Estimate(np.array([0.9, 0.0, 0.0]), np.full(3, 0.1)), zero)
    report = replace(bias_report(noisy), bias_estimates=(first, second))
    left, right = plot_bias(report)
    blue, red = "#4c78a8", "#d62728"
    assert points(left) == [(0.9, red), (0.31, blue), (0.31, red)]
    assert {color for _, color in points(right)} == {blue}
    assert [t.get_text() for t in left.get_yticklabels()] == ["beta[0]", "beta[1]", "rate"]


def test_plot_bias_of_many_coordinates_labels_sites(noisy):
    report = bias_report(noisy)
    names = (*(("beta", f"beta[{k}]") for k in range(50)), ("rate", "rate"))
    estimate = BiasEstimate(*(Estimate(np.zeros(51), np.full(51, 0.1)) for _ in range(2)))
    left, _ = plot_bias(replace(report, coordinate_names=names, bias_estimates=(estimate,)))
    assert [t.get_text() for t in left.get_yticklabels()] == ["beta", "rate"]
    np.testing.assert_array_equal(left.get_yticks(), [24.5, 50])


def test_plot_bias_on_given_axes_returns_them(noisy):
    axes = pyplot.subplots(1, 2)[1]
    assert plot_bias(bias_report(noisy), axes=axes) is axes
    with pytest.raises(ValueError, match=r"`axes`.*2"):
        plot_bias(bias_report(noisy), axes=[1, 2])
