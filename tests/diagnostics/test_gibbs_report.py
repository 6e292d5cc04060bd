"""The report on runs of Gibbs: all blocks together, whichever of them is biased."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import NUTS, DiscreteGibbs, Gibbs

from numpyro_sgmcmc import SGHMCSplit, bias_report, print_summary
from tests.contract.kernels import quietly
from tests.contract.test_gibbs import BATCH, SHIFT, assert_exact_posterior, counts, switching

EXACT = {"step_size": 0.25, "num_steps": 10}
NOISY = {
    "step_size": 0.12,
    "num_steps": 25,
    "gradient_estimator": "minibatch",
    "subsampling": "iid",
}
LARGE_STEP = {"step_size": 1.8, "num_steps": 3}

pytestmark = [
    pytest.mark.filterwarnings("ignore::numpyro_sgmcmc.errors.SGMCMCWarning"),
    pytest.mark.filterwarnings("ignore:Some donated buffers were not usable"),
]

# --- Continuous blocks --------------------------------------------------------------------------


def regression(X, Z, y, batch_size=None):
    a = numpyro.sample("a", dist.Normal(0, 10).expand([2]).to_event(1))
    b = numpyro.sample("b", dist.Normal(0, 10).expand([2]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(X[i] @ a + Z[i] @ b, 1), obs=y[i])


def regression_data(rho, rows=1000):
    """Return columns whose coefficients have posterior correlation rho across the blocks."""
    rng = np.random.default_rng(0)
    X, Z = rng.standard_normal((2, rows, 2))
    Z = -rho * X + np.sqrt(1 - rho**2) * Z
    y = X.sum(1) - Z.sum(1) + rng.standard_normal(rows)
    return tuple(x.astype(np.float32) for x in (X, Z, y))


def run_blocks(first, second, rho=0.5, **settings):
    """Return a run with a kernel for each site, its true mean bias and SD inflation."""
    data = regression_data(rho)
    gibbs = Gibbs([(first, ["a"]), (second, ["b"])])
    settings = {"num_warmup": 100, "num_samples": 500, "num_chains": 4} | settings
    mcmc = quietly(gibbs, chain_method=jax.vmap, **settings)
    mcmc.run(jax.random.key(0), *data, batch_size=50)
    X, Z, y = data
    columns = np.concatenate([X, Z], 1).astype(np.float64)
    covariance = np.linalg.inv(columns.T @ columns + np.eye(4) / 100)
    mean, sd = covariance @ columns.T @ y, np.sqrt(np.diagonal(covariance))
    samples = mcmc.get_samples()
    draws = np.concatenate([samples["a"], samples["b"]], -1).astype(np.float64)
    return mcmc, (draws.mean(0) - mean) / sd, draws.std(0) / sd - 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second", "diagnoses"),
    [
        pytest.param(EXACT, EXACT, ("ok", "ok"), id="exact"),
        pytest.param(NOISY, EXACT, ("biased", None), id="noise in the first"),
        pytest.param(EXACT, NOISY, (None, "biased"), id="noise in the second"),
        pytest.param(LARGE_STEP, LARGE_STEP, ("biased", "biased"), id="large steps"),
    ],
)
def test_report_on_blocks_is_their_joint_bias(first, second, diagnoses):
    kernels = (SGHMCSplit(regression, **settings) for settings in (first, second))
    mcmc, mean_bias, sd_inflation = run_blocks(*kernels)
    report = bias_report(mcmc, num_draws=2000)  # all of them: no Monte Carlo error between the two
    np.testing.assert_allclose(report.sd_inflation.value, sd_inflation, atol=0.03)
    np.testing.assert_allclose(report.mean_bias.value, mean_bias, atol=0.03)
    assert [site.site for site in report.sites] == ["a", "b"]
    worst = np.abs(sd_inflation).reshape(2, 2).max(1)
    for site, diagnosis, truth in zip(report.sites, diagnoses, worst, strict=True):
        if diagnosis is None:  # an exact block given a biased one: as biased as its draws are
            assert site.diagnosis != "ok" or truth < 0.1
            assert site.diagnosis != "biased" or truth > 0.02
        else:
            assert site.diagnosis == diagnosis
    assert report.num_draws == 2000
    assert report.num_divergences == 0


@pytest.mark.slow
def test_exact_block_given_a_biased_one_is_biased():
    """NUTS given sites that are too wide is too wide itself."""
    kernels = SGHMCSplit(regression, **NOISY), NUTS(SGHMCSplit(regression).model)
    mcmc, _, sd_inflation = run_blocks(*kernels, rho=0.9, num_samples=500)
    assert sd_inflation[2:].min() > 0.08
    report = bias_report(mcmc, num_draws=2000)
    # At this correlation half as many draws leave up to 0.03 between the two, in five runs each.
    np.testing.assert_allclose(report.sd_inflation.value, sd_inflation, atol=0.05)
    assert report.is_flagged


# --- Discrete blocks ----------------------------------------------------------------------------


def run_switching(kernel, **settings):
    gibbs = Gibbs([(DiscreteGibbs(kernel.model), ["k"]), (kernel, None)])
    settings = {"num_warmup": 50, "num_samples": 1500, "num_chains": 2} | settings
    mcmc = quietly(gibbs, chain_method=jax.vmap, **settings)
    mcmc.run(jax.random.key(0), counts(), batch_size=BATCH)
    return mcmc


@pytest.fixture(scope="module")
def switched():
    return run_switching(SGHMCSplit(switching))


@pytest.mark.slow
def test_draws_beside_a_discrete_block_have_the_exact_posterior(switched):
    draws = switched.get_samples(group_by_chain=True)
    assert_exact_posterior(draws)
    expected = draws["rate"] * np.exp(SHIFT * draws["k"])
    np.testing.assert_allclose(draws["total"], expected, rtol=1e-5)


@pytest.mark.slow
def test_discrete_sites_are_conditioned_on(switched, capsys):
    report = bias_report(switched)
    assert [site.site for site in report.sites] == ["rate"]
    assert report.is_ok, report
    assert "discrete sites `k`" in str(report)
    print_summary(switched)
    assert report.summary_line in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sites", "shown", "left_out"),
    [(["k"], "k", "rate"), ("rate", "rate", "k"), (["~k"], "rate", "k"), (["~rate"], "k", "rate")],
)
def test_summary_of_gibbs_shows_the_sites_asked_for(switched, capsys, sites, shown, left_out):
    print_summary(switched, sites=sites)
    first_words = [x.split()[0] for x in capsys.readouterr().out.splitlines() if x.strip()]
    assert shown in first_words
    assert left_out not in first_words
    assert "Bias:" in first_words


@pytest.mark.slow
def test_noise_beside_a_discrete_block_is_flagged():
    kernel = SGHMCSplit(
        switching, step_size=0.3, gradient_estimator="minibatch", subsampling="iid", num_steps=10
    )
    report = bias_report(run_switching(kernel, num_samples=500))
    assert report.is_flagged
    assert report.sites[0].sd_inflation > 0.2
    assert "not measured" in report.diagnosis


@pytest.mark.slow
def test_discrete_site_that_is_stuck_is_named(switched):
    state = switched._states
    stuck = jnp.zeros_like(state["z"]["k"]).at[1].set(2)
    switched._states = {**state, "z": {**state["z"], "k": stuck}}
    try:
        report = bias_report(switched)
        assert not report.is_ok
        assert "discrete site `k`" in report.diagnosis
    finally:
        switched._states = state


@pytest.mark.slow
def test_unsupported_runs_of_gibbs_raise(switched):
    with pytest.raises(ValueError, match=r"`fn`.*Gibbs"):
        bias_report(switched, lambda draw: draw["rate"])
    kernel = SGHMCSplit(switching)
    with pytest.raises(ValueError, match="without draws"):
        bias_report(quietly(Gibbs([(DiscreteGibbs(kernel.model), ["k"]), (kernel, None)])))
    with pytest.raises(ValueError, match="without a block"):
        bias_report(quietly(Gibbs([(DiscreteGibbs(switching), ["k"]), (NUTS(switching), None)])))
