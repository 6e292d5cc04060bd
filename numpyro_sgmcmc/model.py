"""From a NumPyro model to a :class:`Target`: what a sampler needs to know, on flat positions.

The model is never edited. A handler answers the model's ``plate`` statements with the rows that
the sampler wants, so that ``plate(...) as i``, ``numpyro.subsample`` and nested plates all see
them, and the plate's own scale (rows / chosen rows) makes the minibatch potential unbiased.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, random
from jax.flatten_util import ravel_pytree
from numpyro.distributions import biject_to
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import init_to_sample, init_to_uniform
from numpyro.infer.util import (
    constrain_fn,
    potential_energy,
    transform_fn,
)
from numpyro.primitives import _PYRO_STACK, Messenger

from numpyro_sgmcmc.arguments import Arguments, as_jax_arrays
from numpyro_sgmcmc.data.blocks import Lookup, Recorder, is_elsewhere
from numpyro_sgmcmc.data.host import HostArray
from numpyro_sgmcmc.data.sharded import LocalRows, ShardedArray, Shards
from numpyro_sgmcmc.dataflow import depends_on, row_lookups
from numpyro_sgmcmc.full_data import Indices, Plate, chunk_rows, over_all_rows
from numpyro_sgmcmc.locals.sites import LocalSites, bind, local_sites
from numpyro_sgmcmc.notices import notify
from numpyro_sgmcmc.refusals import check_rows_of_sites, failure, first_line

__all__ = ["FullDataModel", "Target", "function_target", "model_target", "prior_draws"]

_EXPLAINED_ROWS = 20_000
_WHOLE_BYTES = 2**30


class _rows(Messenger):
    """Handler that answers each subsampled plate with ``choose(name, size, subsample_size)``.

    ``choose`` may return None to leave a plate alone.
    """

    def __init__(self, fn: Any, choose: Callable[[str, int, int], Any]) -> None:
        self.choose = choose
        super().__init__(fn)

    def process_message(self, msg: Any) -> None:
        if msg["type"] == "plate" and msg["value"] is None:
            size, subsample_size = msg["args"]
            rows = self.choose(msg["name"], size, subsample_size)
            if rows is not None:
                # The very same object, by which rows that have been read are known.
                msg["value"] = rows if isinstance(rows, Array) else jnp.asarray(rows)
                msg["args"] = (size, rows.shape[0])
        elif msg["type"] == "subsample" and is_elsewhere(msg["value"]):
            _subsample_elsewhere(msg)


def _subsample_elsewhere(msg: Any) -> None:
    """Answer ``numpyro.subsample`` of an array whose rows are elsewhere, along its first axis."""
    data, event_dim = msg["value"], msg["kwargs"]["event_dim"]
    for plate in _PYRO_STACK:
        if isinstance(plate, numpyro.plate) and len(data.shape) == event_dim - plate.dim:
            if len(data) != plate.size:
                raise ValueError(
                    f"The plate '{plate.name}' has size {plate.size}, but {data!r}, which is "
                    f"subsampled in it, has {len(data)} rows. Make the two agree."
                )
            msg["value"] = data[plate._indices]
            msg["type"] = "subsampled"  # so that the plate does not do it again
            return


class _key_watch(Messenger):
    """Handler that notes whether the model asks for a random key."""

    asked = False

    def process_message(self, msg: Any) -> None:
        if msg["type"] == "prng_key" and msg["value"] is None:
            self.asked = True
            msg["value"] = random.key(0)


class FullDataModel:
    """The model with every plate at its full size: what ArviZ, ``log_likelihood`` and
    :class:`~numpyro.infer.gibbs.DiscreteGibbs` should see.

    Two views of one model are equal, so that blocks of ``Gibbs`` can share it.

    :param model: a NumPyro model.
    """

    def __init__(self, model: Callable) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for host in Arguments(args, kwargs).hosts:
            num_bytes = len(host) * max(host.row_size, 1) * host.dtype.itemsize
            if num_bytes > _WHOLE_BYTES:
                raise ValueError(
                    f"The model on all rows would load all of {host!r}, {num_bytes / 1e9:.1f} GB, "
                    "into memory: numpyro_sgmcmc.log_likelihood goes by chunks, and "
                    "az.from_dict takes the draws of mcmc.get_samples(group_by_chain=True)."
                )
        args, kwargs = as_jax_arrays((args, kwargs))
        run = _rows(self.model, lambda name, size, _: jnp.arange(size))
        try:
            return run(*args, **kwargs)
        except AssertionError as error:
            if str(error):
                raise
            # A bare assertion is NumPyro's for a site without a value and without a key.
            raise ValueError(
                "A latent site of the model has no value, and there is no random key to draw one. "
                "Draws hold latent sites inside the subsampled plate with collect_locals=True "
                "alone; without them there is no log likelihood, and ArviZ can be told so: "
                "az.from_numpyro(mcmc, log_likelihood=False)."
            ) from error

    def on_rows(self, indices: Indices) -> Callable:
        """The model on some rows of each plate.

        :param indices: rows by plate name; plates that are not named are left alone.
        """
        return _rows(self.model, lambda name, size, _: indices.get(name))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FullDataModel) and self.model == other.model

    def __hash__(self) -> int:
        return hash((FullDataModel, self.model))


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
    - **potential_of_sites** - ``(z, indices, arguments, rng_key) -> potential``.
    - **constrain** - ``(z, arguments) -> constrained sites``, without a model run where possible.
    - **postprocess** - the same with the deterministic sites that do not vary with the rows.
    - **start** - ``(rng_key, arguments) -> position`` by the initialisation strategy.
    - **explain** - ``(position, arguments) -> sentence`` naming the sites that are not finite.
    - **sites** - the latent sites in the order of their coordinates; None without a model.
    - **draw_prior** - ``(position, indices, arguments, rng_key) -> values`` of the sites inside the
      subsampled plate, drawn given the others.
    - **lookups** - arrays on the host that a plate's rows index, with their plates.
    - **shards** - which device holds which rows, if rows are spread over devices.
    - **locals** - the latent sites inside the subsampled plate; None where there are none.
    """

    plates: tuple[Plate, ...]
    groups: tuple[tuple[Plate, ...], ...]
    dim: int
    dtype: Any
    unravel: Callable[[Array], Any]
    is_randomized: bool
    potential_of_sites: Callable[[Any, Indices, Arguments, Array | None], Array]
    constrain: Callable[[Any, Arguments], Any]
    postprocess: Callable[[Any, Arguments], Any]
    start: Callable[[Array, Arguments], Array]
    explain: Callable[[Array, Arguments], str]
    sites: tuple[Site, ...] | None
    draw_prior: Callable[[Array, Indices, Arguments, Array], Any] | None = None
    lookups: tuple[Lookup, ...] = ()
    shards: Shards | None = None
    locals: LocalSites | None = None

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
            lambda here, i, a, key: here.potential_of_sites(here.unravel(position), i, a, key),
            indices,
            arguments,
            rng_key,
        )

    def gradient(
        self, position: Array, indices: Indices, arguments: Arguments, rng_key: Array | None = None
    ) -> Array:
        """Gradient of :meth:`potential`, shape ``(d,)``."""
        return self.over_shards(
            lambda here, i, a, key: jax.grad(here.potential)(position, i, a, key),
            indices,
            arguments,
            rng_key,
        )

    def over_shards(
        self,
        fn: Callable[[Target, Indices, Arguments, Array | None], Any],
        indices: Indices,
        arguments: Arguments,
        rng_key: Array | None = None,
    ) -> Any:
        """A function linear in the minibatch potential; where rows are spread over devices, the sum
        of what each makes of its own.

        :param fn: ``(target, indices, arguments, rng_key) -> pytree``.
        :param indices: as for :meth:`potential`; plates may be left out.
        :param arguments: the model's arguments.
        :param rng_key: key of a randomised likelihood.
        """
        if self.shards is None:
            return fn(self, indices, arguments, rng_key)
        names = [p.name for p in self.plates if p.shards is not None and p.name in indices]

        def here(operands: Any, first: Any, count: Any) -> Any:
            rows, arrays = operands
            groups = tuple(tuple(p.of_shard(first, count) for p in g) for g in self.groups)
            target = replace(self, plates=sum(groups, ()), groups=groups, shards=None)
            its = iter(arrays)
            mine = arguments.map_sharded(lambda whole: LocalRows(whole, next(its), first))
            key = None if rng_key is None else random.fold_in(rng_key, first)
            return fn(target, {**indices, **rows}, mine, key)

        arrays = [x.array for x in arguments.sharded]
        rows = {name: jnp.asarray(indices[name]) for name in names}
        return self.shards.average(here, (rows, arrays))

    def with_constrained_locals(self, fn: Callable[[Any], Any], z: Any) -> Any:
        """``fn`` of the global sites, and the local sites that ``z`` holds, constrained."""
        if self.locals is None:
            return fn(z)
        own = {k: v for k, v in z.items() if k in self.locals.names}
        others = {k: v for k, v in z.items() if k not in own}
        return {**fn(others), **self.locals.constrain(own)}

    def full_potential(
        self, position: Array, arguments: Arguments, subset: Indices | None = None
    ) -> Array:
        """Potential on all rows (or on a subset that stands for all), by chunks."""
        return self._on_all_rows(
            lambda here, i, a: here.potential(position, i, a, self._key), arguments, subset
        )

    def full_gradient(
        self, position: Array, arguments: Arguments, subset: Indices | None = None
    ) -> Array:
        """Gradient on all rows (or on a subset that stands for all), by chunks; shape ``(d,)``."""
        return self._on_all_rows(
            lambda here, i, a: here.gradient(position, i, a, self._key), arguments, subset
        )

    def full_expansion(
        self, position: Array, arguments: Arguments, subset: Indices | None = None
    ) -> tuple[Array, Array, Array]:
        """Potential, gradient and Hessian on all rows (or on a subset), by chunks."""

        def on(here: Target, indices: Indices, arguments: Arguments) -> tuple[Array, Array, Array]:
            def gradient(q: Array) -> tuple[Array, tuple[Array, Array]]:
                value, slope = jax.value_and_grad(here.potential)(q, indices, arguments, self._key)
                return slope, (value, slope)

            hessian, (value, slope) = jax.jacfwd(gradient, has_aux=True)(position)
            return value, slope, hessian

        return self._on_all_rows(on, arguments, subset, self.dim)

    def full_hessian_products(
        self, position: Array, vectors: Array, arguments: Arguments, subset: Indices | None = None
    ) -> Array:
        """Products of the Hessian on all rows (or on a subset) with ``vectors``, ``(k, d)``."""

        def on(here: Target, indices: Indices, arguments: Arguments) -> Array:
            def gradient(q: Array) -> Array:
                return here.gradient(q, indices, arguments, self._key)

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

        def over(here: Target, subset: Indices, arguments: Arguments, key: Any) -> Any:
            return over_all_rows(
                lambda i: fn(here, i, arguments), here.groups, rows, subset or None
            )

        return self.over_shards(over, subset or {}, arguments)


