"""NumPyro's checks of values are left out for latent sites and kept for observed ones."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import init_to_uniform

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.model.subsampled import get_model_potential


def potential_and_arguments(model, *args):
    arguments = Arguments(args, {})
    return get_model_potential(model, arguments, init_to_uniform()), arguments


def value_at_zero(model, *args):
    potential, arguments = potential_and_arguments(model, *args)
    return potential.full_value(jnp.zeros(potential.dim), arguments)


def several_latents(y):
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    effects = numpyro.sample("effects", dist.ZeroSumNormal(scale, event_shape=(4,)))
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(4)))
    numpyro.sample("y", dist.Poisson(jnp.exp(effects @ shares)), obs=y.sum())


def test_potential_latent_sites_are_not_validated(monkeypatch):
    validated, validate = set(), dist.Distribution._validate_sample

    def record(fn, value):
        validated.add(type(fn).__name__)
        return validate(fn, value)

    potential, arguments = potential_and_arguments(several_latents, np.ones(3, np.float32))
    z = potential.unravel(jnp.ones(potential.dim))
    monkeypatch.setattr(dist.Distribution, "_validate_sample", record)
    value = potential.minibatch_potential(z, {}, arguments, None)
    assert validated == {"Poisson"}
    with numpyro.validation_enabled(False):
        assert value == potential.minibatch_potential(z, {}, arguments, None)


def counts(y):
    rate = numpyro.sample("rate", dist.Exponential(1.0))
    numpyro.sample("y", dist.Poisson(rate).expand(y.shape).to_event(1), obs=y)


def bounded(y):
    """Model with a support that depends on a latent site."""
    high = numpyro.sample("high", dist.Exponential(1.0))
    numpyro.sample("y", dist.Uniform(0.0, high).expand(y.shape).to_event(1), obs=y)


def test_potential_data_outside_support_is_infinite():
    assert np.isfinite(value_at_zero(counts, np.array([1.0, 2.0], np.float32)))
    assert value_at_zero(counts, np.array([1.0, -2.0], np.float32)) == np.inf
    assert np.isfinite(value_at_zero(bounded, np.array([0.2, 0.9], np.float32)))
    assert value_at_zero(bounded, np.array([0.2, 1.1], np.float32)) == np.inf


def test_potential_simplex_with_rounding_errors_is_finite():
    """The entries of a long simplex sum to one up to rounding, by more than NumPyro allows."""

    def many_shares(y):
        shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(20_000)))
        numpyro.sample("y", dist.Normal(shares[0], 1), obs=y)

    potential, arguments = potential_and_arguments(many_shares, np.float32(0.0))
    for seed in range(5):
        q = jax.random.normal(jax.random.key(seed), (potential.dim,))
        assert np.isfinite(potential.full_value(q, arguments))
