"""What a step of finite size makes of a standard normal, exactly where the step is linear.

Of a stationary chain the mean of all kicks is zero. So it is where gradients are taken that the
means of a posterior come right, and there the variances should be right: a scale that thousands of
effects share follows what spread these have at the kicks.

The step size: as large as noise, stiffness and the scheme allow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
from jax.interpreters.ad import JVPTracer

from numpyro_sgmcmc.adaptation.gradient_noise import GradientNoiseStats
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.errors import InvalidArgumentError

__all__ = [
    "MAX_NUM_STEPS",
    "choose_num_steps",
    "compute_draw_variance_inflation",
    "compute_effective_curvature",
    "compute_kick_variance_inflation",
    "compute_noise_variance_inflation",
    "compute_stability_limit",
    "limit_step_size_by_discretisation",
    "limit_step_size_by_noise",
    "simulate_sd_inflation",
]

_MAX_RESOLVED_EIGENVALUE = (
    1.0 - 1e-6
)  # a state of which a step leaves so much: rounding hides what it does


_MAX_ACCURATE_EIGENVALUE = 1.0 - 1e-5  # the same where a variance is to be right


_MIN_FORGOTTEN_FRACTION = (
    1e-4  # share that the SDE forgets in a step, of which more than 1e-5 should be seen
)


LinearStep = tuple[np.ndarray, np.ndarray, np.ndarray]
"""A step on a normal: the factors of state and entries in it, and in where gradients are taken."""


@lru_cache(maxsize=64)
def compute_kick_variance_inflation(dynamics: Dynamics, integrator: str, step_size: float) -> float:
    """Relative excess of a unit variance where gradients are taken, with exact ones.

    :param integrator: name of the integrator.
    :return: the mean over a step's gradients; zero for an SDE of which no linear form is known, and
        for a step that changes next to nothing.
    """
    linear = _linearise_step(dynamics, integrator, step_size, 1.0)
    if linear is None or abs(_find_slowest_eigenvalue(linear)) > _MAX_RESOLVED_EIGENVALUE:
        return 0.0
    covariance, at = _compute_stationary_covariance(dynamics, linear), linear[2]
    size = len(covariance)
    variances = ((at[:, :size] @ covariance) * at[:, :size]).sum(1) + np.square(at[:, size:]).sum(1)
    return float(variances.mean() - 1.0)


@lru_cache(maxsize=64)
def compute_draw_variance_inflation(
    dynamics: Dynamics,
    integrator: str,
    step_size: float,
    curvature: float = 1.0,
    noise_variance: float = 0.0,
) -> float | None:
    """Relative excess of a normal's variance that draws have.

    :param integrator: name of the integrator.
    :param curvature: of the normal's potential.
    :param noise_variance: of the gradient's noise, a new one each step.
    :return: infinite for a step that is not stable, -1 for one that friction brings to a stand, and
        None for an SDE of which no linear form is known, for a thermostat, which is not linear, and
        for noise where a step forgets too little to be told from rounding.
    """
    linear = _linearise_step(dynamics, integrator, step_size, curvature, noise_variance)
    if linear is None or dynamics.has_thermostat:
        return None
    slowest = _find_slowest_eigenvalue(linear)
    if (
        abs(slowest) > _MAX_ACCURATE_EIGENVALUE
        and abs(slowest - 1.0) > 1.0 - _MAX_ACCURATE_EIGENVALUE
    ):
        return math.inf
    if abs(slowest) > _MAX_ACCURATE_EIGENVALUE and noise_variance > 0.0:
        return None
    if abs(slowest) > _MAX_ACCURATE_EIGENVALUE:
        forgotten = -math.expm1(-2.0 * step_size / dynamics.relaxation_time(step_size))
        return -1.0 if forgotten > _MIN_FORGOTTEN_FRACTION else 0.0
    return float(curvature * _compute_stationary_covariance(dynamics, linear)[0, 0] - 1.0)


def _linearise_step(
    dynamics: Dynamics,
    integrator: str,
    step_size: float,
    curvature: float,
    noise_variance: float = 0.0,
) -> LinearStep | None:
    """The step on a normal of some curvature; None for an SDE of which no linear form is known.

    :param noise_variance: of the gradient's noise, the last entry.
    """
    linear = dynamics.linear_approximation
    if linear is None or integrator not in linear.integrators:
        return None
    if any(part.every_n_steps > 1 for part in linear.integrators[integrator].parts):
        return None
    size, respond = _compile_step_jacobian(linear, integrator)
    found = respond(step_size, curvature, math.sqrt(noise_variance))
    ends, places = (np.asarray(x, float) for x in found)
    return ends[:, :size], ends[:, size:], places


@lru_cache(maxsize=64)
def _compile_step_jacobian(linear_dynamics: Dynamics, integrator: str) -> tuple[int, Callable]:
    """Numbers in a state of one coordinate, and ``(step_size, curvature, sd) -> the factors``."""
    step = linear_dynamics.make_step(integrator)
    form = jax.eval_shape(linear_dynamics.init, jnp.zeros(1), jax.random.key(0))
    size = sum(math.prod(x.shape) for x in jax.tree.leaves(form))
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), form)

    @jax.jit
    def respond(step_size: Array, curvature: Array, sd: Array) -> tuple[Array, Array]:
        def response(entries: Array) -> tuple[Array, Array]:
            """The state after a step, and where it asked for gradients."""
            _, unravel = ravel_pytree(zeros)
            state, noise, places = unravel(entries[:size]), entries[size:-1, None], []

            def gradient(q: Array) -> Array:
                if not isinstance(q, JVPTracer):  # of a derivative
                    places.append(q)
                return curvature * q + sd * entries[-1]

            end = step(state, step_size, gradient, noise)
            return ravel_pytree(end)[0], jnp.concatenate(places)

        return jax.vmap(response, out_axes=1)(jnp.eye(size + step.num_noise + 1))

    return size, respond


def _find_slowest_eigenvalue(linear_step: LinearStep) -> complex:
    """By what a step multiplies the slowest part of a state; infinite where numbers end."""
    a, b, _ = linear_step
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.inf
    return complex(max(np.linalg.eigvals(a), key=abs))


def _compute_stationary_covariance(dynamics: Dynamics, linear_step: LinearStep) -> np.ndarray:
    """Of the stationary state."""
    a, b, _ = linear_step
    size = len(a)
    covariance = np.linalg.solve(np.eye(size**2) - np.kron(a, a), (b @ b.T).ravel())
    covariance = covariance.reshape(size, size)
    if dynamics.has_thermostat:
        # It cools or heats until momenta have the unit variance that the step alone denies them.
        covariance = covariance / covariance[1, 1]
    return covariance


MAX_NUM_STEPS = 500


_MAX_HARMLESS_CURVATURE = 3.5


_COVARIANCE_RELATIVE_ERROR = 0.03  # relative error of the covariance that is compensated


_SIMULATED_SHRINK_FACTOR, _ANALYTIC_SHRINK_FACTOR = (
    0.6,
    0.9,
)  # steps at a time, where that is simulated and where known


_MIN_STEP_SIZE_RATIO = 0.6**20


_ANALYTIC_BIAS_FRACTION = (
    0.5  # of the target: an error that is known comes on top of all that are not
)


def compute_stability_limit(
    dynamics: Dynamics, integrator_step_size: float, max_curvature: float
) -> float:
    """The step size that suits the largest whitened curvature, and an exact gradient.

    :param integrator_step_size: that which suits a whitened Gaussian.
    """
    integrator_step_size = min(integrator_step_size, dynamics.max_step_size)
    return integrator_step_size / dynamics.stiffness(compute_effective_curvature(max_curvature))


def compute_effective_curvature(max_curvature: float) -> float:
    """What counts of the largest whitened curvature: up to 3.5 it is like a whitened Gaussian's."""
    return max(1.0, max_curvature / _MAX_HARMLESS_CURVATURE)


