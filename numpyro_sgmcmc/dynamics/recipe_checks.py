"""What a recipe's functions must be for the posterior to be the position's marginal."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_sgmcmc import checks
from numpyro_sgmcmc.checks import InvalidArgumentError, standard_normal_points
from numpyro_sgmcmc.dynamics.recipe import Recipe

__all__ = ["check_recipe"]

_MAX_HESSIAN_DIM = 100  # auxiliary variables whose Hessian is taken


def check_recipe(dynamics: Recipe, dim: int) -> None:
    """Refuse functions of wrong shapes, that make no diffusion, or that move the marginal.

    :param dim: number of coordinates.
    :raises ValueError: naming the function.
    """
    origin = jnp.zeros(dim)
    drawn = checks.evaluate_user_function(
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
    energy = checks.evaluate_user_function("hamiltonian", dynamics.hamiltonian, z).shape
    if energy != ():
        raise InvalidArgumentError(
            f"`hamiltonian` returns shape {energy}, but must return a scalar."
        )
    diffusion = checks.evaluate_user_function("diffusion", dynamics.diffusion, z)
    curl = checks.evaluate_user_function("curl", dynamics.curl, z)
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
