"""Latent sites inside the subsampled plate: what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import DiscreteGibbs, Gibbs

from numpyro_sgmcmc import HostArray, SGHMCSplit
from tests.contract.kernels import (
    quietly,
)
from tests.model.hierarchies import (
    normal_means_data,
)

Y = normal_means_data(60)


def _local(build: Any) -> Any:
    """A model with a plate of 60 rows, in which ``build(i, mu)`` has the rest."""

    def model(y, batch_size=20):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", 60, subsample_size=batch_size) as i:
            z = build(mu)
            numpyro.sample("y", dist.Normal(z, 1), obs=y[i])

    return model


def two_plates(y, batch_size=20):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", 60, subsample_size=batch_size) as i:
        z = numpyro.sample("z", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(z, 1), obs=y[i])
    with numpyro.plate("others", 60, subsample_size=batch_size) as i:
        numpyro.sample("x", dist.Normal(mu, 1), obs=y[i])


def crossed(y, batch_size=20):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", 60, subsample_size=batch_size, dim=-1) as i:
        with numpyro.plate("columns", 30, subsample_size=10, dim=-2):
            z = numpyro.sample("z", dist.Normal(mu, 1))
            numpyro.sample("y", dist.Normal(z, 1), obs=jnp.broadcast_to(y[i], z.shape))


def outside(y, batch_size=20):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", 60, subsample_size=batch_size) as i:
        z = numpyro.sample("z", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(z, 1), obs=y[i])
    numpyro.sample("total", dist.Normal(z.sum(), 1), obs=3.0)


def neighbours(y, batch_size=20):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", 60, subsample_size=batch_size) as i:
        z = numpyro.sample("z", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(z - jnp.roll(z, 1), 1), obs=y[i])


def only_local(y, batch_size=20):
    with numpyro.plate("rows", 60, subsample_size=batch_size) as i:
        z = numpyro.sample("z", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(z, 1), obs=y[i])


def unobserved(y, batch_size=20):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", 60, subsample_size=batch_size):
        numpyro.sample("y", dist.Normal(mu, 1))


def keyed(y, batch_size=20):
    mu = numpyro.sample("mu", dist.Normal(0, 1)) + 0 * jax.random.normal(numpyro.prng_key())
    with numpyro.plate("rows", 60, subsample_size=batch_size) as i:
        z = numpyro.sample("z", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(z, 1), obs=y[i])


normal = _local(lambda mu: numpyro.sample("z", dist.Normal(mu, 1)))
discrete = _local(lambda mu: numpyro.sample("k", dist.Bernoulli(logits=mu)))
stretched = _local(lambda mu: numpyro.sample("z", dist.Uniform(0, jnp.exp(mu))))
fixed = _local(lambda mu: numpyro.sample("z", dist.Delta(mu)))


def wrong_shape(rng_key, gibbs_sites, hmc_sites, rows):
    return {"k": jnp.zeros(3)}


def right_shape(rng_key, gibbs_sites, hmc_sites, rows):
    return dict(gibbs_sites)


def array(rng_key, gibbs_sites, hmc_sites, rows):
    return gibbs_sites["k"]


def probabilities(rng_key, gibbs_sites, hmc_sites, rows):
    return {"k": jnp.full(rows.shape, 0.3)}


def sevens(rng_key, gibbs_sites, hmc_sites, rows):
    return {"k": jnp.full(rows.shape, 7)}


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (two_plates, {}, "'z' .* subsampled plates .*'others', 'rows'"),
        (crossed, {}, "'z' .* pair of rows"),
        (outside, {}, "'z' .* a site outside of the plate"),
        (neighbours, {}, "'z' .* a row's value serves another row"),
        (only_local, {}, "All latent sites"),
        (unobserved, {}, "'y' .* nothing is observed: pass its data"),
        (keyed, {}, "'z' .*prng_key"),
        (discrete, {}, r"'k' .* discrete .* gibbs_sites=\['k'\]"),
        (stretched, {}, "'z' .* support that depends on other values"),
        (fixed, {}, "'z' .* delta"),
        (normal, {"subsampling": "iid"}, "'z' .* a row twice"),
        (normal, {"noise_compensation": True}, "'z' .* a row twice"),
        (normal, {"gradient_estimator": "second_order_control_variate"}, "'z' .* Hessian"),
        (normal, {"collect_local_sites": ["w"]}, r"'w', .* \['z'\]"),
        (normal, {"gibbs_fn": right_shape, "gibbs_sites": ["mu"]}, "'mu', which is no latent"),
        (discrete, {"gibbs_fn": wrong_shape, "gibbs_sites": ["k"]}, r"must return \{'k': \(20,"),
        (discrete, {"gibbs_fn": array, "gibbs_sites": ["k"]}, "must return a dict"),
        (discrete, {"gibbs_fn": probabilities, "gibbs_sites": ["k"]}, "float32 values of 'k'"),
        (discrete, {"gibbs_fn": sevens, "gibbs_sites": ["k"]}, "'k' outside .*, for example 7"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_refused_before_any_sampling(model, options, words):
    with pytest.raises(ValueError, match=words):
        quietly(SGHMCSplit(model, **options)).run(jax.random.key(0), Y)


def test_epochs_with_a_seam_are_refused():
    with pytest.raises(ValueError, match=r"'z' .* 7 rows do not divide 60"):
        quietly(SGHMCSplit(normal, subsampling="shuffled")).run(jax.random.key(0), Y, batch_size=7)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gibbs_fn": right_shape}, "go together"),
        ({"gibbs_sites": ["k"]}, "go together"),
        ({"gibbs_fn": right_shape, "gibbs_sites": "k"}, "a list of names"),
        ({"gibbs_fn": 3, "gibbs_sites": ["k"]}, "gibbs_fn"),
        ({"gibbs_fn": lambda key: {}, "gibbs_sites": ["k"]}, "keywords rng_key, .*, but "),
        ({"collect_local_sites": "z"}, "True, False or a list"),
    ],
)
def test_options_are_checked_at_construction(options, words):
    with pytest.raises(ValueError, match=words):
        SGHMCSplit(normal, **options)


def test_options_without_local_sites_or_a_model():
    with pytest.raises(ValueError, match="need a kernel made from a model"):
        SGHMCSplit(potential_fn=lambda z: z @ z, collect_local_sites=True)
    with pytest.raises(ValueError, match="has none: leave it out"):
        quietly(SGHMCSplit(_local(lambda mu: mu), collect_local_sites=True)).run(
            jax.random.key(0), Y
        )


def test_not_with_rows_on_the_host():
    with pytest.raises(ValueError, match=r"'z' .*HostArray would be read"):
        quietly(SGHMCSplit(normal)).run(jax.random.key(0), HostArray(Y))


def test_not_in_a_block_of_gibbs_unless_its_values_are_collected():
    def switching(y, batch_size=20):
        k = numpyro.sample("k", dist.Bernoulli(0.5))
        mu = numpyro.sample("mu", dist.Normal(k, 1))
        with numpyro.plate("rows", 60, subsample_size=batch_size) as i:
            z = numpyro.sample("z", dist.Normal(mu, 1))
            numpyro.sample("y", dist.Normal(z, 1), obs=y[i])

    kernel = SGHMCSplit(switching)
    gibbs = Gibbs([(DiscreteGibbs(kernel.model), ["k"]), (kernel, None)])
    with pytest.raises(
        ValueError, match=r"'z' .* other blocks of Gibbs .* collect_local_sites=True"
    ):
        quietly(gibbs).run(jax.random.key(0), Y)
