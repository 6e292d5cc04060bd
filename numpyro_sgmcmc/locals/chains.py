"""Local values at the ends of a run: what is refused, where chains start, what is collected."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, random

from numpyro_sgmcmc.arguments import Arguments
from numpyro_sgmcmc.coordinates import Coordinates
from numpyro_sgmcmc.locals.moves import LocalState, sweep
from numpyro_sgmcmc.locals.sites import LocalSites, with_locals

if TYPE_CHECKING:
    from numpyro_sgmcmc.iteration import Program
    from numpyro_sgmcmc.state import SGMCMCState
    from numpyro_sgmcmc.target import Target

__all__ = ["check_options", "collected_sites", "start_locals"]

_FIRST_MOVES = 20


def check_options(
    target: Target,
    arguments: Arguments,
    minibatch: str,
    gradient: str,
    collect_locals: bool | Sequence[str],
) -> None:
    """Refuse what is wrong, or not there, for a model with local sites.

    :raises ValueError: naming the site, with the way out.
    """
    local = target.locals
    if local is None:
        if collect_locals:
            raise ValueError(
                "`collect_locals` asks for latent sites inside a subsampled plate, but the model "
                "has none: leave it out."
            )
        return
    site = f"Site '{local.names[0]}' has a latent value for each row of '{local.plate.name}'"
    size, batch = local.plate.size, local.plate.subsample_size
    if minibatch == "iid":
        raise ValueError(
            f"{site}, and a minibatch of independent rows may hold a row twice: use "
            "minibatch='blocks' or 'epoch', and no `noise_compensation`."
        )
    if minibatch == "epoch" and size % batch:
        raise ValueError(
            f"{site}, and where {batch} rows do not divide {size}, a minibatch between two epochs "
            "may hold a row twice: use minibatch='blocks', or another subsample_size."
        )
    if gradient == "second_order_control_variate":
        raise ValueError(
            f"{site}, whose values move the Hessian that {gradient!r} would hold: use "
            "gradient='control_variate'."
        )
    if target.is_randomized:
        raise ValueError(
            f"{site}, and the model draws random keys (numpyro.prng_key), so that the rows' own "
            "densities are random: sample what they randomise, or integrate the site out."
        )
    if arguments.hosts:
        raise ValueError(f"{site}, which is not supported with HostArray: pass arrays in memory.")
    collected_sites(local, collect_locals)


def collected_sites(
    local: LocalSites | None, collect_locals: bool | Sequence[str]
) -> tuple[str, ...]:
    """Names of the local sites that draws hold."""
    if local is None or not collect_locals:
        return ()
    if isinstance(collect_locals, bool):
        return local.names
    unknown = sorted(set(collect_locals) - set(local.names))
    if unknown:
        raise ValueError(
            f"`collect_locals` names '{unknown[0]}', but the latent sites inside the subsampled "
            f"plate are {sorted(local.names)}."
        )
    return tuple(collect_locals)


@partial(jax.jit, static_argnames=("target",))
def _start(
    target: Target, theta: Array, state: LocalState, arguments: Arguments, anchor: Array, key: Array
) -> tuple[LocalState, Array]:
    values, acceptance = sweep(target, theta, state, arguments, key, _FIRST_MOVES)
    gradient = target.full_gradient(anchor, with_locals(arguments, values))
    return LocalState(values, state.scale, acceptance.mean()), gradient


def start_locals(
    program: Program, state: SGMCMCState, arguments: Arguments, has_start: bool
) -> SGMCMCState:
    """A chain's first state with local values, or that of several chains.

    The globals start over-dispersed about the anchor, in units of their posterior's spread, unless
    the user says where. The local values are those of a pilot chain, moved until they suit the
    globals: where they know much of these, chains would else start where the pilot ended.

    :param has_start: whether the globals' start is the user's.
    """
    target, found = program.target, program.adaptation.locals
    local = target.locals
    assert found is not None
    assert local is not None

    def one(state: SGMCMCState) -> SGMCMCState:
        pilot_key, spread_key, move_key, following = random.split(state.rng_key, 4)
        adapt_state, dynamics = state.adapt_state, state.dynamics
        coordinates = Coordinates(adapt_state.anchor, adapt_state.mass_matrix_sqrt_inv)
        if not has_start:
            noise = 2.0 * random.normal(spread_key, (target.dim,), target.dtype)
            q = found.spread @ noise if found.spread.ndim == 2 else found.spread * noise
            dynamics = dynamics._replace(position=q)
        theta = coordinates.position(dynamics.position)
        pilot = random.randint(pilot_key, (), 0, len(jax.tree.leaves(found.values)[0]))
        values = jax.tree.map(lambda x: x[pilot], found.values)
        first = LocalState(values, found.scale, jnp.ones((), target.dtype))
        own, gradient = _start(target, theta, first, arguments, coordinates.anchor, move_key)
        z: Any = target.unravel(theta)
        of_rows = local.unconstrained(own.values)
        return state._replace(
            z={**z, **{name: of_rows[name] for name in program.collected}},
            dynamics=dynamics,
            adapt_state=adapt_state._replace(anchor_gradient=gradient),
            rng_key=following,
            locals=own,
        )

    return jax.vmap(one)(state) if state.i.ndim else one(state)
