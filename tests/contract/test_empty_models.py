"""Models that leave nothing to move: they run, and give what NUTS gives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.handlers import condition
from numpyro.infer import MCMC, NUTS

from numpyro_sgmcmc import SGHMCSplit, bias_report, warmup_report
from tests.contract.kernels import each_kernel, quietly

DATA = np.arange(6.0, dtype=np.float32)


def nothing(y):
    """No statement at all."""


def deterministic(y):
    numpyro.deterministic("twice", 2.0 * y.sum())
    numpyro.deterministic("both", jnp.array([1.0, 2.0]))


def without_values(y):
    numpyro.sample("none", dist.Normal(0, 1).expand([0]))
    numpyro.sample("pairs", dist.Normal(0, 1).expand([2, 0]))


def single_point(y):
    """A simplex of one corner has no free coordinate."""
    share = numpyro.sample("share", dist.Dirichlet(jnp.ones(1)).expand([3]))
    numpyro.sample("y", dist.Normal(share[0, 0], 1), obs=y)


def all_observed(y):
    with numpyro.plate("rows", len(y), subsample_size=3) as i:
        numpyro.sample("y", dist.Normal(0, 1), obs=y[i])


def level(y):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y), subsample_size=3) as i:
        numpyro.sample("y", dist.Normal(mean, 1), obs=y[i])


CONDITIONED = condition(level, {"mean": 1.0})

MODELS = [nothing, deterministic, without_values, single_point, all_observed, CONDITIONED]


def draws(kernel, **settings):
    """The draws, their shapes by site with the chains apart, and the fields."""
    mcmc = quietly(kernel, num_warmup=2, num_samples=3, **settings)
    mcmc.run(jax.random.key(0), DATA)
    return mcmc.get_samples(group_by_chain=True)


@pytest.mark.parametrize("model", MODELS)
def test_as_nuts(model):
    found = draws(SGHMCSplit(model))
    expected = draws(NUTS(model)) if model not in (all_observed, CONDITIONED) else {}
    assert set(found) == set(expected)
    for name, x in expected.items():
        assert found[name].shape == x.shape
        np.testing.assert_array_equal(found[name], x)


@pytest.mark.parametrize("chain_method", ["vectorized", "sequential", jax.vmap])
def test_chains(chain_method):
    found = draws(SGHMCSplit(deterministic), num_chains=2, chain_method=chain_method)
    assert {k: x.shape for k, x in found.items()} == {"twice": (2, 3), "both": (2, 3, 2)}


def test_a_summary_of_nothing(capsys):
    mcmc = quietly(SGHMCSplit(nothing))
    mcmc.run(jax.random.key(0), DATA)
    mcmc.print_summary()
    assert "Number of divergences: 0" in capsys.readouterr().out


@each_kernel
def test_every_kernel(kernel_class):
    mcmc = MCMC(kernel_class(without_values), num_warmup=1, num_samples=2)
    mcmc.run(jax.random.key(0), DATA, extra_fields=("diverging", "num_steps"))
    assert mcmc.get_samples()["pairs"].shape == (2, 2, 0)
    assert not mcmc.get_extra_fields()["diverging"].any()
    for told in (bias_report, warmup_report):
        with pytest.raises(ValueError, match="no latent site"):
            told(mcmc)


def test_sites_of_size_zero_beside_others():
    def model(y):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        numpyro.sample("none", dist.Normal(mean, 1), sample_shape=(0,))
        with numpyro.plate("rows", len(y), subsample_size=3) as i:
            numpyro.sample("y", dist.Normal(mean, 1), obs=y[i])

    found = draws(SGHMCSplit(model), num_chains=2, chain_method="vectorized")
    assert {k: x.shape for k, x in found.items()} == {"mean": (2, 3), "none": (2, 3, 0)}
