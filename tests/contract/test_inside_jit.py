"""A whole run inside of jit, as used to combine the posteriors of parts of the data."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_sgmcmc import SGHMCSplit
from tests.contract.kernels import (
    BATCH,
    assert_posterior,
    ignore_donation,
    quietly,
    survey,
    survey_data,
    survey_posterior,
)

FIXED = {
    "num_steps": 5,
    "gradient_estimator": "minibatch",
    "subsampling": "iid",
    "inverse_mass_matrix": np.full(3, 1 / 400),
}


def run(key, step_size, num_chains=2, chain_method="vectorized", **options):
    """Return the draws by chain, and whether each diverged."""
    kernel = SGHMCSplit(survey, step_size=step_size, **options)
    mcmc = quietly(kernel, num_chains=num_chains, chain_method=chain_method, num_samples=200)
    mcmc.run(key, *survey_data(), batch_size=BATCH, extra_fields=("diverging",))
    return mcmc.get_samples(group_by_chain=True), mcmc.get_extra_fields()["diverging"]


@pytest.mark.slow
@pytest.mark.parametrize("chain_method", ["vectorized", "sequential"])
def test_traced_step_size_gives_the_draws_of_its_value(chain_method):
    key = jax.random.key(0)
    traced, diverging = jax.jit(lambda k, h: run(k, h, chain_method=chain_method, **FIXED))(
        key, 0.1
    )
    expected, _ = run(key, 0.1, chain_method=chain_method, **FIXED)
    assert not diverging.any()
    for name, draws in expected.items():
        np.testing.assert_allclose(traced[name], draws, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_warmup_with_a_traced_step_size_has_the_exact_posterior():
    draws, _ = jax.jit(lambda k, h: run(k, h, chain_method="vectorized"))(jax.random.key(1), 0.3)
    for name, (mean, sd) in survey_posterior(survey_data()).items():
        assert_posterior(draws[name], mean, sd)


@ignore_donation
@pytest.mark.slow
def test_vmap_over_step_sizes_runs_each_of_them():
    sizes = jnp.array([0.1, 0.2, -1.0])
    draws, diverging = jax.vmap(lambda h: run(jax.random.key(0), h, 1, **FIXED))(sizes)
    for k in range(2):
        expected, _ = run(jax.random.key(0), float(sizes[k]), 1, **FIXED)
        np.testing.assert_allclose(draws["beta"][k], expected["beta"], rtol=1e-3, atol=1e-3)
    assert not diverging[:2].any()
    assert diverging[2].all()


def test_traced_step_size_that_is_no_scalar_raises():
    with pytest.raises(ValueError, match=r"`step_size`.*shape \(2,\)"):
        jax.jit(lambda h: run(jax.random.key(0), h))(jnp.ones(2))


def test_traced_data_raise():
    def fit(X):
        mcmc = quietly(SGHMCSplit(survey))
        mcmc.run(jax.random.key(0), X, *survey_data()[1:], batch_size=BATCH)
        return mcmc.get_samples()

    with pytest.raises(ValueError, match=r"arguments.*traced"):
        jax.jit(fit)(survey_data().X)
