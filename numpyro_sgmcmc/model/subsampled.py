"""Potentials of NumPyro models.

:func:`make_model_potential` traces the model, checks that it can be sampled with minibatches, and
builds a :class:`ModelPotential`, which evaluates the model on any rows of its plates.

:func:`get_model_potential` shares one potential between all kernels on one model, and with it what
JAX has compiled: a potential is a static argument of compiled functions. The model is traced and
checked for every kernel all the same, which takes hundredths of a second, compiling seconds. A
potential is shared only where the traced posterior is the same, operation by operation and constant
by constant, because a model may use more than its arguments: arrays that it closes over and that
change in place, or globals. Not detected are differences at other numbers of rows than those of a
minibatch and of a pass over all rows, and changes while a kernel is in use.

The cache keeps no kernel and no compiled program alive. A potential, with the model and what the
model closes over, lives as long as a kernel has it or JAX has programs compiled for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MethodType
from typing import Any
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array, lax, random
from numpyro.distributions import biject_to, constraints
from numpyro.handlers import seed, substitute
from numpyro.infer import init_to_sample, init_to_uniform
from numpyro.infer.util import _unconstrain_params, constrain_fn, potential_energy, transform_fn

from numpyro_sgmcmc.compilation import fingerprint_jaxpr
from numpyro_sgmcmc.data.arguments import Arguments, IdentityKey
from numpyro_sgmcmc.data.subsampling import Indices
from numpyro_sgmcmc.errors import (
    DroppedSiteWarning,
    InvalidArgumentError,
    InvalidModelError,
    summarise_error,
    warn_user,
)
from numpyro_sgmcmc.jaxpr import find_dependent_outputs
from numpyro_sgmcmc.model.enumeration import EnumeratedSites, compute_log_densities
from numpyro_sgmcmc.model.handlers import (
    detect_rng_use,
    disable_validation,
    set_subsample_indices,
    trace_run,
)
from numpyro_sgmcmc.model.local_latents import (
    LocalLatents,
    find_local_latents,
    insert_local_values,
    resample_local_values,
)
from numpyro_sgmcmc.model.local_moves import update_local_values
from numpyro_sgmcmc.model.numpy_values import NumPyArgumentsModel
from numpyro_sgmcmc.model.potential import Potential
from numpyro_sgmcmc.model.trace import (
    NO_GIBBS,
    GibbsConfig,
    LatentSite,
    ModelTrace,
    get_base_distribution,
    is_fixed_support,
    site_slices,
    trace_model,
)
from numpyro_sgmcmc.model.validation import validate_model

# A bound on memory: of host and sharded arrays as many rows are searched for values not finite.
_MAX_DIAGNOSED_ROWS = 20_000
# Coordinates from which on gradients of sites are joined. A step of a hierarchy with 800,000 is 12%
# faster, but a small model takes 3% longer to its first result.
_MIN_DIM_TO_SPLIT = 20_000


def make_model_potential(
    model: Callable, arguments: Arguments, init_strategy: Callable, gibbs: GibbsConfig = NO_GIBBS
) -> ModelPotential:
    """Trace a NumPyro model, check that it can be sampled, and return its potential.

    The parameters are those of :func:`~numpyro_sgmcmc.model.trace.trace_model`.
    """
    model_trace = trace_model(model, arguments, init_strategy, gibbs)
    size_dependent_sites = validate_model(model_trace)
    potential = build_potential(model_trace)
    return replace(potential, size_dependent_sites=tuple(size_dependent_sites.items()))


def build_potential(model_trace: ModelTrace) -> ModelPotential:
    """Return the potential of a model that has passed
    :func:`~numpyro_sgmcmc.model.validation.validate_model`.
    """
    local_latents = find_local_latents(model_trace)
    plates, plate_groups = tuple(model_trace.plates.values()), model_trace.plate_groups
    sites = []
    for site in model_trace.sample_sites:
        shape, row_axis = site.unconstrained_shape, None
        is_by_gibbs_fn = local_latents is not None and site.name in local_latents.names
        if not (site.is_global or (site.is_local and not is_by_gibbs_fn)):
            continue
        assert shape is not None
        if site.is_local:
            # Every step takes all rows, because it moves the values of all of them.
            plates = tuple(p._replace(subsample_size=p.size) for p in plates)
            plate_groups, row_axis = (plates,), site.row_axis
            shape = (*shape[:row_axis], plates[0].size, *shape[row_axis + 1 :])
        support = site.support if is_fixed_support(site.support) else None
        sites.append(LatentSite(site.name, shape, support, row_axis))
    keeps_values = local_latents is None or local_latents.num_sweeps is None
    init_strategy, init_radius = _validate_init_strategy(model_trace.init_strategy)
    potential = ModelPotential(
        dim=sum(s.size for s in sites),
        dtype=jnp.result_type(float),
        sites=tuple(sorted(sites, key=lambda s: s.name)),
        local_latents=local_latents if keeps_values else None,
        resampled_latents=None if keeps_values else local_latents,
        enumerated_sites=model_trace.enumerated_sites,
        init_strategy=init_strategy,
        init_radius=init_radius,
        plates=plates,
        plate_groups=plate_groups,
        host_lookups=tuple(x for x in model_trace.row_lookups if x.array.is_on_host),
        shards=model_trace.shards,
        model=model_trace.model_with_params,
        user_model=model_trace.model,
    )
    potential = replace(potential, is_stochastic=_needs_rng_key(potential, model_trace.arguments))
    return replace(potential, deterministics=_select_deterministics(model_trace, potential))


def _needs_rng_key(potential: ModelPotential, arguments: Arguments) -> bool:
    """Return whether an evaluation needs a random key (``numpyro.prng_key``, local values)."""
    if potential.resampled_latents is not None:
        return True
    watch = detect_rng_use(
        lambda q, a: potential.minibatch_potential(
            potential.unravel(q), potential.first_indices, a, None
        )
    )
    jax.eval_shape(watch, np.zeros(potential.dim, potential.dtype), arguments)
    return watch.has_requested_key


def _select_deterministics(model_trace: ModelTrace, potential: ModelPotential) -> frozenset[str]:
    """Return the deterministic sites that draws hold: those that are equal for every minibatch.

    A warning names the others.
    """
    sites = {n: s for n, s in model_trace.traced_sites.items() if s.site_type == "deterministic"}
    kept = [name for name, site in sites.items() if not site.plates]
    if kept and potential.has_minibatches:
        zeros = potential.unravel(jnp.zeros(potential.dim, potential.dtype))

        def evaluate(indices: Indices, arguments: Arguments) -> list[Array]:
            values = potential.evaluate_sites(zeros, indices, arguments)
            return [values[name] for name in kept]

        indices = potential.first_indices
        jaxpr = jax.make_jaxpr(evaluate)(indices, model_trace.arguments)
        is_dependent = find_dependent_outputs(jaxpr, len(indices))
        kept = [name for name, varies in zip(kept, is_dependent, strict=True) if not varies]
    if dropped := sorted(sites.keys() - set(kept)):
        warn_user(
            f"Deterministic sites {dropped} depend on the minibatch and are left out of the draws.",
            DroppedSiteWarning,
            "compute them for all rows by Predictive(kernel.model, mcmc.get_samples()).",
            "dropped-deterministic-sites",
        )
    return frozenset(kept)


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelPotential(Potential):
    """Potential of a NumPyro model."""

    sites: tuple[LatentSite, ...]
    model: Callable  # the model, with values for all sites but the latent ones
    # the model as the user gave it, perhaps with NumPy arguments; its signature names the arguments
    user_model: Callable
    init_strategy: Callable  # initialisation strategy, a function of a site
    # the latent sites inside the subsampled plate that every evaluation samples anew, or None
    resampled_latents: LocalLatents | None = None
    # the discrete sites that are summed out of each row, or None
    enumerated_sites: EnumeratedSites | None = None
    deterministics: frozenset[str] = frozenset()  # names of the deterministic sites that draws hold

    @property
    def first_indices(self) -> dict[str, np.ndarray]:
        """Indices of the first rows of each plate, as many as a minibatch has."""
        return {p.name: np.arange(p.subsample_size) for p in self.plates}

    @property
    def has_fixed_supports(self) -> bool:
        """True if values can be constrained without a run of the model."""
        return all(s.support is not None for s in self.sites)

    def is_valid_for(self, arguments: Arguments) -> bool:
        model = self.user_model
        return not isinstance(model, NumPyArgumentsModel) or model.has_values_of(arguments)

    def _on_rows(
        self, indices: Indices, rng_key: Array | None = None, weights: Any = None
    ) -> Callable:
        """Return the model on chosen rows; ``weights`` as in :meth:`minibatch_potential`.

        Enumerated sites are in state 0.
        """
        model: Callable = set_subsample_indices(self.model, indices, weights)
        if self.enumerated_sites is not None:
            model = self.enumerated_sites.fix_states(model, indices)
        return model if rng_key is None else seed(model, rng_key)

    def _with_locals(
        self, model: Callable, z: Any, indices: Indices, arguments: Arguments
    ) -> tuple[Callable, Arguments]:
        """Return the model with kept local values of ``gibbs_fn`` in place, and the arguments."""
        arguments = arguments.map_arrays(jnp.asarray)
        return insert_local_values(self.local_latents, model, z, indices, arguments)

    def take_rows(self, values: Mapping[str, Any], rows: Any) -> dict[str, Any]:
        """Return values of sites, with those of some rows at the sites inside the plate."""
        axes = {s.name: s.row_axis for s in self.sites if s.row_axis is not None}
        return {
            name: jnp.take(x, rows, axes[name]) if name in axes else x for name, x in values.items()
        }

    def _take_minibatch(self, values: Any, indices: Indices) -> Any:
        """Return values of sites for the rows of an evaluation; all rows are in order."""
        if all(s.row_axis is None for s in self.sites):
            return values
        (plate,) = self.plates
        rows = indices[plate.name]
        return values if len(rows) == plate.size else self.take_rows(values, jnp.asarray(rows))

    def _resample_locals(
        self, global_values: Any, indices: Indices, arguments: Arguments, rng_key: Any
    ) -> dict[str, Array]:
        """Return new values of the local sites that are not kept, if there are such."""
        if (local := self.resampled_latents) is None:
            return {}
        rows = indices[local.plate.name]
        model = self._on_rows(indices)
        return resample_local_values(model, local, global_values, rows, arguments, rng_key)

    def unravel(self, q: Array | np.ndarray) -> dict[str, Array]:
        q, slices = jnp.asarray(q), site_slices(self.sites)
        if self.dim < _MIN_DIM_TO_SPLIT:
            return {s.name: q[slices[s.name]].reshape(s.shape) for s in self.sites}
        # The derivative of a split joins the sites' gradients; that of slices pads and adds them.
        parts = lax.split(q, [s.size for s in self.sites])
        return {s.name: x.reshape(s.shape) for s, x in zip(self.sites, parts, strict=True)}

    def minibatch_potential(
        self, z: Any, indices: Indices, arguments: Arguments, rng_key: Any, weights: Any = None
    ) -> Array:
        arguments = arguments.map_arrays(jnp.asarray)
        resampled: dict[str, Array] = {}
        if self.resampled_latents is not None:
            rng_key, resample_key = random.split(rng_key)
            global_values = lax.stop_gradient(self.constrain(z, arguments))
            resampled = self._resample_locals(global_values, indices, arguments, resample_key)
        # Weights of rows whose states are summed out multiply their sums, not the terms.
        weights, sites = dict(weights or {}), self.enumerated_sites
        row_weights = None if sites is None else weights.pop(sites.plate, None)
        model = self._on_rows(indices, rng_key, weights)
        z = self._take_minibatch(z, indices)
        model, arguments = self._with_locals(model, z, indices, arguments)
        model = disable_validation(substitute(model, data=resampled), frozenset(z))
        if sites is None:
            return potential_energy(model, arguments.args, arguments.kwargs, z)
        num_rows = len(indices[sites.plate])
        total, rows = compute_log_densities(
            _unconstrain_params(model, z), sites, num_rows, arguments
        )
        if row_weights is not None:
            rows *= jnp.asarray(row_weights, rows.dtype)
        return -(total + sites.plate_size / num_rows * rows.sum())

    def _differentiate(self, fn: Callable[..., Array]) -> Callable[..., tuple[Array, Array]]:
        if (sites := self.enumerated_sites) is None:
            return super()._differentiate(fn)

        # NumPyro bounds a probability of 0 by the smallest float, whose inverse times the plate's
        # scale overflows: the derivative of a state that is impossible would be 0 times infinity.
        def scaled_value_and_grad(
            position: Array, indices: Indices, *others: Any
        ) -> tuple[Array, Array]:
            scale = sites.plate_size / len(indices[sites.plate])
            differentiate = super(ModelPotential, self)._differentiate
            unscaled = differentiate(lambda *batch: fn(*batch) / scale)(position, indices, *others)
            return scale * unscaled[0], scale * unscaled[1]

        return scaled_value_and_grad

    def pointwise_potentials(
        self, position: Array, indices: Indices, arguments: Arguments
    ) -> Array:
        ((name, rows),) = indices.items()
        plate_size = next(p.size for p in self.plates if p.name == name)
        values = self.constrain(self.unravel(position), arguments)
        values = self._take_minibatch(values, indices)
        if (sites := self.enumerated_sites) is not None and sites.plate == name:
            model = substitute(self._on_rows(indices), data=values)
            return -compute_log_densities(model, sites, len(rows), arguments)[1].astype(self.dtype)
        total = jnp.zeros(len(rows), self.dtype)
        for site in trace_run(self._on_rows(indices), arguments, values).values():
            frames = [f for f in site.get("cond_indep_stack", ()) if f.name == name]
            if site["type"] == "sample" and site["is_observed"] and frames:
                # Without the plate's own scale; other scales of the site count.
                scale = 1.0 if site["scale"] is None else site["scale"]
                log_prob = site["fn"].log_prob(site["value"]) * (scale * len(rows) / plate_size)
                log_prob = jnp.moveaxis(log_prob, frames[0].dim, 0)
                total -= log_prob.reshape(len(rows), -1).sum(1).astype(self.dtype)
        return total

    def evaluate_sites(self, z: Any, indices: Indices, arguments: Arguments) -> dict[str, Array]:
        """Return the values of all sites, constrained, including the deterministic ones."""
        model = self._on_rows(indices, self._fixed_rng_key)
        z = self._take_minibatch(z, indices)
        model, arguments = self._with_locals(model, z, indices, arguments)
        return constrain_fn(model, arguments.args, arguments.kwargs, z, return_deterministic=True)

    def constrain(self, z: Any, arguments: Arguments) -> Any:
        if self.has_fixed_supports:
            return transform_fn({s.name: biject_to(s.support) for s in self.sites}, z)
        values = self.evaluate_sites(z, self.first_indices, arguments)
        return {s.name: values[s.name] for s in self.sites}

    def postprocess(self, z: Any, arguments: Arguments) -> Any:
        if self.has_fixed_supports and not self.deterministics:
            return self.constrain(z, arguments)
        values = self.evaluate_sites(z, self.first_indices, arguments)
        kept = self.deterministics.union(s.name for s in self.sites)
        return {k: v for k, v in values.items() if k in kept}

    def sample_conditional_prior(
        self, position: Array, indices: Indices, arguments: Arguments, rng_key: Array
    ) -> dict[str, Any]:
        values = self.constrain(self.unravel(position), arguments)
        values = self._take_minibatch(values, indices)
        sites = trace_run(self._on_rows(indices, rng_key), arguments, values)
        return {name: site["value"] for name, site in sites.items()}

    @cached_property
    def sample_init_position(self) -> Callable[[Array, Arguments], Array]:
        if self.init_radius is not None:
            return super().sample_init_position
        return partial(self._sample_position, self.init_strategy)

    @cached_property
    def sample_prior_position(self) -> Callable[[Array, Arguments], Array] | None:
        return None if self.init_radius is None else partial(self._sample_position, init_to_sample)

    def _sample_position(
        self, init_strategy: Callable, rng_key: Array, arguments: Arguments
    ) -> Array:
        """Return a flat position from a run of the model under an initialisation strategy."""
        model = self._on_rows(self.first_indices, rng_key)
        sites = trace_run(substitute(model, substitute_fn=init_strategy), arguments)
        values = [
            biject_to(sites[s.name]["fn"].support).inv(sites[s.name]["value"]) for s in self.sites
        ]
        return jnp.concatenate([jnp.ravel(v).astype(self.dtype) for v in values])

    def diagnose_nonfinite(self, position: Array, arguments: Arguments) -> tuple[str, str]:
        site_reasons = self._find_nonfinite_sites(position, arguments)
        local = self.local_latents or self.resampled_latents
        for name in local.names if local else ():
            if name in site_reasons:
                return (
                    f": site '{name}' ({site_reasons[name]})",
                    f"keep the values of '{name}' that `gibbs_fn` samples off the boundary of the "
                    "support, for example by jnp.clip. The density is not finite there, as at a "
                    "proportion of exactly 0.",
                )
        causes = [f"site '{name}' ({reason})" for name, reason in site_reasons.items()]
        for name, x in arguments.named_arrays(self.user_model):
            if num_bad := int((~jnp.isfinite(x)).sum()):
                causes.append(f"argument {name} ({num_bad} of {x.size} values)")
        other_init = "other init_params, or another init_strategy such as init_to_median"
        if causes:
            return (
                f": {', '.join(causes)}",
                "remove missing values and data outside the support of their distribution, and "
                "keep parameters in their range and below overflow (standardise covariates). If "
                f"data and model are right, pass {other_init}.",
            )
        if causes := self._describe_nonfinite_gradients(position, arguments):
            return (
                f": gradient of {', '.join(causes)}",
                "replace operations that have no finite gradient, such as sqrt, norms and powers "
                "at 0. In the unused branch of jnp.where, replace their argument as well, as in "
                f"jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1)), 0). Or pass {other_init}.",
            )
        if not self.plates:
            return "", f"pass {other_init}."
        return "", (
            "compute statistics of the rows, such as their standard deviation, before the run. The "
            "model may divide by that of a minibatch, which may be zero. Or pass "
            f"{other_init}."
        )

    def _count_diagnosed_rows(self, arguments: Arguments) -> dict[str, int]:
        """Return the number of rows of each plate to search for values that are not finite."""
        is_in_memory = not (arguments.host_arrays or arguments.sharded_arrays)
        return {
            p.name: p.size if is_in_memory else min(p.size, _MAX_DIAGNOSED_ROWS)
            for p in self.plates
        }

    def _describe_nonfinite_gradients(self, position: Array, arguments: Arguments) -> list[str]:
        """Return the sites whose gradient is not finite, with how many of their values."""
        num_rows = self._count_diagnosed_rows(arguments)
        if all(num_rows[p.name] == p.size for p in self.plates):
            gradient = self.full_gradient(position, arguments)
        else:
            indices = {name: jnp.arange(n) for name, n in num_rows.items()}
            key = self._fixed_rng_key
            gradient = self.without_shards().gradient(position, indices, arguments, key)
        is_bad = ~np.isfinite(np.asarray(gradient))
        slices = site_slices(self.sites).items()
        num_bad = {name: (int(is_bad[k].sum()), is_bad[k].size) for name, k in slices}
        return [f"site '{name}' ({n} of {size})" for name, (n, size) in num_bad.items() if n]

    def _find_nonfinite_sites(self, position: Array, arguments: Arguments) -> dict[str, str]:
        """Return why sites are not finite, by name, such as how many of their values."""
        num_rows = self._count_diagnosed_rows(arguments)
        indices = {name: jnp.arange(n) for name, n in num_rows.items()}
        z, key = self.unravel(position), self._fixed_rng_key
        values = self._take_minibatch(self.constrain(z, arguments), indices)
        z = self._take_minibatch(z, indices)
        model, arguments = self._with_locals(self._on_rows(indices, key), z, indices, arguments)
        values = values | self._resample_locals(values, indices, arguments, key)
        reasons, sites = {}, self.enumerated_sites
        with numpyro.validation_enabled(False):  # which would raise at the first invalid value
            for name, site in trace_run(model, arguments, values).items():
                plates = [frame.name for frame in site.get("cond_indep_stack", ())]
                is_summed_out = sites is not None and sites.plate in plates
                if site["type"] != "sample" or is_summed_out:
                    continue
                if reason := _describe_nonfinite_site(site):
                    reasons[name] = reason
            if sites is not None:
                rows = compute_log_densities(
                    substitute(model, data=values), sites, len(indices[sites.plate]), arguments
                )[1]
                if num_bad := int((~jnp.isfinite(rows)).sum()):
                    reasons[sites.names[0]] = f"{num_bad} of {len(rows)} rows, summed over states"
        return reasons


def _describe_nonfinite_site(site: Any) -> str:
    """Return what is not finite or out of range at a site; empty where nothing is."""
    log_prob = site["fn"].log_prob(site["value"])
    is_bad = ~jnp.isfinite(log_prob)
    if site["is_observed"]:  # a density may be finite outside of its support
        is_outside = ~site["fn"].support(site["value"])
        if is_outside.shape == is_bad.shape:  # a factor has no value
            is_bad |= is_outside
    if num_bad := int(is_bad.sum()):
        return f"{num_bad} of {log_prob.size} values"
    # Parameters may be out of range where the density is finite.
    fn = get_base_distribution(site["fn"])
    invalid = []
    for name, constraint in fn.arg_constraints.items():
        value = getattr(fn, name, None)
        if value is None or isinstance(constraint, type(constraints.dependent)):
            continue
        if num_bad := int((~jnp.asarray(constraint(value))).sum()):
            invalid.append(
                f"`{name}` of {type(fn).__name__}: {num_bad} of {jnp.size(value)} values"
            )
    return f"out of range: {', '.join(invalid)}" if invalid else ""


# --- Initialisation strategies ------------------------------------------------------------------


def _validate_init_strategy(init_strategy: Callable) -> tuple[Callable, float | None]:
    """Return the strategy as a function of a site that checks the shapes of its values, and the
    radius of the uniform strategy, which needs no run of the model.
    """
    strategy = init_strategy
    if not isinstance(init_strategy, partial):
        try:
            strategy = init_strategy()
        except TypeError as error:
            raise InvalidArgumentError(
                f"Calling `init_strategy` without a site failed: {summarise_error(error)}.",
                "pass one of NumPyro's strategies, such as init_to_median, or a function that "
                "returns one when called without a site.",
                "init-strategy",
            ) from error
    if not callable(strategy):
        raise InvalidArgumentError(
            f"`init_strategy` returns {strategy!r} when called without a site.",
            "return a function of the site, as NumPyro's strategies do.",
            "init-strategy",
        )
    if isinstance(strategy, partial) and strategy.func is init_to_uniform:
        return strategy, strategy.keywords["radius"]

    def checked(site: Any) -> Any:
        value = strategy(site)
        if value is None or site["type"] != "sample" or site["is_observed"]:
            return value
        expected = site["fn"].shape(site["kwargs"].get("sample_shape", ()))
        if np.shape(value) != expected or isinstance(value, str):
            raise InvalidArgumentError(
                f"`init_strategy` returns shape {np.shape(value)} for site '{site['name']}'.",
                f"return a value of shape {expected}.",
                "init-strategy",
            )
        return value

    return checked, None


# --- One potential for all kernels on one model -------------------------------------------------

_potential_cache: WeakValueDictionary[Hashable, ModelPotential] = WeakValueDictionary()


def get_model_potential(
    model: Callable,
    arguments: Arguments,
    init_strategy: Callable,
    gibbs: GibbsConfig = NO_GIBBS,
    forward_mode_differentiation: bool = False,
) -> Potential:
    """Return the potential of :func:`make_model_potential`, or an equal one that exists already."""
    potential = make_model_potential(model, arguments, init_strategy, gibbs)
    potential = replace(potential, forward_mode_differentiation=forward_mode_differentiation)
    try:
        key = _potential_cache_key(model, arguments, potential)
        return _potential_cache.setdefault(key, potential)
    except Exception as error:
        if "Reverse-mode differentiation does not work" in str(error):
            raise InvalidModelError(
                "The model has a `lax.while_loop`, which has no gradient in reverse mode.",
                "pass forward_mode_differentiation=True, or write the loop with `lax.scan`.",
                "reverse-mode-loop",
            ) from error
        # Other failures occur again where the potential is used, and are reported there.
        return potential


def _potential_cache_key(
    model: Callable, arguments: Arguments, potential: ModelPotential
) -> Hashable:
    """Return everything that distinguishes two potentials."""
    local, traced = potential.local_latents, potential.user_model
    return (
        # Every access makes a new bound method, equal to the others of its object.
        model if isinstance(model, MethodType) else IdentityKey(model),
        arguments.signature,
        # Values with which the model computes anything, at other numbers of rows as well.
        traced.digest if isinstance(traced, NumPyArgumentsModel) else None,
        potential.plates,
        potential.plate_groups,
        tuple((s.name, s.shape, s.row_axis) for s in potential.sites or ()),
        potential.dtype,
        potential.is_stochastic,
        potential.forward_mode_differentiation,
        local and local.plate,
        local and tuple(s._replace(support=None) for s in local.sites),
        local and local.gibbs_fn,
        potential.enumerated_sites,
        potential.host_lookups,
        potential.shards,
        potential.size_dependent_sites,
        fingerprint_jaxpr(_trace_potential(potential, arguments)),
    )


def _trace_potential(potential: Potential, arguments: Arguments) -> Any:
    """Return the jaxpr of everything that a potential computes, with the derivatives in use."""
    local = potential.local_latents
    position = jax.ShapeDtypeStruct((potential.dim,), potential.dtype)
    indices = {
        p.name: jax.ShapeDtypeStruct((p.subsample_size,), jnp.int32) for p in potential.plates
    }

    def everything(q: Array, indices: Indices, arguments: Arguments, rng_key: Array) -> Any:
        def jvp_on_shard(shard: Potential, *batch: Any) -> Any:
            return jax.jvp(lambda q: shard.value_and_grad(q, *batch), (q,), (q,))

        z = potential.unravel(q)
        key = rng_key if potential.is_stochastic else None
        outputs = [
            potential.mean_over_shards(jvp_on_shard, indices, arguments, key),
            potential.constrain(z, arguments),
            potential.postprocess(z, arguments),
            potential.sample_init_position(rng_key, arguments),
            # A model may compute something else on other numbers of rows, as passes over all have.
            potential.full_value(q, arguments),
        ]
        if local is not None:
            rows = jnp.asarray(indices[local.plate.name])
            values = local.make_zero_values().take(rows)
            outputs += [
                update_local_values(potential, q, rows, values, arguments, rng_key),
                potential.sample_conditional_prior(q, indices, arguments, rng_key),
            ]
        return outputs

    return jax.make_jaxpr(everything)(position, indices, arguments, random.key(0))
