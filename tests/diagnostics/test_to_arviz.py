"""A run in ArviZ, its log likelihoods by chunks and for some of the rows."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, init_to_feasible, log_likelihood

from numpyro_sgmcmc import HostArray, SGHMCSplit, loo, to_arviz
from numpyro_sgmcmc.diagnostics import predictive

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.23 announces 1.0
    import arviz as az

N = 400
RNG = np.random.default_rng(0)
X = RNG.standard_normal((N, 3)).astype(np.float32)
Y = (X @ np.array([0.5, -0.3, 0.1]) + RNG.standard_normal(N)).astype(np.float32)


def regression(X, y, batch_size=None):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([3]).to_event(1))
    sd = numpyro.sample("sd", dist.HalfNormal(2))
    with numpyro.plate("rows", len(X), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(X[i] @ beta, sd), obs=y[i])


def fit(model, *data, **fields):
    """With nothing to find for the warm-up: all coordinates have about one sd."""
    dim = 4 if model is regression else 1
    kernel = SGHMCSplit(
        model,
        step_size=0.2,
        num_steps=10,
        gradient_estimator="minibatch",
        subsampling="contiguous",
        inverse_mass_matrix=np.full(dim, 1.0 / N),
        init_strategy=init_to_feasible(),
    )
    settings = {"num_warmup": 200, "num_samples": 250, "num_chains": 2, "progress_bar": False}
    mcmc = MCMC(kernel, chain_method="vectorized", **settings)
    mcmc.run(jax.random.key(0), *data, batch_size=40, **fields)
    return mcmc


@pytest.fixture(scope="module")
def mcmc():
    # ArviZ has no place for a dict of matrices, which a field may be.
    return fit(regression, X, Y, extra_fields=("num_steps", "adapt_state.inverse_mass_matrix"))


@pytest.fixture(scope="module")
def exact(mcmc):
    """NumPyro's log likelihoods of all draws and rows, by chain."""
    found = log_likelihood(mcmc.sampler.model, mcmc.get_samples(), X, Y)["y"]
    return np.asarray(found).reshape(2, 250, N)


def test_draws_alone(mcmc):
    data = to_arviz(mcmc)
    np.testing.assert_array_equal(data["posterior"]["beta"], mcmc.get_samples(True)["beta"])
    np.testing.assert_array_equal(data["observed_data"]["y"], Y)
    assert "n_steps" in data["sample_stats"]
    assert "log_likelihood" not in {g.strip("/") for g in _groups(data)}


def _groups(data):
    groups = data.groups
    return groups() if callable(groups) else groups


def test_log_likelihoods_of_all_rows(mcmc, exact, monkeypatch):
    monkeypatch.setattr(predictive, "_MAX_ROWS_PER_CHUNK", 150)
    data = to_arviz(mcmc, log_likelihood=True)
    found = data["log_likelihood"]["y"]
    assert found.dims == ("chain", "draw", "rows")
    np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-4)


def _elpd(found):
    return found["elpd_loo"] if az.__version__ < "1" else found.elpd


def _their_loo(mcmc):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a Pareto k of some row
        return az.loo(az.from_numpyro(mcmc, log_likelihood=True), pointwise=True)


