"""A run in ArviZ, by `az.from_numpyro` and `to_arviz`, and leave-one-out cross-validation."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, init_to_feasible, log_likelihood
from scipy import stats

from numpyro_sgmcmc import HostArray, SGHMCSplit, loo, to_arviz
from numpyro_sgmcmc.diagnostics.predictive import evaluate_plate_sites

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
    numpyro.deterministic("odds", jnp.exp(beta))
    with numpyro.plate("rows", len(X), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(X[i] @ beta, sd), obs=y[i])


def normal_mean(X, y, batch_size=None):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(mean, 1), obs=y[i])


def fit(model, *data, **fields):
    """Run with settings for posterior SDs of about 1 / sqrt(N), without adaptation."""
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
    return fit(regression, X, Y, extra_fields=("num_steps", "adapt_state.step_size"))


@pytest.fixture(scope="module")
def other():
    return fit(normal_mean, X, Y)


@pytest.fixture(scope="module")
def exact(mcmc):
    """NumPyro's log likelihoods of all draws and rows, by chain."""
    values = log_likelihood(mcmc.sampler.model, mcmc.get_samples(), X, Y)["y"]
    return np.asarray(values).reshape(2, 250, N)


@pytest.fixture(scope="module")
def numpyro_data(mcmc):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return az.from_numpyro(mcmc, log_likelihood=True)


# az.from_numpyro


def test_from_numpyro_has_all_rows_of_the_run(mcmc, numpyro_data, exact):
    data = numpyro_data
    np.testing.assert_array_equal(data["observed_data"]["y"], Y)
    np.testing.assert_array_equal(data["posterior"]["beta"], mcmc.get_samples(True)["beta"])
    assert data["posterior"]["odds"].shape == (2, 250, 3)
    np.testing.assert_allclose(data["log_likelihood"]["y"], exact, rtol=1e-4, atol=1e-4)
    assert {"diverging", "step_size", "n_steps"} <= set(data["sample_stats"].data_vars)
    assert data["sample_stats"]["step_size"].shape == (2, 250)


def test_from_numpyro_without_log_likelihood_has_the_observed_data(mcmc):
    data = az.from_numpyro(mcmc, log_likelihood=False)
    np.testing.assert_array_equal(data["observed_data"]["y"], Y)


def test_summary_of_arviz_covers_the_run(numpyro_data):
    summary = az.summary(numpyro_data, var_names=["beta"])
    assert len(summary) == 3
    assert float(summary["r_hat"].astype(float).max()) < 1.05


@pytest.mark.filterwarnings("ignore")
def test_plots_of_arviz_take_the_run(numpyro_data):
    import matplotlib

    matplotlib.use("Agg")
    az.plot_trace(numpyro_data, var_names=["beta"])
    az.plot_rank(numpyro_data, var_names=["beta"])


@pytest.mark.filterwarnings("ignore")
def test_netcdf_of_arviz_keeps_the_draws(numpyro_data, tmp_path):
    xr = pytest.importorskip("xarray")
    pytest.importorskip("h5py")
    file = tmp_path / "draws.nc"
    numpyro_data.to_netcdf(str(file))
    with xr.open_dataset(file, group="posterior", engine="h5netcdf") as posterior:
        np.testing.assert_array_equal(posterior["beta"], numpyro_data["posterior"]["beta"])


# to_arviz


def test_to_arviz_has_draws_fields_and_data(mcmc):
    data = to_arviz(mcmc)
    np.testing.assert_array_equal(data["posterior"]["beta"], mcmc.get_samples(True)["beta"])
    np.testing.assert_array_equal(data["observed_data"]["y"], Y)
    assert "n_steps" in data["sample_stats"]
    groups = data.groups() if callable(data.groups) else data.groups
    assert "log_likelihood" not in {g.strip("/") for g in groups}