def limit_step_size_by_noise(
    dynamics: Dynamics,
    integrator_step_size: float,
    noise_stats: GradientNoiseStats,
    max_curvature: float,
    target_sd_bias: float,
    is_compensated: bool = False,
) -> tuple[float, float]:
    """The largest step size whose predicted bias stays within the target.

    :param dynamics: tells how noise and curvature act.
    :param integrator_step_size: step size that suits a whitened Gaussian and an exact gradient.
    :param noise_stats: the whitened gradient's noise.
    :param max_curvature: largest whitened curvature; up to 3.5 it costs nothing.
    :param target_sd_bias: allowed relative error of posterior sds. Noise may use a quarter of it (of
        the variance, a half): where it differs over the posterior it shifts means as well.
    :param is_compensated: whether the noise's mean size is taken from what is injected.
    :return: the step size, and the relative excess of the posterior variance predicted at it.
    """
    step_size = compute_stability_limit(dynamics, integrator_step_size, max_curvature)
    shortest = dynamics.relaxation_time(step_size) / MAX_NUM_STEPS
    while step_size > shortest:
        if (
            compute_noise_variance_inflation(dynamics, noise_stats, step_size, is_compensated)
            <= target_sd_bias / 2.0
        ):
            break
        step_size = max(0.99 * step_size, shortest)
    return step_size, compute_noise_variance_inflation(
        dynamics, noise_stats, step_size, is_compensated
    )