def function_target(potential_fn: Callable[[Any], Array], prototype: Any) -> Target:
    """The target of a potential function, which has no rows to choose from.

    :param potential_fn: potential of a pytree of unconstrained values.
    :param prototype: pytree of arrays (or shapes) like the values.
    """
    zeros = jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), jnp.result_type(float)), prototype)
    flat, unravel = ravel_pytree(zeros)
    _check_potential(potential_fn, zeros)

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
        start=lambda key, arguments: random.uniform(key, flat.shape, flat.dtype, -2.0, 2.0),
        explain=lambda q, arguments: "Give `init_params` at which `potential_fn` is finite.",
        sites=None,
    )


def _check_potential(potential_fn: Callable, values: Any) -> None:
    """Refuse what is no function from the values to a real number."""
    try:
        found = jax.eval_shape(potential_fn, values)
    except Exception as error:
        raise ValueError(
            "`potential_fn` must be a function that JAX can trace (no Python `if` on its values) "
            f"of values such as `init_params`, but calling it failed: {first_line(error)}."
        ) from error
    shape, dtype = getattr(found, "shape", None), getattr(found, "dtype", type(found).__name__)
    if shape != () or not jnp.issubdtype(dtype, jnp.floating):
        of_shape = "" if shape is None else f" of shape {shape}"
        raise ValueError(
            f"`potential_fn` returns {dtype}{of_shape}, but must return a real number, a float of "
            "shape ()."
        )


