r"""The complete recipe: any diffusion with a given stationary density.

.. math::

    dz = \left(-(D(z) + Q(z))\nabla H(z) + \Gamma(z)\right)dt + \sqrt{2D(z)}\,dW,
    \qquad \Gamma_i = \sum_j \partial_j\,(D_{ij} + Q_{ij})

with D positive semi-definite and Q skew has the stationary density :math:`\propto e^{-H(z)}`.
Here :math:`z` is the position and any auxiliary variables, and
:math:`H(z) = U(\theta) + h(z)`: the posterior comes from the model, :math:`h` from the user.

Reference: Ma, Chen and Fox (2015), *A complete recipe for stochastic gradient MCMC*, equations (2)
to (6); (6) has the sign of :math:`\Gamma` misprinted.

What a recipe's functions must be for the posterior to be the position's marginal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_sgmcmc import errors
from numpyro_sgmcmc.dynamics.base import Dynamics, GradientNoiseCovariance, divergence
from numpyro_sgmcmc.dynamics.integrators import Flow, GradientFn, Integrator, Part
from numpyro_sgmcmc.errors import InvalidArgumentError, standard_normal_points

__all__ = [
    "Recipe",
    "RecipeState",
    "check_recipe",
]


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


_MAX_HESSIAN_DIM = 100  # auxiliary variables whose Hessian is taken


def check_recipe(dynamics: Recipe, dim: int) -> None:
    """Refuse functions of wrong shapes, that make no diffusion, or that move the marginal.

    :param dim: number of coordinates.
    :raises ValueError: naming the function.
    """
    origin = jnp.zeros(dim)
    drawn = errors.evaluate_user_function(
        "auxiliary", lambda key: dynamics.init_auxiliary(key, dim), random.key(0)
    )
    if drawn.ndim != 1:
        raise InvalidArgumentError(
            f"`auxiliary` returns shape {drawn.shape}, but must return a flat array."
        )
    if drawn.size > (dynamics.make_step("euler").num_noise - 1) * dim:
        raise InvalidArgumentError(
            f"`auxiliary` returns {drawn.size} entries for {dim} coordinates, more in proportion "
            "than for one: let their number grow at most in proportion to the coordinates'."
        )
    positions = jnp.concatenate([origin[None], standard_normal_points(origin)])
    for q in positions:
        _check_recipe_values(dynamics, jnp.concatenate([q, jnp.asarray(drawn, q.dtype)]), dim)
    _check_position_marginal(dynamics, positions, drawn.size)


def _check_recipe_values(dynamics: Recipe, z: Array, dim: int) -> None:
    """Refuse functions whose values at ``z`` have wrong shapes, or make no diffusion."""
    n = z.size
    energy = errors.evaluate_user_function("hamiltonian", dynamics.hamiltonian, z).shape
    if energy != ():
        raise InvalidArgumentError(
            f"`hamiltonian` returns shape {energy}, but must return a scalar."
        )
    diffusion = errors.evaluate_user_function("diffusion", dynamics.diffusion, z)
    curl = errors.evaluate_user_function("curl", dynamics.curl, z)
    if diffusion.shape not in ((n,), (n, n)):
        raise InvalidArgumentError(
            f"`diffusion` returns shape {diffusion.shape}, but z has {n} entries ({dim} of the "
            f"position and {n - dim} by `auxiliary`): return shape ({n},) or ({n}, {n})."
        )
    if curl.shape != (n, n):
        raise InvalidArgumentError(
            f"`curl` returns shape {curl.shape}, but z has {n} entries ({dim} of the "
            f"position and {n - dim} by `auxiliary`): return shape ({n}, {n})."
        )
    if not (np.isfinite(diffusion).all() and np.isfinite(curl).all()):
        raise InvalidArgumentError("`diffusion` and `curl` must be finite, but are not everywhere.")
    full = np.diag(diffusion) if diffusion.ndim == 1 else diffusion
    slack = 1e-5 * max(1.0, np.abs(full).max())
    if not np.allclose(full, full.T, atol=slack):
        raise InvalidArgumentError(
            "`diffusion` must be symmetric, but is not at a typical position."
        )
    if np.linalg.eigvalsh(full).min() < -slack:
        raise InvalidArgumentError(
            "`diffusion` must be positive semi-definite everywhere, but is not at a typical "
            "position."
        )
    if not np.allclose(curl, -curl.T, atol=1e-5 * max(1.0, np.abs(curl).max())):
        raise InvalidArgumentError(
            "`curl` must be skew-symmetric everywhere, but is not at a typical position."
        )


def _check_position_marginal(dynamics: Recipe, positions: Array, num_auxiliary: int) -> None:
    r"""Refuse an energy h for which :math:`\int e^{-h}\,da` is not the same at all positions.

    It is told where h is a sum of a function of the position and one of the auxiliary variables,
    and where it is quadratic in these, as with a metric; of other energies nothing is told.
    """

    def h(q: Array, a: Array) -> Array:
        return jnp.asarray(dynamics.hamiltonian(jnp.concatenate([q, a])), float)

    some = random.normal(random.key(1), (4, num_auxiliary), positions.dtype)
    energies = _evaluate_all_pairs(h, positions, some)
    change = energies - energies[0]
    slack = 1e-4 * (1.0 + np.abs(energies).max())
    if not np.isfinite(energies).all() or np.abs(change).max() < slack:
        return
    if num_auxiliary == 0:
        raise InvalidArgumentError(
            "`hamiltonian` changes with the position, but there are no auxiliary variables: give "
            "`auxiliary`, a function of a random key and the number of coordinates that returns "
            "their first values, or a `hamiltonian` of 0.0."
        )
    clear = 10.0 * slack  # of rounding
    is_sum = np.ptp(change, axis=1).max() < slack and np.abs(change).max() > clear
    if is_sum or (
        num_auxiliary <= _MAX_HESSIAN_DIM and _free_energy_change(h, positions, some) > clear
    ):
        raise InvalidArgumentError(
            "`hamiltonian` changes with the position, and the posterior would not be the "
            "position's marginal: let it read the auxiliary variables alone, z[d:] for d "
            "coordinates, or have the same integral of exp(-hamiltonian) over them everywhere (a "
            "metric's has half its log determinant in it)."
        )


def _free_energy_change(energy_fn: Any, positions: Array, auxiliaries: Array) -> float:
    """How far minus the log integral over normal auxiliary variables changes with the position."""
    hessians = _evaluate_all_pairs(jax.hessian(energy_fn, argnums=1), positions, auxiliaries[:2])
    if not np.allclose(hessians, hessians[:, :1], rtol=1e-3, atol=1e-3):
        return 0.0  # not quadratic
    if np.linalg.eigvalsh(hessians[:, 0]).min() <= 0.0:
        return 0.0

    def free(q: Array, a: Array) -> Array:
        hessian, slope = (
            jax.hessian(energy_fn, argnums=1)(q, a),
            jax.grad(energy_fn, argnums=1)(q, a),
        )
        lowest = a - jnp.linalg.solve(hessian, slope)
        return energy_fn(q, lowest) + jnp.linalg.slogdet(hessian)[1] / 2.0

    return float(np.ptp(_evaluate_all_pairs(free, positions, auxiliaries[:1])))


def _evaluate_all_pairs(fn: Any, positions: Array, auxiliaries: Array) -> np.ndarray:
    """Values at all pairs, the positions along the first axis."""
    each = jax.vmap(jax.vmap(fn, (None, 0)), (0, None))
    return np.asarray(jax.jit(each)(positions, auxiliaries))
