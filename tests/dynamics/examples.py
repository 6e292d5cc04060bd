"""The package's SDEs, each beside the one that the literature writes, and their schemes."""

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
    """
    - **dynamics** - the package's SDE.
    - **sde** - ``sde(gradient, dim)``: the same SDE, written here.
    - **log_density** - ``log_density(potential, dim)``: its stationary density on flat states.
    - **orders** - weak orders of its schemes.
    - **covariance** - ``covariance(position_covariance)``: of the flat state on a Gaussian, for a
      linear SDE.
    """

    dynamics: Any
    sde: Callable
    log_density: Callable
    orders: dict[str, int]
    covariance: Callable | None = None

    def step(self, scheme: str) -> Callable:
        """The package's step, for schemes that keep the gradient as a map of the other variables.

        The gradient kept is that at the state's position, so nothing is lost.
        """
        step = self.dynamics.make_step(scheme)
        if not getattr(self.dynamics, "is_fsal", False):
            return step

        def closed(state: Any, h: Any, gradient: Callable, noise: Any) -> Any:
            state = state._replace(gradient=gradient(state.position))
            return step(state, h, gradient, noise)._replace(gradient=None)

        return closed

    def num_draws(self, scheme: str) -> int:
        """Standard normal vectors that the step takes."""
        return self.dynamics.make_step(scheme).num_noise

    def state(self, position: Any, seed: int = 0) -> Any:
        """A state at ``position``."""
        state = self.dynamics.init(jnp.asarray(position), jax.random.key(seed))
        return state._replace(gradient=None) if hasattr(state, "gradient") else state


def recipe_example(dim: int) -> Example:
    """A recipe's energy must know where the auxiliary variables begin."""
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

SCHEMES = [(name, scheme) for name, e in EXAMPLES.items() for scheme in e.dynamics.integrators]
"""Every scheme of every SDE."""

# In `make test` one of each kind of flow stands for the others; where kernels count, two more do.
KINDS = {
    "overdamped",
    "underdamped",
    "nose_hoover, per coordinate",
    "monomial_gamma, a = 1",
    "riemannian, dense",
    "recipe",
}
OF_OTHER_KERNELS = {"monomial_gamma_langevin, a = 1", "riemannian_langevin, dense"}