def model_target(
    model: Callable,
    arguments: Arguments,
    init_strategy: Callable,
    gibbs_fn: Callable | None = None,
    gibbs_sites: tuple[str, ...] = (),
) -> Target:
    """Read a NumPyro model and check that it can be sampled.

    :param model: a NumPyro model.
    :param arguments: its arguments; only shapes and static values count, except where the model
        has ``param`` or ``mutable`` sites (neural networks), whose first values are kept.
    :param init_strategy: NumPyro initialisation strategy.
    :param gibbs_fn: the user's draws of local sites, or None.
    :param gibbs_sites: names of those sites.
    :return: the target.
    :raises ValueError: naming the site, plate or argument that stands in the way.
    """
    plates: dict[str, Plate] = {}

    def note(name: str, size: int, subsample_size: int) -> Array:
        is_int = isinstance(subsample_size, (int, np.integer))
        is_int = is_int and not isinstance(subsample_size, bool)
        if not (is_int and 0 < subsample_size <= size):
            raise ValueError(
                f"Plate '{name}' has subsample_size={subsample_size}, but it must be an integer "
                f"between 1 and the plate's size, {size}."
            )
        if name in plates and plates[name].size != size:
            raise ValueError(
                f"Plate '{name}' has size {plates[name].size} in one place of the model and {size} "
                "in another: give the two different names."
            )
        plates[name] = Plate(name, size, subsample_size)
        issued[name] = jnp.arange(subsample_size)
        return issued[name]

    spread = arguments.sharded
    issued: dict[str, Array] = {}
    lookups: dict[Lookup, None] = {}

    def traced(arguments: Arguments) -> Any:
        seeded = substitute(seed(model, random.key(0)), substitute_fn=init_to_sample)
        arguments = arguments.map_arrays(jnp.asarray)
        arguments = arguments.map_hosts(lambda a: Recorder(a, issued, lookups))
        given = iter(spread)
        arguments = arguments.map_sharded(lambda a: Recorder(a, issued, lookups, next(given)))
        return trace(_rows(seeded, note)).get_trace(*arguments.args, **arguments.kwargs)

    seen: dict[str, Any] = {}

    sites: list[Site] = []
    found_locals: list[LocalSites | None] = []
    refusals: list[ValueError] = []

    def abstract(arguments: Arguments) -> None:
        seen.update(traced(arguments))
        try:
            found_locals.append(local_sites(seen, plates, gibbs_fn, gibbs_sites))
            sites.extend(_latent_sites(seen, plates))
        except ValueError as error:
            refusals.append(error)

    try:
        jax.eval_shape(abstract, arguments)
    except Exception as error:
        if str(error).startswith(("Plate '", "The plate '", "ShardedArray(")):
            raise
        plain = failure(error, model, arguments, lambda: _fails_on_all_rows(model, arguments))
        if plain is error or (plain is None and not plates):
            raise
        if plain is not None:
            raise plain from error
        names = ", ".join(
            f"'{p.name}' ({p.subsample_size} of {p.size} rows)" for p in plates.values()
        )
        raise ValueError(
            f"The model cannot be run on a minibatch of the plate {names}: index every array of "
            "rows by the plate's indices, or pass it through numpyro.subsample. "
            f"({first_line(error)})"
        ) from error
    if refusals:
        raise refusals[0]
    (local,) = found_locals
    shards = _shards_of(spread, lookups)
    if shards is not None:
        for lookup in lookups:
            plates[lookup.plate] = _spread_plate(plates[lookup.plate], lookup.array, shards)
        if local is not None:
            raise ValueError(
                f"Site '{local.names[0]}' is latent inside the subsampled plate, which is not "
                "supported where rows are spread over devices: pass arrays that all devices have."
            )
    has_state = any(s["type"] in ("param", "mutable") for s in seen.values())
    fixed = {}
    if has_state:
        concrete = traced(arguments)
        fixed = {k: s["value"] for k, s in concrete.items() if s["type"] in ("param", "mutable")}
    original, model = model, substitute(model, data=fixed)

    def from_the_prior(indices: Indices, arguments: Arguments) -> Any:
        """The model's trace on these rows."""
        arguments = arguments.map_arrays(jnp.asarray)
        seeded = substitute(seed(model, random.key(0)), substitute_fn=init_to_sample)
        chosen = _rows(seeded, lambda name, size, _: indices.get(name))
        return trace(chosen).get_trace(*arguments.args, **arguments.kwargs)

    check_rows_of_sites(from_the_prior, plates.values(), arguments)

    def with_rows(indices: Indices, rng_key: Array | None = None) -> Callable:
        bound = _rows(model, lambda name, size, _: indices.get(name))
        return bound if rng_key is None else seed(bound, rng_key)

    def potential(z: Any, indices: Indices, arguments: Arguments, rng_key: Any) -> Array:
        arguments = arguments.map_arrays(jnp.asarray)
        run, z, arguments = bind(local, with_rows(indices, rng_key), z, indices, arguments)
        return potential_energy(run, arguments.args, arguments.kwargs, z)

    first_rows = {p.name: np.arange(p.subsample_size) for p in plates.values()}
    dtype = jnp.result_type(float)
    dim = sum(s.size for s in sites)
    flat = np.zeros(dim, dtype)

    def unravel(q: Array | np.ndarray) -> dict[str, Array]:
        q = jnp.asarray(q)
        ends = list(accumulate(s.size for s in sites))
        return {
            s.name: q[end - s.size : end].reshape(s.shape)
            for s, end in zip(sites, ends, strict=True)
        }

    watch = _key_watch(lambda z, a: potential(z, first_rows, a, None))

    def checked(indices: Indices, q: Array, arguments: Arguments) -> Array:
        return watch(unravel(q), arguments)

    jax.eval_shape(checked, first_rows, flat, arguments)
    key = random.key(0) if watch.asked else None
    _check_row_lengths(
        original, lambda i, a: potential(unravel(flat), i, a, key), plates, arguments, lookups
    )

    transforms = {s.name: biject_to(s.support) for s in sites if s.support is not None}
    is_dynamic = len(transforms) < len(sites)

    def replay(z: Any, arguments: Arguments, indices: Indices) -> Any:
        arguments = arguments.map_arrays(jnp.asarray)
        run, z, arguments = bind(local, with_rows(indices, key), z, indices, arguments)
        return constrain_fn(run, arguments.args, arguments.kwargs, z, return_deterministic=True)

    kept = {s.name for s in sites} | _row_free_deterministics(
        seen, plates, lambda i, a: replay(unravel(flat), a, i), first_rows, arguments
    )

    def postprocess(z: Any, arguments: Arguments) -> Any:
        if not is_dynamic and len(kept) == len(sites):
            return transform_fn(transforms, z)
        values = replay(z, arguments, first_rows)
        return {k: v for k, v in values.items() if k in kept}

    def constrain(z: Any, arguments: Arguments) -> Any:
        if not is_dynamic:
            return transform_fn(transforms, z)
        values = replay(z, arguments, first_rows)
        return {s.name: values[s.name] for s in sites}

    strategy = _strategy(init_strategy)

    def start(rng_key: Array, arguments: Arguments) -> Array:
        if isinstance(strategy, partial):  # the uniform one: the model need not run
            radius = strategy.keywords["radius"]
            return random.uniform(rng_key, (dim,), dtype, -radius, radius)
        arguments = arguments.map_arrays(jnp.asarray)
        run = substitute(seed(with_rows(first_rows), rng_key), substitute_fn=strategy)
        drawn = trace(run).get_trace(*arguments.args, **arguments.kwargs)
        values = [biject_to(drawn[s.name]["fn"].support).inv(drawn[s.name]["value"]) for s in sites]
        return jnp.concatenate([jnp.ravel(v).astype(dtype) for v in values])

    def draw_prior(position: Array, indices: Indices, arguments: Arguments, rng_key: Array) -> Any:
        values = constrain(unravel(position), arguments)
        run = substitute(seed(with_rows(indices), rng_key), data=values)
        args, kwargs = as_jax_arrays((arguments.args, arguments.kwargs))
        return {k: s["value"] for k, s in trace(run).get_trace(*args, **kwargs).items()}

    def explain(position: Array, arguments: Arguments) -> str:
        # Rows elsewhere may be more than memory holds.
        most = (
            _EXPLAINED_ROWS
            if arguments.hosts or arguments.sharded
            else max((p.size for p in plates.values()), default=0)
        )
        every_row = {p.name: jnp.arange(min(p.size, most)) for p in plates.values()}
        values = constrain(unravel(position), arguments)
        run, own, arguments = bind(local, with_rows(every_row, key), {}, every_row, arguments)
        args, kwargs = as_jax_arrays((arguments.args, arguments.kwargs))
        run = substitute(run, data=values if local is None else values | local.constrain(own))
        culprits = []
        with numpyro.validation_enabled(False):  # it would stop at the first bad value
            for name, site in trace(run).get_trace(*args, **kwargs).items():
                if site["type"] == "sample":
                    log_prob = site["fn"].log_prob(site["value"])
                    is_bad = ~jnp.isfinite(log_prob)
                    if site["is_observed"]:  # a density may be finite outside of its support
                        is_outside = ~site["fn"].support(site["value"])
                        if is_outside.shape == is_bad.shape:  # a factor has no value
                            is_bad |= is_outside
                    bad = int(is_bad.sum())
                    if bad:
                        culprits.append(f"'{name}' ({bad} of {log_prob.size} values)")
        arrays = [(n, int((~jnp.isfinite(x)).sum())) for n, x in arguments.named_arrays(original)]
        missing = [f"{n} ({bad} of its values)" for n, bad in arrays if bad]
        found = ""
        if culprits:
            found = (
                f"The log density is not finite at site {', '.join(culprits)}: look there for "
                "missing values, data outside the distribution's support, or overflow. "
            )
        if missing:
            found += f"Among the arguments, not all is finite in {', '.join(missing)}."
        default = "Try other init_params, or another init_strategy such as init_to_median."
        return found.strip() or default

    return Target(
        plates=tuple(plates.values()),
        groups=_groups(seen, plates),
        dim=dim,
        dtype=dtype,
        unravel=unravel,
        is_randomized=watch.asked,
        potential_of_sites=potential,
        constrain=constrain,
        postprocess=postprocess,
        start=start,
        explain=explain,
        sites=tuple(sites),
        draw_prior=draw_prior,
        locals=local,
        lookups=tuple(x for x in lookups if isinstance(x.array, HostArray)),
        shards=shards,
    )


