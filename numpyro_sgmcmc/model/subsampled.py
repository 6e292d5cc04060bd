"""A model as functions of unconstrained values, on any rows of its plates.

NumPyro's initialisation strategies, refused where they give a site what it cannot have.

Why the log density is not finite somewhere: the sites and the arguments to look at.

From what is known of a model to a :class:`~numpyro_sgmcmc.model.potential.Target`.

From a NumPyro model to a :class:`~numpyro_sgmcmc.model.potential.Target`, in three steps.

One target for all kernels on one model, so that they share what JAX has compiled for it.

A target is a static argument of compiled functions, which are compiled anew for each. A kernel
therefore takes the target that another one on the same model has, where the two are the same. The
model is read for every kernel all the same, with its refusals and warnings. A target is shared only
where the traced posterior is the same operation by operation and constant by constant, because a
model may use what it does not get as an argument: data closed over and changed in place, globals
that mean something else by now. Tracing takes some hundredths of a second, compiling seconds.
What is not seen: other things that a model does with numbers of rows that are neither a minibatch's
nor a full pass's, and changes of what the model uses while a kernel is in use. Nor does JAX itself
see that a function which it has compiled before uses a global with another value by now.

No kernel and no compiled program is kept alive by this. A target lives as long as some kernel has
it or JAX holds programs compiled for it (until ``jax.clear_caches()``, or until others have taken
their place); with it the model, and what the model closes over.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from types import MethodType
from typing import Any
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array, lax, random
from numpyro.distributions import biject_to, constraints
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import init_to_sample, init_to_uniform
from numpyro.infer.util import constrain_fn, potential_energy, transform_fn

from numpyro_sgmcmc.compilation import fingerprint_jaxpr
from numpyro_sgmcmc.data.arguments import Arguments, IdentityKey, as_jax_arrays
from numpyro_sgmcmc.data.subsampling import Indices, Plate
from numpyro_sgmcmc.errors import InvalidArgumentError, summarise_error, warn_user
from numpyro_sgmcmc.model.handlers import detect_rng_use, disable_validation, set_subsample_indices
from numpyro_sgmcmc.model.local_latents import (
    LocalLatents,
    find_local_latents,
    insert_local_values,
    resample_local_values,
)
from numpyro_sgmcmc.model.local_moves import update_local_values
from numpyro_sgmcmc.model.potential import GlobalSite, Potential
from numpyro_sgmcmc.model.trace import NO_GIBBS, GibbsConfig, ModelTrace, trace_model
from numpyro_sgmcmc.model.validation import (
    find_global_sites,
    find_plate_free_deterministics,
    validate_model,
)

__all__ = [
    "SubsampledModel",
    "build_potential",
    "diagnose_nonfinite",
    "get_model_potential",
    "get_uniform_radius",
    "make_model_potential",
    "needs_rng_key",
    "validate_init_strategy",
]


@dataclass(frozen=True, eq=False)
class SubsampledModel:
    """
    - **model** - the model, with values for all sites but the latent ones.
    - **plates** - its subsampled plates.
    - **sites** - the latent sites outside of them, in the order of their coordinates.
    - **local_latents** - the latent sites inside of them whose values stay, or None.
    - **resampled_latents** - such as are drawn anew at every evaluation, or None.
    - **dtype** - type of the coordinates.
    - **rng_key** - a key for where none is given, if the model draws random keys.
    """

    model: Callable
    plates: tuple[Plate, ...]
    sites: tuple[GlobalSite, ...]
    local_latents: LocalLatents | None
    resampled_latents: LocalLatents | None
    dtype: Any
    rng_key: Array | None = None

    @property
    def dim(self) -> int:
        """Number of coordinates."""
        return sum(s.size for s in self.sites)

    @property
    def first_indices(self) -> dict[str, np.ndarray]:
        """The first rows of each plate, as many as a minibatch has."""
        return {p.name: np.arange(p.subsample_size) for p in self.plates}

    @property
    def has_fixed_supports(self) -> bool:
        """Whether values can be constrained without a run of the model."""
        return all(s.support is not None for s in self.sites)

    def with_subsample_indices(
        self, indices: Indices, rng_key: Array | None = None, weights: Any = None
    ) -> Callable:
        """The model, its plates answered by these rows, which may weigh differently."""
        run = set_subsample_indices(self.model, lambda name, size, _: indices.get(name), weights)
        return run if rng_key is None else seed(run, rng_key)

    def unravel(self, q: Array | np.ndarray) -> dict[str, Array]:
        """The unconstrained sites of a flat position."""
        q = jnp.asarray(q)
        ends = list(accumulate(s.size for s in self.sites))
        return {
            s.name: q[end - s.size : end].reshape(s.shape)
            for s, end in zip(self.sites, ends, strict=True)
        }

    def minibatch_potential(
        self, z: Any, indices: Indices, arguments: Arguments, rng_key: Any, weights: Any = None
    ) -> Array:
        """The minibatch potential of unconstrained sites.

        :param weights: by plate, what each of its rows weighs besides.
        """
        arguments = arguments.map_arrays(jnp.asarray)
        drawn: dict[str, Array] = {}
        if self.resampled_latents is not None:
            rng_key, key = random.split(rng_key)
            given = lax.stop_gradient(self.constrain(z, arguments))
            rows = indices[self.resampled_latents.plate.name]
            drawn = resample_local_values(
                self.with_subsample_indices(indices),
                self.resampled_latents,
                given,
                rows,
                arguments,
                key,
            )
        run, z, arguments = insert_local_values(
            self.local_latents,
            self.with_subsample_indices(indices, rng_key, weights),
            z,
            indices,
            arguments,
        )
        run = substitute(run, data=drawn) if drawn else run
        run = disable_validation(run, frozenset(z))
        return potential_energy(run, arguments.args, arguments.kwargs, z)

    def pointwise_potentials(self, z: Any, indices: Indices, arguments: Arguments) -> Array:
        """What each row adds to the potential, shape ``(rows,)``, for one plate of rows."""
        (name,) = indices
        arguments = arguments.map_arrays(jnp.asarray)
        run = substitute(self.with_subsample_indices(indices), data=self.constrain(z, arguments))
        total = jnp.zeros(len(indices[name]), self.dtype)
        for site in trace(run).get_trace(*arguments.args, **arguments.kwargs).values():
            frames = [f for f in site.get("cond_indep_stack", ()) if f.name == name]
            if site["type"] == "sample" and site["is_observed"] and frames:
                of_site = site["fn"].log_prob(site["value"])
                # Without the plate's own scale; what else scales the site counts.
                scale = 1.0 if site["scale"] is None else site["scale"]
                of_site = of_site * (scale * len(total) / self.plates[0].size)
                of_site = jnp.moveaxis(of_site, frames[0].dim, 0)
                total -= of_site.reshape(len(total), -1).sum(1).astype(self.dtype)
        return total

    def evaluate_sites(self, z: Any, indices: Indices, arguments: Arguments) -> dict[str, Array]:
        """All sites' values, constrained, with the deterministic ones."""
        arguments = arguments.map_arrays(jnp.asarray)
        run, z, arguments = insert_local_values(
            self.local_latents,
            self.with_subsample_indices(indices, self.rng_key),
            z,
            indices,
            arguments,
        )
        return constrain_fn(run, arguments.args, arguments.kwargs, z, return_deterministic=True)

    def constrain(self, z: Any, arguments: Arguments) -> Any:
        """The latent sites, constrained, without a run of the model where possible."""
        if self.has_fixed_supports:
            return transform_fn({s.name: biject_to(s.support) for s in self.sites}, z)
        values = self.evaluate_sites(z, self.first_indices, arguments)
        return {s.name: values[s.name] for s in self.sites}

    def sample_conditional_prior(
        self, position: Array, indices: Indices, arguments: Arguments, rng_key: Array
    ) -> dict[str, Any]:
        """All sites' values on some rows, those inside the plate drawn given the others."""
        values = self.constrain(self.unravel(position), arguments)
        run = substitute(seed(self.with_subsample_indices(indices), rng_key), data=values)
        args, kwargs = as_jax_arrays((arguments.args, arguments.kwargs))
        return {k: s["value"] for k, s in trace(run).get_trace(*args, **kwargs).items()}

    def sample_init_position(
        self, init_strategy: Callable, rng_key: Array, arguments: Arguments
    ) -> Array:
        """A flat position by an initialisation strategy, from a run of the model."""
        arguments = arguments.map_arrays(jnp.asarray)
        run = substitute(
            seed(self.with_subsample_indices(self.first_indices), rng_key),
            substitute_fn=init_strategy,
        )
        drawn = trace(run).get_trace(*arguments.args, **arguments.kwargs)
        values = [
            biject_to(drawn[s.name]["fn"].support).inv(drawn[s.name]["value"]) for s in self.sites
        ]
        return jnp.concatenate([jnp.ravel(v).astype(self.dtype) for v in values])


