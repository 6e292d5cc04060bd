r"""A test of whether an SDE leaves its density invariant, by the Fokker-Planck residual.

For :math:`dz = f\,dt + \sqrt{2D}\,dW` and a density :math:`\pi`, the relative rate of change is

.. math:: \frac{1}{\pi}\Big[-\nabla\cdot(f\pi) + \sum_{ij}\partial_i\partial_j(D_{ij}\pi)\Big]

which is zero everywhere if and only if :math:`\pi` is stationary. Drift f and diffusion D are
computed from the sampler's step in the limit of small step sizes, so that the code that runs is
tested, and nothing is sampled.
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

# Step sizes from which rates at zero are extrapolated, in the time unit of the SDE (1 over a
# friction or curvature): small enough for a polynomial of degree 8, large enough for float64.
_STEP_SIZES = 0.003 * np.arange(1, 9)
# Gauss-Hermite nodes per normal entry: exact for polynomials of degree 7 in the noise.
_NUM_NODES = 4
# States at which the residual is evaluated by default, and their SD: within the quartic's bulk.
_NUM_STATES, _STATE_SD = 5, 0.7


class SDE(NamedTuple):
    """``dz = drift(z) dt + sqrt(2 diffusion(z)) dW``, functions of a flat state ``(n,)``."""

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
    r"""Return Fokker-Planck residuals of an SDE's step at some states, in float64.

    If residuals are below about 1e-9, the density :math:`\propto e^{-U(\theta) - \text{energy}}` is
    stationary. A wrong drift, noise or correction gives 0.01 or more. These numbers hold for rates
    (frictions, curvatures) of about one. For rates of 50, residuals have an error of 1e-4, because
    they are extrapolated from steps of 0.003 to 0.024. Periodic resampling is not tested.

    The drift of a :class:`~numpyro_sgmcmc.dynamics.Recipe` is derived from D, Q and h. These are
    checked first, as at the start of a run.

    :param dynamics: the SDE, for example a :class:`~numpyro_sgmcmc.dynamics.Recipe`.
    :param potential: U, a function from a position of shape ``(dim,)`` to a scalar. Default: a
        quartic that is neither Gaussian nor separable.
    :param integrator: name of the integrator whose step is used. Default: the SDE's first.
    :param dim: number of coordinates. Default 1. Use 2 for an SDE in which coordinates interact or
        differ, which one coordinate cannot show. The cost is proportional to 4 to the power of the
        number of normal entries per step.
    :param states: flat states, position first, shape ``(m, n)``. Default: five random ones. If the
        SDE has kinks, pass states at which it is smooth.
    :return: absolute residuals, shape ``(m,)``.
    :raises ValueError: for an unknown integrator, functions of a recipe that
        :class:`~numpyro_sgmcmc.RecipeKernel` does not accept, or residuals that are not finite.
    """
    if not isinstance(dynamics, Dynamics):
        raise InvalidArgumentError(
            f"`dynamics` is a {type(dynamics).__name__}, which is not an SDE.",
            "pass an object of numpyro_sgmcmc.dynamics, such as a kernel's `dynamics`.",
            "invariance-dynamics",
        )
    errors.check_positive_int("dim", dim)
    if potential is not None:
        errors.check_callable("potential", potential)
    with jax.enable_x64(True):
        if isinstance(dynamics, Recipe):
            check_recipe(dynamics, dim)
        potential_fn = _quartic_potential if potential is None else potential
        state = _drop_cached_gradient(dynamics.init(jnp.zeros(dim), random.key(0)))
        flat_state, unravel = ravel_pytree(state)
        if (shape := jax.eval_shape(potential_fn, jnp.zeros(dim)).shape) != ():
            raise InvalidArgumentError(
                f"`potential` returns shape {shape}, which is not a scalar.",
                "sum over the coordinates.",
                "invariance-potential",
            )
        integrator = integrator or next(iter(dynamics.integrators))
        errors.check_choice("integrator", integrator, tuple(dynamics.integrators))
        step = dynamics.make_step(integrator)

        def step_without_cache(state: Any, h: Any, gradient: Callable, normals: Array) -> Any:
            if getattr(dynamics, "is_fsal", False):
                state = state._replace(gradient=gradient(state.position))
            return _drop_cached_gradient(step(state, h, gradient, normals))

        def log_density(z: Array) -> Array:
            state = unravel(z)
            return -potential_fn(state.position) - dynamics.energy(state)

        sde = small_step_limit(step_without_cache, state, step.num_noise, jax.grad(potential_fn))
        if states is None:
            normals = np.random.default_rng(0).standard_normal((_NUM_STATES, flat_state.size))
            states = _STATE_SD * normals
        states = errors.validate_real_array("states", states)
        if states.ndim != 2 or states.shape[1] != flat_state.size:
            raise InvalidArgumentError(
                f"`states` has shape {states.shape}, which is not (m, {flat_state.size}).",
                "pass flat states: the position, then the other variables.",
                "invariance-states",
            )
        residual = jax.jit(jax.vmap(lambda z: fokker_planck_residual(sde, log_density, z)))
        residuals = np.abs(residual(jnp.asarray(states)))
        if not np.isfinite(residuals).all():
            raise InvalidArgumentError(
                "The residual is not finite, because the step has no derivatives at `states`.",
                "pass other states. If the diffusion is a diagonal matrix, return its diagonal, "
                "which has derivatives even where eigenvalues coincide.",
                "invariance-states",
            )
        return residuals


def small_step_limit(step: Callable, state: Any, num_noise: int, gradient: Callable) -> SDE:
    r"""Return the SDE that a step follows as the step size h goes to zero.

    The drift is the limit of :math:`E[z' - z] / h`, the diffusion that of
    :math:`E[(z' - z)(z' - z)^\top] / 2h`. Both are analytic in h; a polynomial through eight small
    step sizes gives the limits to about 1e-12.

    :param step: ``(state, step_size, gradient, normals) -> state``.
    """
    expect = make_step_expectation(step, state, num_noise, gradient, num_nodes=_NUM_NODES)
    # Weights of Lagrange's polynomial at zero.
    others = [_STEP_SIZES[h != _STEP_SIZES] for h in _STEP_SIZES]
    weights = np.array([np.prod(o / (o - h)) for o, h in zip(others, _STEP_SIZES, strict=True)])

    def rate_at_zero(fn: Callable, z: Array) -> Array:
        expectations = jax.vmap(lambda h: expect(fn, z, h))(_STEP_SIZES)
        return jnp.tensordot(weights / _STEP_SIZES, expectations, 1)

    def drift(z: Array) -> Array:
        return rate_at_zero(lambda x: x - z, z)

    def diffusion(z: Array) -> Array:
        return rate_at_zero(lambda x: jnp.outer(x - z, x - z), z) / 2.0

    return SDE(drift, diffusion)


def fokker_planck_residual(sde: SDE, log_density: Callable, z: Array) -> Array:
    """Return the relative rate at which the SDE changes the density at ``z``."""

    def flux(x: Array) -> Array:
        def ratio(y: Array) -> Array:
            return jnp.exp(log_density(y) - log_density(z))

        jacobian = jax.jacfwd(lambda y: sde.diffusion(y) * ratio(y))(x)
        return sde.drift(x) * ratio(x) - jnp.einsum("ijj->i", jacobian)

    return -jnp.trace(jax.jacfwd(flux)(z))


def make_step_expectation(
    step: Callable, state: Any, num_noise: int, gradient: Callable, num_nodes: int
) -> Callable:
    """Return ``(fn, z, step_size) -> E[fn(z')]`` for the flat state z' after a step from z.

    The expectation is by Gauss-Hermite quadrature over the step's noise.
    """
    unravel = ravel_pytree(state)[1]
    nodes, node_weights = np.polynomial.hermite_e.hermegauss(num_nodes)
    node_weights = node_weights / node_weights.sum()
    dim = state.position.size
    points = np.array(list(itertools.product(nodes, repeat=num_noise * dim)))
    points = points.reshape(-1, num_noise, dim)
    weights = np.array(list(itertools.product(node_weights, repeat=num_noise * dim))).prod(1)

    def expect(fn: Callable, z: Array, step_size: Any) -> Array:
        def evaluate(normals: Array) -> Array:
            return fn(ravel_pytree(step(unravel(z), step_size, gradient, normals))[0])

        return jnp.tensordot(weights, jax.vmap(evaluate)(jnp.asarray(points)), 1)

    return expect


def _drop_cached_gradient(state: Any) -> Any:
    """Remove a cached gradient, which is a function of the position and no variable of the SDE."""
    return state._replace(gradient=None) if hasattr(state, "gradient") else state


def _quartic_potential(q: Array) -> Array:
    s = jnp.cos(jnp.arange(q.size)) @ q
    return jnp.square(q).sum() / 2.0 + 0.1 * s**3 + s**4 / 24.0
