"""The picture of error against seconds: its numbers, and what it refuses."""

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import pyplot
from numpyro.infer import MCMC, NUTS

from numpyro_sgmcmc.diagnostics import plot_speed
from tests.contract.kernels import survey, survey_data

mpl.use("Agg")

RNG = np.random.default_rng(0)
REFERENCE = {"a": RNG.normal(3.0, 2.0, (2, 5_000)), "b": RNG.normal(0.0, 0.1, (2, 5_000, 2))}
MEAN = {name: x.mean((0, 1)) for name, x in REFERENCE.items()}
SD = {name: x.std((0, 1)) for name, x in REFERENCE.items()}


@pytest.fixture(autouse=True)
def closed():
    yield
    pyplot.close("all")


def shifted(by, num=400):
    """Draws that are all so many sds from the reference's mean."""
    return {name: np.broadcast_to(MEAN[name] + by * SD[name],
                                  (3, num, *np.shape(MEAN[name]))) for name in MEAN}  # fmt: skip


def line(ax, k=0):
    """Times and errors of the k-th run; behind each line stands the point at its end."""
    return ax.lines[2 * k].get_data()


def test_a_bias_is_shown_as_it_is_at_all_times():
    ax = plot_speed({"off": ((10.0, 30.0), shifted(0.7))}, REFERENCE)
    times, errors = line(ax)
    np.testing.assert_allclose(errors, 0.7, rtol=1e-6)
    np.testing.assert_allclose([times[0], times[-1]], [10.05, 30.0])
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["off"]


def test_errors_are_those_of_the_draws_up_to_then():
    draws = {name: x[:, :300] + 0.1 for name, x in REFERENCE.items()}
    times, errors = line(plot_speed({"x": ((0.0, 3.0), draws)}, REFERENCE))
    for k in (1, 10, 300):
        z = np.concatenate([np.ravel((draws[n][:, :k].mean((0, 1)) - MEAN[n]) / SD[n])
                            for n in draws])  # fmt: skip
        here = np.flatnonzero(np.isclose(times, k / 100))
        np.testing.assert_allclose(errors[here], np.sqrt(np.mean(z**2)), rtol=1e-5)
        assert here.size == 1


def test_widths():
    wide = {name: MEAN[name] + 1.5 * (x - MEAN[name]) for name, x in REFERENCE.items()}
    runs = {"wide": ((0.0, 1.0), wide), "one value": ((0.0, 1.0), shifted(0.0))}
    ax = plot_speed(runs, REFERENCE, moment="sd")
    np.testing.assert_allclose(line(ax)[1][-1], 0.5, rtol=1e-5)
    np.testing.assert_allclose(line(ax, 1)[1], 1.0, rtol=1e-5)
    assert "sds" in ax.get_ylabel()


@pytest.mark.parametrize(("moment", "variance"), [("mean", 1.0), ("sd", 0.5)])
def test_the_grey_area_ends_at_two_standard_errors_of_the_reference(moment, variance):
    ax = plot_speed({"x": ((0.0, 1.0), shifted(0.5))}, REFERENCE, moment=moment)
    (area,) = ax.patches
    edge = area.get_y() + area.get_height()
    np.testing.assert_allclose(edge, 2.0 * np.sqrt(variance / 10_000), rtol=0.1)


def test_runs_of_numpyro_and_sites():
    mcmc = MCMC(NUTS(survey), num_warmup=100, num_samples=50, progress_bar=False)
    mcmc.run(jax.random.key(0), *map(jnp.asarray, survey_data()))
    draws = mcmc.get_samples(group_by_chain=True)
    reference = {"rate": np.asarray(draws["rate"]) + np.asarray(draws["rate"]).std()}
    _, axes = pyplot.subplots()
    ax = plot_speed({"NUTS": ((1.0, 2.0), mcmc)}, reference, ax=axes)
    assert ax is axes
    np.testing.assert_allclose(line(ax)[1][-1], 1.0, rtol=1e-4)
    ax = plot_speed({"NUTS": ((1.0, 2.0), mcmc)}, draws, sites=["beta"])
    np.testing.assert_allclose(line(ax)[1][-1], 0.0, atol=1e-5)
    with pytest.raises(ValueError, match="no draws of site 'beta' in 'reference'"):
        plot_speed({"NUTS": ((1.0, 2.0), mcmc)}, reference, sites=["beta"])


def test_what_never_varies_is_left_out():
    reference = REFERENCE | {"c": np.ones((2, 5_000))}
    draws = shifted(0.7) | {"c": np.zeros((3, 400))}
    np.testing.assert_allclose(line(plot_speed({"x": ((0, 1), draws)}, reference))[1], 0.7)


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ({}, "must be a dict"),
        ([1], "must be a dict"),
        ({"x": shifted(0.0)}, "'x' must be a pair"),
        ({"x": (3.0, shifted(0.0))}, "'x' must be a pair"),
        ({"x": ((2.0, 1.0), shifted(0.0))}, "seconds of run 'x' are 2 and 1"),
        ({"x": ((0.0, np.nan), shifted(0.0))}, "seconds of run 'x' are 0 and nan"),
        ({"x": ((0.0, 1.0), REFERENCE)}, "is the reference itself"),
        ({"x": ((0.0, 1.0), {"a": np.zeros((2, 9))})}, "no draws of site 'b' in 'x'"),
        ({"x": ((0.0, 1.0), {k: np.zeros((2, 9, 7)) for k in "ab"})}, "other shapes"),
        ({"x": ((0.0, 1.0), 3)}, "`x` is a int"),
    ],
)
def test_refusals(runs, message):
    with pytest.raises(ValueError, match=message):
        plot_speed(runs, REFERENCE)


def test_further_refusals():
    runs = {"x": ((0.0, 1.0), shifted(0.0))}
    with pytest.raises(ValueError, match="`moment`"):
        plot_speed(runs, REFERENCE, moment="median")
    with pytest.raises(ValueError, match="must be matplotlib axes"):
        plot_speed(runs, REFERENCE, ax=3)
    with pytest.raises(ValueError, match="are the same"):
        plot_speed(runs, shifted(0.0))
