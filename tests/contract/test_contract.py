"""The NumPyro contract: what works with NUTS works with every kernel."""

from __future__ import annotations

import pickle
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import (
    MCMC,
    NUTS,
    Predictive,
    init_to_feasible,
    init_to_mean,
    init_to_median,
    init_to_sample,
    init_to_uniform,
    init_to_value,
    log_likelihood,
)

from numpyro_sgmcmc import SGHMCSplit
from tests.contract.kernels import (
    BATCH,
    ROWS,
    as_jax,
    assert_posterior,
    each_kernel,
    ignore_donation,
    num_compilations,
    quietly,
    survey,
    survey_data,
    survey_posterior,
)

EXTRA_FIELDS = (
    "adapt_state.step_size",
    "adapt_state.inverse_mass_matrix",
    "num_steps",
    "z.rate",
)


@pytest.fixture(scope="module")
def fit_of():
    """A run of two vectorized chains for each kernel, made when first asked for."""
    fits: dict[Any, SimpleNamespace] = {}

    def fit(kernel_class: Any) -> SimpleNamespace:
        if kernel_class not in fits:
            kernel, data = kernel_class(survey), survey_data()
            mcmc = quietly(
                kernel, num_samples=1200, thinning=2, num_chains=2, chain_method="vectorized"
            )
            mcmc.run(jax.random.key(1), *data, batch_size=BATCH, extra_fields=EXTRA_FIELDS)
            fits[kernel_class] = SimpleNamespace(
                kernel=kernel, mcmc=mcmc, data=data, draws=mcmc.get_samples(group_by_chain=True)
            )
        return fits[kernel_class]

    return fit


@pytest.fixture
def fit(fit_of):
    return fit_of(SGHMCSplit)


# What comes out of a run.


@each_kernel
@pytest.mark.parametrize("site", ["beta", "rate", "contrast"])
def test_posterior_is_right_with_default_arguments(fit_of, kernel_class, site):
    fit = fit_of(kernel_class)
    assert_posterior(fit.draws[site], *survey_posterior(fit.data)[site])


@each_kernel
def test_draws_have_numpyros_shapes(fit_of, kernel_class):
    fit = fit_of(kernel_class)
    shapes = {name: x.shape for name, x in fit.draws.items()}
    assert shapes == {"beta": (2, 600, 2), "contrast": (2, 600), "rate": (2, 600)}
    assert {name: x.shape for name, x in fit.mcmc.get_samples().items()} == {
        "beta": (1200, 2),
        "contrast": (1200,),
        "rate": (1200,),
    }
    assert all(x.dtype == jnp.float32 for x in fit.draws.values())


@each_kernel
def test_chains_start_apart_and_differ(fit_of, kernel_class):
    fit = fit_of(kernel_class)
    a, b = np.asarray(fit.draws["beta"])
    assert not np.isclose(a, b).all(axis=-1).any()
    arguments = (tuple(fit.data), {"batch_size": BATCH})
    keys = jax.random.split(jax.random.key(3), 100)
    starts = np.stack([fit.kernel.init(key, 20, None, *arguments).z["beta"] for key in keys])
    mean, sd = survey_posterior(fit.data)["beta"]
    spread = starts.std(0) / sd
    assert (spread > 1.5).all(), "R-hat means something only if the starts are over-dispersed"
    assert (np.abs(starts.mean(0) - mean) < 5 * spread * sd / np.sqrt(100)).all()


@each_kernel
def test_deterministic_outside_the_plate_follows_its_sites(fit_of, kernel_class):
    draws = fit_of(kernel_class).draws
    np.testing.assert_allclose(
        draws["contrast"], draws["beta"][..., 0] - draws["beta"][..., 1], rtol=1e-5, atol=1e-6
    )