def _latent_sites(seen: dict[str, Any], plates: dict[str, Plate]) -> list[Site]:
    """The latent sites, each checked to be one that a gradient-based sampler can move."""
    sites = []
    for name, site in seen.items():
        if site["type"] != "sample":
            continue
        frames = [f for f in site["cond_indep_stack"] if f.name in plates]
        if site["is_observed"]:
            _check_observed(site, plates)
            continue
        if frames:
            continue  # a local site
        if site["fn"].support.is_discrete:
            raise ValueError(
                f"Site '{name}' is discrete and has no gradient. Sample it in a block of its own: "
                f"Gibbs([(DiscreteGibbs(kernel.model), ['{name}']), (kernel, None)]), with "
                "Gibbs and DiscreteGibbs from numpyro.infer and kernel this kernel."
            )
        if _is_delta(site["fn"]):
            raise ValueError(
                f"Site '{name}' has a delta distribution; use numpyro.deterministic instead."
            )
        support = site["fn"].support
        try:
            transform = biject_to(support)
            shape = jnp.shape(transform.inv(site["value"]))
        except NotImplementedError as error:
            raise ValueError(
                f"Site '{name}' has support {support}, which has no map to unconstrained space; "
                "reparametrise the site."
            ) from error
        # An array among the support's bounds may be another site's value or come from the data.
        is_static = all(isinstance(x, (int, float)) for x in jax.tree.leaves(support))
        sites.append(Site(name, shape, support if is_static else None))
    if not sum(s.size for s in sites):
        if any(s["type"] == "sample" and not s["is_observed"] for s in seen.values()):
            raise ValueError(
                "All latent sites of the model are inside the subsampled plate: its rows are "
                "independent posteriors, and minibatches save nothing. Use NUTS on each."
            )
        raise ValueError("The model has no latent site: there is nothing to sample.")
    return sorted(sites, key=lambda s: s.name)


