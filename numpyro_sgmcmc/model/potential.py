r"""Potential energy of a posterior on flat unconstrained positions, from minibatches.

:class:`Potential` is what a sampler needs of a posterior: minibatch values and gradients, exact
values on all rows, and maps between flat positions and sites. Its subclasses evaluate a NumPyro
model (:class:`~numpyro_sgmcmc.model.subsampled.ModelPotential`) or a potential function
(:class:`FunctionPotential`).

A minibatch potential is the prior plus the negative log likelihood of the chosen rows times
(rows / chosen rows). Anything linear in it (value, gradient, Hessian) is therefore, on all rows,
the mean of its values on chunks of rows, weighted by the chunks' sizes. :func:`mean_over_chunks`
computes this in the memory of one chunk, without a second form of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce, wraps
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree

from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.row_proxies import RowLookup, ShardedOperands, has_prefetched_rows
from numpyro_sgmcmc.data.sharded_array import Shards
from numpyro_sgmcmc.data.subsampling import Indices, Plate
from numpyro_sgmcmc.errors import InvalidArgumentError, summarise_error
from numpyro_sgmcmc.model.local_latents import LocalLatents
from numpyro_sgmcmc.model.trace import LatentSite

# Bounds on the memory of a pass over all rows: numbers and rows per chunk.
_MAX_CHUNK_ELEMENTS = 2**20
_MAX_CHUNK_ROWS = 8192
# Numbers per row that a tangent adds to a chunk: logits, residuals and such.
_ELEMENTS_PER_TANGENT = 4
_INIT_RADIUS = 2.0  # NumPyro's default, for potential functions

IncludedRows = tuple[tuple[str, tuple[int, ...]], ...]
"""Names of plates, with their rows that are in every minibatch, in ascending order."""

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _jit_unless_prefetched(method: _Method) -> _Method:
    """Compile a method, traced once for all programs with the same number of rows.

    Prefetched rows are recognised by the identity of the indices, which jit does not keep: with
    these the method is not compiled by itself.
    """

    @wraps(method)
    def evaluate(self: Potential, position: Array, indices: Indices, *others: Any) -> Any:
        bound_method = method.__get__(self)
        if has_prefetched_rows(others[0]):
            return bound_method(position, indices, *others)
        if method not in self._jitted_methods:
            self._jitted_methods[method] = jax.jit(bound_method, inline=True)
        return self._jitted_methods[method](position, indices, *others)

    return cast(_Method, evaluate)


@dataclass(frozen=True, eq=False, kw_only=True)
class Potential:
    """Potential energy of a posterior on flat unconstrained positions, from minibatches.

    Objects are compared by identity and are static arguments of compiled functions.
    """

    dim: int  # number of coordinates d
    dtype: Any  # their type
    sites: tuple[LatentSite, ...] | None = None  # the global ones; None without a model
    local_latents: LocalLatents | None = None  # the sites of `gibbs_fn` that keep their values
    init_radius: float | None = None  # r where the initialisation strategy is uniform in (-r, r)
    plates: tuple[Plate, ...] = ()  # the subsampled plates
    # The same plates; those that enclose a common site are in one group.
    plate_groups: tuple[tuple[Plate, ...], ...] = ()
    host_lookups: tuple[RowLookup, ...] = ()  # host arrays that a plate's rows index
    shards: Shards | None = None  # layout of the rows over devices
    # By plate, the sites whose contribution of a row may depend on the number of rows.
    size_dependent_sites: tuple[tuple[str, tuple[str, ...]], ...] = ()
    is_stochastic: bool = False  # whether every evaluation needs a random key
    forward_mode_differentiation: bool = False  # of gradients, one coordinate at a time
    max_rows_per_chunk: int = _MAX_CHUNK_ROWS  # in passes over all rows

    # --- What subclasses define -----------------------------------------------------------------

    def unravel(self, q: Any) -> Any:
        """Return the unconstrained sites of a flat position of shape ``(d,)``."""
        raise NotImplementedError

    def minibatch_potential(
        self, z: Any, indices: Indices, arguments: Arguments, rng_key: Any, weights: Any = None
    ) -> Array:
        """Return the minibatch potential of unconstrained sites, a scalar.

        :param weights: by plate name, a weight for each chosen row besides the plate's scale; None
            for equal weights.
        """
        raise NotImplementedError

    def pointwise_potentials(
        self, position: Array, indices: Indices, arguments: Arguments
    ) -> Array:
        """Return the negative log likelihood of each row of one plate, shape ``(rows,)``."""
        raise NotImplementedError

    def constrain(self, z: Any, arguments: Arguments) -> Any:
        """Return the constrained values of unconstrained sites."""
        raise NotImplementedError

    def postprocess(self, z: Any, arguments: Arguments) -> Any:
        """Return the constrained sites and the deterministic sites that draws hold."""
        raise NotImplementedError

    def sample_conditional_prior(
        self, position: Array, indices: Indices, arguments: Arguments, rng_key: Array
    ) -> dict[str, Any]:
        """Sample the sites inside the subsampled plate given the others; return all sites."""
        raise NotImplementedError

    def diagnose_nonfinite(self, position: Array, arguments: Arguments) -> tuple[str, str]:
        """Return what is not finite at a position, such as ``": site 'y' (3 of 9 values)"``, and
        the fix of a message that ends with it.
        """
        raise NotImplementedError

    @cached_property
    def sample_init_position(self) -> Callable[[Array, Arguments], Array]:
        """Function ``(rng_key, arguments) -> position`` of the initialisation strategy.

        It is one object, so that programs compiled for it are shared.
        """
        r = self.init_radius
        assert r is not None
        return lambda rng_key, _: random.uniform(rng_key, (self.dim,), self.dtype, -r, r)

    @cached_property
    def sample_prior_position(self) -> Callable[[Array, Arguments], Array] | None:
        """Function ``(rng_key, arguments) -> position`` that samples from the prior.

        None where the user chose how to initialise, or without a model.
        """
        return None

    def is_valid_for(self, arguments: Arguments) -> bool:
        """Return whether the potential may be used with arguments of the same shapes and types."""
        return True

    # --- Minibatches ----------------------------------------------------------------------------

    @property
    def has_minibatches(self) -> bool:
        """True if a step takes some of the rows."""
        return any(p.subsample_size < p.size for p in self.plates)

    def value(
        self, position: Array, indices: Indices, arguments: Arguments, rng_key: Array | None = None
    ) -> Array:
        """Return the minibatch potential, a scalar, unbiased for the full-data potential.

        :param indices: row indices of each subsampled plate, of any number of rows; sharded plates
            take the same number from each device, in the devices' order. As many as there are rows
            are in order, if latent sites inside the plate are coordinates.
        """
        return self.mean_over_shards(
            lambda shard, *batch: shard._value(position, *batch), indices, arguments, rng_key
        )

    def rows_value(
        self, position: Array, indices: Indices, arguments: Arguments, rng_key: Array | None = None
    ) -> Array:
        """Return the part of :meth:`value` that depends on the rows; the rest is not evaluated."""
        return self.mean_over_shards(
            lambda shard, *batch: shard._rows_value(position, *batch), indices, arguments, rng_key
        )

    def rows_gradient(
        self, position: Array, indices: Indices, arguments: Arguments, rng_key: Array | None = None
    ) -> Array:
        """Return the gradient of :meth:`rows_value`, shape ``(d,)``."""
        return self._differentiate(self.rows_value)(position, indices, arguments, rng_key)[1]

    def gradient(
        self, position: Array, indices: Indices, arguments: Arguments, rng_key: Array | None = None
    ) -> Array:
        """Return the gradient of :meth:`value`, shape ``(d,)``."""
        return self.value_and_grad(position, indices, arguments, rng_key)[1]

    def value_and_grad(
        self, position: Array, indices: Indices, arguments: Arguments, rng_key: Array | None = None
    ) -> tuple[Array, Array]:
        """Return :meth:`value` and :meth:`gradient`."""
        return self.mean_over_shards(
            lambda shard, *batch: shard._value_and_grad(position, *batch),
            indices,
            arguments,
            rng_key,
        )

    def gradient_or_nan(
        self, position: Array, indices: Indices, arguments: Arguments, rng_key: Array | None = None
    ) -> Array:
        """Return :meth:`gradient`, or NaN where the potential is not finite.

        The gradient may be zero there. The check costs up to a quarter more, so that the warm-up
        uses it and the chains do not.
        """
        value, gradient = self.value_and_grad(position, indices, arguments, rng_key)
        return jnp.where(jnp.isfinite(value), gradient, jnp.nan)

    def mean_over_shards(
        self,
        fn: Callable[[Potential, Indices, Arguments, Array | None], Any],
        indices: Indices,
        arguments: Arguments,
        rng_key: Array | None = None,
    ) -> Any:
        """Return the value of a function that is linear in the minibatch potential.

        Where rows are sharded, this is the mean of its values on the shards, weighted by their
        numbers of rows.

        :param fn: ``(potential, indices, arguments, rng_key) -> pytree``, of this potential or of
            that of one shard.
        """
        if self.shards is None:
            return fn(self, indices, arguments, rng_key)
        names = [p.name for p in self.plates if p.shards is not None and p.name in indices]

        def on_shard(operands: ShardedOperands, row_offset: Any, num_rows: Any) -> Any:
            shard = self._map_plates(lambda p: p.for_shard(row_offset, num_rows), shards=None)
            local_arguments = operands.local_arguments(arguments, row_offset, num_rows)
            key = None if rng_key is None else random.fold_in(rng_key, row_offset)
            return fn(shard, {**indices, **operands.indices}, local_arguments, key)

        sharded_indices = {name: jnp.asarray(indices[name]) for name in names}
        return self.shards.mean_over_shards(
            on_shard, ShardedOperands.from_arguments(sharded_indices, arguments)
        )

    def _map_plates(self, fn: Callable[[Plate], Plate], **changes: Any) -> Potential:
        """Return this potential with ``fn`` of its plates, and other changes of its fields."""
        groups = tuple(tuple(map(fn, group)) for group in self.plate_groups)
        return replace(self, plates=tuple(map(fn, self.plates)), plate_groups=groups, **changes)

    def without_shards(self) -> Potential:
        """Return the potential as a function of rows of all shards, which one device evaluates."""
        if self.shards is None:
            return self
        return self._map_plates(lambda plate: plate._replace(shards=None), shards=None)

    def with_batch_sizes(self, batch_sizes: Mapping[str, int]) -> Potential:
        """Return this potential with other sizes of minibatches, by plate name."""
        return self._map_plates(lambda p: p._replace(subsample_size=batch_sizes[p.name]))

    def _differentiate(self, fn: Callable[..., Array]) -> Callable[..., tuple[Array, Array]]:
        """Return the function that computes a potential and its gradient in the first argument."""
        if not self.forward_mode_differentiation:
            return jax.value_and_grad(fn)

        def value_and_grad(position: Array, *batch: Any) -> tuple[Array, Array]:
            gradient, value = jax.jacfwd(lambda q: (fn(q, *batch),) * 2, has_aux=True)(position)
            return value, gradient

        return value_and_grad

    @_jit_unless_prefetched
    def _value(
        self, position: Array, indices: Indices, arguments: Arguments, rng_key: Array | None
    ) -> Array:
        weights = {p.name: p.row_weights for p in self.plates if p.included_rows}
        return self.minibatch_potential(
            self.unravel(position), indices, arguments, rng_key, weights or None
        )

    @_jit_unless_prefetched
    def _rows_value(
        self, position: Array, indices: Indices, arguments: Arguments, rng_key: Array | None
    ) -> Array:
        all_weights = {}
        for p in self.plates:
            weights = p.row_weights if p.included_rows else np.ones(indices[p.name].shape)
            all_weights[p.name] = jnp.asarray(weights, self.dtype)

        def with_weights(weights: Any) -> Array:
            z = self.unravel(position)
            return self.minibatch_potential(z, indices, arguments, rng_key, weights)

        # It is linear in the rows' weights, so that its derivative by them is its value. The other
        # sites do not depend on them.
        return jax.jvp(with_weights, (all_weights,), (all_weights,))[1]

    @_jit_unless_prefetched
    def _value_and_grad(
        self, position: Array, indices: Indices, arguments: Arguments, rng_key: Array | None
    ) -> tuple[Array, Array]:
        return self._differentiate(self._value)(position, indices, arguments, rng_key)

    @cached_property
    def _jitted_methods(self) -> dict[Callable[..., Any], Callable[..., Any]]:
        return {}

    @cached_property
    def _variants_by_included_rows(self) -> dict[IncludedRows, Potential]:
        return {}

    def with_included_rows(self, included_rows: IncludedRows) -> Potential:
        """Return this potential with rows that are in every minibatch, the same object each time.

        Minibatches have the included rows first, so that it is for steps and not for passes over
        all rows.
        """
        if not included_rows:
            return self
        if included_rows not in self._variants_by_included_rows:
            rows = dict(included_rows)
            self._variants_by_included_rows[included_rows] = self._map_plates(
                lambda plate: plate._replace(included_rows=rows.get(plate.name, ()))
            )
        return self._variants_by_included_rows[included_rows]

    # --- Local latent variables -----------------------------------------------------------------

    @property
    def local_names(self) -> tuple[str, ...]:
        """Names of the sites inside the subsampled plate that keep their values."""
        if self.local_latents is not None:
            return self.local_latents.names
        return tuple(site.name for site in self.sites or () if site.row_axis is not None)

    def select_global_values(self, z: Any) -> Any:
        """Return the sites of ``z`` without those of ``gibbs_fn`` that it may hold."""
        local = () if self.local_latents is None else self.local_latents.names
        return {k: v for k, v in z.items() if k not in local} if local else z

    def constrain_with_locals(self, fn: Callable[[Any], Any], z: Any) -> Any:
        """Return ``fn`` of the coordinates' sites, and those of ``gibbs_fn`` that ``z`` holds."""
        if self.local_latents is None:
            return fn(z)
        others = self.select_global_values(z)
        return {**fn(others), **{k: v for k, v in z.items() if k not in others}}

    # --- All rows -------------------------------------------------------------------------------

    def full_value(
        self, position: Array, arguments: Arguments, subset: Indices | None = None
    ) -> Array:
        """Return the potential on all rows, or on a subset that represents them, by chunks."""
        return self._mean_over_full_data(
            lambda shard, *batch: shard.value(position, *batch), arguments, subset
        )

    def full_gradient(
        self, position: Array, arguments: Arguments, subset: Indices | None = None
    ) -> Array:
        """Return the gradient of :meth:`full_value`, shape ``(d,)``."""
        return self._mean_over_full_data(
            lambda shard, *batch: shard.gradient(position, *batch), arguments, subset
        )

    def full_value_grad_hessian(
        self, position: Array, arguments: Arguments, subset: Indices | None = None
    ) -> tuple[Array, Array, Array]:
        """Return value, gradient and Hessian on all rows, or on a subset that represents them."""

        def on_chunk(shard: Potential, *batch: Any) -> tuple[Array, Array, Array]:
            def gradient_with_aux(q: Array) -> tuple[Array, tuple[Array, Array]]:
                value, gradient = shard.value_and_grad(q, *batch)
                return gradient, (value, gradient)

            hessian, (value, gradient) = jax.jacfwd(gradient_with_aux, has_aux=True)(position)
            return value, gradient, hessian

        return self._mean_over_full_data(on_chunk, arguments, subset, self.dim)

    def full_hessian_products(
        self, position: Array, vectors: Array, arguments: Arguments, subset: Indices | None = None
    ) -> Array:
        """Return products of the Hessian on all rows, or on a subset, with vectors ``(k, d)``."""

        def on_chunk(shard: Potential, *batch: Any) -> Array:
            def product(v: Array) -> Array:
                return jax.jvp(lambda q: shard.gradient(q, *batch), (position,), (v,))[1]

            return jax.vmap(product)(vectors)

        return self._mean_over_full_data(on_chunk, arguments, subset, vectors.shape[0])

    def compute_row_size(self, arguments: Arguments) -> int:
        """Return the numbers in a row of the data."""
        sizes = {p.size for p in self.plates}
        row_size = sum(x.size // len(x) for x in arguments.arrays if x.ndim and len(x) in sizes)
        return row_size + sum(
            x.row_size for x in (*arguments.host_arrays, *arguments.sharded_arrays)
        )

    @property
    def _fixed_rng_key(self) -> Array | None:
        """Key at which a stochastic likelihood is evaluated on all rows; None without one."""
        return random.key(0) if self.is_stochastic else None

    def _mean_over_full_data(
        self,
        fn: Callable[..., Any],
        arguments: Arguments,
        subset: Indices | None,
        num_tangents: int = 1,
    ) -> Any:
        """Return the mean over chunks of ``fn(potential, indices, arguments, rng_key)``."""
        row_size = self.compute_row_size(arguments) + _ELEMENTS_PER_TANGENT * num_tangents
        chunk_size = compute_chunk_size(row_size, self.max_rows_per_chunk)

        def on_shard(shard: Potential, subset: Indices, arguments: Arguments, key: Any) -> Any:
            def on_chunk(indices: Indices) -> Any:
                return fn(shard, indices, arguments, self._fixed_rng_key)

            return mean_over_chunks(on_chunk, shard.plate_groups, chunk_size, subset or None)

        return self.mean_over_shards(on_shard, subset or {}, arguments)


def compute_chunk_size(row_size: int, max_rows: int = _MAX_CHUNK_ROWS) -> int:
    """Return the number of rows of a chunk, for rows of ``row_size`` numbers."""
    return max(1, min(max_rows, _MAX_CHUNK_ELEMENTS // max(row_size, 1)))


def mean_over_chunks(
    fn: Callable[[Indices], Any],
    plate_groups: Sequence[Sequence[Plate]],
    max_rows_per_chunk: int,
    subset: Indices | None = None,
) -> Any:
    """Return the value on all rows of a function that is linear in the minibatch potential.

    Plates of one group enclose a common site, so that all pairs of their chunks are visited. The
    groups' contributions are additive: each group is visited with the other plates at their first
    rows, and the value at the first rows of all plates is subtracted once per further group.

    :param fn: maps indices (of any number of rows per plate) to a pytree of arrays.
    :param max_rows_per_chunk: largest number of rows of one call, over the plates of a group.
    :param subset: rows that represent all rows, by plate name; all rows where None.
    """
    if not plate_groups:
        return fn({})
    plates = [plate for group in plate_groups for plate in group]
    # A shard's number of rows may be known only when the program runs.
    sizes = {p.name: p.size if subset is None else subset[p.name].shape[0] for p in plates}

    def chunk_indices(plate: Plate, start: Any, num_rows: int) -> Array:
        positions = start + jnp.arange(num_rows)
        if subset is not None:
            return jnp.asarray(subset[plate.name])[positions]
        return plate.row_offset + positions

    def mean_over_plates(group: Sequence[Plate], indices: dict[str, Array], max_rows: int) -> Any:
        """Return the mean over the rows of these plates, the others' indices being given."""
        if not group:
            return fn(indices)
        plate, size = group[0], sizes[group[0].name]
        is_static = isinstance(size, int)
        max_size = size if is_static else plate.max_size
        chunk_size = min(max_size, max_rows)

        def weighted_chunk(start: Any, num_rows: int) -> Any:
            value = mean_over_plates(
                group[1:],
                {**indices, plate.name: chunk_indices(plate, start, num_rows)},
                max(1, max_rows // chunk_size),
            )
            return jax.tree.map(lambda x: jnp.asarray(num_rows / size, x.dtype) * x, value)

        if not is_static:
            return _sum_unknown_num_rows(weighted_chunk, size, max_size, chunk_size)
        num_chunks, remainder = divmod(size, chunk_size)
        if num_chunks == 1:
            total = weighted_chunk(0, chunk_size)
        else:
            total, _ = lax.scan(
                lambda acc, k: (_tree_add(acc, weighted_chunk(k * chunk_size, chunk_size)), None),
                _zeros_like_output(lambda: weighted_chunk(0, chunk_size)),
                jnp.arange(num_chunks),
            )
        if not remainder:
            return total
        return _tree_add(total, weighted_chunk(num_chunks * chunk_size, remainder))

    first = {}
    for p in plates:
        num_rows, size = p.subsample_size, sizes[p.name]
        num_rows = min(num_rows, size) if isinstance(size, int) else num_rows
        first[p.name] = chunk_indices(p, 0, num_rows)
    total = reduce(
        _tree_add, [mean_over_plates(group, first, max_rows_per_chunk) for group in plate_groups]
    )
    if (num_more := len(plate_groups) - 1) > 0:
        total = jax.tree.map(lambda t, s: t - num_more * s, total, fn(first))
    return total


def _sum_unknown_num_rows(
    chunk_term: Callable[[Any, int], Any], num_rows: Any, max_num_rows: int, chunk_size: int
) -> Any:
    """Return a sum over rows whose number is known only when the program runs.

    It visits chunks, then chunks of the square root of their size, then single rows. Terms beyond
    the last row are computed and left out, so that the sum can be differentiated.

    :param chunk_term: ``(start, number of rows) -> their term of the sum``.
    """
    total, start = _zeros_like_output(lambda: chunk_term(0, chunk_size)), 0
    for num in sorted({chunk_size, math.isqrt(chunk_size), 1}, reverse=True):
        count = (num_rows - start) // num

        def add(total: Any, k: Any, num: int = num, start: Any = start, count: Any = count) -> Any:
            value = chunk_term(start + k * num, num)
            return jax.tree.map(lambda t, v: t + jnp.where(k < count, v, 0), total, value), None

        total, _ = lax.scan(add, total, jnp.arange(max_num_rows // num))
        start, max_num_rows = start + count * num, num - 1
    return total


def _zeros_like_output(fn: Callable[[], Any]) -> Any:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(fn))


def _tree_add(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)


@dataclass(frozen=True, eq=False, kw_only=True)
class FunctionPotential(Potential):
    """Potential given by the user as a function of unconstrained values, without data."""

    potential_fn: Callable[[Any], Array]  # maps a pytree of unconstrained values to a scalar
    unravel_fn: Callable[[Array], Any]  # maps a flat position to the pytree

    def unravel(self, q: Any) -> Any:
        return self.unravel_fn(q)

    def minibatch_potential(
        self, z: Any, indices: Indices, arguments: Arguments, rng_key: Any, weights: Any = None
    ) -> Array:
        return self.potential_fn(z)

    def constrain(self, z: Any, arguments: Arguments) -> Any:
        return z

    def postprocess(self, z: Any, arguments: Arguments) -> Any:
        return z

    def diagnose_nonfinite(self, position: Array, arguments: Arguments) -> tuple[str, str]:
        return "", "pass `init_params` at which `potential_fn` is finite."


def make_function_potential(
    potential_fn: Callable[[Any], Array], prototype: Any, forward_mode_differentiation: bool = False
) -> FunctionPotential:
    """Return the potential of a user's function, which has no rows.

    :param prototype: pytree of arrays (or shapes) like the values.
    """
    zeros = jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), jnp.result_type(float)), prototype)
    try:
        value = jax.eval_shape(potential_fn, zeros)
    except Exception as error:
        raise InvalidArgumentError(
            f"Calling `potential_fn` failed: {summarise_error(error)}.",
            "pass a function of values such as `init_params` that JAX can trace (no Python `if` on "
            "its values).",
            "potential-fn",
        ) from error
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", type(value).__name__)
    if shape != () or not jnp.issubdtype(dtype, jnp.floating):
        shape_text = "" if shape is None else f" of shape {shape}"
        raise InvalidArgumentError(
            f"`potential_fn` returns {dtype}{shape_text}, which is not a real number.",
            "return a float of shape ().",
            "potential-fn",
        )
    flat, unravel = ravel_pytree(zeros)
    return FunctionPotential(
        dim=flat.size,
        dtype=flat.dtype,
        init_radius=_INIT_RADIUS,
        forward_mode_differentiation=forward_mode_differentiation,
        potential_fn=potential_fn,
        unravel_fn=unravel,
    )


def get_coordinate_names(potential: Potential) -> tuple[tuple[str, str], ...]:
    """Return site and name of each coordinate of a flat position."""
    return format_coordinate_names(
        jax.eval_shape(potential.unravel, jax.ShapeDtypeStruct((potential.dim,), potential.dtype))
    )


def format_coordinate_names(z: Any) -> tuple[tuple[str, str], ...]:
    """Return site and name of each coordinate, given arrays, or their shapes, by site."""
    names: list[tuple[str, str]] = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(z)[0]:
        site = str(getattr(path[0], "key", "z")) if path else "z"
        suffixes = (f"[{','.join(map(str, i))}]" if i else "" for i in np.ndindex(leaf.shape))
        names.extend((site, site + suffix) for suffix in suffixes)
    return tuple(names)
