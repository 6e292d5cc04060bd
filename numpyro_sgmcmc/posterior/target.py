"""What a sampler needs to know of a posterior, on flat positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random
from jax.flatten_util import ravel_pytree

from numpyro_sgmcmc.checks import Refusal, first_line
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.plates import Indices, Plate
from numpyro_sgmcmc.data.shards import Shards
from numpyro_sgmcmc.data.stand_ins import IndexedArray, Spread, has_rows_read
from numpyro_sgmcmc.posterior.all_rows import chunk_rows, over_all_rows
from numpyro_sgmcmc.posterior.locals.sites import LocalSites

__all__ = ["Decisive", "Site", "Target", "function_target"]

Decisive = tuple[tuple[str, tuple[int, ...]], ...]
"""Names of plates, with their rows that are in every minibatch, in rising order."""


class Site(NamedTuple):
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
class Target:
    """A posterior over a flat unconstrained position, known through minibatches.

    - **plates** - the subsampled plates.
    - **groups** - the same, those that meet at a site together.
    - **dim** - number of coordinates d.
    - **dtype** - their type.
    - **unravel** - maps a flat position of shape ``(d,)`` to the unconstrained sites.
    - **is_randomized** - whether the potential needs a key of its own at every evaluation.
    - **potential_of_sites** - ``(z, indices, arguments, rng_key, weights) -> potential``; the last
      by plate what each of its rows weighs besides, left out where all weigh the same.
    - **constrain** - ``(z, arguments) -> constrained sites``, without a model run where possible.
    - **postprocess** - the same with the deterministic sites that do not vary with the rows.
    - **start** - ``(rng_key, arguments) -> position`` by the initialisation strategy.
    - **start_radius** - of this strategy where all coordinates are uniform in ``(-r, r)``, or None.
    - **explain** - ``(position, arguments) -> sentence`` naming the sites that are not finite.
    - **sites** - the latent sites in the order of their coordinates; None without a model.
    - **draw_prior** - ``(position, indices, arguments, rng_key) -> values`` of the sites inside the
      subsampled plate, drawn given the others.
    - **lookups** - arrays on the host that a plate's rows index, with their plates.
    - **shards** - which device holds which rows, if rows are spread over devices.
    - **locals** - the latent sites inside the subsampled plate; None where there are none.
    - **start_by_prior** - ``(rng_key, arguments) -> position`` drawn from the prior; None where the
      user says how to start.
    - **potentials_of_rows** - ``(z, indices, arguments) -> what each row adds to the potential``,
      for one plate; None without a model.
    - **is_forward** - whether gradients are taken in forward mode, a coordinate at a time.
    """

    plates: tuple[Plate, ...]
    groups: tuple[tuple[Plate, ...], ...]
    dim: int
    dtype: Any
    unravel: Callable[[Array], Any]
    is_randomized: bool
    potential_of_sites: Callable[..., Array]
    constrain: Callable[[Any, Arguments], Any]
    postprocess: Callable[[Any, Arguments], Any]
    start: Callable[[Array, Arguments], Array]
    explain: Callable[[Array, Arguments], str]
    sites: tuple[Site, ...] | None
    start_radius: float | None = None
    draw_prior: Callable[[Array, Indices, Arguments, Array], Any] | None = None
    lookups: tuple[IndexedArray, ...] = ()
    shards: Shards | None = None
    locals: LocalSites | None = None
    start_by_prior: Callable[[Array, Arguments], Array] | None = None
    potentials_of_rows: Callable[[Any, Indices, Arguments], Array] | None = None
    is_forward: bool = False

    def potential(
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
        return self.over_shards(
            lambda part, i, a, key: part._traced(position, i, a, key), indices, arguments, rng_key
        )

    def gradient(
        self, position: Array, indices: Indices, arguments: Arguments, rng_key: Array | None = None
    ) -> Array:
        """Gradient of :meth:`potential`, shape ``(d,)``."""
        return self.over_shards(
            lambda part, i, a, key: part._with_gradient(position, i, a, key)[1],
            indices,
            arguments,
            rng_key,
        )

    def honest_gradient(
        self, position: Array, indices: Indices, arguments: Arguments, rng_key: Array | None = None
    ) -> Array:
        """:meth:`gradient`, NaN where the potential is not finite: it may well be zero there.

        Costs up to a quarter more, so that it is the warm-up's and not the chains'.
        """
        value, gradient = self.potential_and_gradient(position, indices, arguments, rng_key)
        return jnp.where(jnp.isfinite(value), gradient, jnp.nan)

    def potential_and_gradient(
        self, position: Array, indices: Indices, arguments: Arguments, rng_key: Array | None = None
    ) -> tuple[Array, Array]:
        """:meth:`potential` and :meth:`gradient` at once."""
        return self.over_shards(
            lambda part, i, a, key: part._with_gradient(position, i, a, key),
            indices,
            arguments,
            rng_key,
        )

    def _potential(self, position: Array, i: Indices, a: Arguments, key: Array | None) -> Array:
        weights = {p.name: p.weights for p in self.plates if p.decisive}
        besides = (weights,) if weights else ()
        return self.potential_of_sites(self.unravel(position), i, a, key, *besides)

    def _with_gradient(
        self, position: Array, i: Indices, a: Arguments, key: Array | None
    ) -> tuple[Array, Array]:
        # Rows that were read ahead are known by being the very same object: no jit passes it on.
        if has_rows_read(a):
            return self.value_and_gradient(self._potential)(position, i, a, key)
        return self._traced_with_gradient(position, i, a, key)

    @cached_property
    def _traced(self) -> Callable[[Array, Indices, Arguments, Array | None], Array]:
        """The potential, traced once: all programs with as many rows build on what JAX has kept."""
        return jax.jit(self._potential, inline=True)

    @cached_property
    def _traced_with_gradient(self) -> Callable[..., tuple[Array, Array]]:
        """Potential and gradient, likewise."""
        return jax.jit(self.value_and_gradient(self._traced), inline=True)

    def value_and_gradient(self, fn: Callable[..., Array]) -> Callable[..., tuple[Array, Array]]:
        """A potential as its value and its gradient in the position, its first argument."""
        if not self.is_forward:
            return jax.value_and_grad(fn)

        def twice(position: Array, *others: Any) -> tuple[Array, Array]:
            value = fn(position, *others)
            return value, value

        def both(position: Array, *others: Any) -> tuple[Array, Array]:
            gradient, value = jax.jacfwd(twice, has_aux=True)(position, *others)
            return value, gradient

        return both

    def row_potentials(self, position: Array, indices: Indices, arguments: Arguments) -> Array:
        """What each row of the one plate adds to the potential, shape ``(rows,)``."""
        assert self.potentials_of_rows is not None
        return self.potentials_of_rows(self.unravel(position), indices, arguments)

    @cached_property
    def _variants(self) -> dict[Decisive, Target]:
        return {}

    def with_decisive(self, decisive: Decisive) -> Target:
        """The same posterior with rows that are in every minibatch; the same object each time.

        Its minibatches have these rows first: it is for steps, and not for passes over all rows.

        :param decisive: names of plates with their decisive rows in rising order.
        """
        if not decisive:
            return self
        if decisive not in self._variants:
            rows = dict(decisive)

            def marked(plate: Plate) -> Plate:
                return plate._replace(decisive=rows.get(plate.name, ()))

            self._variants[decisive] = replace(
                self,
                plates=tuple(marked(p) for p in self.plates),
                groups=tuple(tuple(marked(p) for p in g) for g in self.groups),
            )
        return self._variants[decisive]

    def over_shards(
        self,
        fn: Callable[[Target, Indices, Arguments, Array | None], Any],
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

        def on_shard(operands: Spread, first: Any, count: Any) -> Any:
            groups = tuple(tuple(p.of_shard(first, count) for p in g) for g in self.groups)
            target = replace(self, plates=sum(groups, ()), groups=groups, shards=None)
            mine = operands.on_device(arguments, first, count)
            key = None if rng_key is None else random.fold_in(rng_key, first)
            return fn(target, {**indices, **operands.rows}, mine, key)

        rows = {name: jnp.asarray(indices[name]) for name in names}
        return self.shards.average(on_shard, Spread.of(rows, arguments))

    def globals_among(self, z: Any) -> Any:
        """The sites of ``z`` without the local ones that it may hold."""
        local = () if self.locals is None else self.locals.names
        return {k: v for k, v in z.items() if k not in local} if local else z

    def with_constrained_locals(self, fn: Callable[[Any], Any], z: Any) -> Any:
        """``fn`` of the global sites, and the local sites that ``z`` holds, constrained."""
        if self.locals is None:
            return fn(z)
        return {**fn(self.globals_among(z)), **self.locals.constrain(z)}

    def full_potential(
        self, position: Array, arguments: Arguments, subset: Indices | None = None
    ) -> Array:
        """Potential on all rows (or on a subset that stands for all), by chunks."""
        return self._on_all_rows(
            lambda part, i, a: part.potential(position, i, a, self._key), arguments, subset
        )

    def full_gradient(
        self, position: Array, arguments: Arguments, subset: Indices | None = None
    ) -> Array:
        """Gradient on all rows (or on a subset that stands for all), by chunks; shape ``(d,)``."""
        return self._on_all_rows(
            lambda part, i, a: part.gradient(position, i, a, self._key), arguments, subset
        )

    def full_expansion(
        self, position: Array, arguments: Arguments, subset: Indices | None = None
    ) -> tuple[Array, Array, Array]:
        """Potential, gradient and Hessian on all rows (or on a subset), by chunks."""

        def on(part: Target, indices: Indices, arguments: Arguments) -> tuple[Array, Array, Array]:
            def gradient(q: Array) -> tuple[Array, tuple[Array, Array]]:
                value, slope = part.potential_and_gradient(q, indices, arguments, self._key)
                return slope, (value, slope)

            hessian, (value, slope) = jax.jacfwd(gradient, has_aux=True)(position)
            return value, slope, hessian

        return self._on_all_rows(on, arguments, subset, self.dim)

    def full_hessian_products(
        self, position: Array, vectors: Array, arguments: Arguments, subset: Indices | None = None
    ) -> Array:
        """Products of the Hessian on all rows (or on a subset) with ``vectors``, ``(k, d)``."""

        def on(part: Target, indices: Indices, arguments: Arguments) -> Array:
            def gradient(q: Array) -> Array:
                return part.gradient(q, indices, arguments, self._key)

            return jax.vmap(lambda v: jax.jvp(gradient, (position,), (v,))[1])(vectors)

        return self._on_all_rows(on, arguments, subset, vectors.shape[0])

    @property
    def _key(self) -> Array | None:
        """On all rows a randomised likelihood is taken at one fixed key."""
        return random.key(0) if self.is_randomized else None

    def _on_all_rows(
        self,
        fn: Callable[[Target, Indices, Arguments], Any],
        arguments: Arguments,
        subset: Indices | None,
        tangents: int = 1,
    ) -> Any:
        # A row costs its own width in memory, and its logits and such once more for each tangent.
        sizes = {p.size for p in self.plates}
        widths = [x.size // x.shape[0] for x in arguments.arrays if x.ndim and x.shape[0] in sizes]
        widths += [x.row_size for x in arguments.hosts] + [x.row_size for x in arguments.sharded]
        rows = chunk_rows(sum(widths) + 4 * tangents)

        def over(part: Target, subset: Indices, arguments: Arguments, key: Any) -> Any:
            return over_all_rows(
                lambda i: fn(part, i, arguments), part.groups, rows, subset or None
            )

        return self.over_shards(over, subset or {}, arguments)


def function_target(
    potential_fn: Callable[[Any], Array], prototype: Any, is_forward: bool = False
) -> Target:
    """The target of a potential function, which has no rows to choose from.

    :param potential_fn: potential of a pytree of unconstrained values.
    :param prototype: pytree of arrays (or shapes) like the values.
    :param is_forward: whether gradients are taken in forward mode.
    """
    zeros = jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), jnp.result_type(float)), prototype)
    flat, unravel = ravel_pytree(zeros)
    _refuse_no_potential(potential_fn, zeros)
    radius = 2.0  # as NumPyro's

    return Target(
        plates=(),
        groups=(),
        dim=flat.size,
        dtype=flat.dtype,
        unravel=unravel,
        is_randomized=False,
        potential_of_sites=lambda z, indices, arguments, key: potential_fn(z),
        constrain=lambda z, arguments: z,
        postprocess=lambda z, arguments: z,
        start=lambda key, arguments: random.uniform(key, flat.shape, flat.dtype, -radius, radius),
        start_radius=radius,
        explain=lambda q, arguments: "Give `init_params` at which `potential_fn` is finite.",
        sites=None,
        is_forward=is_forward,
    )


def _refuse_no_potential(potential_fn: Callable, values: Any) -> None:
    """Refuse what is no function from the values to a real number."""
    try:
        found = jax.eval_shape(potential_fn, values)
    except Exception as error:
        raise Refusal(
            "`potential_fn` must be a function that JAX can trace (no Python `if` on its values) "
            f"of values such as `init_params`, but calling it failed: {first_line(error)}."
        ) from error
    shape, dtype = getattr(found, "shape", None), getattr(found, "dtype", type(found).__name__)
    if shape != () or not jnp.issubdtype(dtype, jnp.floating):
        of_shape = "" if shape is None else f" of shape {shape}"
        raise Refusal(
            f"`potential_fn` returns {dtype}{of_shape}, but must return a real number, a float of "
            "shape ()."
        )
