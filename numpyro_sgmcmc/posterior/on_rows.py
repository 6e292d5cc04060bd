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
from numpyro_sgmcmc.posterior.handlers import choose_rows, key_watch, skip_checks
from numpyro_sgmcmc.posterior.locals.draws import redraw
from numpyro_sgmcmc.posterior.locals.sites import LocalSites, insert_locals
from numpyro_sgmcmc.posterior.target import Site

__all__ = ["ModelOnRows", "draws_random_keys"]


@dataclass(frozen=True, eq=False)
class ModelOnRows:
    """
    - **model** - the model, with values for all sites but the latent ones.
    - **plates** - its subsampled plates.
    - **sites** - the latent sites outside of them, in the order of their coordinates.
    - **locals** - the latent sites inside of them whose values stay, or None.
    - **redrawn** - such as are drawn anew at every evaluation, or None.
    - **dtype** - type of the coordinates.
    - **rng_key** - a key for where none is given, if the model draws random keys.
    """

    model: Callable
    plates: tuple[Plate, ...]
    sites: tuple[Site, ...]
    locals: LocalSites | None
    redrawn: LocalSites | None
    dtype: Any
    rng_key: Array | None = None

    @property
    def dim(self) -> int:
        """Number of coordinates."""
        return sum(s.size for s in self.sites)

    @property
    def first_rows(self) -> dict[str, np.ndarray]:
        """The first rows of each plate, as many as a minibatch has."""
        return {p.name: np.arange(p.subsample_size) for p in self.plates}

    @property
    def has_fixed_supports(self) -> bool:
        """Whether values can be constrained without a run of the model."""
        return all(s.support is not None for s in self.sites)

    def chosen(
        self, indices: Indices, rng_key: Array | None = None, weights: Any = None
    ) -> Callable:
        """The model, its plates answered by these rows, which may weigh differently."""
        run = choose_rows(self.model, lambda name, size, _: indices.get(name), weights)
        return run if rng_key is None else seed(run, rng_key)

    def unravel(self, q: Array | np.ndarray) -> dict[str, Array]:
        """The unconstrained sites of a flat position."""
        q = jnp.asarray(q)
        ends = list(accumulate(s.size for s in self.sites))
        return {
            s.name: q[end - s.size : end].reshape(s.shape)
            for s, end in zip(self.sites, ends, strict=True)
        }

    def potential(
        self, z: Any, indices: Indices, arguments: Arguments, rng_key: Any, weights: Any = None
    ) -> Array:
        """The minibatch potential of unconstrained sites.

        :param weights: by plate, what each of its rows weighs besides.
        """
        arguments = arguments.map_arrays(jnp.asarray)
        drawn: dict[str, Array] = {}
        if self.redrawn is not None:
            rng_key, key = random.split(rng_key)
            given = lax.stop_gradient(self.constrain(z, arguments))
            rows = indices[self.redrawn.plate.name]
            drawn = redraw(self.chosen(indices), self.redrawn, given, rows, arguments, key)
        run, z, arguments = insert_locals(
            self.locals, self.chosen(indices, rng_key, weights), z, indices, arguments
        )
        run = substitute(run, data=drawn) if drawn else run
        run = skip_checks(run, frozenset(z))
        return potential_energy(run, arguments.args, arguments.kwargs, z)

    def row_potentials(self, z: Any, indices: Indices, arguments: Arguments) -> Array:
        """What each row adds to the potential, shape ``(rows,)``, for one plate of rows."""
        (name,) = indices
        arguments = arguments.map_arrays(jnp.asarray)
        run = substitute(self.chosen(indices), data=self.constrain(z, arguments))
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

    def values(self, z: Any, indices: Indices, arguments: Arguments) -> dict[str, Array]:
        """All sites' values, constrained, with the deterministic ones."""
        arguments = arguments.map_arrays(jnp.asarray)
        run, z, arguments = insert_locals(
            self.locals, self.chosen(indices, self.rng_key), z, indices, arguments
        )
        return constrain_fn(run, arguments.args, arguments.kwargs, z, return_deterministic=True)

    def constrain(self, z: Any, arguments: Arguments) -> Any:
        """The latent sites, constrained, without a run of the model where possible."""
        if self.has_fixed_supports:
            return transform_fn({s.name: biject_to(s.support) for s in self.sites}, z)
        values = self.values(z, self.first_rows, arguments)
        return {s.name: values[s.name] for s in self.sites}

    def draw_prior(
        self, position: Array, indices: Indices, arguments: Arguments, rng_key: Array
    ) -> dict[str, Any]:
        """All sites' values on some rows, those inside the plate drawn given the others."""
        values = self.constrain(self.unravel(position), arguments)
        run = substitute(seed(self.chosen(indices), rng_key), data=values)
        args, kwargs = as_jax_arrays((arguments.args, arguments.kwargs))
        return {k: s["value"] for k, s in trace(run).get_trace(*args, **kwargs).items()}

    def start(self, strategy: Callable, rng_key: Array, arguments: Arguments) -> Array:
        """A flat position by an initialisation strategy, from a run of the model."""
        arguments = arguments.map_arrays(jnp.asarray)
        run = substitute(seed(self.chosen(self.first_rows), rng_key), substitute_fn=strategy)
        drawn = trace(run).get_trace(*arguments.args, **arguments.kwargs)
        values = [
            biject_to(drawn[s.name]["fn"].support).inv(drawn[s.name]["value"]) for s in self.sites
        ]
        return jnp.concatenate([jnp.ravel(v).astype(self.dtype) for v in values])


def draws_random_keys(model: ModelOnRows, arguments: Arguments) -> bool:
    """Whether the potential needs a random key of its own (``numpyro.prng_key``, local values)."""
    if model.redrawn is not None:
        return True
    watch = key_watch(lambda z, a: model.potential(z, model.first_rows, a, None))
    zeros = np.zeros(model.dim, model.dtype)
    jax.eval_shape(lambda q, a: watch(model.unravel(q), a), zeros, arguments)
    return watch.asked
