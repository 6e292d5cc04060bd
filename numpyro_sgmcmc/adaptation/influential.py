r"""Detection of influential observations, which every minibatch then includes.

A covariate that is non-zero in five of 50,000 observations is informed by these alone. A minibatch
of a hundred contains one of them once in a hundred steps, with weight five hundred, and no step
size makes up for that noise. If every minibatch includes them, with weight one so that the gradient
stays unbiased, they cause no noise.

Influential (high-leverage) observations are those whose share of the potential is far from linear
over the posterior. About a reference position a, observation i has

.. math:: u_i(a + \delta) = u_i(a) + \delta \cdot \nabla u_i(a) + r_i(\delta).

Control variates take the first two terms exactly. The even part of the remainder,
:math:`\tfrac12(u_i(a + \delta) + u_i(a - \delta)) - u_i(a)`, is computed without derivatives. With
m of N observations in every minibatch of size B, the variance of the gradient noise is proportional
to

.. math:: \frac{N - m}{B - m} \sum_{i > m} \operatorname{Var} r_i,

observations in decreasing order of :math:`\operatorname{Var} r_i`. The m that minimises it is the
number of influential observations.

In a hierarchy with a skewed likelihood, such as that of counts, a variance over typical positions
is not enough. Of thousands of effects, some are three posterior SDs from their centers at every
step. There, in a group of few observations, the gradient of one that a minibatch weights by N / B
may change an effect's velocity by several of its SDs, and the chain leaves the posterior.
:func:`choose_num_included` includes the observations with the largest gradients, and the step size
is limited by the largest of the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgmcmc.adaptation.budget import HIGH_DIM
from numpyro_sgmcmc.adaptation.variational import MeanField
from numpyro_sgmcmc.compilation import aot_compile
from numpyro_sgmcmc.data.arguments import Arguments
from numpyro_sgmcmc.data.subsampling import Indices
from numpyro_sgmcmc.model.potential import IncludedRows, Potential
from numpyro_sgmcmc.model.preconditioner import Preconditioner

# Pairs of positions a + delta, a - delta at which each observation is evaluated.
_NUM_ANTITHETIC_PAIRS = 6

# Observations evaluated in one call: a bound on memory, higher where a call reads all effects.
_MAX_ROWS_PER_CALL, _MAX_ROWS_PER_CALL_HIGH_DIM = 2**13, 2**17

# Observations are included in every minibatch if that at least halves the noise, and if the noise
# without them has a variance, summed over preconditioned coordinates, that shortens the step.
_MAX_REMAINING_NOISE_FRACTION = 0.5
_MIN_GRADIENT_NOISE_VARIANCE = 0.02

# Largest fraction of a minibatch that is included rather than sampled.
_MAX_INFLUENTIAL_BATCH_FRACTION = 0.5

# Distance of effects from their centers at which gradients are compared with their expansions, in
# posterior SDs given the shared parameters: one of 370 normal draws is as far. Where the density
# decreases faster than a normal one, the smaller distance at which it has decreased as much.
_TAIL_DISTANCE_SD = 3.0
_NUM_TAIL_DISTANCE_ITERATIONS = 8  # of Newton's method, which converges from above
# Largest change of an effect's velocity (without momentum, of its position) that the gradient of
# one sampled observation may make in one step, in preconditioned coordinates, in which a velocity
# has an SD of one. Without this limit, and the observations that are included because of it, a draw
# takes the maximum of 500 steps in the model of tests/adaptation/test_outlying_effects.py.
_MAX_VELOCITY_CHANGE_SD = 1.0
# Of the longest possible step size, with which no more observations are included: each one adds to
# the weight of those that are sampled.
_SUFFICIENT_STEP_SIZE_RATIO = 0.9
_MIN_GRADIENT = 1e-30  # in place of zero


@dataclass(frozen=True)
class InfluentialRows:
    """Observations that every minibatch includes.

    - **included** - their indices, by plate.
    - **max_step_size** - the longest step size with which no other observation changes the velocity
      of an effect by more than its SD.
    """

    included: IncludedRows = ()
    max_step_size: float = math.inf


def find_influential_rows(
    potential: Potential,
    arguments: Arguments,
    variational_fit: MeanField,
    rng: np.random.Generator,
) -> IncludedRows:
    """Return the rows that every minibatch has to include, by plate.

    It takes one pass over the rows, without derivatives. Not supported (and empty) for several
    plates, rows outside of memory, randomised likelihoods, local latent variables, and very high
    dimension.
    """
    if not _is_supported(potential, arguments) or potential.dim > HIGH_DIM:
        return ()
    variances = _compute_remainder_variances(potential, arguments, variational_fit, rng)
    num_influential = choose_num_influential(variances, potential.plates[0].subsample_size)
    return _name_rows(potential, np.argsort(-variances, kind="stable")[:num_influential])


def find_influential_rows_of_groups(
    potential: Potential,
    arguments: Arguments,
    hierarchy: Preconditioner,
    rng: np.random.Generator,
    step_size: float,
) -> InfluentialRows:
    """Return the rows that every minibatch of a hierarchy has to include.

    A row depends on the effects of a few groups, so that its cost does not grow with the dimension.
    If the fit has third derivatives of the effects, this takes a second pass. It is not repeated
    when pilot chains change the coordinates.

    :param hierarchy: coordinates of the effects.
    :param step_size: the step size that the gradients should allow.
    """
    if not _is_supported(potential, arguments):
        return InfluentialRows()
    batch_size = potential.plates[0].subsample_size
    fit = MeanField(hierarchy.center, hierarchy.sds)
    variances = _compute_remainder_variances(potential, arguments, fit, rng)
    num_influential = choose_num_influential(variances, batch_size)
    by_variance = np.argsort(-variances, kind="stable")[:num_influential]
    if not _has_third_derivatives(hierarchy):
        return InfluentialRows(_name_rows(potential, by_variance))
    gradients = _compute_tail_gradients(potential, arguments, hierarchy)
    is_included = np.isin(np.arange(len(gradients)), by_variance)
    order = np.lexsort((-gradients, ~is_included))  # those that are included, then the largest
    num_included, max_step_size = choose_num_included(
        gradients[order], batch_size, step_size, num_influential
    )
    return InfluentialRows(_name_rows(potential, order[:num_included]), max_step_size)


def _compute_remainder_variances(
    potential: Potential, arguments: Arguments, fit: MeanField, rng: np.random.Generator
) -> np.ndarray:
    """Return the variances of all observations' even remainders over draws of a normal fit."""
    plate = potential.plates[0]
    normals = rng.standard_normal((_NUM_ANTITHETIC_PAIRS, potential.dim))
    mean, deviations = fit.mean, fit.sd * normals
    positions = np.concatenate([mean[None], mean + deviations, mean - deviations])
    positions = positions.astype(potential.dtype)
    variances = np.zeros(plate.size)
    for rows in _split_rows(potential):
        variances[rows] = _evaluate_remainder_variances(
            potential, arguments, positions, {plate.name: rows}
        )
    return np.where(np.isfinite(variances), variances, 0.0)


