"""Bias of functions of the draws: told where it is known exactly."""

import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.infer import Predictive

from numpyro_sgmcmc import bias_report
from numpyro_sgmcmc.diagnostics import bias_corrected_samples, function_bias
from numpyro_sgmcmc.diagnostics.function_bias import estimate_function_bias
from numpyro_sgmcmc.diagnostics.predictive import DrawFunctions
from numpyro_sgmcmc.diagnostics.run_data import GradientsAtDraws
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from tests.data.host_rows import NUM_ROWS, X, Y, by_index, fit

RNG = np.random.default_rng(0)
SDS = np.array([1.0, 0.2, 5.0])
ROWS = RNG.standard_normal((7, 3)).astype(np.float32)


def linear(draw, rows):
    return rows @ draw["q"]


def square(draw):
    return (draw["q"] ** 2).sum()


def cube(draw):
    return (draw["q"] ** 3)[0]


def told_of(fn, rows, wider, away):
    """Draws of a Gaussian that is wider than the posterior by some factors, and away from it."""
    q = away + wider * SDS * RNG.standard_normal((4, 4_000, 3))
    at = GradientsAtDraws.from_arrays(q, q / SDS**2)
    draws = {"q": jnp.asarray(q, jnp.float32)}
    white = Preconditioner(np.zeros(3), SDS).cast(jnp.float32)
    return estimate_function_bias(
        DrawFunctions.from_fn(fn, rows), draws, at, white, lambda x: {"q": x}
    )


@pytest.mark.parametrize("wider", [1.0, np.array([1.0, 1.3, 0.8])], ids=["right", "unlike"])
def test_linear_functions_of_gaussians(wider):
    away = np.array([0.1, 0.0, -0.5])
    found = told_of(linear, (ROWS,), wider, away)
    sd = np.sqrt(np.square(ROWS) @ SDS**2)
    expected = np.sqrt(np.square(ROWS) @ np.square(wider * SDS)) / sd - 1.0
    assert [name for name, _ in found.names] == ["linear"] * 7
    assert found.names[3] == ("linear", "linear[3]")
    for estimate, true in ((found.inflation, expected), (found.shift, ROWS @ away / sd)):
        assert estimate.error.max() < 0.03
        assert np.abs((estimate.value - true) / estimate.error).max() < 4.0


@pytest.mark.parametrize("temperature", [1.0, 1.5])
@pytest.mark.parametrize("fn", [square, cube])
def test_other_functions_of_draws_that_are_too_hot(fn, temperature):
    """For which Laplacians matter: of the square for the mean, of the cube for the sd as well."""
    found = told_of(fn, (), np.sqrt(temperature), 0.0)
    error = found.inflation.error.item()
    assert error < 0.06
    told = np.sqrt(temperature if fn is square else (5.0 * temperature - 2.0) / 3.0) - 1.0
    assert abs(found.inflation.value.item() - told) < 4.0 * error
    # In units of the sd by that temperature.
    unit = np.sqrt(2.0 * (SDS**4).sum()) * temperature / np.sqrt(temperature)
    told = (temperature - 1.0) * (SDS**2).sum() / unit if fn is square else 0.0
    assert found.shift.error.item() < 0.1
    assert abs(found.shift.value.item() - told) < 4.0 * found.shift.error.item()


def hot_where_narrow():
    """Draws of a Gaussian that data on 40 rows hold tight, in units of its prior, hot along the
    narrow directions as noise makes them; the truth for each row.
    """
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((40, 6)) * np.array([3.0, 2.0, 1.0, 0.3, 0.1, 0.03])
    curvature, axes = np.linalg.eigh(np.eye(6) + 30.0 * rows.T @ rows)
    heat = 1.0 + 0.8 * curvature / curvature.max()
    white = rng.standard_normal((4, 1_000, 6))
    draws = white * np.sqrt(heat / curvature) @ axes.T
    gradients = white * np.sqrt(heat * curvature) @ axes.T
    reach = np.square(rows @ axes) / curvature
    return rows.astype(np.float32), draws, gradients, np.sqrt((reach @ heat) / reach.sum(1)) - 1.0


@pytest.mark.parametrize("is_planted", [False, True], ids=["right", "planted"])
def test_what_is_hot_where_a_posterior_is_narrow_counts_as_little_as_it_does(
    is_planted, monkeypatch
):
    """With the gradient as field the sds are said to be 24 % too wide in the mean; 10 % is true."""
    if is_planted:
        monkeypatch.setattr(function_bias, "_MIN_CURVATURE_RATIO", np.inf)
    rows, q, gradients, true = hot_where_narrow()
    white = Preconditioner(np.zeros(6), np.ones(6)).cast(jnp.float32)
    at, draws = GradientsAtDraws.from_arrays(q, gradients), {"q": jnp.asarray(q, jnp.float32)}
    found = estimate_function_bias(
        DrawFunctions.from_fn(linear, (rows,)), draws, at, white, lambda x: {"q": x}
    ).sd_inflation
    off = found.value - true
    apart = np.sqrt(np.square(off).mean())
    assert 0.05 < true.mean() < 0.12
    if is_planted:
        assert off.mean() > 0.1
        assert apart > 0.1
        return
    assert found.error.max() < 0.02
    assert abs(off.mean()) < 0.04
    assert apart < 0.06


@pytest.fixture(scope="module")
def run():
    """Steps so long, with plain gradients, that noise widens all."""
    options = {"gradient_estimator": "minibatch", "subsampling": "iid", "step_size": 0.3}
    options["inverse_mass_matrix"] = np.full(2, 1.0 / NUM_ROWS)
    return fit(X, Y, by_index, num_samples=500, options=options)


def prediction(draw, X):
    return X @ draw["beta"]


def test_a_report_on_predictions(run):
    true = np.asarray(prediction({"beta": run.get_samples()["beta"].T}, X[:5])).std(1)
    true /= np.linalg.norm(X[:5], axis=1) / np.sqrt(NUM_ROWS)
    for full_data in (False, True):
        report = bias_report(run, prediction, X[:5], full_data=full_data)
        told = report.stein_estimates.sd_inflation
        assert (np.abs(told.value + 1.0 - true) < 4.0 * told.error + 0.1 * true).all()
        (site,) = report.sites
        assert (site.site, site.size, site.diagnosis) == ("prediction", 5, "biased")
        assert "Worst values of each function" in str(report)
        assert "Sds of `prediction` are up to" in report.diagnosis


def test_what_cannot_be_told_is_refused(run):
    with pytest.raises(ValueError, match=r"returns type bool as 'sign'"):
        bias_report(run, lambda draw: {"sign": draw["beta"] > 0})
    with pytest.raises(ValueError, match=r"`fn` is a Predictive"):
        bias_report(run, Predictive(by_index, run.get_samples()))
    with pytest.raises(ValueError, match=r"rows only after a function"):
        bias_report(run, None, X)
    with pytest.raises(ValueError, match=r"on functions of the draws"):
        bias_corrected_samples(run, report=bias_report(run, prediction, X[:2]))
    with pytest.raises(ValueError, match=r"not finite"):
        bias_report(run, lambda draw: jnp.log(draw["beta"]))