@pytest.mark.parametrize("rows", [30, [5, 3, 399]])
def test_log_likelihoods_of_some_rows(mcmc, exact, rows):
    found = to_arviz(mcmc, log_likelihood=rows)["log_likelihood"]["y"]
    numbers = np.asarray(found.coords["rows"])
    assert len(set(numbers)) == (rows if rows == 30 else 3)
    if rows != 30:
        np.testing.assert_array_equal(numbers, rows)
    np.testing.assert_allclose(found, exact[..., numbers], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_rows_on_the_host():
    mcmc = fit(regression, HostArray(X), HostArray(Y), extra_fields=("num_steps",))
    data, draws = to_arviz(mcmc, log_likelihood=[7, 8]), mcmc.get_samples(group_by_chain=True)
    np.testing.assert_array_equal(data["posterior"]["sd"], draws["sd"])
    expected = dist.Normal(draws["beta"] @ X[7:9].T, draws["sd"][..., None]).log_prob(Y[7:9])
    np.testing.assert_allclose(data["log_likelihood"]["y"], expected, rtol=1e-4, atol=1e-4)
    assert data["sample_stats"]["num_steps"].shape == (2, 250)


def test_leave_one_out(mcmc):
    """By all rows ArviZ's; by some within its error of that, which is as large as the scatter."""
    theirs, every = _their_loo(mcmc), loo(mcmc, N)
    assert every.elpd == pytest.approx(float(_elpd(theirs)), abs=0.02)
    assert every.se == pytest.approx(float(theirs.se), rel=0.01)
    assert every.subsampling_se == 0.0
    p_loo = theirs["p_loo"] if az.__version__ < "1" else theirs.p
    assert every.p_loo == pytest.approx(float(p_loo), abs=0.05)
    some = [loo(mcmc, 40, seed) for seed in range(12)]
    errors = np.array([(s.elpd - every.elpd) / s.subsampling_se for s in some])
    assert 0.4 < np.sqrt(np.mean(errors**2)) < 2.0
    assert np.mean([s.subsampling_se for s in some]) < 0.1 * every.se
    assert some[0].pareto_k.shape == some[0].indices.shape == (40,)
    assert f"elpd   {some[0].elpd:.1f}" in str(some[0])
    assert len(str(some[0]).splitlines()) == 4


def shift(X, y, batch_size=None):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(mean, 1), obs=y[i])


def test_differences_of_two_models(mcmc):
    """By all rows those of ArviZ's parts; by some within the error, as large as the scatter."""
    other = fit(shift, X, Y)
    every = loo(mcmc, N) - loo(other, N)
    name = "loo_i" if az.__version__ < "1" else "elpd_i"
    parts = [np.asarray(_their_loo(m)[name]).ravel() for m in (mcmc, other)]
    assert every.elpd == pytest.approx((parts[0] - parts[1]).sum(), abs=0.02)
    assert every.se == pytest.approx(np.sqrt(N) * (parts[0] - parts[1]).std(), rel=0.01)
    assert every.subsampling_se == 0.0
    some = [loo(mcmc, 40, seed) - loo(other, 40, seed) for seed in range(12)]
    errors = np.array([(s.elpd - every.elpd) / s.subsampling_se for s in some])
    assert 0.4 < np.sqrt(np.mean(errors**2)) < 2.0
    assert f"elpd difference  {some[0].elpd:.1f}" in str(some[0])
    with pytest.raises(ValueError, match="different rows"):
        loo(mcmc, 40, 1) - loo(other, 40, 2)
    with pytest.raises(TypeError):
        loo(mcmc, 40) - 1.0


@pytest.mark.slow
def test_rows_with_latent_sites_of_their_own():
    def means(X, y, batch_size=None):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            own = numpyro.sample("own", dist.Normal(mean, 1))
            numpyro.sample("y", dist.Normal(own, 1), obs=y[i])

    mcmc = MCMC(SGHMCSplit(means), num_warmup=2, num_samples=4, progress_bar=False)
    mcmc.run(jax.random.key(0), X, Y, batch_size=40)
    assert to_arviz(mcmc)["posterior"]["mean"].shape == (1, 4)
    for told in (lambda: to_arviz(mcmc, log_likelihood=3), lambda: loo(mcmc)):
        with pytest.raises(ValueError, match="each has latent values of its own"):
            told()


def test_what_is_refused(mcmc):
    with pytest.raises(ValueError, match="asks for 500 rows, but there are 400"):
        to_arviz(mcmc, log_likelihood=500)
    with pytest.raises(ValueError, match="between 0 and 399"):
        to_arviz(mcmc, log_likelihood=[400])
    with pytest.raises(ValueError, match="`num_rows`"):
        loo(mcmc, 0)
    with pytest.raises(ValueError, match=r"call `mcmc\.run` before `to_arviz`"):
        to_arviz(MCMC(SGHMCSplit(regression), num_warmup=1, num_samples=1))

    def two(X, y, batch_size=None):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with numpyro.plate("rows", len(X), subsample_size=batch_size) as i:
            numpyro.sample("x", dist.Normal(mean, 1), obs=jnp.asarray(X)[i, 0])
            numpyro.sample("y", dist.Normal(mean, 1), obs=jnp.asarray(y)[i])

    with pytest.raises(ValueError, match=r"one observed site.*'x', 'y'"):
        loo(fit(two, X, Y), 10)
