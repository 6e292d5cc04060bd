"""Posteriors with hundreds of parameters are right with default arguments."""

import jax
import numpy as np
import pytest
from numpyro.diagnostics import split_gelman_rubin
from numpyro.infer import MCMC

from numpyro_sgmcmc import SGHMCSplit, bias_report
from tests.adaptation.large_posteriors import PROBLEMS
from tests.sampling.references import summarise

# Means within 0.1 posterior SD and SDs within 10%, beyond three standard errors.
MAX_MEAN_BIAS, MAX_SD_BIAS, NUM_STANDARD_ERRORS = 0.1, 0.1, 3.0
pytestmark = pytest.mark.usefixtures("optimised")

QUICK = "crossed effects, 90 by 60"


def compute_errors(draws, mean, sd):
    """Return by how much the worst mean and SD of a site exceed what is allowed."""
    (summary,) = summarise({"site": draws}).values()
    summary = {key: np.array(value) for key, value in summary.items()}
    mean, sd = np.ravel(mean), np.ravel(sd)
    standard_error = summary["sd"] / sd / np.sqrt(summary["ess"])
    mean_bias = np.abs(summary["mean"] - mean) / sd - NUM_STANDARD_ERRORS * standard_error
    sd_error = np.sqrt(0.5 / summary["ess_sd"])
    sd_bias = np.abs(summary["sd"] / sd - 1) - NUM_STANDARD_ERRORS * sd_error
    return {
        "mean": float(mean_bias.max() - MAX_MEAN_BIAS),
        "sd": float(sd_bias.max() - MAX_SD_BIAS),
    }


def assert_exact(name, num_samples=1000, max_r_hat=1.01):
    """Run four chains and compare every coordinate with its exact mean and SD."""
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
    assert not bias_report(mcmc).is_flagged
    samples = mcmc.get_samples(group_by_chain=True)
    for site, exact in problem.exact.items():
        errors = compute_errors(samples[site], *exact)
        assert max(errors.values()) <= 0, (site, errors)
    for site, draws in samples.items():
        assert np.max(split_gelman_rubin(np.asarray(draws, np.float64))) < max_r_hat, site
        (summary,) = summarise({site: draws}).values()
        assert np.min(summary["ess"]) >= 400, site
    assert not mcmc.get_extra_fields()["diverging"].any()


@pytest.mark.slow
def test_default_arguments_crossed_effects_have_exact_moments():
    assert_exact(QUICK, 500, 1.02)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::numpyro_sgmcmc.errors.DataOrderWarning")  # if rows are sorted
@pytest.mark.filterwarnings("ignore::numpyro_sgmcmc.errors.DiscretisationWarning")
@pytest.mark.filterwarnings("ignore::numpyro_sgmcmc.errors.SubsampleSizeWarning")
@pytest.mark.parametrize("name", [name for name in PROBLEMS if name != QUICK])
def test_default_arguments_large_posteriors_have_exact_moments(name):
    assert_exact(name)
