"""Models of many kinds, unchanged, against their exact posteriors."""

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
from numpyro_sgmcmc.errors import DataOrderWarning, DroppedSiteWarning, PlateWarning
from tests.contract.kernels import assert_posterior, quietly

PEOPLE, ITEMS, GROUPS = 400, 300, 3


def everything(*, people: Any, items: Any, batch_size: int | None = None) -> Any:
    """Model of independent parts, each with an exact posterior.

    It has keyword-only arguments, data in dicts and a return value. One plate is subsampled by its
    indices, another by ``numpyro.subsample``, and a third is not subsampled.
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
    """Return posterior mean and SD of a normal mean with prior SD 10 and unit noise."""
    precision = 0.01 + power * len(x)
    return power * x.sum() / precision, precision**-0.5


def exact(site: str, data: dict[str, Any]) -> tuple[Any, Any]:
    """Return the exact posterior mean and SD."""
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
        # The priors are flat and their bounds many SDs away; the shares sum to one.
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
    """Return a run, its warnings and the data."""
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
def test_draws_every_kind_of_site_matches_exact_posterior(fitted, site):
    mcmc, _, data = fitted
    draws = mcmc.get_samples(group_by_chain=True)[site]
    if site == "corner":
        draws = draws[..., 1, 0]
    assert_posterior(draws, *exact(site, data))


@pytest.mark.slow
def test_draws_constrained_sites_lie_in_support(fitted):
    draws = fitted[0].get_samples()
    assert ((draws["width"] > 0) & (draws["width"] < 3)).all()
    np.testing.assert_allclose(draws["shares"].sum(-1), 1, rtol=1e-5)
    assert (draws["cuts"][:, 0] < draws["cuts"][:, 1]).all()
    np.testing.assert_allclose(np.square(draws["corner"]).sum(-1), 1, rtol=1e-5)


@pytest.mark.slow
def test_draws_minibatch_dependent_deterministics_are_left_out_with_one_warning(fitted):
    """One is in the plate, one outside depends on the minibatch; two others are kept."""
    mcmc, caught, data = fitted
    assert set(mcmc.get_samples()) == {*SITES, "centre_decentered"}
    about = [w for w in caught if w.category is DroppedSiteWarning]
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
def test_warnings_have_the_users_line(fitted):
    for warning in fitted[1]:
        assert warning.filename == __file__, str(warning.message)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::numpyro_sgmcmc.errors.GradientNoiseWarning")
@pytest.mark.filterwarnings("ignore::numpyro_sgmcmc.errors.SubsampleSizeWarning")
def test_draws_nested_plates_and_dependent_support_match_exact_posterior():
    """Both rows and columns of a table are subsampled, and a prior is ``Uniform(0, top)``."""

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
@pytest.mark.filterwarnings("ignore::numpyro_sgmcmc.errors.GradientNoiseWarning")
def test_draws_stochastic_likelihood_gets_new_key_every_step():
    """The model adds new noise to its data at each evaluation.

    The mean gradient over keys is that without the noise. With one key for all steps the mean would
    be biased by the mean of 20 noise values, four posterior SDs.
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
def test_run_without_subsampled_plate_warns_once(batch_size):
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
    assert [w.category for w in caught] == [PlateWarning]
    assert "subsample_size" in str(caught[0].message)
    draws = mcmc.get_samples(group_by_chain=True)["mu"]
    assert_posterior(draws, *normal_mean(y.astype(np.float64)))


@pytest.mark.slow  # warnings are errors in all quick tests
def test_init_shuffled_rows_does_not_warn():
    """Contiguous minibatches of rows in random order are as good as random rows."""

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


def test_init_sorted_rows_warns():
    def model(y, batch_size):
        rate = numpyro.sample("rate", dist.Gamma(2, 1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Poisson(rate), obs=y[i])

    y = np.sort(np.random.default_rng(0).poisson(3.0, 1000))
    kernel = SGHMCSplit(model, gradient_estimator="minibatch")
    with pytest.warns(DataOrderWarning, match="sorted") as caught:
        kernel.init(jax.random.key(0), 10, None, (y,), {"batch_size": 100})
    assert len(caught) == 1


@pytest.mark.slow
def test_draws_random_flax_module_matches_exact_posterior():
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
