"""Draws outside of the posterior are found, and those of heavy tails are not."""

from __future__ import annotations

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC

from numpyro_sgmcmc import SGHMCSplit, bias_report
from numpyro_sgmcmc.diagnostics.excursions import find_excursions
from numpyro_sgmcmc.diagnostics.geometry import find_outlying_draws
from numpyro_sgmcmc.diagnostics.run_data import RunData

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
    return RunData.from_mcmc(mcmc, "test"), y.sum() / (1 + NUM_ROWS)


@pytest.fixture
def exact_draws(finished):
    """Independent draws of the posterior, of one chain."""
    rng = np.random.default_rng(1)
    mean = finished[1] + POSTERIOR_SD * rng.standard_normal(2_000)
    return np.stack([mean, rng.standard_cauchy(2_000)], -1)[None]


def test_far_draws_of_a_posterior_with_heavy_tails_are_not_outside(finished, exact_draws):
    (far,) = find_outlying_draws(exact_draws[0], 4)
    assert far.coordinate == 1
    assert abs(exact_draws[0, far.draw, 1]) > 100
    assert find_excursions(finished[0], exact_draws) == ()


@pytest.mark.parametrize(("distance", "is_outside"), [(7.3, False), (9, True), (-40, True)])
def test_draw_outside_is_found_by_its_density(finished, exact_draws, distance, is_outside):
    run, mean = finished
    exact_draws[0, 7, 0] = mean + distance * POSTERIOR_SD
    found = find_excursions(run, exact_draws)
    assert [x.coordinate for x in found] == ([0, 1] if is_outside else [])
    if is_outside:
        of_median = (np.median(exact_draws[0, :, 0]) - mean) / POSTERIOR_SD
        increase = 0.5 * (distance**2 - of_median**2)
        assert found[0].potential_increase == pytest.approx(increase, rel=1e-3)


def test_draws_without_finite_density_are_outside(finished, exact_draws):
    exact_draws[0, 7, 0] = 1e30
    assert find_excursions(finished[0], exact_draws)[0].potential_increase == np.inf


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_scale_per_group_with_small_minibatches_is_reported():
    """Rows of small groups have large gradients where the scale of their group is small."""
    rng = np.random.default_rng(43)
    num_groups, num_rows = 400, 16_000
    share = np.exp(0.9 * rng.normal(size=num_groups))
    group = rng.choice(num_groups, num_rows, p=share / share.sum())
    x = rng.normal(size=num_rows).astype(np.float32)
    intercept = 1 + 0.5 * rng.normal(size=num_groups)
    log_sd = -0.7 + 0.5 * rng.normal(size=num_groups)
    y = intercept[group] + 0.3 * x + np.exp(log_sd[group]) * rng.normal(size=num_rows)

    def location_scale(x, group, y, batch_size=None):
        means = [numpyro.sample(name, dist.Normal(0, 1)) for name in ("mean", "mean_log_sd")]
        scales = [numpyro.sample(name, dist.HalfNormal(1)) for name in ("scale", "scale_log_sd")]
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        with numpyro.plate("groups", num_groups):
            a, log_sd = (
                numpyro.sample(name, dist.Normal(m, s))
                for name, m, s in zip(("a", "log_sd"), means, scales, strict=True)
            )
        with numpyro.plate("rows", num_rows, subsample_size=batch_size) as i:
            g = group[i]
            noise = jax.numpy.exp(log_sd[g])
            numpyro.sample("y", dist.Normal(a[g] + slope * x[i], noise), obs=y[i])

    mcmc = MCMC(
        SGHMCSplit(location_scale),
        num_warmup=300,
        num_samples=1000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(1), x, group, y.astype(np.float32), batch_size=1000)
    report = bias_report(mcmc)
    assert {s.site: s.diagnosis for s in report.sites}["log_sd"] == "biased"
    assert "outside of the posterior" in report.diagnosis
    assert "larger subsample_size" in report.diagnosis