@each_kernel
def test_extra_fields(fit_of, kernel_class):
    fit = fit_of(kernel_class)
    fields = fit.mcmc.get_extra_fields(group_by_chain=True)
    assert set(fields) == {*EXTRA_FIELDS, "diverging"}
    assert fields["adapt_state.step_size"].shape == (2, 600)
    assert (fields["adapt_state.step_size"] > 0).all()
    assert (fields["num_steps"] >= 1).all()
    assert fields["num_steps"].dtype == jnp.int32
    assert fields["diverging"].dtype == jnp.bool_
    assert not fields["diverging"].any()
    np.testing.assert_allclose(np.exp(fields["z.rate"]), fit.draws["rate"], rtol=1e-5)
    matrix = np.asarray(fields["adapt_state.inverse_mass_matrix"])
    assert matrix.shape == (2, 600, 3, 3)
    posterior = survey_posterior(fit.data)
    mean, sd = posterior["rate"]
    expected = np.array([*posterior["beta"][1], sd / mean])  # sd of the log rate
    np.testing.assert_allclose(np.sqrt(np.diagonal(matrix[0, 0])), expected, rtol=0.25)


@each_kernel
def test_summary_and_diagnostics(fit_of, kernel_class, capsys):
    fit = fit_of(kernel_class)
    fit.mcmc.print_summary()
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("beta[0]", "beta[1]", "rate"))
    assert "contrast" not in printed
    assert "Number of divergences: 0" in printed
    state = jax.tree.map(lambda x: x[0], fit.mcmc.last_state._replace(rng_key=None))
    shown = fit.kernel.get_diagnostics_str(state)
    assert f"{int(state.num_steps)} steps" in shown
    assert f"{float(state.adapt_state.step_size):.2e}" in shown


# How chains are run.


def test_sequential_chains_are_the_vectorized_ones(fit):
    """Also: an excluded site, and JAX arrays in place of NumPy's."""
    mcmc = quietly(fit.kernel, num_samples=100, thinning=2, num_chains=2, chain_method="sequential")
    data = as_jax(fit.data)
    mcmc.run(jax.random.key(1), *data, batch_size=BATCH, extra_fields=("~z.rate",))
    draws = mcmc.get_samples(group_by_chain=True)
    assert set(draws) == {"beta", "contrast"}
    scale = survey_posterior(fit.data)["beta"][1]
    np.testing.assert_allclose(
        draws["beta"] / scale, fit.draws["beta"][:, :50] / scale, rtol=0, atol=0.02
    )


@pytest.mark.slow
@ignore_donation
def test_callable_chain_method(fit):
    mcmc = quietly(fit.kernel, num_samples=100, thinning=2, num_chains=2, chain_method=jax.vmap)
    mcmc.run(jax.random.key(1), *fit.data, batch_size=BATCH)
    scale = survey_posterior(fit.data)["beta"][1]
    np.testing.assert_allclose(
        mcmc.get_samples(group_by_chain=True)["beta"] / scale,
        fit.draws["beta"][:, :50] / scale,
        rtol=0,
        atol=0.02,
    )


