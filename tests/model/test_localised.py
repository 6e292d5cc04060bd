"""A normal density about a point restricts the posterior; the model is unchanged otherwise."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import Predictive
from numpyro.infer.reparam import LocScaleReparam
from numpyro.infer.util import log_density

from numpyro_sgmcmc import SGHMCSplit, localised
from numpyro_sgmcmc.checkpoint.fingerprint import describe
from numpyro_sgmcmc.errors import InvalidArgumentError
from tests.contract.kernels import assert_posterior, quietly
from tests.sampling import test_networks as networks

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((60, 2)), jnp.float32)
Y = X @ jnp.array([1.0, -1.0]) + jnp.asarray(RNG.standard_normal(60), jnp.float32)
CENTER = {"beta": np.array([2.0, 1.0]), "sd": 1.5}


def model(x, y=None, batch_size=None, is_local=False):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    sd = numpyro.sample("sd", dist.LogNormal(0, 1))
    with numpyro.plate("rows", len(x), subsample_size=batch_size) as i:
        shift = numpyro.sample("shift", dist.Normal(0, 1)) if is_local else 0.0
        obs = None if y is None else y[i]
        numpyro.sample("y", dist.Normal(x[i] @ beta + shift, sd), obs=obs)


def test_log_density_has_the_normal_density_of_constrained_values():
    values = {"beta": jnp.array([0.5, -1.0]), "sd": jnp.array(0.7)}
    precision = {"beta": np.array([2.0, 10.0]), "sd": 3.0}
    found = log_density(localised(model, CENTER, precision), (X, Y), {}, values)[0]
    squares = 2.0 * 1.5**2 + 10.0 * 2.0**2 + 3.0 * 0.8**2
    expected = log_density(model, (X, Y), {}, values)[0] - squares / 2.0
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_every_minibatch_has_the_whole_density():
    plain, arguments = networks.make_potential(networks.linen_network)
    q = jax.random.normal(jax.random.key(0), (plain.dim,))
    center = {name: np.asarray(w) + 0.1 for name, w in plain.unravel(q).items()}
    local = localised(networks.linen_network, center, 50.0)
    potential, _ = networks.make_potential(local)
    rows = {"rows": jnp.arange(3, 53)}
    values = [p.value_and_grad(q, rows, arguments) for p in (plain, potential)]
    np.testing.assert_allclose(values[1][0] - values[0][0], 25.0 * 0.01 * plain.dim, rtol=1e-2)
    np.testing.assert_allclose(values[1][1] - values[0][1], -5.0, rtol=1e-2)


def test_draws_are_of_the_product():
    precision, noise = 100.0, 0.5

    def linear(y, batch_size=None):
        networks.linear_model(y, batch_size)

    kernel = SGHMCSplit(localised(linear, {"w": np.ones(2)}, precision))
    mcmc = quietly(kernel, num_warmup=50, num_samples=500, num_chains=4, chain_method="vectorized")
    mcmc.run(jax.random.key(0), networks.Y, batch_size=50)
    x = np.asarray(networks.X, float)
    inverse = (1 / networks.PRIOR_SD**2 + precision) * np.eye(2) + x.T @ x / noise**2
    covariance = np.linalg.inv(inverse)
    mean = covariance @ (x.T @ np.asarray(networks.Y, float) / noise**2 + precision)
    draws = mcmc.get_samples(group_by_chain=True)["w"]
    assert_posterior(draws, mean, np.sqrt(np.diag(covariance)))


def test_predictions_are_those_of_the_model():
    draws = {"beta": jnp.ones((3, 2)), "sd": jnp.ones(3)}
    local = localised(model, CENTER, 1.0)
    found, expected = (Predictive(m, draws)(jax.random.key(0), X)["y"] for m in (local, model))
    np.testing.assert_array_equal(found, expected)


def test_deterministic_sites_of_a_reparametrised_model():
    def effect():
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        numpyro.sample("effect", dist.Normal(mu, 2.0))

    reparametrised = handlers.reparam(effect, config={"effect": LocScaleReparam(0)})
    values = {"mu": 1.0, "effect_decentered": 0.5}
    log_densities = [
        log_density(m, (), {}, values)[0]
        for m in (reparametrised, localised(reparametrised, {"effect": 3.0}, 4.0))
    ]
    assert float(log_densities[0] - log_densities[1]) == pytest.approx(2.0 * (2.0 - 3.0) ** 2)


def test_runs_about_other_centers_differ_in_their_fingerprints():
    pairs = ((1, 1), (2, 1), (1, 2))
    texts = {describe(localised(model, {"sd": sd}, gamma)) for sd, gamma in pairs}
    assert len(texts) == 3


@pytest.mark.parametrize(
    ("center", "precision", "problem"),
    [
        (np.zeros(2), 1.0, "not a dict"),
        ({}, 1.0, "not a dict"),
        (CENTER, {"beta": 1.0}, "`precision` has sites"),
        (CENTER, -1.0, "not positive"),
        (CENTER, np.nan, "not finite"),
        ({"sd": np.nan}, 1.0, "not finite"),
        (CENTER, "large", "precision"),
    ],
)
def test_invalid_center_or_precision(center, precision, problem):
    with pytest.raises(InvalidArgumentError, match=problem):
        localised(model, center, precision)


@pytest.mark.parametrize(
    ("center", "precision"),
    [
        ({"gamma": 1.0}, 1.0),
        ({"y": np.zeros(60)}, 1.0),
        ({"shift": np.zeros(20)}, 1.0),
        ({"beta": np.zeros(3)}, 1.0),
        ({"beta": np.zeros(2)}, np.ones(3)),
    ],
)
def test_sites_that_do_not_fit_raise_before_sampling(center, precision):
    mcmc = quietly(SGHMCSplit(localised(model, center, precision)), num_warmup=1, num_samples=1)
    with pytest.raises(InvalidArgumentError, match=f"`center` of '{next(iter(center))}'"):
        mcmc.run(jax.random.key(0), X, Y, batch_size=20, is_local=True)
