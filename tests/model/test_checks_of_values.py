"""NumPyro's checks of values: left out where unconstrained space has none that are wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import init_to_uniform

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.model.subsampled import get_model_potential


def target_and_arguments(model, *args):
    arguments = Arguments(args, {})
    return get_model_potential(model, arguments, init_to_uniform()), arguments


def potential(model, *args):
    """At zero in unconstrained space."""
    target, arguments = target_and_arguments(model, *args)
    return target.full_value(jnp.zeros(target.dim), arguments)


def latents(y):
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    effects = numpyro.sample("effects", dist.ZeroSumNormal(scale, event_shape=(4,)))
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(4)))
    numpyro.sample("y", dist.Poisson(jnp.exp(effects @ shares)), obs=y.sum())


def test_latent_sites_are_not_checked(monkeypatch):
    """Whatever they are made of."""
    checked, check = set(), dist.Distribution._validate_sample

    def noted(fn, value):
        checked.add(type(fn).__name__)
        return check(fn, value)

    target, arguments = target_and_arguments(latents, np.ones(3, np.float32))
    z = target.unravel(jnp.ones(target.dim))
    monkeypatch.setattr(dist.Distribution, "_validate_sample", noted)
    found = target.potential_fn(z, {}, arguments, None)
    assert checked == {"Poisson"}
    with numpyro.validation_enabled(False):
        assert found == target.potential_fn(z, {}, arguments, None)


def counts(y):
    rate = numpyro.sample("rate", dist.Exponential(1.0))
    numpyro.sample("y", dist.Poisson(rate).expand(y.shape).to_event(1), obs=y)


def bounds(y):
    """What is possible depends on a latent site."""
    high = numpyro.sample("high", dist.Exponential(1.0))
    numpyro.sample("y", dist.Uniform(0.0, high).expand(y.shape).to_event(1), obs=y)


def test_observed_sites_are_checked():
    assert np.isfinite(potential(counts, np.array([1.0, 2.0], np.float32)))
    assert potential(counts, np.array([1.0, -2.0], np.float32)) == np.inf
    assert np.isfinite(potential(bounds, np.array([0.2, 0.9], np.float32)))
    assert potential(bounds, np.array([0.2, 1.1], np.float32)) == np.inf


def test_rounding_makes_no_value_impossible():
    """The shares of many categories sum to one but for rounding, by more than NumPyro allows."""

    def many(y):
        shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(20_000)))
        numpyro.sample("y", dist.Normal(shares[0], 1), obs=y)

    target, arguments = target_and_arguments(many, np.float32(0.0))
    for seed in range(5):
        q = jax.random.normal(jax.random.key(seed), (target.dim,))
        assert np.isfinite(target.full_value(q, arguments))