def _is_delta(fn: Any) -> bool:
    """Whether a distribution, whatever it is wrapped in, has all its mass at one point."""
    while not isinstance(fn, dist.Delta) and hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return isinstance(fn, dist.Delta)


def _fails_on_all_rows(model: Callable, arguments: Arguments) -> bool:
    """Whether the model fails without a minibatch as well."""

    def run(arguments: Arguments) -> None:
        seeded = substitute(seed(model, random.key(0)), substitute_fn=init_to_sample)
        arguments = arguments.map_arrays(jnp.asarray)
        FullDataModel(seeded)(*arguments.args, **arguments.kwargs)

    try:
        jax.eval_shape(run, arguments)
    except Exception:
        return True
    return False


def _strategy(init_strategy: Callable) -> Callable:
    """An initialisation strategy that says so where it gives a site what it cannot have."""
    strategy = init_strategy
    if not isinstance(init_strategy, partial):
        try:
            strategy = init_strategy()
        except TypeError as error:
            raise ValueError(
                "`init_strategy` must be one of NumPyro's, such as init_to_median, or a function "
                f"that returns one when called without a site, but: {first_line(error)}."
            ) from error
    if not callable(strategy):
        raise ValueError(
            f"`init_strategy` returns {strategy!r} when called without a site, but must return a "
            "function of the site."
        )

    def checked(site: Any) -> Any:
        value = strategy(site)
        if value is None or site["type"] != "sample" or site["is_observed"]:
            return value
        expected = site["fn"].shape(site["kwargs"].get("sample_shape", ()))
        if np.shape(value) != expected or isinstance(value, str):
            raise ValueError(
                f"`init_strategy` gives site '{site['name']}' a value of shape {np.shape(value)}, "
                f"but it has shape {expected}."
            )
        return value

    return checked if getattr(strategy, "func", None) is not init_to_uniform else strategy


