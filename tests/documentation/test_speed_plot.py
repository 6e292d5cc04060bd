"""The plot of error against seconds: its numbers, and the errors of its arguments."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import pyplot
from numpyro.infer import MCMC, NUTS

from tests.contract.kernels import survey, survey_data

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from speed_plot import plot_speed

mpl.use("Agg")

RNG = np.random.default_rng(0)
REFERENCE = {"a": RNG.normal(3.0, 2.0, (2, 5_000)), "b": RNG.normal(0.0, 0.1, (2, 5_000, 2))}
MEAN = {name: x.mean((0, 1)) for name, x in REFERENCE.items()}
SD = {name: x.std((0, 1)) for name, x in REFERENCE.items()}


@pytest.fixture(autouse=True)
def close_figures():
    yield
    pyplot.close("all")


def shifted_draws(num_sds, num_draws=400):
    """Draws that are all so many SDs from the reference's mean."""
    return {
        name: np.broadcast_to(MEAN[name] + num_sds * SD[name], (3, num_draws, *MEAN[name].shape))
        for name in MEAN
    }


def line_data(ax, k=0):
    """Times and errors of the k-th run; each line is followed by the point at its end."""
    return ax.lines[2 * k].get_data()


def test_plot_speed_of_a_constant_bias_shows_it_at_all_times():
    ax = plot_speed({"biased": ((10.0, 30.0), shifted_draws(0.7))}, REFERENCE)
    times, distances = line_data(ax)
    np.testing.assert_allclose(distances, 0.7, rtol=1e-6)
    np.testing.assert_allclose([times[0], times[-1]], [10.05, 30.0])
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["biased"]


def test_plot_speed_shows_the_errors_of_the_draws_until_each_time():
    draws = {name: x[:, :300] + 0.1 for name, x in REFERENCE.items()}
    times, distances = line_data(plot_speed({"x": ((0.0, 3.0), draws)}, REFERENCE))
    for k in (1, 10, 300):
        z = [np.ravel((draws[n][:, :k].mean((0, 1)) - MEAN[n]) / SD[n]) for n in draws]
        (index,) = np.flatnonzero(np.isclose(times, k / 100))
        expected = np.sqrt(np.mean(np.concatenate(z) ** 2))
        assert distances[index] == pytest.approx(expected, rel=1e-5)


def test_plot_speed_of_sds_shows_their_relative_error():
    wide = {name: MEAN[name] + 1.5 * (x - MEAN[name]) for name, x in REFERENCE.items()}
    runs = {"wide": ((0.0, 1.0), wide), "constant": ((0.0, 1.0), shifted_draws(0.0))}
    ax = plot_speed(runs, REFERENCE, moment="sd")
    np.testing.assert_allclose(line_data(ax)[1][-1], 0.5, rtol=1e-5)
    np.testing.assert_allclose(line_data(ax, 1)[1], 1.0, rtol=1e-5)
    assert "SDs" in ax.get_ylabel()


@pytest.mark.parametrize(("moment", "variance"), [("mean", 1.0), ("sd", 0.5)])
def test_plot_speed_shades_two_standard_errors_of_the_reference(moment, variance):
    ax = plot_speed({"x": ((0.0, 1.0), shifted_draws(0.5))}, REFERENCE, moment=moment)
    (area,) = ax.patches
    edge = area.get_y() + area.get_height()
    np.testing.assert_allclose(edge, 2.0 * np.sqrt(variance / 10_000), rtol=0.1)


def test_plot_speed_takes_runs_of_numpyro_and_some_sites():
    mcmc = MCMC(NUTS(survey), num_warmup=100, num_samples=50, progress_bar=False)
    mcmc.run(jax.random.key(0), *map(jnp.asarray, survey_data()))
    draws = mcmc.get_samples(group_by_chain=True)
    reference = {"rate": np.asarray(draws["rate"]) + np.asarray(draws["rate"]).std()}
    _, axes = pyplot.subplots()
    ax = plot_speed({"NUTS": ((1.0, 2.0), mcmc)}, reference, ax=axes)
    assert ax is axes
    np.testing.assert_allclose(line_data(ax)[1][-1], 1.0, rtol=1e-4)
    ax = plot_speed({"NUTS": ((1.0, 2.0), mcmc)}, draws, sites=["beta"])
    np.testing.assert_allclose(line_data(ax)[1][-1], 0.0, atol=1e-5)
    with pytest.raises(ValueError, match="site 'beta' in 'reference'"):
        plot_speed({"NUTS": ((1.0, 2.0), mcmc)}, reference, sites=["beta"])


def test_plot_speed_leaves_out_constant_coordinates():
    reference = REFERENCE | {"c": np.ones((2, 5_000))}
    draws = shifted_draws(0.7) | {"c": np.zeros((3, 400))}
    np.testing.assert_allclose(line_data(plot_speed({"x": ((0, 1), draws)}, reference))[1], 0.7)


@pytest.mark.parametrize(
    ("runs", "match"),
    [
        ({}, "`runs`"),
        ([1], "`runs`"),
        ({"x": shifted_draws(0.0)}, "'x' must be a pair"),
        ({"x": (3.0, shifted_draws(0.0))}, "'x' must be a pair"),
        ({"x": ((2.0, 1.0), shifted_draws(0.0))}, "seconds of run 'x'"),
        ({"x": ((0.0, np.nan), shifted_draws(0.0))}, "seconds of run 'x'"),
        ({"x": ((0.0, 1.0), REFERENCE)}, "'x' is the reference"),
        ({"x": ((0.0, 1.0), {"a": np.zeros((2, 9))})}, "site 'b' in 'x'"),
        ({"x": ((0.0, 1.0), {k: np.zeros((2, 9, 7)) for k in "ab"})}, "'x' have other shapes"),
        ({"x": ((0.0, 1.0), 3)}, "`x` is a int"),
    ],
)
def test_plot_speed_of_invalid_runs_raises(runs, match):
    with pytest.raises(ValueError, match=match):
        plot_speed(runs, REFERENCE)


def test_plot_speed_of_invalid_arguments_raises():
    runs = {"x": ((0.0, 1.0), shifted_draws(0.0))}
    with pytest.raises(ValueError, match="`moment`"):
        plot_speed(runs, REFERENCE, moment="median")
    with pytest.raises(ValueError, match="`reference`"):
        plot_speed(runs, shifted_draws(0.0))
