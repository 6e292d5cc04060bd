"""Local values that are kept, with all settings given: host arrays and checkpoints."""

import numpy as np
import numpyro.distributions as dist
import pytest
from jax import random

from numpyro_sgmcmc import CheckpointedMCMC, HostArray, SGHMCSplit
from tests.checkpoint.runs import Killed, assert_bitwise_equal, end_at, kill, outcome
from tests.contract.kernels import quietly
from tests.model.hierarchies import indicator_odds, mixture, mixture_data

Y = mixture_data(60)
GIVEN = {
    "inverse_mass_matrix": np.array([0.1, 0.1]),
    "gradient_estimator": "minibatch",
    "subsampling": "contiguous",
    "step_size": 0.1,
    "num_steps": 3,
}


def sample_indicators(rng_key, gibbs_sites, hmc_sites, rows, model_args):
    odds = indicator_odds(hmc_sites["share"], hmc_sites["shift"], model_args[0][rows])
    return {"k": dist.Bernoulli(logits=odds).sample(rng_key)}


def discrete_kernel():
    return SGHMCSplit(
        mixture, gibbs_fn=sample_indicators, gibbs_sites=["k"], collect_local_sites=True, **GIVEN
    )


def run(mcmc, rows):
    mcmc.run(random.key(1), rows, batch_size=20)
    return mcmc


@pytest.fixture(scope="module")
def in_memory():
    return run(quietly(discrete_kernel(), num_warmup=2, num_samples=6), Y)


def assert_keeps_settings(mcmc):
    assert mcmc.sampler.adaptation.uses_init_strategy
    assert mcmc.sampler.adaptation.num_steps == 3
    k = np.asarray(mcmc.get_samples()["k"])
    assert set(np.unique(k)) == {0, 1}
    assert (k[1:] != k[:-1]).any(0).sum() > 10


@pytest.mark.slow
def test_adaptation_all_settings_given_keeps_them(in_memory):
    assert_keeps_settings(in_memory)


@pytest.mark.slow
def test_draws_host_array_match_array_in_memory(in_memory):
    from_host = run(
        quietly(discrete_kernel(), num_warmup=2, num_samples=6), HostArray(Y)
    ).get_samples()
    for name, draws in in_memory.get_samples().items():
        np.testing.assert_allclose(draws, from_host[name], rtol=1e-5)


@pytest.mark.slow
def test_resume_killed_run_continues_bitwise(tmp_path, monkeypatch):
    def stored(folder):
        kernel = discrete_kernel()
        settings = {"num_warmup": 2, "num_samples": 6, "checkpoint_every": 2}
        return CheckpointedMCMC(kernel, checkpoint=folder, progress_bar=False, **settings)

    uninterrupted = run(stored(tmp_path / "whole"), Y)
    assert_keeps_settings(uninterrupted)
    whole = outcome(uninterrupted)
    with monkeypatch.context() as patch:
        end_at(patch, 5, kill)
        with pytest.raises(Killed):
            run(stored(tmp_path / "killed"), Y)
    mcmc = stored(tmp_path / "killed")
    mcmc.resume(Y, batch_size=20)
    assert_bitwise_equal(mcmc, whole)
