"""Draws outside of the posterior are found, and those of heavy tails are not."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC

from numpyro_sgmcmc import SGHMCSplit, bias_report
from numpyro_sgmcmc.diagnostics import excursions
from numpyro_sgmcmc.diagnostics.excursions import find_excursions
from numpyro_sgmcmc.diagnostics.geometry import Excursion, find_outlying_draws
from numpyro_sgmcmc.diagnostics.run_data import RunData

# The function of this name hides the module.
reports = sys.modules[bias_report.__module__]
NUM_ROWS = 400
# Of the mean given the rows, with a prior of variance one.
POSTERIOR_SD = (1 + NUM_ROWS) ** -0.5


def model(y, batch_size=None):
    """A mean with a normal posterior, and a variable that the data do not determine."""
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    numpyro.sample("wide", dist.Cauchy(0, 1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(mean, 1), obs=y[i])


@pytest.fixture(scope="module")
def finished():
    y = np.random.default_rng(0).standard_normal(NUM_ROWS).astype(np.float32)
    fixed = {"step_size": 0.003, "adapt_mass_matrix": False, "gradient_estimator": "minibatch"}
    mcmc = MCMC(SGHMCSplit(model, **fixed), num_warmup=5, num_samples=5, progress_bar=False)
    mcmc.run(jax.random.key(0), y, batch_size=100)
    return RunData.from_mcmc(mcmc, "test"), y.sum() / (1 + NUM_ROWS), mcmc


@pytest.fixture
def exact_draws(finished):
    """Independent draws of the posterior, of one chain."""
    rng = np.random.default_rng(1)
    mean = finished[1] + POSTERIOR_SD * rng.standard_normal(2_000)
    return np.stack([mean, rng.standard_cauchy(2_000)], -1)[None]


def test_far_draws_of_a_posterior_with_heavy_tails_are_not_outside(finished, exact_draws):
    outlying = find_outlying_draws(exact_draws[0], 4)
    assert {x.coordinate for x in outlying} == {1}
    assert sorted(np.sign(exact_draws[0, [x.draw for x in outlying], 1])) == [-1, 1]
    assert find_excursions(finished[0], exact_draws) == ()


@pytest.mark.parametrize(("distance", "is_outside"), [(7.4, False), (9, True), (-40, True)])
def test_draw_outside_is_found_by_its_density(finished, exact_draws, distance, is_outside):
    run, mean, _ = finished
    exact_draws[0, 7, 0] = mean + distance * POSTERIOR_SD
    assert 0 in {x.coordinate for x in find_outlying_draws(exact_draws[0], 4)}
    found = find_excursions(run, exact_draws)
    assert [x.coordinate for x in found] == [0] * is_outside
    if is_outside:
        of_median = (np.median(exact_draws[0, :, 0]) - mean) / POSTERIOR_SD
        increase = 0.5 * (distance**2 - of_median**2)
        assert found[0].potential_increase == pytest.approx(increase, rel=1e-3)


@pytest.mark.parametrize(("draw", "expected"), [(20, [0, 1]), (200, [0])])
def test_coordinates_that_are_outlying_at_the_same_draws_are_included(
    finished, exact_draws, draw, expected
):
    run, mean, _ = finished
    exact_draws[0, 7, 0] = mean + 40 * POSTERIOR_SD
    exact_draws[0, draw, 1] = 1e4  # likely by itself
    assert [x.coordinate for x in find_excursions(run, exact_draws)] == expected


def test_draws_without_finite_density_are_outside(finished, exact_draws):
    exact_draws[0, 7, 0] = 1e30
    (found,) = find_excursions(finished[0], exact_draws)
    assert found == (0, np.inf)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_density_that_is_not_finite_at_the_median_shows_nothing(
    finished, exact_draws, monkeypatch, value
):
    exact_draws[0, 7, 0] = 1.0

    def evaluate(self, position):
        return 0.0 if position[0] == 1.0 else value

    monkeypatch.setattr(excursions.JittedPotential, "value", evaluate)
    assert find_excursions(finished[0], exact_draws) == ()


@pytest.mark.parametrize("reason", ["modes", "random", "disk"])
def test_runs_without_a_common_density_are_not_examined(finished, exact_draws, reason):
    run, mean, _ = finished
    exact_draws[0, 7, 0] = mean + 40 * POSTERIOR_SD
    is_random, arrays = reason == "random", ("X",) if reason == "disk" else ()
    potential = SimpleNamespace(is_stochastic=is_random, plates=run.kernel.potential.plates)
    replaced = SimpleNamespace(
        kernel=SimpleNamespace(potential=potential),
        arguments=SimpleNamespace(host_arrays=arrays),
        center_offsets=np.full(2, float(reason == "modes")),
    )
    assert find_excursions(replaced, exact_draws) == ()


def test_report_has_the_draws_outside(finished, monkeypatch):
    found = (Excursion(0, 80.0),)
    monkeypatch.setattr(reports, "find_excursions", lambda run, draws: found)
    assert bias_report(finished[2]).excursions == found
