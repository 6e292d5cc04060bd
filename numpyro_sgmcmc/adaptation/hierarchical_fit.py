"""Variational fit of a hierarchical model: shared parameters by their marginal.

A joint Gaussian fit of the effects of many groups and of the scales that they share is wrong where
few rows belong to a group: the joint density has its mode where scales are zero. Here the effects
are fitted given the shared parameters, group by group (:mod:`.conditional_effects`), and the shared
parameters at the mode of their marginal (:mod:`.marginal_mode`), from several initial positions.
Coordinates are built there (:mod:`.block_arrow_coordinates`) and refined by differences of the
marginal (:mod:`.marginal_refinement`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np

from numpyro_sgmcmc.adaptation.block_arrow_coordinates import UnrefinedFit, build_coordinates
from numpyro_sgmcmc.adaptation.conditional_effects import HierarchyFitError
from numpyro_sgmcmc.adaptation.marginal_mode import (
    MAX_REFINED_SHARED,
    HierarchyNotConvergedError,
    compute_distance,
    fit_marginal,
)
from numpyro_sgmcmc.adaptation.marginal_refinement import HierarchyFit, refine_shared
from numpyro_sgmcmc.adaptation.second_order_terms import add_needed_terms
from numpyro_sgmcmc.adaptation.settings import WarmupInputs
from numpyro_sgmcmc.model.block_arrow import BlockArrowLayout
from numpyro_sgmcmc.model.preconditioner import Preconditioner

_MAX_FIT_DISTANCE_SD = 3.0  # between the shared parameters of fits of the same mode


def fit_hierarchy_from_each(
    inputs: WarmupInputs,
    layout: BlockArrowLayout,
    positions: Sequence[np.ndarray],
    start_compilation: Callable[[Preconditioner], None] = lambda fit: None,
    has_effects: bool = False,
) -> HierarchyFit:
    """Return a fit, whose coordinates are refined, if fits from initial positions agree.

    :param start_compilation: called with the coordinates before the other fits.
    :param has_effects: see :func:`fit_hierarchy`.
    :raises HierarchyFitError: where no fit converges, and where two differ, because there are other
        modes.
    """
    remaining = iter(positions)
    # Fits are compared without the refinement, which moves many groups' scales by several SDs.
    unrefined = _fit_first(inputs, layout, remaining, has_effects)
    first = HierarchyFit(unrefined.coordinates, is_exact=False)
    has_pairs = unrefined.coordinates.reference_hessian.pairs is not None
    if not has_pairs and layout.num_shared <= MAX_REFINED_SHARED:
        first = refine_shared(inputs, unrefined)
    first = first._replace(coordinates=add_needed_terms(inputs, first.coordinates))
    start_compilation(first.coordinates)
    for position in remaining:
        known = unrefined.coordinates
        try:
            other = fit_marginal(inputs, layout, position, has_effects, known)
        except HierarchyFitError:
            continue
        distance = compute_distance(layout, known, other.conditional.position)
        if distance > _MAX_FIT_DISTANCE_SD:
            raise HierarchyFitError("fits from different initial positions differ")
    return first


def _fit_first(
    inputs: WarmupInputs,
    layout: BlockArrowLayout,
    positions: Iterator[np.ndarray],
    has_effects: bool,
) -> UnrefinedFit:
    """Return the first fit that succeeds, and leave the remaining positions in the iterator.

    Where none does, because scales or correlations are extreme there, a further fit starts at the
    origin of the unconstrained space. With several groupings the first fit that does not converge
    from effects of zero ends the search, because further ones rarely do.

    :raises HierarchyNotConvergedError: where one of the fits did not converge.
    """
    error = HierarchyFitError("there is no initial position")
    origin = () if has_effects else (np.zeros(layout.dim),)
    for position in chain(positions, origin):
        try:
            return fit_hierarchy(inputs, layout, position, has_effects)
        except HierarchyNotConvergedError as latest:
            error = latest
            if len(layout.groupings) > 1 and not has_effects:
                break
        except HierarchyFitError as latest:
            error = error if isinstance(error, HierarchyNotConvergedError) else latest
    raise error


def fit_hierarchy(
    inputs: WarmupInputs, layout: BlockArrowLayout, position: np.ndarray, has_effects: bool = False
) -> UnrefinedFit:
    """Return a fit from an initial position, with the Hessian at its mean.

    :param has_effects: whether the fit starts at the position's effects, and not at zero.
    :raises HierarchyFitError: where the Hessian is no block-arrow matrix, and where the fit does
        not converge.
    """
    fit = fit_marginal(inputs, layout, position, has_effects)
    return build_coordinates(inputs, layout, fit)
