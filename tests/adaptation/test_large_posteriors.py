"""Posteriors with hundreds of parameters with nothing but model, data and minibatch."""

import jax
import numpy as np
import pytest
from numpyro.diagnostics import split_gelman_rubin
from numpyro.infer import MCMC

from numpyro_sgmcmc import SGHMCSplit
from tests.sampling.references import summarise
from tests.adaptation.large_posteriors import PROBLEMS

# The claim: means within 0.1 posterior sd and sds within 10 %, beyond three standard errors.
MEAN, SD, Z = 0.1, 0.1, 3.0
pytestmark = pytest.mark.usefixtures("optimised")

QUICK = "crossed effects, 90 by 60"


def errors(draws, mean, sd):
    """How far the worst mean and sd of a site are off beyond what the claim allows."""
    (found,) = summarise({"site": draws}).values()
    found = {key: np.array(value) for key, value in found.items()}
    mean, sd = np.ravel(mean), np.ravel(sd)
    shift = np.abs(found["mean"] - mean) / sd - Z * found["sd"] / sd / np.sqrt(found["ess"])
    stretch = np.abs(found["sd"] / sd - 1) - Z * np.sqrt(0.5 / found["ess_sd"])
    return {"mean": float(shift.max() - MEAN), "sd": float(stretch.max() - SD)}


def check(name, num_samples=1000, r_hat=1.01):
    """Run four chains and compare every coordinate with its exact mean and sd."""
    problem = PROBLEMS[name]()
    mcmc = MCMC(
        SGHMCSplit(problem.model),
        num_warmup=300,
        num_samples=num_samples,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(7), *problem.args, batch_size=problem.batch_size)
    samples = mcmc.get_samples(group_by_chain=True)
    for site, exact in problem.exact.items():
        found = errors(samples[site], *exact)
        assert max(found.values()) <= 0, (site, found)
    for site, draws in samples.items():
        assert np.max(split_gelman_rubin(np.asarray(draws, np.float64))) < r_hat, site
        (found,) = summarise({site: draws}).values()
        assert np.min(found["ess"]) >= 400, site
    assert not mcmc.get_extra_fields()["diverging"].any()


def test_a_posterior_of_151_parameters_is_right_with_default_arguments():
    check(QUICK, 500, 1.02)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The step's own error would move means")
@pytest.mark.parametrize("name", [name for name in PROBLEMS if name != QUICK])
def test_posteriors_are_right_with_default_arguments(name):
    check(name)
