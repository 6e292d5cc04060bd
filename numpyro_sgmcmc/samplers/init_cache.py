"""What a kernel's `init` finds: kept in one object, and found again where it was forgotten."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer.gibbs import GIBBS_SITES_KWARG

from numpyro_sgmcmc.checks import Refusal
from numpyro_sgmcmc.data.arguments import Arguments, HeldArrays
from numpyro_sgmcmc.posterior.target import Target
from numpyro_sgmcmc.warmup import NO_NOISE, Adaptation, Noise

__all__ = ["AdaptationRecord", "InitCache"]


class AdaptationRecord(NamedTuple):
    """What the warm-up found, and for what: to know when to adapt anew, and when it is too late.

    - **adaptation** - what was found.
    - **target** - the posterior.
    - **arguments** - the model's arguments, concrete.
    - **checksums** - of the data, at that time.
    """

    adaptation: Adaptation
    target: Target
    arguments: Arguments
    checksums: tuple[int | None, ...]

    def holds_for(self, target: Target, arguments: Arguments) -> bool:
        """Whether this posterior, with these very arrays, unchanged, is the one adapted to."""
        return (
            self.target is target
            and _are_same(arguments, self.arguments)
            and self.checksums == arguments.checksums
        )

    def holds_with_likely_values(self, arguments: Arguments) -> bool:
        """Whether a block of Gibbs has adapted to these very arrays, unchanged, and to values of
        other sites found for them.
        """
        values = self.arguments.kwargs[GIBBS_SITES_KWARG]
        kept = {name: values[name] for name in arguments.kwargs[GIBBS_SITES_KWARG]}
        then = Arguments(self.arguments.args, {**self.arguments.kwargs, GIBBS_SITES_KWARG: kept})
        return _are_same(arguments, then) and self.checksums == self.arguments.checksums

    def refuse_other_data(self, arguments: Arguments) -> None:
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
        raise Refusal(
            "The data are not those that the warm-up adapted to, whose gradient the control "
            "variates hold: call `mcmc.run` with a new MCMC object, or use gradient='plain'."
        )


def _are_same(a: Arguments, b: Arguments) -> bool:
    """Whether all that is no array is equal, and the arrays are the very same."""
    return a.signature == b.signature and all(
        x is y for x, y in zip(a.arrays, b.arrays, strict=True)
    )


def _is_equal(a: Any, b: Any) -> bool:
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

    - **targets** - the posteriors read so far, by the form of the arguments.
    - **held** - large arrays, as compiled steps see them.
    - **record** - what the warm-up found; None before it.
    - **target** - the posterior of the last `init`; None before it.
    - **noise** - the gradient's noise at typical positions, as the last warm-up measured it.
    - **num_warmup** - number of warm-up iterations.
    - **is_ready** - whether `init` has ended, so that the kernel can sample.
    """

    targets: dict[Any, Target] = field(default_factory=dict)
    held: HeldArrays = field(default_factory=HeldArrays)
    record: AdaptationRecord | None = None
    target: Target | None = None
    noise: Noise = NO_NOISE
    num_warmup: int = 0
    is_ready: bool = False

    def remember(self, adaptation: Adaptation, target: Target, arguments: Arguments) -> None:
        """Keep what has been found just now."""
        self.record = AdaptationRecord(adaptation, target, arguments, arguments.checksums)
        self.noise = adaptation.noise

    def be_ready(self, arguments: Arguments, num_warmup: int) -> None:
        """Let go of data that sampling does not need, and allow it."""
        self.held.keep_only(arguments)
        for host in arguments.hosts:
            host.forget()
        self.num_warmup = num_warmup
        self.is_ready = True

    def without_data(self) -> InitCache:
        """What a copy or a pickled kernel keeps: neither data nor anything compiled."""
        return InitCache(noise=self.noise, num_warmup=self.num_warmup)

    def variant(self, adaptation: Adaptation | None, target: Target | None) -> InitCache:
        """With another adaptation, or another posterior; None keeps what there is."""
        assert self.record is not None
        found: dict[str, Any] = {}
        if adaptation is not None:
            found["record"] = self.record._replace(adaptation=adaptation)
        if target is not None:
            found["target"] = target
        return replace(self, **found)