@pytest.fixture
def progress_bar(monkeypatch):
    """NumPyro shows none under CI and pytest-xdist, unless told."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.delenv("CI", raising=False)


def test_warmup_then_run_then_more(fit, progress_bar):
    """Warm-up draws, the state after it, and a chain continued from its last state."""
    rows = {"batch_size": BATCH}
    mcmc = quietly(fit.kernel, num_warmup=30, num_samples=30, progress_bar=True)
    mcmc.warmup(jax.random.key(5), *fit.data, **rows, collect_warmup=True)
    assert mcmc.get_samples()["beta"].shape == (30, 2)
    state = mcmc.post_warmup_state
    assert int(state.i) == 30
    mcmc.run(state.rng_key, *fit.data, **rows)
    assert int(mcmc.last_state.i) == 60
    first = np.asarray(mcmc.get_samples()["beta"])
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(mcmc.post_warmup_state.rng_key, *fit.data, **rows)
    second = np.asarray(mcmc.get_samples()["beta"])

    mcmc.num_samples = 60
    mcmc.post_warmup_state = state
    mcmc.run(state.rng_key, *fit.data, **rows)
    uninterrupted = np.asarray(mcmc.get_samples()["beta"])
    np.testing.assert_allclose(np.concatenate([first, second]), uninterrupted, rtol=1e-4)


def test_pickled_kernel_chains_and_states(fit):
    kernel, mcmc, state = pickle.loads(pickle.dumps((fit.kernel, fit.mcmc, fit.mcmc.last_state)))
    assert kernel.model == fit.kernel.model
    np.testing.assert_array_equal(mcmc.get_samples()["beta"], fit.mcmc.get_samples()["beta"])
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(fit.mcmc.last_state), strict=True):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)
    draws = []
    for sampler in (kernel, fit.kernel):
        chains = quietly(sampler, num_samples=40, num_chains=2, chain_method="vectorized")
        chains.post_warmup_state = state
        chains.run(state.rng_key, *fit.data, batch_size=BATCH)
        draws.append(chains.get_samples()["beta"])
    np.testing.assert_allclose(*draws, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(jax.random.PRNGKey(7), marks=pytest.mark.slow),
        jax.random.key(7, impl="rbg"),
    ],
    ids=["raw", "typed, of another implementation"],
)
def test_random_keys_of_every_kind(fit, key):
    mcmc = quietly(fit.kernel, num_samples=200, num_chains=2, chain_method="vectorized")
    mcmc.run(key, *fit.data, batch_size=BATCH)
    draws = mcmc.get_samples(group_by_chain=True)["beta"]
    assert not np.isclose(draws[0], draws[1]).all(axis=-1).any()
    assert_posterior(draws, *survey_posterior(fit.data)["beta"])


def test_one_raw_key_and_one_typed_key_make_the_same_chain(fit):
    """One chain: a raw key of shape (2,) is not a batch of two keys."""
    states = [
        fit.kernel.init(key, 0, None, tuple(fit.data), {"batch_size": BATCH})
        for key in (jax.random.key(2), jax.random.PRNGKey(2))
    ]
    assert states[0].z["beta"].shape == (2,)
    np.testing.assert_array_equal(states[0].z["beta"], states[1].z["beta"])


def test_no_warmup_and_progress_bar(fit, progress_bar, capsys):
    mcmc = MCMC(fit.kernel, num_warmup=0, num_samples=300, progress_bar=True)
    mcmc.run(jax.random.key(4), *fit.data, batch_size=BATCH)
    assert int(mcmc.last_state.i) == 300
    assert "steps of size" in capsys.readouterr().err
    after_a_while = mcmc.get_samples(group_by_chain=True)["beta"][:, 50:]
    assert_posterior(after_a_while, *survey_posterior(fit.data)["beta"])


def test_jitted_model_arguments_take_other_data(progress_bar):
    """NumPyro traces every argument then, so that the minibatch's size is no argument."""
    kernel = SGHMCSplit(partial(survey, batch_size=BATCH))
    mcmc = quietly(kernel, num_samples=300, jit_model_args=True, progress_bar=True)
    for seed in (0, 1):
        data = as_jax(survey_data(seed))
        mcmc.run(jax.random.key(seed), *data)
        draws = mcmc.get_samples(group_by_chain=True)["beta"]
        assert_posterior(draws, *survey_posterior(data)["beta"])


# Where chains start.


def test_init_params_are_where_the_chain_starts(fit):
    arguments = (tuple(fit.data), {"batch_size": BATCH})
    one = {"beta": jnp.array([0.5, -0.2]), "rate": jnp.array(1.0)}
    state = fit.kernel.init(jax.random.key(0), 10, one, *arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), state.z, one)
    two = {"beta": jnp.array([[0.5, -0.2], [0.6, -0.4]]), "rate": jnp.array([1.0, 1.2])}
    keys = jax.random.split(jax.random.key(0), 2)
    states = fit.kernel.init(keys, 10, two, *arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), states.z, two)


