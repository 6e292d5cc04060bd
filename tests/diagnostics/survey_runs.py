"""Runs on the survey, whose posterior is known: made once, for tests that look at them."""

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
    "plain, independent rows": {
        "gradient_estimator": "minibatch",
        "subsampling": "iid",
        "step_size": 0.3,
    },
    "plain, an epoch's rows": {
        "gradient_estimator": "minibatch",
        "subsampling": "shuffled",
        "step_size": 0.3,
    },
    "long steps": {"step_size": 0.6},
}
QUICK = {"default", "plain, independent rows"}  # whose runs other tests share


@cache
def run_with(kernel_class, label):
    """A run of 1,000 draws, made once."""
    settings = dict(SETTINGS[label])
    if kernel_class in (SGLD, SGRLD, SGHMC) and "step_size" in settings:
        settings["step_size"] /= 3.0
    return run(kernel_class(survey, **settings))


def true_bias(mcmc):
    """Shift and inflation of a run on the survey, whose posterior is known."""
    posterior = survey_posterior(DATA)
    samples = mcmc.get_samples()
    found = {}
    for site in ("beta", "rate"):
        draws = np.asarray(samples[site], np.float64)
        mean, sd = posterior[site]
        found[site] = (draws.mean(0) - mean) / sd, draws.std(0) / sd - 1.0
    return found
