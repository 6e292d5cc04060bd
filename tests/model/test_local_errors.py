"""Latent sites inside the subsampled plate: models and options that raise errors."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import DiscreteGibbs, Gibbs, init_to_uniform

from numpyro_sgmcmc import HostArray, SGHMCSplit
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.errors import LocalLatentsWarning
from numpyro_sgmcmc.model.subsampled import make_model_potential
from tests.contract.kernels import quietly
from tests.model.hierarchies import normal_means_data

Y = normal_means_data(60)


def _local(build: Any) -> Any:
    """Return a model with a plate of 60 rows, in which ``build(mu)`` gives their means."""

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
moved = _local(lambda mu: numpyro.sample("k", dist.Poisson(jnp.exp(mu))) - 1.0)
bounded_by_data = _local(lambda mu: numpyro.sample("z", dist.Uniform(0, jnp.arange(20.0) + 1)))
truncated = _local(lambda mu: numpyro.sample("z", dist.TruncatedNormal(mu, 1, low=mu)))
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


def both(y, batch_size=20):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", 60, subsample_size=batch_size) as i:
        k = numpyro.sample("k", dist.Bernoulli(logits=mu))
        z = numpyro.sample("z", dist.Normal(k, 1))
        numpyro.sample("y", dist.Normal(z, 1), obs=y[i])


BY_GIBBS_FN = {"gibbs_fn": right_shape, "gibbs_sites": ["k"]}


def sevens(rng_key, gibbs_sites, hmc_sites, rows):
    return {"k": jnp.full(rows.shape, 7)}


@pytest.mark.usefixtures("no_warm_up")
@pytest.mark.parametrize(
    ("model", "options", "match"),
    [
        (two_plates, {}, "'z'.*plates.*'others', 'rows'"),
        (crossed, {}, "'z'.*pair"),
        (outside, {}, "'z'.*'rows'.*dependent"),
        (neighbours, {}, "'z'.*'rows'.*dependent"),
        (only_local, {}, "latent sites"),
        (unobserved, {}, "'y'.*'rows'.*observed"),
        (keyed, {}, "'z'.*prng_key"),
        (moved, {}, r"'k'.*discrete.*gibbs_sites=\['k'\]"),
        (stretched, {}, "'z'.*bounds.*other sites.*Uniform"),
        (bounded_by_data, {}, "'z'.*bounds.*data.*Uniform"),
        (truncated, {}, "'z'.*bounds.*other sites"),
        (fixed, {}, "'z'.*delta"),
        (discrete, {"subsampling": "iid", **BY_GIBBS_FN}, "'k'.*iid"),
        (discrete, {"noise_compensation": True, **BY_GIBBS_FN}, "'k'.*noise_compensation"),
        (
            discrete,
            {"gradient_estimator": "second_order_control_variate", **BY_GIBBS_FN},
            "'k'.*Hessian",
        ),
        (both, BY_GIBBS_FN, "'z'.*`gibbs_fn` does not sample it"),
        (neighbours, {"gibbs_fn": right_shape, "gibbs_sites": ["z"]}, "'z'.*'rows'.*dependent"),
        (normal, {"collect_local_sites": ["w"]}, "collect_local_sites.*'w'"),
        (normal, {"gibbs_fn": right_shape, "gibbs_sites": ["mu"]}, "gibbs_sites.*'mu'"),
        (discrete, {"gibbs_fn": wrong_shape, "gibbs_sites": ["k"]}, r"gibbs_fn.*'k': \(20,"),
        (discrete, {"gibbs_fn": array, "gibbs_sites": ["k"]}, "gibbs_fn.*dict"),
        (discrete, {"gibbs_fn": probabilities, "gibbs_sites": ["k"]}, "gibbs_fn.*float32.*'k'"),
        (discrete, {"gibbs_fn": sevens, "gibbs_sites": ["k"]}, "gibbs_fn.*7.*'k'.*support"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_run_local_latents_not_supported_raises(model, options, match):
    with pytest.raises(ValueError, match=match):
        quietly(SGHMCSplit(model, **options)).run(jax.random.key(0), Y)


def _replicated(replicate: Any, is_inside: bool = True) -> Any:
    """Return a model with a site that is left over from predictions."""

    def model(y, batch_size=20):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", 60, subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])
            if is_inside:
                numpyro.sample("y_rep", replicate(mu))
        if not is_inside:
            numpyro.sample("y_rep", replicate(mu))

    return model


def without_data(y, batch_size=20):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", 60, subsample_size=batch_size) as i:
        numpyro.sample("x", dist.Normal(mu, 1), obs=y[i])
        numpyro.sample("y_rep", dist.Bernoulli(logits=mu), obs=None)


@pytest.mark.parametrize(
    "model",
    [
        _replicated(lambda mu: dist.Poisson(jnp.exp(mu))),
        _replicated(lambda mu: dist.Bernoulli(logits=mu)),
        _replicated(lambda mu: dist.OrderedLogistic(mu, jnp.array([-1.0, 1.0]))),
        _replicated(lambda mu: dist.Poisson(jnp.exp(mu)), is_inside=False),
        without_data,
    ],
    ids=["counts", "binary", "ordinal", "outside of the plate", "argument is None"],
)
def test_run_unobserved_discrete_replicate_raises(model):
    with pytest.raises(ValueError, match=r"'y_rep'.*no data.*posterior_predictive") as error:
        quietly(SGHMCSplit(model)).run(jax.random.key(0), Y)
    assert "gibbs_fn" not in str(error.value)


def get_potential(model: Any) -> Any:
    return make_model_potential(model, Arguments((Y,), {"batch_size": 20}), init_to_uniform)


def test_unobserved_continuous_replicate_warns():
    with pytest.warns(LocalLatentsWarning, match=r"'y_rep'.*posterior_predictive"):
        get_potential(_replicated(lambda mu: dist.Normal(mu, 1)))


def imputed(y, batch_size=20):
    """A covariate without data, on which the data depend."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", 60, subsample_size=batch_size) as i:
        x = numpyro.sample("x", dist.Normal(mu, 1))
        z = numpyro.sample("z", dist.Normal(x, 1))
        numpyro.sample("y", dist.Normal(z, 1), obs=y[i])


