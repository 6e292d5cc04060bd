"""What the stages of the warm-up with local values share besides."""

from __future__ import annotations

from jax import Array, random

from numpyro_sgmcmc.posterior.locals.sites import LocalValues, with_local_values
from numpyro_sgmcmc.warmup.context import WarmupContext

__all__ = ["LocalContext"]


class LocalContext:
    """A warm-up whose potential is asked for given local values.

    - **context** - of the warm-up; it looks at the values held last.
    - **arguments** - the model's arguments without local values.
    - **batches_per_epoch** - minibatches that visit all rows.
    """

    def __init__(self, context: WarmupContext) -> None:
        assert context.potential.local_latents is not None
        plate = context.potential.local_latents.plate
        self.context, self.arguments = context, context.arguments
        self.batches_per_epoch = -(-plate.size // plate.subsample_size)
        self._rng_key = random.key(0)

    def next_key(self) -> Array:
        """A fresh random key."""
        self._rng_key, key = random.split(self._rng_key)
        return key

    def set_local_values(self, local_values: LocalValues) -> None:
        """Have these local values in all that looks at the potential."""
        self.context.set_arguments(with_local_values(self.arguments, local_values))