def needs_rng_key(model: SubsampledModel, arguments: Arguments) -> bool:
    """Whether the potential needs a random key of its own (``numpyro.prng_key``, local values)."""
    if model.resampled_latents is not None:
        return True
    watch = detect_rng_use(lambda z, a: model.minibatch_potential(z, model.first_indices, a, None))
    zeros = np.zeros(model.dim, model.dtype)
    jax.eval_shape(lambda q, a: watch(model.unravel(q), a), zeros, arguments)
    return watch.has_requested_key


def validate_init_strategy(init_strategy: Callable) -> Callable:
    """The strategy as a function of a site, which says so where it gives what a site cannot have.

    :raises ValueError: for what is no strategy.
    """
    strategy = init_strategy
    if not isinstance(init_strategy, partial):
        try:
            strategy = init_strategy()
        except TypeError as error:
            raise InvalidArgumentError(
                "`init_strategy` must be one of NumPyro's, such as init_to_median, or a function "
                f"that returns one when called without a site, but: {summarise_error(error)}."
            ) from error
    if not callable(strategy):
        raise InvalidArgumentError(
            f"`init_strategy` returns {strategy!r} when called without a site, but must return a "
            "function of the site."
        )

    def checked(site: Any) -> Any:
        value = strategy(site)
        if value is None or site["type"] != "sample" or site["is_observed"]:
            return value
        expected = site["fn"].shape(site["kwargs"].get("sample_shape", ()))
        if np.shape(value) != expected or isinstance(value, str):
            raise InvalidArgumentError(
                f"`init_strategy` gives site '{site['name']}' a value of shape {np.shape(value)}, "
                f"but it has shape {expected}."
            )
        return value

    return strategy if get_uniform_radius(strategy) is not None else checked


