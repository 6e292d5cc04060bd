"""Mistakes that stochastic-gradient samplers have shipped with, each looked for in every kernel.

The model is a linear regression with known noise: its posterior is Gaussian and exact, and with
control variates so is its gradient, so that what varies is the sampler's own noise.
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
from numpyro_sgmcmc.dynamics.riemannian import potential_metric
from numpyro_sgmcmc.sampling.kernels import RiemannianKernel
from tests.contract.kernels import (
    assert_posterior,
    moments,
    one_kernel,
)

ROWS, BATCH, CHAINS, ITERATIONS = 300, 30, 64, 3000

watched: list[tuple[int, ...]] | None = None
"""Where the model notes the rows it is shown, while it is a list."""


def regression(X: Any, y: Any, batch_size: int | None = None) -> None:
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", ROWS, subsample_size=batch_size) as i:
        if watched is not None:
            jax.debug.callback(lambda rows: watched.append(tuple(rows.tolist())), i)
        numpyro.sample("y", dist.Normal(X[i] @ beta, 1), obs=y[i])


def rows() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((ROWS, 2)).astype(np.float32) * [1.0, 0.2]
    y = X @ [1.0, -2.0] + rng.standard_normal(ROWS)
    return X.astype(np.float32), y.astype(np.float32)


def posterior(X: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    covariance = np.linalg.inv(np.eye(2) + X.T @ X)
    return covariance @ X.T @ y, covariance


@contextmanager
def without_noise() -> Iterator[None]:
    """What is traced in here draws zeros for normal numbers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            jax.random, "approximation", lambda key, shape, dtype: jnp.zeros(shape, dtype)
        )
        yield


@pytest.fixture(scope="module")
def long_run_of():
    """64 chains of single steps, at friction 4 where there is friction."""
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
            data, batch = rows(), {"batch_size": BATCH}
            keys = jax.random.split(jax.random.key(0), CHAINS)
            state = kernel.init(keys, 0, None, data, batch)

            @jax.jit
            def advance(state):
                def one(state, _):
                    after = kernel.sample(state, data, batch)
                    with without_noise():
                        quiet = kernel.sample(state, data, batch)
                    noise = jax.tree.map(jnp.subtract, after.dynamics_state, quiet.dynamics_state)
                    return after, (after.z["beta"], after.dynamics_state, noise, after.diverging)

                return jax.lax.scan(one, state, None, ITERATIONS)

            last, (*paths, diverging) = advance(state)
            assert not diverging.any()
            paths = jax.tree.map(lambda x: np.swapaxes(x, 0, 1), paths)
            draws, dynamics, noise = paths
            runs[kernel_class] = SimpleNamespace(
                kernel=kernel,
                arguments=(data, batch),
                first=state,
                last=last,
                draws=draws,
                dynamics=dynamics,
                noise=noise[min(1, len(noise) - 1)],  # the momentum's, where there is one
            )
        return runs[kernel_class]

    return run


@one_kernel
def test_steps_use_the_gradient(long_run_of, kernel_class):
    """Every label flipped: from one state, with one key, the chain goes elsewhere.

    By control variates the labels speak through the anchor's gradient, which `refresh` renews.
    Two steps: in the first of an explicit scheme the gradient moves the momentum only.
    """
    run = long_run_of(kernel_class)
    (X, y), batch = run.arguments
    state = jax.tree.map(lambda x: x[0], run.last)
    sample = jax.jit(lambda state, data: run.kernel.sample(state, data, batch))

    def go(data: Any) -> np.ndarray:
        after = run.kernel.refresh(state, data, batch)
        for _ in range(2):
            after = sample(after, data)
        return np.asarray(after.z["beta"])

    ends = [go(data) for data in ((X, y), (X, -y), (X, y))]
    np.testing.assert_array_equal(ends[0], ends[2])
    whiten = np.linalg.inv(np.linalg.cholesky(posterior(X, y)[1]))
    towards = whiten @ (posterior(X, -y)[0] - posterior(X, y)[0])
    moved = whiten @ (ends[1] - ends[0]) @ towards / np.linalg.norm(towards)
    assert moved > 1e-3, "in posterior sds"


