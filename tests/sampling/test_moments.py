"""Moments for bias estimates: read at the right point, kept in batches, and estimated from."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from numpyro_sgmcmc.diagnostics.stein_estimates import estimate_bias_from_sums
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.sampling.bias_monitor import (
    FULL_MOMENTS_MAX_DIM,
    FirstGradientRecorder,
    Moments,
    RunningSums,
    compute_batch_index,
)
from tests.dynamics.examples import EXAMPLES, INTEGRATORS
from tests.dynamics.orders import stationary_covariance

# The position at which an integrator's gradient is read

IS_LINEAR = ("underdamped", "overdamped")
LINEAR = [(name, integrator) for name, integrator in INTEGRATORS if name in IS_LINEAR]
NONLINEAR = [
    (name, integrator)
    for name, integrator in INTEGRATORS
    if name not in IS_LINEAR and name != "recipe"
]


def step_with_reading(step, state, step_size, gradient_fn, normals):
    """Return the state after a step, and the position and gradient that the moments get."""
    recorder = FirstGradientRecorder(gradient_fn)
    end = step(state, step_size, recorder, normals)
    return end, (end if step.gradient_at_end else state).position, recorder.first_gradient


@partial(jax.jit, static_argnums=0)
def linearise_reading(step, state, h, k):
    """Return the Jacobians of what is read by the state, the normals and the gradient noise."""
    flat, unravel = ravel_pytree(state)

    def read(z, normals, gradient_noise):
        _, q, g = step_with_reading(step, unravel(z), h, lambda x: k * x + gradient_noise, normals)
        return jnp.concatenate([q, g])

    origin = jnp.zeros_like(flat), jnp.zeros((step.num_noise, 1)), jnp.zeros(1)
    return jax.jacobian(read, (0, 1, 2))(*origin)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("name", "integrator"), LINEAR)
@pytest.mark.parametrize(("h", "k", "variance"), [(0.3, 1.0, 0.0), (0.8, 0.8, 4.0), (0.1, 1.3, 50)])
def test_position_gradient_moment_of_a_gaussian_is_its_variance(name, integrator, h, k, variance):
    """Exact for curvature k, with discretisation error and gradient noise included."""
    dynamics = EXAMPLES[name].dynamics
    if name == "underdamped":
        dynamics = replace(dynamics, is_fsal=integrator in ("baoab", "obabo"))
    step, state = dynamics.make_step(integrator), dynamics.init(jnp.zeros(1), jax.random.key(0))
    by_state, by_normals, by_noise = map(np.asarray, linearise_reading(step, state, h, k))
    covariance = stationary_covariance(step, state, step.num_noise, h, k * np.eye(1), variance)
    by_normals = by_normals.reshape(2, -1)
    moments = by_state @ covariance @ by_state.T + by_normals @ by_normals.T
    moments += variance * by_noise @ by_noise.T
    exact = k * covariance[0, 0]
    # MT3's first stage lies inside the step; Lie-Trotter's noise warms the momenta at its ends;
    # UBU's ends have a position that is correlated with the momentum.
    is_exact = integrator not in ("mt3", "lie_trotter", "ubu")
    assert moments[0, 1] == pytest.approx(exact, rel=1e-9 if is_exact else 0.03 * h / 0.8)
    if integrator in ("leapfrog", "symmetric") and h > 0.5:
        halfway = k * by_state[1] @ covariance @ by_state[1] / k**2
        assert abs(halfway / exact - 1) > 0.02, "the gradient's own position would do as well"


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("name", "integrator"), NONLINEAR)
def test_position_gradient_moment_of_a_simulated_chain_is_its_variance(name, integrator):
    """One coordinate of curvature 1.2, gradient noise of variance 2."""
    # Euler's thermostats diverge now and then at the longer step.
    example, h, k = EXAMPLES[name], 0.2 if integrator == "symmetric" else 0.05, 1.2
    step = example.dynamics.make_step(integrator)
    num_chains, num_steps = 4096, 4000

    def run_chain(key):
        def run_step(state, key):
            normals_key, noise_key = jax.random.split(key)
            normals = jax.random.normal(normals_key, (step.num_noise, 1))
            noise = jnp.sqrt(2.0) * jax.random.normal(noise_key, (1,))
            end, q, g = step_with_reading(step, state, h, lambda x: k * x + noise, normals)
            return end, jnp.stack([q[0] * g[0], k * end.position[0] ** 2])

        state = example.state(np.zeros(1))
        _, products = jax.lax.scan(run_step, state, jax.random.split(key, num_steps))
        return products[num_steps // 4 :].mean(0)

    means = jax.jit(jax.vmap(run_chain))(jax.random.split(jax.random.key(0), num_chains))
    is_stable = jnp.isfinite(means).all(1) & (means[:, 1] < 1e3)
    assert is_stable.mean() > 0.99
    means = means[is_stable]
    difference = means[:, 0] - means[:, 1]
    error = difference.std() / np.sqrt(len(difference))
    assert abs(difference.mean()) < 4 * error + 2e-3 * means[:, 1].mean()
    assert 4 * error < 0.02 * means[:, 1].mean(), "the standard error is too large to decide"


# Batches


def iteration_sums(q, g, temperature=1.0, weight=1.0):
    """Return the sums of an iteration with one reading."""
    sums = RunningSums.zeros(q.size, q.dtype).add(q, g)
    return sums.finalize_iteration(q, temperature, jnp.asarray(weight, q.dtype))


@jax.jit
@jax.vmap
def batch_index(i):
    return compute_batch_index(i, 16)


def test_batch_lengths_double_with_the_run():
    index = np.asarray(batch_index(np.arange(4 * (2**6 - 1))))
    # Four of one, four of two, four of four, four of eight, then again from the first batch.
    np.testing.assert_array_equal(index[:12], [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 7])
    np.testing.assert_array_equal(index[60 : 60 + 64], np.repeat([0, 1, 2, 3], 16))
    assert (np.diff(np.flatnonzero(index == 7)[-32:]) == 1).all()


@pytest.mark.parametrize("num_iterations", [60, 150, 188, 252, 40_000])
def test_batches_are_worth_nine_of_equal_length_at_any_time(num_iterations):
    index = np.asarray(batch_index(np.arange(num_iterations)))
    lengths = np.bincount(index, minlength=16)
    assert lengths.sum() == num_iterations
    assert lengths.sum() ** 2 / np.square(lengths).sum() > 9


@pytest.mark.parametrize("dim", [3, FULL_MOMENTS_MAX_DIM + 1])
def test_moments_add_every_valid_iteration_to_its_batch(dim):
    rng = np.random.default_rng(0)
    qs, gs = (rng.standard_normal((40, dim)).astype(np.float32) for _ in range(2))

    @jax.jit
    def add(moments, q, g, i):
        return moments.add(iteration_sums(q, g), i >= 0, (i >= 0) & (i != 7))

    moments = Moments.zeros(dim, jnp.float32)
    for i in range(-3, 40):
        moments = add(moments, qs[i], gs[i], i)
    assert moments.num_iterations == 40
    is_valid = np.arange(40) != 7
    index = np.asarray(batch_index(np.arange(40)))
    np.testing.assert_array_equal(
        moments.batches.weight, np.bincount(index, is_valid, minlength=16)
    )
    np.testing.assert_allclose(
        moments.batches.gradient[8], gs[(index == 8) & is_valid].sum(0), rtol=1e-5, atol=1e-6
    )
    expected = np.einsum("ni,nj->ij", qs[is_valid], gs[is_valid])
    expected = expected if dim <= FULL_MOMENTS_MAX_DIM else np.diagonal(expected)
    np.testing.assert_allclose(
        moments.batches.position_gradient.sum(0), expected, rtol=1e-4, atol=1e-4
    )


def test_iteration_sums_are_proportional_to_the_weight():
    q, g = jnp.array([1.0, -2.0]), jnp.array([0.5, 3.0])
    once, twice, never = (iteration_sums(q, g, weight=w) for w in (1.0, 2.0, 0.0))
    assert once.weight == 1.0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(2 * a, b), once, twice)
    assert all((x == 0).all() for x in never)
    np.testing.assert_allclose(once.position_gradient, np.outer(q, g))
    np.testing.assert_allclose(once.position_position, np.outer(q, q))


# Estimates


@pytest.mark.parametrize("dim", [4, FULL_MOMENTS_MAX_DIM + 6])
def test_bias_estimates_of_a_gaussian_are_within_their_standard_errors(dim):
    """Independent draws with a known bias of means and covariance."""
    rng = np.random.default_rng(1)
    num = 20_000
    is_full = dim <= FULL_MOMENTS_MAX_DIM
    # The preconditioner is wrong, the chain's covariance is another, and neither is diagonal.
    root = np.tril(0.3 * rng.standard_normal((dim, dim))) / np.sqrt(dim / 4) if is_full else 0.0
    posterior = np.diag(rng.uniform(0.5, 2.0, dim)) + (root @ root.T if is_full else 0.0)
    scale = np.diag(rng.uniform(0.8, 1.4, dim))
    chain = scale @ posterior @ scale
    mean = 0.3 * rng.standard_normal(dim)
    q = mean + rng.standard_normal((num, dim)) @ np.linalg.cholesky(chain).T
    g = q @ np.linalg.inv(posterior) + 0.5 * rng.standard_normal((num, dim))
    factor = (
        3.0 * np.eye(dim) + 0.2 * rng.standard_normal((dim, dim)) if is_full else np.full(dim, 3.0)
    )
    sums = jax.vmap(iteration_sums)(jnp.asarray(q), jnp.asarray(g))
    batches = jax.tree.map(lambda x: np.asarray(x).reshape(50, -1, *x.shape[1:]).sum(1), sums)
    estimates = estimate_bias_from_sums(batches, [Preconditioner(np.zeros(dim), factor)])
    matrix = factor if factor.ndim == 2 else np.diag(factor)
    posterior_variance, chain_variance = (
        np.diagonal(matrix @ x @ matrix.T) for x in (posterior, chain)
    )
    exact = {
        "mean_bias": matrix @ mean / np.sqrt(posterior_variance),
        "sd_inflation": np.sqrt(chain_variance / posterior_variance) - 1,
    }
    for name, truth in exact.items():
        value, error = getattr(estimates.bias, name)
        assert (np.abs(value - truth) < 5 * error).all(), name
        assert 0.6 < np.sqrt(np.mean(((value - truth) / error) ** 2)) < 1.5, name
        assert error.max() < 0.03
    assert estimates.kinetic_temperature.value == pytest.approx(1.0)
    assert estimates.configurational_temperature.error < 0.02


def test_bias_estimate_from_one_batch_has_no_standard_error():
    sums = iteration_sums(jnp.ones(2), jnp.ones(2))
    batches = jax.tree.map(lambda x: np.asarray(x)[None], sums)
    estimates = estimate_bias_from_sums(batches, [Preconditioner(np.zeros(2), np.ones(2))])
    assert np.isnan(estimates.bias.mean_bias.error).all()
