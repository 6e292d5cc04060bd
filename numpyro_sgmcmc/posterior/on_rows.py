"""A model as functions of unconstrained values, on any rows of its plates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from numpyro.distributions import biject_to
from numpyro.handlers import seed, substitute, trace
from numpyro.infer.util import constrain_fn, potential_energy, transform_fn

from numpyro_sgmcmc.data.arguments import Arguments, as_jax_arrays
from numpyro_sgmcmc.data.plates import Indices, Plate
from numpyro_sgmcmc.posterior.handlers import (
    detect_rng_use,
    disable_validation,
    set_subsample_indices,
)
from numpyro_sgmcmc.posterior.locals.draws import resample_local_values
from numpyro_sgmcmc.posterior.locals.sites import LocalLatents, insert_local_values
from numpyro_sgmcmc.posterior.target import GlobalSite

__all__ = ["SubsampledModel", "needs_rng_key"]


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
