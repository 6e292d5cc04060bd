"""Moments of linear steps, without sampling.

On a quadratic potential a step of the library is linear in the state, in the slope of the
potential (which is where a minibatch's error goes) and in the injected noise. Its jacobians at zero
are the whole step, and moments after it and stationary ones follow exactly.

For minibatches of a partition in random order, the mean second moment after a set S of minibatches
is the average, over its last member k, of k's step applied to that after S without k. A sum over
subsets in place of permutations makes the epoch's map exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.flatten_util import ravel_pytree
from scipy.sparse.linalg import LinearOperator, gmres

from numpyro_sgmcmc.dynamics import Dynamics


class Jacobians(NamedTuple):
    """Jacobians of the flat state after a step.

    - **state** - by the state before, shape ``(n, n)``.
    - **slope** - by the potential's slope, shape ``(n, d)``.
    - **noise** - by the standard normal entries, shape ``(n, draws * d)``.
    """

    state: Array
    slope: Array
    noise: Array


@partial(jax.jit, static_argnames=("dynamics", "integrator"))
def jacobians(
    dynamics: Dynamics, integrator: str, h: Any, hessian: Any, count: Any = 0
) -> Jacobians:
    """The step's on the gradient ``hessian q + slope``.

    :param count: steps before this one, for parts that do not run at every step.
    """
    step, zero = dynamics.make_step(integrator), jnp.zeros(len(hessian))
    state, unravel = ravel_pytree(dynamics.init(zero, random.key(0)))

    def move(z: Array, slope: Array, noise: Array) -> Array:
        def gradient(q: Array) -> Array:
            return hessian @ q + slope

        noise = noise.reshape(step.num_noise, zero.size)
        return ravel_pytree(step(unravel(z), h, gradient, noise, count))[0]

    origin = jnp.zeros_like(state), zero, jnp.zeros(step.num_noise * zero.size)
    return Jacobians(*jax.jacfwd(move, (0, 1, 2))(*origin))


class Affine(NamedTuple):
    """A step ``z -> A (z, 1) + noise`` on flat states with a one at their end.

    - **matrix** - A with the row that keeps the one, shape ``(n + 1, n + 1)``.
    - **noise** - covariance of the noise, the same shape.
    """

    matrix: Any
    noise: Any


def after(step: Affine, moment: Any) -> Any:
    """The second moment of ``(z, 1)`` after the step."""
    return step.matrix @ moment @ step.matrix.T + step.noise


def linearized(
    dynamics: Dynamics,
    integrator: str,
    h: float,
    hessian: np.ndarray,
    slope: np.ndarray,
    count: int = 0,
) -> Affine:
    """The library's step on the gradient ``hessian q + slope``."""
    by = jax.tree.map(np.asarray, jacobians(dynamics, integrator, h, hessian, count))
    n = len(by.state)
    matrix, noise = np.eye(n + 1), np.zeros((n + 1, n + 1))
    matrix[:n, :n], matrix[:n, n] = by.state, by.slope @ slope
    noise[:n, :n] = by.noise @ by.noise.T
    return Affine(matrix, noise)


def epoch(
    steps: Sequence[Affine], moment: np.ndarray, last: Sequence[Affine] | None = None
) -> list[np.ndarray]:
    """Mean second moment after 0, 1, ..., K steps of a random permutation of the K steps.

    :param last: what stands for a step that comes last; None for the step itself.
    """
    num = len(steps)
    reached, means = {frozenset(): moment}, [moment]
    for size in range(1, num + 1):
        larger = {}
        used = last if last is not None and size == num else steps
        for members in itertools.combinations(range(num), size):
            chosen = frozenset(members)
            parts = [after(used[k], reached[chosen - {k}]) for k in members]
            larger[chosen] = sum(parts) / size
        reached = larger
        means.append(sum(reached.values()) / len(reached))
    return means


def fixed_point(advance: Callable[[np.ndarray], np.ndarray], size: int) -> np.ndarray:
    """The second moment that an affine map of second moments leaves as it is."""

    def advanced(x: np.ndarray) -> np.ndarray:
        return advance(np.append(x, 1.0).reshape(size, size)).ravel()[:-1]

    offset = advanced(np.zeros(size**2 - 1))

    def residual(x: np.ndarray) -> np.ndarray:
        return x - (advanced(x) - offset)

    operator = LinearOperator((size**2 - 1,) * 2, matvec=residual, dtype=float)
    solution, failed = gmres(operator, offset, rtol=1e-12, atol=3e-14, restart=600, maxiter=5)
    if failed:
        raise RuntimeError("The stationary moments were not found.")
    moment = np.append(solution, 1.0).reshape(size, size)
    # Where the step is unstable a solution exists, but is no second moment.
    is_moment = np.linalg.eigvalsh(moment)[0] > -1e-8 * np.abs(moment).max()
    return moment if is_moment else np.full_like(moment, np.inf)


class Stationary(NamedTuple):
    """Second moments of ``(z, 1)``, z measured from the exact posterior mean.

    - **ends** - at the ends of epochs.
    - **all_steps** - over all steps.
    """

    ends: np.ndarray
    all_steps: np.ndarray


def permuted(steps: Sequence[Affine]) -> Stationary:
    """Minibatches in a new random order in every epoch; one minibatch is the full batch."""
    ends = fixed_point(lambda m: epoch(steps, m)[-1], len(steps[0].matrix))
    return Stationary(ends, np.mean(epoch(steps, ends)[1:], axis=0))


def with_replacement(steps: Sequence[Affine]) -> Stationary:
    """A minibatch of the partition at random at every step."""
    mean = fixed_point(lambda m: np.mean([after(s, m) for s in steps], 0), len(steps[0].matrix))
    return Stationary(mean, mean)
