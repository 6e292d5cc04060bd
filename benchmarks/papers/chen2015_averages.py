"""Averages along chains on the Gaussian of Chen, Ding and Carin (2015): simulated, and exact.

See :mod:`chen2015` for the model and what is measured. A step is linear in state and noise here, so
its moments obey a recursion, whose matrices are the jacobians of the library's own step: exact
numbers have no Monte Carlo error. They treat the noise of minibatches as Gaussian, which is exact
for the bias and close for the MSE.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from epochs import first_epoch, next_batches
from jax import Array, lax, random
from lanes import in_lanes, over_lanes
from linear_steps import Affine, Jacobians, after, jacobians

from numpyro_sgmcmc.dynamics import Dynamics, OverdampedLangevin, UnderdampedLangevin
from numpyro_sgmcmc.dynamics.integrators import GradientFn

NUM_ROWS, BATCH_SIZE = 1000, 10
NUM_BATCHES = NUM_ROWS // BATCH_SIZE
X = np.random.default_rng(0).normal(size=NUM_ROWS)
BATCHES = np.arange(NUM_ROWS).reshape(NUM_BATCHES, BATCH_SIZE)
PRECISION = NUM_ROWS + 1.0
MEAN = X.sum() / PRECISION
NOISE = NUM_ROWS**2 * X[BATCHES].mean(1).var()
"""Variance of the minibatch gradient."""

FRICTION = 30.0
START = 0.5


class Sampler(NamedTuple):
    """A dynamic and its integrator."""

    dynamics: Dynamics
    integrator: str


SGHMC = Sampler(UnderdampedLangevin(FRICTION), "symmetric")
EULER = Sampler(UnderdampedLangevin(FRICTION), "euler")
EXPLICIT = Sampler(UnderdampedLangevin(FRICTION), "explicit_euler")
SGLD = Sampler(OverdampedLangevin(), "euler")


class Steps(NamedTuple):
    """Step sizes ``initial * l ** -exponent`` of lanes that run side by side, each ``(lanes,)``."""

    initial: Array
    exponent: Array

    def at(self, count: Any) -> Array:
        # Not by the library's schedule, which takes numbers: these are arrays.
        return self.initial * (1.0 + jnp.asarray(count, float)) ** -self.exponent


def constant(values: Any) -> Steps:
    return Steps(jnp.asarray(values), jnp.zeros(np.shape(values)))


class Averages(NamedTuple):
    """
    - **squares** - averages of ``(theta - MEAN) ** 2 - 1 / PRECISION``, ``(stops, lanes, runs)``.
    - **offsets** - averages of ``theta - MEAN``, of the same shape.
    """

    squares: np.ndarray
    offsets: np.ndarray


def batch_gradient(rows: Array) -> GradientFn:
    """The gradient's estimate from these rows."""
    return lambda theta: theta + NUM_ROWS * (theta - jnp.asarray(X)[rows].mean())


def full_gradient(theta: Array) -> Array:
    return PRECISION * (theta - MEAN)


def segments(stops: Array) -> tuple[Array, Array]:
    return jnp.append(0, stops[:-1]), stops


@partial(jax.jit, static_argnames=("sampler", "order", "runs"))
def simulate(
    rng_key: Array,
    sampler: Sampler,
    order: str,
    steps: Steps,
    stops: Array,
    runs: int,
    burn_in: int = 0,
    start: float = START,
) -> Averages:
    """Weighted averages up to each stop, of independent runs; lanes share their noise."""
    dynamics, step = sampler.dynamics, sampler.dynamics.make_step(sampler.integrator)
    key, start_key, momentum_key, order_key = random.split(rng_key, 4)
    offset = random.normal(start_key, (runs, 1)) * start / np.sqrt(PRECISION)
    states = jax.vmap(dynamics.init)(MEAN + offset, random.split(momentum_key, runs))
    lanes = len(steps.initial)

    def move(state: Any, h: Array, batch: Array, noise: Array) -> Any:
        gradient = full_gradient if order == "full" else batch_gradient(jnp.asarray(BATCHES)[batch])
        return step(state, h, gradient, noise)

    move_all = over_lanes(move)

    def one(l: Array, carry: Any) -> Any:
        states, batches, squares, offsets, weights = carry
        noise_key, batch_key = random.split(random.fold_in(key, l))
        noise = random.normal(noise_key, (runs, step.num_noise, 1))
        if order == "epoch":
            batches, (batch,) = next_batches(batches, NUM_BATCHES, 1)
        else:
            batch = random.randint(batch_key, (runs,), 0, NUM_BATCHES)
        h = steps.at(l)
        states = move_all(states, h, batch, noise)
        off = states.position[..., 0] - MEAN
        w = jnp.where(l >= burn_in, h, 0.0)[:, None]
        squares = squares + w * (off**2 - 1.0 / PRECISION)
        return states, batches, squares, offsets + w * off, weights + w

    def segment(carry: Any, ends: tuple[Array, Array]) -> tuple[Any, Averages]:
        carry = lax.fori_loop(*ends, one, carry)
        *_, squares, offsets, weights = carry
        return carry, Averages(squares / weights, offsets / weights)

    batches = first_epoch(order_key, NUM_BATCHES, runs)
    zeros = jnp.zeros((lanes, runs))
    carry = (in_lanes(states, lanes), batches, zeros, zeros, jnp.zeros((lanes, 1)))
    return lax.scan(segment, carry, segments(stops))[1]


