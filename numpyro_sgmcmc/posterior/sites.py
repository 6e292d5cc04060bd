"""The sites of a model: which a gradient can move, which have data, which do not vary with rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import biject_to

from numpyro_sgmcmc.checks import notify
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.plates import Indices, Plate
from numpyro_sgmcmc.posterior.dataflow import depends_on
from numpyro_sgmcmc.posterior.target import Site

__all__ = ["check_observed", "latent_sites", "row_free_deterministics"]


def latent_sites(seen: dict[str, Any], plates: dict[str, Plate]) -> list[Site]:
    """The latent sites, each checked to be one that a gradient-based sampler can move."""
    sites = []
    for name, site in seen.items():
        if site["type"] != "sample":
            continue
        frames = [f for f in site["cond_indep_stack"] if f.name in plates]
        if site["is_observed"]:
            check_observed(site, plates)
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
        if any(
            s["type"] == "sample"
            and not s["is_observed"]
            and any(f.name in plates for f in s["cond_indep_stack"])
            for s in seen.values()
        ):
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


def check_observed(site: Any, plates: dict[str, Plate]) -> None:
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


def row_free_deterministics(
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
