"""What a kernel's `init` finds: kept in one object, and found again where it was forgotten."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer.gibbs import GIBBS_SITES_KWARG

from numpyro_sgmcmc.checks import InvalidArgumentError
from numpyro_sgmcmc.data.arguments import Arguments, DeviceArrayCache
from numpyro_sgmcmc.posterior.target import Potential
from numpyro_sgmcmc.warmup import NO_NOISE, Adaptation, GradientNoiseStats

__all__ = ["AdaptationRecord", "InitCache"]


class AdaptationRecord(NamedTuple):
    """What the warm-up found, and for what: to know when to adapt anew, and when it is too late.

    - **adaptation** - what was found.
    - **potential** - the posterior.
    - **arguments** - the model's arguments, concrete.
    - **checksums** - of the data, at that time.
    """

    adaptation: Adaptation
    potential: Potential
    arguments: Arguments
    checksums: tuple[int | None, ...]

    def is_valid_for(self, potential: Potential, arguments: Arguments) -> bool:
        """Whether this posterior, with these very arrays, unchanged, is the one adapted to."""
        return (
            self.potential is potential
            and _have_identical_arrays(arguments, self.arguments)
            and self.checksums == arguments.checksums
        )

    def is_valid_for_gibbs_block(self, arguments: Arguments) -> bool:
        """Whether a block of Gibbs has adapted to these very arrays, unchanged, and to values of
        other sites found for them.
        """
        values = self.arguments.kwargs[GIBBS_SITES_KWARG]
        kept = {name: values[name] for name in arguments.kwargs[GIBBS_SITES_KWARG]}
        then = Arguments(self.arguments.args, {**self.arguments.kwargs, GIBBS_SITES_KWARG: kept})
        return (
            _have_identical_arrays(arguments, then) and self.checksums == self.arguments.checksums
        )

    def check_same_data(self, arguments: Arguments) -> None:
        """Control variates with another data set's gradient lead to a wrong posterior, silently.

        :raises ValueError: for such data.
        """
        is_block = GIBBS_SITES_KWARG in arguments.kwargs  # whose changes `refresh` knows of
        if is_block or not self.adaptation.estimator.needs_reference or not arguments.is_concrete:
            return
        now, then = arguments.arrays, self.arguments.arrays
        if (
            len(now) == len(then)
            and arguments.host_arrays == self.arguments.host_arrays
            and all(a is b or _are_arrays_equal(a, b) for a, b in zip(now, then, strict=True))
            and self.arguments.checksums == self.checksums
        ):
            return
        raise InvalidArgumentError(
            "The data are not those that the warm-up adapted to, whose gradient the control "
            "variates hold: call `mcmc.run` with a new MCMC object, or use gradient_estimator='minibatch'."
        )


def _have_identical_arrays(a: Arguments, b: Arguments) -> bool:
    """Whether all that is no array is equal, and the arrays are the very same."""
    return a.signature == b.signature and all(
        x is y for x, y in zip(a.arrays, b.arrays, strict=True)
    )


def _are_arrays_equal(a: Any, b: Any) -> bool:
    """Whether two arrays hold the same, missing values included."""
    if a.shape != b.shape:
        return False
    if isinstance(a, jax.Array) and not a.is_fully_addressable:
        return bool(jnp.array_equal(a, b, equal_nan=jnp.issubdtype(a.dtype, jnp.inexact)))
    a, b = np.asarray(a), np.asarray(b)
    return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc" and b.dtype.kind in "fc")


@dataclass(eq=False)
class InitCache:
    """What `init` finds.

    - **potentials** - the posteriors read so far, by the form of the arguments.
    - **array_cache** - large arrays, as compiled steps see them.
    - **record** - what the warm-up found; None before it.
    - **potential** - the posterior of the last `init`; None before it.
    - **noise_stats** - the gradient's noise at typical positions, as the last warm-up measured it.
    - **num_warmup** - number of warm-up iterations.
    - **is_ready** - whether `init` has ended, so that the kernel can sample.
    """

    potentials: dict[Any, Potential] = field(default_factory=dict)
    array_cache: DeviceArrayCache = field(default_factory=DeviceArrayCache)
    record: AdaptationRecord | None = None
    potential: Potential | None = None
    noise_stats: GradientNoiseStats = NO_NOISE
    num_warmup: int = 0
    is_ready: bool = False

    def store_adaptation(
        self, adaptation: Adaptation, potential: Potential, arguments: Arguments
    ) -> None:
        """Keep what has been found just now."""
        self.record = AdaptationRecord(adaptation, potential, arguments, arguments.checksums)
        self.noise_stats = adaptation.noise_stats

    def finish_init(self, arguments: Arguments, num_warmup: int) -> None:
        """Let go of data that sampling does not need, and allow it."""
        self.array_cache.keep_only(arguments)
        for host in arguments.host_arrays:
            host.clear_prefetched()
        self.num_warmup = num_warmup
        self.is_ready = True

    def copy_without_data(self) -> InitCache:
        """What a copy or a pickled kernel keeps: neither data nor anything compiled."""
        return InitCache(noise_stats=self.noise_stats, num_warmup=self.num_warmup)

    def copy_with(self, adaptation: Adaptation | None, potential: Potential | None) -> InitCache:
        """With another adaptation, or another posterior; None keeps what there is."""
        assert self.record is not None
        found: dict[str, Any] = {}
        if adaptation is not None:
            found["record"] = self.record._replace(adaptation=adaptation)
        if potential is not None:
            found["target"] = potential
        return replace(self, **found)
