"""Exact full-data values from minibatch values, by chunks of rows.

A minibatch potential is the prior plus the likelihood of the chosen rows times (rows / chosen
rows). Anything linear in it (value, gradient, Hessian) is therefore, on all rows, the mean of
its values on chunks, weighted by the chunks' sizes: memory is that of one chunk, and no second
form of the model is needed.

What a sampler needs to know of a posterior, on flat positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.row_proxies import RowLookup, ShardedOperands, has_prefetched_rows
from numpyro_sgmcmc.data.sharded_array import Shards
from numpyro_sgmcmc.data.subsampling import Indices, Plate
from numpyro_sgmcmc.errors import InvalidArgumentError, summarise_error
from numpyro_sgmcmc.model.local_latents import LocalLatents

__all__ = [
    "GlobalSite",
    "IncludedRows",
    "Potential",
    "compute_chunk_size",
    "make_function_potential",
    "mean_over_chunks",
]

_MAX_CHUNK_ELEMENTS = 2**20


def compute_chunk_size(row_size: int) -> int:
    """Rows a chunk, for rows of ``row_size`` numbers: about 2^20 numbers, at most 8192 rows."""
    return max(1, min(8192, _MAX_CHUNK_ELEMENTS // max(row_size, 1)))


def mean_over_chunks(
    fn: Callable[[Indices], Any],
    plate_groups: Sequence[Sequence[Plate]],
    max_rows_per_chunk: int,
    subset: Indices | None = None,
) -> Any:
    """The value on all rows of ``fn``, a function linear in the minibatch potential.

    Plates of one group enclose a common site, so that all pairs of their chunks are visited;
    groups add up, so that each is visited with the others held at their first rows.

    :param fn: maps indices (of any number of rows a plate) to a pytree of arrays.
    :param plate_groups: the subsampled plates, those that meet at a site together.
    :param max_rows_per_chunk: largest number of rows of one call, over the plates of a group.
    :param subset: rows that stand for all rows, by plate name; all rows where None.
    :return: the pytree of exact values.
    """
    plates_by_name = {p.name: p for group in plate_groups for p in group}
    rows = {name: p.size for name, p in plates_by_name.items()}
    if subset is not None:
        rows = {name: subset[name].shape[0] for name in rows}

    def take(name: str, start: Any, num: int) -> Array:
        places = start + jnp.arange(num)
        if subset is not None:
            return jnp.asarray(subset[name])[places]
        return plates_by_name[name].row_offset + places

    first = {
        p.name: take(p.name, 0, min(p.subsample_size, rows[p.name]))
        if isinstance(rows[p.name], int)
        else take(p.name, 0, p.subsample_size)
        for g in plate_groups
        for p in g
    }
    if not plate_groups:
        return fn({})

    def over(plates: Sequence[Plate], held: dict[str, Array], budget: int) -> Any:
        if not plates:
            return fn(held)
        name, size = plates[0].name, rows[plates[0].name]
        is_known = isinstance(size, int)
        bound = size if is_known else plates[0].max_size
        chunk = min(bound, budget)

        def inner(start: Any, num: int) -> Any:
            held_here = {**held, name: take(name, start, num)}
            value = over(plates[1:], held_here, max(1, budget // chunk))
            return jax.tree.map(lambda x: jnp.asarray(num / size, x.dtype) * x, value)

        if not is_known:
            return _sum_unknown_num_rows(inner, size, bound, chunk)
        num_chunks, rest = divmod(size, chunk)
        if num_chunks == 1:
            total = inner(0, chunk)
        else:
            shapes = jax.eval_shape(lambda: inner(0, chunk))
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            total, _ = lax.scan(
                lambda acc, k: (_tree_add(acc, inner(k * chunk, chunk)), None),
                zeros,
                jnp.arange(num_chunks),
            )
        return _tree_add(total, inner(num_chunks * chunk, rest)) if rest else total

    parts = [over(group, first, max_rows_per_chunk) for group in plate_groups]
    total = parts[0]
    for part in parts[1:]:
        total = _tree_add(total, part)
    if len(plate_groups) > 1:
        shared = fn(first)
        total = jax.tree.map(lambda t, s: t - (len(plate_groups) - 1) * s, total, shared)
    return total


def _sum_unknown_num_rows(
    chunk_term: Callable[[Any, int], Any], num_rows: Any, max_num_rows: int, chunk_size: int
) -> Any:
    """The sum over rows whose number is known only when it runs: chunks, small chunks, single rows.

    What lies beyond the last row is computed and left out, so that it can be differentiated.

    :param chunk_term: ``(start, number of rows) -> their part of the sum``.
    :param max_num_rows: the most rows that there may be.
    """
    shapes = jax.eval_shape(lambda: chunk_term(0, chunk_size))
    total = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    start: Any = 0
    for num in sorted({chunk_size, math.isqrt(chunk_size), 1}, reverse=True):
        count = (num_rows - start) // num

        def add(total: Any, k: Any, num: int = num, start: Any = start, count: Any = count) -> Any:
            value = chunk_term(start + k * num, num)
            return jax.tree.map(lambda t, v: t + jnp.where(k < count, v, 0), total, value), None

        total, _ = lax.scan(add, total, jnp.arange(max_num_rows // num))
        start, max_num_rows = start + count * num, num - 1
    return total


def _tree_add(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)


IncludedRows = tuple[tuple[str, tuple[int, ...]], ...]
"""Names of plates, with their rows that are in every minibatch, in rising order."""


class GlobalSite(NamedTuple):
    """
    - **name** - name of a latent site.
    - **shape** - shape of its unconstrained value.
    - **support** - the distribution's support, or None where it depends on other values.
    """

    name: str
    shape: tuple[int, ...]
    support: Any

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class Potential:
    """A posterior over a flat unconstrained position, known through minibatches.

    - **plates** - the subsampled plates.
    - **plate_groups** - the same, those that meet at a site together.
    - **dim** - number of coordinates d.
    - **dtype** - their type.
    - **unravel** - maps a flat position of shape ``(d,)`` to the unconstrained sites.
    - **is_stochastic** - whether the potential needs a key of its own at every evaluation.
    - **potential_fn** - ``(z, indices, arguments, rng_key, weights) -> potential``; the last
      by plate what each of its rows weighs besides, left out where all weigh the same.
    - **constrain** - ``(z, arguments) -> constrained sites``, without a model run where possible.
    - **postprocess** - the same with the deterministic sites that do not vary with the rows.
    - **sample_init_position** - ``(rng_key, arguments) -> position`` by the initialisation strategy.
    - **init_radius** - of this strategy where all coordinates are uniform in ``(-r, r)``, or None.
    - **diagnose_nonfinite** - ``(position, arguments) -> sentence`` naming the sites that are not finite.
    - **sites** - the latent sites in the order of their coordinates; None without a model.
    - **sample_conditional_prior** - ``(position, indices, arguments, rng_key) -> values`` of the sites inside the
      subsampled plate, drawn given the others.
    - **host_lookups** - arrays on the host that a plate's rows index, with their plates.
    - **shards** - which device holds which rows, if rows are spread over devices.
    - **local_latents** - the latent sites inside the subsampled plate; None where there are none.
    - **sample_prior_position** - ``(rng_key, arguments) -> position`` drawn from the prior; None where the
      user says how to start.
    - **pointwise_potential_fn** - ``(z, indices, arguments) -> what each row adds to the potential``,
      for one plate; None without a model.
    - **forward_mode_differentiation** - whether gradients are taken in forward mode, a coordinate at a time.
    """

    plates: tuple[Plate, ...]
    plate_groups: tuple[tuple[Plate, ...], ...]
    dim: int
    dtype: Any
    unravel: Callable[[Array], Any]
    is_stochastic: bool
    potential_fn: Callable[..., Array]
    constrain: Callable[[Any, Arguments], Any]
    postprocess: Callable[[Any, Arguments], Any]
    sample_init_position: Callable[[Array, Arguments], Array]
    diagnose_nonfinite: Callable[[Array, Arguments], str]
    sites: tuple[GlobalSite, ...] | None
    init_radius: float | None = None
    sample_conditional_prior: Callable[[Array, Indices, Arguments, Array], Any] | None = None
    host_lookups: tuple[RowLookup, ...] = ()
    shards: Shards | None = None
    local_latents: LocalLatents | None = None
    sample_prior_position: Callable[[Array, Arguments], Array] | None = None
    pointwise_potential_fn: Callable[[Any, Indices, Arguments], Array] | None = None
    forward_mode_differentiation: bool = False

    def value(
        self, position: Array, indices: Indices, arguments: Arguments, rng_key: Array | None = None
    ) -> Array:
        """Minibatch potential, unbiased for the full-data potential when rows are.

        :param position: flat position, shape ``(d,)``.
        :param indices: row indices of each subsampled plate, of any number of rows; where they are
            spread over devices, as many of each, in the devices' order.
        :param arguments: the model's arguments.
        :param rng_key: key of a randomised likelihood.
        :return: scalar.
        """
        return self.mean_over_shards(
            lambda part, i, a, key: part._jitted_value(position, i, a, key),
            indices,
            arguments,
            rng_key,
        )

    def gradient(
        self, position: Array, indices: Indices, arguments: Arguments, rng_key: Array | None = None
    ) -> Array:
        """Gradient of :meth:`potential`, shape ``(d,)``."""
        return self.mean_over_shards(
            lambda part, i, a, key: part._minibatch_value_and_grad(position, i, a, key)[1],
            indices,
            arguments,
            rng_key,
        )

    def gradient_or_nan(
        self, position: Array, indices: Indices, arguments: Arguments, rng_key: Array | None = None
    ) -> Array:
        """:meth:`gradient`, NaN where the potential is not finite: it may well be zero there.

        Costs up to a quarter more, so that it is the warm-up's and not the chains'.
        """
        value, gradient = self.value_and_grad(position, indices, arguments, rng_key)
        return jnp.where(jnp.isfinite(value), gradient, jnp.nan)

    def value_and_grad(
        self, position: Array, indices: Indices, arguments: Arguments, rng_key: Array | None = None
    ) -> tuple[Array, Array]:
        """:meth:`potential` and :meth:`gradient` at once."""
        return self.mean_over_shards(
            lambda part, i, a, key: part._minibatch_value_and_grad(position, i, a, key),
            indices,
            arguments,
            rng_key,
        )

    def _minibatch_value(
        self, position: Array, indices: Indices, arguments: Arguments, rng_key: Array | None
    ) -> Array:
        weights = {p.name: p.row_weights for p in self.plates if p.included_rows}
        besides = (weights,) if weights else ()
        return self.potential_fn(self.unravel(position), indices, arguments, rng_key, *besides)

    def _minibatch_value_and_grad(
        self, position: Array, indices: Indices, arguments: Arguments, rng_key: Array | None
    ) -> tuple[Array, Array]:
        # Rows that were read ahead are known by being the very same object: no jit passes it on.
        if has_prefetched_rows(arguments):
            return self.differentiate(self._minibatch_value)(position, indices, arguments, rng_key)
        return self._jitted_value_and_grad(position, indices, arguments, rng_key)

    @cached_property
    def _jitted_value(self) -> Callable[[Array, Indices, Arguments, Array | None], Array]:
        """The potential, traced once: all programs with as many rows build on what JAX has kept."""
        return jax.jit(self._minibatch_value, inline=True)

    @cached_property
    def _jitted_value_and_grad(self) -> Callable[..., tuple[Array, Array]]:
        """Potential and gradient, likewise."""
        return jax.jit(self.differentiate(self._jitted_value), inline=True)

    def differentiate(self, fn: Callable[..., Array]) -> Callable[..., tuple[Array, Array]]:
        """A potential as its value and its gradient in the position, its first argument."""
        if not self.forward_mode_differentiation:
            return jax.value_and_grad(fn)

        def twice(position: Array, *others: Any) -> tuple[Array, Array]:
            value = fn(position, *others)
            return value, value

        def both(position: Array, *others: Any) -> tuple[Array, Array]:
            gradient, value = jax.jacfwd(twice, has_aux=True)(position, *others)
            return value, gradient

        return both

    def pointwise_potentials(
        self, position: Array, indices: Indices, arguments: Arguments
    ) -> Array:
        """What each row of the one plate adds to the potential, shape ``(rows,)``."""
        assert self.pointwise_potential_fn is not None
        return self.pointwise_potential_fn(self.unravel(position), indices, arguments)

    @cached_property
    def _variants_by_included_rows(self) -> dict[IncludedRows, Potential]:
        return {}

    def with_included_rows(self, included_rows: IncludedRows) -> Potential:
        """The same posterior with rows that are in every minibatch; the same object each time.

        Its minibatches have these rows first: it is for steps, and not for passes over all rows.

        :param included_rows: names of plates with their decisive rows in rising order.
        """
        if not included_rows:
            return self
        if included_rows not in self._variants_by_included_rows:
            rows = dict(included_rows)

            def marked(plate: Plate) -> Plate:
                return plate._replace(included_rows=rows.get(plate.name, ()))

            self._variants_by_included_rows[included_rows] = replace(
                self,
                plates=tuple(marked(p) for p in self.plates),
                plate_groups=tuple(tuple(marked(p) for p in g) for g in self.plate_groups),
            )
        return self._variants_by_included_rows[included_rows]

    def mean_over_shards(
        self,
        fn: Callable[[Potential, Indices, Arguments, Array | None], Any],
        indices: Indices,
        arguments: Arguments,
        rng_key: Array | None = None,
    ) -> Any:
        """A function linear in the minibatch potential; where rows are spread over devices, the sum
        of what each makes of its own.

        :param fn: ``(part, indices, arguments, rng_key) -> pytree``, of this target or one shard's.
        :param indices: as for :meth:`potential`; plates may be left out.
        :param arguments: the model's arguments.
        :param rng_key: key of a randomised likelihood.
        """
        if self.shards is None:
            return fn(self, indices, arguments, rng_key)
        names = [p.name for p in self.plates if p.shards is not None and p.name in indices]

        def on_shard(operands: ShardedOperands, first: Any, count: Any) -> Any:
            groups = tuple(tuple(p.for_shard(first, count) for p in g) for g in self.plate_groups)
            target = replace(self, plates=sum(groups, ()), plate_groups=groups, shards=None)
            mine = operands.local_arguments(arguments, first, count)
            key = None if rng_key is None else random.fold_in(rng_key, first)
            return fn(target, {**indices, **operands.indices}, mine, key)

        rows = {name: jnp.asarray(indices[name]) for name in names}
        return self.shards.mean_over_shards(
            on_shard, ShardedOperands.from_arguments(rows, arguments)
        )

    def select_global_values(self, z: Any) -> Any:
        """The sites of ``z`` without the local ones that it may hold."""
        local = () if self.local_latents is None else self.local_latents.names
        return {k: v for k, v in z.items() if k not in local} if local else z

    def constrain_with_locals(self, fn: Callable[[Any], Any], z: Any) -> Any:
        """``fn`` of the global sites, and the local sites that ``z`` holds, constrained."""
        if self.local_latents is None:
            return fn(z)
        return {**fn(self.select_global_values(z)), **self.local_latents.constrain(z)}

    def full_value(
        self, position: Array, arguments: Arguments, subset: Indices | None = None
    ) -> Array:
        """Potential on all rows (or on a subset that stands for all), by chunks."""
        return self._mean_over_full_data(
            lambda part, i, a: part.value(position, i, a, self._fixed_rng_key), arguments, subset
        )

    def full_gradient(
        self, position: Array, arguments: Arguments, subset: Indices | None = None
    ) -> Array:
        """Gradient on all rows (or on a subset that stands for all), by chunks; shape ``(d,)``."""
        return self._mean_over_full_data(
            lambda part, i, a: part.gradient(position, i, a, self._fixed_rng_key), arguments, subset
        )

    def full_value_grad_hessian(
        self, position: Array, arguments: Arguments, subset: Indices | None = None
    ) -> tuple[Array, Array, Array]:
        """Potential, gradient and Hessian on all rows (or on a subset), by chunks."""

        def on(
            part: Potential, indices: Indices, arguments: Arguments
        ) -> tuple[Array, Array, Array]:
            def gradient(q: Array) -> tuple[Array, tuple[Array, Array]]:
                value, slope = part.value_and_grad(q, indices, arguments, self._fixed_rng_key)
                return slope, (value, slope)

            hessian, (value, slope) = jax.jacfwd(gradient, has_aux=True)(position)
            return value, slope, hessian

        return self._mean_over_full_data(on, arguments, subset, self.dim)

    def full_hessian_products(
        self, position: Array, vectors: Array, arguments: Arguments, subset: Indices | None = None
    ) -> Array:
        """Products of the Hessian on all rows (or on a subset) with ``vectors``, ``(k, d)``."""

        def on(part: Potential, indices: Indices, arguments: Arguments) -> Array:
            def gradient(q: Array) -> Array:
                return part.gradient(q, indices, arguments, self._fixed_rng_key)

            return jax.vmap(lambda v: jax.jvp(gradient, (position,), (v,))[1])(vectors)

        return self._mean_over_full_data(on, arguments, subset, vectors.shape[0])

    @property
    def _fixed_rng_key(self) -> Array | None:
        """On all rows a randomised likelihood is taken at one fixed key."""
        return random.key(0) if self.is_stochastic else None

    def _mean_over_full_data(
        self,
        fn: Callable[[Potential, Indices, Arguments], Any],
        arguments: Arguments,
        subset: Indices | None,
        num_tangents: int = 1,
    ) -> Any:
        # A row costs its own width in memory, and its logits and such once more for each tangent.
        sizes = {p.size for p in self.plates}
        widths = [x.size // x.shape[0] for x in arguments.arrays if x.ndim and x.shape[0] in sizes]
        widths += [x.row_size for x in arguments.host_arrays] + [
            x.row_size for x in arguments.sharded_arrays
        ]
        rows = compute_chunk_size(sum(widths) + 4 * num_tangents)

        def over(part: Potential, subset: Indices, arguments: Arguments, key: Any) -> Any:
            return mean_over_chunks(
                lambda i: fn(part, i, arguments), part.plate_groups, rows, subset or None
            )

        return self.mean_over_shards(over, subset or {}, arguments)


def make_function_potential(
    potential_fn: Callable[[Any], Array], prototype: Any, forward_mode_differentiation: bool = False
) -> Potential:
    """The target of a potential function, which has no rows to choose from.

    :param potential_fn: potential of a pytree of unconstrained values.
    :param prototype: pytree of arrays (or shapes) like the values.
    :param forward_mode_differentiation: whether gradients are taken in forward mode.
    """
    zeros = jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), jnp.result_type(float)), prototype)
    flat, unravel = ravel_pytree(zeros)
    _check_potential_fn(potential_fn, zeros)
    radius = 2.0  # as NumPyro's

    return Potential(
        plates=(),
        plate_groups=(),
        dim=flat.size,
        dtype=flat.dtype,
        unravel=unravel,
        is_stochastic=False,
        potential_fn=lambda z, indices, arguments, key: potential_fn(z),
        constrain=lambda z, arguments: z,
        postprocess=lambda z, arguments: z,
        sample_init_position=lambda key, arguments: random.uniform(
            key, flat.shape, flat.dtype, -radius, radius
        ),
        init_radius=radius,
        diagnose_nonfinite=lambda q, arguments: (
            "Give `init_params` at which `potential_fn` is finite."
        ),
        sites=None,
        forward_mode_differentiation=forward_mode_differentiation,
    )


def _check_potential_fn(potential_fn: Callable, values: Any) -> None:
    """Refuse what is no function from the values to a real number."""
    try:
        found = jax.eval_shape(potential_fn, values)
    except Exception as error:
        raise InvalidArgumentError(
            "`potential_fn` must be a function that JAX can trace (no Python `if` on its values) "
            f"of values such as `init_params`, but calling it failed: {summarise_error(error)}."
        ) from error
    shape, dtype = getattr(found, "shape", None), getattr(found, "dtype", type(found).__name__)
    if shape != () or not jnp.issubdtype(dtype, jnp.floating):
        of_shape = "" if shape is None else f" of shape {shape}"
        raise InvalidArgumentError(
            f"`potential_fn` returns {dtype}{of_shape}, but must return a real number, a float of "
            "shape ()."
        )
