"""A step size of the user's: kept, unless the chain diverges with it in warm-up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_sgmcmc import SGHMCSplit
from tests.contract.kernels import assert_posterior, quietly

NUM_ITERATIONS = 400


def run(step_size, num_chains=1, **options):
    """Sample a normal of SD 0.1 without preconditioner: step size 10 diverges, 0.03 does not."""
    kernel = SGHMCSplit(
        potential_fn=lambda q: 50.0 * jnp.square(q).sum(),
        step_size=step_size,
        num_steps=40,
        gradient_estimator="minibatch",
        adapt_mass_matrix=False,
        **options,
    )
    mcmc = quietly(
        kernel,
        num_warmup=NUM_ITERATIONS,
        num_samples=NUM_ITERATIONS,
        num_chains=num_chains,
        chain_method="vectorized",
    )
    init_params = jnp.ones((num_chains, 2)) if num_chains > 1 else jnp.ones(2)
    fields = ("diverging", "adapt_state.step_size")
    mcmc.warmup(
        jax.random.key(1), init_params=init_params, extra_fields=fields, collect_warmup=True
    )
    in_warmup = mcmc.get_extra_fields(group_by_chain=True)
    mcmc.run(jax.random.key(2), init_params=init_params, extra_fields=fields)
    return mcmc, in_warmup, mcmc.get_extra_fields(group_by_chain=True)


def test_step_size_that_diverges_is_shortened_in_warmup_only():
    mcmc, in_warmup, after = run(10.0, num_chains=2)
    assert 0 < in_warmup["diverging"].sum() < 20
    assert not after["diverging"].any()
    steps = after["adapt_state.step_size"]
    assert (steps < 1.0).all()
    assert (steps == steps[:, :1]).all()
    # Near the stability limit the discretisation error is large.
    assert_posterior(mcmc.get_samples(True), 0.0, 0.1, sd_bias=0.6)


@pytest.mark.parametrize("step_size", [10.0, 0.03])
def test_user_step_size_is_kept_without_shrinking(step_size):
    _, in_warmup, after = run(step_size, shrink_step_size_on_divergence=False)
    assert (in_warmup["adapt_state.step_size"] == np.float32(step_size)).all()
    assert (after["adapt_state.step_size"] == np.float32(step_size)).all()
    assert bool(after["diverging"].any()) is (step_size > 1.0)


def test_step_size_without_divergences_is_kept():
    _, in_warmup, after = run(0.03)
    assert (in_warmup["adapt_state.step_size"] == np.float32(0.03)).all()
    assert not after["diverging"].any()
