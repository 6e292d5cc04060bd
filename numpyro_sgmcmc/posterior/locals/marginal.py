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
from numpyro_sgmcmc.posterior.locals.moves import LocalState, sweep
from numpyro_sgmcmc.posterior.locals.sites import AllRows, with_locals
from numpyro_sgmcmc.posterior.target import Target

__all__ = ["NUM_MOVES", "marginal_gradients"]

NUM_MOVES = 10
"""Transitions of all local values before the gradients of a draw, and as many with a gradient."""


@partial(jax.jit, static_argnames=("target", "num_moves"))
def marginal_gradients(
    target: Target,
    positions: Array,
    state: LocalState,
    held: Arguments,
    rng_key: Array,
    num_moves: int = NUM_MOVES,
) -> Array:
    """Unbiased about, at the globals of one draw after the other; shape ``(n, d)``.

    :param positions: the globals' flat positions, shape ``(n, d)``.
    :param state: local values that suit the first of them about.
    :param held: the model's arguments; large arrays may be in references.
    :param rng_key: key of the moves.
    :param num_moves: transitions before the gradients of a draw, and transitions with one each.
    """
    arguments = held.read()

    def moved(theta: Array, values: AllRows, key: Array, num: int) -> AllRows:
        return sweep(target, theta, state._replace(values=values), arguments, key, num)[0]

    def at(values: AllRows, draw: tuple[Array, Array]) -> tuple[AllRows, Array]:
        theta, key = draw
        first_key, *keys = random.split(key, 1 + num_moves)

        def once_more(values: AllRows, key: Array) -> tuple[AllRows, Array]:
            values = moved(theta, values, key, 1)
            return values, target.full_gradient(theta, with_locals(arguments, values))

        values = moved(theta, values, first_key, num_moves)
        values, gradients = lax.scan(once_more, values, jnp.stack(keys))
        return values, gradients.mean(0)

    return lax.scan(at, state.values, (positions, random.split(rng_key, len(positions))))[1]