def get_uniform_radius(strategy: Callable) -> float | None:
    """The radius of the uniform strategy, which needs no run of the model; None for others."""
    if isinstance(strategy, partial) and strategy.func is init_to_uniform:
        return strategy.keywords["radius"]
    return None


_MAX_DIAGNOSED_ROWS = 20_000  # of rows elsewhere, which may be more than memory holds


def diagnose_nonfinite(
    model: SubsampledModel, user_model: Callable, position: Array, arguments: Arguments
) -> str:
    """A sentence that names the sites and the arguments that are not finite.

    :param user_model: the model as the user gave it, whose signature names the arguments.
    :param position: a flat position.
    """
    culprits = _find_nonfinite_sites(model, position, arguments)
    local = model.local_latents or model.resampled_latents
    if drawn := [s.name for s in local.gibbs_sites if s.name in culprits] if local else []:
        return (
            f"`gibbs_fn` draws values of '{drawn[0]}' at which its own density is not finite "
            f"({culprits[drawn[0]]}), such as a share of exactly 0: keep them off the boundary of "
            "its support, for example by jnp.clip."
        )
    arrays = [(n, int((~jnp.isfinite(x)).sum())) for n, x in arguments.named_arrays(user_model)]
    missing = [f"{n} ({bad} of its values)" for n, bad in arrays if bad]
    found = ""
    if culprits:
        listed = ", ".join(f"'{name}' ({told})" for name, told in culprits.items())
        found = (
            f"Log density or gradient is not finite at site {listed}: look there for "
            "missing values, data outside the distribution's support, parameters out of range, or "
            "overflow. "
        )
    if missing:
        found += f"Among the arguments, not all is finite in {', '.join(missing)}."
    if found:
        return found.strip()
    way_out = "ry other init_params, or another init_strategy such as init_to_median."
    if not model.plates:
        return f"T{way_out}"
    return (
        "On all rows at once every site's log density is finite: if the model divides by something "
        "of the minibatch's own rows, such as their standard deviation, it may be zero there; "
        f"compute it before the run. Else t{way_out}"
    )


