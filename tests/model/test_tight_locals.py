"""Runs with local values that their rows determine tightly."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from numpyro_sgmcmc import SGHMCSplit, bias_report
from tests.contract.kernels import assert_posterior, moments, quietly
from tests.model.tight_locals import NOISE as TIGHT_NOISE
from tests.model.tight_locals import (
    counts,
    counts_data,
    deaths,
    deaths_data,
    levels,
    lines,
    normal_data,
    normal_posterior,
)


def run(kernel: Any, *data: Any, batch: int = 30, num_samples: int = 300) -> Any:
    mcmc = quietly(
        kernel, num_warmup=50, num_samples=num_samples, num_chains=2, chain_method="vectorized"
    )
    mcmc.run(jax.random.key(0), *data, batch_size=batch)
    assert mcmc.sampler.adaptation.preconditioner.is_block_arrow
    return mcmc


@pytest.fixture(scope="module")
def levels_run(optimised):
    return run(SGHMCSplit(levels), normal_data(levels))


@pytest.mark.slow
def test_draws_of_tight_levels_match_the_posterior(levels_run):
    draws = levels_run.get_samples(group_by_chain=True)["mu"]
    assert_posterior(draws, *normal_posterior(levels, normal_data(levels)))
    assert not bias_report(levels_run).is_flagged


@pytest.mark.slow
def test_collected_tight_levels_match_their_conditional(levels_run):
    y, draws = normal_data(levels), levels_run.get_samples()
    mu, z = (np.asarray(draws[name], np.float64) for name in ("mu", "z"))
    variance = 1 / (1 + y.shape[1] / TIGHT_NOISE**2)
    mean = variance / TIGHT_NOISE**2 * (y - mu[:, None]).sum(-1)
    u = (z[..., 0] - mean) / np.sqrt(variance)
    assert abs(u.mean()) < 0.1
    assert abs(u.std() - 1) < 0.1


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_draws_of_tight_lines_match_the_posterior():
    mcmc = run(SGHMCSplit(lines), normal_data(lines))
    draws = mcmc.get_samples(group_by_chain=True)["mu"]
    assert_posterior(draws, *normal_posterior(lines, normal_data(lines)))


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_draws_of_tight_rates_contain_the_truth():
    mcmc = run(SGHMCSplit(counts), *counts_data())
    for name, truth, sd in [
        ("a", 7.0, 0.3 / np.sqrt(120)),
        ("b", -0.5, None),
        ("tau", 0.3, 0.3 / np.sqrt(240)),
    ]:
        found = moments(mcmc.get_samples(group_by_chain=True)[name])
        assert abs(found.mean - truth) < 4 * found.sd
        assert found.mean_error < 0.2 * found.sd
        assert sd is None or abs(found.sd / sd - 1) < 0.2


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_draws_of_tight_logits_contain_the_truth():
    y, population, al = deaths_data()
    mcmc = run(SGHMCSplit(deaths), y, population, batch=50)
    draws = mcmc.get_samples(group_by_chain=True)
    found = moments(draws["al"][..., 0, 0])
    assert (np.abs(found.mean - al) < 4 * found.sd).all()
    # That of the mean of all places, and more where deaths are rare.
    assert (found.sd > 0.9 * 0.2 / np.sqrt(300)).all()
    assert (found.sd < 0.02).all()
    assert (found.mean_error < 0.2 * found.sd).all()
    assert abs(np.mean(draws["ss"]) - 0.2) < 0.03
    assert not bias_report(mcmc).is_flagged
