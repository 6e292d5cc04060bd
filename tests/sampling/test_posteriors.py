"""Posteriors of eight models with default arguments, compared with long NUTS runs."""

import json

import jax
import numpy as np
import pytest
from numpyro.diagnostics import split_gelman_rubin
from numpyro.infer import MCMC

from numpyro_sgmcmc import SGHMC, SGLD, SGMGT, SGNHT, SGRHMC, SGRLD, SHMC, SGHMCSplit, SGLaplaceHMC
from tests.contract.kernels import LangevinRecipe
from tests.sampling.models import MODELS
from tests.sampling.references import FILE, compute_violations, fingerprint, summarise

pytestmark = pytest.mark.usefixtures("optimised")

REFERENCES = json.loads(FILE.read_text())


def find_violations(name, args, samples):
    """Return for each site by how much errors of means and log SDs exceed the tolerance."""
    reference = REFERENCES[name]
    assert reference["data"] == fingerprint(args), f"{FILE.name} belongs to other data"
    return compute_violations(summarise(samples), reference["sites"])


def run(kernel, args, num_samples=1500, batch_size=100):
    mcmc = MCMC(
        kernel,
        num_warmup=500,
        num_samples=num_samples,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(7), *args, batch_size=batch_size)
    return mcmc


# Kernels with Euler's method take many short steps: they run on two models.
SIMPLEST = ["logistic, columns correlated at 0.95", "linear with unknown scale"]
CASES = [
    (kernel_class, name)
    for kernel_classes, names in (
        ((SGHMCSplit, SHMC, SGNHT, SGMGT, SGLaplaceHMC, SGRHMC), MODELS),
        ((SGHMC, SGLD, SGRLD, LangevinRecipe), SIMPLEST),
    )
    for kernel_class in kernel_classes
    for name in names
]


@pytest.mark.slow
@pytest.mark.parametrize(("kernel_class", "name"), CASES)
def test_kernel_with_default_arguments_samples_the_posterior(kernel_class, name):
    model, args = MODELS[name]()
    mcmc = run(kernel_class(model), args)
    samples = mcmc.get_samples(group_by_chain=True)
    for site, violation in find_violations(name, args, samples).items():
        assert max(violation.values()) <= 0, (site, violation)
        assert np.max(split_gelman_rubin(np.asarray(samples[site]))) < 1.01, site
    assert not mcmc.get_extra_fields()["diverging"].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel_class", "settings", "batch_size"),
    [
        (SGNHT, {}, 100),
        (SGHMCSplit, {"noise_compensation": True}, 1000),
        (SGLD, {"noise_compensation": True}, 1000),
    ],
)
def test_thermostat_or_compensation_removes_bias_by_gradient_noise(
    kernel_class, settings, batch_size
):
    """Without either the same step size would inflate the SDs."""
    name = "logistic"
    model, args = MODELS[name]()
    mcmc = run(
        kernel_class(model, gradient_estimator="minibatch", **settings), args, 1000, batch_size
    )
    samples = mcmc.get_samples(group_by_chain=True)
    for site, violation in find_violations(name, args, samples).items():
        assert max(violation.values()) <= 0, (site, violation)
    same = {"step_size": float(mcmc.last_state.adapt_state.step_size[0]), "subsampling": "iid"}
    steps = int(mcmc.last_state.num_steps[0])
    other = SGHMCSplit if kernel_class is SGNHT else kernel_class
    without = run(
        other(model, gradient_estimator="minibatch", num_steps=steps, **same),
        args,
        1000,
        batch_size,
    ).get_samples(group_by_chain=True)
    assert find_violations(name, args, without)["beta"]["sd"] > 0


@pytest.mark.slow
def test_step_size_too_large_for_gradient_noise_violates_the_tolerance():
    name = "logistic"
    model, args = MODELS[name]()
    kernel = SGHMCSplit(
        model, gradient_estimator="minibatch", subsampling="iid", step_size=0.03, num_steps=50
    )
    samples = run(kernel, args).get_samples(group_by_chain=True)
    assert find_violations(name, args, samples)["beta"]["sd"] > 0
