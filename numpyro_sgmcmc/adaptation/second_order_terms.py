"""Terms of second order in the gradients of a hierarchy with many effects of few rows each.

The second-order control variate expands gradients to first order. What is left has much noise in
two places. The gradient of the scale of the rows sums the squared displacements of all effects, and
the effects' curvature changes with this scale: :class:`~.block_arrow.BlockDifferences` of such
parameters remove this noise. Each costs about two products with the blocks in a step, and one with
the blocks of pairs of groups where there are several groupings. Where the rows' likelihood is
skewed, such as that of counts, the curvature changes with the effects themselves: their
:class:`~.block_arrow.EffectThirdDerivatives` remove this noise, which has heavy tails where a
minibatch has few rows of a group.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from numpyro_sgmcmc.adaptation.batched_gradients import BulkPositions
from numpyro_sgmcmc.adaptation.effect_correlation import sum_row_couplings
from numpyro_sgmcmc.adaptation.gradient_noise import measure_hierarchy_noise
from numpyro_sgmcmc.adaptation.settings import WarmupInputs
from numpyro_sgmcmc.model.block_arrow import (
    BlockArrowLayout,
    BlockArrowMatrix,
    BlockDifferences,
    EffectThirdDerivatives,
    GroupPairs,
)
from numpyro_sgmcmc.model.gradient_estimators import SecondOrderControlVariate
from numpyro_sgmcmc.model.partial_centering import PartialCentering
from numpyro_sgmcmc.model.preconditioner import Preconditioner

# Noise variance of a shared parameter's gradient, in units of its posterior SD, from which on the
# parameter has differences, and the fraction of it that these may leave.
_MIN_NOISE_VARIANCE, _MAX_REMAINING_FRACTION = 0.2, 0.5
# Mean noise variance of the effects, in preconditioned coordinates, from which on they have third
# derivatives: a third of that with which single effects of counts left the posterior in
# benchmarks/hierarchies.py.
_MIN_EFFECT_NOISE_VARIANCE = 0.05
_MAX_EFFECTS_OF_THIRD_DERIVATIVES = 4  # per group k, a bound on memory: k^3 numbers of each group
_MAX_NUM_DIFFERENCES = 4  # shared parameters, a bound on memory and on the cost of a step
_NUM_POSITIONS = 4  # draws of the normal fit, at which the noise is measured


def add_needed_terms(inputs: WarmupInputs, fit: Preconditioner) -> Preconditioner:
    """Return the coordinates of a fit with the terms of second order whose noise matters."""
    potential, estimator = inputs.potential, SecondOrderControlVariate()
    if not potential.has_minibatches or inputs.settings.estimator not in (None, estimator):
        return fit
    rng = np.random.default_rng(3)  # so that other random numbers of the warm-up do not change
    layout, hessian = fit.factor.layout, fit.reference_hessian
    if len(layout.groupings) > 1 and hessian.pairs is None:
        return fit  # too many to be stored, and a minibatch would have their terms
    bulk = BulkPositions(
        inputs.batched_gradients, fit, rng.standard_normal((_NUM_POSITIONS, potential.dim))
    )
    of_effects, noise = measure_hierarchy_noise(bulk, estimator, rng)
    can_have_third_derivatives = (
        len(layout.groupings) == 1
        and layout.effects_per_group <= _MAX_EFFECTS_OF_THIRD_DERIVATIVES
        and not inputs.batched_gradients.arguments.sharded_arrays
    )
    has_noisy_effects = can_have_third_derivatives and of_effects >= _MIN_EFFECT_NOISE_VARIANCE
    if noise.max() < _MIN_NOISE_VARIANCE and not has_noisy_effects:
        return fit
    steps = np.linalg.norm(fit.factor.shared_factor, axis=1)  # posterior SDs
    all_columns = tuple(range(layout.num_shared))
    structure = replace(
        hessian,
        differences=BlockDifferences(None, None, all_columns),
        third_derivatives=EffectThirdDerivatives(None) if has_noisy_effects else None,
    )
    trial = fit._replace(reference_hessian=structure)
    of_effects_left, left = measure_hierarchy_noise(
        replace(bulk, preconditioner=trial), estimator, rng
    )
    # What is left may be the noise of a few rows, which every minibatch will then include.
    if has_noisy_effects and of_effects_left < of_effects:
        hessian = add_third_derivatives(inputs, fit, hessian)
    is_needed = (noise >= _MIN_NOISE_VARIANCE) & (left <= _MAX_REMAINING_FRACTION * noise)
    noisiest = np.argsort(-np.where(is_needed, noise, 0.0), kind="stable")
    columns = tuple(sorted(noisiest[: min(is_needed.sum(), _MAX_NUM_DIFFERENCES)].tolist()))
    if columns:
        hessian = add_differences(inputs, fit, hessian, columns, steps[list(columns)])
    return fit._replace(reference_hessian=hessian)


def add_terms_of(
    inputs: WarmupInputs, fit: Preconditioner, previous: BlockArrowMatrix
) -> BlockArrowMatrix:
    """Return the Hessian of a fit with the kinds of terms that it had at a previous center."""
    hessian, differences = fit.reference_hessian, previous.differences
    if previous.third_derivatives is not None:
        hessian = add_third_derivatives(inputs, fit, hessian)
    if differences is not None:
        hessian = add_differences(inputs, fit, hessian, differences.columns, differences.steps)
    return hessian


def add_third_derivatives(
    inputs: WarmupInputs, fit: Preconditioner, hessian: BlockArrowMatrix
) -> BlockArrowMatrix:
    """Return a Hessian with the third derivatives by effects of the rows' part of the potential.

    :param fit: with the center of the derivatives.
    """
    directions = EffectThirdDerivatives.make_directions(hessian.layout)
    center = fit.center.astype(inputs.potential.dtype)
    found = inputs.batched_gradients.large_pass_second_derivatives(center, directions)
    third_derivatives = EffectThirdDerivatives.from_directions(hessian.layout, found)
    return replace(hessian, third_derivatives=third_derivatives.with_bounds(hessian.blocks))


def add_differences(
    inputs: WarmupInputs,
    fit: Preconditioner,
    hessian: BlockArrowMatrix,
    columns: tuple[int, ...],
    steps: np.ndarray,
) -> BlockArrowMatrix:
    """Return a Hessian with differences of its blocks along some shared parameters.

    These are differences of the rows' part of the potential, so that a step does not evaluate the
    prior of all effects for them.

    :param fit: with the center of the differences.
    :param columns: these parameters.
    :param steps: along each of them, in the units of the position.
    :return: the Hessian without differences, where pairs of groups are coupled at some points only.
    """
    layout, dtype = hessian.layout, inputs.potential.dtype
    probes = layout.make_probes(with_shared=False)
    coordinates = layout.take_shared(np.arange(layout.dim))[list(columns)]
    values: list[np.ndarray] = []
    pairs: list[GroupPairs] = []
    for coordinate, step in zip(coordinates, steps.astype(dtype), strict=True):
        # In the precision of the chains, whose minibatches have the same differences.
        x = np.zeros((2, layout.dim))
        x[:, coordinate] = step, -step
        points = (fit.center + fit.expansion_to_displacement(x)).astype(dtype)
        _, products = inputs.batched_gradients.large_pass_products(points, probes)
        of_prior = [inputs.batched_gradients.prior_products(point, probes)[1] for point in points]
        blocks = [layout.make_blocks(p) for p in products - np.stack(of_prior)]
        if fit.centering is not None:
            all_shared = layout.take_shared(x)
            blocks = list(map(fit.centering.transform_blocks, all_shared, blocks))
        values.append((blocks[0] - blocks[1]) / (2.0 * step))
        if hessian.pairs is not None:
            scales = np.ones((2, layout.effects_per_group, layout.num_groups))
            if isinstance(fit.centering, PartialCentering):
                scales = fit.centering.scale_effects(all_shared)
            of_pairs = _compute_pair_difference(inputs, layout, points, scales, float(step))
            if of_pairs is None:
                return replace(hessian, differences=None)
            pairs.append(of_pairs)
    differences = BlockDifferences(np.stack(values), steps, columns, tuple(pairs))
    return replace(hessian, differences=differences)


def _compute_pair_difference(
    inputs: WarmupInputs,
    layout: BlockArrowLayout,
    points: np.ndarray,
    scales: np.ndarray,
    step: float,
) -> GroupPairs | None:
    """Return the difference quotient of the blocks of pairs of groups between two points.

    :param scales: of the effects at each point, shape ``(2, k, G)``.
    :return: None where these are not blocks of the same pairs.
    """
    arguments = inputs.batched_gradients.arguments
    above, below = (
        sum_row_couplings(inputs.potential, arguments, layout, point) for point in points
    )
    if above is None or below is None:
        return None
    if not np.array_equal(above.sources, below.sources):
        return None
    if not np.array_equal(above.targets, below.targets):
        return None
    above, below = above.rescale(scales[0]), below.rescale(scales[1])
    return replace(above, values=(above.values - below.values) / (2.0 * step))
