r"""The complete recipe: any diffusion with a given stationary density.

.. math::

    dz = \left(-(D(z) + Q(z))\nabla H(z) + \Gamma(z)\right)dt + \sqrt{2D(z)}\,dW,
    \qquad \Gamma_i = \sum_j \partial_j\,(D_{ij} + Q_{ij})

with D positive semi-definite and Q skew has the stationary density :math:`\propto e^{-H(z)}`.
Here :math:`z` is the position and any auxiliary variables, and
:math:`H(z) = U(\theta) + h(z)`: the posterior comes from the model, :math:`h` from the user.

:func:`check_recipe` checks the user's D, Q and h at the start of a run.

Reference: Ma, Chen and Fox (2015), *A complete recipe for stochastic gradient MCMC*, equations (2)
to (6); (6) has the sign of :math:`\Gamma` misprinted.
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
from numpyro_sgmcmc.dynamics.base import GradientNoiseCovariance, as_matrix, divergence
from numpyro_sgmcmc.dynamics.integrators import Flow, GradientFn, Integrator, Part
from numpyro_sgmcmc.dynamics.langevin import OverdampedDynamics
from numpyro_sgmcmc.errors import InvalidArgumentError, standard_normal_points

# Eigenvalues of D below this fraction of the largest are taken as zero: float32 rounding.
_ZERO_EIGENVALUE = 1e-6
# Relative tolerances, for float32 rounding: of symmetry and definiteness of D and Q, and of the
# change of the energy h.
_MATRIX_TOLERANCE = 1e-5
_ENERGY_TOLERANCE = 1e-4
# A change of the energy counts as one if it exceeds its rounding error this many times.
_CLEAR_CHANGE = 10.0
# Largest number of auxiliary variables for which the Hessian of h is computed: a bound on time.
_MAX_HESSIAN_DIM = 100


class RecipeState(NamedTuple):
    """State of the recipe: position and auxiliary variables, shapes ``(d,)`` and ``(k,)``."""

    position: Array
    auxiliary: Array


@dataclass(frozen=True)
class Recipe(OverdampedDynamics):
    """The SDE of the complete recipe for z, the position followed by the auxiliary variables.

    :param diffusion: D, a function from z of shape ``(n,)`` to a matrix ``(n, n)`` or its diagonal.
    :param curl: Q, a function from z to a skew matrix of shape ``(n, n)``.
    :param hamiltonian: h, a function from z to the energy that is added to the posterior's.
    :param init_auxiliary: ``(rng_key, dim) -> (k,)``, initial values of the auxiliary variables;
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
        # The fields have no defaults for which it could be tuned: a short step, which the warm-up
        # shortens further if a simulation of the user's SDE requires it.
        return {"euler": Integrator((Part("euler"),), order=1, step_size=0.02)}

    @property
    def flows(self) -> Mapping[str, Flow]:
        # The normals are vectors of length d, and z needs n entries: in one dimension, n vectors.
        key = jax.eval_shape(lambda: jax.random.key(0))
        num_auxiliary = jax.eval_shape(lambda k: self.init_auxiliary(k, 1), key).size
        return {"euler": Flow(self._euler, num_gradients=1, num_noise=1 + num_auxiliary)}

    def init(self, position: Array, rng_key: Array) -> RecipeState:
        auxiliary = self.init_auxiliary(rng_key, position.size)
        return RecipeState(position, jnp.asarray(auxiliary, position.dtype))

    def energy(self, state: RecipeState) -> Array:
        return self.hamiltonian(jnp.concatenate(state))

    def relaxation_time(self, step_size: Any, gradient_variance: Any = 0.0) -> float:
        return 3.0  # that of underdamped Langevin dynamics at the default friction of 1.5

    def compensate_gradient_noise(
        self, state: Any, normals: Array, step_size: Any, noise_covariance: GradientNoiseCovariance
    ) -> Array:
        """Subtract the gradient noise that enters by D + Q from the noise injected by D.

        In directions without injected noise it cannot be compensated.
        """
        z, dim = jnp.concatenate(state), state.position.size
        covariance, diffusion = as_matrix(noise_covariance.covariance), as_matrix(self.diffusion(z))
        gradient_coefficients = (diffusion + self.curl(z))[:, :dim]
        values, vectors = jnp.linalg.eigh(diffusion)
        has_noise = values > _ZERO_EIGENVALUE * values.max()
        unit = vectors * jnp.where(has_noise, 1.0 / jnp.sqrt(jnp.abs(values)), 0.0)
        relative = GradientNoiseCovariance.from_covariance(
            unit.T @ gradient_coefficients @ covariance @ gradient_coefficients.T @ unit
        )
        used = normals.ravel()[: z.size]
        compensated = vectors @ relative.subtract_from(vectors.T @ used, step_size / 2.0)
        return normals.ravel().at[: z.size].set(compensated).reshape(normals.shape)

    def drift(self, z: Array, potential_gradient: Array) -> Array:
        """Return the drift of the SDE at z, given the gradient of U at the position."""
        gradient = jax.grad(self.hamiltonian)(z)
        gradient = gradient.at[: potential_gradient.size].add(potential_gradient)
        diffusion = self.diffusion(z)
        descent = diffusion * gradient if diffusion.ndim == 1 else diffusion @ gradient
        correction = divergence(self.diffusion, z)
        correction += jnp.einsum("ijj->i", jax.jacfwd(self.curl)(z))
        return correction - descent - self.curl(z) @ gradient

    def _euler(self, state: Any, time: Any, gradient_fn: GradientFn, normals: Array) -> Any:
        z = jnp.concatenate(state)
        diffusion, zeta = self.diffusion(z), normals.ravel()[: z.size]
        if diffusion.ndim == 1:
            # The square root has no derivative where D is zero; check_invariance takes one.
            has_noise = diffusion > 0.0
            root = jnp.where(has_noise, jnp.sqrt(jnp.where(has_noise, diffusion, 1.0)), 0.0)
            noise = root * zeta
        else:
            values, vectors = jnp.linalg.eigh(diffusion)
            noise = vectors @ (jnp.sqrt(jnp.maximum(values, 0.0)) * (vectors.T @ zeta))
        z = z + time * self.drift(z, gradient_fn(state.position)) + jnp.sqrt(2.0 * time) * noise
        dim = state.position.size
        return RecipeState(z[:dim], z[dim:])