def _find_nonfinite_sites(
    model: SubsampledModel, position: Array, arguments: Arguments
) -> dict[str, str]:
    """What is wrong by the sites' names, such as how many values are not finite."""
    is_elsewhere = bool(arguments.host_arrays or arguments.sharded_arrays)
    most = _MAX_DIAGNOSED_ROWS if is_elsewhere else max((p.size for p in model.plates), default=0)
    rows = {p.name: jnp.arange(min(p.size, most)) for p in model.plates}
    z = model.unravel(position)
    values = model.constrain(z, arguments)
    run, own, arguments = insert_local_values(
        model.local_latents, model.with_subsample_indices(rows, model.rng_key), z, rows, arguments
    )
    if model.local_latents is not None:
        values = values | model.local_latents.constrain(own)
    if (local := model.resampled_latents) is not None:
        assert model.rng_key is not None
        own_rows = rows[local.plate.name]
        values |= resample_local_values(
            model.with_subsample_indices(rows), local, values, own_rows, arguments, model.rng_key
        )
    args, kwargs = as_jax_arrays((arguments.args, arguments.kwargs))
    culprits = {}
    with numpyro.validation_enabled(False):  # it would stop at the first bad value
        for name, site in trace(substitute(run, data=values)).get_trace(*args, **kwargs).items():
            if site["type"] != "sample":
                continue
            if bad := _count_nonfinite(site):
                culprits[name] = f"{bad[0]} of {bad[1]} values"
            elif wrong := _find_invalid_parameters(site["fn"]):
                culprits[name] = wrong
    return culprits


def _find_invalid_parameters(fn: Any) -> str:
    """The distribution's parameters that are out of range, as they may be with a finite density."""
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    wrong = []
    for name, constraint in fn.arg_constraints.items():
        value = getattr(fn, name, None)
        if value is None or isinstance(constraint, type(constraints.dependent)):
            continue
        if bad := int((~jnp.asarray(constraint(value))).sum()):
            wrong.append(f"`{name}` of {type(fn).__name__}: {bad} of {jnp.size(value)} values")
    return f"out of range: {', '.join(wrong)}" if wrong else ""


def _count_nonfinite(site: Any) -> tuple[int, int] | None:
    """How many of a site's log densities are not finite, of how many; None where all are."""
    log_prob = site["fn"].log_prob(site["value"])
    is_bad = ~jnp.isfinite(log_prob)
    if site["is_observed"]:  # a density may be finite outside of its support
        is_outside = ~site["fn"].support(site["value"])
        if is_outside.shape == is_bad.shape:  # a factor has no value
            is_bad |= is_outside
    bad = int(is_bad.sum())
    return (bad, log_prob.size) if bad else None