def _compute_tail_gradients(
    potential: Potential, arguments: Arguments, hierarchy: Preconditioner
) -> np.ndarray:
    """Return the largest norm of the remainder of each observation's gradient by its effects.

    It is that of effects in the tails, in units of their inverse posterior SDs given the shared
    parameters; infinite where its square overflows.
    """
    plate, layout = potential.plates[0], hierarchy.factor.layout
    unit_effects = _make_unit_effects(hierarchy)
    tails = _find_tails(hierarchy, unit_effects)
    no_shared = np.zeros((len(tails), layout.num_shared))
    displacements = layout.merge(tails, no_shared)
    limited = hierarchy.reference_hessian.limit_displacement(displacements)
    no_shared = no_shared[: len(unit_effects)]
    units = layout.merge(unit_effects, no_shared)
    vectors = [
        np.asarray(x, potential.dtype) for x in (hierarchy.center, displacements, limited, units)
    ]
    gradients = np.zeros(plate.size)
    for rows in _split_rows(potential):
        gradients[rows] = _evaluate_tail_gradients(
            potential, arguments, *vectors, {plate.name: rows}
        )
    return np.where(np.isfinite(gradients), gradients, np.inf)


def _make_unit_effects(hierarchy: Preconditioner) -> np.ndarray:
    """Return columns of a factor of each group's covariance given the shared parameters, shape
    ``(k, k, G)``: the first axis is that of columns.
    """
    return np.asarray(hierarchy.factor.effect_factors).swapaxes(0, 1)


def _count_tails(num_effects: int) -> int:
    """Return the number of displacements of :func:`_find_tails`."""
    return 2 * num_effects**2


