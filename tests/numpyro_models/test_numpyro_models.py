"""Posteriors of models of the kinds in NumPyro's documentation, beside NUTS."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro import validation_enabled
from numpyro.infer import MCMC, NUTS, init_to_median, init_to_uniform
from numpyro.infer.util import potential_energy

from numpyro_sgmcmc import SGHMCSplit
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.errors import InvalidModelError, SGMCMCWarning
from numpyro_sgmcmc.model.handlers import FullDataModel
from numpyro_sgmcmc.model.subsampled import make_model_potential
from tests.numpyro_models.discrete import EXAMPLES as DISCRETE_EXAMPLES
from tests.numpyro_models.models import EXAMPLES, SEPARATE
from tests.quick import quick_if
from tests.sampling.references import compute_violations, summarise

# Regressions of the same statements as others.
SLOW = {
    "logistic regression",
    "regression on two predictors",
    "adjusted experiment",
    "horseshoe",
    "proportions",
    "matrix factorisation",
}


@pytest.mark.parametrize("name", [quick_if(n not in SLOW, n) for n in EXAMPLES])
def test_gradient_is_that_of_numpyros_potential(name):
    example = EXAMPLES[name]
    arguments = Arguments(example.args, {"batch_size": example.batch_size})
    potential = make_model_potential(example.model, arguments, init_to_uniform)
    q = jnp.linspace(0.2, 0.6, potential.dim)  # all scales are positive
    model = FullDataModel(potential.user_model)

    def numpyros_value(q):
        return potential_energy(model, example.args, {}, potential.unravel(q))

    expected = jax.jit(jax.grad(numpyros_value))(q)
    actual = jax.jit(lambda q: potential.full_gradient(q, arguments))(q)
    np.testing.assert_allclose(actual, expected, atol=2e-4 * np.abs(expected).max())


def run(kernel, example, batch_size, **settings):
    chains = {"num_chains": 4, "chain_method": "vectorized"}
    mcmc = MCMC(kernel, progress_bar=False, **chains, **settings)
    # Prior values may be invalid where no chain ever is.
    with warnings.catch_warnings(record=True) as caught, validation_enabled(False):
        warnings.simplefilter("always", SGMCMCWarning)
        mcmc.run(jax.random.key(3), *example.args, batch_size=batch_size)
    if isinstance(kernel, SGHMCSplit) and example.warning:
        assert any(example.warning in str(warning.message) for warning in caught)
    draws = mcmc.get_samples(group_by_chain=True)
    return summarise({k: x for k, x in draws.items() if k in (example.sites or draws)})


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("name", [*EXAMPLES, *DISCRETE_EXAMPLES])
def test_posterior_is_that_of_nuts(name):
    example = {**EXAMPLES, **DISCRETE_EXAMPLES}[name]
    kernel = SGHMCSplit(example.model)
    actual = run(kernel, example, example.batch_size, num_warmup=200, num_samples=1000)
    # The kernel's model on all rows, because NUTS cannot index NumPy arrays by a plate's indices.
    # At random positions chains of NUTS stay in modes without mass, of permuted states.
    init_strategy = init_to_median if name in DISCRETE_EXAMPLES else init_to_uniform
    nuts = NUTS(kernel.model, init_strategy=init_strategy)
    reference = run(nuts, example, None, num_warmup=400, num_samples=700)
    violations = compute_violations(actual, reference)
    assert all(x <= 0 for site in violations.values() for x in site.values()), violations


def test_rows_with_separate_parameters_are_an_error():
    kernel = SGHMCSplit(SEPARATE.model)
    with pytest.raises(InvalidModelError) as caught:
        kernel.init(jax.random.key(0), 1, None, SEPARATE.args, {"batch_size": SEPARATE.batch_size})
    assert caught.value.entry == "only-local-latents"
