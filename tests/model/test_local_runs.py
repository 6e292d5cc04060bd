"""Latent sites inside the subsampled plate: whole runs, most with `gibbs_fn`."""

from __future__ import annotations

import pickle
from typing import Any

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.infer import MCMC, NUTS, Predictive

from numpyro_sgmcmc import SGNHT, SGHMCSplit, bias_report, diagnostics, print_summary
from numpyro_sgmcmc.diagnostics import Diagnosis
from tests.contract.kernels import (
    assert_posterior,
    assert_same_distribution,
    quietly,
)
from tests.model.hierarchies import (
    NOISE,
    counts,
    counts_data,
    draw_indicators,
    draw_normal_means,
    indicator_odds,
    influential,
    influential_data,
    influential_posterior,
    mixture,
    mixture_data,
    mixture_posterior,
    normal_means,
    normal_means_data,
    normal_means_posterior,
    overdispersed,
    overdispersed_data,
    overdispersed_posterior,
    trials,
    trials_data,
)

DRAWS = 160
BY_GIBBS_FN = {"gibbs_fn": draw_normal_means, "gibbs_sites": ["z"]}


def posterior_run(kernel: Any, *data: Any, batch: int = 100, **settings: Any) -> MCMC:
    settings = {"num_warmup": 50, "num_samples": 250, "num_chains": 2} | settings
    mcmc = quietly(kernel, **{"chain_method": "vectorized", **settings})
    mcmc.run(jax.random.key(1), *data, batch_size=batch)
    return mcmc


def assert_globals(mcmc: MCMC, exact: dict[str, tuple[float, float]]) -> None:
    draws = mcmc.get_samples(group_by_chain=True)
    for name, (mean, sd) in exact.items():
        assert_posterior(draws[name], mean, sd)


ROWS = normal_means_data(400)


@pytest.fixture(scope="module")
def collected_run():
    """Run with the local values of all rows collected."""
    kernel = SGHMCSplit(normal_means, collect_local_sites=True, **BY_GIBBS_FN)
    return posterior_run(kernel, ROWS, batch=40, num_samples=DRAWS)


@pytest.mark.slow
def test_draws_globals_match_marginal_posterior(collected_run):
    assert_globals(collected_run, normal_means_posterior(ROWS))


@pytest.mark.slow
def test_draws_local_values_match_conditional_posterior(collected_run):
    """Given the globals, each local value is normal with a known mean and SD."""
    y = ROWS
    draws = collected_run.get_samples(group_by_chain=True)
    mu, tau = (np.asarray(draws[n], np.float64)[..., None] for n in ("mu", "tau"))
    assert draws["z"].shape == (2, DRAWS, len(y))
    variance = 1 / (1 / tau**2 + 1 / NOISE**2)
    u = (draws["z"] - variance * (mu / tau**2 + y / NOISE**2)) / np.sqrt(variance)
    u = np.asarray(u)
    # Each draw is standard normal and about independent of the others.
    assert abs(u.mean()) < 5 / np.sqrt(u.size / 4)
    assert abs(u.var() - 1) < 5 * np.sqrt(2 / (u.size / 4))
    by_row = u.reshape(-1, len(y))
    assert np.abs(by_row.mean(0)).max() < 6 * np.sqrt(2 / len(by_row))
    extreme_rows = np.argsort(y)[[0, 1, -2, -1]]
    assert np.abs(by_row[:, extreme_rows].mean(0)).max() < 5 * np.sqrt(2 / len(by_row))


@pytest.mark.slow
def test_draws_local_values_change_between_draws(collected_run):
    z = np.asarray(collected_run.get_samples(group_by_chain=True)["z"])
    assert (z[:, 1:] != z[:, :-1]).all(2).mean() > 0.9
    num_steps = int(collected_run.last_state.num_steps[0])
    assert num_steps >= len(ROWS) / 40