class Moments(NamedTuple):
    """
    - **covariance** - of the state and, last, the sum of the epoch's gradient noise so far.
    - **quadratic** - sum of ``w c c^T``; c the covariance of the state with a past position.
    - **linear** - sum of ``w c``.
    - **weight** - sum of the weights w.
    - **bias** - sum of the weighted biases.
    - **variance** - variance of the weighted sum.
    """

    covariance: Array
    quadratic: Array
    linear: Array
    weight: Array
    bias: Array
    variance: Array


def step_jacobians(sampler: Sampler, h: Any) -> Jacobians:
    return jacobians(sampler.dynamics, sampler.integrator, h, np.array([[PRECISION]]))


def advance(
    sampler: Sampler, order: str, burn_in: int, l: Array, h: Array, past: Moments
) -> Moments:
    """The moments after one more step."""
    by = step_jacobians(sampler, h)
    n, b = len(by.state), by.slope[:, 0]
    A = jnp.zeros((n + 1, n + 1)).at[:n, :n].set(by.state)
    C = jnp.zeros((n + 1, by.noise.shape[1])).at[:n].set(by.noise)
    if order == "epoch":
        # Drawn without replacement: what is left of the epoch balances what has been drawn.
        left = NUM_BATCHES - l % NUM_BATCHES
        A = A.at[:n, n].set(-b / left).at[n, n].set(1.0 - 1.0 / left)
        noise = NOISE * NUM_BATCHES / (NUM_BATCHES - 1.0) * (left - 1.0) / left
        kick = jnp.append(b, 1.0)
    else:
        noise = NOISE if order == "iid" else 0.0
        kick = jnp.append(b, 0.0)
    P = after(Affine(A, C @ C.T + noise * jnp.outer(kick, kick)), past.covariance)
    quadratic, linear = A @ past.quadratic @ A.T, A @ past.linear
    w = jnp.where(l >= burn_in, h, 0.0)
    # phi is (theta - MEAN)^2 + 2 MEAN (theta - MEAN) and a constant; Isserlis' theorem.
    with_past = 2.0 * quadratic[0, 0] + 4.0 * MEAN**2 * linear[0]
    own = 2.0 * P[0, 0] ** 2 + 4.0 * MEAN**2 * P[0, 0]
    return Moments(
        P,
        quadratic + w * jnp.outer(P[0], P[0]),
        linear + w * P[0],
        past.weight + w,
        past.bias + w * (P[0, 0] - 1.0 / PRECISION),
        past.variance + 2.0 * w * with_past + w**2 * own,
    )


@partial(jax.jit, static_argnames=("sampler", "order"))
def exact(
    sampler: Sampler,
    order: str,
    steps: Steps,
    stops: Array,
    burn_in: int = 0,
    start: float = START,
) -> tuple[Array, Array]:
    """Bias and MSE of the weighted averages up to each stop, shape ``(stops, lanes)``."""
    one = jax.vmap(partial(advance, sampler, order, burn_in), (None, 0, 0))

    def segment(past: Moments, ends: tuple[Array, Array]) -> tuple[Moments, tuple[Array, Array]]:
        past = lax.fori_loop(*ends, lambda l, m: one(l, steps.at(l), m), past)
        bias = past.bias / past.weight
        return past, (bias, past.variance / past.weight**2 + bias**2)

    n = len(step_jacobians(sampler, 0.0).state)
    diagonal = jnp.array([start**2 / PRECISION, *[1.0] * (n - 1), 0.0])
    matrix, zero = jnp.zeros((n + 1, n + 1)), jnp.zeros(())
    first = Moments(jnp.diag(diagonal), matrix, matrix[0], zero, zero, zero)
    first = in_lanes(first, len(steps.initial))
    return lax.scan(segment, first, segments(stops))[1]


def largest_step_size(sampler: Sampler) -> float:
    """The step size beyond which the full gradient's step is unstable."""
    grid = np.linspace(1e-3, 0.15, 1491)
    T = jax.jit(jax.vmap(lambda h: step_jacobians(sampler, h).state))(jnp.asarray(grid))
    radius = np.abs(np.linalg.eigvals(np.asarray(T))).max(-1)
    return float(grid[radius < 1.0].max())