def build_potential(model_trace: ModelTrace) -> Potential:
    """The target of a model that has passed :func:`~numpyro_sgmcmc.model.validation.check`.

    :raises ValueError: for an initialisation strategy that is none.
    """
    local = find_local_latents(model_trace)
    is_kept = local is None or local.num_sweeps is None
    model = SubsampledModel(
        model=model_trace.model_with_params,
        plates=tuple(model_trace.plates.values()),
        sites=find_global_sites(model_trace),
        local_latents=local if is_kept else None,
        resampled_latents=None if is_kept else local,
        dtype=jnp.result_type(float),
    )
    is_randomized = needs_rng_key(model, model_trace.arguments)
    if is_randomized:
        model = replace(model, rng_key=random.key(0))
    shown = _select_deterministics(model_trace, model)
    strategy = validate_init_strategy(model_trace.init_strategy)
    radius = get_uniform_radius(strategy)

    def postprocess(z: Any, arguments: Arguments) -> Any:
        if model.has_fixed_supports and not shown:
            return model.constrain(z, arguments)
        values = model.evaluate_sites(z, model.first_indices, arguments)
        kept = shown.union(s.name for s in model.sites)
        return {k: v for k, v in values.items() if k in kept}

    def start(rng_key: Array, arguments: Arguments) -> Array:
        if radius is None:
            return model.sample_init_position(strategy, rng_key, arguments)
        return random.uniform(rng_key, (model.dim,), model.dtype, -radius, radius)

    def draw_start(rng_key: Array, arguments: Arguments) -> Array:
        return model.sample_init_position(init_to_sample, rng_key, arguments)

    return Potential(
        plates=model.plates,
        plate_groups=model_trace.plate_groups,
        dim=model.dim,
        dtype=model.dtype,
        unravel=model.unravel,
        is_stochastic=is_randomized,
        potential_fn=model.minibatch_potential,
        pointwise_potential_fn=model.pointwise_potentials,
        constrain=model.constrain,
        postprocess=postprocess,
        sample_init_position=start,
        init_radius=radius,
        sample_prior_position=None if radius is None else draw_start,
        diagnose_nonfinite=partial(diagnose_nonfinite, model, model_trace.model),
        sites=model.sites,
        sample_conditional_prior=model.sample_conditional_prior,
        local_latents=model.local_latents,
        host_lookups=tuple(x for x in model_trace.row_lookups if x.array.is_on_host),
        shards=model_trace.shards,
    )


def _select_deterministics(model_trace: ModelTrace, model: SubsampledModel) -> set[str]:
    """The deterministic sites that draws have; a warning names those that they have not."""
    names = {n for n, s in model_trace.traced_sites.items() if s.site_type == "deterministic"}
    if not names:
        return set()
    zeros = model.unravel(jnp.zeros(model.dim, model.dtype))
    shown = find_plate_free_deterministics(
        model_trace, lambda i, a: model.evaluate_sites(zeros, i, a), model.first_indices
    )
    if dropped := sorted(names - shown):
        warn_user(
            f"The deterministic sites {dropped} have one value a row of a subsampled plate and are "
            "left out of the draws; Predictive(kernel.model, ...) computes them for all rows."
        )
    return shown


def make_model_potential(
    model: Callable,
    arguments: Arguments,
    init_strategy: Callable,
    gibbs: GibbsConfig = NO_GIBBS,
) -> Potential:
    """Read a NumPyro model and check that it can be sampled.

    :param model: a NumPyro model.
    :param arguments: its arguments; only shapes and static values count, except where the model
        has ``param`` or ``mutable`` sites (neural networks), whose first values are kept.
    :param init_strategy: NumPyro initialisation strategy.
    :param gibbs: the user's draws of local sites.
    :return: the target.
    :raises ValueError: naming the site, plate or argument that stands in the way.
    """
    facts = trace_model(model, arguments, init_strategy, gibbs)
    validate_model(facts)
    return build_potential(facts)


_potential_cache: WeakValueDictionary[Hashable, Potential] = WeakValueDictionary()


