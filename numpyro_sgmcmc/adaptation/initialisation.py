"""Initial positions of the warm-up and of the chains.

Positions come from the user, from the initialisation strategy and from the prior. A mean-field
normal is fitted from each (:mod:`.variational`); the fit with the largest evidence lower bound
(ELBO) is where the pilot chains start, the others are candidates for further modes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from jax.flatten_util import ravel_pytree

from numpyro_sgmcmc.adaptation.batched_gradients import BatchedGradients
from numpyro_sgmcmc.adaptation.settings import WARMUP_SEED, WarmupInputs
from numpyro_sgmcmc.adaptation.variational import MeanField, fit_mean_field
from numpyro_sgmcmc.compilation import jit_low_optimization
from numpyro_sgmcmc.data.arguments import Arguments, is_traced
from numpyro_sgmcmc.errors import InitializationError, InvalidArgumentError
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner
from numpyro_sgmcmc.model.trace import LatentSite

# Positions drawn from the initialisation strategy, and while none of them is finite: as in NumPyro.
_NUM_INIT_CANDIDATES, _MAX_INIT_ATTEMPTS = 20, 100
# Prior draws per initial position. The densest of all draws would lie in the narrowest mode.
_PRIOR_SAMPLES_PER_INIT = 4
_NUM_ELBO_SAMPLES = 8  # antithetic normals per ELBO; bounds its standard error to a few nats


def find_init_positions(
    inputs: WarmupInputs, init_positions: Iterable[np.ndarray]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the initial positions of the variational fits, and those by the prior."""
    if inputs.settings.has_init_params:
        return find_finite_positions(inputs, init_positions, 1), []
    positions = find_finite_positions(inputs, init_positions, inputs.budget.num_inits)
    prior_positions = generate_prior_positions(inputs, inputs.budget.num_prior_inits, WARMUP_SEED)
    return positions, [q for q in prior_positions if inputs.batched_gradients.is_finite(q)]


def find_finite_positions(
    inputs: WarmupInputs, init_positions: Iterable[np.ndarray], num_positions: int
) -> list[np.ndarray]:
    """Return the first different positions with finite log density and gradient.

    :param init_positions: candidates, generated only as far as needed.
    """
    positions: list[np.ndarray] = []
    for num_tried, candidate in enumerate(init_positions, 1):
        is_new = not any(np.array_equal(candidate, position) for position in positions)
        if is_new and inputs.batched_gradients.is_finite(candidate):
            positions.append(candidate)
        if len(positions) == num_positions or (positions and num_tried >= _NUM_INIT_CANDIDATES):
            break
    if not positions:
        position = inputs.cast(candidate)
        cause, fix = inputs.potential.diagnose_nonfinite(position, inputs.arguments)
        raise InitializationError(
            f"Cannot find an initial position with a finite log density and gradient{cause}.",
            fix,
            "no-finite-initial-position",
        )
    return positions


def check_finite_gradient(inputs: WarmupInputs, preconditioner: Preconditioner) -> None:
    """Check the gradient over the whole data at the center."""
    if not preconditioner.is_finite():
        center = inputs.cast(preconditioner.center)
        cause, fix = inputs.potential.diagnose_nonfinite(center, inputs.arguments)
        raise InitializationError(
            f"The full-data gradient is not finite at the initial position{cause}.",
            fix,
            "no-finite-initial-position",
        )


