"""Where chains and the warm-up start: the user's values, or the initialisation strategy's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from jax.flatten_util import ravel_pytree

from numpyro_sgmcmc.adaptation.batched_gradients import BatchedGradients
from numpyro_sgmcmc.compilation import jit_low_optimization
from numpyro_sgmcmc.data.arguments import Arguments, is_traced
from numpyro_sgmcmc.errors import InvalidArgumentError
from numpyro_sgmcmc.model.potential import Potential

__all__ = [
    "check_potential_fn_params",
    "generate_init_positions",
    "generate_prior_positions",
    "validate_init_params",
    "validate_init_sites",
]

WARMUP_SEED = 0
"""Of the warm-up: what it finds depends on model, data and settings alone, not on the run's key."""

_MAX_INIT_ATTEMPTS = 20
_PRIOR_SAMPLES_PER_INIT = 4  # of which one is a start


def validate_init_params(
    init_params: Any, potential: Potential, arguments: Arguments, num_chains: int | None
) -> Any:
    """``init_params`` as they are, if chains can start there.

    :param num_chains: chains whose values are stacked along a first axis; None for one chain's.
    :raises ValueError: for other shapes than the sites', or where the density is not finite.
    """
    if init_params is None:
        return None
    validate_init_sites(init_params, potential, num_chains)
    if is_traced(init_params):
        return init_params
    rows = BatchedGradients(potential, arguments)
    for chain in range(num_chains or 1):
        one = jax.tree.map(lambda x, c=chain: x[c], init_params) if num_chains else init_params
        position = ravel_pytree(one)[0]
        if not rows.is_finite(np.asarray(position)):
            of_chain = f" of chain {chain}" if num_chains else ""
            raise InvalidArgumentError(
                f"Log density or gradient is not finite at the `init_params`{of_chain}. "
                + potential.diagnose_nonfinite(position, arguments)
            )
    return init_params


def generate_init_positions(
    potential: Potential, arguments: Arguments, init_params: Any, has_chain_axis: bool
) -> Iterator[np.ndarray]:
    """The user's start where it is known already, then some by the initialisation strategy."""
    if init_params is not None and not is_traced(init_params):
        first = jax.tree.map(lambda x: x[0], init_params) if has_chain_axis else init_params
        yield np.asarray(ravel_pytree(first)[0])
    start = jit_low_optimization(potential.sample_init_position)
    for seed in range(WARMUP_SEED * _MAX_INIT_ATTEMPTS, (WARMUP_SEED + 1) * _MAX_INIT_ATTEMPTS):
        if (radius := potential.init_radius) is not None:  # no program need be compiled
            uniform = np.random.default_rng(seed).uniform(-radius, radius, potential.dim)
            yield uniform.astype(potential.dtype)
        else:
            yield np.asarray(start(random.key(seed), arguments))


def generate_prior_positions(
    batched_gradients: BatchedGradients, num_positions: int
) -> Iterator[np.ndarray]:
    """Draws from the prior, each the one of a few with the largest posterior density.

    The best of all would lie in one mode, where that is the narrowest.
    """
    if batched_gradients.potential.sample_prior_position is None:
        return
    draw, first = (
        jit_low_optimization(batched_gradients.potential.sample_prior_position),
        WARMUP_SEED * num_positions * _PRIOR_SAMPLES_PER_INIT,
    )
    keys = (random.key(first + k) for k in range(num_positions * _PRIOR_SAMPLES_PER_INIT))
    positions = np.stack(
        [np.asarray(draw(key, batched_gradients.arguments), np.float64) for key in keys]
    )
    is_finite = np.asarray(np.isfinite(positions).all(1))
    potentials = batched_gradients.evaluate_on_subset(np.where(is_finite[:, None], positions, 0.0))[
        0
    ]
    potentials = np.where(is_finite & np.isfinite(potentials), potentials, np.inf)
    for of_few, these in zip(
        np.split(potentials, num_positions), np.split(positions, num_positions), strict=True
    ):
        if np.isfinite(of_few).any():
            yield these[of_few.argmin()]


def check_potential_fn_params(init_params: Any) -> None:
    """Refuse what a potential function cannot be a function of."""
    leaves = jax.tree.leaves(init_params)
    if not sum(np.size(x) for x in leaves):
        raise InvalidArgumentError("`init_params` has no values: there is nothing to sample.")
    for x in leaves:
        if jnp.issubdtype(jnp.result_type(x), jnp.complexfloating):
            raise InvalidArgumentError(
                f"`init_params` has type {jnp.result_type(x)}, but must be real."
            )


def validate_init_sites(init_params: Any, potential: Potential, num_chains: int | None) -> Any:
    """``init_params`` as they are, if they fit the latent sites.

    :param num_chains: length of the leading axis, or None for one chain without such an axis.
    """
    if init_params is None or potential.sites is None:
        return init_params
    if not isinstance(init_params, dict):
        raise InvalidArgumentError(
            "`init_params` must be a dict of unconstrained values by site name."
        )
    shapes = {s.name: s.shape for s in potential.sites}
    unknown = sorted(set(init_params) - set(shapes))
    missing = sorted(set(shapes) - set(init_params))
    if unknown or missing:
        found = [f"has unknown sites {unknown}"] * bool(unknown)
        found += [f"lacks the sites {missing}"] * bool(missing)
        raise InvalidArgumentError(
            f"`init_params` {' and '.join(found)}; the latent sites are {sorted(shapes)}."
        )
    chains = () if num_chains is None else (num_chains,)
    for name, shape in shapes.items():
        given = np.shape(init_params[name])
        if given != chains + shape:
            each = "" if num_chains is None else f": one of shape {shape} for each chain"
            raise InvalidArgumentError(
                f"`init_params` of site '{name}' has shape {given}, but must have shape "
                f"{chains + shape} in unconstrained space{each}."
            )
        value = init_params[name]
        kind = getattr(value, "dtype", np.asarray(value).dtype if np.isscalar(value) else None)
        if kind is None or not (jnp.issubdtype(kind, jnp.floating) or kind.kind in "biu"):
            raise InvalidArgumentError(
                f"`init_params` of site '{name}' has type {kind or type(value).__name__}, but must "
                "be an array of real numbers."
            )
        if not isinstance(value, jax.core.Tracer) and not np.isfinite(np.asarray(value)).all():
            raise InvalidArgumentError(f"`init_params` of site '{name}' is not finite.")
    return init_params
