"""Functions of draws: by chunks what they are whole, and judged where parameters mean nothing."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC, NUTS, Predictive
from scipy import stats

from numpyro_sgmcmc.diagnostics import predictive, predictive_summary

RNG = np.random.default_rng(0)
DRAWS = {"beta": RNG.standard_normal((3, 80, 2)).astype(np.float32)}
OTHERS = {"beta": RNG.standard_normal((2, 90, 2)).astype(np.float32) + 0.3}
X = RNG.standard_normal((23, 2)).astype(np.float32)


def mean(draw, X):
    return X @ draw["beta"]


def model(X, y=None):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    eta = numpyro.deterministic("eta", X @ beta)
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=y)


def test_each_number_is_its_definition():
    found = predictive_summary(DRAWS, mean, X, reference=OTHERS)["mean"]
    values = np.einsum("csd,nd->csn", DRAWS["beta"].astype(np.float64), X)
    theirs = np.einsum("csd,nd->csn", OTHERS["beta"].astype(np.float64), X)
    np.testing.assert_allclose(found.mean, values.mean((0, 1)), atol=1e-6)
    np.testing.assert_allclose(found.sd, values.std((0, 1)), rtol=1e-5)
    np.testing.assert_allclose(found.r_hat, split_gelman_rubin(values), rtol=1e-5)
    np.testing.assert_allclose(found.ess, effective_sample_size(values), rtol=1e-3)
    for k in range(len(X)):
        pairs = [(values[c, :, k], np.delete(values, c, 0)[..., k].ravel()) for c in range(3)]
        by_scipy = [stats.ks_2samp(*pair).statistic for pair in pairs]
        assert found.between_chain_distance[k] == pytest.approx(np.mean(by_scipy), abs=1e-6)
        to_theirs = stats.ks_2samp(values[..., k].ravel(), theirs[..., k].ravel()).statistic
        assert found.distance_to_reference[k] == pytest.approx(to_theirs, abs=1e-6)
        own = stats.ks_2samp(theirs[0, :, k], theirs[1, :, k]).statistic
        assert found.reference_between_chain_distance[k] == pytest.approx(own, abs=1e-6)


@pytest.mark.parametrize("numbers", [1, 3 * 80 * 5, 3 * 80 * 23])
def test_chunks_change_nothing(monkeypatch, numbers):
    whole = predictive_summary(DRAWS, mean, X, reference=OTHERS)["mean"]
    monkeypatch.setattr(predictive, "_MAX_RESULT_ELEMENTS_PER_CHUNK", numbers)
    monkeypatch.setattr(predictive, "_MAX_RESULT_ELEMENTS_PER_MAP_BATCH", 7)
    for a, b in zip(
        predictive_summary(DRAWS, mean, X, reference=OTHERS)["mean"], whole, strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_predictive_is_numpyro_s():
    found = predictive_summary(DRAWS, Predictive(model, num_samples=1), X)
    eta = predictive_summary(DRAWS, mean, X)["mean"]
    np.testing.assert_allclose(found["eta"].mean, eta.mean, rtol=1e-5, atol=1e-6)
    flat = {"beta": DRAWS["beta"].reshape(-1, 2)}
    theirs = Predictive(model, flat)(random.key(1), X)["y"]
    error = np.hypot(found["y"].sd, theirs.std(0)) / np.sqrt(len(theirs))
    assert (np.abs(found["y"].mean - theirs.mean(0)) < 4.5 * error).all()
    only = predictive_summary(DRAWS, Predictive(model, num_samples=1, return_sites=["y"]), X)
    assert set(only.functions) == {"y"}


def test_what_is_exchanged_in_the_parameters_is_not_in_what_they_say():
    """Each chain in a mode of its own: mirrored, with the same product."""
    sign = np.array([1, 1, -1, -1])[:, None, None]
    beta = sign * (5 + 0.1 * RNG.standard_normal((4, 200, 2)))

    def both(draw):
        return {"product": draw["beta"][0] * draw["beta"][1], "first": draw["beta"][0]}

    found = predictive_summary({"beta": beta}, both)
    assert found["first"].r_hat > 10
    assert found["first"].between_chain_distance > 0.6
    assert found["product"].r_hat < 1.05
    assert found["product"].between_chain_distance < 2 * found["product"].expected_distance


def test_chance_is_what_independent_draws_give():
    draws = {"x": np.random.default_rng(1).standard_normal((4, 500, 60)).astype(np.float32)}
    found = predictive_summary(draws, lambda z: z["x"])["<lambda>"]
    assert found.between_chain_distance.mean() == pytest.approx(
        found.expected_distance.mean(), rel=0.1
    )


def test_runs_of_numpyro_s_kernels_and_how_it_prints():
    mcmc = MCMC(NUTS(model), num_warmup=50, num_samples=60, num_chains=1, progress_bar=False)
    with pytest.raises(ValueError, match="no draws in `mcmc` yet"):
        predictive_summary(mcmc, mean, X)
    y = RNG.poisson(1.0, len(X))
    mcmc.run(random.key(0), jnp.asarray(X), y)
    found = predictive_summary(mcmc, mean, X, reference=DRAWS)
    header, row, *_ = str(found).splitlines()
    assert header.split()[:4] == ["function", "size", "R-hat", "ESS"]
    assert row.split()[:2] == ["mean", "23"]
    html = found._repr_html_()
    assert "<th>between chains</th>" in html
    assert "<td>mean</td><td>23</td>" in html
    dataset = found.to_dataset()
    np.testing.assert_array_equal(dataset["mean"].sel(statistic="sd"), found["mean"].sd)


def test_a_reference_without_the_site_is_refused_before_anything_is_done():
    with pytest.raises(ValueError, match="asks for 'beta', but there are draws of 'alpha'"):
        predictive_summary(DRAWS, mean, X, reference={"alpha": OTHERS["beta"]})


def test_what_is_the_same_at_all_draws_is_no_number():
    found = predictive_summary(DRAWS, lambda d: {"same": jnp.ones(2), "x": d["beta"]})
    same, x = str(found).splitlines()[1:3]
    assert same.split()[:4] == ["same", "2", "-", "-"]
    assert x.split()[0] == "x"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((DRAWS["beta"], mean, X), "`mcmc` is a ndarray"),
        ((DRAWS, "mean", X), "`fn` is a str"),
        ((DRAWS, mean, X, X[:4]), "as many rows each"),
        ((DRAWS, lambda d, X: X.sum(0), X), r"returns shape \(2,\)"),
        ((DRAWS, lambda d: jnp.log(-jnp.abs(d["beta"]))), "is not finite"),
        ((DRAWS, lambda d: random.key(0)), "must return numbers"),
        ((DRAWS, lambda d: d["gamma"]), "asks for 'gamma', but there are draws of 'beta'"),
        ((DRAWS, lambda d: {}), "returns nothing"),
        (({**DRAWS, "other": DRAWS["beta"][:, :5]}, mean, X), "same two first axes"),
        (({"beta": DRAWS["beta"][:, :1]}, mean, X), "one draw a chain"),
        ((DRAWS, mean, np.array([["a", "b"]])), "arrays of numbers"),
    ],
)
def test_what_cannot_be_summed_up_is_refused(args, words):
    with pytest.raises(ValueError, match=words):
        predictive_summary(*args)
