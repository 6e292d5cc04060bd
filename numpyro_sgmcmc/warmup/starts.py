"""Where chains and the warm-up start: the user's values, or the initialisation strategy's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from jax.flatten_util import ravel_pytree

from numpyro_sgmcmc.checks import Refusal
from numpyro_sgmcmc.data.arguments import Arguments, is_traced
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.warmup.ahead import quickly_compiled
from numpyro_sgmcmc.warmup.row_gradients import RowGradients

__all__ = [
    "accepted_start",
    "first_positions",
    "likely_by_prior",
    "refuse_no_values",
    "refuse_other_sites",
]

SEED = 0
"""Of the warm-up: what it finds depends on model, data and settings alone, not on the run's key."""

_STARTS = 20
_PRIOR_DRAWS = 4  # of which one is a start


def accepted_start(
    init_params: Any, target: Target, arguments: Arguments, num_chains: int | None
) -> Any:
    """``init_params`` as they are, if chains can start there.

    :param num_chains: chains whose values are stacked along a first axis; None for one chain's.
    :raises ValueError: for other shapes than the sites', or where the density is not finite.
    """
    if init_params is None:
        return None
    refuse_other_sites(init_params, target, num_chains)
    if is_traced(init_params):
        return init_params
    rows = RowGradients(target, arguments)
    for chain in range(num_chains or 1):
        one = jax.tree.map(lambda x, c=chain: x[c], init_params) if num_chains else init_params
        position = ravel_pytree(one)[0]
        if not rows.is_finite(np.asarray(position)):
            of_chain = f" of chain {chain}" if num_chains else ""
            raise Refusal(
                f"Log density or gradient is not finite at the `init_params`{of_chain}. "
                + target.explain(position, arguments)
            )
    return init_params


def first_positions(
    target: Target, arguments: Arguments, init_params: Any, is_batch: bool
) -> Iterator[np.ndarray]:
    """The user's start where it is known already, then some by the initialisation strategy."""
    if init_params is not None and not is_traced(init_params):
        first = jax.tree.map(lambda x: x[0], init_params) if is_batch else init_params
        yield np.asarray(ravel_pytree(first)[0])
    start = quickly_compiled(target.start)
    for seed in range(SEED * _STARTS, (SEED + 1) * _STARTS):
        if (radius := target.start_radius) is not None:  # no program need be compiled
            uniform = np.random.default_rng(seed).uniform(-radius, radius, target.dim)
            yield uniform.astype(target.dtype)
        else:
            yield np.asarray(start(random.key(seed), arguments))


def likely_by_prior(rows: RowGradients, num: int) -> Iterator[np.ndarray]:
    """Draws from the prior, each the one of a few with the largest posterior density.

    The best of all would lie in one mode, where that is the narrowest.
    """
    if rows.target.start_by_prior is None:
        return
    draw, first = quickly_compiled(rows.target.start_by_prior), SEED * num * _PRIOR_DRAWS
    keys = (random.key(first + k) for k in range(num * _PRIOR_DRAWS))
    positions = np.stack([np.asarray(draw(key, rows.arguments), np.float64) for key in keys])
    is_finite = np.asarray(np.isfinite(positions).all(1))
    potentials = rows.on_some(np.where(is_finite[:, None], positions, 0.0))[0]
    potentials = np.where(is_finite & np.isfinite(potentials), potentials, np.inf)
    for of_few, these in zip(np.split(potentials, num), np.split(positions, num), strict=True):
        if np.isfinite(of_few).any():
            yield these[of_few.argmin()]


def refuse_no_values(init_params: Any) -> None:
    """Refuse what a potential function cannot be a function of."""
    leaves = jax.tree.leaves(init_params)
    if not sum(np.size(x) for x in leaves):
        raise Refusal("`init_params` has no values: there is nothing to sample.")
    for x in leaves:
        if jnp.issubdtype(jnp.result_type(x), jnp.complexfloating):
            raise Refusal(f"`init_params` has type {jnp.result_type(x)}, but must be real.")


def refuse_other_sites(init_params: Any, target: Target, num_chains: int | None) -> Any:
    """``init_params`` as they are, if they fit the latent sites.

    :param num_chains: length of the leading axis, or None for one chain without such an axis.
    """
    if init_params is None or target.sites is None:
        return init_params
    if not isinstance(init_params, dict):
        raise Refusal("`init_params` must be a dict of unconstrained values by site name.")
    shapes = {s.name: s.shape for s in target.sites}
    unknown = sorted(set(init_params) - set(shapes))
    missing = sorted(set(shapes) - set(init_params))
    if unknown or missing:
        found = [f"has unknown sites {unknown}"] * bool(unknown)
        found += [f"lacks the sites {missing}"] * bool(missing)
        raise Refusal(
            f"`init_params` {' and '.join(found)}; the latent sites are {sorted(shapes)}."
        )
    chains = () if num_chains is None else (num_chains,)
    for name, shape in shapes.items():
        given = np.shape(init_params[name])
        if given != chains + shape:
            each = "" if num_chains is None else f": one of shape {shape} for each chain"
            raise Refusal(
                f"`init_params` of site '{name}' has shape {given}, but must have shape "
                f"{chains + shape} in unconstrained space{each}."
            )
        value = init_params[name]
        kind = getattr(value, "dtype", np.asarray(value).dtype if np.isscalar(value) else None)
        if kind is None or not (jnp.issubdtype(kind, jnp.floating) or kind.kind in "biu"):
            raise Refusal(
                f"`init_params` of site '{name}' has type {kind or type(value).__name__}, but must "
                "be an array of real numbers."
            )
        if not isinstance(value, jax.core.Tracer) and not np.isfinite(np.asarray(value)).all():
            raise Refusal(f"`init_params` of site '{name}' is not finite.")
    return init_params