def check_recipe(dynamics: Recipe, dim: int) -> None:
    """Check that a recipe's functions define a diffusion with the posterior as its marginal."""
    origin = jnp.zeros(dim)
    auxiliary = errors.evaluate_user_function(
        "auxiliary", lambda key: dynamics.init_auxiliary(key, dim), random.key(0)
    )
    if auxiliary.ndim != 1:
        raise InvalidArgumentError(
            f"`auxiliary` returns shape {auxiliary.shape}, which is not a flat array.",
            "return an array of shape (k,), the initial values of k auxiliary variables.",
            "recipe-shape",
        )
    if auxiliary.size > (dynamics.make_step("euler").num_noise - 1) * dim:
        raise InvalidArgumentError(
            f"`auxiliary` returns {auxiliary.size} entries for {dim} coordinates, more than {dim} "
            "times as many as for one coordinate.",
            "let the number of auxiliary variables grow at most in proportion to the number of "
            "coordinates.",
            "recipe-shape",
        )
    positions = jnp.concatenate([origin[None], standard_normal_points(origin)])
    for q in positions:
        _check_values(dynamics, jnp.concatenate([q, jnp.asarray(auxiliary, q.dtype)]), dim)
    _check_position_marginal(dynamics, positions, auxiliary.size)


def _check_values(dynamics: Recipe, z: Array, dim: int) -> None:
    """Check shapes of the recipe's functions at ``z``, and that D and Q define a diffusion."""
    n = z.size
    energy_shape = errors.evaluate_user_function("hamiltonian", dynamics.hamiltonian, z).shape
    if energy_shape != ():
        raise InvalidArgumentError(
            f"`hamiltonian` returns shape {energy_shape}, which is not a scalar.",
            "return a scalar, such as jnp.square(p).sum() / 2.",
            "recipe-shape",
        )
    diffusion = errors.evaluate_user_function("diffusion", dynamics.diffusion, z)
    curl = errors.evaluate_user_function("curl", dynamics.curl, z)
    for name, value, shapes in (
        ("diffusion", diffusion, ((n,), (n, n))),
        ("curl", curl, ((n, n),)),
    ):
        if value.shape not in shapes:
            raise InvalidArgumentError(
                f"`{name}` returns shape {value.shape}, but z has {n} entries: {dim} of the "
                f"position and {n - dim} auxiliary variables.",
                f"return shape {' or '.join(str(s) for s in shapes)}.",
                "recipe-shape",
            )
        if not np.isfinite(value).all():
            raise InvalidArgumentError(
                f"`{name}` is not finite at a typical position.",
                "return finite values at all positions.",
                "recipe-diffusion",
            )
    full = np.diag(diffusion) if diffusion.ndim == 1 else diffusion
    tolerance = _MATRIX_TOLERANCE * max(1.0, np.abs(full).max())
    if not np.allclose(full, full.T, atol=tolerance):
        raise InvalidArgumentError(
            "`diffusion` is not symmetric at a typical position.",
            "return a symmetric matrix, such as (D + D.T) / 2.",
            "recipe-diffusion",
        )
    if np.linalg.eigvalsh(full).min() < -tolerance:
        raise InvalidArgumentError(
            "`diffusion` is not positive semi-definite at a typical position.",
            "return a matrix that is positive semi-definite everywhere, such as A @ A.T, or a "
            "diagonal without negative entries.",
            "recipe-diffusion",
        )
    tolerance = _MATRIX_TOLERANCE * max(1.0, np.abs(curl).max())
    if not np.allclose(curl, -curl.T, atol=tolerance):
        raise InvalidArgumentError(
            "`curl` is not skew-symmetric at a typical position.",
            "return a matrix that is skew-symmetric everywhere, such as Q - Q.T.",
            "recipe-diffusion",
        )


