"""The step size: as large as noise, stiffness and the scheme allow."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from numpyro_sgmcmc.checks import Refusal
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.warmup.discretisation import draw_excess
from numpyro_sgmcmc.warmup.noise import Noise

__all__ = [
    "MAX_NUM_STEPS",
    "choose_num_steps",
    "choose_step_size",
    "excess_by_noise",
    "shorten_until_right",
    "simulated_excess",
    "stiff_curvature",
    "stiff_step_size",
]

MAX_NUM_STEPS = 500
_FREE_CURVATURE = 3.5
_UNCERTAIN = 0.03  # relative error of the covariance that is compensated
_SHORTER, _SHORTER_OF_KNOWN = 0.6, 0.9  # steps at a time, where that is simulated and where known
_SHORTEST = 0.6**20
_SHARE_OF_KNOWN = 0.5  # of the target: an error that is known comes on top of all that are not


def stiff_step_size(dynamics: Dynamics, largest: float, curvature: float) -> float:
    """The step size that suits the largest whitened curvature, and an exact gradient.

    :param largest: that which suits a whitened Gaussian.
    """
    largest = min(largest, dynamics.longest_step_size)
    return largest / dynamics.stiffness(stiff_curvature(curvature))


def stiff_curvature(curvature: float) -> float:
    """What counts of the largest whitened curvature: up to 3.5 it is like a whitened Gaussian's."""
    return max(1.0, curvature / _FREE_CURVATURE)


def choose_step_size(
    dynamics: Dynamics,
    largest: float,
    noise: Noise,
    curvature: float,
    target_bias: float,
    is_compensated: bool = False,
) -> tuple[float, float]:
    """The largest step size whose predicted bias stays within the target.

    :param dynamics: tells how noise and curvature act.
    :param largest: step size that suits a whitened Gaussian and an exact gradient.
    :param noise: the whitened gradient's noise.
    :param curvature: largest whitened curvature; up to 3.5 it costs nothing.
    :param target_bias: allowed relative error of posterior sds. Noise may use a quarter of it (of
        the variance, a half): where it differs over the posterior it shifts means as well.
    :param is_compensated: whether the noise's mean size is taken from what is injected.
    :return: the step size, and the relative excess of the posterior variance predicted at it.
    """
    step_size = stiff_step_size(dynamics, largest, curvature)
    shortest = dynamics.relaxation_time(step_size) / MAX_NUM_STEPS
    while step_size > shortest:
        if excess_by_noise(dynamics, noise, step_size, is_compensated) <= target_bias / 2.0:
            break
        step_size = max(0.99 * step_size, shortest)
    return step_size, excess_by_noise(dynamics, noise, step_size, is_compensated)


def excess_by_noise(
    dynamics: Dynamics, noise: Noise, step_size: float, is_compensated: bool
) -> float:
    """The relative excess of the posterior variance that the gradient's noise makes.

    :param is_compensated: then it is the part of noise that differs from place to place, and what
        exceeds the injected.
    """
    if not is_compensated:
        return noise.inflation(dynamics, step_size)
    share = dynamics.noise_inflation(noise.variance, step_size)
    return max(noise.varying, _UNCERTAIN) * min(share, 1.0) + max(share - 1.0, 0.0)


