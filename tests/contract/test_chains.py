"""The NumPyro contract: chain methods, random keys, continued and pickled runs."""

from __future__ import annotations

import pickle
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC

from numpyro_sgmcmc import SGHMCSplit
from tests.contract.kernels import (
    BATCH,
    as_jax,
    assert_posterior,
    ignore_donation,
    quietly,
    survey,
    survey_data,
    survey_posterior,
)


def test_sequential_chains_equal_vectorized_chains(fit):
    """The run also excludes a site, and has JAX arrays in place of NumPy's."""
    mcmc = quietly(fit.kernel, num_samples=100, thinning=2, num_chains=2, chain_method="sequential")
    data = as_jax(fit.data)
    mcmc.run(jax.random.key(1), *data, batch_size=BATCH, extra_fields=("~z.rate",))
    draws = mcmc.get_samples(group_by_chain=True)
    assert set(draws) == {"beta", "contrast"}
    scale = survey_posterior(fit.data)["beta"][1]
    np.testing.assert_allclose(
        draws["beta"] / scale, fit.draws["beta"][:, :50] / scale, rtol=0, atol=0.02
    )


@pytest.mark.slow
@ignore_donation
def test_callable_chain_method_runs_the_same_chains(fit):
    mcmc = quietly(fit.kernel, num_samples=100, thinning=2, num_chains=2, chain_method=jax.vmap)
    mcmc.run(jax.random.key(1), *fit.data, batch_size=BATCH)
    scale = survey_posterior(fit.data)["beta"][1]
    np.testing.assert_allclose(
        mcmc.get_samples(group_by_chain=True)["beta"] / scale,
        fit.draws["beta"][:, :50] / scale,
        rtol=0,
        atol=0.02,
    )


def test_continued_run_equals_an_uninterrupted_one(fit, progress_bar):
    """A warm-up with its draws, a run from its state, and a run from the last state."""
    rows = {"batch_size": BATCH}
    mcmc = quietly(fit.kernel, num_warmup=30, num_samples=30, progress_bar=True)
    mcmc.warmup(jax.random.key(5), *fit.data, **rows, collect_warmup=True)
    assert mcmc.get_samples()["beta"].shape == (30, 2)
    state = mcmc.post_warmup_state
    assert int(state.i) == 30
    mcmc.run(state.rng_key, *fit.data, **rows)
    assert int(mcmc.last_state.i) == 60
    first = np.asarray(mcmc.get_samples()["beta"])
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(mcmc.post_warmup_state.rng_key, *fit.data, **rows)
    second = np.asarray(mcmc.get_samples()["beta"])

    mcmc.num_samples = 60
    mcmc.post_warmup_state = state
    mcmc.run(state.rng_key, *fit.data, **rows)
    uninterrupted = np.asarray(mcmc.get_samples()["beta"])
    np.testing.assert_allclose(np.concatenate([first, second]), uninterrupted, rtol=1e-4)


@pytest.mark.slow
def test_pickled_kernel_continues_a_pickled_state(fit):
    kernel, mcmc, state = pickle.loads(pickle.dumps((fit.kernel, fit.mcmc, fit.mcmc.last_state)))
    assert kernel.model == fit.kernel.model
    np.testing.assert_array_equal(mcmc.get_samples()["beta"], fit.mcmc.get_samples()["beta"])
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(fit.mcmc.last_state), strict=True):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)
    draws = []
    for sampler in (kernel, fit.kernel):
        chains = quietly(sampler, num_samples=40, num_chains=2, chain_method="vectorized")
        chains.post_warmup_state = state
        chains.run(state.rng_key, *fit.data, batch_size=BATCH)
        draws.append(chains.get_samples()["beta"])
    np.testing.assert_allclose(*draws, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(jax.random.PRNGKey(7), marks=pytest.mark.slow),
        pytest.param(jax.random.key(7, impl="rbg"), marks=pytest.mark.slow),
    ],
    ids=["raw", "typed, of another implementation"],
)
def test_random_keys_of_every_kind_sample_the_posterior(fit, key):
    mcmc = quietly(fit.kernel, num_samples=200, num_chains=2, chain_method="vectorized")
    mcmc.run(key, *fit.data, batch_size=BATCH)
    draws = mcmc.get_samples(group_by_chain=True)["beta"]
    assert not np.isclose(draws[0], draws[1]).all(axis=-1).any()
    assert_posterior(draws, *survey_posterior(fit.data)["beta"])


def test_raw_key_initialises_the_same_chain_as_a_typed_key(fit):
    """A raw key of shape (2,) is one key, not a batch of two."""
    states = [
        fit.kernel.init(key, 0, None, tuple(fit.data), {"batch_size": BATCH})
        for key in (jax.random.key(2), jax.random.PRNGKey(2))
    ]
    assert states[0].z["beta"].shape == (2,)
    np.testing.assert_array_equal(states[0].z["beta"], states[1].z["beta"])


def test_run_without_warmup_shows_a_progress_bar(fit, progress_bar, capsys):
    mcmc = MCMC(fit.kernel, num_warmup=0, num_samples=300, progress_bar=True)
    mcmc.run(jax.random.key(4), *fit.data, batch_size=BATCH)
    assert int(mcmc.last_state.i) == 300
    assert "steps of size" in capsys.readouterr().err
    draws = mcmc.get_samples(group_by_chain=True)["beta"][:, 50:]
    assert_posterior(draws, *survey_posterior(fit.data)["beta"])


@pytest.mark.slow  # the steps with other data have a quick test
def test_run_with_jit_model_args_accepts_other_data(progress_bar):
    """NumPyro then traces every argument, so that the batch size cannot be one of them."""
    kernel = SGHMCSplit(partial(survey, batch_size=BATCH))
    mcmc = quietly(kernel, num_samples=150, jit_model_args=True, progress_bar=True)
    for seed in (0, 1):
        data = as_jax(survey_data(seed))
        mcmc.run(jax.random.key(seed), *data)
        draws = mcmc.get_samples(group_by_chain=True)["beta"]
        assert_posterior(draws, *survey_posterior(data)["beta"])


@pytest.mark.slow
def test_run_with_jit_model_args_takes_the_steps_of_each_data_set():
    """Minibatch gradients of data with nine times the variance are nine times as noisy."""

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=100) as i:
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

    kernel = SGHMCSplit(model, gradient_estimator="minibatch")
    mcmc = quietly(kernel, num_warmup=10, num_samples=10, jit_model_args=True)
    y = jnp.asarray(np.random.default_rng(0).standard_normal(1_000), jnp.float32)
    num_steps = []
    for data in (0.2 * y, 0.6 * y):
        mcmc.run(jax.random.key(0), data)
        num_steps.append(kernel.adaptation.num_steps)
        # The weight is the sum of the iteration's step sizes.
        actual = float(mcmc.last_state.weight) / kernel.adaptation.step_size
        assert actual == pytest.approx(num_steps[-1], rel=1e-3)
    assert num_steps[1] > 2 * num_steps[0]
