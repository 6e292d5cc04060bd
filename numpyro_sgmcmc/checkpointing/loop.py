"""All chains, a few iterations at a time, compiled once for a whole run.

NumPyro's own loop is compiled anew at each call of ``MCMC.run``; this one takes the number of its
iterations as a value, so that a run in segments costs one compilation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from numpyro.util import nested_attrgetter

from numpyro_sgmcmc.chain.state import SGMCMCState
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.host import plain_failures
from numpyro_sgmcmc.samplers.base import SGMCMCKernel

__all__ = ["Chains", "Segment", "kept_and_removed", "with_chains"]


class Segment(NamedTuple):
    """
    - **state** - of one chain, or of all of them.
    - **draws** - room for the draws of a segment, a pytree with a leading axis for them.
    - **elapsed** - iterations since the segment's first; negative in warm-up, which draws nothing.
    """

    state: SGMCMCState
    draws: Any
    elapsed: Array


class Chains:
    """The chains of a run by one of NumPyro's chain methods.

    :param kernel: initialised or not.
    :param num_chains: number of chains.
    :param chain_method: ``"sequential"``, ``"vectorized"``, ``"parallel"``, or a function that maps
        a function of one chain over chains, such as :func:`jax.vmap`.
    :param fields: what to collect of a state, its sample field first.
    :param removed: sites not to collect.
    :param postprocess_fn: the user's, or None for the kernel's.
    :param thinning: iterations from draw to draw.
    :param room: draws of the longest segment.
    :param model_args: the model's positional arguments.
    :param model_kwargs: the model's keyword arguments.
    """

    def __init__(
        self,
        kernel: SGMCMCKernel,
        num_chains: int,
        chain_method: str | Callable,
        fields: tuple[str, ...],
        removed: tuple[str, ...],
        postprocess_fn: Callable | None,
        thinning: int,
        room: int,
        model_args: tuple,
        model_kwargs: dict,
    ) -> None:
        self._kernel, self._num_chains = kernel, num_chains
        self._method = chain_method if num_chains > 1 else "sequential"
        self._fields, self._removed = fields, removed
        self._postprocess_fn = postprocess_fn
        self._thinning, self._room = thinning, room
        self._args, self._kwargs = model_args, model_kwargs
        self._compiled: Callable | None = None
        self._mapped: dict[int, Callable] = {}

    @property
    def is_stoppable(self) -> bool:
        """Whether any number of iterations costs no compilation of its own."""
        return not callable(self._method)

    def start(self, rng_key: Array, num_warmup: int, init_params: Any) -> SGMCMCState:
        """The chains' first states, with a leading axis where there are several.

        :param rng_key: one key, or one a chain where there are several.
        """
        args, kwargs = self._args, self._kwargs

        def init(given: tuple[Array, Any]) -> SGMCMCState:
            return self._kernel.init(given[0], num_warmup, given[1], args, kwargs)

        return self._map(init)((rng_key, init_params))

    def room(self, state: SGMCMCState) -> Any:
        """Shapes of a segment's draws: ``(room, ...)``, or ``(chains, room, ...)`` for several."""
        draws = jax.eval_shape(self._collect_all, state)
        axis = 1 if self._num_chains > 1 else 0
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((*x.shape[:axis], self._room, *x.shape[axis:]), x.dtype),
            draws,
        )

    def segment(self, state: SGMCMCState, elapsed: int) -> Segment:
        """A segment whose draws begin when ``elapsed`` has gone up to zero."""
        draws = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.room(state))
        elapsed_each = jnp.full(
            (self._num_chains,) if self._num_chains > 1 else (), elapsed, jnp.int32
        )
        return Segment(state, draws, elapsed_each)

    def advance(self, segment: Segment, iterations: int) -> Segment:
        """The segment some iterations further.

        :raises RuntimeError: where a source of rows fails, in its own words.
        """
        with plain_failures(Arguments(self._args, self._kwargs).hosts):
            return jax.block_until_ready(self._advance(segment, iterations))

    def _advance(self, segment: Segment, iterations: int) -> Segment:
        if self._compiled is None:
            self._compiled = self._compile()
        if not callable(self._method):
            return self._compiled(segment, jnp.int32(iterations))
        if iterations not in self._mapped:
            # The user's function takes a function of one argument.
            one = partial(self._compiled, iterations=jnp.int32(iterations))
            self._mapped[iterations] = self._method(lambda s: one(s))
        return self._mapped[iterations](segment)

    def _map(self, one: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A function of one chain as one of all."""
        if self._method == "sequential" and self._num_chains > 1:
            return partial(_one_by_one, one)
        if self._method == "parallel":
            return jax.pmap(one)
        return self._method(one) if callable(self._method) else one

    def _compile(self) -> Callable[..., Segment]:
        if self._method == "parallel":
            return jax.pmap(self._iterate, in_axes=(0, None))
        one = jax.jit(self._iterate)
        if self._method == "sequential" and self._num_chains > 1:
            return lambda segment, iterations: _one_by_one(lambda s: one(s, iterations), segment)
        return one

    def _iterate(self, segment: Segment, iterations: Array) -> Segment:
        is_batch = self._method == "vectorized"
        thinning, room = self._thinning, self._room

        def put(draws: Array, draw: Array, place: Array) -> Array:
            if is_batch:
                return draws.at[:, place].set(draw, mode="drop")
            return draws.at[place].set(draw, mode="drop")

        def body(_: Any, segment: Segment) -> Segment:
            state = self._kernel.sample(segment.state, self._args, self._kwargs)
            # In warm-up and between the draws that are kept there is no place for a draw.
            elapsed = segment.elapsed[0] if is_batch else segment.elapsed
            is_kept = (elapsed >= 0) & ((elapsed + 1) % thinning == 0)
            place = jnp.where(is_kept, elapsed // thinning, room)
            draws = jax.tree.map(
                partial(put, place=place), segment.draws, self._collect(state, is_batch)
            )
            return Segment(state, draws, segment.elapsed + 1)

        return lax.fori_loop(0, iterations, body, segment)

    def _collect(self, state: SGMCMCState, is_batch: bool) -> dict[str, Any]:
        """The fields of a state, its sites constrained."""
        values = nested_attrgetter(*self._fields)(state)
        found = dict(zip(self._fields, values if len(self._fields) > 1 else [values], strict=True))
        sample_field = self._fields[0]
        constrain = self._postprocess_fn or self._kernel.postprocess_fn(self._args, self._kwargs)
        sites = (jax.vmap(constrain) if is_batch else constrain)(found[sample_field])
        if self._removed:
            sites = {k: v for k, v in sites.items() if k not in self._removed}
        return {**found, sample_field: sites}

    def _collect_all(self, state: SGMCMCState) -> dict[str, Any]:
        if self._num_chains == 1:
            return self._collect(state, False)
        if self._method == "vectorized":
            return self._collect(state, True)
        return jax.vmap(partial(self._collect, is_batch=False))(state)


def _one_by_one(one: Callable[[Any], Any], of_all: Any) -> Any:
    """``one`` of each chain in turn."""
    num = len(jax.tree.leaves(of_all)[0])
    each = [one(jax.tree.map(lambda x, i=i: x[i], of_all)) for i in range(num)]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *each)


def kept_and_removed(
    names: tuple[str, ...], sample_field: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Fields to collect, and sites that ``~z.site`` takes out."""
    prefix = f"~{sample_field}."
    removed = tuple(dict.fromkeys(n[len(prefix) :] for n in names if n.startswith(prefix)))
    return tuple(dict.fromkeys(n for n in names if not n.startswith("~"))), removed


def with_chains(draws: Any, num_chains: int) -> Any:
    """Draws with a leading axis of chains, which those of one chain lack."""
    return draws if num_chains > 1 else jax.tree.map(lambda x: x[None], draws)
