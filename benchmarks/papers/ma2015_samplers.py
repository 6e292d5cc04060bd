"""The samplers of Ma, Chen and Fox (2015), with the paper's metric, and what they sample."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from ma2015_targets import GRID

from numpyro_sgmcmc.dynamics import (
    OverdampedLangevin,
    RiemannianOverdampedLangevin,
    RiemannianUnderdampedLangevin,
    UnderdampedLangevin,
)

D, C = 1.5, 0.5
SLOPES = 0.9 * np.array([1.0, -1.0] * 500)

Sampler = Callable[[Array], tuple[Any, Any, Callable[[Array], Array]]]
"""``key -> (dynamics, step, gradient)`` on the minibatch that the key draws."""

Make = Callable[[Callable, Any], Sampler]
"""``(potential, friction) -> sampler``."""


def inverse_metric(potential: Callable, q: Array) -> Array:
    return D * jnp.sqrt(jnp.abs(potential(q) + C))


def exactly(potential: Callable, dynamics: Any, integrator: str) -> Sampler:
    """A sampler with the exact gradient."""
    return lambda key: (dynamics, dynamics.make_step(integrator), jax.grad(potential))


def sgld(potential: Callable, friction: Any, integrator: str) -> Sampler:
    return exactly(potential, OverdampedLangevin(), integrator)


def sgrld(potential: Callable, friction: Any, integrator: str) -> Sampler:
    return exactly(
        potential, RiemannianOverdampedLangevin(partial(inverse_metric, potential)), integrator
    )


def sghmc(potential: Callable, friction: Any, integrator: str) -> Sampler:
    return exactly(potential, UnderdampedLangevin(friction), integrator)


def gsgrhmc(potential: Callable, friction: Any, integrator: str) -> Sampler:
    return exactly(
        potential,
        RiemannianUnderdampedLangevin(partial(inverse_metric, potential), friction),
        integrator,
    )


def naive_potential(potential: Callable, q: Array) -> Array:
    """``U + log S``, S = G^-1/2, whose density is what the naive sampler samples."""
    return potential(q) + 0.5 * jnp.log(inverse_metric(potential, q))


def naive(potential: Callable, friction: Any, integrator: str) -> Sampler:
    """The paper's equation (16), without the divergence of S.

    That divergence is S times the gradient of log S, so a gradient with log S in it cancels it.
    """
    dynamics = RiemannianUnderdampedLangevin(partial(inverse_metric, potential), friction)
    gradient = jax.grad(partial(naive_potential, potential))
    return lambda key: (dynamics, dynamics.make_step(integrator), gradient)


def with_minibatches(potential: Callable, friction: Any, integrator: str, source: str) -> Sampler:
    """The generalized SGRHMC with gradients from one row a step.

    The rows are of two kinds that add opposite slopes to the potential. The slopes are below one,
    so that U + C has no roots for any row at U = θ²/2.

    :param source: of the potential in the metric: ``"all rows"``, ``"the same row"`` as the
        gradient's, or ``"another row"``.
    """

    def on_row(row: Array) -> Callable:
        return lambda q: potential(q) + jnp.asarray(SLOPES)[row] * q[0]

    def sampler(key: Array) -> tuple:
        row, other = random.randint(key, (2,), 0, SLOPES.size)
        in_metric = {
            "all rows": potential,
            "the same row": on_row(row),
            "another row": on_row(other),
        }[source]
        dynamics = RiemannianUnderdampedLangevin(partial(inverse_metric, in_metric), friction)
        return dynamics, dynamics.make_step(integrator), jax.grad(on_row(row))

    return sampler


def same_row_density(potential: Callable) -> np.ndarray:
    """Return the limit density at small steps if one row gives both metric and gradient.

    The mean force is that of a potential with slope E[S grad U] / E[S], over rows.
    """
    slopes = np.unique(SLOPES)
    u = np.asarray(jax.vmap(lambda x: potential(x[None]))(jnp.asarray(GRID)))[:, None]
    root = np.abs(u + slopes * GRID[:, None] + C) ** 0.25
    extra = np.cumsum((root * slopes).sum(1) / root.sum(1)) * (GRID[1] - GRID[0])
    log_density = -u[:, 0] - extra
    return np.exp(log_density - log_density.max())
