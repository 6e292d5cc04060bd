"""Runs on the survey, whose posterior is known; each is made once."""

import warnings
from functools import cache

import jax
import numpy as np

from numpyro_sgmcmc import SGHMC, SGLD, SGRLD
from tests.contract.kernels import BATCH, quietly, survey, survey_data, survey_posterior

DATA = survey_data()


def run(kernel, num_samples=1000, num_chains=4, **options):
    settings = {"num_samples": num_samples, "num_chains": num_chains, **options}
    mcmc = quietly(kernel, num_warmup=100, chain_method="vectorized", **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        mcmc.run(jax.random.key(0), *DATA, batch_size=BATCH)
    return mcmc


SETTINGS = {
    "default": {},
    "iid minibatch gradient": {
        "gradient_estimator": "minibatch",
        "subsampling": "iid",
        "step_size": 0.3,
    },
    "shuffled minibatch gradient": {
        "gradient_estimator": "minibatch",
        "subsampling": "shuffled",
        "step_size": 0.3,
    },
    "large step": {"step_size": 0.6},
}
QUICK = {"default", "iid minibatch gradient"}  # their runs are shared with other tests


@cache
def run_with(kernel_class, label):
    """Return a run of 1,000 draws, made once."""
    settings = dict(SETTINGS[label])
    if kernel_class in (SGLD, SGRLD, SGHMC) and "step_size" in settings:
        settings["step_size"] /= 3.0
    return run(kernel_class(survey, **settings))


def true_bias(mcmc):
    """Return the mean bias and SD inflation of a run's draws, in the order of the report."""
    posterior = survey_posterior(DATA)
    samples = mcmc.get_samples()
    mean_bias, sd_inflation = [], []
    for site in ("beta", "rate"):
        draws = np.asarray(samples[site], np.float64)
        mean, sd = posterior[site]
        mean_bias.append(np.ravel((draws.mean(0) - mean) / sd))
        sd_inflation.append(np.ravel(draws.std(0) / sd - 1.0))
    return np.concatenate(mean_bias), np.concatenate(sd_inflation)