def test_init_params_pass_through_a_run_of_two_chains(fit):
    """From 300 sds away the first of many short iterations is still on its way."""
    far = {"beta": np.full((2, 2), 15.0), "rate": np.array([1.0, 1.0])}
    mcmc = quietly(
        fit.kernel, num_warmup=0, num_samples=40, num_chains=2, chain_method="vectorized"
    )
    mcmc.run(jax.random.key(0), *fit.data, batch_size=BATCH, init_params=far)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["beta"])
    mean, sd = survey_posterior(fit.data)["beta"]
    assert (np.abs(draws[:, 0] - mean) > 10 * sd).any()
    assert (np.abs(draws[:, -10:] - mean) < 8 * sd).all()


def two_modes(y: Any, batch_size: int | None = None) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(jnp.abs(mu), 1), obs=y[i])


@pytest.mark.parametrize("side", [-1.0, 1.0])
def test_init_to_value_chooses_the_mode(side):
    y = np.random.default_rng(0).normal(3.0, 1.0, 100).astype(np.float32)
    kernel = SGHMCSplit(two_modes, init_strategy=init_to_value(values={"mu": 5.0 * side}))
    state = kernel.init(jax.random.key(0), 10, None, (y,), {"batch_size": 20})
    np.testing.assert_allclose(state.adapt_state.anchor, side * y.mean(), atol=0.05)


class _Seen(Exception):
    """Raised in place of the warm-up."""


STARTS = {
    "uniform": (init_to_uniform, lambda beta, rate: np.abs([*beta, np.log(rate)]).max() <= 2),
    "uniform, narrow": (
        init_to_uniform(radius=0.1),
        lambda beta, rate: 0 < np.abs([*beta, np.log(rate)]).max() <= 0.1,
    ),
    "median": (init_to_median(num_samples=501), lambda beta, rate: abs(rate - 1.68) < 0.3),
    "sample": (init_to_sample, lambda beta, rate: np.unique([*beta, rate]).size == 3),
    "mean": (init_to_mean, lambda beta, rate: np.allclose([*beta, rate], [0, 0, 2])),
    "feasible": (init_to_feasible, lambda beta, rate: np.allclose([*beta, rate], [0, 0, 1])),
    "value": (
        init_to_value(values={"beta": jnp.array([3.0, 4.0]), "rate": 5.0}),
        lambda beta, rate: np.allclose([*beta, rate], [3, 4, 5]),
    ),
}


@pytest.mark.parametrize("name", STARTS)
def test_warmup_starts_where_the_strategy_says(name, monkeypatch):
    strategy, is_right = STARTS[name]

    def adapt(target, arguments, settings, starts, progress):
        position = next(iter(starts))
        raise _Seen(target.constrain(target.unravel(jnp.asarray(position)), arguments))

    monkeypatch.setattr("numpyro_sgmcmc.samplers.base.adapt", adapt)
    kernel = SGHMCSplit(survey, init_strategy=strategy)
    with pytest.raises(_Seen) as seen:
        kernel.init(jax.random.key(0), 10, None, tuple(survey_data()), {"batch_size": BATCH})
    found = seen.value.args[0]
    assert is_right(np.asarray(found["beta"]), float(found["rate"])), found


# The model seen from outside.


@each_kernel
def test_kernel_model_is_the_model_on_all_rows(kernel_class):
    kernel = kernel_class(survey)
    assert kernel.model == kernel_class(survey).model
    assert kernel.model == kernel.model
    assert hash(kernel.model) == hash(kernel.model)
    assert kernel.model != kernel_class(two_modes).model
    seeded = numpyro.handlers.seed(kernel.model, jax.random.key(0))
    trace = numpyro.handlers.trace(seeded).get_trace(*survey_data(), batch_size=BATCH)
    assert trace["y"]["value"].shape == (ROWS,)
    np.testing.assert_array_equal(trace["y"]["value"], survey_data().y)