def get_model_potential(
    model: Callable,
    arguments: Arguments,
    init_strategy: Callable,
    gibbs: GibbsConfig = NO_GIBBS,
    forward_mode_differentiation: bool = False,
) -> Potential:
    """:func:`~numpyro_sgmcmc.model.subsampled.model_target`, or one made before that is the same.

    :param forward_mode_differentiation: whether gradients are taken in forward mode.
    :raises ValueError: as there, and for a model that has no other gradient where that is wanted.
    """
    target = make_model_potential(model, arguments, init_strategy, gibbs)
    target = replace(target, forward_mode_differentiation=forward_mode_differentiation)
    try:
        key = _potential_cache_key(model, arguments, target)
        return _potential_cache.setdefault(key, target)
    except Exception as error:
        _check_reverse_mode_error(error)
        # What fails here fails again where it is used, with the words that belong there.
        return target


def _check_reverse_mode_error(error: Exception) -> None:
    """Refuse a model with a loop of unknown length, unless gradients are taken in forward mode."""
    if "Reverse-mode differentiation does not work" in str(error):
        raise InvalidArgumentError(
            "The model has a loop whose number of turns JAX does not know (`lax.while_loop`), "
            "through which gradients go forward alone: use forward_mode_differentiation=True, or "
            "`lax.scan`."
        ) from error


def _potential_cache_key(model: Callable, arguments: Arguments, potential: Potential) -> Hashable:
    """All that tells two targets apart."""
    local = potential.local_latents
    return (
        # Every access makes a new bound method, equal to the others of its object.
        model if isinstance(model, MethodType) else IdentityKey(model),
        arguments.signature,
        potential.plates,
        potential.plate_groups,
        tuple((s.name, s.shape) for s in potential.sites or ()),
        potential.dtype,
        potential.is_stochastic,
        potential.forward_mode_differentiation,
        local
        and (local.plate, *(s._replace(support=None) for s in local.hmc_sites + local.gibbs_sites)),
        local and local.gibbs_fn,
        potential.host_lookups,
        potential.shards,
        fingerprint_jaxpr(_trace_potential(potential, arguments)),
    )


def _trace_potential(potential: Potential, arguments: Arguments) -> Any:
    """Everything that a target computes and the derivatives wanted of it, traced."""
    rows = {p.name: jax.ShapeDtypeStruct((p.subsample_size,), jnp.int32) for p in potential.plates}
    position = jax.ShapeDtypeStruct((potential.dim,), potential.dtype)
    local = potential.local_latents

    def expansion(position: Array, rows: Indices, arguments: Arguments, rng_key: Any) -> Any:
        def on(part: Potential, rows: Indices, arguments: Arguments, rng_key: Any) -> Any:
            def gradient(q: Array) -> Any:
                return part.value_and_grad(q, rows, arguments, rng_key)

            return jax.jvp(gradient, (position,), (position,))

        return potential.mean_over_shards(on, rows, arguments, rng_key)

    def everything(position: Array, rows: Indices, arguments: Arguments, rng_key: Array) -> Any:
        z = potential.unravel(position)
        found = [
            expansion(position, rows, arguments, rng_key if potential.is_stochastic else None),
            potential.constrain(z, arguments),
            potential.postprocess(z, arguments),
            potential.sample_init_position(rng_key, arguments),
            # A model may do other things with other numbers of rows, as passes over all have.
            potential.full_value(position, arguments),
        ]
        if local is not None:
            own = jnp.asarray(rows[local.plate.name])
            values = local.make_zero_values().take(own)
            scale = jnp.ones_like(values.hmc_position)
            found += [
                update_local_values(potential, position, own, values, scale, arguments, rng_key),
                local.constrain(local.to_unconstrained_sites(values)),
            ]
        if local is not None and local.gibbs_sites:
            assert potential.sample_conditional_prior is not None
            found.append(potential.sample_conditional_prior(position, rows, arguments, rng_key))
        return found

    return jax.make_jaxpr(everything)(position, rows, arguments, random.key(0))
