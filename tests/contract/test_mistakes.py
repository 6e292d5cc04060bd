"""Mistakes that stochastic-gradient samplers have been released with, tested in every kernel.

The model is a linear regression with known noise. Its posterior is an exact Gaussian, and with
control variates the gradient has no noise, so that the only noise is the injected one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_sgmcmc import SGHMCSplit
from numpyro_sgmcmc.adaptation.settings import MonitorGradients
from numpyro_sgmcmc.dynamics.riemannian import potential_metric
from numpyro_sgmcmc.sampling.kernels import RiemannianKernel
from tests.contract.kernels import (
    assert_posterior,
    moments,
    one_kernel,
)

ROWS, BATCH, CHAINS, ITERATIONS = 300, 30, 64, 1500

recorded_minibatches: list[tuple[int, ...]] | None = None
"""If a list, the model appends the row indices of each minibatch."""


def regression(X: Any, y: Any, batch_size: int | None = None) -> None:
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", ROWS, subsample_size=batch_size) as i:
        if (minibatches := recorded_minibatches) is not None:
            jax.debug.callback(lambda rows: minibatches.append(tuple(rows.tolist())), i)
        numpyro.sample("y", dist.Normal(X[i] @ beta, 1), obs=y[i])


def regression_data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((ROWS, 2)).astype(np.float32) * [1.0, 0.2]
    y = X @ [1.0, -2.0] + rng.standard_normal(ROWS)
    return X.astype(np.float32), y.astype(np.float32)


def posterior(X: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    covariance = np.linalg.inv(np.eye(2) + X.T @ X)
    return covariance @ X.T @ y, covariance


@contextmanager
def without_noise() -> Iterator[None]:
    """Trace functions with zeros in place of standard normal numbers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.random, "normal", lambda key, shape, dtype: jnp.zeros(shape, dtype))
        yield


@pytest.fixture(scope="module")
def long_run_of():
    """Return a function that returns 64 chains of single steps, with friction 4 if there is any."""
    runs: dict[Any, SimpleNamespace] = {}

    def run(kernel_class: Any) -> SimpleNamespace:
        if kernel_class not in runs:
            has_friction = "friction" in inspect.signature(kernel_class).parameters
            kernel = kernel_class(
                regression,
                gradient_estimator="control_variate",
                num_steps=1,
                step_size=0.05,
                **({"friction": 4.0} if has_friction else {}),
            )
            data, batch = regression_data(), {"batch_size": BATCH}
            keys = jax.random.split(jax.random.key(0), CHAINS)
            state = kernel.init(keys, 0, None, data, batch)

            @jax.jit
            def advance(state):
                def one(state, _):
                    after = kernel.sample(state, data, batch)
                    with without_noise():
                        noiseless = kernel.sample(state, data, batch)
                    noise = jax.tree.map(
                        jnp.subtract, after.dynamics_state, noiseless.dynamics_state
                    )
                    return after, (after.z["beta"], after.dynamics_state, noise, after.diverging)

                return jax.lax.scan(one, state, None, ITERATIONS)

            last, (*paths, diverging) = advance(state)
            assert not diverging.any()
            paths = jax.tree.map(lambda x: np.swapaxes(x, 0, 1), paths)
            draws, dynamics_states, noise = paths
            runs[kernel_class] = SimpleNamespace(
                kernel=kernel,
                arguments=(data, batch),
                first=state,
                last=last,
                draws=draws,
                dynamics_state=dynamics_states,
                noise=noise[min(1, len(noise) - 1)],  # of the momentum, if there is one
            )
        return runs[kernel_class]

    return run


@one_kernel
def test_step_moves_towards_the_posterior_of_its_data(long_run_of, kernel_class):
    """With all labels negated, a chain with the same state and key goes elsewhere.

    With control variates the labels enter by the reference gradient, which `refresh` computes.
    Two steps: in the first of an explicit integrator the gradient changes the momentum only.
    """
    run = long_run_of(kernel_class)
    (X, y), batch = run.arguments
    state = jax.tree.map(lambda x: x[0], run.last)
    sample = jax.jit(lambda state, data: run.kernel.sample(state, data, batch))

    def run_two_steps(data: Any) -> np.ndarray:
        after = run.kernel.refresh(state, data, batch)
        for _ in range(2):
            after = sample(after, data)
        return np.asarray(after.z["beta"])

    ends = [run_two_steps(data) for data in ((X, y), (X, -y), (X, y))]
    np.testing.assert_array_equal(ends[0], ends[2])
    inverse_factor = np.linalg.inv(np.linalg.cholesky(posterior(X, y)[1]))
    direction = inverse_factor @ (posterior(X, -y)[0] - posterior(X, y)[0])
    displacement = inverse_factor @ (ends[1] - ends[0])
    assert displacement @ direction / np.linalg.norm(direction) > 1e-3, "in posterior SDs"


@one_kernel
def test_chains_with_equal_init_params_and_different_keys_differ(long_run_of, kernel_class):
    run = long_run_of(kernel_class)
    keys = jax.random.split(jax.random.key(1), CHAINS)
    init_params = {"beta": jnp.zeros((CHAINS, 2))}
    state = run.kernel.init(keys, 0, init_params, *run.arguments)
    np.testing.assert_allclose(state.z["beta"], 0, atol=1e-5)
    step = jax.jit(lambda state: run.kernel.sample(state, *run.arguments))
    after = np.asarray(step(state).z["beta"])
    assert np.unique(after, axis=0).shape == (CHAINS, 2)


