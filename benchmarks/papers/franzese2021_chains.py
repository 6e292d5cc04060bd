"""Many chains of one of the paper's integrators on a model's minibatch gradient.

Step size, friction and the number of steps are values, so that an integrator is compiled once for
all of its settings.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from epochs import first_epoch
from jax import Array, lax, random

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import ShuffledSubsampling
from numpyro_sgmcmc.dynamics import UnderdampedLangevin
from numpyro_sgmcmc.model.potential import Potential


@partial(jax.jit, static_argnames=("target", "integrator", "num_leapfrog", "num_draws"))
def _draws(
    target: Potential,
    arguments: Arguments,
    integrator: str,
    num_leapfrog: int | None,
    num_draws: int,
    key: Array,
    starts: Array,
    h: Array,
    friction: Array,
    num_steps: Array,
) -> Array:
    dynamics = UnderdampedLangevin(friction, num_leapfrog=num_leapfrog)
    step = dynamics.make_step(integrator)
    init_key, order_key, noise_key = random.split(key, 3)

    def one_step(state: Any, order: Any, noise: Array, count: Array) -> tuple[Any, Any]:
        rows = {}
        for plate in target.plates:  # one, or none where a minibatch is all rows
            order, found = ShuffledSubsampling().sample_indices(
                order, noise_key, 1, plate.size, plate.subsample_size
            )
            rows[plate.name] = found[0]
        gradient = partial(target.gradient, indices=rows, arguments=arguments)
        return step(state, h, gradient, noise, count), order

    def body(count: Array, carry: Any) -> Any:
        state, orders = carry
        shape = (len(starts), step.num_noise, starts.shape[1])
        noise = random.normal(random.fold_in(noise_key, count), shape, starts.dtype)
        return jax.vmap(one_step, (0, 0, 0, None))(state, orders, noise, count)

    def one_draw(carry: Any, n: Array) -> tuple[Any, Array]:
        (state, orders), count = carry
        state, orders = lax.fori_loop(count, count + n, body, (state, orders))
        return ((state, orders), count + n), state.position

    state = jax.vmap(dynamics.init)(starts, random.split(init_key, len(starts)))
    orders = first_epoch(order_key, 0, len(starts))
    _, positions = lax.scan(one_draw, ((state, orders), 0), num_steps)
    return jnp.moveaxis(positions[1:], 1, 0)


def draws(
    target: Potential,
    arguments: Arguments,
    integrator: str,
    key: Array,
    starts: Array,
    h: float,
    *,
    friction: float = 5.0,
    num_leapfrog: int | None = None,
    num_draws: int = 5,
    burn_in: float = 10.0,
    apart: float = 2.5,
) -> dict[str, np.ndarray]:
    """Draws by site, shape ``(chains, draws, ...)``.

    :param starts: shape ``(chains, d)``.
    :param burn_in: time before the first draw is over, whose length ``apart`` follows.
    :param apart: time between draws.
    """
    num_steps = jnp.asarray([round(burn_in / h)] + [round(apart / h)] * num_draws)
    found = _draws(
        target,
        arguments,
        integrator,
        num_leapfrog,
        num_draws,
        key,
        starts,
        jnp.asarray(h, starts.dtype),
        jnp.asarray(friction, starts.dtype),
        num_steps,
    )
    by_site = jax.vmap(jax.vmap(target.unravel))(found)
    return jax.tree.map(np.asarray, by_site)