def _check_observed(site: Any, plates: dict[str, Plate]) -> None:
    """Whether an observed site inside subsampled plates has the minibatch's rows."""
    event_dim = len(site["fn"].event_shape)
    shape = jnp.shape(site["value"])
    for frame in site["cond_indep_stack"]:
        if frame.name in plates and len(shape) >= event_dim - frame.dim:
            rows = shape[frame.dim - event_dim]
            if rows not in (1, frame.size):
                raise ValueError(
                    f"Site '{site['name']}' observes {rows} rows where the plate '{frame.name}' "
                    f"has a minibatch of {frame.size}: index the data by the plate's indices."
                )
    try:
        np.broadcast_shapes(site["fn"].batch_shape, shape[: len(shape) - event_dim])
    except ValueError:
        raise ValueError(
            f"Site '{site['name']}' observes data of shape {shape}, which do not fit its "
            f"distribution's {site['fn'].batch_shape + site['fn'].event_shape}."
        ) from None


def _groups(seen: dict[str, Any], plates: dict[str, Plate]) -> tuple[tuple[Plate, ...], ...]:
    """The plates, those that enclose a common site together."""
    groups = [{name} for name in plates]
    for site in seen.values():
        met = {f.name for f in site.get("cond_indep_stack", ()) if f.name in plates}
        joined = [g for g in groups if g & met]
        if len(joined) > 1:
            groups = [g for g in groups if not g & met] + [set().union(*joined)]
    return tuple(tuple(plates[name] for name in plates if name in g) for g in groups)


