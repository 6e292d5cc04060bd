"""Which rows the next iterations need, and their reading, in blocks."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_sgmcmc.chain.block import Block, Upcoming, empty_block, key_words
from numpyro_sgmcmc.chain.plan import ChainPlan, Keys, draw_rows
from numpyro_sgmcmc.chain.state import SGMCMCState
from numpyro_sgmcmc.data.stand_ins import read_block

__all__ = ["with_empty_block", "with_rows_ahead"]


def _rows_ahead(
    plan: ChainPlan, upcoming: Upcoming, length: int
) -> tuple[Upcoming, dict[str, Array]]:
    """The rows of a chain's next iterations, shape ``(length, num_steps, subsample_size)``."""

    def one(upcoming: Upcoming, _: None) -> tuple[Upcoming, dict[str, Array]]:
        keys = Keys.of(upcoming.rng_key)
        streams, rows = draw_rows(plan, upcoming.streams, keys.rows)
        return Upcoming(keys.following, streams), rows

    return lax.scan(one, upcoming, None, length)


def with_empty_block(plan: ChainPlan, state: SGMCMCState, num_chains: int) -> SGMCMCState:
    """A chain's first state, with room for the rows that are read ahead.

    :param num_chains: chains that read together.
    """
    lookups = plan.target.lookups
    if not lookups:
        return state
    rows = jax.eval_shape(lambda s: draw_rows(plan, s.streams, s.rng_key)[1], state)
    upcoming = Upcoming(state.rng_key, state.streams)
    return state._replace(block=empty_block(lookups, rows, num_chains, upcoming))


def with_rows_ahead(
    plan: ChainPlan, state: SGMCMCState, chain_axis: str | None = None
) -> SGMCMCState:
    """The state of one chain or of many, with rows read ahead for its next iteration.

    Outside of ``vmap``, under which both branches of a condition would run every time.

    :param chain_axis: the mesh axis over which chains are spread, if they are.
    """
    if state.block is None:
        return state
    lookups, block = plan.target.lookups, state.block
    is_batch = block.used.ndim == 1
    length = block.values[0].shape[int(is_batch)]
    ahead = partial(_rows_ahead, plan, length=length)
    # One chain after the other: the loop under `vmap` would put them innermost, and the rows would
    # be turned round at every iteration.
    draw = partial(lax.map, ahead) if is_batch else ahead
    is_other_key = (block.key != key_words(state.rng_key)).any()

    def read(state: SGMCMCState) -> Block:
        # Rows are drawn once: those that were to come are now due, unless the key has changed.
        upcoming, now = lax.cond(
            is_other_key,
            lambda: draw(Upcoming(state.rng_key, state.streams)),
            lambda: (block.upcoming, block.next_rows),
        )
        upcoming, next_rows = draw(upcoming)
        values = read_block(lookups, now, next_rows, chain_axis)
        used, key = jnp.zeros_like(block.used), key_words(state.rng_key)
        return Block(values, now, next_rows, upcoming, used, key)

    is_due = (block.used >= length).any() | is_other_key
    return state._replace(block=lax.cond(is_due, read, lambda s: s.block, state))
