"""From a NumPyro model to a :class:`~numpyro_sgmcmc.posterior.target.Target`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array, random
from numpyro.distributions import biject_to
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import init_to_sample, init_to_uniform
from numpyro.infer.util import (
    constrain_fn,
    potential_energy,
    transform_fn,
)

from numpyro_sgmcmc.checks import first_line
from numpyro_sgmcmc.data.arguments import Arguments, as_jax_arrays
from numpyro_sgmcmc.data.host import HostArray
from numpyro_sgmcmc.data.plates import Indices, Plate
from numpyro_sgmcmc.data.stand_ins import Lookup, Recorder
from numpyro_sgmcmc.posterior.handlers import FullDataModel, choose_rows, key_watch
from numpyro_sgmcmc.posterior.locals.sites import LocalSites, bind, local_sites
from numpyro_sgmcmc.posterior.plates import check_row_lengths, plate_groups, shards_of, spread_plate
from numpyro_sgmcmc.posterior.refusals import check_rows_of_sites, failure
from numpyro_sgmcmc.posterior.sites import latent_sites, row_free_deterministics
from numpyro_sgmcmc.posterior.target import Site, Target

__all__ = ["model_target"]

_EXPLAINED_ROWS = 20_000


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
                f"Plate '{name}' has subsample_size={subsample_size!r}, but it must be an integer "
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
        return trace(choose_rows(seeded, note)).get_trace(*arguments.args, **arguments.kwargs)

    seen: dict[str, Any] = {}

    sites: list[Site] = []
    found_locals: list[LocalSites | None] = []
    refusals: list[ValueError] = []

    def abstract(arguments: Arguments) -> None:
        seen.update(traced(arguments))
        try:
            found_locals.append(local_sites(seen, plates, gibbs_fn, gibbs_sites))
            sites.extend(latent_sites(seen, plates))
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
    shards = shards_of(spread, lookups)
    if shards is not None:
        for lookup in lookups:
            plates[lookup.plate] = spread_plate(plates[lookup.plate], lookup.array, shards)
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
        chosen = choose_rows(seeded, lambda name, size, _: indices.get(name))
        return trace(chosen).get_trace(*arguments.args, **arguments.kwargs)

    check_rows_of_sites(from_the_prior, plates.values(), arguments)

    def with_rows(indices: Indices, rng_key: Array | None = None) -> Callable:
        bound = choose_rows(model, lambda name, size, _: indices.get(name))
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

    watch = key_watch(lambda z, a: potential(z, first_rows, a, None))

    def checked(indices: Indices, q: Array, arguments: Arguments) -> Array:
        return watch(unravel(q), arguments)

    jax.eval_shape(checked, first_rows, flat, arguments)
    key = random.key(0) if watch.asked else None
    check_row_lengths(
        original, lambda i, a: potential(unravel(flat), i, a, key), plates, arguments, lookups
    )

    transforms = {s.name: biject_to(s.support) for s in sites if s.support is not None}
    is_dynamic = len(transforms) < len(sites)

    def replay(z: Any, arguments: Arguments, indices: Indices) -> Any:
        arguments = arguments.map_arrays(jnp.asarray)
        run, z, arguments = bind(local, with_rows(indices, key), z, indices, arguments)
        return constrain_fn(run, arguments.args, arguments.kwargs, z, return_deterministic=True)

    kept = {s.name for s in sites} | row_free_deterministics(
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
        groups=plate_groups(seen, plates),
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
