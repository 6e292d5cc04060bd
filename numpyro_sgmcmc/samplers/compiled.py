"""Functions of the posterior, compiled so that large arrays are held and not copied."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array
from numpyro.infer.gibbs import GIBBS_SITES_KWARG

from numpyro_sgmcmc.checks import Refusal
from numpyro_sgmcmc.data.arguments import Arguments, HeldArrays
from numpyro_sgmcmc.data.host import plain_failures
from numpyro_sgmcmc.data.progress import passes_shown
from numpyro_sgmcmc.posterior.target import Target

__all__ = ["full_gradients", "with_held"]


@partial(jax.jit, static_argnames="fn")
def with_held(fn: Callable, z: Any, held: Arguments) -> Any:
    """``fn`` of unconstrained values and the arguments."""
    return fn(z, held.read())


@partial(jax.jit, static_argnames="target")
def _full_gradients(
    target: Target, positions: Array, held: Arguments, given: dict[str, Array] | None
) -> Array:
    arguments = held.read()

    def one(x: tuple[Array, dict[str, Array] | None]) -> Array:
        position, values = x
        if values is None:
            return target.full_gradient(position, arguments)
        kwargs = {**arguments.kwargs, GIBBS_SITES_KWARG: values}
        return target.full_gradient(position, Arguments(arguments.args, kwargs))

    return jax.lax.map(one, (positions, given))


def full_gradients(
    target: Target,
    held: HeldArrays,
    positions: Array,
    arguments: Arguments,
    given: dict[str, Array] | None = None,
) -> Array:
    """Gradients on all rows at flat positions, one after the other; shape ``(m, d)``.

    :param given: for a block of Gibbs, values of the other sites at each position, ``(m, ...)``.
    :raises ValueError: for a model with local sites.
    """
    if target.locals is not None:
        raise Refusal(
            "With latent sites inside the subsampled plate the globals alone have no gradient "
            "to take on all rows."
        )
    shown = passes_shown("gradients on all rows", arguments.hosts, len(positions))
    with plain_failures(arguments.hosts), shown:
        return jax.block_until_ready(
            _full_gradients(target, positions, held.hold(arguments), given)
        )