def fit_inits(
    inputs: WarmupInputs, positions: list[np.ndarray], prior_positions: list[np.ndarray]
) -> list[MeanField]:
    """Return a mean-field normal fitted from each initial position, the largest ELBO first."""
    if (batch_size := inputs.budget.prior_fit_batch_size) and prior_positions:
        fits = fit_mean_field(inputs, positions)
        fits += fit_mean_field(inputs, prior_positions, batch_size)
    else:
        fits = fit_mean_field(inputs, positions + prior_positions)
    normals = inputs.rng.standard_normal((_NUM_ELBO_SAMPLES // 2, inputs.potential.dim))
    normals = np.concatenate([normals, -normals])
    for i, fit in enumerate(fits):
        potentials, _ = inputs.batched_gradients.evaluate_on_subset(fit.mean + fit.sd * normals)
        elbo = float(np.log(fit.sd).sum() - potentials.mean())
        fits[i] = fit._replace(elbo=elbo if np.isfinite(elbo) else -np.inf)
    return sorted(fits, key=lambda fit: -fit.elbo)


def generate_init_positions(
    potential: Potential, arguments: Arguments, init_params: Any, has_chain_axis: bool
) -> Iterator[np.ndarray]:
    """Yield the user's initial position if there is one, then some by the initialisation strategy.

    :param has_chain_axis: whether these are stacked along a leading axis; the first chain's count.
    """
    if init_params is not None and not is_traced(init_params):
        first = jax.tree.map(lambda x: x[0], init_params) if has_chain_axis else init_params
        yield np.asarray(ravel_pytree(first)[0])
    sample_init_position = jit_low_optimization(potential.sample_init_position)
    for seed in range(WARMUP_SEED * _MAX_INIT_ATTEMPTS, (WARMUP_SEED + 1) * _MAX_INIT_ATTEMPTS):
        if (radius := potential.init_radius) is not None:  # without compilation
            uniform = np.random.default_rng(seed).uniform(-radius, radius, potential.dim)
            yield uniform.astype(potential.dtype)
        else:
            yield np.asarray(sample_init_position(random.key(seed), arguments))


def generate_prior_positions(
    inputs: WarmupInputs, num_positions: int, seed: int
) -> Iterator[np.ndarray]:
    """Yield draws from the prior, each the one of four with the largest posterior density."""
    if inputs.potential.sample_prior_position is None or not num_positions:
        return
    sample = jit_low_optimization(inputs.potential.sample_prior_position)
    num_samples = num_positions * _PRIOR_SAMPLES_PER_INIT
    keys = (random.key(seed * num_samples + k) for k in range(num_samples))
    positions = np.stack([np.asarray(sample(key, inputs.arguments), np.float64) for key in keys])
    is_finite = np.asarray(np.isfinite(positions).all(1))
    potentials, _ = inputs.batched_gradients.evaluate_on_subset(
        np.where(is_finite[:, None], positions, 0.0)
    )
    potentials = np.where(is_finite & np.isfinite(potentials), potentials, np.inf)
    groups = (np.split(x, num_positions) for x in (positions, potentials))
    for group_positions, group_potentials in zip(*groups, strict=True):
        if np.isfinite(group_potentials).any():
            yield group_positions[group_potentials.argmin()]


def validate_init_params(
    init_params: Any, potential: Potential, arguments: Arguments, num_chains: int | None
) -> Any:
    """Return ``init_params`` after checking that chains can start there.

    :param num_chains: chains whose values are stacked along a leading axis; None for one chain.
    """
    if init_params is None:
        return None
    if potential.sites is not None:
        _check_init_sites(init_params, potential.sites, num_chains)
    if is_traced(init_params):
        return init_params
    batched_gradients = BatchedGradients(potential, arguments)
    for chain in range(num_chains or 1):
        values = jax.tree.map(lambda x, c=chain: x[c], init_params) if num_chains else init_params
        position = ravel_pytree(values)[0]
        if not batched_gradients.is_finite(np.asarray(position)):
            of_chain = f" of chain {chain}" if num_chains else ""
            cause, fix = potential.diagnose_nonfinite(position, arguments)
            raise InvalidArgumentError(
                f"Log density or gradient is not finite at the `init_params`{of_chain}{cause}.",
                fix,
                "init-params-not-finite",
            )
    return init_params


def check_potential_fn_params(init_params: Any) -> None:
    """Check that ``init_params`` can be the argument of a potential function."""
    leaves = jax.tree.leaves(init_params)
    if not sum(np.size(x) for x in leaves):
        raise InvalidArgumentError(
            "`init_params` has no values, so there is nothing to sample.",
            "pass an array, or a dict of arrays, with the initial values of one chain.",
            "init-params",
        )
    for x in leaves:
        if jnp.issubdtype(jnp.result_type(x), jnp.complexfloating):
            raise InvalidArgumentError(
                f"`init_params` has the complex type {jnp.result_type(x)}.",
                "pass the real and the imaginary part as two arrays of real numbers.",
                "init-params",
            )


def _check_init_sites(
    init_params: Any, sites: tuple[LatentSite, ...], num_chains: int | None
) -> None:
    """Check names, shapes and types of ``init_params`` against the latent sites."""
    if not isinstance(init_params, dict):
        raise InvalidArgumentError(
            f"`init_params` is of type {type(init_params).__name__}, which is not a dict.",
            "pass a dict from the names of latent sites to unconstrained values.",
            "init-params",
        )
    shapes = {s.name: s.shape for s in sites}
    unknown = sorted(set(init_params) - set(shapes))
    missing = sorted(set(shapes) - set(init_params))
    if unknown or missing:
        parts = [f"has unknown sites {unknown}"] * bool(unknown)
        parts += [f"lacks the sites {missing}"] * bool(missing)
        raise InvalidArgumentError(
            f"`init_params` {' and '.join(parts)}.",
            f"pass a value for each latent site: {sorted(shapes)}.",
            "init-params",
        )
    chain_shape = () if num_chains is None else (num_chains,)
    for name, site_shape in shapes.items():
        value, shape = init_params[name], chain_shape + site_shape
        if np.shape(value) != shape:
            stacked = "" if num_chains is None else f", one value of shape {site_shape} per chain"
            raise InvalidArgumentError(
                f"`init_params` of site '{name}' has shape {np.shape(value)}, not {shape}.",
                f"pass unconstrained values of shape {shape}{stacked}.",
                "init-params",
            )
        dtype = getattr(value, "dtype", np.asarray(value).dtype if np.isscalar(value) else None)
        if dtype is None or not (jnp.issubdtype(dtype, jnp.floating) or dtype.kind in "biu"):
            raise InvalidArgumentError(
                f"`init_params` of site '{name}' has type {dtype or type(value).__name__}.",
                "pass an array of real numbers.",
                "init-params",
            )
        if not isinstance(value, jax.core.Tracer) and not np.isfinite(np.asarray(value)).all():
            raise InvalidArgumentError(
                f"`init_params` of site '{name}' is not finite.",
                "replace missing and infinite values.",
                "init-params",
            )
