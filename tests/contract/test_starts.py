"""The NumPyro contract: initial positions, and the kernel's model in NumPyro's functions."""

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
from numpyro_sgmcmc.adaptation.initialisation import generate_init_positions
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.sampling.options import Options, build_potential_from_model
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


def test_chain_starts_at_init_params(fit):
    arguments = (tuple(fit.data), {"batch_size": BATCH})
    one = {"beta": jnp.array([0.5, -0.2]), "rate": jnp.array(1.0)}
    state = fit.kernel.init(jax.random.key(0), 10, one, *arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), state.z, one)
    two = {"beta": jnp.array([[0.5, -0.2], [0.6, -0.4]]), "rate": jnp.array([1.0, 1.2])}
    keys = jax.random.split(jax.random.key(0), 2)
    states = fit.kernel.init(keys, 10, two, *arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), states.z, two)


def test_chains_with_distant_init_params_converge(fit):
    """At 300 SDs from the mean, the first of many short iterations has not converged."""
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
def test_init_to_value_selects_the_mode(side):
    y = np.random.default_rng(0).normal(3.0, 1.0, 100).astype(np.float32)
    kernel = SGHMCSplit(two_modes, init_strategy=init_to_value(values={"mu": 5.0 * side}))
    state = kernel.init(jax.random.key(0), 10, None, (y,), {"batch_size": 20})
    np.testing.assert_allclose(state.adapt_state.preconditioner.center, side * y.mean(), atol=0.05)


INIT_STRATEGIES = {
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


@pytest.mark.parametrize("name", INIT_STRATEGIES)
def test_warmup_starts_at_the_values_of_init_strategy(name):
    strategy, is_right = INIT_STRATEGIES[name]
    arguments = Arguments(tuple(survey_data()), {"batch_size": BATCH})
    options = Options(init_strategy=strategy)
    potential = build_potential_from_model(survey, arguments, options)
    position = next(generate_init_positions(potential, arguments, None, has_chain_axis=False))
    values = potential.constrain(potential.unravel(jnp.asarray(position)), arguments)
    assert is_right(np.asarray(values["beta"]), float(values["rate"])), values


# The kernel's model


@each_kernel
def test_kernel_model_is_the_model_on_the_full_data(kernel_class):
    kernel = kernel_class(survey)
    assert kernel.model == kernel_class(survey).model
    assert kernel.model == kernel.model
    assert hash(kernel.model) == hash(kernel.model)
    assert kernel.model != kernel_class(two_modes).model
    seeded = numpyro.handlers.seed(kernel.model, jax.random.key(0))
    trace = numpyro.handlers.trace(seeded).get_trace(*survey_data(), batch_size=BATCH)
    assert trace["y"]["value"].shape == (ROWS,)
    np.testing.assert_array_equal(trace["y"]["value"], survey_data().y)


def test_predictive_and_log_likelihood_of_the_kernel_model_use_all_rows(fit):
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
    def substitute_shift(model):
        return numpyro.handlers.substitute(model, data={"shift": 10.0})

    def model(y, batch_size=None):
        shift = numpyro.param("shift", 0.0)
        mu = numpyro.sample("mu", dist.Normal(0, 100))
        with numpyro.plate("rows", len(y), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(mu + shift, 1), obs=y[i])

    y = np.random.default_rng(0).normal(3.0, 1.0, 100).astype(np.float32)
    kernel = SGHMCSplit(model).wrap_model(substitute_shift)
    state = kernel.init(jax.random.key(0), 10, None, (y,), {"batch_size": 20})
    assert abs(float(state.adapt_state.preconditioner.center[0]) - (y.mean() - 10)) < 0.05
