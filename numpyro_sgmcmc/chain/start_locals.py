"""Local values at the ends of a run: what is refused, where chains start, what is collected."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, random

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.posterior.coordinates import Coordinates
from numpyro_sgmcmc.posterior.locals.moves import LocalState, sweep
from numpyro_sgmcmc.posterior.locals.sites import with_locals

if TYPE_CHECKING:
    from numpyro_sgmcmc.chain.program import Program
    from numpyro_sgmcmc.chain.state import SGMCMCState
    from numpyro_sgmcmc.posterior.target import Target

__all__ = ["start_locals"]

_FIRST_MOVES = 20


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
