"""The moments that tell the bias are read at the right point, kept, and put together rightly."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from numpyro_sgmcmc.diagnostics.stein_estimates import estimate_bias_from_sums
from numpyro_sgmcmc.sampling.bias_monitor import (
    FULL_MOMENTS_MAX_DIM,
    FirstGradientRecorder,
    Moments,
    RunningSums,
    compute_batch_index,
)
from tests.dynamics.examples import EXAMPLES, SCHEMES
from tests.dynamics.orders import stationary_covariance

# --- Where a scheme's step reads ----------------------------------------------------------------

LINEAR = [(n, s) for n, s in SCHEMES if n in ("underdamped", "overdamped")]


def reading(step, state, step_size, gradient, noise):
    """State after the step, and the position and gradient that it reads."""
    remembered = FirstGradientRecorder(gradient)
    end = step(state, step_size, remembered, noise)
    return end, (end if step.gradient_at_end else state).position, remembered.first_gradient


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("name", "scheme"), LINEAR)
@pytest.mark.parametrize(("h", "k", "variance"), [(0.3, 1.0, 0.0), (0.8, 0.8, 4.0), (0.1, 1.3, 50)])
def test_reading_is_the_draws_own_variance(name, scheme, h, k, variance):
    """On a Gaussian of curvature k, exactly: discretisation error and noise included."""
    dynamics = EXAMPLES[name].dynamics
    if name == "underdamped":
        dynamics = replace(dynamics, is_fsal=scheme in ("baoab", "obabo"))
    step, state = dynamics.make_step(scheme), dynamics.init(jnp.zeros(1), jax.random.key(0))
    flat, unravel = ravel_pytree(state)

    def run(z, noise, offset):
        _, q, g = reading(step, unravel(z), h, lambda x: k * x + offset, noise)
        return jnp.concatenate([q, g])

    origin = jnp.zeros_like(flat), jnp.zeros((step.num_noise, 1)), jnp.zeros(1)
    by_state, by_noise, by_offset = (np.asarray(x) for x in jax.jacobian(run, (0, 1, 2))(*origin))
    covariance = stationary_covariance(step, state, step.num_noise, h, k * np.eye(1), variance)
    by_noise = by_noise.reshape(2, -1)
    both = by_state @ covariance @ by_state.T + by_noise @ by_noise.T
    both += variance * by_offset @ by_offset.T
    truth = k * covariance[0, 0]
    # MT3's first stage lies inside the step; Lie-Trotter's noise heats the momenta at its ends.
    is_exact = scheme not in ("mt3", "lie_trotter")
    assert both[0, 1] == pytest.approx(truth, rel=1e-9 if is_exact else 0.03 * h / 0.8)
    if scheme in ("leapfrog", "symmetric") and h > 0.5:
        halfway = k * by_state[1] @ covariance @ by_state[1] / k**2
        assert abs(halfway / truth - 1) > 0.02, "the gradient's own position would do as well"


NONLINEAR = [(n, s) for n, s in SCHEMES if (n, s) not in LINEAR and n != "recipe"]


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("name", "scheme"), NONLINEAR)
def test_reading_of_nonlinear_dynamics(name, scheme):
    """Simulated: one coordinate of curvature 1.2, gradient noise of variance 2."""
    # Euler's thermostats run away now and then at the longer step.
    example, h, k = EXAMPLES[name], 0.2 if scheme == "symmetric" else 0.05, 1.2
    step = example.dynamics.make_step(scheme)
    num_chains, num_steps = 4096, 4000

    def chain(key):
        def one(state, key):
            noise_key, offset_key = jax.random.split(key)
            noise = jax.random.normal(noise_key, (step.num_noise, 1))
            offset = jnp.sqrt(2.0) * jax.random.normal(offset_key, (1,))
            end, q, g = reading(step, state, h, lambda x: k * x + offset, noise)
            return end, jnp.stack([q[0] * g[0], k * end.position[0] ** 2])

        state = example.state(np.zeros(1))
        _, seen = jax.lax.scan(one, state, jax.random.split(key, num_steps))
        return seen[num_steps // 4 :].mean(0)

    found = jax.jit(jax.vmap(chain))(jax.random.split(jax.random.key(0), num_chains))
    is_stable = jnp.isfinite(found).all(1) & (found[:, 1] < 1e3)
    assert is_stable.mean() > 0.99
    found = found[is_stable]
    difference = found[:, 0] - found[:, 1]
    error = difference.std() / np.sqrt(len(difference))
    assert abs(difference.mean()) < 4 * error + 2e-3 * found[:, 1].mean()
    assert 4 * error < 0.02 * found[:, 1].mean(), "too noisy to tell"


# --- Keeping them -------------------------------------------------------------------------------


def sums_of(q, g, temperature=1.0, weight=1.0):
    made = RunningSums.zeros(q.size, q.dtype).add(q, g)
    return made.finalize_iteration(q, temperature, jnp.asarray(weight, q.dtype))


def test_batches_grow_with_the_run():
    num, length = 16, 4 * (2**6 - 1)
    place = np.asarray(jax.vmap(lambda i: compute_batch_index(i, num))(jnp.arange(length)))
    # Four of one, four of two, four of four, four of eight, then again from the first batch.
    np.testing.assert_array_equal(place[:12], [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 7])
    np.testing.assert_array_equal(place[60 : 60 + 64], np.repeat([0, 1, 2, 3], 16))
    assert (np.diff(np.flatnonzero(place == 7)[-32:]) == 1).all()
    weights = np.bincount(place, minlength=num)
    assert weights.sum() == length
    # As good as twelve batches of one length, at the end of an octave and in its midst.
    for n in (length, length - 64, 4 * (2**18 - 1)):
        at = np.bincount(place[:n], minlength=num) if n <= length else weights
        assert at.sum() ** 2 / np.square(at).sum() > 9


@pytest.mark.parametrize("dim", [3, FULL_MOMENTS_MAX_DIM + 1])
def test_batches_hold_every_good_iteration_once(dim):
    rng = np.random.default_rng(0)
    qs, gs = (rng.standard_normal((40, dim)).astype(np.float32) for _ in range(2))

    @jax.jit
    def advance(moments, q, g, i):
        return moments.add(sums_of(q, g), i >= 0, (i >= 0) & (i != 7))

    moments = Moments.zeros(dim, jnp.float32)
    for i in range(-3, 40):
        moments = advance(moments, qs[i], gs[i], i)
    assert moments.num_iterations == 40
    kept = np.arange(40) != 7
    place = np.asarray(compute_batch_index(jnp.arange(40), 16))
    expected = np.bincount(place, kept, minlength=16)
    np.testing.assert_array_equal(moments.batches.weight, expected)
    np.testing.assert_allclose(
        moments.batches.gradient[8], gs[(place == 8) & kept].sum(0), rtol=1e-5, atol=1e-6
    )
    expected = np.einsum("ni,nj->ij", qs[kept], gs[kept])
    expected = expected if dim <= FULL_MOMENTS_MAX_DIM else np.diagonal(expected)
    np.testing.assert_allclose(
        moments.batches.position_gradient.sum(0), expected, rtol=1e-4, atol=1e-4
    )


def test_iterations_count_by_their_weight():
    """Twice the weight is twice the iteration, and no weight is none."""
    q, g = jnp.array([1.0, -2.0]), jnp.array([0.5, 3.0])
    once, twice, never = (sums_of(q, g, weight=w) for w in (1.0, 2.0, 0.0))
    assert once.weight == 1.0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(2 * a, b), once, twice)
    assert all((x == 0).all() for x in never)
    np.testing.assert_allclose(once.position_gradient, np.outer(q, g))
    np.testing.assert_allclose(once.position_position, np.outer(q, q))


# --- Putting them together ----------------------------------------------------------------------


@pytest.mark.parametrize("dim", [4, FULL_MOMENTS_MAX_DIM + 6])
def test_estimates_of_a_gaussian_with_the_wrong_covariance(dim):
    """Independent draws whose law is known to be off: shifts and inflations, within the errors."""
    rng = np.random.default_rng(1)
    num = 20_000
    is_full = dim <= FULL_MOMENTS_MAX_DIM
    # The whitening is wrong, the chain's covariance is another, and neither is diagonal.
    root = np.tril(0.3 * rng.standard_normal((dim, dim))) / np.sqrt(dim / 4) if is_full else 0.0
    posterior = np.diag(rng.uniform(0.5, 2.0, dim)) + (root @ root.T if is_full else 0.0)
    stretch = np.diag(rng.uniform(0.8, 1.4, dim))
    chain = stretch @ posterior @ stretch
    shift = 0.3 * rng.standard_normal(dim)
    q = shift + rng.standard_normal((num, dim)) @ np.linalg.cholesky(chain).T
    g = q @ np.linalg.inv(posterior) + 0.5 * rng.standard_normal((num, dim))
    factor = (
        3.0 * np.eye(dim) + 0.2 * rng.standard_normal((dim, dim)) if is_full else np.full(dim, 3.0)
    )
    each = jax.vmap(sums_of)(jnp.asarray(q), jnp.asarray(g))
    batches = jax.tree.map(lambda x: np.asarray(x).reshape(50, -1, *x.shape[1:]).sum(1), each)
    found = estimate_bias_from_sums(batches, factor)
    push = factor if factor.ndim == 2 else np.diag(factor)
    right, wide = (np.diagonal(push @ x @ push.T) for x in (posterior, chain))
    true_shift, true_inflation = push @ shift / np.sqrt(right), np.sqrt(wide / right) - 1
    for name, truth in (("mean_bias", true_shift), ("sd_inflation", true_inflation)):
        value, error = getattr(found, name)
        assert (np.abs(value - truth) < 5 * error).all(), name
        assert 0.6 < np.sqrt(np.mean(((value - truth) / error) ** 2)) < 1.5, name
        assert error.max() < 0.03
    assert found.kinetic_temperature.value == pytest.approx(1.0)
    assert found.configurational_temperature.error < 0.02


def test_one_batch_has_no_error_bar():
    sums = jax.tree.map(lambda x: np.asarray(x)[None], sums_of(jnp.ones(2), jnp.ones(2)))
    assert np.isnan(estimate_bias_from_sums(sums, np.ones(2)).mean_bias.error).all()