def _find_tails(hierarchy: Preconditioner, unit_effects: np.ndarray) -> np.ndarray:
    """Return displacements of the effects into the tails of their density, shape ``(n, k, G)``.

    They are along each column of a factor of the covariance and each pair of columns, in both
    directions. The log density is expanded to third order, with the third derivatives of the rows'
    part alone.
    """
    pairs = [(a + sign * b) / 2**0.5 for a, b in combinations(unit_effects, 2) for sign in (1, -1)]
    directions = np.stack([*unit_effects, *pairs])
    directions = np.concatenate([directions, -directions])
    second_order = hierarchy.reference_hessian.third_derivatives.expand(directions)
    # The potential is t^2 / 2 + slope t^3 / 6 at the distance t.
    slopes = np.maximum(2.0 * (directions * second_order).sum(1), 0.0)
    distances = np.full_like(slopes, _TAIL_DISTANCE_SD)
    for _ in range(_NUM_TAIL_DISTANCE_ITERATIONS):
        potentials = distances**2 / 2.0 + slopes * distances**3 / 6.0 - _TAIL_DISTANCE_SD**2 / 2.0
        distances = distances - potentials / (distances + slopes * distances**2 / 2.0)
    return np.asarray(directions * distances[:, None])


def _name_rows(potential: Potential, rows: np.ndarray) -> IncludedRows:
    """Return row indices by plate, in increasing order; empty without any."""
    return ((potential.plates[0].name, tuple(np.sort(rows).tolist())),) if rows.size else ()


def precompile_influential_rows(
    potential: Potential, arguments: Arguments, hierarchy: Preconditioner | None = None
) -> None:
    """Start the compilation of :func:`find_influential_rows`, or of that of groups."""
    is_too_large = hierarchy is None and potential.dim > HIGH_DIM
    if not _is_supported(potential, arguments) or is_too_large:
        return
    plate = potential.plates[0]
    num_positions = 2 * _NUM_ANTITHETIC_PAIRS + 1
    positions = jax.ShapeDtypeStruct((num_positions, potential.dim), potential.dtype)
    rows = jax.ShapeDtypeStruct((_count_rows_per_call(potential),), np.int32)
    indices = {plate.name: rows}
    aot_compile(_evaluate_remainder_variances, potential, arguments, positions, indices)
    if hierarchy is not None and _has_third_derivatives(hierarchy):
        center = jax.ShapeDtypeStruct((potential.dim,), potential.dtype)
        num_probes = hierarchy.factor.layout.num_effect_probes
        num_tails = _count_tails(hierarchy.factor.layout.effects_per_group)
        tails, units = (
            jax.ShapeDtypeStruct((num, potential.dim), potential.dtype)
            for num in (num_tails, num_probes)
        )
        vectors = center, tails, tails, units
        aot_compile(_evaluate_tail_gradients, potential, arguments, *vectors, indices)


def _count_rows_per_call(potential: Potential) -> int:
    is_high_dim = potential.dim > HIGH_DIM
    max_rows = _MAX_ROWS_PER_CALL_HIGH_DIM if is_high_dim else _MAX_ROWS_PER_CALL
    return min(max_rows, potential.plates[0].size)


def _split_rows(potential: Potential) -> list[np.ndarray]:
    """Return the indices of all rows in parts of the same length, of which the last may overlap."""
    size, num_rows = potential.plates[0].size, _count_rows_per_call(potential)
    starts = [min(start, size - num_rows) for start in range(0, size, num_rows)]
    return [np.arange(start, start + num_rows, dtype=np.int32) for start in starts]


def _has_third_derivatives(hierarchy: Preconditioner) -> bool:
    """Return True if the fit has third derivatives of the effects, as their noise matters."""
    return hierarchy.reference_hessian.third_derivatives is not None


def _is_supported(potential: Potential, arguments: Arguments) -> bool:
    """Return True if the influence of single observations can be computed and matters."""
    return (
        not (arguments.host_arrays or arguments.sharded_arrays)
        and potential.shards is None
        and len(potential.plates) == 1
        and potential.has_minibatches
        and not potential.is_stochastic
        and potential.local_latents is None
    )


@partial(jax.jit, static_argnames="potential")
def _evaluate_remainder_variances(
    potential: Potential, arguments: Arguments, positions: Array, indices: Indices
) -> Array:
    """Return the variances of some observations' even remainders about the first position."""
    values = jax.lax.map(lambda q: potential.pointwise_potentials(q, indices, arguments), positions)
    plus, minus = jnp.split(values[1:], 2)
    return jnp.var((plus + minus) / 2.0 - values[0], axis=0, ddof=1)


