"""The NumPyro contract: where chains start, and the kernel's model seen from outside."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import (
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
    each_kernel,
    quietly,
    survey,
    survey_data,
    survey_posterior,
)

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
    np.testing.assert_allclose(state.adapt_state.center, side * y.mean(), atol=0.05)


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

    monkeypatch.setattr("numpyro_sgmcmc.sampling.kernel.adapt", adapt)
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
    assert abs(float(state.adapt_state.center[0]) - (y.mean() - 10)) < 0.05