def test_predictive_and_log_likelihood(fit):
    draws = {k: v[:7] for k, v in fit.mcmc.get_samples().items()}
    key, X = jax.random.key(0), jnp.asarray(fit.data.X)
    on_kernel_model = Predictive(fit.kernel.model, draws)(key, fit.data.X, batch_size=BATCH)
    on_model = Predictive(survey, draws)(key, X)
    on_minibatches = Predictive(survey, draws)(key, X, batch_size=BATCH)
    assert on_kernel_model["y"].shape == (7, ROWS)
    assert on_model["y"].shape == (7, ROWS)
    assert on_minibatches["y"].shape == (7, BATCH)
    by_row = log_likelihood(fit.kernel.model, draws, *fit.data, batch_size=BATCH)
    residual = fit.data.y - draws["beta"] @ fit.data.X.T
    expected = -0.5 * np.square(residual) - 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(by_row["y"], expected, rtol=1e-4, atol=1e-4)
    assert by_row["counts"].shape == (7, ROWS)


@each_kernel
def test_refresh_constrain_and_wrap(fit_of, kernel_class):
    fit = fit_of(kernel_class)
    arguments = (tuple(fit.data), {"batch_size": BATCH})
    state = fit.kernel.init(jax.random.key(0), 10, None, *arguments)
    constrained = fit.kernel.get_constrain_fn(*arguments)(state.z)
    assert set(constrained) == {"beta", "rate"}
    np.testing.assert_allclose(constrained["rate"], np.exp(state.z["rate"]), rtol=1e-5)
    processed = fit.kernel.postprocess_fn(*arguments)(state.z)
    assert set(processed) == {"beta", "rate", "contrast"}

    same = fit.kernel.refresh(state, *arguments)
    jax.tree.map(np.testing.assert_array_equal, same.z, state.z)
    after = jax.jit(lambda state: fit.kernel.sample(state, *arguments))(same)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after.z))
    assert not np.array_equal(after.z["beta"], state.z["beta"])

    calls = []

    def wrapper(model):
        calls.append(model)
        return lambda *args, **kwargs: model(*args, **kwargs)

    wrapped = fit.kernel.wrap_model(wrapper)
    assert type(wrapped) is kernel_class
    assert calls == [survey]
    assert wrapped.model != fit.kernel.model
    assert wrapped._sample_fn is None, "NumPyro must initialise the copy anew"
    assert fit.kernel._sample_fn is not None


def test_wrapped_kernel_samples_the_wrapped_model():
    def ten_higher(model):
        return numpyro.handlers.substitute(model, data={"shift": 10.0})

    def model(y, batch_size=None):
        shift = numpyro.param("shift", 0.0)
        mu = numpyro.sample("mu", dist.Normal(0, 100))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(mu + shift, 1), obs=y[i])

    y = np.random.default_rng(0).normal(3.0, 1.0, 100).astype(np.float32)
    kernel = SGHMCSplit(model).wrap_model(ten_higher)
    state = kernel.init(jax.random.key(0), 10, None, (y,), {"batch_size": 20})
    assert abs(float(state.adapt_state.anchor[0]) - (y.mean() - 10)) < 0.05


# What is compiled.


def counts(y: Any, batch_size: int | None = None) -> None:
    rate = numpyro.sample("rate", dist.Gamma(2, 1))
    with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Poisson(rate), obs=y[i])


