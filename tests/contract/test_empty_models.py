"""Models without continuous latent values: they run, and return what NUTS returns."""

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
from tests.contract.kernels import GIVEN, each_kernel, quietly
from tests.quick import quick_if

DATA = np.arange(6.0, dtype=np.float32)


def empty(y):
    """A model without any site."""


def deterministic(y):
    numpyro.deterministic("twice", 2.0 * y.sum())
    numpyro.deterministic("both", jnp.array([1.0, 2.0]))


def without_values(y):
    numpyro.sample("none", dist.Normal(0, 1).expand([0]))
    numpyro.sample("pairs", dist.Normal(0, 1).expand([2, 0]))


def single_point(y):
    """A simplex with one corner has no free coordinate."""
    share = numpyro.sample("share", dist.Dirichlet(jnp.ones(1)).expand([3]))
    numpyro.sample("y", dist.Normal(share[0, 0], 1), obs=y)


def all_observed(y):
    with numpyro.plate("rows", len(y), subsample_size=3) as i:
        numpyro.sample("y", dist.Normal(0, 1), obs=y[i])


def observed_and_latent(y):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y), subsample_size=3) as i:
        numpyro.sample("y", dist.Normal(mean, 1), obs=y[i])


CONDITIONED = condition(observed_and_latent, {"mean": 1.0})

# Other quick tests run the models marked as slow.
MODELS = [
    quick_if(False, empty),
    deterministic,
    quick_if(False, without_values),
    quick_if(False, single_point),
    all_observed,
    CONDITIONED,
]


def run(kernel, **settings):
    """Return the draws by site and chain."""
    mcmc = quietly(kernel, num_warmup=2, num_samples=3, **settings)
    mcmc.run(jax.random.key(0), DATA)
    return mcmc.get_samples(group_by_chain=True)


@pytest.mark.parametrize("model", MODELS)
def test_model_without_coordinates_returns_the_draws_of_nuts(model):
    draws = run(SGHMCSplit(model))
    expected = run(NUTS(model)) if model not in (all_observed, CONDITIONED) else {}
    assert set(draws) == set(expected)
    for name, x in expected.items():
        assert draws[name].shape == x.shape
        np.testing.assert_array_equal(draws[name], x)


@pytest.mark.parametrize("chain_method", ["vectorized", "sequential", jax.vmap])
def test_model_without_coordinates_runs_with_every_chain_method(chain_method):
    draws = run(SGHMCSplit(deterministic), num_chains=2, chain_method=chain_method)
    assert {k: x.shape for k, x in draws.items()} == {"twice": (2, 3), "both": (2, 3, 2)}


def test_summary_of_an_empty_model_is_printed(capsys):
    mcmc = quietly(SGHMCSplit(empty))
    mcmc.run(jax.random.key(0), DATA)
    mcmc.print_summary()
    assert "Number of divergences: 0" in capsys.readouterr().out


@each_kernel
def test_every_kernel_runs_sites_of_size_zero(kernel_class):
    mcmc = MCMC(kernel_class(without_values), num_warmup=1, num_samples=2)
    mcmc.run(jax.random.key(0), DATA, extra_fields=("diverging", "num_steps"))
    assert mcmc.get_samples()["pairs"].shape == (2, 2, 0)
    assert not mcmc.get_extra_fields()["diverging"].any()
    for report in (bias_report, warmup_report):
        with pytest.raises(ValueError, match="latent site"):
            report(mcmc)


def test_site_of_size_zero_beside_another_is_empty():
    def model(y):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        numpyro.sample("none", dist.Normal(mean, 1), sample_shape=(0,))
        with numpyro.plate("rows", len(y), subsample_size=3) as i:
            numpyro.sample("y", dist.Normal(mean, 1), obs=y[i])

    draws = run(SGHMCSplit(model, **GIVEN), num_chains=2, chain_method="vectorized")
    assert {k: x.shape for k, x in draws.items()} == {"mean": (2, 3), "none": (2, 3, 0)}
