"""From a NumPyro model to a :class:`Target`: what a sampler needs to know, on flat positions.

The model is never edited. A handler answers the model's ``plate`` statements with the rows that
the sampler wants, so that ``plate(...) as i``, ``numpyro.subsample`` and nested plates all see
them, and the plate's own scale (rows / chosen rows) makes the minibatch potential unbiased.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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
from numpyro_sgmcmc.data.blocks import Lookup, Recorder, is_on_host
from numpyro_sgmcmc.dataflow import depends_on, row_lookups
from numpyro_sgmcmc.full_data import Indices, Plate, chunk_rows, over_all_rows
from numpyro_sgmcmc.notices import notify

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
        elif msg["type"] == "subsample" and is_on_host(msg["value"]):
            _subsample_on_host(msg)


def _subsample_on_host(msg: Any) -> None:
    """Answer ``numpyro.subsample`` of an array whose rows are on the host, along its first axis."""
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
        return _rows(self.model, lambda name, size, _: jnp.arange(size))(*args, **kwargs)

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
    - **lookups** - arrays on the host that a plate's rows index, with their plates.
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
    lookups: tuple[Lookup, ...] = ()

    def potential(
        self, position: Array, indices: Indices, arguments: Arguments, rng_key: Array | None = None
    ) -> Array:
        """Minibatch potential, unbiased for the full-data potential when rows are.

        :param position: flat position, shape ``(d,)``.
        :param indices: row indices of each subsampled plate, of any number of rows.
        :param arguments: the model's arguments.
        :param rng_key: key of a randomised likelihood.
        :return: scalar.
        """
        return self.potential_of_sites(self.unravel(position), indices, arguments, rng_key)

    def gradient(
        self, position: Array, indices: Indices, arguments: Arguments, rng_key: Array | None = None
    ) -> Array:
        """Gradient of :meth:`potential`, shape ``(d,)``."""
        return jax.grad(self.potential)(position, indices, arguments, rng_key)

    def full_potential(
        self, position: Array, arguments: Arguments, subset: Indices | None = None
    ) -> Array:
        """Potential on all rows (or on a subset that stands for all), by chunks."""
        return self._on_all_rows(
            lambda i: self.potential(position, i, arguments, self._key), arguments, subset
        )

    def full_gradient(
        self, position: Array, arguments: Arguments, subset: Indices | None = None
    ) -> Array:
        """Gradient on all rows (or on a subset that stands for all), by chunks; shape ``(d,)``."""
        return self._on_all_rows(
            lambda i: self.gradient(position, i, arguments, self._key), arguments, subset
        )

    def full_expansion(
        self, position: Array, arguments: Arguments, subset: Indices | None = None
    ) -> tuple[Array, Array, Array]:
        """Potential, gradient and Hessian on all rows (or on a subset), by chunks."""

        def on(indices: Indices) -> tuple[Array, Array, Array]:
            def gradient(q: Array) -> tuple[Array, tuple[Array, Array]]:
                value, slope = jax.value_and_grad(self.potential)(q, indices, arguments, self._key)
                return slope, (value, slope)

            hessian, (value, slope) = jax.jacfwd(gradient, has_aux=True)(position)
            return value, slope, hessian

        return self._on_all_rows(on, arguments, subset, self.dim)

    def full_hessian_products(
        self, position: Array, vectors: Array, arguments: Arguments, subset: Indices | None = None
    ) -> Array:
        """Products of the Hessian on all rows (or on a subset) with ``vectors``, ``(k, d)``."""

        def on(indices: Indices) -> Array:
            def gradient(q: Array) -> Array:
                return self.gradient(q, indices, arguments, self._key)

            return jax.vmap(lambda v: jax.jvp(gradient, (position,), (v,))[1])(vectors)

        return self._on_all_rows(on, arguments, subset, vectors.shape[0])

    @property
    def _key(self) -> Array | None:
        """On all rows a randomised likelihood is taken at one fixed key."""
        return random.key(0) if self.is_randomized else None

    def _on_all_rows(
        self,
        fn: Callable[[Indices], Any],
        arguments: Arguments,
        subset: Indices | None,
        tangents: int = 1,
    ) -> Any:
        # A row costs its own width in memory, and its logits and such once more for each tangent.
        sizes = {p.size for p in self.plates}
        widths = [x.size // x.shape[0] for x in arguments.arrays if x.ndim and x.shape[0] in sizes]
        widths += [x.row_size for x in arguments.hosts]
        rows = chunk_rows(sum(widths) + 4 * tangents)
        return over_all_rows(fn, self.groups, rows, subset)


def function_target(potential_fn: Callable[[Any], Array], prototype: Any) -> Target:
    """The target of a potential function, which has no rows to choose from.

    :param potential_fn: potential of a pytree of unconstrained values.
    :param prototype: pytree of arrays (or shapes) like the values.
    """
    zeros = jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), jnp.result_type(float)), prototype)
    flat, unravel = ravel_pytree(zeros)

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


def model_target(model: Callable, arguments: Arguments, init_strategy: Callable) -> Target:
    """Read a NumPyro model and check that it can be sampled.

    :param model: a NumPyro model.
    :param arguments: its arguments; only shapes and static values count, except where the model
        has ``param`` or ``mutable`` sites (neural networks), whose first values are kept.
    :param init_strategy: NumPyro initialisation strategy.
    :return: the target.
    :raises ValueError: naming the site, plate or argument that stands in the way.
    """
    plates: dict[str, Plate] = {}

    def note(name: str, size: int, subsample_size: int) -> Array:
        is_int = isinstance(subsample_size, (int, np.integer))
        if not (is_int and 0 < subsample_size <= size):
            raise ValueError(
                f"Plate '{name}' has subsample_size={subsample_size}, but it must be an integer "
                f"between 1 and the plate's size, {size}."
            )
        plates[name] = Plate(name, size, subsample_size)
        issued[name] = jnp.arange(subsample_size)
        return issued[name]

    issued: dict[str, Array] = {}
    lookups: dict[Lookup, None] = {}

    def traced(arguments: Arguments) -> Any:
        seeded = substitute(seed(model, random.key(0)), substitute_fn=init_to_sample)
        arguments = arguments.map_arrays(jnp.asarray)
        arguments = arguments.map_hosts(lambda a: Recorder(a, issued, lookups))
        return trace(_rows(seeded, note)).get_trace(*arguments.args, **arguments.kwargs)

    seen: dict[str, Any] = {}

    sites: list[Site] = []
    refusals: list[ValueError] = []

    def abstract(arguments: Arguments) -> None:
        seen.update(traced(arguments))
        try:
            sites.extend(_latent_sites(seen, plates))
        except ValueError as error:
            refusals.append(error)

    try:
        jax.eval_shape(abstract, arguments)
    except (TypeError, ValueError) as error:
        if not plates or str(error).startswith("Plate '"):
            raise
        names = ", ".join(
            f"'{p.name}' ({p.subsample_size} of {p.size} rows)" for p in plates.values()
        )
        raise ValueError(
            f"The model cannot be run on a minibatch of the plate {names}: index every array of "
            f"rows by the plate's indices, or pass it through numpyro.subsample. ({error})"
        ) from error
    if refusals:
        raise refusals[0]
    has_state = any(s["type"] in ("param", "mutable") for s in seen.values())
    fixed = {}
    if has_state:
        concrete = traced(arguments)
        fixed = {k: s["value"] for k, s in concrete.items() if s["type"] in ("param", "mutable")}
    original, model = model, substitute(model, data=fixed)

    def with_rows(indices: Indices, rng_key: Array | None = None) -> Callable:
        bound = _rows(model, lambda name, size, _: indices.get(name))
        return bound if rng_key is None else seed(bound, rng_key)

    def potential(z: Any, indices: Indices, arguments: Arguments, rng_key: Any) -> Array:
        arguments = arguments.map_arrays(jnp.asarray)
        run = with_rows(indices, rng_key)
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
        run = with_rows(indices, key)
        arguments = arguments.map_arrays(jnp.asarray)
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

    strategy = init_strategy if isinstance(init_strategy, partial) else init_strategy()

    def start(rng_key: Array, arguments: Arguments) -> Array:
        if strategy.func is init_to_uniform:  # the model need not run
            radius = strategy.keywords["radius"]
            return random.uniform(rng_key, (dim,), dtype, -radius, radius)
        arguments = arguments.map_arrays(jnp.asarray)
        run = substitute(seed(with_rows(first_rows), rng_key), substitute_fn=strategy)
        drawn = trace(run).get_trace(*arguments.args, **arguments.kwargs)
        values = [biject_to(drawn[s.name]["fn"].support).inv(drawn[s.name]["value"]) for s in sites]
        return jnp.concatenate([jnp.ravel(v).astype(dtype) for v in values])

    def explain(position: Array, arguments: Arguments) -> str:
        # Rows on the host may be more than memory holds.
        most = (
            _EXPLAINED_ROWS
            if arguments.hosts
            else max((p.size for p in plates.values()), default=0)
        )
        every_row = {p.name: jnp.arange(min(p.size, most)) for p in plates.values()}
        args, kwargs = as_jax_arrays((arguments.args, arguments.kwargs))
        values = constrain(unravel(position), arguments)
        run = substitute(with_rows(every_row, key), data=values)
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
        lookups=tuple(lookups),
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
        if frames and site["fn"].support.is_discrete:
            raise ValueError(
                f"Site '{name}' inside the subsampled plate '{frames[0].name}' is discrete and has "
                "no data: pass them (is an argument None?), or sum it out of the likelihood."
            )
        if site["fn"].support.is_discrete:
            raise ValueError(
                f"Site '{name}' is discrete and has no gradient. Sample it in a block of its own: "
                f"Gibbs([(DiscreteGibbs(kernel.model), ['{name}']), (kernel, None)]), with "
                "Gibbs and DiscreteGibbs from numpyro.infer and kernel this kernel."
            )
        if frames:
            raise ValueError(
                f"Site '{name}' is a latent variable inside the subsampled plate "
                f"'{frames[0].name}': a minibatch would update a few of its values with the "
                "others forgotten. Move it out of the plate, integrate it out of the likelihood, "
                "or give the plate no subsample_size. If it should be observed, pass its data."
            )
        if isinstance(site["fn"], dist.Delta):
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
    if not sites:
        raise ValueError("The model has no latent site: there is nothing to sample.")
    return sorted(sites, key=lambda s: s.name)


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
    frames = [f for f in site["cond_indep_stack"] if f.name in plates]
    try:
        batch = np.broadcast_shapes(site["fn"].batch_shape, shape[: len(shape) - event_dim])
    except ValueError:
        raise ValueError(
            f"Site '{site['name']}' observes data of shape {shape}, which do not fit its "
            f"distribution's {site['fn'].batch_shape + site['fn'].event_shape}."
        ) from None
    covered = {frame.dim for frame in site["cond_indep_stack"]}
    for frame in frames:
        if any(
            size == frame.size > 1 and dim - len(batch) not in covered
            for dim, size in enumerate(batch)
        ):
            raise ValueError(
                f"Site '{site['name']}' compares every row of the plate '{frame.name}' with every "
                f"other: its data have shape {shape} and its distribution "
                f"{site['fn'].batch_shape}. Make the two agree, for example by y[:, 0]."
            )


def _groups(seen: dict[str, Any], plates: dict[str, Plate]) -> tuple[tuple[Plate, ...], ...]:
    """The plates, those that enclose a common site together."""
    groups = [{name} for name in plates]
    for site in seen.values():
        met = {f.name for f in site.get("cond_indep_stack", ()) if f.name in plates}
        joined = [g for g in groups if g & met]
        if len(joined) > 1:
            groups = [g for g in groups if not g & met] + [set().union(*joined)]
    return tuple(tuple(plates[name] for name in plates if name in g) for g in groups)


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
