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

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.host_array import unwrap_callback_errors
from numpyro_sgmcmc.sampling.kernel import SGMCMCKernel
from numpyro_sgmcmc.sampling.state import SGMCMCState

__all__ = ["ChainRunner", "Segment", "add_chain_axis", "parse_collected_fields"]


class Segment(NamedTuple):
    """
    - **state** - of one chain, or of all of them.
    - **draws** - room for the draws of a segment, a pytree with a leading axis for them.
    - **elapsed_iterations** - iterations since the segment's first; negative in warm-up, which draws nothing.
    """

    state: SGMCMCState
    draws: Any
    elapsed_iterations: Array


class ChainRunner:
    """The chains of a run by one of NumPyro's chain methods.

    :param kernel: initialised or not.
    :param num_chains: number of chains.
    :param chain_method: ``"sequential"``, ``"vectorized"``, ``"parallel"``, or a function that maps
        a function of one chain over chains, such as :func:`jax.vmap`.
    :param collected_fields: what to collect of a state, its sample field first.
    :param excluded_sites: sites not to collect.
    :param postprocess_fn: the user's, or None for the kernel's.
    :param thinning: iterations from draw to draw.
    :param draws_per_segment: draws of the longest segment.
    :param model_args: the model's positional arguments.
    :param model_kwargs: the model's keyword arguments.
    """

    def __init__(
        self,
        kernel: SGMCMCKernel,
        num_chains: int,
        chain_method: str | Callable,
        collected_fields: tuple[str, ...],
        excluded_sites: tuple[str, ...],
        postprocess_fn: Callable | None,
        thinning: int,
        draws_per_segment: int,
        model_args: tuple,
        model_kwargs: dict,
    ) -> None:
        self._kernel, self._num_chains = kernel, num_chains
        self._chain_method = chain_method if num_chains > 1 else "sequential"
        self._collected_fields, self._excluded_sites = collected_fields, excluded_sites
        self._postprocess_fn = postprocess_fn
        self._thinning, self._draws_per_segment = thinning, draws_per_segment
        self._args, self._kwargs = model_args, model_kwargs
        self._compiled_run: Callable | None = None
        self._mapped_runs: dict[int, Callable] = {}

    @property
    def can_vary_num_iterations(self) -> bool:
        """Whether any number of iterations costs no compilation of its own."""
        return not callable(self._chain_method)

    def init_states(self, rng_key: Array, num_warmup: int, init_params: Any) -> SGMCMCState:
        """The chains' first states, with a leading axis where there are several.

        :param rng_key: one key, or one a chain where there are several.
        """
        args, kwargs = self._args, self._kwargs

        def init(given: tuple[Array, Any]) -> SGMCMCState:
            return self._kernel.init(given[0], num_warmup, given[1], args, kwargs)

        return self._map_over_chains(init)((rng_key, init_params))

    def eval_draw_shapes(self, state: SGMCMCState) -> Any:
        """Shapes of a segment's draws: ``(room, ...)``, or ``(chains, room, ...)`` for several."""
        draws = jax.eval_shape(self._collect_fields_all_chains, state)
        axis = 1 if self._num_chains > 1 else 0
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                (*x.shape[:axis], self._draws_per_segment, *x.shape[axis:]), x.dtype
            ),
            draws,
        )

    def create_segment(self, state: SGMCMCState, elapsed_iterations: int) -> Segment:
        """A segment whose draws begin when ``elapsed_iterations`` has gone up to zero."""
        draws = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.eval_draw_shapes(state))
        elapsed_each = jnp.full(
            (self._num_chains,) if self._num_chains > 1 else (), elapsed_iterations, jnp.int32
        )
        return Segment(state, draws, elapsed_each)

    def run_iterations(self, segment: Segment, num_iterations: int) -> Segment:
        """The segment some iterations further.

        :raises RuntimeError: where a source of rows fails, in its own words.
        """
        with unwrap_callback_errors(Arguments(self._args, self._kwargs).host_arrays):
            return jax.block_until_ready(self._run_compiled(segment, num_iterations))

    def _run_compiled(self, segment: Segment, num_iterations: int) -> Segment:
        if self._compiled_run is None:
            self._compiled_run = self._compile_run()
        if not callable(self._chain_method):
            return self._compiled_run(segment, jnp.int32(num_iterations))
        if num_iterations not in self._mapped_runs:
            # The user's function takes a function of one argument.
            one = partial(self._compiled_run, num_iterations=jnp.int32(num_iterations))
            self._mapped_runs[num_iterations] = self._chain_method(lambda s: one(s))
        return self._mapped_runs[num_iterations](segment)

    def _map_over_chains(self, fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A function of one chain as one of all."""
        if self._chain_method == "sequential" and self._num_chains > 1:
            return partial(_map_sequentially, fn)
        if self._chain_method == "parallel":
            return jax.pmap(fn)
        return self._chain_method(fn) if callable(self._chain_method) else fn

    def _compile_run(self) -> Callable[..., Segment]:
        if self._chain_method == "parallel":
            return jax.pmap(self._loop_iterations, in_axes=(0, None))
        one = jax.jit(self._loop_iterations)
        if self._chain_method == "sequential" and self._num_chains > 1:
            return lambda segment, iterations: _map_sequentially(
                lambda s: one(s, iterations), segment
            )
        return one

    def _loop_iterations(self, segment: Segment, num_iterations: Array) -> Segment:
        is_batch = self._chain_method == "vectorized"
        thinning, room = self._thinning, self._draws_per_segment

        def put(draws: Array, draw: Array, place: Array) -> Array:
            if is_batch:
                return draws.at[:, place].set(draw, mode="drop")
            return draws.at[place].set(draw, mode="drop")

        def body(_: Any, segment: Segment) -> Segment:
            state = self._kernel.sample(segment.state, self._args, self._kwargs)
            # In warm-up and between the draws that are kept there is no place for a draw.
            elapsed = segment.elapsed_iterations[0] if is_batch else segment.elapsed_iterations
            is_kept = (elapsed >= 0) & ((elapsed + 1) % thinning == 0)
            place = jnp.where(is_kept, elapsed // thinning, room)
            draws = jax.tree.map(
                partial(put, place=place), segment.draws, self._collect_fields(state, is_batch)
            )
            return Segment(state, draws, segment.elapsed_iterations + 1)

        return lax.fori_loop(0, num_iterations, body, segment)

    def _collect_fields(self, state: SGMCMCState, is_batch: bool) -> dict[str, Any]:
        """The fields of a state, its sites constrained."""
        values = nested_attrgetter(*self._collected_fields)(state)
        found = dict(
            zip(
                self._collected_fields,
                values if len(self._collected_fields) > 1 else [values],
                strict=True,
            )
        )
        sample_field = self._collected_fields[0]
        constrain = self._postprocess_fn or self._kernel.postprocess_fn(self._args, self._kwargs)
        sites = (jax.vmap(constrain) if is_batch else constrain)(found[sample_field])
        if self._excluded_sites:
            sites = {k: v for k, v in sites.items() if k not in self._excluded_sites}
        return {**found, sample_field: sites}

    def _collect_fields_all_chains(self, state: SGMCMCState) -> dict[str, Any]:
        if self._num_chains == 1:
            return self._collect_fields(state, False)
        if self._chain_method == "vectorized":
            return self._collect_fields(state, True)
        return jax.vmap(partial(self._collect_fields, is_batch=False))(state)


def _map_sequentially(fn: Callable[[Any], Any], tree: Any) -> Any:
    """``fn`` of each chain in turn."""
    num = len(jax.tree.leaves(tree)[0])
    each = [fn(jax.tree.map(lambda x, i=i: x[i], tree)) for i in range(num)]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *each)


def parse_collected_fields(
    field_names: tuple[str, ...], sample_field: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Fields to collect, and sites that ``~z.site`` takes out."""
    prefix = f"~{sample_field}."
    removed = tuple(dict.fromkeys(n[len(prefix) :] for n in field_names if n.startswith(prefix)))
    return tuple(dict.fromkeys(n for n in field_names if not n.startswith("~"))), removed


def add_chain_axis(draws: Any, num_chains: int) -> Any:
    """Draws with a leading axis of chains, which those of one chain lack."""
    return draws if num_chains > 1 else jax.tree.map(lambda x: x[None], draws)