def in_a_factor(y, batch_size=20):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", 60, subsample_size=batch_size) as i:
        z = numpyro.sample("z", dist.Normal(mu, 1))
        numpyro.factor("y", -0.5 * (y[i] - z) ** 2)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("model", [normal, imputed, in_a_factor])
def test_local_sites_on_which_others_depend_do_not_warn(model):
    assert "z" in get_potential(model).local_names


def test_run_shuffled_minibatches_across_epochs_raises():
    kernel = SGHMCSplit(discrete, subsampling="shuffled", **BY_GIBBS_FN)
    with pytest.raises(ValueError, match=r"'k'.*epochs.*contiguous"):
        quietly(kernel).run(jax.random.key(0), Y, batch_size=7)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"gibbs_fn": right_shape}, "gibbs_fn"),
        ({"gibbs_sites": ["k"]}, "gibbs_sites"),
        ({"gibbs_fn": right_shape, "gibbs_sites": "k"}, "gibbs_sites"),
        ({"gibbs_fn": 3, "gibbs_sites": ["k"]}, "gibbs_fn"),
        ({"gibbs_fn": lambda key: {}, "gibbs_sites": ["k"]}, "gibbs_fn.*rng_key"),
        ({"collect_local_sites": "z"}, "collect_local_sites"),
    ],
)
def test_kernel_invalid_options_of_local_latents_raises(options, match):
    with pytest.raises(ValueError, match=match):
        SGHMCSplit(normal, **options)


def test_collect_local_sites_without_local_sites_or_model_raises():
    with pytest.raises(ValueError, match="collect_local_sites"):
        SGHMCSplit(potential_fn=lambda z: z @ z, collect_local_sites=True)
    kernel = SGHMCSplit(_local(lambda mu: mu), collect_local_sites=True)
    with pytest.raises(ValueError, match=r"collect_local_sites.*plate"):
        quietly(kernel).run(jax.random.key(0), Y)


def test_run_local_latents_with_host_array_raises():
    with pytest.raises(ValueError, match=r"'z'.*HostArray"):
        quietly(SGHMCSplit(normal)).run(jax.random.key(0), HostArray(Y))


def test_run_gibbs_block_with_local_latents_not_collected_raises():
    def switching(y, batch_size=20):
        k = numpyro.sample("k", dist.Bernoulli(0.5))
        mu = numpyro.sample("mu", dist.Normal(k, 1))
        with numpyro.plate("rows", 60, subsample_size=batch_size) as i:
            z = numpyro.sample("z", dist.Normal(mu, 1))
            numpyro.sample("y", dist.Normal(z, 1), obs=y[i])

    kernel = SGHMCSplit(switching, gibbs_fn=right_shape, gibbs_sites=["z"])
    gibbs = Gibbs([(DiscreteGibbs(kernel.model), ["k"]), (kernel, None)])
    with pytest.raises(ValueError, match=r"'z'.*Gibbs.*collect_local_sites"):
        quietly(gibbs).run(jax.random.key(0), Y)
