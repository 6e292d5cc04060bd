"""The SDEs on flat states as the literature writes them, and their stationary densities.

Written apart from the package, in whitened coordinates: the truth against which its steps are
checked. A flat state is the position, then the auxiliary variables.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from orders import SDE

from numpyro_sgmcmc.dynamics import Overdamped, Underdamped
from numpyro_sgmcmc.integrators import compose

FRICTION = 1.3


class Example(NamedTuple):
    """
    - **dynamics** - the package's SDE.
    - **sde** - ``sde(gradient, dim)``: the same SDE, written here.
    - **log_density** - ``log_density(potential, dim)``: its stationary density on flat states.
    - **covariance** - ``covariance(position_covariance)``: of the flat state on a Gaussian.
    """

    dynamics: Any
    sde: Callable
    log_density: Callable
    covariance: Callable

    def step(self, scheme: str) -> Callable:
        """The package's step."""
        return compose(self.dynamics.flows(), self.dynamics.schemes[scheme])

    def num_draws(self, scheme: str) -> int:
        """Standard normal vectors that the step takes."""
        return self.dynamics.schemes[scheme].draws

    def state(self, position: Any, seed: int = 0) -> Any:
        """A state at ``position``."""
        return self.dynamics.init(jnp.asarray(position), jax.random.key(seed))


def overdamped(gradient: Callable, dim: int) -> SDE:
    """``dq = -grad U dt + sqrt(2) dW``."""
    return SDE(lambda q: -gradient(q), lambda q: jnp.eye(dim))


def underdamped(gradient: Callable, dim: int, friction: float = FRICTION) -> SDE:
    """``dq = p dt, dp = -grad U dt - friction p dt + sqrt(2 friction) dW``."""

    def drift(z: Any) -> Any:
        q, p = z[:dim], z[dim:]
        return jnp.concatenate([p, -gradient(q) - friction * p])

    def diffusion(z: Any) -> Any:
        return jnp.diag(jnp.concatenate([jnp.zeros(dim), jnp.full(dim, friction)]))

    return SDE(drift, diffusion)


def _position_only(potential: Callable, dim: int) -> Callable:
    return lambda q: -potential(q)


def _with_momentum(potential: Callable, dim: int) -> Callable:
    return lambda z: -potential(z[:dim]) - jnp.square(z[dim:]).sum() / 2


def _with_unit_momentum(covariance: np.ndarray) -> np.ndarray:
    d = len(covariance)
    return np.block([[covariance, np.zeros((d, d))], [np.zeros((d, d)), np.eye(d)]])


EXAMPLES = {
    "overdamped": Example(Overdamped(), overdamped, _position_only, lambda covariance: covariance),
    "underdamped": Example(Underdamped(FRICTION), underdamped, _with_momentum, _with_unit_momentum),
}

SCHEMES = [(name, scheme) for name, e in EXAMPLES.items() for scheme in e.dynamics.schemes]
"""Every scheme of every SDE."""


def quartic(q: Any) -> Any:
    """A potential that is neither Gaussian nor separable."""
    along = jnp.cos(jnp.arange(q.size)) @ q
    return jnp.square(q).sum() / 2 + 0.1 * along**3 + along**4 / 24