def _check_position_marginal(dynamics: Recipe, positions: Array, num_auxiliary: int) -> None:
    r"""Check that :math:`\int e^{-h}\,da` is the same at all positions.

    Changes are detected if h is a sum of a function of the position and one of the auxiliary
    variables, or quadratic in these, as with a metric; other energies are not checked.
    """

    def h(q: Array, a: Array) -> Array:
        return jnp.asarray(dynamics.hamiltonian(jnp.concatenate([q, a])), float)

    auxiliaries = random.normal(random.key(1), (4, num_auxiliary), positions.dtype)
    energies = _evaluate_all_pairs(h, positions, auxiliaries)
    change = energies - energies[0]
    tolerance = _ENERGY_TOLERANCE * (1.0 + np.abs(energies).max())
    if not np.isfinite(energies).all() or np.abs(change).max() < tolerance:
        return
    if num_auxiliary == 0:
        raise InvalidArgumentError(
            "`hamiltonian` changes with the position, but there are no auxiliary variables.",
            "pass `auxiliary`, which maps a random key and the number of coordinates to initial "
            "auxiliary variables, or return 0.0 from `hamiltonian`.",
            "recipe-marginal",
        )
    clear = _CLEAR_CHANGE * tolerance
    is_sum = np.ptp(change, axis=1).max() < tolerance and np.abs(change).max() > clear
    if is_sum or (
        num_auxiliary <= _MAX_HESSIAN_DIM and _free_energy_change(h, positions, auxiliaries) > clear
    ):
        raise InvalidArgumentError(
            "`hamiltonian` changes with the position, so that the position's marginal is not the "
            "posterior.",
            "let `hamiltonian` depend only on the auxiliary variables, z[d:] for d coordinates. Or "
            "add a term such that the integral of exp(-hamiltonian) over z[d:] is the same at all "
            "positions (for a metric, half its log determinant).",
            "recipe-marginal",
        )


def _free_energy_change(energy_fn: Any, positions: Array, auxiliaries: Array) -> float:
    r"""Return the range over positions of :math:`-\log\int e^{-h}\,da`, or zero.

    Zero if h is not quadratic in the auxiliary variables, or not convex.
    """
    hessian_fn, gradient_fn = jax.hessian(energy_fn, argnums=1), jax.grad(energy_fn, argnums=1)
    hessians = _evaluate_all_pairs(hessian_fn, positions, auxiliaries[:2])
    if not np.allclose(hessians, hessians[:, :1], rtol=1e-3, atol=1e-3):
        return 0.0
    if np.linalg.eigvalsh(hessians[:, 0]).min() <= 0.0:
        return 0.0

    def free_energy(q: Array, a: Array) -> Array:
        hessian = hessian_fn(q, a)
        minimum = a - jnp.linalg.solve(hessian, gradient_fn(q, a))
        return energy_fn(q, minimum) + jnp.linalg.slogdet(hessian)[1] / 2.0

    return float(np.ptp(_evaluate_all_pairs(free_energy, positions, auxiliaries[:1])))


def _evaluate_all_pairs(fn: Any, positions: Array, auxiliaries: Array) -> np.ndarray:
    """Return the values at all pairs, positions along the first axis."""
    return np.asarray(jax.jit(jax.vmap(jax.vmap(fn, (None, 0)), (0, None)))(positions, auxiliaries))