@partial(jax.jit, static_argnames="potential")
def _evaluate_tail_gradients(
    potential: Potential,
    arguments: Arguments,
    center: Array,
    displacements: Array,
    limited_displacements: Array,
    unit_effects: Array,
    indices: Indices,
) -> Array:
    """Return the largest remainders of some observations' gradients by effects in the tails.

    The remainder is that of the expansion to second order about the center: its norm over the
    effects, and the largest over displacements.

    :param limited_displacements: those in which gradients are expanded.
    """

    def compute_remainder(displacement: Array, limited: Array, unit_effect: Array) -> Array:
        """Return the remainder of the derivative along ``unit_effect``."""

        def derive(displacement: Array) -> Array:
            def evaluate(q: Array) -> Array:
                return potential.pointwise_potentials(q, indices, arguments)

            # Derivatives of a `jax.custom_vjp` exist in reverse mode only, of which this is the
            # transpose.
            values, pull_back = jax.vjp(evaluate, center + displacement)
            (along_effect,) = jax.linear_transpose(pull_back, values)((unit_effect,))
            return along_effect

        def derive_twice(displacement: Array) -> tuple[Array, Array]:
            return jax.jvp(derive, (displacement,), (limited,))

        zero = jnp.zeros_like(center)
        (at_center, first), (_, second) = jax.jvp(derive_twice, (zero,), (limited,))
        return derive(displacement) - (at_center + first + second / 2.0)

    def compute_norm(vectors: tuple[Array, Array]) -> Array:
        remainders = jax.lax.map(partial(compute_remainder, *vectors), unit_effects)
        return jnp.sqrt(jnp.square(remainders).sum(0))

    return jax.lax.map(compute_norm, (displacements, limited_displacements)).max(0)


def choose_num_included(
    gradients: np.ndarray, batch_size: int, step_size: float, min_included: int = 0
) -> tuple[int, float]:
    """Return how many observations every minibatch has to include, and the step size they allow.

    It is the smallest number for which the step size, limited by the gradients of the others, is
    0.9 of the longest possible one.

    :param gradients: remainders of the observations' gradients without weights, the first
        ``min_included`` of any size, the others in decreasing order. Observations with infinite
        ones, which may be overflows far from all chains, are included, but do not limit the step
        size.
    """
    size = len(gradients)
    max_included = max(min_included, int(_MAX_INFLUENTIAL_BATCH_FRACTION * batch_size))
    others = gradients[min_included:]
    finite = others[np.isfinite(others)]
    num_infinite = len(others) - len(finite)
    num_included = np.arange(min(min_included + num_infinite, max_included), max_included + 1)
    # The weight of a sampled observation grows with the number of those included.
    weights = (size - num_included) / (batch_size - num_included)
    num_finite_included = np.maximum(num_included - min_included - num_infinite, 0)
    largest = np.append(finite, 0.0)[num_finite_included]
    max_step_sizes = _MAX_VELOCITY_CHANGE_SD / np.maximum(weights * largest, _MIN_GRADIENT)
    allowed = np.minimum(max_step_sizes, step_size)
    best = int(np.argmax(allowed >= _SUFFICIENT_STEP_SIZE_RATIO * allowed.max()))
    return int(num_included[best]), float(max_step_sizes[best])


def choose_num_influential(remainder_variances: np.ndarray, batch_size: int) -> int:
    """Return how many of the observations with these variances every minibatch has to include."""
    size = len(remainder_variances)
    max_included = int(_MAX_INFLUENTIAL_BATCH_FRACTION * batch_size)
    decreasing = -np.sort(-remainder_variances)
    included_sums = np.concatenate([[0.0], np.cumsum(decreasing[:max_included])])
    remaining = np.maximum(remainder_variances.sum() - included_sums, 0.0)
    num = np.arange(len(remaining))
    # For a quadratic remainder r = d'Hd / 2 with standard normal d, Var r = tr(H^2) / 2, and
    # tr(H^2) is the variance of its gradient Hd: hence the factor 2.
    noise = 2.0 * (size - num) / (batch_size - num) * remaining
    best = int(np.argmin(noise))
    is_worth_it = (
        noise[0] > _MIN_GRADIENT_NOISE_VARIANCE
        and noise[best] < _MAX_REMAINING_NOISE_FRACTION * noise[0]
    )
    return best if is_worth_it else 0