def test_to_arviz_with_all_rows_has_numpyros_log_likelihood(mcmc, exact):
    values = to_arviz(mcmc, log_likelihood=True)["log_likelihood"]["y"]
    assert values.dims == ("chain", "draw", "rows")
    np.testing.assert_allclose(values, exact, rtol=1e-4, atol=1e-4)


def test_log_likelihood_does_not_depend_on_chunks(mcmc, exact):
    samples = mcmc.get_samples(group_by_chain=True)
    values, axes = evaluate_plate_sites(mcmc, samples, np.arange(N), max_rows_per_chunk=150)
    assert axes == {"y": -1}
    np.testing.assert_allclose(values["y"], exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [30, [5, 3, 399]])
def test_to_arviz_with_some_rows_has_their_indices(mcmc, exact, rows):
    values = to_arviz(mcmc, log_likelihood=rows)["log_likelihood"]["y"]
    indices = np.asarray(values.coords["rows"])
    assert len(set(indices)) == (rows if rows == 30 else 3)
    if rows != 30:
        np.testing.assert_array_equal(indices, rows)
    np.testing.assert_allclose(values, exact[..., indices], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_to_arviz_with_rows_on_the_host_has_draws_and_log_likelihood():
    mcmc = fit(regression, HostArray(X), HostArray(Y), extra_fields=("num_steps",))
    data, draws = to_arviz(mcmc, log_likelihood=[7, 8]), mcmc.get_samples(group_by_chain=True)
    np.testing.assert_array_equal(data["posterior"]["sd"], draws["sd"])
    expected = dist.Normal(draws["beta"] @ X[7:9].T, draws["sd"][..., None]).log_prob(Y[7:9])
    np.testing.assert_allclose(data["log_likelihood"]["y"], expected, rtol=1e-4, atol=1e-4)
    assert data["sample_stats"]["num_steps"].shape == (2, 250)


def test_to_arviz_with_invalid_rows_raises(mcmc):
    with pytest.raises(ValueError, match="`log_likelihood` is 500"):
        to_arviz(mcmc, log_likelihood=500)
    with pytest.raises(ValueError, match=r"`rows`.*'rows'"):
        to_arviz(mcmc, log_likelihood=[400])
    with pytest.raises(ValueError, match="`to_arviz`"):
        to_arviz(MCMC(SGHMCSplit(regression), num_warmup=1, num_samples=1))


# Leave-one-out cross-validation


def arviz_loo(data):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a Pareto k of some row
        return az.loo(data, pointwise=True)


def arviz_value(result, name_0x, name_1x):
    return result[name_0x] if az.__version__ < "1" else getattr(result, name_1x)


def assert_errors_are_as_large_as_estimated(estimates, exact):
    errors = np.array([(e.elpd - exact.elpd) / e.subsampling_se for e in estimates])
    assert 0.4 < np.sqrt(np.mean(errors**2)) < 2.0


def test_loo_of_all_rows_is_arvizs(mcmc, numpyro_data):
    expected, estimate = arviz_loo(numpyro_data), loo(mcmc, N)
    elpd = arviz_value(expected, "elpd_loo", "elpd")
    assert estimate.elpd == pytest.approx(float(elpd), abs=0.02)
    assert estimate.se == pytest.approx(float(expected.se), rel=0.01)
    assert estimate.subsampling_se == 0.0
    assert estimate.p_loo == pytest.approx(float(arviz_value(expected, "p_loo", "p")), abs=0.05)


def test_loo_of_some_rows_has_errors_as_estimated(mcmc):
    exact, estimates = loo(mcmc, N), [loo(mcmc, 40, seed) for seed in range(12)]
    assert_errors_are_as_large_as_estimated(estimates, exact)
    assert np.mean([e.subsampling_se for e in estimates]) < 0.1 * exact.se
    assert estimates[0].pareto_k.shape == estimates[0].indices.shape == (40,)
    text = str(estimates[0])
    assert f"elpd   {estimates[0].elpd:.1f}" in text
    assert "40 of 400 rows" in text
    assert len(text.splitlines()) == 4


def test_subsampling_error_of_loo_is_that_of_a_sample_without_replacement(mcmc):
    """Its square has an expectation of the error's variance, also at few rows."""
    estimate = loo(mcmc, 3)
    residuals = estimate.elpd_i - estimate.plpd_i
    expected = N * np.sqrt(1.0 - 3 / N) * stats.sem(residuals)
    assert estimate.subsampling_se == pytest.approx(expected, rel=1e-9)
    assert np.isnan(loo(mcmc, 1).subsampling_se)


def test_loo_difference_of_all_rows_is_arvizs(mcmc, other, numpyro_data):
    difference = loo(mcmc, N) - loo(other, N)
    data = (numpyro_data, az.from_numpyro(other, log_likelihood=True))
    parts = [np.asarray(arviz_value(arviz_loo(d), "loo_i", "elpd_i")).ravel() for d in data]
    assert difference.elpd == pytest.approx((parts[0] - parts[1]).sum(), abs=0.02)
    assert difference.se == pytest.approx(np.sqrt(N) * (parts[0] - parts[1]).std(), rel=0.01)
    assert difference.subsampling_se == 0.0


@pytest.mark.slow
def test_loo_difference_of_some_rows_has_errors_as_estimated(mcmc, other):
    exact = loo(mcmc, N) - loo(other, N)
    estimates = [loo(mcmc, 40, seed) - loo(other, 40, seed) for seed in range(12)]
    assert_errors_are_as_large_as_estimated(estimates, exact)


def test_loo_difference_of_some_rows_is_printed(mcmc, other):
    difference = loo(mcmc, 40) - loo(other, 40)
    assert f"elpd difference  {difference.elpd:.1f}" in str(difference)


def test_loo_difference_at_other_rows_raises(mcmc, other):
    with pytest.raises(ValueError, match=r"`loo`.*rows"):
        loo(mcmc, 40, 1) - loo(other, 40, 2)
    with pytest.raises(TypeError):
        loo(mcmc, 40) - 1.0


def test_loo_of_an_unsupported_model_raises(mcmc):
    def two_outcomes(X, y, batch_size=None):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with numpyro.plate("rows", len(X), subsample_size=batch_size) as i:
            numpyro.sample("x", dist.Normal(mean, 1), obs=jnp.asarray(X)[i, 0])
            numpyro.sample("y", dist.Normal(mean, 1), obs=jnp.asarray(y)[i])

    with pytest.raises(ValueError, match="`num_rows`"):
        loo(mcmc, 0)
    with pytest.raises(ValueError, match=r"one observed site.*'x', 'y'"):
        loo(fit(two_outcomes, X, Y), 10)


@pytest.mark.slow
def test_log_likelihood_of_local_latents_raises_and_draws_are_converted():
    def means(X, y, batch_size=None):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            local = numpyro.sample("local", dist.Normal(mean, 1))
            numpyro.sample("y", dist.Normal(local, 1), obs=y[i])

    def sample_local(rng_key, gibbs_sites, hmc_sites, rows, model_args):
        mean = (hmc_sites["mean"] + model_args[1][rows]) / 2
        return {"local": dist.Normal(mean, 0.5**0.5).sample(rng_key)}

    kernel = SGHMCSplit(means, gibbs_fn=sample_local, gibbs_sites=["local"])
    mcmc = MCMC(kernel, num_warmup=2, num_samples=4, progress_bar=False)
    mcmc.run(jax.random.key(0), X, Y, batch_size=40)
    assert to_arviz(mcmc)["posterior"]["mean"].shape == (1, 4)
    for call in (lambda: to_arviz(mcmc, log_likelihood=3), lambda: loo(mcmc)):
        with pytest.raises(ValueError, match="`gibbs_fn` samples"):
            call()
