"""What does not change from iteration to iteration, and how an iteration's randomness is drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random

from numpyro_sgmcmc.chain.mass_blocks import MassBlocks
from numpyro_sgmcmc.chain.state import AdaptState
from numpyro_sgmcmc.data.minibatch import draw_minibatches
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.posterior.whitening import Whitening
from numpyro_sgmcmc.warmup import Adaptation

__all__ = ["ChainPlan", "Keys", "draw_rows"]


@dataclass(frozen=True)
class ChainPlan:
    """
    - **target** - the posterior.
    - **adaptation** - what all chains share.
    - **scheme** - name of the integrator.
    - **locate** - the SDE for given coordinates: a metric must know where a whitened position is.
    - **schedule** - the user's step sizes by number of steps so far, or None.
    - **num_warmup** - warm-up iterations.
    - **clip_gradient** - largest norm of a whitened gradient, or None.
    - **collected** - local sites of which the state's ``z`` has the values of all rows.
    - **shortens_given_step** - whether divergences in warm-up may shorten a step of the user's.
    - **traced_step_size** - the user's step size where it is being traced, or None.
    - **blocks** - how the mass matrix is shown; None for a potential function.
    """

    target: Target
    adaptation: Adaptation
    scheme: str
    locate: Callable[[Whitening], Dynamics]
    schedule: Callable[[Any], Any] | None
    num_warmup: int
    clip_gradient: float | None = None
    collected: tuple[str, ...] = ()
    shortens_given_step: bool = False
    traced_step_size: Array | None = None
    blocks: MassBlocks | None = None

    def step_size(self, count: Array, adapt_state: AdaptState) -> Array:
        """Size of the step that has ``count`` before it."""
        if self.schedule is not None:
            step_size = jnp.asarray(self.schedule(count), adapt_state.step_size.dtype)
            # A negative step would run time backwards; the iteration then counts as diverging.
            return jnp.where(step_size >= 0.0, step_size, jnp.nan)
        return adapt_state.step_size

    def weight(self, counts: Array, adapt_state: AdaptState) -> Array:
        """Weight in averages of a draw that took these steps."""
        if self.traced_step_size is not None:
            return len(counts) * adapt_state.step_size
        if self.schedule is None:
            # The same for all chains, even if some have shortened their steps.
            chosen = jnp.asarray(self.adaptation.step_size, adapt_state.step_size.dtype)
            return len(counts) * chosen
        weights = jax.vmap(getattr(self.schedule, "weight", self.schedule))(counts)
        # The draw is the last step's: where that explores, the draw does.
        weight = jnp.where((weights[-1] > 0.0) & (weights >= 0.0).all(), weights.sum(), 0.0)
        return weight.astype(adapt_state.step_size.dtype)


class Keys(NamedTuple):
    """What an iteration's key is split into; **following** is the next iteration's."""

    following: Array
    noise: Array
    rows: Array
    model: Array
    resample: Array
    restart: Array
    moments: Array

    @classmethod
    def of(cls, rng_key: Array) -> Keys:
        """The keys of the iteration that begins with this one."""
        return cls(*random.split(rng_key, len(cls._fields)))


def draw_rows(
    plan: ChainPlan, streams: dict[str, Any], rng_key: Array
) -> tuple[dict[str, Any], dict[str, Array]]:
    """The streams after an iteration, and the rows of all its steps.

    At once: small draws cost more than they yield, and indices computed inside the loop would be
    fused into the gather and computed again there.
    """
    adaptation, plates = plan.adaptation, plan.target.plates
    after, rows = {}, {}
    for p, key in zip(plates, random.split(rng_key, len(plates)), strict=True):
        after[p.name], rows[p.name] = draw_minibatches(
            adaptation.minibatch, p, streams[p.name], key, adaptation.num_steps
        )
    return after, rows
