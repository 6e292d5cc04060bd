"""Runs with draws of chosen sites: the kept draws, the moments of the others, and what needs them.

Step size, mass matrix and all else are given, so that there is no warm-up.
"""

import re
from functools import cache

import jax
import numpy as np
import pytest
from numpyro.infer import Gibbs

from numpyro_sgmcmc import (
    SGHMCSplit,
    bias_report,
    diagnostics,
    log_likelihood,
    loo,
    posterior_predictive,
    print_summary,
    running_moments,
    to_arviz,
    warmup_report,
)
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.errors import InvalidArgumentError
from numpyro_sgmcmc.sampling.site_moments import CollectedSites
from tests.checkpoint.runs import mcmc_of, resume
from tests.contract.kernels import quietly, survey, survey_data
from tests.model.hierarchies import draw_normal_means, normal_means, normal_means_data

DATA, BATCH = survey_data(), 40
GIVEN = {
    "step_size": 0.3,
    "num_steps": 2,
    "inverse_mass_matrix": np.full(3, 0.003),
    "gradient_estimator": "minibatch",
    "subsampling": "contiguous",
}
SOME = {
    "collect_sites": ["beta"],
    "running_quantiles": [0.25, 0.75],
    "running_covariances": ["rate", "beta"],
}


@cache
def run(chain_method="vectorized", num_chains=2, **options):
    options = {name: list(x) if isinstance(x, tuple) else x for name, x in options.items()}
    kernel = SGHMCSplit(survey, **GIVEN, **options)
    settings = {"num_warmup": 10, "num_samples": 60, "num_chains": num_chains}
    mcmc = quietly(kernel, chain_method=chain_method, **settings)
    init_params = {"beta": np.zeros((2, 2)), "rate": np.ones(2)}
    if num_chains == 1:
        init_params = jax.tree.map(lambda x: x[0], init_params)
    mcmc.run(jax.random.key(0), *DATA, batch_size=BATCH, init_params=init_params)
    return mcmc


def run_with_some(**settings):
    return run(**settings, **{name: tuple(x) for name, x in SOME.items()})


@pytest.fixture(scope="module")
def some():
    return run_with_some()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"chain_method": "sequential"}, marks=pytest.mark.slow),
        pytest.param({"num_chains": 1}, marks=pytest.mark.slow),
    ],
)
def test_kept_draws_are_bitwise_those_of_all_and_moments_those_of_the_others(settings):
    every, some = run(**settings), run_with_some(**settings)
    draws = every.get_samples(group_by_chain=True)
    kept = some.get_samples(group_by_chain=True)
    assert list(kept) == ["beta"]
    np.testing.assert_array_equal(kept["beta"], draws["beta"])
    assert set(some.last_state.z) == {"beta", "rate"}
    for group_by_chain in (False, True):
        moments = running_moments(some, group_by_chain)
        assert set(moments.mean) == {"rate", "contrast", "beta"}
        for name, x in draws.items():
            x = np.asarray(x, np.float64)
            x = x if group_by_chain else x.reshape(-1, *x.shape[2:])
            axis = 1 if group_by_chain else 0
            np.testing.assert_allclose(moments.mean[name], x.mean(axis), rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(moments.sd[name], x.std(axis), rtol=1e-4)
            low, high = np.moveaxis(moments.quantiles[name], axis, 0)
            assert ((low < x.mean(axis)) & (x.mean(axis) < high)).all()
    assert moments.covariance.shape == (some.num_chains, 3, 3)
    assert "contrast" in str(moments)
    assert "rate" in str(moments)


@pytest.mark.slow
def test_a_continued_run_adds_to_the_moments():
    options = {"num_warmup": 10, "num_samples": 20}
    mcmc = quietly(SGHMCSplit(survey, **GIVEN, collect_sites=["beta"]), **options)
    arguments = {"batch_size": BATCH, "init_params": {"beta": np.zeros(2), "rate": np.ones(())}}
    mcmc.run(jax.random.key(0), *DATA, **arguments)
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(jax.random.key(1), *DATA, batch_size=BATCH)
    assert mcmc.last_state.site_moments.num_iterations == 40


@pytest.mark.parametrize(
    "call",
    [
        lambda mcmc: posterior_predictive(mcmc, jax.random.key(0)),
        log_likelihood,
        loo,
        lambda mcmc: bias_report(mcmc, full_data=True),
        lambda mcmc: bias_report(mcmc, lambda draw: draw["beta"]),
        diagnostics.bias_corrected_samples,
        lambda mcmc: diagnostics.compare_with_finer(mcmc, jax.random.key(0)),
    ],
)
def test_what_needs_the_draws_of_all_sites_names_the_option(some, call):
    message = r"draws of site 'rate' were not kept.*Fix: name it in `collect_sites`"
    with pytest.raises(InvalidArgumentError, match=message):
        call(some)


def test_other_diagnostics_use_what_there_is(some, capsys):
    report = bias_report(some)
    assert [site for site, _ in report.coordinate_names] == ["beta", "beta", "rate"]
    assert np.isfinite(report.mean_bias.value).all()
    assert list(to_arviz(some)["posterior"].data_vars) == ["beta"]
    assert list(diagnostics.ess_per_gradient(some)) == ["beta"]
    print_summary(some)
    assert "beta[0]" in capsys.readouterr().out
    assert str(warmup_report(some))


def test_run_with_all_draws_has_no_running_moments():
    with pytest.raises(InvalidArgumentError, match="collect_sites"):
        running_moments(run())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"collect_sites": ["gamma"]}, r"`collect_sites` names 'gamma'.*\['beta', 'rate', 'contra"),
        ({"collect_sites": ["y"]}, "`collect_sites` names 'y'"),
        ({**SOME, "running_covariances": ["tau"]}, "`running_covariances` names 'tau'"),
    ],
)
def test_names_of_no_site_raise(options, match):
    kernel = SGHMCSplit(survey, **GIVEN, **options)
    with pytest.raises(InvalidArgumentError, match=match):
        kernel.init(jax.random.key(0), 10, None, DATA, {"batch_size": BATCH})


