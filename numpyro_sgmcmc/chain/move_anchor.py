"""Control variates about another point than the warm-up's."""

from __future__ import annotations

import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from numpyro_sgmcmc.chain.state import SGMCMCState
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.posterior.target import Target

__all__ = ["with_anchor_here"]


def with_anchor_here(target: Target, state: SGMCMCState, arguments: Arguments) -> SGMCMCState:
    """The state with the anchor at its position, at the cost of one gradient on all rows."""
    anchor = ravel_pytree(state.z)[0].astype(target.dtype)
    adapt_state = state.adapt_state._replace(
        anchor=anchor, anchor_gradient=target.full_gradient(anchor, arguments)
    )
    if adapt_state.anchor_hessian is not None:
        hessian = target.full_expansion(anchor, arguments)[2]
        adapt_state = adapt_state._replace(anchor_hessian=hessian)
    dynamics = state.dynamics._replace(position=jnp.zeros_like(anchor))
    return state._replace(dynamics=dynamics, adapt_state=adapt_state)
