"""The sites outside of the subsampled plates: which a gradient moves, which have draws to show."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax import Array

from numpyro_sgmcmc.checks import InvalidArgumentError, warn_user
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.plates import Indices
from numpyro_sgmcmc.posterior.dataflow import find_dependent_outputs
from numpyro_sgmcmc.posterior.facts import ModelTrace, SampleSite
from numpyro_sgmcmc.posterior.target import GlobalSite

__all__ = [
    "check_global_sites",
    "find_global_sites",
    "find_plate_free_deterministics",
    "warn_missing_plates",
]


def find_global_sites(model_trace: ModelTrace) -> tuple[GlobalSite, ...]:
    """The latent sites outside of the subsampled plates, in the order of their coordinates."""
    found = []
    for site in model_trace.sample_sites:
        if not (site.is_observed or site.plate_frames):
            assert site.unconstrained_shape is not None
            support = site.support if site.has_fixed_support else None
            found.append(GlobalSite(site.name, site.unconstrained_shape, support))
    return tuple(sorted(found, key=lambda s: s.name))


def check_global_sites(model_trace: ModelTrace) -> None:
    """Refuse latent sites that a gradient cannot move, data that are not the minibatch's, and a
    model whose latent sites are the rows' alone.

    :raises ValueError: naming the site, with the way out.
    """
    found = []
    for site in model_trace.sample_sites:
        if site.is_observed:
            _check_observed_shape(site)
        elif not site.plate_frames:
            _check_differentiable(site)
            found.append(site)
    if any(0 not in (s.unconstrained_shape or ()) for s in found):
        return
    if any(s.plate_frames and not s.is_observed for s in model_trace.sample_sites):
        raise InvalidArgumentError(
            "All latent sites of the model are inside the subsampled plate: its rows are "
            "independent posteriors, and minibatches save nothing. Use NUTS on each."
        )


def warn_missing_plates(model_trace: ModelTrace) -> None:
    """Warn, as NumPyro does, of sites that have plates, but not for all of their dimensions."""
    for site in model_trace.sample_sites:
        for dim in site.unplated_dims:
            warn_user(
                f"Missing a plate statement for batch dimension {dim} at site '{site.name}', which "
                "stands in other plates: add one, or `.to_event` if the dimension belongs to a row."
            )


def _check_differentiable(site: SampleSite) -> None:
    """Refuse a latent site that a gradient cannot move."""
    if site.support.is_discrete:
        raise InvalidArgumentError(
            f"Site '{site.name}' is discrete and has no gradient. Sample it in a block of its own: "
            f"Gibbs([(DiscreteGibbs(kernel.model), ['{site.name}']), (kernel, None)]), with "
            "Gibbs and DiscreteGibbs from numpyro.infer and kernel this kernel."
        )
    if site.is_delta:
        raise InvalidArgumentError(
            f"Site '{site.name}' has a delta distribution; use numpyro.deterministic instead."
        )
    if site.unconstrained_shape is None:
        raise InvalidArgumentError(
            f"Site '{site.name}' has support {site.support}, which has no map to unconstrained "
            "space; reparametrise the site."
        )


def _check_observed_shape(site: SampleSite) -> None:
    """Refuse data that have not one entry for each row of a minibatch."""
    event_dim = len(site.event_shape)
    for frame in site.plate_frames:
        if len(site.shape) >= event_dim - frame.dim:
            rows = site.shape[frame.dim - event_dim]
            if rows not in (1, frame.size):
                raise InvalidArgumentError(
                    f"Site '{site.name}' observes {rows} rows where the plate '{frame.name}' "
                    f"has a minibatch of {frame.size}: index the data by the plate's indices."
                )
    try:
        np.broadcast_shapes(site.batch_shape, site.shape[: len(site.shape) - event_dim])
    except ValueError:
        raise InvalidArgumentError(
            f"Site '{site.name}' observes data of shape {site.shape}, which do not fit its "
            f"distribution's {site.batch_shape + site.event_shape}."
        ) from None


def find_plate_free_deterministics(
    model_trace: ModelTrace,
    evaluate_sites: Callable[[Indices, Arguments], dict[str, Array]],
    indices: Indices,
) -> set[str]:
    """Deterministic sites that are the same for every minibatch.

    :param evaluate_sites: maps rows and arguments to the values of all sites.
    :param indices: rows of each plate.
    """
    outside = [
        n
        for n, s in model_trace.traced_sites.items()
        if s.site_type == "deterministic" and not s.plates
    ]
    if outside and indices:
        jaxpr = jax.make_jaxpr(lambda i, a: [evaluate_sites(i, a)[k] for k in outside])(
            indices, model_trace.arguments
        )
        varies = find_dependent_outputs(jaxpr, len(indices))
        outside = [k for k, v in zip(outside, varies, strict=True) if not v]
    return set(outside)
