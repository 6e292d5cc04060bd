r"""Gradients of the globals' own posterior, the local values integrated out.

By Fisher's identity

.. math:: \nabla_\theta \log p(\theta \mid y)
    = E\left[\nabla_\theta \log p(\theta, z \mid y) \mid \theta, y\right],

so that at a draw of the globals the mean of the joint gradient over local values that have been
moved until they suit it is an estimate. Those that a chain has there do not serve: most rows were
renewed for globals of some steps ago, and the joint gradient is then that given these.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax, random

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.posterior.locals.moves import LocalLatentsState, sweep_local_values
from numpyro_sgmcmc.posterior.locals.sites import LocalValues, with_local_values
from numpyro_sgmcmc.posterior.target import Potential

__all__ = ["NUM_LOCAL_UPDATES", "estimate_marginal_gradients"]

NUM_LOCAL_UPDATES = 10
"""Transitions of all local values before the gradients of a draw, and as many with a gradient."""


@partial(jax.jit, static_argnames=("potential", "num_updates"))
def estimate_marginal_gradients(
    potential: Potential,
    global_positions: Array,
    state: LocalLatentsState,
    cached_arguments: Arguments,
    rng_key: Array,
    num_updates: int = NUM_LOCAL_UPDATES,
) -> Array:
    """Unbiased about, at the globals of one draw after the other; shape ``(n, d)``.

    :param global_positions: the globals' flat positions, shape ``(n, d)``.
    :param state: local values that suit the first of them about.
    :param cached_arguments: the model's arguments; large arrays may be in references.
    :param rng_key: key of the moves.
    :param num_updates: transitions before the gradients of a draw, and transitions with one each.
    """
    arguments = cached_arguments.dereference()

    def moved(theta: Array, values: LocalValues, key: Array, num: int) -> LocalValues:
        return sweep_local_values(
            potential, theta, state._replace(values=values), arguments, key, num
        )[0]

    def at(values: LocalValues, draw: tuple[Array, Array]) -> tuple[LocalValues, Array]:
        theta, key = draw
        first_key, *keys = random.split(key, 1 + num_updates)

        def once_more(values: LocalValues, key: Array) -> tuple[LocalValues, Array]:
            values = moved(theta, values, key, 1)
            return values, potential.full_gradient(theta, with_local_values(arguments, values))

        values = moved(theta, values, first_key, num_updates)
        values, gradients = lax.scan(once_more, values, jnp.stack(keys))
        return values, gradients.mean(0)

    return lax.scan(
        at, state.values, (global_positions, random.split(rng_key, len(global_positions)))
    )[1]
