"""All chains, a few iterations at a time, compiled once for a whole run.

NumPyro's own loop is compiled at each call of ``MCMC.run``. This one takes the number of its
iterations as an argument, so that a run in segments is compiled once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from numpyro.infer import MCMC
from numpyro.util import nested_attrgetter

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.host_array import unwrap_callback_errors
from numpyro_sgmcmc.sampling.state import SGMCMCState


class Segment(NamedTuple):
    """State of the chains and buffer for the draws of a segment."""

    state: SGMCMCState  # of one chain, or of all of them with a leading axis
    draws: Any  # buffer for the draws of a segment, a pytree with a leading axis for them
    # iterations since the segment's first; negative in warm-up, which stores no draws
    elapsed_iterations: Array


class ChainRunner:
    """The chains of a run, by one of NumPyro's chain methods.

    :param mcmc: kernel, chain method, postprocessing and thinning of the run.
    :param field_names: fields of the state to collect, the sample field first, and ``~z.site`` for
        sites not to collect.
    :param draws_per_segment: draws per chain of the longest segment.
    """

    def __init__(
        self,
        mcmc: MCMC,
        field_names: tuple[str, ...],
        draws_per_segment: int,
        model_args: tuple,
        model_kwargs: dict,
    ) -> None:
        self._mcmc, self._num_chains = mcmc, mcmc.num_chains
        self._chain_method = mcmc.chain_method if mcmc.num_chains > 1 else "sequential"
        self._draws_per_segment = draws_per_segment
        self._args, self._kwargs = model_args, model_kwargs
        self._fields = tuple(dict.fromkeys(n for n in field_names if not n.startswith("~")))
        prefix = f"~{self._fields[0]}."
        self._excluded_sites = {n.removeprefix(prefix) for n in field_names if n.startswith(prefix)}
        if self._chain_method == "parallel":
            self._compiled_loop = jax.pmap(self._loop_iterations, in_axes=(0, None))
        else:
            self._compiled_loop = jax.jit(self._loop_iterations)
        self._mapped_loops: dict[int, Callable] = {}
        # Whether another number of iterations needs no compilation.
        self.can_vary_num_iterations = not callable(self._chain_method)

    def init_states(self, rng_key: Array, init_params: Any) -> SGMCMCState:
        """Return the chains' first states, with a leading axis where there are several."""
        args, kwargs = self._args, self._kwargs

        def init(key_and_params: tuple[Array, Any]) -> SGMCMCState:
            rng_key, params = key_and_params
            return self._mcmc.sampler.init(rng_key, self._mcmc.num_warmup, params, args, kwargs)

        inputs = (rng_key, init_params)
        if self._chain_method == "sequential" and self._num_chains > 1:
            return _map_sequentially(init, inputs)
        if self._chain_method == "parallel":
            return jax.pmap(init)(inputs)
        if callable(self._chain_method):
            return self._chain_method(init)(inputs)
        return init(inputs)  # vectorized: the kernel takes an array of keys

    def add_chain_axis(self, draws: Any) -> Any:
        """Return draws with a leading axis of chains, which those of one chain lack."""
        return draws if self._num_chains > 1 else jax.tree.map(lambda x: x[None], draws)

    def eval_draw_shapes(self, state: SGMCMCState) -> Any:
        """Return the shapes of a segment's draws, ``(chains, draws, ...)``."""

        def collect(state: SGMCMCState) -> Any:
            is_mapped = self._num_chains > 1 and self._chain_method != "vectorized"
            fields = (jax.vmap(self._collect_fields) if is_mapped else self._collect_fields)(state)
            return self.add_chain_axis(fields)

        num_draws = self._draws_per_segment
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((x.shape[0], num_draws, *x.shape[1:]), x.dtype),
            jax.eval_shape(collect, state),
        )

    def create_segment(self, state: SGMCMCState, elapsed_iterations: int) -> Segment:
        """Return a segment that stores draws once ``elapsed_iterations`` has reached zero."""
        first_axis = 0 if self._num_chains > 1 else 1
        draws = jax.tree.map(
            lambda x: jnp.zeros(x.shape[first_axis:], x.dtype), self.eval_draw_shapes(state)
        )
        chains = (self._num_chains,) if self._num_chains > 1 else ()
        return Segment(state, draws, jnp.full(chains, elapsed_iterations, jnp.int32))

    def run_iterations(self, segment: Segment, num_iterations: int) -> Segment:
        """Return the segment after some more iterations."""

        def run_chain(segment: Segment) -> Segment:
            return self._compiled_loop(segment, jnp.int32(num_iterations))

        run = run_chain
        if callable(self._chain_method):  # the user's function maps functions of one argument
            if num_iterations not in self._mapped_loops:
                self._mapped_loops[num_iterations] = self._chain_method(run_chain)
            run = self._mapped_loops[num_iterations]
        elif self._chain_method == "sequential" and self._num_chains > 1:
            run = partial(_map_sequentially, run_chain)
        with unwrap_callback_errors(Arguments(self._args, self._kwargs).host_arrays):
            return jax.block_until_ready(run(segment))

    def _loop_iterations(self, segment: Segment, num_iterations: Array) -> Segment:
        is_batch = self._chain_method == "vectorized"

        def store(buffer: Array, draw: Array, index: Array) -> Array:
            at = buffer.at[:, index] if is_batch else buffer.at[index]
            return at.set(draw, mode="drop")

        def body(_: Any, segment: Segment) -> Segment:
            state = self._mcmc.sampler.sample(segment.state, self._args, self._kwargs)
            # An index past the end of the buffer drops the draw: in warm-up and when thinning.
            elapsed = segment.elapsed_iterations[0] if is_batch else segment.elapsed_iterations
            thinning = self._mcmc.thinning
            is_kept = (elapsed >= 0) & ((elapsed + 1) % thinning == 0)
            index = jnp.where(is_kept, elapsed // thinning, self._draws_per_segment)
            fields = self._collect_fields(state)
            draws = jax.tree.map(partial(store, index=index), segment.draws, fields)
            return Segment(state, draws, segment.elapsed_iterations + 1)

        return lax.fori_loop(0, num_iterations, body, segment)

    def _collect_fields(self, state: SGMCMCState) -> dict[str, Any]:
        collected = {name: nested_attrgetter(name)(state) for name in self._fields}
        kernel, sample_field = self._mcmc.sampler, self._fields[0]
        constrain = self._mcmc.postprocess_fn or kernel.postprocess_fn(self._args, self._kwargs)
        if self._chain_method == "vectorized":
            constrain = jax.vmap(constrain)
        sites = constrain(collected[sample_field])
        if self._excluded_sites:
            sites = {k: v for k, v in sites.items() if k not in self._excluded_sites}
        return {**collected, sample_field: sites}


def _map_sequentially(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Return ``fn`` of each chain in turn, stacked."""
    num_chains = len(jax.tree.leaves(tree)[0])
    results = [fn(jax.tree.map(lambda x, i=i: x[i], tree)) for i in range(num_chains)]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *results)
