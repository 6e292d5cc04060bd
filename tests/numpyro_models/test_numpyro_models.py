"""Posteriors of models of the kinds in NumPyro's documentation, beside NUTS."""

import warnings

import jax
import pytest
from numpyro.infer import MCMC, NUTS

from numpyro_sgmcmc import SGHMCSplit
from numpyro_sgmcmc.errors import InvalidModelError, SGMCMCWarning
from tests.numpyro_models.models import EXAMPLES, SEPARATE
from tests.sampling.references import compute_violations, summarise

pytestmark = pytest.mark.usefixtures("optimised")


def run(kernel, example, batch_size, **settings):
    mcmc = MCMC(kernel, progress_bar=False, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SGMCMCWarning)
        mcmc.run(jax.random.key(3), *example.args, batch_size=batch_size)
    draws = mcmc.get_samples(group_by_chain=True)
    return summarise({k: x for k, x in draws.items() if k in (example.sites or draws)})


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_posterior_is_that_of_nuts(name):
    example = EXAMPLES[name]
    chains = {"num_chains": 4, "chain_method": "vectorized"}
    actual = run(
        SGHMCSplit(example.model),
        example,
        example.batch_size,
        num_warmup=500,
        num_samples=1500,
        **chains,
    )
    reference = run(NUTS(example.model), example, None, num_warmup=500, num_samples=1000, **chains)
    violations = compute_violations(actual, reference)
    assert all(x <= 0 for site in violations.values() for x in site.values()), violations


def test_rows_with_separate_parameters_are_an_error():
    kernel = SGHMCSplit(SEPARATE.model)
    with pytest.raises(InvalidModelError) as caught:
        kernel.init(jax.random.key(0), 1, None, SEPARATE.args, {"batch_size": SEPARATE.batch_size})
    assert caught.value.entry == "only-local-latents"
