"""A batch size is recommended from the warm-up's noise and the time of a step."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC

from numpyro_sgmcmc import SHMC, HostArray, SGHMCSplit, suggest_subsample_size
from numpyro_sgmcmc.adaptation.batch_size import DrawPrediction
from numpyro_sgmcmc.diagnostics import SubsampleSizeSuggestion
from numpyro_sgmcmc.diagnostics.subsample_size import measure_step_cost
from numpyro_sgmcmc.errors import InvalidArgumentError, InvalidModelError

RNG = np.random.default_rng(0)
X = RNG.standard_normal((700, 3)).astype(np.float32)
Y = (RNG.random(700) < 0.5).astype(np.int32)


def logistic(x, y, batch_size=None):
    slope = numpyro.sample("slope", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ slope), obs=y[i])


@pytest.fixture(scope="module")
def kernel():
    return SGHMCSplit(logistic)


@pytest.fixture(scope="module")
def suggestion(kernel):
    return suggest_subsample_size(kernel, X, Y, num_chains=2, batch_size=100)


@pytest.mark.slow
def test_suggest_subsample_size_table_has_all_sizes(suggestion, kernel):
    sizes = suggestion.subsample_sizes["rows"]
    assert sizes == (25, 50, 100, 200, 400, 700)
    assert suggestion.steps_per_draw[sizes.index(100)] == kernel.adaptation.num_steps
    assert all(np.diff(suggestion.steps_per_draw) <= 0)
    assert all(0.0 < s < 1.0 for s in suggestion.seconds_per_draw)
    assert suggestion.best == sizes[suggestion.best_index]
    fastest = min(
        s
        for s, is_valid in zip(
            suggestion.seconds_per_draw, suggestion.is_within_target, strict=True
        )
        if is_valid
    )
    assert suggestion.seconds_per_draw[suggestion.best_index] <= 1.2 * fastest


def test_suggest_subsample_size_prints_the_table(kernel, suggestion, capsys):
    again = suggest_subsample_size(kernel, X, Y, num_chains=2, batch_size=100)
    printed = capsys.readouterr().out
    assert printed == f"{again}\n"
    (best_line,) = [line for line in printed.splitlines() if line.endswith("best")]
    assert best_line.split()[:2] == [f"{again.best:,}", str(again.steps_per_draw[again.best_index])]
    assert "<td>" in again._repr_html_()


def test_suggest_subsample_size_kernel_keeps_the_warm_up(kernel, suggestion):
    adaptation = kernel.adaptation
    mcmc = MCMC(kernel, num_warmup=10, num_samples=10, progress_bar=False)
    mcmc.run(jax.random.key(1), X, Y, batch_size=100)
    assert kernel.adaptation is adaptation
    assert mcmc.get_samples()["slope"].shape == (10, 3)


@pytest.mark.parametrize("per_step", [1e-6, 1e-2])
def test_measure_step_cost_finds_the_time_of_rows_beside_that_of_coordinates(per_step):
    per_row, num_rows = 1e-8, 10 ** np.arange(2, 7)
    draws = [DrawPrediction({"rows": n}, n, 10, 10.0, True) for n in num_rows]
    timed = []

    def time_step(draw):
        timed.append(draw.num_rows)
        jitter = 0.98 if len(timed) % 2 == 0 else 1.0  # with few rows the larger one is faster
        return jitter * (per_step + per_row * draw.num_rows)

    step_cost = measure_step_cost(draws, time_step)
    assert timed == ([100, 1_000] if per_step < 1e-4 else list(num_rows))
    assert 0.5 * per_row < step_cost.per_row < 2.0 * per_row


@pytest.mark.slow
def test_suggest_subsample_size_several_plates_share_a_factor():
    def model(y, z, batch_size=None):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("a", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])
        with numpyro.plate("b", len(z), subsample_size=2 * batch_size) as i:
            numpyro.sample("z", dist.Normal(mu, 1), obs=z[i])

    suggestion = suggest_subsample_size(model, X[:, 0], X[:, 1], num_chains=1, batch_size=100)
    assert suggestion.subsample_sizes["a"][:4] == (25, 50, 100, 200)
    assert suggestion.subsample_sizes["b"][:4] == (50, 100, 200, 400)
    assert set(suggestion.best) == {"a", "b"}
    assert "subsample_size of 'b'" in str(suggestion)


@pytest.mark.slow
def test_suggest_subsample_size_rows_on_disk(tmp_path):
    np.save(tmp_path / "x.npy", X)
    x = HostArray(np.load(tmp_path / "x.npy", mmap_mode="r"))
    suggestion = suggest_subsample_size(logistic, x, Y, num_chains=1, batch_size=100)
    assert suggestion.subsample_sizes["rows"][0] == 25


def test_subsample_size_suggestion_marks_biased_sizes():
    suggestion = SubsampleSizeSuggestion(
        {"rows": (10, 20)}, (500, 400), (0.1, 0.01), (False, True), 1
    )
    header, *lines = str(suggestion).splitlines()
    assert header.split()[0] == "subsample_size"
    assert lines[0].split() == ["10", "500", "0.1", "*"]
    assert lines[1].split() == ["20", "400", "0.01", "best"]
    assert "Sizes marked *" in str(suggestion)


def unsubsampled(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(mu, 1).expand([len(y)]).to_event(1), obs=y)


def local_latent(y, batch_size=None):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        z = numpyro.sample("z", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(z, 1), obs=y[i])


@pytest.mark.filterwarnings("ignore::numpyro_sgmcmc.errors.PlateWarning")
@pytest.mark.parametrize(
    ("model", "kwargs", "named"),
    [(unsubsampled, {}, "plate"), (local_latent, {"batch_size": 10}, "'z'")],
)
def test_suggest_subsample_size_models_without_a_prediction_raise(model, kwargs, named):
    with pytest.raises(InvalidModelError, match=named):
        suggest_subsample_size(model, jnp.asarray(X[:, 0]), **kwargs)


def test_suggest_subsample_size_nothing_measured_raises():
    kernel = SGHMCSplit(
        logistic,
        step_size=0.01,
        num_steps=5,
        gradient_estimator="minibatch",
        subsampling="contiguous",
        adapt_mass_matrix=False,
    )
    with pytest.raises(InvalidArgumentError, match="settings"):
        suggest_subsample_size(kernel, X, Y, num_chains=1, batch_size=100)


def test_suggest_subsample_size_potential_function_raises():
    kernel = SHMC(potential_fn=lambda z: 0.5 * z**2)
    with pytest.raises(InvalidArgumentError, match="potential_fn"):
        suggest_subsample_size(kernel)
