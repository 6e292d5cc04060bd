"""What the stages of the warm-up with local values share besides."""

from __future__ import annotations

from jax import Array, random

from numpyro_sgmcmc.posterior.locals.sites import AllRows, with_locals
from numpyro_sgmcmc.warmup.context import Context

__all__ = ["LocalContext"]


class LocalContext:
    """A warm-up whose potential is asked for given local values.

    - **context** - of the warm-up; it looks at the values held last.
    - **arguments** - the model's arguments without local values.
    - **epoch** - minibatches that visit all rows.
    """

    def __init__(self, context: Context) -> None:
        assert context.target.locals is not None
        plate = context.target.locals.plate
        self.context, self.arguments = context, context.arguments
        self.epoch = -(-plate.size // plate.subsample_size)
        self._key = random.key(0)

    def next_key(self) -> Array:
        """A fresh random key."""
        self._key, key = random.split(self._key)
        return key

    def hold(self, values: AllRows) -> None:
        """Have these local values in all that looks at the potential."""
        self.context.look_at(with_locals(self.arguments, values))
