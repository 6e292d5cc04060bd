"""From what is known of a model to a :class:`~numpyro_sgmcmc.posterior.target.Target`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, random
from numpyro.infer import init_to_sample

from numpyro_sgmcmc.checks import notify
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.posterior.explain import explain
from numpyro_sgmcmc.posterior.facts import Facts
from numpyro_sgmcmc.posterior.init_strategy import checked_strategy, uniform_radius
from numpyro_sgmcmc.posterior.locals.sites import local_sites
from numpyro_sgmcmc.posterior.on_rows import ModelOnRows, draws_random_keys
from numpyro_sgmcmc.posterior.sites import global_sites, row_free_deterministics
from numpyro_sgmcmc.posterior.target import Target

__all__ = ["build"]


def build(facts: Facts) -> Target:
    """The target of a model that has passed :func:`~numpyro_sgmcmc.posterior.check.check`.

    :raises ValueError: for an initialisation strategy that is none.
    """
    local = local_sites(facts)
    is_kept = local is None or local.sweeps is None
    model = ModelOnRows(
        model=facts.settled_model,
        plates=tuple(facts.plates.values()),
        sites=global_sites(facts),
        locals=local if is_kept else None,
        redrawn=None if is_kept else local,
        dtype=jnp.result_type(float),
    )
    is_randomized = draws_random_keys(model, facts.arguments)
    if is_randomized:
        model = replace(model, rng_key=random.key(0))
    shown = _shown_deterministics(facts, model)
    strategy = checked_strategy(facts.init_strategy)
    radius = uniform_radius(strategy)

    def postprocess(z: Any, arguments: Arguments) -> Any:
        if model.has_fixed_supports and not shown:
            return model.constrain(z, arguments)
        values = model.values(z, model.first_rows, arguments)
        kept = shown.union(s.name for s in model.sites)
        return {k: v for k, v in values.items() if k in kept}

    def start(rng_key: Array, arguments: Arguments) -> Array:
        if radius is None:
            return model.start(strategy, rng_key, arguments)
        return random.uniform(rng_key, (model.dim,), model.dtype, -radius, radius)

    def draw_start(rng_key: Array, arguments: Arguments) -> Array:
        return model.start(init_to_sample, rng_key, arguments)

    return Target(
        plates=model.plates,
        groups=facts.groups,
        dim=model.dim,
        dtype=model.dtype,
        unravel=model.unravel,
        is_randomized=is_randomized,
        potential_of_sites=model.potential,
        potentials_of_rows=model.row_potentials,
        constrain=model.constrain,
        postprocess=postprocess,
        start=start,
        start_radius=radius,
        start_by_prior=None if radius is None else draw_start,
        explain=partial(explain, model, facts.model),
        sites=model.sites,
        draw_prior=model.draw_prior,
        locals=model.locals,
        lookups=tuple(x for x in facts.indexed if x.array.is_on_host),
        shards=facts.shards,
    )


def _shown_deterministics(facts: Facts, model: ModelOnRows) -> set[str]:
    """The deterministic sites that draws have; a warning names those that they have not."""
    names = {n for n, s in facts.statements.items() if s.kind == "deterministic"}
    if not names:
        return set()
    zeros = model.unravel(jnp.zeros(model.dim, model.dtype))
    shown = row_free_deterministics(facts, lambda i, a: model.values(zeros, i, a), model.first_rows)
    if dropped := sorted(names - shown):
        notify(
            f"The deterministic sites {dropped} have one value a row of a subsampled plate and are "
            "left out of the draws; Predictive(kernel.model, ...) computes them for all rows."
        )
    return shown
