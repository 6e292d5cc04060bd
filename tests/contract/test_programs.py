"""The NumPyro contract: compilations, float64, and potential functions."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, NUTS, init_to_uniform

from numpyro_sgmcmc import SGHMCSplit
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.model.subsampled import get_model_potential
from tests.contract.kernels import (
    assert_posterior,
    num_compilations,
    one_kernel,
    quietly,
)

# Compilations


def counts(y: Any, batch_size: int | None = None) -> None:
    rate = numpyro.sample("rate", dist.Gamma(2, 1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Poisson(rate), obs=y[i])


def test_model_with_a_debug_callback_is_read():
    """Its equation in the jaxpr has no outputs."""

    def printing(y: Any, batch_size: int) -> None:
        rate = numpyro.sample("rate", dist.Gamma(2, 1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            jax.debug.callback(lambda indices: None, i)
            numpyro.sample("y", dist.Poisson(rate), obs=y[i])

    arguments = Arguments((np.ones(20),), {"batch_size": 5})
    assert get_model_potential(printing, arguments, init_to_uniform).plates[0].size == 20


@pytest.mark.slow
@pytest.mark.parametrize("has_bar", [True, False])
def test_second_run_compiles_no_more_than_with_nuts(progress_bar, has_bar):
    """With a progress bar on the same data, without one on other data."""
    rng = np.random.default_rng(0)
    first, other = (jnp.asarray(rng.poisson(3.0, 200)) for _ in range(2))

    def compilations(kernel, **kwargs):
        mcmc = MCMC(kernel, num_warmup=5, num_samples=5, progress_bar=has_bar)

        def run(seed, y):
            mcmc.run(jax.random.key(seed), y, **kwargs)
            return mcmc.get_samples()

        return [num_compilations(partial(run, seed, y)) for seed, y in enumerate(data)][1:]

    data = (first, first) if has_bar else (first, other)
    assert compilations(SGHMCSplit(counts), batch_size=20) <= compilations(NUTS(counts))


# Float64


@pytest.mark.slow
def test_run_in_float64_has_the_exact_posterior(x64):
    y = np.random.default_rng(0).poisson(3.0, 200)
    mcmc = quietly(SGHMCSplit(counts), num_samples=300)
    mcmc.run(jax.random.key(0), y, batch_size=20)
    draws = mcmc.get_samples(group_by_chain=True)["rate"]
    assert draws.dtype == jnp.float64
    for x in jax.tree.leaves(mcmc.last_state._replace(rng_key=None)):
        assert x.dtype == jnp.float64 or not jnp.issubdtype(x.dtype, jnp.floating)
    shape, rate = 2 + y.sum(), 1 + len(y)
    assert_posterior(draws, shape / rate, np.sqrt(shape) / rate)


# Potential functions


def tree_potential(z: Any) -> Any:
    """Normal with SD 2 and mean 1, and with SD 0.1 and mean 0."""
    a, b = z["a"], z["b"][0]["c"]
    return jnp.sum(jnp.square((a - 1) / 2)) / 2 + jnp.sum(jnp.square(b / 0.1)) / 2


def test_potential_function_of_a_nested_pytree_has_the_exact_posterior():
    kernel = SGHMCSplit(potential_fn=tree_potential)
    assert kernel.model is None
    mcmc = quietly(kernel, num_samples=1000, num_chains=2, chain_method="vectorized")
    init_params = {"a": np.zeros((2, 3)), "b": ({"c": np.zeros((2, 1, 2))},)}
    mcmc.run(jax.random.key(0), init_params=init_params)
    draws = mcmc.get_samples(group_by_chain=True)
    a, b = draws["a"], draws["b"][0]["c"]
    assert a.shape == (2, 1000, 3)
    assert b.shape == (2, 1000, 1, 2)
    assert_posterior(a, np.full(3, 1.0), np.full(3, 2.0))
    assert_posterior(b, np.zeros((1, 2)), np.full((1, 2), 0.1))


def cliff(z: Any) -> Any:
    """A standard normal whose gradient is NaN where a coordinate exceeds 2.5."""
    return jnp.sum(jnp.square(z) / 2 + 1e-6 * jnp.sqrt(2.5 - z))


@one_kernel
def test_chain_continues_after_divergences(kernel_class, capsys):
    """The potential is a function of an array; one chain starts at given values."""
    mcmc = quietly(kernel_class(potential_fn=cliff), num_samples=2000)
    mcmc.run(jax.random.key(0), init_params=jnp.zeros(2))
    draws = np.asarray(mcmc.get_samples())
    diverging = np.asarray(mcmc.get_extra_fields()["diverging"])
    assert draws.shape == (2000, 2)
    assert np.isfinite(draws).all()
    assert 0 < diverging.sum() < 1000
    assert draws.max() < 3
    # The chain neither stays beside the cliff nor avoids the region before it.
    is_new = (np.diff(draws, axis=0) != 0).all(1)
    assert is_new[~diverging[1:]].all()
    assert is_new.sum() > 1000
    assert (np.diff(np.flatnonzero(is_new)) < 100).all()
    assert (np.abs(draws.mean(0)) < 0.3).all()
    assert (draws.std(0) > 0.8).all()
    mcmc.print_summary()
    assert f"Number of divergences: {diverging.sum()}" in capsys.readouterr().out
