"""Kinds of models: none is edited to please us, and each posterior is known exactly."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.infer import Predictive
from numpyro.infer.reparam import LocScaleReparam

from numpyro_sgmcmc import SGHMCSplit
from tests.contract.kernels import (
    assert_posterior,
    quietly,
)

PEOPLE, ITEMS, GROUPS = 400, 300, 3


def everything(*, people: Any, items: Any, batch_size: int | None = None) -> Any:
    """Parts that know nothing of each other, so that each has its own exact posterior.

    Arguments by keyword only, data in dicts, and a return value. Two plates subsampled apart from
    each other, one by its indices and one by ``numpyro.subsample``, and a third that is whole.
    """
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(3)))
    width = numpyro.sample("width", dist.Uniform(0, 3))
    corner = numpyro.sample("corner", dist.LKJCholesky(2, 1.0))
    cuts = numpyro.sample("cuts", dist.ImproperUniform(constraints.ordered_vector, (), (2,)))
    base = numpyro.sample("base", dist.Normal(0, 10))
    tempered = numpyro.sample("tempered", dist.Normal(0, 10))
    partial = numpyro.sample("partial", dist.Normal(0, 10))
    with handlers.reparam(config={"centre": LocScaleReparam(0)}):
        centre = numpyro.sample("centre", dist.Normal(base, 2))
    with numpyro.plate("groups", GROUPS):
        level = numpyro.sample("level", dist.Normal(0, 10))
    numpyro.deterministic("twice", 2 * mu)

    with numpyro.plate("people", PEOPLE, subsample_size=batch_size) as i:
        batch = jax.tree.map(lambda x: x[i], people)
        numpyro.deterministic("residual", batch["height"] - mu)
        numpyro.sample("height", dist.Normal(mu, 1), obs=batch["height"])
        numpyro.sample("score", dist.Normal(level[batch["group"]], 1), obs=batch["score"])
        with handlers.scale(scale=0.5):
            numpyro.sample("half", dist.Normal(tempered, 1), obs=batch["half"])
        with handlers.mask(mask=batch["is_seen"]):
            numpyro.sample("seen", dist.Normal(partial, 1), obs=batch["seen"])
    numpyro.deterministic("batch_mean", batch["height"].mean() + mu)

    with numpyro.plate("items", ITEMS, subsample_size=batch_size):
        place = numpyro.subsample(items, event_dim=1)
        places = jnp.concatenate([cuts, shares, jnp.stack([corner[1, 0], width, centre])])
        numpyro.sample("place", dist.Normal(places, 1).to_event(1), obs=place)
    return {"mu": mu}


def everything_data() -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    group = rng.integers(0, GROUPS, PEOPLE)
    people = {
        "height": 1.5 + normal(PEOPLE),
        "group": group,
        "score": np.array([-1, 0, 2], np.float32)[group] + normal(PEOPLE),
        "half": 3 + normal(PEOPLE),
        "seen": normal(PEOPLE),
        "is_seen": rng.random(PEOPLE) < 0.6,
    }
    people["seen"][~people["is_seen"]] += 50
    places = np.array([-1, 1, 0.4, 0.35, 0.25, 0.3, 1.5, 7], np.float32)
    items = places + normal(ITEMS, 8)
    return {"people": people, "items": items}


def normal_mean(x: np.ndarray, power: float = 1.0) -> tuple[Any, Any]:
    """Posterior mean and sd of a normal mean with prior sd 10 and unit noise."""
    precision = 0.01 + power * len(x)
    return power * x.sum() / precision, precision**-0.5


def exact(site: str, data: dict[str, Any]) -> tuple[Any, Any]:
    """Exact posterior mean and sd."""
    people, items = data["people"], data["items"]
    if site in ("mu", "tempered", "partial", "twice"):
        column = {"tempered": "half", "partial": "seen"}.get(site, "height")
        x = people[column][people["is_seen"]] if site == "partial" else people[column]
        mean, sd = normal_mean(x.astype(np.float64), 0.5 if site == "tempered" else 1.0)
        return (2 * mean, 2 * sd) if site == "twice" else (mean, sd)
    if site == "level":
        parts = [normal_mean(people["score"][people["group"] == g]) for g in range(GROUPS)]
        return tuple(np.array(x) for x in zip(*parts, strict=True))
    columns = {"cuts": slice(0, 2), "shares": slice(2, 5), "corner": 5, "width": 6, "centre": 7}
    if site in ("cuts", "shares", "corner", "width"):
        # The priors are flat and their bounds many sds away; the shares add up to one.
        mean = items.mean(0)[columns[site]]
        sd = np.full(mean.shape, ITEMS**-0.5)
        return (
            (mean - (mean.sum() - 1) / 3, sd * np.sqrt(2 / 3)) if site == "shares" else (mean, sd)
        )
    precision = np.array([[1 / 100 + 1 / 4, -1 / 4], [-1 / 4, 1 / 4 + ITEMS]])
    covariance = np.linalg.inv(precision)
    mean = covariance @ np.array([0.0, items[:, columns["centre"]].sum()])
    which = ("base", "centre").index(site)
    return mean[which], np.sqrt(covariance[which, which])


@pytest.fixture(scope="module")
def fitted():
    """The run, its warnings and the data."""
    data = everything_data()
    kernel = SGHMCSplit(everything, gradient_estimator="control_variate")
    mcmc = quietly(kernel, num_samples=800, num_chains=2, chain_method="vectorized")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mcmc.run(jax.random.key(0), **data, batch_size=40)
    return mcmc, caught, data


SITES = [
    "mu",
    "shares",
    "width",
    "corner",
    "cuts",
    "base",
    "centre",
    "tempered",
    "partial",
    "level",
    "twice",
]


@pytest.mark.slow
@pytest.mark.parametrize("site", SITES)
def test_each_part_has_its_posterior(fitted, site):
    mcmc, _, data = fitted
    draws = mcmc.get_samples(group_by_chain=True)[site]
    if site == "corner":
        draws = draws[..., 1, 0]
    assert_posterior(draws, *exact(site, data))


@pytest.mark.slow
def test_constrained_draws_lie_in_their_supports(fitted):
    draws = fitted[0].get_samples()
    assert ((draws["width"] > 0) & (draws["width"] < 3)).all()
    np.testing.assert_allclose(draws["shares"].sum(-1), 1, rtol=1e-5)
    assert (draws["cuts"][:, 0] < draws["cuts"][:, 1]).all()
    np.testing.assert_allclose(np.square(draws["corner"]).sum(-1), 1, rtol=1e-5)


@pytest.mark.slow
def test_deterministic_sites_of_the_rows_are_left_out_with_one_warning(fitted):
    """One in the plate, one outside that depends on the minibatch; two that do not are kept."""
    mcmc, caught, data = fitted
    assert set(mcmc.get_samples()) == {*SITES, "centre_decentered"}
    about = [w for w in caught if "deterministic" in str(w.message)]
    assert len(about) == 1
    assert "batch_mean" in str(about[0].message)
    assert "residual" in str(about[0].message)
    assert "twice" not in str(about[0].message)
    few = {k: v[:3] for k, v in mcmc.get_samples().items()}
    full = Predictive(mcmc.sampler.model, few)(jax.random.key(0), **data, batch_size=40)
    np.testing.assert_allclose(
        full["residual"], data["people"]["height"] - few["mu"][:, None], rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
def test_warnings_point_at_the_users_line(fitted):
    for warning in fitted[1]:
        assert warning.filename == __file__, str(warning.message)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The minibatch gradient is so noisy")
def test_nested_plates_and_a_support_that_depends_on_a_site():
    """A table of rows and columns, both subsampled, and ``Uniform(0, top)``."""

    def model(table, row_batch, column_batch):
        top = numpyro.sample("top", dist.HalfNormal(3))
        share = numpyro.sample("share", dist.Uniform(0, top))
        rows = numpyro.plate("rows", table.shape[0], subsample_size=row_batch, dim=-2)
        columns = numpyro.plate("columns", table.shape[1], subsample_size=column_batch, dim=-1)
        with rows as i, columns as j:
            numpyro.sample("cell", dist.Normal(share, 2), obs=table[i[:, None], j])

    table = np.random.default_rng(0).normal(1.0, 2.0, (30, 20)).astype(np.float32)
    mcmc = quietly(
        SGHMCSplit(model),
        num_warmup=100,
        num_samples=2000,
        num_chains=2,
        chain_method="vectorized",
    )
    mcmc.run(jax.random.key(0), table, row_batch=10, column_batch=4)
    draws = mcmc.get_samples(group_by_chain=True)
    assert (draws["share"] < draws["top"]).all()

    top = np.linspace(0.005, 20, 4000)[:, None]
    share = np.linspace(0.4, 1.6, 1000)
    log_density = (
        -0.5 * (top / 3) ** 2 - np.log(top) - 0.5 * 600 * ((share - table.mean()) / 2) ** 2
    )
    p = np.where(share < top, np.exp(log_density - log_density.max()), 0.0)
    p /= p.sum()
    for site, values in (("top", top), ("share", share)):
        mean = (p * values).sum()
        assert_posterior(draws[site], mean, np.sqrt((p * (values - mean) ** 2).sum()))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The minibatch gradient is so noisy")
def test_a_random_likelihood_has_a_fresh_key_every_step():
    """The model blurs its data anew each time.

    The mean gradient over keys is that of the sharp data; with one key for all steps the mean
    would be off by the mean of 20 blurs, four posterior sds.
    """

    def model(y, batch_size):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            blur = jax.random.normal(numpyro.prng_key(), i.shape)
            numpyro.sample("y", dist.Normal(mu + blur, 1), obs=y[i])

    y = np.random.default_rng(0).normal(3.0, 1.0, 100).astype(np.float32)
    mcmc = quietly(SGHMCSplit(model), num_samples=400, num_chains=2, chain_method="vectorized")
    mcmc.run(jax.random.key(0), y, batch_size=20)
    draws = mcmc.get_samples(group_by_chain=True)["mu"]
    assert_posterior(draws, *normal_mean(y.astype(np.float64)))


@pytest.mark.parametrize(
    "batch_size",
    [None, pytest.param(100, marks=pytest.mark.slow)],
    ids=["no subsample_size", "all rows"],
)
def test_without_a_subsampled_plate_there_is_one_warning(batch_size):
    def model(y, batch_size=None):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])

    y = np.random.default_rng(0).normal(3.0, 1.0, 100).astype(np.float32)
    mcmc = quietly(SGHMCSplit(model), num_samples=500)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mcmc.run(jax.random.key(0), y, batch_size=batch_size)
        mcmc.sampler.init(jax.random.key(0), 10, None, (y,), {"batch_size": batch_size})
    assert ["no subsampled plate" in str(w.message) for w in caught] == [True]
    assert "subsample_size" in str(caught[0].message)
    draws = mcmc.get_samples(group_by_chain=True)["mu"]
    assert_posterior(draws, *normal_mean(y.astype(np.float64)))


def test_shuffled_rows_raise_no_alarm_about_their_order():
    """Blocks of random rows are as good as random rows; what differs is chance."""

    def model(X, y, batch_size):
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Bernoulli(logits=X[i] @ beta), obs=y[i])

    rng = np.random.default_rng(1)
    rng.normal(size=1000)
    rng.poisson(3.0, 1000)
    for _ in range(2):
        X, y = rng.standard_normal((1000, 3)).astype(np.float32), rng.integers(0, 2, 1000)
    kernel = SGHMCSplit(model, gradient_estimator="minibatch")
    kernel.init(jax.random.key(0), 10, None, (X, y), {"batch_size": 100})


def test_sorted_rows_are_noticed_and_the_cure_is_named():
    def model(y, batch_size):
        rate = numpyro.sample("rate", dist.Gamma(2, 1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Poisson(rate), obs=y[i])

    y = np.sort(np.random.default_rng(0).poisson(3.0, 1000))
    kernel = SGHMCSplit(model, gradient_estimator="minibatch")
    with pytest.warns(UserWarning, match="permutation") as caught:
        kernel.init(jax.random.key(0), 10, None, (y,), {"batch_size": 100})
    assert len(caught) == 1


@pytest.mark.slow
def test_random_flax_module():
    linen = pytest.importorskip("flax.linen")
    from numpyro.contrib.module import random_flax_module

    def model(X, y, batch_size):
        net = random_flax_module(
            "net", linen.Dense(1, use_bias=False), dist.Normal(0, 10), input_shape=(1, 2)
        )
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(net(X[i])[:, 0], 1), obs=y[i])

    rng = np.random.default_rng(0)
    X = rng.standard_normal((400, 2)).astype(np.float32)
    y = (X @ [0.5, -1.0] + rng.standard_normal(400)).astype(np.float32)
    mcmc = quietly(SGHMCSplit(model), num_samples=500)
    mcmc.run(jax.random.key(0), X, y, batch_size=40)
    covariance = np.linalg.inv(X.T @ X + 0.01 * np.eye(2))
    draws = mcmc.get_samples(group_by_chain=True)["net/kernel"][..., 0]
    assert_posterior(draws, covariance @ X.T @ y, np.sqrt(np.diag(covariance)))
