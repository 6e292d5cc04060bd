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
from numpyro.util import nested_attrgetter

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.host_array import unwrap_callback_errors
from numpyro_sgmcmc.sampling.kernel import SGMCMCKernel
from numpyro_sgmcmc.sampling.state import SGMCMCState


class Segment(NamedTuple):
    """
    - **state** - of one chain, or of all of them with a leading axis.
    - **draws** - buffer for the draws of a segment, a pytree with a leading axis for them.
    - **elapsed_iterations** - iterations since the segment's first; negative in warm-up, which
      stores no draws.
    """

    state: SGMCMCState
    draws: Any
    elapsed_iterations: Array


class ChainRunner:
    """The chains of a run, by one of NumPyro's chain methods.

    :param kernel: initialised or not.
    :param num_chains: number of chains.
    :param chain_method: ``"sequential"``, ``"vectorized"``, ``"parallel"``, or a function that maps
        a function of one chain over chains, such as :func:`jax.vmap`.
    :param collected_fields: fields of the state to collect, the sample field first.
    :param excluded_sites: sites not to collect.
    :param postprocess_fn: the user's, or None for the kernel's.
    :param thinning: iterations from draw to draw.
    :param draws_per_segment: draws per chain of the longest segment.
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
        """True if another number of iterations needs no compilation."""
        return not callable(self._chain_method)

    def init_states(self, rng_key: Array, num_warmup: int, init_params: Any) -> SGMCMCState:
        """Return the chains' first states, with a leading axis where there are several.

        :param rng_key: one key, or one per chain where there are several.
        """
        args, kwargs = self._args, self._kwargs

        def init(key_and_params: tuple[Array, Any]) -> SGMCMCState:
            rng_key, params = key_and_params
            return self._kernel.init(rng_key, num_warmup, params, args, kwargs)

        inputs = (rng_key, init_params)
        if self._chain_method == "sequential":
            return _map_sequentially(init, inputs) if self._num_chains > 1 else init(inputs)
        if self._chain_method == "parallel":
            return jax.pmap(init)(inputs)
        if callable(self._chain_method):
            return self._chain_method(init)(inputs)
        return init(inputs)  # vectorized: the kernel takes an array of keys

    def eval_draw_shapes(self, state: SGMCMCState) -> Any:
        """Return shapes of a segment's draws: ``(draws, ...)``, or ``(chains, draws, ...)``."""

        def collect(state: SGMCMCState) -> dict[str, Any]:
            is_batch = self._num_chains > 1 and self._chain_method == "vectorized"
            fn = partial(self._collect_fields, is_batch=is_batch)
            return jax.vmap(fn)(state) if self._num_chains > 1 and not is_batch else fn(state)

        axis = 1 if self._num_chains > 1 else 0
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                (*x.shape[:axis], self._draws_per_segment, *x.shape[axis:]), x.dtype
            ),
            jax.eval_shape(collect, state),
        )

    def create_segment(self, state: SGMCMCState, elapsed_iterations: int) -> Segment:
        """Return a segment that stores draws once ``elapsed_iterations`` has reached zero."""
        draws = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.eval_draw_shapes(state))
        shape = (self._num_chains,) if self._num_chains > 1 else ()
        return Segment(state, draws, jnp.full(shape, elapsed_iterations, jnp.int32))

    def run_iterations(self, segment: Segment, num_iterations: int) -> Segment:
        """Return the segment after some more iterations.

        :raises RuntimeError: where a source of rows fails, with its message.
        """
        with unwrap_callback_errors(Arguments(self._args, self._kwargs).host_arrays):
            return jax.block_until_ready(self._run_compiled(segment, num_iterations))

    def _run_compiled(self, segment: Segment, num_iterations: int) -> Segment:
        if self._compiled_run is None:
            self._compiled_run = self._compile_run()
        if not callable(self._chain_method):
            return self._compiled_run(segment, jnp.int32(num_iterations))
        # The user's function maps functions of one argument.
        if num_iterations not in self._mapped_runs:
            run = partial(self._compiled_run, num_iterations=jnp.int32(num_iterations))
            self._mapped_runs[num_iterations] = self._chain_method(lambda s: run(s))
        return self._mapped_runs[num_iterations](segment)

    def _compile_run(self) -> Callable[..., Segment]:
        if self._chain_method == "parallel":
            return jax.pmap(self._loop_iterations, in_axes=(0, None))
        run = jax.jit(self._loop_iterations)
        if self._chain_method == "sequential" and self._num_chains > 1:
            return lambda segment, n: _map_sequentially(lambda s: run(s, n), segment)
        return run

    def _loop_iterations(self, segment: Segment, num_iterations: Array) -> Segment:
        is_batch = self._chain_method == "vectorized"

        def store(buffer: Array, draw: Array, index: Array) -> Array:
            at = buffer.at[:, index] if is_batch else buffer.at[index]
            return at.set(draw, mode="drop")

        def body(_: Any, segment: Segment) -> Segment:
            state = self._kernel.sample(segment.state, self._args, self._kwargs)
            # An index past the end of the buffer drops the draw: in warm-up and when thinning.
            elapsed = segment.elapsed_iterations[0] if is_batch else segment.elapsed_iterations
            is_kept = (elapsed >= 0) & ((elapsed + 1) % self._thinning == 0)
            index = jnp.where(is_kept, elapsed // self._thinning, self._draws_per_segment)
            fields = self._collect_fields(state, is_batch)
            draws = jax.tree.map(partial(store, index=index), segment.draws, fields)
            return Segment(state, draws, segment.elapsed_iterations + 1)

        return lax.fori_loop(0, num_iterations, body, segment)

    def _collect_fields(self, state: SGMCMCState, is_batch: bool) -> dict[str, Any]:
        """Return the collected fields of a state, with constrained sites."""
        values = nested_attrgetter(*self._collected_fields)(state)
        values = values if len(self._collected_fields) > 1 else [values]
        collected = dict(zip(self._collected_fields, values, strict=True))
        sample_field = self._collected_fields[0]
        constrain = self._postprocess_fn or self._kernel.postprocess_fn(self._args, self._kwargs)
        sites = (jax.vmap(constrain) if is_batch else constrain)(collected[sample_field])
        if self._excluded_sites:
            sites = {k: v for k, v in sites.items() if k not in self._excluded_sites}
        return {**collected, sample_field: sites}


def _map_sequentially(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Return ``fn`` of each chain in turn, stacked."""
    num_chains = len(jax.tree.leaves(tree)[0])
    results = [fn(jax.tree.map(lambda x, i=i: x[i], tree)) for i in range(num_chains)]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *results)


def parse_collected_fields(
    field_names: tuple[str, ...], sample_field: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the fields to collect, and the sites that ``~z.site`` excludes."""
    prefix = f"~{sample_field}."
    excluded = tuple(dict.fromkeys(n[len(prefix) :] for n in field_names if n.startswith(prefix)))
    return tuple(dict.fromkeys(n for n in field_names if not n.startswith("~"))), excluded


def add_chain_axis(draws: Any, num_chains: int) -> Any:
    """Return draws with a leading axis of chains, which those of one chain lack."""
    return draws if num_chains > 1 else jax.tree.map(lambda x: x[None], draws)
