"""What a kernel has adapted to, so that it knows when to do so anew, and when it is too late."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer.gibbs import GIBBS_SITES_KWARG

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.warmup import Adaptation

__all__ = ["Adapted"]


class Adapted(NamedTuple):
    """
    - **arguments** - the arguments with which it was found, concrete.
    - **adaptation** - what was found.
    - **target** - the posterior.
    - **checksums** - of the data, at that time.
    """

    arguments: Arguments
    adaptation: Adaptation
    target: Target
    checksums: tuple[int | None, ...]

    @classmethod
    def to(cls, arguments: Arguments, adaptation: Adaptation, target: Target) -> Adapted:
        """What was found just now."""
        return cls(arguments, adaptation, target, arguments.checksums)

    def serves(self, target: Target, arguments: Arguments) -> bool:
        """Whether this posterior, with these very arrays, unchanged, is the one adapted to."""
        now, then = arguments.arrays, self.arguments.arrays
        return (
            self.target is target
            and len(now) == len(then)
            and all(a is b for a, b in zip(now, then, strict=True))
            and self.arguments.signature == arguments.signature
            and self.checksums == arguments.checksums
        )

    def check_same_data(self, arguments: Arguments) -> None:
        """Control variates with another data set's gradient lead to a wrong posterior, silently.

        :raises ValueError: for such data.
        """
        is_block = GIBBS_SITES_KWARG in arguments.kwargs  # whose changes `refresh` knows of
        if is_block or not self.adaptation.estimator.has_anchor or not arguments.is_concrete:
            return
        now, then = arguments.arrays, self.arguments.arrays
        if (
            len(now) == len(then)
            and arguments.hosts == self.arguments.hosts
            and all(a is b or _is_equal(a, b) for a, b in zip(now, then, strict=True))
            and self.arguments.checksums == self.checksums
        ):
            return
        raise ValueError(
            "The data are not those that the warm-up adapted to, whose gradient the control "
            "variates hold: call `mcmc.run` with a new MCMC object, or use gradient='plain'."
        )


def _is_equal(a: Any, b: Any) -> bool:
    """Whether two arrays hold the same, missing values included."""
    if a.shape != b.shape:
        return False
    if isinstance(a, jax.Array) and not a.is_fully_addressable:
        return bool(jnp.array_equal(a, b, equal_nan=jnp.issubdtype(a.dtype, jnp.inexact)))
    a, b = np.asarray(a), np.asarray(b)
    return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc" and b.dtype.kind in "fc")
