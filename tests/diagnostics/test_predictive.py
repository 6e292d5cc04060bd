"""Functions of draws by chunks, their summary, and replicated data."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC, BarkerMH, Predictive
from scipy import stats

from numpyro_sgmcmc import HostArray, SGHMCSplit, posterior_predictive
from numpyro_sgmcmc.diagnostics import predictive_summary
from numpyro_sgmcmc.diagnostics.predictive import DrawFunctions, evaluate_plate_sites
from tests.contract.kernels import quietly

# Deterministic sites inside the plate are not among the draws.
pytestmark = pytest.mark.filterwarnings("ignore:.*deterministic")

RNG = np.random.default_rng(0)
DRAWS = {"beta": RNG.standard_normal((3, 80, 2)).astype(np.float32)}
REFERENCE = {"beta": RNG.standard_normal((2, 90, 2)).astype(np.float32) + 0.3}
X = RNG.standard_normal((23, 2)).astype(np.float32)


def mean(draw, X):
    return X @ draw["beta"]


def model(X, y=None):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    eta = numpyro.deterministic("eta", X @ beta)
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=y)


# Summary of functions of the draws


def test_predictive_summary_equals_its_definitions():
    summary = predictive_summary(DRAWS, mean, X, reference=REFERENCE)["mean"]
    values = np.einsum("csd,nd->csn", DRAWS["beta"].astype(np.float64), X)
    reference = np.einsum("csd,nd->csn", REFERENCE["beta"].astype(np.float64), X)
    np.testing.assert_allclose(summary.mean, values.mean((0, 1)), atol=1e-6)
    np.testing.assert_allclose(summary.sd, values.std((0, 1)), rtol=1e-5)
    np.testing.assert_allclose(summary.r_hat, split_gelman_rubin(values), rtol=1e-5)
    np.testing.assert_allclose(summary.ess, effective_sample_size(values), rtol=1e-3)

    def distance(x, y):
        return stats.ks_2samp(x.ravel(), y.ravel()).statistic

    for k in range(len(X)):
        chains = [(values[c, :, k], np.delete(values, c, 0)[..., k]) for c in range(3)]
        between = np.mean([distance(*pair) for pair in chains])
        assert summary.between_chain_distance[k] == pytest.approx(between, abs=1e-6)
        to_reference = distance(values[..., k], reference[..., k])
        assert summary.distance_to_reference[k] == pytest.approx(to_reference, abs=1e-6)
        within = distance(reference[0, :, k], reference[1, :, k])
        assert summary.reference_between_chain_distance[k] == pytest.approx(within, abs=1e-6)


@pytest.mark.parametrize("max_elements", [1, 3 * 80 * 5, 3 * 80 * 23])
def test_iterate_chunks_does_not_depend_on_chunks(max_elements):
    functions = DrawFunctions.from_fn(mean, (X,))
    chunks = functions.iterate_chunks([DRAWS], random.key(0), max_elements, 7)
    chunked = np.concatenate([values["mean"] for (values,) in chunks], axis=2)
    expected = np.einsum("csd,nd->csn", DRAWS["beta"], X)
    np.testing.assert_allclose(chunked, expected, rtol=1e-5, atol=1e-6)


def test_predictive_summary_of_a_predictive_is_numpyros():
    summary = predictive_summary(DRAWS, Predictive(model, num_samples=1), X)
    eta = predictive_summary(DRAWS, mean, X)["mean"]
    np.testing.assert_allclose(summary["eta"].mean, eta.mean, rtol=1e-5, atol=1e-6)
    flat = {"beta": DRAWS["beta"].reshape(-1, 2)}
    y = Predictive(model, flat)(random.key(1), X)["y"]
    error = np.hypot(summary["y"].sd, y.std(0)) / np.sqrt(len(y))
    assert (np.abs(summary["y"].mean - y.mean(0)) < 4.5 * error).all()
    only_y = predictive_summary(DRAWS, Predictive(model, num_samples=1, return_sites=["y"]), X)
    assert set(only_y.functions) == {"y"}


def test_predictive_summary_of_a_function_invariant_to_the_mode_converges():
    """Each chain is in one of two modes, mirror images with the same product."""
    sign = np.array([1, 1, -1, -1])[:, None, None]
    beta = sign * (5 + 0.1 * RNG.standard_normal((4, 200, 2)))

    def both(draw):
        return {"product": draw["beta"][0] * draw["beta"][1], "first": draw["beta"][0]}

    summary = predictive_summary({"beta": beta}, both)
    assert summary["first"].r_hat > 10
    assert summary["first"].between_chain_distance > 0.6
    assert summary["product"].r_hat < 1.05
    assert summary["product"].between_chain_distance < 2 * summary["product"].expected_distance


def test_expected_distance_is_that_of_independent_draws():
    draws = {"x": np.random.default_rng(1).standard_normal((4, 500, 60)).astype(np.float32)}
    summary = predictive_summary(draws, lambda z: z["x"])["<lambda>"]
    expected = summary.expected_distance.mean()
    assert summary.between_chain_distance.mean() == pytest.approx(expected, rel=0.1)


def test_predictive_summary_of_a_run_of_numpyro_prints_and_converts():
    mcmc = MCMC(BarkerMH(model), num_warmup=50, num_samples=60, num_chains=1, progress_bar=False)
    with pytest.raises(ValueError, match=r"`mcmc`.*without draws"):
        predictive_summary(mcmc, mean, X)
    y = RNG.poisson(1.0, len(X))
    mcmc.run(random.key(0), jnp.asarray(X), y)
    summary = predictive_summary(mcmc, mean, X, reference=DRAWS)
    header, row, *_ = str(summary).splitlines()
    assert header.split()[:4] == ["function", "size", "R-hat", "ESS"]
    assert row.split()[:2] == ["mean", "23"]
    html = summary._repr_html_()
    assert "<th>between chains</th>" in html
    assert "<td>mean</td><td>23</td>" in html
    dataset = summary.to_dataset()
    np.testing.assert_array_equal(dataset["mean"].sel(statistic="sd"), summary["mean"].sd)


def test_predictive_summary_of_a_constant_prints_a_dash():
    summary = predictive_summary(DRAWS, lambda d: {"same": jnp.ones(2), "x": d["beta"]})
    same, x = str(summary).splitlines()[1:3]
    assert same.split()[:4] == ["same", "2", "-", "-"]
    assert x.split()[0] == "x"


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ((DRAWS["beta"], mean, X), "`mcmc` is a ndarray"),
        ((DRAWS, "mean", X), "`fn` is a str"),
        ((DRAWS, mean, X, X[:4]), "number of rows"),
        ((DRAWS, lambda d, X: X.sum(0), X), r"`fn`.*shape \(2,\)"),
        ((DRAWS, lambda d: jnp.log(-jnp.abs(d["beta"]))), "`fn`.*not finite"),
        ((DRAWS, lambda d: random.key(0)), "`fn`.*numbers"),
        ((DRAWS, lambda d: d["gamma"]), "'gamma'"),
        ((DRAWS, lambda d: {}), "`fn` returns nothing"),
        (({**DRAWS, "other": DRAWS["beta"][:, :5]}, mean, X), "`mcmc`.*by site"),
        (({"beta": DRAWS["beta"][:, :1]}, mean, X), "`mcmc` has one draw"),
        ((DRAWS, mean, np.array([["a", "b"]])), "not all numbers"),
    ],
)
def test_predictive_summary_of_invalid_arguments_raises(args, match):
    with pytest.raises(ValueError, match=match):
        predictive_summary(*args)


def test_predictive_summary_with_a_reference_without_the_site_raises():
    with pytest.raises(ValueError, match=r"'beta'.*'alpha'"):
        predictive_summary(DRAWS, mean, X, reference={"alpha": REFERENCE["beta"]})


# Replicated data

N, NUM_DRAWS, SD, NEXT_SD = 60, 400, 0.5, 0.1
x = np.random.default_rng(0).standard_normal(N).astype(np.float32)


def two_outcomes(x, y, batch_size=None):
    """Model two outcomes, the second given the first; a factor is not an outcome."""
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    with numpyro.plate("rows", len(x), subsample_size=batch_size) as i:
        mean = numpyro.deterministic("mean", slope * x[i])
        first = numpyro.sample("first", dist.Normal(mean, SD), obs=y[i])
        numpyro.sample("next", dist.Normal(first, NEXT_SD), obs=y[i])
        numpyro.factor("factor", -0.5 * jnp.square(slope) * jnp.ones_like(mean))


def run(x, y):
    kernel = SGHMCSplit(
        two_outcomes,
        step_size=0.2,
        num_steps=3,
        gradient_estimator="minibatch",
        subsampling="contiguous",
        inverse_mass_matrix=np.full(1, 1e-3),
    )
    settings = {"num_samples": NUM_DRAWS, "num_chains": 2, "chain_method": "vectorized"}
    mcmc = quietly(kernel, num_warmup=5, **settings)
    mcmc.run(random.key(0), x, y, batch_size=20)
    return mcmc


@pytest.fixture(scope="module")
def mcmc():
    return run(jnp.asarray(x), jnp.asarray(3.0 * x))


def test_posterior_predictive_has_the_distribution_of_the_model(mcmc):
    samples = mcmc.get_samples(group_by_chain=True)
    # Chunks of 25 of 60 rows: the last overlaps with the one before.
    replicates, _ = evaluate_plate_sites(mcmc, samples, np.arange(N), random.key(1), 25)
    assert set(replicates) == {"mean", "first", "next"}
    slope = np.asarray(samples["slope"])
    np.testing.assert_allclose(replicates["mean"], slope[..., None] * x, rtol=1e-5)
    residuals = (
        (replicates["first"] - replicates["mean"]) / SD,
        (replicates["next"] - replicates["first"]) / NEXT_SD,
    )
    for z in residuals:
        assert z.shape == (2, NUM_DRAWS, N)
        assert abs(z.mean()) < 5 / np.sqrt(z.size)
        assert abs(z.std() - 1) < 5 / np.sqrt(2 * z.size)
        assert len(np.unique(z)) > 0.99 * z.size  # some float32 numbers occur twice
        for axis in range(3):  # independent over chains, draws and rows of all chunks
            for lag in (1, 10, 25) if axis else (1,):
                shifted = np.roll(z, lag, axis)
                assert abs((z * shifted).mean()) < 5 * np.sqrt(2 / z.size)


def test_posterior_predictive_at_some_rows_and_draws_selects_them(mcmc):
    rows = np.array([59, 0, 7])
    replicates = posterior_predictive(mcmc, random.key(1), rows, num_draws=3)
    slope = np.asarray(mcmc.get_samples(group_by_chain=True)["slope"])[:, [0, 199, 399]]
    np.testing.assert_allclose(replicates["mean"], slope[..., None] * x[rows], rtol=1e-5)
    assert replicates["first"].shape == (2, 3, 3)
    again = posterior_predictive(mcmc, random.key(1), rows, num_draws=3)
    np.testing.assert_array_equal(replicates["next"], again["next"])
    all_draws = posterior_predictive(mcmc, random.key(1), rows, 10**6)
    assert all_draws["mean"].shape == (2, NUM_DRAWS, 3)


@pytest.mark.slow
def test_posterior_predictive_with_rows_on_the_host_equals_that_in_memory(monkeypatch):
    monkeypatch.setattr("numpyro_sgmcmc.model.handlers.FullDataModel.max_bytes", 1)
    on_host, in_memory = run(HostArray(x), HostArray(3.0 * x)), run(x, 3.0 * x)
    replicates, expected = (
        posterior_predictive(m, random.key(1), num_draws=5) for m in (on_host, in_memory)
    )
    for name, values in replicates.items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="posterior_predictive"):
        on_host.sampler.model(*on_host._args)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"rng_key": 0}, "`rng_key`"),
        ({"rng_key": random.key(0), "rows": [60]}, "`rows`.*60 rows"),
        ({"rng_key": random.key(0), "rows": [0.5]}, "`rows`.*float"),
        ({"rng_key": random.key(0), "num_draws": 0}, "`num_draws`"),
    ],
)
def test_posterior_predictive_of_invalid_arguments_raises(mcmc, arguments, match):
    with pytest.raises(ValueError, match=match):
        posterior_predictive(mcmc, **arguments)
