"""Whole posteriors with default arguments against long NUTS runs."""

import json

import jax
import numpy as np
import pytest
from numpyro.diagnostics import split_gelman_rubin
from numpyro.infer import MCMC

from numpyro_sgmcmc import SGHMC, SGLD, SGMGT, SGNHT, SGRHMC, SGRLD, SHMC, SGHMCSplit, SGLaplaceHMC
from tests.contract.kernels import LangevinRecipe
from tests.sampling.models import MODELS
from tests.sampling.references import FILE, fingerprint, summarise

pytestmark = pytest.mark.usefixtures("optimised")

REFERENCES = json.loads(FILE.read_text())

# The claim: means within 0.1 posterior sd and sds within 10 %, beyond the Monte Carlo error of
# both runs, of which three standard errors are allowed (a model has up to 53 coordinates).
MEAN, SD, Z = 0.1, 0.1, 3.0


def errors(name, args, samples):
    """For each site, how far means and log sds are off beyond what the claim allows."""
    reference = REFERENCES[name]
    assert reference["data"] == fingerprint(args), f"make {FILE.name} anew"
    found = {}
    for site, ours in summarise(samples).items():
        a = {k: np.array(v) for k, v in ours.items()}
        b = {k: np.array(v) for k, v in reference["sites"][site].items()}
        mean = np.abs(a["mean"] - b["mean"]) / b["sd"]
        mean_error = np.sqrt((a["sd"] / b["sd"]) ** 2 / a["ess"] + 1 / b["ess"])
        sd = np.abs(np.log(a["sd"] / b["sd"]))
        sd_error = np.sqrt(0.5 / a["ess_sd"] + 0.5 / b["ess_sd"])
        found[site] = {
            "mean": float((mean - MEAN - Z * mean_error).max()),
            "sd": float((sd - np.log1p(SD) - Z * sd_error).max()),
        }
    return found


def run(kernel, args, num_samples=1500, num_rows=100):
    mcmc = MCMC(
        kernel,
        num_warmup=500,
        num_samples=num_samples,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(7), *args, batch_size=num_rows)
    return mcmc


# Those by Euler schemes, and the recipe, which is one, take many short steps.
SIMPLEST = ["logistic, columns correlated at 0.95", "linear with unknown scale"]
CASES = [
    (kernel, name)
    for kernels, names in (
        ((SGHMCSplit, SHMC, SGNHT, SGMGT, SGLaplaceHMC, SGRHMC), MODELS),
        ((SGHMC, SGLD, SGRLD, LangevinRecipe), SIMPLEST),
    )
    for kernel in kernels
    for name in names
]


# Those with an exact answer are quick: see the contract, and large posteriors.
@pytest.mark.slow
@pytest.mark.parametrize(("kernel_class", "name"), CASES)
def test_posterior_is_right_with_default_arguments(kernel_class, name):
    model, args = MODELS[name]()
    mcmc = run(kernel_class(model), args)
    samples = mcmc.get_samples(group_by_chain=True)
    for site, error in errors(name, args, samples).items():
        assert max(error.values()) <= 0, (site, error)
        assert np.max(split_gelman_rubin(np.asarray(samples[site]))) < 1.01, site
    assert not mcmc.get_extra_fields()["diverging"].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel_class", "settings", "num_rows"),
    [
        (SGNHT, {}, 100),
        (SGHMCSplit, {"noise_compensation": True}, 1000),
        (SGLD, {"noise_compensation": True}, 1000),
    ],
)
def test_noise_of_plain_gradients_is_taken_away(kernel_class, settings, num_rows):
    """By a thermostat, or by compensation: with neither these steps would be too long."""
    name = "logistic"
    model, args = MODELS[name]()
    mcmc = run(
        kernel_class(model, gradient_estimator="minibatch", **settings), args, 1000, num_rows
    )
    for site, error in errors(name, args, mcmc.get_samples(group_by_chain=True)).items():
        assert max(error.values()) <= 0, (site, error)
    same = {"step_size": float(mcmc.last_state.adapt_state.step_size[0]), "subsampling": "iid"}
    steps = int(mcmc.last_state.num_steps[0])
    other = SGHMCSplit if kernel_class is SGNHT else kernel_class
    without = run(
        other(model, gradient_estimator="minibatch", num_steps=steps, **same), args, 1000, num_rows
    ).get_samples(group_by_chain=True)
    assert errors(name, args, without)["beta"]["sd"] > 0


@pytest.mark.slow
def test_wrong_posteriors_are_seen():
    """Plain gradients at a step size that their noise forbids."""
    name = "logistic"
    model, args = MODELS[name]()
    kernel = SGHMCSplit(
        model, gradient_estimator="minibatch", subsampling="iid", step_size=0.03, num_steps=50
    )
    found = errors(name, args, run(kernel, args).get_samples(group_by_chain=True))
    assert found["beta"]["sd"] > 0
