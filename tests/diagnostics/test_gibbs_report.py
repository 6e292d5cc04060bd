"""The report on runs of Gibbs: all blocks together, whichever of them is wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import NUTS, DiscreteGibbs, Gibbs

from numpyro_sgmcmc import SGHMCSplit, bias_report, print_summary
from tests.contract.kernels import quietly
from tests.contract.test_gibbs import BATCH, counts, switching
from tests.quick import quick_if

RIGHT = {"step_size": 0.25, "num_steps": 10}
NOISY = {
    "step_size": 0.12,
    "num_steps": 25,
    "gradient_estimator": "minibatch",
    "subsampling": "iid",
}
LONG = {"step_size": 1.8, "num_steps": 3}


def regression(X, Z, y, batch_size=None):
    a = numpyro.sample("a", dist.Normal(0, 10).expand([2]).to_event(1))
    b = numpyro.sample("b", dist.Normal(0, 10).expand([2]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(X[i] @ a + Z[i] @ b, 1), obs=y[i])


def regression_data(rho, rows=1000):
    """Columns whose coefficients have posterior correlation rho across the blocks."""
    rng = np.random.default_rng(0)
    X, Z = rng.standard_normal((2, rows, 2))
    Z = -rho * X + np.sqrt(1 - rho**2) * Z
    y = X.sum(1) - Z.sum(1) + rng.standard_normal(rows)
    return tuple(x.astype(np.float32) for x in (X, Z, y))


def regression_posterior(X, Z, y):
    columns = np.concatenate([X, Z], 1).astype(np.float64)
    covariance = np.linalg.inv(columns.T @ columns + np.eye(4) / 100)
    return covariance @ columns.T @ y, np.sqrt(np.diagonal(covariance))


def in_turn(first, second, rho=0.5, **settings):
    """A run with a kernel for each site, and its true shifts and inflations."""
    data = regression_data(rho)
    gibbs = Gibbs([(first, ["a"]), (second, ["b"])])
    settings = {"num_warmup": 100, "num_samples": 1000, "num_chains": 4} | settings
    mcmc = quietly(gibbs, chain_method=jax.vmap, **settings)
    mcmc.run(jax.random.key(0), *data, batch_size=50)
    mean, sd = regression_posterior(*data)
    draws = mcmc.get_samples()
    q = np.concatenate([draws["a"], draws["b"]], -1).astype(np.float64)
    return mcmc, (q.mean(0) - mean) / sd, q.std(0) / sd - 1


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*step_size", "ignore:The minibatch gradient is so noisy"),
    pytest.mark.filterwarnings("ignore:Some donated buffers were not usable"),
]


@pytest.mark.parametrize(
    ("first", "second", "verdicts"),
    [
        quick_if(True, RIGHT, RIGHT, ("ok", "ok"), id="right"),
        quick_if(True, NOISY, RIGHT, ("biased", None), id="noise"),
        quick_if(False, RIGHT, NOISY, (None, "biased"), id="noise in the second"),
        quick_if(False, LONG, LONG, ("biased", "biased"), id="long steps"),
    ],
)
def test_bias_of_blocks_that_follow_each_other(first, second, verdicts):
    kernels = (SGHMCSplit(regression, **settings) for settings in (first, second))
    mcmc, shift, inflation = in_turn(*kernels)
    report = bias_report(mcmc, num_draws=4000)  # all of them: no chance in the comparison
    found = report.stein_estimates
    np.testing.assert_allclose(found.sd_inflation.value, inflation, atol=0.03)
    np.testing.assert_allclose(found.mean_bias.value, shift, atol=0.03)
    assert [site.site for site in report.sites] == ["a", "b"]
    for site, verdict in zip(report.sites, verdicts, strict=True):
        assert site.diagnosis == verdict or verdict is None
    assert report.num_draws == 4000
    assert report.num_divergences == 0


@pytest.mark.slow
def test_an_exact_block_is_wrong_where_it_follows_one_that_is():
    """NUTS given sites that are too wide is too wide itself, and the report says so."""
    gibbs = SGHMCSplit(regression, **NOISY), NUTS(SGHMCSplit(regression).model)
    mcmc, _, inflation = in_turn(*gibbs, rho=0.9, num_samples=500)
    assert inflation[2:].min() > 0.08
    report = bias_report(mcmc, num_draws=2000)
    # At this correlation half as many draws leave up to 0.03 between the two, of five runs each.
    np.testing.assert_allclose(report.stein_estimates.sd_inflation.value, inflation, atol=0.05)
    assert report.is_flagged


@pytest.fixture(scope="module")
def switched():
    return switched_run(SGHMCSplit(switching))


def switched_run(kernel, **settings):
    gibbs = Gibbs([(DiscreteGibbs(kernel.model), ["k"]), (kernel, None)])
    settings = {"num_warmup": 50, "num_samples": 3000, "num_chains": 2} | settings
    mcmc = quietly(gibbs, chain_method=jax.vmap, **settings)
    mcmc.run(jax.random.key(0), counts(), batch_size=BATCH)
    return mcmc


def test_discrete_sites_are_taken_as_given(switched, capsys):
    report = bias_report(switched)
    assert [site.site for site in report.sites] == ["rate"]
    assert report.is_ok, report
    assert "not judged, and taken as given: `k` (discrete)" in str(report)
    print_summary(switched)
    assert "Bias: means off by at most" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sites", "shown", "left_out"),
    [(["k"], "k", "rate"), ("rate", "rate", "k"), (["~k"], "rate", "k"), (["~rate"], "k", "rate")],
)
def test_a_summary_of_some_sites(switched, capsys, sites, shown, left_out):
    print_summary(switched, sites=sites)
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert shown in rows
    assert left_out not in rows
    assert "Bias:" in rows


def test_noise_beside_a_discrete_block_is_flagged():
    kernel = SGHMCSplit(
        switching, step_size=0.3, gradient_estimator="minibatch", subsampling="iid", num_steps=10
    )
    report = bias_report(switched_run(kernel))
    assert report.is_flagged
    assert report.sites[0].sd_inflation > 0.2
    assert "gradient's noise, which was not measured" in report.diagnosis


def test_chains_that_are_stuck_in_a_discrete_site_are_not_fine(switched):
    state = switched._states
    stuck = jnp.zeros_like(state["z"]["k"]).at[1].set(2)
    switched._states = {**state, "z": {**state["z"], "k": stuck}}
    try:
        report = bias_report(switched)
        assert not report.is_ok
        assert "Chains disagree on the discrete site `k`" in report.diagnosis
    finally:
        switched._states = state


def test_what_is_no_run_of_a_stochastic_gradient_block_is_refused(switched):
    with pytest.raises(ValueError, match="leave out the function"):
        bias_report(switched, lambda draw: draw["rate"])
    kernel = SGHMCSplit(switching)
    before = quietly(Gibbs([(DiscreteGibbs(kernel.model), ["k"]), (kernel, None)]))
    with pytest.raises(ValueError, match="There are no draws yet"):
        bias_report(before)
    exact = Gibbs([(DiscreteGibbs(switching), ["k"]), (NUTS(switching), None)])
    with pytest.raises(ValueError, match="none of this Gibbs' blocks is one of them"):
        bias_report(quietly(exact))