def test_second_run_compiles_no_more_than_with_nuts(progress_bar):
    rng = np.random.default_rng(0)
    first, other = (jnp.asarray(rng.poisson(3.0, 200)) for _ in range(2))

    def compilations(kernel, has_bar, data, **rows):
        mcmc = MCMC(kernel, num_warmup=5, num_samples=5, progress_bar=has_bar)

        def run(seed, y):
            mcmc.run(jax.random.key(seed), y, **rows)
            return mcmc.get_samples()

        return [num_compilations(partial(run, seed, y)) for seed, y in enumerate(data)][1:]

    ours, nuts = SGHMCSplit(counts), NUTS(counts)
    for has_bar, data in ((True, (first, first)), (False, (first, other))):
        found = compilations(ours, has_bar, data, batch_size=20)
        allowed = compilations(nuts, has_bar, data)
        assert found <= allowed, f"with progress_bar={has_bar}"


# Float64.


def test_float64(x64):
    y = np.random.default_rng(0).poisson(3.0, 200)
    mcmc = quietly(SGHMCSplit(counts), num_samples=300)
    mcmc.run(jax.random.key(0), y, batch_size=20)
    draws = mcmc.get_samples(group_by_chain=True)["rate"]
    assert draws.dtype == jnp.float64
    for x in jax.tree.leaves(mcmc.last_state._replace(rng_key=None)):
        assert x.dtype == jnp.float64 or not jnp.issubdtype(x.dtype, jnp.floating)
    shape, rate = 2 + y.sum(), 1 + len(y)
    assert_posterior(draws, shape / rate, np.sqrt(shape) / rate)


# A potential function in place of a model.


def tree_potential(z: Any) -> Any:
    """Sd 2 at mean 1, and sds 0.1 at mean 0."""
    a, b = z["a"], z["b"][0]["c"]
    return jnp.sum(jnp.square((a - 1) / 2)) / 2 + jnp.sum(jnp.square(b / 0.1)) / 2


def test_potential_function_of_a_nested_tree_and_several_chains():
    kernel = SGHMCSplit(potential_fn=tree_potential)
    assert kernel.model is None
    mcmc = quietly(kernel, num_samples=1000, num_chains=2, chain_method="vectorized")
    start = {"a": np.zeros((2, 3)), "b": ({"c": np.zeros((2, 1, 2))},)}
    mcmc.run(jax.random.key(0), init_params=start)
    draws = mcmc.get_samples(group_by_chain=True)
    a, b = draws["a"], draws["b"][0]["c"]
    assert a.shape == (2, 1000, 3)
    assert b.shape == (2, 1000, 1, 2)
    assert_posterior(a, np.full(3, 1.0), np.full(3, 2.0))
    assert_posterior(b, np.zeros((1, 2)), np.full((1, 2), 0.1))


def cliff(z: Any) -> Any:
    """A standard normal whose gradient is not a number where a coordinate exceeds 2.5."""
    return jnp.sum(jnp.square(z) / 2 + 1e-6 * jnp.sqrt(2.5 - z))


@each_kernel
def test_divergences_are_counted_and_survived(kernel_class, capsys):
    """Also: a potential function of an array, and one chain from one start."""
    mcmc = quietly(kernel_class(potential_fn=cliff), num_samples=2000)
    mcmc.run(jax.random.key(0), init_params=jnp.zeros(2))
    draws = np.asarray(mcmc.get_samples())
    diverging = np.asarray(mcmc.get_extra_fields()["diverging"])
    assert draws.shape == (2000, 2)
    assert np.isfinite(draws).all()
    assert 0 < diverging.sum() < 1000
    assert draws.max() < 3
    # The chain goes on: it neither rests beside the cliff nor shuns the region before it.
    is_new = (np.diff(draws, axis=0) != 0).all(1)
    assert is_new[~diverging[1:]].all()
    assert is_new.sum() > 1000
    assert (np.diff(np.flatnonzero(is_new)) < 100).all()
    assert (np.abs(draws.mean(0)) < 0.3).all()
    assert (draws.std(0) > 0.8).all()
    mcmc.print_summary()
    assert f"Number of divergences: {diverging.sum()}" in capsys.readouterr().out
