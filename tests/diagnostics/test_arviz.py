"""ArviZ as with NumPyro's own kernels, on 0.23 and 1.x: all rows, all fields."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC

from numpyro_sgmcmc import SGHMCSplit

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.23 announces 1.0
    import arviz as az


N = 300


def model(X, y=None, batch_size=None):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    numpyro.deterministic("odds", jnp.exp(beta))
    with numpyro.plate("rows", X.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ beta), obs=None if y is None else y[i])


@pytest.fixture(scope="module")
def mcmc():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((N, 2)).astype(np.float32)
    y = (rng.random(N) < 1 / (1 + np.exp(-X @ np.array([1.0, -0.5])))).astype(np.int32)
    mcmc = MCMC(
        SGHMCSplit(model),
        num_warmup=200,
        num_samples=300,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    fields = ("num_steps", "adapt_state.step_size")
    mcmc.run(jax.random.key(0), X, y, batch_size=50, extra_fields=fields)
    return mcmc


@pytest.fixture(scope="module")
def data(mcmc):
    return az.from_numpyro(mcmc, log_likelihood=True)


def test_groups_hold_all_rows(data):
    assert data["observed_data"]["y"].shape == (N,)
    assert data["log_likelihood"]["y"].shape == (2, 300, N)
    assert data["posterior"]["beta"].shape == (2, 300, 2)
    assert data["posterior"]["odds"].shape == (2, 300, 2)


def test_groups_hold_the_runs_own_values(mcmc, data):
    np.testing.assert_array_equal(data["observed_data"]["y"], mcmc._args[1])
    np.testing.assert_array_equal(
        data["posterior"]["beta"], mcmc.get_samples(group_by_chain=True)["beta"]
    )
    without = az.from_numpyro(mcmc, log_likelihood=False)
    assert without["observed_data"]["y"].shape == (N,)
    np.testing.assert_array_equal(without["posterior"]["beta"], data["posterior"]["beta"])


def test_log_likelihood_is_the_models(mcmc, data):
    X, y = mcmc._args
    beta = np.asarray(data["posterior"]["beta"])[0, 0]
    expected = dist.Bernoulli(logits=X @ beta).log_prob(y)
    np.testing.assert_allclose(data["log_likelihood"]["y"][0, 0], expected, rtol=1e-4, atol=1e-5)


def test_extra_fields_reach_sample_stats(data):
    stats = data["sample_stats"]
    assert {"diverging", "step_size", "n_steps"} <= set(stats.data_vars)
    assert stats["step_size"].shape == (2, 300)


def test_summary_and_loo(data):
    summary = az.summary(data, var_names=["beta"])
    assert len(summary) == 2
    assert float(summary["r_hat"].astype(float).max()) < 1.05
    loo = az.loo(data)
    elpd = getattr(loo, "elpd_loo", None) if hasattr(loo, "elpd_loo") else loo.elpd
    assert np.isfinite(float(elpd))


@pytest.mark.filterwarnings("ignore")
def test_plots(data):
    import matplotlib

    matplotlib.use("Agg")
    az.plot_trace(data, var_names=["beta"])
    az.plot_rank(data, var_names=["beta"])


@pytest.mark.filterwarnings("ignore")
def test_netcdf_round_trip(data, tmp_path):
    xr = pytest.importorskip("xarray")
    pytest.importorskip("h5py")
    file = tmp_path / "draws.nc"
    data.to_netcdf(str(file))
    with xr.open_dataset(file, group="posterior", engine="h5netcdf") as posterior:
        np.testing.assert_array_equal(posterior["beta"], data["posterior"]["beta"])
