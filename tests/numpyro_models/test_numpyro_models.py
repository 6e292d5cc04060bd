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
    chains = {"num_chains": 4, "chain_method": "vectorized"}
    mcmc = MCMC(kernel, progress_bar=False, **chains, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SGMCMCWarning)
        mcmc.run(jax.random.key(3), *example.args, batch_size=batch_size)
    draws = mcmc.get_samples(group_by_chain=True)
    return summarise({k: x for k, x in draws.items() if k in (example.sites or draws)})


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_posterior_is_that_of_nuts(name):
    example = EXAMPLES[name]
    kernel = SGHMCSplit(example.model)
    actual = run(kernel, example, example.batch_size, num_warmup=200, num_samples=1000)
    # The kernel's model on all rows, because NUTS cannot index NumPy arrays by a plate's indices.
    reference = run(NUTS(kernel.model), example, None, num_warmup=400, num_samples=700)
    violations = compute_violations(actual, reference)
    assert all(x <= 0 for site in violations.values() for x in site.values()), violations


def test_rows_with_separate_parameters_are_an_error():
    kernel = SGHMCSplit(SEPARATE.model)
    with pytest.raises(InvalidModelError) as caught:
        kernel.init(jax.random.key(0), 1, None, SEPARATE.args, {"batch_size": SEPARATE.batch_size})
    assert caught.value.entry == "only-local-latents"
