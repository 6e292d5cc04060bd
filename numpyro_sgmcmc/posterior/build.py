"""From what is known of a model to a :class:`~numpyro_sgmcmc.posterior.target.Target`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, random
from numpyro.infer import init_to_sample

from numpyro_sgmcmc.checks import warn_user
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.posterior.explain import diagnose_nonfinite
from numpyro_sgmcmc.posterior.facts import ModelTrace
from numpyro_sgmcmc.posterior.init_strategy import get_uniform_radius, validate_init_strategy
from numpyro_sgmcmc.posterior.locals.sites import find_local_latents
from numpyro_sgmcmc.posterior.on_rows import SubsampledModel, needs_rng_key
from numpyro_sgmcmc.posterior.sites import find_global_sites, find_plate_free_deterministics
from numpyro_sgmcmc.posterior.target import Potential

__all__ = ["build_potential"]


def build_potential(model_trace: ModelTrace) -> Potential:
    """The target of a model that has passed :func:`~numpyro_sgmcmc.posterior.check.check`.

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
