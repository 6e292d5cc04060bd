r"""Whether an SDE leaves its density invariant: the Fokker-Planck residual, without sampling.

For :math:`dz = f\,dt + \sqrt{2D}\,dW` and a density :math:`\pi` the relative rate of change is

.. math:: \frac{1}{\pi}\Big[-\nabla\cdot(f\pi) + \sum_{ij}\partial_i\partial_j(D_{ij}\pi)\Big]

and zero everywhere if and only if :math:`\pi` is stationary. The SDE is read off the step that
the sampler takes, as the step size goes to zero, so that what is checked is what runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.flatten_util import ravel_pytree

from numpyro_sgmcmc import errors
from numpyro_sgmcmc.dynamics import Dynamics, Recipe
from numpyro_sgmcmc.dynamics.general import check_recipe
from numpyro_sgmcmc.errors import InvalidArgumentError

__all__ = [
    "SDE",
    "check_invariance",
    "fokker_planck_residual",
    "make_step_expectation",
    "small_step_limit",
]


class SDE(NamedTuple):
    """``dz = drift(z) dt + sqrt(2 diffusion(z)) dW`` on flat states.

    - **drift** - maps ``z`` of shape ``(n,)`` to that shape.
    - **diffusion** - maps ``z`` to a matrix of shape ``(n, n)``.
    """

    drift: Callable[[Array], Array]
    diffusion: Callable[[Array], Array]


def check_invariance(
    dynamics: Dynamics,
    potential: Callable[[Array], Array] | None = None,
    *,
    integrator: str | None = None,
    dim: int = 1,
    states: np.ndarray | None = None,
) -> np.ndarray:
    r"""Fokker-Planck residuals of a dynamic's step at random states, in float64.

    Below about 1e-9 the density :math:`\propto e^{-U(\theta) - \text{energy}}` is stationary; a
    wrong drift, noise or correction shows as 0.01 or more. This holds for rates (frictions,
    curvatures) of about one: the limit is read from steps of 0.003 to 0.024, in which rates of 50
    leave errors of 1e-4. What a sampler draws afresh, now and then, is not checked.

    A :class:`~numpyro_sgmcmc.dynamics.Recipe` has its drift made of D, Q and h, and is right where
    these are: they are looked at first, as when a run begins, and refused in a sentence.

    :param dynamics: the SDE, for example a :class:`~numpyro_sgmcmc.dynamics.Recipe`.
    :param potential: U, maps a position of shape ``(dim,)`` to a scalar. Default: a quartic that
        is neither Gaussian nor separable.
    :param integrator: the scheme whose steps are read. Default: the dynamic's first.
    :param dim: number of coordinates. One (default) does not see how coordinates act on each
        other, or that they differ: take 2 where they do. The cost grows as 4 to the power of the
        number of normal entries a step takes.
    :param states: flat states to check at, position first, shape ``(m, n)``. Default: five random
        ones. Give some where the dynamic is smooth if it has kinks.
    :return: absolute residuals, shape ``(m,)``.
    :raises ValueError: for an unknown scheme, a recipe's functions that
        :class:`~numpyro_sgmcmc.RecipeKernel` refuses, or where the residual is not finite.
    """
    if not isinstance(dynamics, Dynamics):
        raise InvalidArgumentError(
            f"`dynamics` is {dynamics!r}, but must be an SDE of numpyro_sgmcmc.dynamics, such as a "
            "kernel's `dynamics`."
        )
    errors.check_positive_int("dim", dim)
    if potential is not None:
        errors.check_callable("potential", potential)
    with jax.enable_x64(True):
        if isinstance(dynamics, Recipe):
            check_recipe(dynamics, dim)
        fn = _quartic_potential if potential is None else potential
        state = _drop_cached_gradient(dynamics.init(jnp.zeros(dim), random.key(0)))
        flat, unravel = ravel_pytree(state)
        if (shape := jax.eval_shape(fn, jnp.zeros(dim)).shape) != ():
            raise InvalidArgumentError(
                f"`potential` returns shape {shape}, but must return a scalar."
            )
        integrator = integrator or next(iter(dynamics.integrators))
        errors.check_choice("integrator", integrator, tuple(dynamics.integrators))
        step = dynamics.make_step(integrator)

        def closed(state: Any, h: Any, gradient: Callable, noise: Array) -> Any:
            if getattr(dynamics, "is_fsal", False):
                state = state._replace(gradient=gradient(state.position))
            return _drop_cached_gradient(step(state, h, gradient, noise))

        def log_density(z: Array) -> Array:
            state = unravel(z)
            return -fn(state.position) - dynamics.energy(state)

        sde = small_step_limit(closed, state, step.num_noise, jax.grad(fn))
        if states is None:
            states = 0.7 * np.random.default_rng(0).standard_normal((5, flat.size))
        states = errors.validate_real_array("states", states)
        if states.shape != (len(states) if states.ndim else 0, flat.size):
            raise InvalidArgumentError(
                f"`states` has shape {states.shape}, but must have shape (m, {flat.size}): the "
                "position and the other variables."
            )
        at = jax.jit(jax.vmap(lambda z: fokker_planck_residual(sde, log_density, z)))
        found = np.abs(at(jnp.asarray(states)))
        if not np.isfinite(found).all():
            raise InvalidArgumentError(
                "The residual is not finite: the step has no derivatives at these states. Give "
                "others, or a diffusion as its diagonal, where eigenvalues do not coincide."
            )
        return found


def small_step_limit(step: Callable, state: Any, num_noise: int, gradient: Callable) -> SDE:
    """The SDE that a step follows, read off the step as the step size goes to zero.

    The mean and the second moment of a step's displacement are analytic in the step size; a
    polynomial through eight small step sizes gives their rates at zero to about 1e-12.

    :param step: ``(state, step_size, gradient, noise) -> state``.
    :param state: any state.
    :param num_noise: standard normal vectors that the step takes.
    :param gradient: gradient of the potential.
    """
    expect = make_step_expectation(step, state, num_noise, gradient, num_nodes=4)
    sizes = 0.003 * np.arange(1, 9)
    others = [sizes[sizes != h] for h in sizes]
    weights = np.array([np.prod(o / (o - h)) for o, h in zip(others, sizes, strict=True)])

    def rate_at_zero(fn: Callable, z: Array) -> Array:
        return jnp.tensordot(weights / sizes, jax.vmap(lambda h: expect(fn, z, h))(sizes), 1)

    def drift(z: Array) -> Array:
        return rate_at_zero(lambda x: x - z, z)

    def diffusion(z: Array) -> Array:
        return rate_at_zero(lambda x: jnp.outer(x - z, x - z), z) / 2.0

    return SDE(drift, diffusion)


def fokker_planck_residual(sde: SDE, log_density: Callable, z: Array) -> Array:
    """Relative rate at which the SDE changes the density at ``z``: zero where it is invariant."""

    def flux(x: Array) -> Array:
        def ratio(y: Array) -> Array:
            return jnp.exp(log_density(y) - log_density(z))

        spread = jax.jacfwd(lambda y: sde.diffusion(y) * ratio(y))(x)
        return sde.drift(x) * ratio(x) - jnp.einsum("ijj->i", spread)

    return -jnp.trace(jax.jacfwd(flux)(z))


def make_step_expectation(
    step: Callable, state: Any, num_noise: int, gradient: Callable, num_nodes: int
) -> Callable:
    """``(fn, z, step_size) -> E[fn(z')]`` for the flat state z' that a step from z reaches.

    By Gauss-Hermite quadrature over the step's noise.
    """
    unravel = ravel_pytree(state)[1]
    points, weights = _gauss_hermite_rule(num_noise, state.position.size, num_nodes)

    def expect(fn: Callable, z: Array, step_size: Any) -> Array:
        def one(noise: Array) -> Array:
            return fn(ravel_pytree(step(unravel(z), step_size, gradient, noise))[0])

        return jnp.tensordot(weights, jax.vmap(one)(jnp.asarray(points)), 1)

    return expect


def _gauss_hermite_rule(num_noise: int, dim: int, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Gauss-Hermite points, shape ``(m, num_draws, dim)``, and their weights, which add up to 1."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
    count = num_noise * dim
    points = np.array(list(itertools.product(nodes, repeat=count)))
    products = np.array(list(itertools.product(weights / weights.sum(), repeat=count)))
    return points.reshape(-1, num_noise, dim), products.prod(1)


def _drop_cached_gradient(state: Any) -> Any:
    """A kept gradient is a function of the position, and no variable of the SDE."""
    return state._replace(gradient=None) if hasattr(state, "gradient") else state


def _quartic_potential(q: Array) -> Array:
    along = jnp.cos(jnp.arange(q.size)) @ q
    return jnp.square(q).sum() / 2.0 + 0.1 * along**3 + along**4 / 24.0
