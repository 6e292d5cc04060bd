"""A step size of the user's: kept, unless a chain's warm-up shows that no chain can go by it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_sgmcmc import SGHMCSplit
from tests.contract.kernels import assert_posterior, quietly

NUM = 400


def run(step_size, num_chains=1, **options):
    """A normal of sd 0.1 in units of one: a step of 0.03 serves, one of 10 leaves all bounds."""
    kernel = SGHMCSplit(
        potential_fn=lambda q: 50.0 * jnp.square(q).sum(),
        step_size=step_size,
        num_steps=40,
        gradient_estimator="minibatch",
        adapt_mass_matrix=False,
        **options,
    )
    mcmc = quietly(
        kernel, num_warmup=NUM, num_samples=NUM, num_chains=num_chains, chain_method="vectorized"
    )
    starts = jnp.ones((num_chains, 2)) if num_chains > 1 else jnp.ones(2)
    fields = ("diverging", "adapt_state.step_size")
    mcmc.warmup(jax.random.key(1), init_params=starts, extra_fields=fields, collect_warmup=True)
    in_warmup = mcmc.get_extra_fields(group_by_chain=True)
    mcmc.run(jax.random.key(2), init_params=starts, extra_fields=fields)
    return mcmc, in_warmup, mcmc.get_extra_fields(group_by_chain=True)


def test_a_step_that_is_far_too_long_is_shortened_in_warmup_alone():
    mcmc, in_warmup, after = run(10.0, num_chains=2)
    assert 0 < in_warmup["diverging"].sum() < 20
    assert not after["diverging"].any()
    steps = after["adapt_state.step_size"]
    assert (steps < 1.0).all()
    assert (steps == steps[:, :1]).all()
    # Within a step of the longest stable one the scheme's own error is large.
    assert_posterior(mcmc.get_samples(True), 0.0, 0.1, sd_bias=0.6)


@pytest.mark.parametrize("step_size", [10.0, 0.03])
def test_a_step_that_is_not_to_be_adapted_is_kept(step_size):
    _, in_warmup, after = run(step_size, adapt_step_size=False)
    assert (in_warmup["adapt_state.step_size"] == np.float32(step_size)).all()
    assert (after["adapt_state.step_size"] == np.float32(step_size)).all()
    assert bool(after["diverging"].any()) is (step_size > 1.0)


def test_a_step_that_serves_is_kept():
    _, in_warmup, after = run(0.03)
    assert (in_warmup["adapt_state.step_size"] == np.float32(0.03)).all()
    assert not after["diverging"].any()