def compute_noise_variance_inflation(
    dynamics: Dynamics, noise_stats: GradientNoiseStats, step_size: float, is_compensated: bool
) -> float:
    """The relative excess of the posterior variance that the gradient's noise makes.

    :param is_compensated: then it is the part of noise that differs from place to place, and what
        exceeds the injected.
    """
    if not is_compensated:
        return noise_stats.predict_variance_inflation(dynamics, step_size)
    share = dynamics.variance_inflation(noise_stats.variance, step_size)
    return max(noise_stats.position_dependent_fraction, _COVARIANCE_RELATIVE_ERROR) * min(
        share, 1.0
    ) + max(share - 1.0, 0.0)


@partial(jax.jit, static_argnames=("dynamics", "integrator", "dim", "num_chains", "num_steps"))
def _simulate_sd(
    dynamics: Dynamics,
    integrator: str,
    step_size: Any,
    noise_variance: Any,
    dim: int,
    num_chains: int,
    num_steps: int,
) -> tuple[Array, Array]:
    """Sd of simulated chains on a standard normal and its standard error; zero if none moves."""
    step = dynamics.make_step(integrator)

    def chain(key: Array) -> Array:
        start_key, state_key, key = random.split(key, 3)
        start = random.normal(start_key, (dim,))

        def one(state: Any, xs: Any) -> tuple[Any, Array]:
            key, count = xs
            entries = random.normal(key, (step.num_noise + 1, dim))
            offset = jnp.sqrt(noise_variance) * entries[0]
            state = step(state, step_size, lambda q: q + offset, entries[1:], count)
            return state, jnp.square(state.position).mean()

        xs = random.split(key, num_steps), jnp.arange(num_steps)
        end, squares = lax.scan(one, dynamics.init(start, state_key), xs)
        has_moved = (end.position != start).any()
        return jnp.where(has_moved, squares[num_steps // 2 :].mean(), 0.0)

    variances = jax.vmap(chain)(random.split(random.key(0), num_chains))
    sd = jnp.sqrt(variances.mean())
    return sd, variances.std() / math.sqrt(num_chains) / (2.0 * jnp.maximum(sd, 1e-30))


def simulate_sd_inflation(
    dynamics: Dynamics, integrator: str, step_size: float, noise_variance: float, dim: int
) -> tuple[float, float]:
    """Relative error of the sd that simulated chains have, and its standard error."""
    num_chains = int(np.clip(4096 // dim, 4, 1024))
    time = 3.0 * dynamics.relaxation_time(step_size)
    num_steps = 2 ** math.ceil(math.log2(np.clip(time / step_size, 64, 2048)))
    sd, error = _simulate_sd(
        dynamics, integrator, step_size, noise_variance, dim, num_chains, num_steps
    )
    return float(sd) - 1.0, float(error)


def limit_step_size_by_discretisation(
    dynamics: Dynamics,
    integrator: str,
    step_size: float,
    dim: int,
    target_sd_bias: float,
    noise_variance: float = 0.0,
) -> tuple[float, float]:
    """A step size at which the scheme has a standard normal right.

    The largest step sizes suit the kernels' default settings. A large friction, a small mass or a
    steep metric needs shorter ones, with an exact gradient and with a noisy one. How much is known
    where the step is linear, and otherwise told by simulated chains.

    :param step_size: where to begin.
    :param dim: number of coordinates.
    :param target_sd_bias: allowed relative error of the sd.
    :param noise_variance: of the whitened gradient's noise.
    :return: the step size, and the relative error of the sd that is left at it.
    :raises ValueError: where no step size is short enough for an exact gradient.
    """
    of_step = partial(_compute_sd_inflation, dynamics, integrator, dim=dim)
    is_known = (
        _compute_analytic_sd_inflation(dynamics, integrator, step_size, noise_variance) is not None
    )
    shorter = _ANALYTIC_SHRINK_FACTOR if is_known else _SIMULATED_SHRINK_FACTOR
    allowed = _ANALYTIC_BIAS_FRACTION * target_sd_bias if is_known else target_sd_bias
    excess, error = of_step(step_size, 0.0)
    shortest = _MIN_STEP_SIZE_RATIO * step_size
    while not abs(excess) <= allowed + 2.0 * error:
        # Simulated chains that no step moves, no shorter one will move.
        is_stuck = (
            excess == -1.0
            and _compute_analytic_sd_inflation(dynamics, integrator, step_size, 0.0) is None
        )
        if is_stuck or step_size < shortest:
            raise InvalidArgumentError(
                "With these settings of the kernel no step size leaves a standard normal as it "
                "is: is the diffusion zero, or are friction, mass or metric extreme?"
            )
        step_size *= shorter
        excess, error = of_step(step_size, 0.0)
    if noise_variance <= 0.0:
        return step_size, excess
    excess, error = of_step(step_size, noise_variance)
    while not abs(excess) <= allowed + 2.0 * error:
        if step_size <= dynamics.relaxation_time(step_size) / MAX_NUM_STEPS:
            break
        step_size *= shorter
        excess, error = of_step(step_size, noise_variance)
    return step_size, excess


def _compute_sd_inflation(
    dynamics: Dynamics, integrator: str, step_size: float, noise_variance: float, dim: int
) -> tuple[float, float]:
    """Relative error of the sd of draws, and its own standard error: zero where it is known."""
    known = _compute_analytic_sd_inflation(dynamics, integrator, step_size, noise_variance)
    if known is None:
        return simulate_sd_inflation(dynamics, integrator, step_size, noise_variance, dim)
    return known, 0.0


def _compute_analytic_sd_inflation(
    dynamics: Dynamics, integrator: str, step_size: float, noise_variance: float
) -> float | None:
    """Relative error of the sd of draws where it is known; not of steps that are not stable, or so
    nearly frictionless that rounding does not tell them from such.
    """
    exact = compute_draw_variance_inflation(
        dynamics, integrator, step_size, noise_variance=noise_variance
    )
    if exact is None or math.isinf(exact):
        return None
    return math.sqrt(max(0.0, 1.0 + exact)) - 1.0


def choose_num_steps(relaxation_time: float, step_size: Any) -> int:
    """Steps between draws that are about independent, from 1 to 500."""
    return max(1, min(MAX_NUM_STEPS, math.ceil(relaxation_time / float(step_size) - 1e-6)))