def _shards_of(arrays: list[ShardedArray], lookups: Iterable[Lookup]) -> Shards | None:
    """Which device holds which rows, the same for all arrays that are spread over devices."""
    if not arrays:
        return None
    for array in arrays:
        if not any(lookup.array is array for lookup in lookups):
            raise ValueError(
                f"{array!r} is not indexed by a subsampled plate's indices: index it, or pass an "
                "array that all devices have."
            )
    shards = {x.shards for x in arrays}
    if len(shards) > 1:
        listed = ", ".join(f"{x!r} with {list(x.shards.counts)} rows" for x in arrays)
        raise ValueError(
            f"All arrays that are spread over devices must be so in the same way, but there are "
            f"{listed} over meshes {[x.shards.mesh.shape for x in arrays]}."
        )
    return shards.pop()


def _spread_plate(plate: Plate, array: Any, shards: Shards) -> Plate:
    """A plate whose rows are spread over devices, each with an equal part of a minibatch."""
    if not isinstance(array, ShardedArray):
        raise ValueError(
            f"The plate '{plate.name}' indexes {array!r} and rows that are spread over devices: "
            "make all of its arrays ShardedArrays."
        )
    num = len(shards.counts)
    part = -(-plate.subsample_size // num)
    if part > min(shards.counts):
        raise ValueError(
            f"Plate '{plate.name}' has subsample_size={plate.subsample_size}, {part} rows for each "
            f"of {num} devices, but one of them has only {min(shards.counts)}: use at most "
            f"{num * min(shards.counts)}."
        )
    if num * part != plate.subsample_size and plate.shards is None:
        notify(
            f"Plate '{plate.name}' has subsample_size={plate.subsample_size}, which does not "
            f"divide among {num} devices: each takes {part} rows, {num * part} in all."
        )
    return plate._replace(subsample_size=num * part, shards=shards)


def _check_row_lengths(
    model: Callable,
    fn: Callable[[Indices, Arguments], Array],
    plates: dict[str, Plate],
    arguments: Arguments,
    lookups: Iterable[Lookup],
) -> None:
    """Whether every array that a plate's indices look up has the plate's number of rows."""
    if not plates:
        return
    for host, plate in lookups:
        if len(host) != plates[plate].size:
            raise ValueError(
                f"The plate '{plate}' has size {plates[plate].size}, but {host!r}, which it "
                f"indexes, has {len(host)} rows. Make the two agree."
            )
    rows = {p.name: np.arange(p.subsample_size) for p in plates.values()}
    jaxpr = jax.make_jaxpr(fn)(rows, arguments).jaxpr
    by_var = dict(zip(jaxpr.invars, sorted(plates), strict=False))
    named = [name for name, _ in arguments.named_arrays(model)]
    arrays = dict(zip(jaxpr.invars[len(plates) :], named, strict=True))
    for plate, length, array in row_lookups(jaxpr, by_var, arrays):
        size = plates[plate].size
        if length != size:
            raise ValueError(
                f"The plate '{plate}' has size {size}, but {array or 'an array'} that it indexes "
                f"has {length} rows. Make the two agree: JAX would read other rows without a word."
            )


def _row_free_deterministics(
    seen: dict[str, Any],
    plates: dict[str, Plate],
    values: Callable[[Indices, Arguments], dict[str, Array]],
    rows: Indices,
    arguments: Arguments,
) -> set[str]:
    """Deterministic sites that are the same for every minibatch; the others are left out."""
    names = [k for k, s in seen.items() if s["type"] == "deterministic"]
    outside = [k for k in names if not any(f.name in plates for f in seen[k]["cond_indep_stack"])]
    if outside and plates:
        jaxpr = jax.make_jaxpr(lambda i, a: [values(i, a)[k] for k in outside])(rows, arguments)
        varies = depends_on(jaxpr, len(plates))
        outside = [k for k, v in zip(outside, varies, strict=True) if not v]
    dropped = sorted(set(names) - set(outside))
    if dropped:
        notify(
            f"The deterministic sites {dropped} have one value a row of a subsampled plate and are "
            "left out of the draws; Predictive(kernel.model, ...) computes them for all rows."
        )
    return set(outside)


def prior_draws(model: Callable, arguments: Arguments, names: list[str]) -> dict[str, Array]:
    """Draws from the prior for the named sites, as values to condition on."""
    args, kwargs = as_jax_arrays((arguments.args, arguments.kwargs))
    seeded = substitute(seed(model, random.key(0)), substitute_fn=init_to_sample)
    seen = trace(_rows(seeded, lambda name, size, num: jnp.arange(num))).get_trace(*args, **kwargs)
    return {name: jnp.asarray(seen[name]["value"]) for name in names}