@one_kernel
def test_two_chains_from_one_start_part(long_run_of, kernel_class):
    run = long_run_of(kernel_class)
    keys = jax.random.split(jax.random.key(1), CHAINS)
    start = {"beta": jnp.zeros((CHAINS, 2))}
    state = run.kernel.init(keys, 0, start, *run.arguments)
    np.testing.assert_allclose(state.z["beta"], 0, atol=1e-5)
    step = jax.jit(lambda state: run.kernel.sample(state, *run.arguments))
    after = np.asarray(step(state).z["beta"])
    assert np.unique(after, axis=0).shape == (CHAINS, 2)


@one_kernel
def test_every_step_moves_and_draws_new_noise(long_run_of, kernel_class):
    """The step less what it would have been without noise is the noise.

    It must be the same neither from step to step, nor from chain to chain, nor from coordinate
    to coordinate.
    """
    run = long_run_of(kernel_class)
    assert (np.diff(run.draws, axis=1) != 0).any(-1).all()
    noise = np.asarray(run.noise, np.float64)[:, 1:]  # chains, steps, coordinates
    if issubclass(kernel_class, RiemannianKernel):  # which scales the noise from place to place
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
def test_noise_and_friction_are_in_balance(long_run_of, kernel_class):
    """Friction 4: noise by the friction in place of its root would make the variance 4 times."""
    run = long_run_of(kernel_class)
    mean, covariance = posterior(*run.arguments[0])
    draws = run.draws[:, ITERATIONS // 3 :]
    assert_posterior(draws, mean, np.sqrt(np.diag(covariance)))


@one_kernel
def test_momentum_has_its_stationary_law(long_run_of, kernel_class):
    """Drawn afresh it has, by the tests of the dynamics; at the start and much later it must."""
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
def test_a_step_touches_its_minibatch_only(long_run_of, kernel_class):
    """Nothing in a step has as many elements as there are rows, the data apart."""
    run = long_run_of(kernel_class)
    state = jax.tree.map(lambda x: x[0], run.last)
    data, batch = run.arguments
    step = jax.make_jaxpr(lambda s, *data: run.kernel.sample(s, data, batch))(
        state, *(jnp.asarray(x) for x in data)
    )

    def sizes(jaxpr: Any) -> list[int]:
        found = []
        for equation in jaxpr.eqns:
            inner = [p.jaxpr for p in equation.params.values() if hasattr(p, "jaxpr")]
            found += [n for j in inner for n in sizes(j)]
            if not inner:
                found += [int(np.prod(v.aval.shape)) for v in equation.outvars]
        return found

    assert BATCH <= max(sizes(step.jaxpr)) < ROWS


@pytest.mark.slow
@pytest.mark.parametrize("minibatch", ["iid", "contiguous"])
def test_every_step_has_a_minibatch_of_its_own(minibatch, monkeypatch):
    # The moments of noisy gradients are read from minibatches besides: not here.
    monkeypatch.setattr(
        "numpyro_sgmcmc.adaptation.subsampling_choice.choose_separate_gradients", lambda *_: None
    )
    kernel = SGHMCSplit(
        regression, subsampling=minibatch, gradient_estimator="minibatch", num_steps=5
    )
    arguments = (rows(), {"batch_size": BATCH})
    seen: list[tuple[int, ...]] = []
    monkeypatch.setattr(f"{__name__}.watched", seen)
    state = kernel.init(jax.random.key(0), 0, None, *arguments)
    jax.effects_barrier()
    seen.clear()
    for _ in range(4):
        state = kernel.sample(state, *arguments)
        jax.effects_barrier()
    minibatches = np.array(seen)
    assert minibatches.shape == (20, BATCH)
    assert len({frozenset(m) for m in seen}) == 20
    if minibatch != "iid":  # two passes over all rows
        assert (np.bincount(minibatches.ravel(), minlength=ROWS) == 2).all()