@one_kernel
def test_injected_noise_is_independent_between_steps_chains_and_coordinates(
    long_run_of, kernel_class
):
    """The noise is the difference between a step and the same step without noise."""
    run = long_run_of(kernel_class)
    assert (np.diff(run.draws, axis=1) != 0).any(-1).all()
    noise = np.asarray(run.noise, np.float64)[:, 1:]  # chains, steps, coordinates
    if issubclass(kernel_class, RiemannianKernel):  # the noise depends on the position
        before = run.dynamics_state.position[:, :-1]
        noise = noise / np.sqrt(jax.vmap(jax.vmap(potential_metric))(before))[..., None]
    noise = noise / noise.std((0, 1))

    def correlation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.abs((a * b).mean((0, 1))) * np.sqrt(a.shape[0] * a.shape[1])

    assert (correlation(noise[:, 1:], noise[:, :-1]) < 5).all(), "from step to step"
    assert (correlation(noise[1:], noise[:-1]) < 5).all(), "from chain to chain"
    assert correlation(noise[..., 0], noise[..., 1]) < 5, "from coordinate to coordinate"
    kurtosis = (noise**4).mean((0, 1))
    assert (np.abs(kurtosis - 3) < 5 * np.sqrt(96 / noise[..., 0].size)).all(), "not Gaussian"


@one_kernel
def test_noise_balances_friction(long_run_of, kernel_class):
    """With friction 4, noise in proportion to it, not to its root, would inflate the variance."""
    run = long_run_of(kernel_class)
    mean, covariance = posterior(*run.arguments[0])
    draws = run.draws[:, ITERATIONS // 3 :]
    assert_posterior(draws, mean, np.sqrt(np.diag(covariance)))


@one_kernel
def test_momentum_has_its_stationary_distribution(long_run_of, kernel_class):
    """The initial momentum, and that of later steps; tests of dynamics cover its resampling."""
    run = long_run_of(kernel_class)
    if not hasattr(run.dynamics_state, "momentum"):
        pytest.skip("no momentum")
    dynamics = run.kernel._dynamics
    exact = dynamics.sample_auxiliary("momentum", jax.random.key(9), (10**6,), jnp.float32)
    sd, kurtosis = float(exact.std()), float((exact**4).mean() / exact.var() ** 2)
    first = np.asarray(run.first.dynamics_state.momentum)
    assert (np.abs(first.std(0) / sd - 1) < 5 * np.sqrt((kurtosis - 1) / 4 / CHAINS)).all()
    found = moments(run.dynamics_state.momentum[:, ITERATIONS // 3 :])
    assert (np.abs(found.mean) < 5 * found.mean_error).all()
    assert (np.abs(found.sd / sd - 1) < 0.1 + 5 * found.sd_error / sd).all()


@one_kernel
def test_step_computes_on_its_minibatch_only(long_run_of, kernel_class):
    """No array of a step, except the data, has as many elements as there are rows."""
    run = long_run_of(kernel_class)
    state = jax.tree.map(lambda x: x[0], run.last)
    data, batch = run.arguments
    step = jax.make_jaxpr(lambda s, *data: run.kernel.sample(s, data, batch))(
        state, *(jnp.asarray(x) for x in data)
    )

    def sizes(jaxpr: Any) -> list[int]:
        num_elements = []
        for equation in jaxpr.eqns:
            inner = [p.jaxpr for p in equation.params.values() if hasattr(p, "jaxpr")]
            num_elements += [n for j in inner for n in sizes(j)]
            if not inner:
                num_elements += [int(np.prod(v.aval.shape)) for v in equation.outvars]
        return num_elements

    assert BATCH <= max(sizes(step.jaxpr)) < ROWS


@pytest.mark.slow
@pytest.mark.parametrize("subsampling", ["iid", "contiguous"])
def test_every_step_has_another_minibatch(subsampling, monkeypatch):
    kernel = SGHMCSplit(
        regression, subsampling=subsampling, gradient_estimator="minibatch", num_steps=5
    )
    arguments = (regression_data(), {"batch_size": BATCH})
    recorded: list[tuple[int, ...]] = []
    monkeypatch.setattr(f"{__name__}.recorded_minibatches", recorded)
    state = kernel.init(jax.random.key(0), 0, None, *arguments)
    # Moments from the steps' gradients, which need no further minibatches.
    adaptation = kernel.adaptation._replace(monitor_gradients=MonitorGradients())
    kernel = kernel.copy_with(adaptation=adaptation)
    jax.effects_barrier()
    recorded.clear()
    for _ in range(4):
        state = kernel.sample(state, *arguments)
        jax.effects_barrier()
    minibatches = np.array(recorded)
    assert minibatches.shape == (20, BATCH)
    assert len({frozenset(m) for m in recorded}) == 20
    if subsampling != "iid":  # two epochs
        assert (np.bincount(minibatches.ravel(), minlength=ROWS) == 2).all()