def test_block_of_gibbs_raises():
    kernel = SGHMCSplit(survey, **GIVEN, collect_sites=["beta"])
    mcmc = quietly(Gibbs([(kernel, None)]))
    with pytest.raises(InvalidArgumentError, match=r"`collect_sites`.*Gibbs.*~z"):
        mcmc.run(jax.random.key(0), *DATA, batch_size=BATCH)


@pytest.mark.slow
def test_schedule_weights_the_moments():
    def schedule(step):
        return 0.3 / (1.0 + step / 20.0)

    options = GIVEN | {"step_size": schedule}
    runs = []
    for collected in ({}, {"collect_sites": ["beta"]}):
        mcmc = quietly(SGHMCSplit(survey, **options, **collected))
        arguments = {"batch_size": BATCH, "init_params": {"beta": np.zeros(2), "rate": np.ones(())}}
        mcmc.run(jax.random.key(0), *DATA, extra_fields=("weight",), **arguments)
        runs.append(mcmc)
    weight = np.asarray(runs[0].get_extra_fields()["weight"], np.float64)
    expected = (weight / weight.sum()) @ np.asarray(runs[0].get_samples()["rate"], np.float64)
    np.testing.assert_allclose(running_moments(runs[1]).mean["rate"], expected, rtol=1e-5)


@pytest.mark.slow
def test_checkpoints_hold_the_moments(tmp_path):
    kernels = [SGHMCSplit(survey, **GIVEN, **SOME) for _ in range(2)]
    mcmc = mcmc_of(tmp_path, kernels[0])
    mcmc.run(jax.random.key(1), *DATA, batch_size=40)
    resumed = resume(tmp_path, kernels[1])
    assert list(resumed.get_samples()) == ["beta"]
    assert sorted(p.name for p in (tmp_path / "draws.zarr/posterior").iterdir() if p.is_dir()) == [
        "beta"
    ]
    assert list(resumed.running_mean()) == ["beta"]
    a, b = running_moments(mcmc), running_moments(resumed)
    assert mcmc.last_state.site_moments.num_iterations.tolist() == [13, 13]
    assert jax.tree.all(jax.tree.map(np.array_equal, a._replace(r_hat={}), b._replace(r_hat={})))


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_moments_of_local_sites_are_those_of_their_draws():
    y = normal_means_data(200)
    draws, moments = [], None
    for options in ({}, {"collect_sites": ["mu"]}):
        kernel = SGHMCSplit(normal_means, **options)
        mcmc = quietly(kernel, num_chains=2, chain_method="vectorized")
        mcmc.run(jax.random.key(0), y, batch_size=50)
        draws.append(mcmc.get_samples())
    np.testing.assert_array_equal(draws[0]["mu"], draws[1]["mu"])
    moments = running_moments(mcmc)
    assert set(moments.mean) == {"tau", "z"}
    z = np.asarray(draws[0]["z"], np.float64)
    np.testing.assert_allclose(moments.mean["z"], z.mean(0), atol=1e-5)
    np.testing.assert_allclose(moments.sd["z"], z.std(0), rtol=1e-4)
    assert re.search("190 more", str(moments))


def test_names_of_local_sites_are_collected():
    by_gibbs_fn = {"gibbs_fn": draw_normal_means, "gibbs_sites": ["z"]}
    kernel = SGHMCSplit(normal_means, collect_sites=["z", "mu"], **by_gibbs_fn)
    potential = kernel.get_potential(Arguments((normal_means_data(),), {"batch_size": 100}))
    selected = CollectedSites.select(potential, kernel.options)
    assert selected == CollectedSites(("z",), ("tau",))
