"""A finer run beside a run: what halving and doubling do is seen, and nothing where nothing is.

And what a run's draws cost.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import NUTS

from numpyro_sgmcmc import SHMC, SGHMCSplit, bias_report
from numpyro_sgmcmc.diagnostics import compare_with_finer, ess_per_gradient
from tests.contract.kernels import BATCH, quietly, survey, survey_data

DATA = survey_data()
pytestmark = pytest.mark.filterwarnings("ignore:step_size=0.4 is predicted")


def run(num_chains=2, **settings):
    kernel = SGHMCSplit(survey, **settings)
    mcmc = quietly(kernel, num_samples=2000, num_chains=num_chains, chain_method="vectorized")
    mcmc.run(jax.random.key(0), *DATA, batch_size=BATCH)
    return mcmc


@pytest.fixture(scope="module")
def noisy():
    return run(gradient_estimator="minibatch", subsampling="iid", step_size=0.4)


@pytest.mark.parametrize("change", ["step", pytest.param("batch", marks=pytest.mark.slow)])
def test_half_the_noise_is_seen(noisy, change):
    """Either halves the excess of the variance."""
    found = compare_with_finer(noisy, jax.random.key(1), change)
    assert found.names == ["beta[0]", "beta[1]", "rate"]
    assert found.is_visible
    coarse = (1.0 + bias_report(noisy).stein_estimates.sd_inflation.value) ** 2 - 1.0
    ratio = (1.0 + coarse) / (1.0 + coarse / 2.0)
    expected = np.sqrt(ratio) - 1.0
    assert (np.abs(found.sd_inflation.value - expected) < 4 * found.sd_inflation.error + 0.03).all()
    said = (1.0 + bias_report(found.finer_run).stein_estimates.sd_inflation.value) ** 2 - 1.0
    np.testing.assert_allclose(said, coarse / 2.0, rtol=0.25)
    steps = {"step": 2, "batch": 1}[change]
    assert (found.finer_run.last_state.num_steps == steps * noisy.last_state.num_steps).all()


@pytest.mark.slow
def test_a_right_run_stays_as_it_is():
    mcmc = run(num_chains=1)
    assert not compare_with_finer(mcmc, jax.random.key(1)).is_visible
    assert not compare_with_finer(mcmc, jax.random.key(1), "batch").is_visible


def test_effective_draws_for_each_gradient(noisy):
    """The same number from the draws by hand; MT3 takes three gradients a step."""
    steps = int(noisy.last_state.num_steps[0])
    found = ess_per_gradient(noisy)
    draws = noisy.get_samples(group_by_chain=True)
    assert set(found) == {"beta", "rate"}, "the latent sites"
    for site in found:
        ess = effective_sample_size(np.asarray(draws[site]))
        np.testing.assert_allclose(found[site], ess / (2 * 2000 * steps))
    mcmc = quietly(
        SHMC(
            potential_fn=lambda q: jnp.square(q).sum(), integrator="mt3", step_size=0.5, num_steps=4
        ),
        num_samples=300,
        thinning=3,
    )
    mcmc.run(jax.random.key(0), init_params=jnp.zeros(2))
    ess = effective_sample_size(np.asarray(mcmc.get_samples())[None])
    np.testing.assert_allclose(ess_per_gradient(mcmc)["z"], ess / (300 * 4 * 3))
    with pytest.raises(ValueError, match="ran NUTS"):
        ess_per_gradient(quietly(NUTS(survey)))


def test_what_cannot_be_refined_is_refused(noisy):
    key = jax.random.key(0)
    with pytest.raises(ValueError, match="`change` is 'rows'"):
        compare_with_finer(noisy, key, "rows")
    with pytest.raises(ValueError, match="ran NUTS"):
        compare_with_finer(quietly(NUTS(survey)), key)
    kernel = SGHMCSplit(potential_fn=lambda q: jnp.square(q).sum(), step_size=lambda n: 0.1)
    mcmc = quietly(kernel)
    mcmc.run(key, init_params=jnp.zeros(2))
    with pytest.raises(ValueError, match="cannot halve a schedule"):
        compare_with_finer(mcmc, key)
    with pytest.raises(ValueError, match="there is no larger one"):
        compare_with_finer(mcmc, key, "batch")
