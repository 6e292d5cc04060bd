"""Checks of chains on one device each: one function per check."""

import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

from numpyro_sgmcmc import HostArray, SGHMCSplit
from tests.checkpoint import runs
from tests.contract import test_gibbs as gibbs
from tests.contract.kernels import BATCH, GIVEN, quietly, survey, survey_data, survey_posterior
from tests.data import host_rows


def check_parallel_chains_are_those_of_vectorized_chains():
    options = {"step_size": 0.3, "num_steps": 5, "inverse_mass_matrix": np.full(3, 1 / 400)}
    data, kernel, draws = survey_data(), SGHMCSplit(survey, **{**GIVEN, **options}), {}
    for method in ("parallel", "vectorized"):
        mcmc = quietly(kernel, num_samples=40, num_chains=2, chain_method=method)
        assert mcmc.chain_method == method
        mcmc.run(jax.random.key(1), *data, batch_size=BATCH)
        draws[method] = np.asarray(mcmc.get_samples(group_by_chain=True)["beta"])
    parallel, vectorized = (x / survey_posterior(data)["beta"][1] for x in draws.values())
    assert parallel.shape == (2, 40, 2)
    assert np.abs(parallel[0] - parallel[1]).max(-1).min() > 0
    assert np.abs(parallel - vectorized).max() < 0.02


def check_parallel_chains_of_rows_on_the_host_have_the_draws_of_rows_in_memory():
    X, y = host_rows.X, host_rows.Y
    both = ((X, y), (HostArray(X), HostArray(y)))
    settings = {
        "chain_method": "parallel",
        "options": {**host_rows.GIVEN, "gradient_estimator": "minibatch"},
    }
    memory, host = (host_rows.fit(*data, **settings) for data in both)
    assert memory.chain_method == host.chain_method == "parallel"
    host_rows.assert_same(host_rows.get_draws(host), host_rows.get_draws(memory))


def check_parallel_chains_with_gibbs_have_the_exact_posterior():
    kernel = SGHMCSplit(gibbs.switching)
    draws = gibbs.run_gibbs(kernel, 1500, 40, num_chains=2, chain_method="parallel")
    assert draws["rate"].shape == draws["k"].shape == (2, 1500)
    assert not (draws["rate"][0] == draws["rate"][1]).any()
    gibbs.assert_exact_posterior(draws)


def check_parallel_chains_after_a_kill_resume_bitwise():
    parallel = {"chain_method": "parallel"}
    with tempfile.TemporaryDirectory() as temporary, pytest.MonkeyPatch.context() as patch:
        folder = Path(temporary)
        expected = runs.outcome(runs.run(runs.mcmc_of(folder / "whole", **parallel)))
        with patch.context() as until_killed:
            runs.end_at(until_killed, 12, runs.kill)
            with pytest.raises(runs.Killed):
                runs.run(runs.mcmc_of(folder / "killed", **parallel))
        mcmc = runs.resume(folder / "killed", **parallel)
        assert mcmc.chain_method == "parallel"
        runs.assert_bitwise_equal(mcmc, expected)