@pytest.mark.slow
def test_draws_without_collected_sites_hold_globals_for_numpyro_and_arviz(collected_run, capsys):
    y = ROWS
    kernel = SGHMCSplit(normal_means, **BY_GIBBS_FN)
    mcmc = posterior_run(kernel, y, batch=40, num_samples=10, num_warmup=4)
    assert sorted(mcmc.get_samples()) == ["mu", "tau"]
    print_summary(mcmc)
    assert "Bias" in capsys.readouterr().out
    data = az.from_numpyro(mcmc, log_likelihood=False)
    assert set(data.posterior.data_vars) == {"mu", "tau"}
    with pytest.raises(ValueError, match=r"latent.*collect_local_sites"):
        az.from_numpyro(mcmc, log_likelihood=True)
    state = mcmc.last_state.local_state
    assert state.by_site["z"].shape == (2, len(y))
    predicted = Predictive(mcmc.sampler.model, collected_run.get_samples())(jax.random.key(0), y)
    assert predicted["y"].shape == (2 * DRAWS, len(y))
    data = az.from_numpyro(collected_run, log_likelihood=True)
    assert data.log_likelihood["y"].shape == (2, DRAWS, len(y))
    assert data.posterior["z"].shape == (2, DRAWS, len(y))


def true_bias(mcmc: MCMC, exact: dict[str, tuple[float, float]]) -> np.ndarray:
    """Return mean bias (in posterior SDs) and SD inflation of each global, shape ``(2, sites)``."""
    draws = {n: np.asarray(x, np.float64) for n, x in mcmc.get_samples().items()}
    mean_bias = [(draws[n].mean() - mean) / sd for n, (mean, sd) in exact.items()]
    return np.array([mean_bias, [draws[n].std() / sd - 1 for n, (_, sd) in exact.items()]])