@partial(jax.jit, static_argnames=("dynamics", "scheme", "dim", "num_chains", "num_steps"))
def _simulate(
    dynamics: Dynamics,
    scheme: str,
    step_size: Any,
    variance: Any,
    dim: int,
    num_chains: int,
    num_steps: int,
) -> tuple[Array, Array]:
    """Sd of simulated chains on a standard normal and its standard error; zero if none moves."""
    step = dynamics.step(scheme)

    def chain(key: Array) -> Array:
        start_key, state_key, key = random.split(key, 3)
        start = random.normal(start_key, (dim,))

        def one(state: Any, xs: Any) -> tuple[Any, Array]:
            key, count = xs
            entries = random.normal(key, (step.draws + 1, dim))
            offset = jnp.sqrt(variance) * entries[0]
            state = step(state, step_size, lambda q: q + offset, entries[1:], count)
            return state, jnp.square(state.position).mean()

        xs = random.split(key, num_steps), jnp.arange(num_steps)
        end, squares = lax.scan(one, dynamics.init(start, state_key), xs)
        has_moved = (end.position != start).any()
        return jnp.where(has_moved, squares[num_steps // 2 :].mean(), 0.0)

    variances = jax.vmap(chain)(random.split(random.key(0), num_chains))
    sd = jnp.sqrt(variances.mean())
    return sd, variances.std() / math.sqrt(num_chains) / (2.0 * jnp.maximum(sd, 1e-30))


def simulated_excess(
    dynamics: Dynamics, scheme: str, step_size: float, variance: float, dim: int
) -> tuple[float, float]:
    """Relative error of the sd that simulated chains have, and its standard error."""
    num_chains = int(np.clip(4096 // dim, 4, 1024))
    time = 3.0 * dynamics.relaxation_time(step_size)
    num_steps = 2 ** math.ceil(math.log2(np.clip(time / step_size, 64, 2048)))
    sd, error = _simulate(dynamics, scheme, step_size, variance, dim, num_chains, num_steps)
    return float(sd) - 1.0, float(error)


def shorten_until_right(
    dynamics: Dynamics,
    scheme: str,
    step_size: float,
    dim: int,
    target_bias: float,
    variance: float = 0.0,
) -> tuple[float, float]:
    """A step size at which the scheme has a standard normal right.

    The largest step sizes suit the kernels' default settings. A large friction, a small mass or a
    steep metric needs shorter ones, with an exact gradient and with a noisy one. How much is known
    where the step is linear, and otherwise told by simulated chains.

    :param step_size: where to begin.
    :param dim: number of coordinates.
    :param target_bias: allowed relative error of the sd.
    :param variance: of the whitened gradient's noise.
    :return: the step size, and the relative error of the sd that is left at it.
    :raises ValueError: where no step size is short enough for an exact gradient.
    """
    of_step = partial(_sd_excess, dynamics, scheme, dim=dim)
    is_known = _known_excess(dynamics, scheme, step_size, variance) is not None
    shorter = _SHORTER_OF_KNOWN if is_known else _SHORTER
    allowed = _SHARE_OF_KNOWN * target_bias if is_known else target_bias
    excess, error = of_step(step_size, 0.0)
    shortest = _SHORTEST * step_size
    while not abs(excess) <= allowed + 2.0 * error:
        # Simulated chains that no step moves, no shorter one will move.
        is_stuck = excess == -1.0 and _known_excess(dynamics, scheme, step_size, 0.0) is None
        if is_stuck or step_size < shortest:
            raise Refusal(
                "With these settings of the kernel no step size leaves a standard normal as it "
                "is: is the diffusion zero, or are friction, mass or metric extreme?"
            )
        step_size *= shorter
        excess, error = of_step(step_size, 0.0)
    if variance <= 0.0:
        return step_size, excess
    excess, error = of_step(step_size, variance)
    while not abs(excess) <= allowed + 2.0 * error:
        if step_size <= dynamics.relaxation_time(step_size) / MAX_NUM_STEPS:
            break
        step_size *= shorter
        excess, error = of_step(step_size, variance)
    return step_size, excess


def _sd_excess(
    dynamics: Dynamics, scheme: str, step_size: float, variance: float, dim: int
) -> tuple[float, float]:
    """Relative error of the sd of draws, and its own standard error: zero where it is known."""
    known = _known_excess(dynamics, scheme, step_size, variance)
    if known is None:
        return simulated_excess(dynamics, scheme, step_size, variance, dim)
    return known, 0.0


def _known_excess(
    dynamics: Dynamics, scheme: str, step_size: float, variance: float
) -> float | None:
    """Relative error of the sd of draws where it is known; not of steps that are not stable, or so
    nearly frictionless that rounding does not tell them from such.
    """
    exact = draw_excess(dynamics, scheme, step_size, variance=variance)
    if exact is None or math.isinf(exact):
        return None
    return math.sqrt(max(0.0, 1.0 + exact)) - 1.0


def choose_num_steps(relaxation_time: float, step_size: Any) -> int:
    """Steps between draws that are about independent, from 1 to 500."""
    return max(1, min(MAX_NUM_STEPS, math.ceil(relaxation_time / float(step_size) - 1e-6)))
