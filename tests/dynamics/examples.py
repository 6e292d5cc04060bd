"""The package's SDEs, each with the formula of the literature, and their integrators."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_sgmcmc.dynamics import (
    MonomialGammaLangevin,
    MonomialGammaThermostat,
    NoseHooverThermostat,
    OverdampedLangevin,
    Recipe,
    RiemannianOverdampedLangevin,
    RiemannianUnderdampedLangevin,
    UnderdampedLangevin,
)
from numpyro_sgmcmc.dynamics.langevin import Kinetics
from tests.dynamics.sdes import (
    FRICTION,
    GAMMA,
    MASS,
    SIGMA_P,
    SIGMA_THETA,
    SIGMA_XI,
    SOFTENING,
    dense_metric,
    diagonal_metric,
    laplacian,
    monomial_gamma,
    nose_hoover,
    overdamped,
    position_only,
    recipe,
    recipe_curl,
    recipe_diffusion,
    recipe_energy,
    riemannian,
    riemannian_langevin,
    scalar_metric,
    underdamped,
    with_momentum,
    with_recipe_energy,
    with_softened_momentum,
    with_thermostat,
    with_unit_momentum,
)


class Example(NamedTuple):
    """An SDE of the package and its reference.

    - **dynamics** - the package's SDE.
    - **sde** - ``sde(gradient, dim)``: the same SDE by the formula of the literature.
    - **log_density** - ``log_density(potential, dim)``: its stationary density on flat states.
    - **orders** - weak orders of its integrators.
    - **covariance** - ``covariance(position_covariance)``: covariance of the flat state on a
      Gaussian, for a linear SDE.
    """

    dynamics: Any
    sde: Callable
    log_density: Callable
    orders: dict[str, int]
    covariance: Callable | None = None

    def step(self, integrator: str) -> Callable:
        """Return the package's step as a map of position and auxiliary variables alone.

        A gradient that the state holds for the next step is a function of the position.
        """
        step = self.dynamics.make_step(integrator)
        if not getattr(self.dynamics, "is_fsal", False):
            return step

        def step_without_gradient(state: Any, h: Any, gradient: Callable, normals: Any) -> Any:
            state = state._replace(gradient=gradient(state.position))
            return step(state, h, gradient, normals)._replace(gradient=None)

        return step_without_gradient

    def num_noise(self, integrator: str) -> int:
        """Return the number of standard normal vectors of the step."""
        return self.dynamics.make_step(integrator).num_noise

    def state(self, position: Any, seed: int = 0) -> Any:
        """Return a state at ``position``."""
        state = self.dynamics.init(jnp.asarray(position), jax.random.key(seed))
        return state._replace(gradient=None) if hasattr(state, "gradient") else state


def recipe_example(dim: int) -> Example:
    """Return the recipe, whose energy depends on where the auxiliary variables begin."""
    dynamics = Recipe(
        recipe_diffusion,
        recipe_curl,
        recipe_energy(dim),
        lambda key, d: jax.random.normal(key, (d,)),
    )
    return Example(dynamics, recipe(lambda d: d), with_recipe_energy, {"euler": 1})


def _thermostat(a: float, sigma_theta: float = 0.0, sigma_xi: float = 0.0) -> Example:
    return Example(
        MonomialGammaThermostat(
            Kinetics(a, MASS, SOFTENING), SIGMA_P, GAMMA, sigma_theta, sigma_xi
        ),
        monomial_gamma(a, sigma_theta, sigma_xi),
        with_softened_momentum(a, has_thermostat=True),
        {"euler": 1, "symmetric": 1 if sigma_theta else 2},
    )


def _langevin(a: float) -> Example:
    return Example(
        MonomialGammaLangevin(Kinetics(a, MASS, SOFTENING), FRICTION),
        laplacian(a),
        with_softened_momentum(a, has_thermostat=False),
        {"euler": 1, "symmetric": 2},
    )


def _in_metric(metric: Callable) -> Example:
    return Example(
        RiemannianUnderdampedLangevin(metric, FRICTION),
        riemannian(metric),
        with_momentum,
        {"euler": 1, "explicit_euler": 1, "symmetric": 2},
    )


def _in_metric_overdamped(metric: Callable) -> Example:
    return Example(
        RiemannianOverdampedLangevin(metric),
        riemannian_langevin(metric),
        position_only,
        {"euler": 1},
    )


EXAMPLES = {
    "overdamped": Example(
        OverdampedLangevin(), overdamped, position_only, {"euler": 1}, lambda covariance: covariance
    ),
    "underdamped": Example(
        UnderdampedLangevin(FRICTION, is_fsal=True),
        underdamped,
        with_momentum,
        {
            "euler": 1,
            "explicit_euler": 1,
            "leapfrog": 1,
            "symmetric": 2,
            "lie_trotter": 2,
            "baoab": 2,
            "obabo": 2,
            "ubu": 2,
            "mt3": 3,
        },
        with_unit_momentum,
    ),
    "nose_hoover, shared": Example(
        NoseHooverThermostat(FRICTION, per_coordinate=False),
        nose_hoover(lambda dim: 1),
        with_thermostat(lambda dim: dim),
        {"euler": 1, "explicit_euler": 1, "symmetric": 2},
    ),
    "nose_hoover, per coordinate": Example(
        NoseHooverThermostat(FRICTION, per_coordinate=True),
        nose_hoover(lambda dim: dim),
        with_thermostat(lambda dim: 1),
        {"euler": 1, "explicit_euler": 1, "symmetric": 2},
    ),
    "monomial_gamma, a = 1/2": _thermostat(0.5),
    "monomial_gamma, a = 1": _thermostat(1.0),
    "monomial_gamma, a = 2": _thermostat(2.0),
    "monomial_gamma, a = 1, D": _thermostat(1.0, SIGMA_THETA, SIGMA_XI),
    "monomial_gamma, a = 1, noisy thermostat": _thermostat(1.0, 0.0, SIGMA_XI),
    "monomial_gamma_langevin, a = 1": _langevin(1.0),
    "monomial_gamma_langevin, a = 2": _langevin(2.0),
    "riemannian_langevin, scalar": _in_metric_overdamped(scalar_metric),
    "riemannian_langevin, diagonal": _in_metric_overdamped(diagonal_metric),
    "riemannian_langevin, dense": _in_metric_overdamped(dense_metric),
    "riemannian, scalar": _in_metric(scalar_metric),
    "riemannian, diagonal": _in_metric(diagonal_metric),
    "riemannian, dense": _in_metric(dense_metric),
    "recipe": recipe_example(1),
}

INTEGRATORS = [(name, i) for name, e in EXAMPLES.items() for i in e.dynamics.integrators]
"""Every integrator of every SDE."""

# The quick tier runs one SDE of each kind, and two more where kernels count.
QUICK_NAMES = {
    "overdamped",
    "underdamped",
    "nose_hoover, per coordinate",
    "monomial_gamma, a = 1",
    "riemannian, dense",
    "recipe",
}
QUICK_NAMES_OF_OTHER_KERNELS = {"monomial_gamma_langevin, a = 1", "riemannian_langevin, dense"}
