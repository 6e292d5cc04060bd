"""Short pilot chains: where the posterior's mean and covariance are, measured.

The mode and its curvature describe a Gaussian. A skewed posterior (a scale, a rare level) has its
mean and spread elsewhere; pilot chains find them, and the anchor and whitening follow.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax import Array, lax, random

from numpyro_sgmcmc.arguments import Arguments
from numpyro_sgmcmc.dynamics import Underdamped
from numpyro_sgmcmc.gradients import Anchored, whitened_gradient
from numpyro_sgmcmc.integrators import compose
from numpyro_sgmcmc.model import Target

__all__ = ["PILOT_FRICTION", "run_pilot"]

PILOT_FRICTION = 1.5
_KEEP_EVERY = 5


@partial(jax.jit, static_argnames=("target", "estimator", "num_chains", "num_steps"))
def run_pilot(
    target: Target,
    arguments: Arguments,
    anchored: Anchored,
    step_size: Array,
    rng_key: Array,
    estimator: str,
    num_chains: int,
    num_steps: int,
) -> Array:
    """Draws of chains from about the anchor, by the symmetric splitting on random rows.

    :param num_steps: steps a chain; the first half is forgotten.
    :return: whitened draws, every fifth step, shape ``(num_chains, num_steps // 10, d)``.
    """
    dynamics = Underdamped(PILOT_FRICTION)
    scheme = dynamics.schemes["symmetric"]
    step = compose(dynamics.flows(), scheme)

    def one_step(state: Any, key: Array) -> tuple[Any, None]:
        noise_key, model_key, *row_keys = random.split(key, len(target.plates) + 2)
        rows = {
            p.name: random.randint(k, (p.subsample_size,), 0, p.size)
            for k, p in zip(row_keys, target.plates, strict=True)
        }
        model_key = model_key if target.is_randomized else None
        gradient = whitened_gradient(estimator, target, arguments, anchored, rows, model_key)
        noise = random.normal(noise_key, (scheme.draws, target.dim), target.dtype)
        return step(state, step_size, gradient, noise), None

    def keep(state: Any, key: Array) -> tuple[Any, Array]:
        state, _ = lax.scan(one_step, state, random.split(key, _KEEP_EVERY))
        return state, state.position

    def chain(key: Array) -> Array:
        start_key, momentum_key, run_key = random.split(key, 3)
        q = random.normal(start_key, (target.dim,), target.dtype)
        state = dynamics.init(q, momentum_key)
        _, draws = lax.scan(keep, state, random.split(run_key, num_steps // _KEEP_EVERY))
        return draws[num_steps // _KEEP_EVERY // 2 :]

    return jax.vmap(chain)(random.split(rng_key, num_chains))
