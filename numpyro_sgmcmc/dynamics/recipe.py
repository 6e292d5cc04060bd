r"""The complete recipe: any diffusion with a given stationary density.

.. math::

    dz = \left(-(D(z) + Q(z))\nabla H(z) + \Gamma(z)\right)dt + \sqrt{2D(z)}\,dW,
    \qquad \Gamma_i = \sum_j \partial_j\,(D_{ij} + Q_{ij})

with D positive semi-definite and Q skew has the stationary density :math:`\propto e^{-H(z)}`.
Here :math:`z` is the position and any auxiliary variables, and
:math:`H(z) = U(\theta) + h(z)`: the posterior comes from the model, :math:`h` from the user.

Reference: Ma, Chen and Fox (2015), *A complete recipe for stochastic gradient MCMC*, equations (2)
to (6); (6) has the sign of :math:`\Gamma` misprinted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_sgmcmc.dynamics.base import Dynamics
from numpyro_sgmcmc.dynamics.compensation import GradientNoiseCovariance
from numpyro_sgmcmc.dynamics.divergence import divergence
from numpyro_sgmcmc.dynamics.integrators import Flow, GradientFn, Integrator, Part

__all__ = ["Recipe", "RecipeState"]


class RecipeState(NamedTuple):
    """
    - **position** - whitened position, shape ``(d,)``.
    - **auxiliary** - auxiliary variables, shape ``(k,)``.
    """

    position: Array
    auxiliary: Array


@dataclass(frozen=True)
class Recipe(Dynamics):
    """The complete recipe over ``z``, the position and then the auxiliary variables.

    :param diffusion: D: maps z of shape ``(n,)`` to its diagonal ``(n,)`` or a matrix ``(n, n)``.
    :param curl: Q: maps z to a skew matrix of shape ``(n, n)``.
    :param hamiltonian: h: maps z to the energy besides the posterior's.
    :param init_auxiliary: ``(rng_key, dim) -> (k,)``, the auxiliary variables' first values;
        ``auxiliary`` of :class:`~numpyro_sgmcmc.RecipeKernel`.
    """

    diffusion: Callable[[Array], Array]
    curl: Callable[[Array], Array]
    hamiltonian: Callable[[Array], Array]
    init_auxiliary: Callable[[Array, int], Array]

    State = RecipeState
    has_constant_metric = False

    @property
    def integrators(self) -> Mapping[str, Integrator]:
        # Short, and shorter where a simulation of the user's SDE says so: it has no defaults.
        return {"euler": Integrator((Part("euler"),), order=1, step_size=0.02)}

    @property
    def flows(self) -> Mapping[str, Flow]:
        # As many rows of d normal entries as z may need: in one dimension, its length.
        key = jax.eval_shape(lambda: jax.random.key(0))
        num = jax.eval_shape(lambda k: self.init_auxiliary(k, 1), key).size
        return {"euler": Flow(self._euler, num_gradients=1, num_noise=1 + num)}

    def init(self, position: Array, rng_key: Array) -> RecipeState:
        auxiliary = self.init_auxiliary(rng_key, position.size)
        return RecipeState(position, jnp.asarray(auxiliary, position.dtype))

    def energy(self, state: RecipeState) -> Array:
        return self.hamiltonian(jnp.concatenate(state))

    def relaxation_time(self, step_size: Any, gradient_variance: Any = 0.0) -> float:
        return 3.0

    def variance_inflation(
        self, gradient_variance: Any, step_size: Any, position_dependent_fraction: float = 1.0
    ) -> float:
        return gradient_variance * step_size / 2.0

    def compensate_gradient_noise(
        self, state: Any, normals: Array, step_size: Any, noise_covariance: GradientNoiseCovariance
    ) -> Array:
        """Of D is taken what enters it by D + Q; what enters elsewhere cannot be compensated."""
        z = jnp.concatenate(state)
        dim, covariance = state.position.size, noise_covariance.covariance
        full = jnp.diag(covariance) if covariance.ndim == 1 else covariance
        diffusion = self.diffusion(z)
        diffusion = jnp.diag(diffusion) if diffusion.ndim == 1 else diffusion
        carried = (diffusion + self.curl(z))[:, :dim]
        values, vectors = jnp.linalg.eigh(diffusion)
        is_stirred = values > 1e-6 * values.max()
        unit = vectors * jnp.where(is_stirred, 1.0 / jnp.sqrt(jnp.abs(values)), 0.0)
        brought = GradientNoiseCovariance.from_covariance(
            unit.T @ carried @ full @ carried.T @ unit
        )
        shrunk = vectors @ brought.subtract_from(
            vectors.T @ normals.ravel()[: z.size], step_size / 2.0
        )
        return normals.ravel().at[: z.size].set(shrunk).reshape(normals.shape)

    def stiffness(self, curvature: float) -> float:
        return curvature

    def drift(self, z: Array, potential_gradient: Array) -> Array:
        """The SDE's drift.

        :param z: position and auxiliary variables, shape ``(n,)``.
        :param potential_gradient: gradient of U at the position, shape ``(d,)``.
        """
        slope = jax.grad(self.hamiltonian)(z).at[: potential_gradient.size].add(potential_gradient)
        diffusion = self.diffusion(z)
        spread = diffusion * slope if diffusion.ndim == 1 else diffusion @ slope
        correction = divergence(self.diffusion, z)
        correction += jnp.einsum("ijj->i", jax.jacfwd(self.curl)(z))
        return correction - spread - self.curl(z) @ slope

    def _euler(
        self, state: RecipeState, time: Any, gradient_fn: GradientFn, normals: Array
    ) -> RecipeState:
        z = jnp.concatenate(state)
        diffusion, zeta = self.diffusion(z), normals.ravel()[: z.size]
        if diffusion.ndim == 1:
            # Where D is zero its root has no derivative, and needs none.
            is_stirred = diffusion > 0.0
            spread = jnp.where(is_stirred, jnp.sqrt(jnp.where(is_stirred, diffusion, 1.0)), 0.0)
            spread = spread * zeta
        else:
            values, vectors = jnp.linalg.eigh(diffusion)
            spread = vectors @ (jnp.sqrt(jnp.maximum(values, 0.0)) * (vectors.T @ zeta))
        z = z + time * self.drift(z, gradient_fn(state.position)) + jnp.sqrt(2.0 * time) * spread
        dim = state.position.size
        return RecipeState(z[:dim], z[dim:])