@pytest.mark.slow
def test_bias_report_local_latents_estimates_bias_of_globals(collected_run):
    report = bias_report(collected_run, num_draws=100)
    assert [site.site for site in report.sites] == ["mu", "tau"]
    found = np.stack([report.mean_bias.value, report.sd_inflation.value])
    truth = true_bias(collected_run, normal_means_posterior(ROWS))
    np.testing.assert_allclose(found, truth, atol=0.06)
    assert not report.is_flagged
    assert "local latent variables `z`" in str(report)
    with pytest.raises(ValueError, match="fn"):
        bias_report(collected_run, lambda draw: draw["mu"])
    with pytest.raises(ValueError, match="compare_with_finer"):
        diagnostics.compare_with_finer(collected_run, jax.random.key(0))


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
@pytest.mark.filterwarnings("ignore::numpyro_sgmcmc.errors.SGMCMCWarning")
def test_bias_report_noisy_gradient_flags_globals():
    y = normal_means_data()
    kernel = SGHMCSplit(normal_means, gradient_estimator="minibatch", step_size=0.2, **BY_GIBBS_FN)
    mcmc = posterior_run(kernel, y, batch=20)
    truth = true_bias(mcmc, normal_means_posterior(y))
    assert truth[1].max() > 0.1
    report = bias_report(mcmc)
    assert report.is_flagged, report
    np.testing.assert_allclose(report.sd_inflation.value, truth[1], atol=0.1)


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_pickled_kernel_sequential_chains_matches_posterior():
    y = normal_means_data(400)
    kernel = pickle.loads(
        pickle.dumps(SGHMCSplit(normal_means, collect_local_sites=["z"], **BY_GIBBS_FN))
    )
    mcmc = posterior_run(kernel, y, chain_method="sequential", num_samples=300, batch=40)
    assert_globals(mcmc, normal_means_posterior(y))
    draws = mcmc.get_samples(group_by_chain=True)
    assert not (draws["z"][0, 0] == draws["z"][1, 0]).any()
    again = pickle.loads(pickle.dumps(mcmc))
    np.testing.assert_array_equal(again.get_samples()["z"], mcmc.get_samples()["z"])


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_run_after_warmup_matches_posterior():
    y = normal_means_data(400)
    kernel = SGHMCSplit(normal_means, collect_local_sites=True, **BY_GIBBS_FN)
    mcmc = quietly(kernel, num_samples=300, num_warmup=50)
    mcmc.warmup(jax.random.key(0), y, batch_size=40)
    warm = mcmc.post_warmup_state
    mcmc.run(jax.random.key(1), y, batch_size=40)
    assert_globals(mcmc, normal_means_posterior(y))
    mcmc.post_warmup_state = mcmc.last_state
    assert warm.local_state is not None
    mcmc.run(jax.random.key(2), y, batch_size=40)
    assert_globals(mcmc, normal_means_posterior(y))


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize(
    "kernel",
    [
        SGHMCSplit(normal_means, **BY_GIBBS_FN),
        SGHMCSplit(normal_means, subsampling="shuffled", **BY_GIBBS_FN),
        SGNHT(normal_means, **BY_GIBBS_FN),
        SGHMCSplit(normal_means, gradient_estimator="minibatch", **BY_GIBBS_FN),
        SGNHT(normal_means),
    ],
    ids=["gibbs_fn", "shuffled", "SGNHT", "minibatch", "SGNHT without gibbs_fn"],
)
@pytest.mark.filterwarnings("ignore::numpyro_sgmcmc.errors.SGMCMCWarning")
def test_draws_other_kernels_match_marginal_posterior(kernel):
    y = normal_means_data()
    assert_globals(posterior_run(kernel, y), normal_means_posterior(y))


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize(
    ("model", "data", "posterior"),
    [
        (influential, influential_data(), influential_posterior),
        (overdispersed, overdispersed_data(), overdispersed_posterior),
    ],
    ids=["a column known from ten rows", "beta-binomial shares"],
)
def test_draws_match_posterior_of_integrated_model(model, data, posterior):
    mcmc = posterior_run(SGHMCSplit(model), *data)
    assert_globals(mcmc, posterior(*data))
    assert not any(site.diagnosis is Diagnosis.BIASED for site in bias_report(mcmc).sites)


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_draws_discrete_indicators_match_marginal_posterior():
    y = mixture_data()
    kernel = SGHMCSplit(
        mixture, gibbs_fn=draw_indicators, gibbs_sites=["k"], collect_local_sites=True
    )
    mcmc = posterior_run(kernel, y)
    assert_globals(mcmc, mixture_posterior(y))
    draws = mcmc.get_samples()
    assert jnp.issubdtype(draws["k"].dtype, jnp.integer)
    odds = indicator_odds(draws["share"][:, None], draws["shift"][:, None], y)
    expected = np.asarray(jax.nn.sigmoid(odds)).mean(0)
    difference = np.asarray(draws["k"]).mean(0) - expected
    error = np.sqrt(np.maximum(expected * (1 - expected), 1e-3) / (len(draws["k"]) / 2))
    assert np.abs(difference / error).max() < 6
    assert abs(np.mean(difference / error)) < 0.2


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize(
    ("model", "data"), [(counts, counts_data), (trials, trials_data)], ids=["Poisson", "Bernoulli"]
)
def test_draws_match_nuts_on_joint_posterior(model, data):
    """Compare means and SDs of the globals and of some local values."""
    args = tuple(jnp.asarray(x) for x in data())
    nuts = quietly(
        NUTS(model), num_warmup=500, num_samples=1500, num_chains=2, chain_method="vectorized"
    )
    nuts.run(jax.random.key(0), *args)
    mcmc = posterior_run(SGHMCSplit(model), *args, num_samples=1000)
    nuts_draws, draws = (m.get_samples(group_by_chain=True) for m in (nuts, mcmc))
    totals = np.asarray(args[1]).reshape(2000, -1).sum(1)
    rows = np.argsort(totals)[[0, 3, 1000, 1001, 1996, 1999]]
    for name in nuts_draws:
        a, b = (np.asarray(d[name]).reshape(*d[name].shape[:2], -1) for d in (draws, nuts_draws))
        if name == "effect":
            a, b = a[..., rows], b[..., rows]
        assert_same_distribution(a, b)
