"""The sites outside of the subsampled plates: which a gradient moves, which have draws to show."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax import Array

from numpyro_sgmcmc.checks import Refusal, notify
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.plates import Indices
from numpyro_sgmcmc.posterior.dataflow import depends_on
from numpyro_sgmcmc.posterior.facts import Facts, SampleSite
from numpyro_sgmcmc.posterior.target import Site

__all__ = [
    "global_sites",
    "refuse_global_sites",
    "row_free_deterministics",
    "warn_of_missing_plates",
]


def global_sites(facts: Facts) -> tuple[Site, ...]:
    """The latent sites outside of the subsampled plates, in the order of their coordinates."""
    found = []
    for site in facts.samples:
        if not (site.is_observed or site.frames):
            assert site.free_shape is not None
            support = site.support if site.has_fixed_support else None
            found.append(Site(site.name, site.free_shape, support))
    return tuple(sorted(found, key=lambda s: s.name))


def refuse_global_sites(facts: Facts) -> None:
    """Refuse latent sites that a gradient cannot move, data that are not the minibatch's, and a
    model whose latent sites are the rows' alone.

    :raises ValueError: naming the site, with the way out.
    """
    found = []
    for site in facts.samples:
        if site.is_observed:
            _refuse_other_rows(site)
        elif not site.frames:
            _refuse_unmovable(site)
            found.append(site)
    if any(0 not in (s.free_shape or ()) for s in found):
        return
    if any(s.frames and not s.is_observed for s in facts.samples):
        raise Refusal(
            "All latent sites of the model are inside the subsampled plate: its rows are "
            "independent posteriors, and minibatches save nothing. Use NUTS on each."
        )


def warn_of_missing_plates(facts: Facts) -> None:
    """Warn, as NumPyro does, of sites that have plates, but not for all of their dimensions."""
    for site in facts.samples:
        for dim in site.bare_dims:
            notify(
                f"Missing a plate statement for batch dimension {dim} at site '{site.name}', which "
                "stands in other plates: add one, or `.to_event` if the dimension belongs to a row."
            )


def _refuse_unmovable(site: SampleSite) -> None:
    """Refuse a latent site that a gradient cannot move."""
    if site.support.is_discrete:
        raise Refusal(
            f"Site '{site.name}' is discrete and has no gradient. Sample it in a block of its own: "
            f"Gibbs([(DiscreteGibbs(kernel.model), ['{site.name}']), (kernel, None)]), with "
            "Gibbs and DiscreteGibbs from numpyro.infer and kernel this kernel."
        )
    if site.is_delta:
        raise Refusal(
            f"Site '{site.name}' has a delta distribution; use numpyro.deterministic instead."
        )
    if site.free_shape is None:
        raise Refusal(
            f"Site '{site.name}' has support {site.support}, which has no map to unconstrained "
            "space; reparametrise the site."
        )


def _refuse_other_rows(site: SampleSite) -> None:
    """Refuse data that have not one entry for each row of a minibatch."""
    event_dim = len(site.event_shape)
    for frame in site.frames:
        if len(site.shape) >= event_dim - frame.dim:
            rows = site.shape[frame.dim - event_dim]
            if rows not in (1, frame.size):
                raise Refusal(
                    f"Site '{site.name}' observes {rows} rows where the plate '{frame.name}' "
                    f"has a minibatch of {frame.size}: index the data by the plate's indices."
                )
    try:
        np.broadcast_shapes(site.batch_shape, site.shape[: len(site.shape) - event_dim])
    except ValueError:
        raise Refusal(
            f"Site '{site.name}' observes data of shape {site.shape}, which do not fit its "
            f"distribution's {site.batch_shape + site.event_shape}."
        ) from None


def row_free_deterministics(
    facts: Facts, values: Callable[[Indices, Arguments], dict[str, Array]], rows: Indices
) -> set[str]:
    """Deterministic sites that are the same for every minibatch.

    :param values: maps rows and arguments to the values of all sites.
    :param rows: rows of each plate.
    """
    outside = [n for n, s in facts.statements.items() if s.kind == "deterministic" and not s.plates]
    if outside and rows:
        jaxpr = jax.make_jaxpr(lambda i, a: [values(i, a)[k] for k in outside])(
            rows, facts.arguments
        )
        varies = depends_on(jaxpr, len(rows))
        outside = [k for k, v in zip(outside, varies, strict=True) if not v]
    return set(outside)
