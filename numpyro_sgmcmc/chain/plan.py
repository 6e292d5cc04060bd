"""What does not change from iteration to iteration, and how an iteration's randomness is drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random

from numpyro_sgmcmc.chain.mass_blocks import MassMatrixBlocks
from numpyro_sgmcmc.chain.state import AdaptState
from numpyro_sgmcmc.data.minibatch import sample_minibatches
from numpyro_sgmcmc.dynamics import Dynamics
from numpyro_sgmcmc.posterior.target import Potential
from numpyro_sgmcmc.posterior.whitening import Preconditioner
from numpyro_sgmcmc.warmup import Adaptation

__all__ = ["ChainConfig", "Keys", "sample_iteration_indices"]


@dataclass(frozen=True)
class ChainConfig:
    """
    - **potential** - the posterior.
    - **adaptation** - what all chains share.
    - **integrator** - name of the integrator.
    - **bind_dynamics** - the SDE for given coordinates: a metric must know where a whitened position is.
    - **step_size_schedule** - the user's step sizes by number of steps so far, or None.
    - **num_warmup** - warm-up iterations.
    - **max_grad_norm** - largest norm of a whitened gradient, or None.
    - **collected_local_sites** - local sites of which the state's ``z`` has the values of all rows.
    - **can_shrink_user_step_size** - whether divergences in warm-up may shorten a step of the user's.
    - **traced_step_size** - the user's step size where it is being traced, or None.
    - **mass_matrix_blocks** - how the mass matrix is shown; None for a potential function.
    """

    potential: Potential
    adaptation: Adaptation
    integrator: str
    bind_dynamics: Callable[[Preconditioner], Dynamics]
    step_size_schedule: Callable[[Any], Any] | None
    num_warmup: int
    max_grad_norm: float | None = None
    collected_local_sites: tuple[str, ...] = ()
    can_shrink_user_step_size: bool = False
    traced_step_size: Array | None = None
    mass_matrix_blocks: MassMatrixBlocks | None = None

    def get_step_size(self, step_index: Array, adapt_state: AdaptState) -> Array:
        """Size of the step that has ``step_index`` before it."""
        if self.step_size_schedule is not None:
            step_size = jnp.asarray(
                self.step_size_schedule(step_index), adapt_state.step_size.dtype
            )
            # A negative step would run time backwards; the iteration then counts as diverging.
            return jnp.where(step_size >= 0.0, step_size, jnp.nan)
        return adapt_state.step_size

    def compute_weight(self, step_indices: Array, adapt_state: AdaptState) -> Array:
        """Weight in averages of a draw that took these steps."""
        if self.traced_step_size is not None:
            return len(step_indices) * adapt_state.step_size
        if self.step_size_schedule is None:
            # The same for all chains, even if some have shortened their steps.
            chosen = jnp.asarray(self.adaptation.step_size, adapt_state.step_size.dtype)
            return len(step_indices) * chosen
        weights = jax.vmap(getattr(self.step_size_schedule, "weight", self.step_size_schedule))(
            step_indices
        )
        # The draw is the last step's: where that explores, the draw does.
        weight = jnp.where((weights[-1] > 0.0) & (weights >= 0.0).all(), weights.sum(), 0.0)
        return weight.astype(adapt_state.step_size.dtype)


class Keys(NamedTuple):
    """What an iteration's key is split into; **next_key** is the next iteration's."""

    next_key: Array
    normals: Array
    indices: Array
    model: Array
    auxiliary: Array
    restart: Array
    moments: Array

    @classmethod
    def split(cls, rng_key: Array) -> Keys:
        """The keys of the iteration that begins with this one."""
        return cls(*random.split(rng_key, len(cls._fields)))


def sample_iteration_indices(
    config: ChainConfig, streams: dict[str, Any], rng_key: Array
) -> tuple[dict[str, Any], dict[str, Array]]:
    """The streams after an iteration, and the rows of all its steps.

    At once: small draws cost more than they yield, and indices computed inside the loop would be
    fused into the gather and computed again there.
    """
    adaptation, plates = config.adaptation, config.potential.plates
    after, rows = {}, {}
    for p, key in zip(plates, random.split(rng_key, len(plates)), strict=True):
        after[p.name], rows[p.name] = sample_minibatches(
            adaptation.subsampling, p, streams[p.name], key, adaptation.num_steps
        )
    return after, rows
