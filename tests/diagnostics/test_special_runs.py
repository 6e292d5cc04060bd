"""A comparison with a finer run shows the bias that halving the step or the noise removes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_sgmcmc import SGHMCSplit, bias_report
from numpyro_sgmcmc.diagnostics import compare_with_finer
from tests.contract.kernels import BATCH, quietly, survey
from tests.diagnostics.survey_runs import DATA

pytestmark = pytest.mark.filterwarnings("ignore::numpyro_sgmcmc.errors.SGMCMCWarning")


def run(num_chains=2, **settings):
    kernel = SGHMCSplit(survey, **settings)
    mcmc = quietly(kernel, num_samples=1000, num_chains=num_chains, chain_method="vectorized")
    mcmc.run(jax.random.key(0), *DATA, batch_size=BATCH)
    return mcmc


@pytest.fixture(scope="module")
def coarse():
    return run(gradient_estimator="minibatch", subsampling="iid", step_size=0.4)


def variance_inflation(mcmc):
    return (1.0 + bias_report(mcmc).sd_inflation.value) ** 2 - 1.0


@pytest.mark.slow
@pytest.mark.parametrize("change", ["step", pytest.param("batch", marks=pytest.mark.slow)])
def test_finer_run_has_half_the_variance_inflation(coarse, change):
    comparison = compare_with_finer(coarse, jax.random.key(1), change)
    assert comparison.names == ["beta[0]", "beta[1]", "rate"]
    assert comparison.is_visible
    inflation = variance_inflation(coarse)
    expected = np.sqrt((1.0 + inflation) / (1.0 + inflation / 2.0)) - 1.0
    error = comparison.sd_inflation.error
    assert (np.abs(comparison.sd_inflation.value - expected) < 4 * error + 0.03).all()
    np.testing.assert_allclose(variance_inflation(comparison.finer_run), inflation / 2.0, rtol=0.25)
    factor = {"step": 2, "batch": 1}[change]
    assert (comparison.finer_run.last_state.num_steps == factor * coarse.last_state.num_steps).all()


@pytest.mark.slow
@pytest.mark.parametrize("change", ["step", "batch"])
def test_run_without_bias_does_not_differ_from_a_finer_one(change):
    mcmc = run(num_chains=1)
    assert not compare_with_finer(mcmc, jax.random.key(1), change).is_visible


def test_run_that_cannot_be_refined_raises():
    key = jax.random.key(0)
    kernel = SGHMCSplit(potential_fn=lambda q: jnp.square(q).sum(), step_size=lambda n: 0.1)
    mcmc = quietly(kernel)
    mcmc.run(key, init_params=jnp.zeros(2))
    for change, match in (("step", "step_size"), ("batch", "subsample_size"), ("rows", "change")):
        with pytest.raises(ValueError, match=match):
            compare_with_finer(mcmc, key, change)
